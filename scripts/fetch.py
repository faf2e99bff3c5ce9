"""What the set-up scripts share: the cache folder, checksums, locks, atomic writes and calls of pip.

Standard library only, Python 3.8 or newer. A script's work is a function given to `run`, which turns a `Refusal`
into one readable message and exit code 2, and makes Ctrl-C and SIGTERM unwind, so that temporary folders go away.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent

# A download of half a gigabyte on a slow line takes a while; nothing waits longer than this.
PIP_SECONDS = 2 * 3600
LOCK_SECONDS = PIP_SECONDS


class Refusal(Exception):
    """Something the person at the keyboard has to change; the message says what."""


class NotFetched(Refusal):
    """The package index did not give a file."""


def say(message):
    """One line of progress on standard error."""
    print(message, file=sys.stderr, flush=True)


def run(work):
    """Runs `work()` as the whole script and exits with 0, 2 (refused) or 130 (interrupted)."""

    def interrupted(_signal, _frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    try:
        work()
    except Refusal as refusal:
        say("error: {}".format(refusal))
        sys.exit(2)
    except KeyboardInterrupt:
        say("interrupted; nothing half-made was left")
        sys.exit(130)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            say("error: the disk is full ({}); nothing half-made was left".format(error.filename or error))
        else:
            say("error: {}".format(error))
        sys.exit(2)


def cache_folder():
    """`${XDG_CACHE_HOME:-~/.cache}/zenflow`, made when missing. A relative XDG_CACHE_HOME is ignored, as its
    specification demands."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    folder = pathlib.Path(base) / "zenflow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal("cannot make the cache folder {}: {}; set XDG_CACHE_HOME to a writable folder".format(
            folder, error.strerror))
    return folder


@contextlib.contextmanager
def locked(name):
    """Holds the file lock `name` in the cache folder. The kernel drops it when the process ends, however it ends."""
    path = cache_folder() / (name + ".lock")
    with open(path, "w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Refusal("another process has held {} for {} hours; end it and try again".format(
                        path, LOCK_SECONDS // 3600))
                if not told:
                    say("waiting for another process that is preparing {}".format(name))
                    told = True
                time.sleep(0.5)
        yield


@contextlib.contextmanager
def folder_in_the_making(final):
    """A temporary folder beside `final`, removed on the way out unless the body has renamed it. Call it under the
    lock of `final`: folders that a killed run has left are then known to be stale, and removed first."""
    for stale in final.parent.glob(final.name + ".tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix=final.name + ".tmp-", dir=final.parent))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish_folder(folder, final):
    """Makes the finished `folder` appear as `final` in one step."""
    # Thousands of small files: one sync of everything is far cheaper than one for each.
    os.sync()
    if final.exists():
        shutil.rmtree(final)
    folder.rename(final)


def write_atomically(path, data):
    """Writes the bytes to a temporary name, syncs and renames; a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix="." + path.name + ".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def sha256_of(path):
    """The SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def check_sha256(path, expected):
    """Refuses a file that is not the one this repository was made with."""
    found = sha256_of(path)
    if found != expected:
        raise Refusal(
            "{} has SHA-256 {}, expected {}: the download is damaged or not the file that was asked for; "
            "try again, or another package index".format(path.name, found, expected))


def check_space(folder, needed, what):
    """Refuses early when `folder` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refusal(
            "{} needs {:.1f} GB in {}, {:.1f} GB are free; make room, or set XDG_CACHE_HOME to another disk".format(
                what, needed / 1e9, folder, free / 1e9))


def require_pip():
    """Refuses when `python3 -m pip` does not work."""
    done = subprocess.run([sys.executable, "-m", "pip", "--version"], stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL, timeout=120)
    if done.returncode != 0:
        raise Refusal("{} has no pip; on Debian and Ubuntu: apt-get install python3-pip".format(sys.executable))


def pip(arguments, temporary, quiet=False):
    """Runs pip with its temporary files under `temporary`; True when it succeeded. What pip prints goes to standard
    error, where a person sees the progress."""
    # A person's own defaults for `--user` or `--target` would clash with the arguments given here.
    environment = dict(os.environ, TMPDIR=str(temporary), PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1",
                       PIP_ROOT_USER_ACTION="ignore", PIP_NO_INPUT="1")
    environment.pop("PIP_TARGET", None)
    command = [sys.executable, "-m", "pip"] + arguments + ["--no-cache-dir", "--retries", "2"]
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL if quiet else sys.stderr,
                              stderr=subprocess.DEVNULL if quiet else None, env=environment, timeout=PIP_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def hand_folder():
    """Where a person without a network puts files fetched elsewhere."""
    return cache_folder() / "by-hand"


def how_by_hand(filenames):
    """The advice for a machine without a network."""
    return "without a network, fetch {} from a Python package index on another machine, put {} into {} and run this " \
        "again".format(", ".join(filenames), "it" if len(filenames) == 1 else "them", hand_folder())


class Wheel:
    """One wheel of the package index: what pip calls it, the file's name, and its checksum."""

    def __init__(self, requirement, filename, sha256):
        self.requirement = requirement
        self.filename = filename
        self.sha256 = sha256

    def fetch(self, folder):
        """The path of the verified wheel: the one a person has put into `hand_folder()`, else a download
        into `folder`."""
        own = hand_folder() / self.filename
        if own.is_file():
            check_sha256(own, self.sha256)
            return own
        require_pip()
        # The tags are given outright, so that every local Python fetches the same file, whose checksum is known.
        python, abi, platforms = self.filename[:-len(".whl")].rsplit("-", 3)[1:]
        arguments = ["download", "--no-deps", "--only-binary=:all:", "--dest", str(folder),
                     "--platform", platforms.split(".")[0], "--python-version", "311"]
        if python.startswith("cp"):
            arguments += ["--implementation", "cp", "--abi", abi]
        say("fetching {}".format(self.requirement))
        if not pip(arguments + [self.requirement], folder):
            raise NotFetched("pip could not fetch {} (see above)".format(self.requirement))
        path = folder / self.filename
        if not path.is_file():
            raise Refusal("pip fetched another file than {} for {}; check the configured package index".format(
                self.filename, self.requirement))
        check_sha256(path, self.sha256)
        return path
