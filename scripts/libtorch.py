#!/usr/bin/env python3
"""Makes `.libtorch` in the repository root a symlink to a usable libtorch 2.11.

Tried in this order: the folder named by LIBTORCH; what `.libtorch` points at already; an installed PyTorch 2.11; the
cache folder ${XDG_CACHE_HOME:-~/.cache}/zenflow; the package index, from which the CPU parts of PyTorch's wheel are
unpacked into the cache folder. Remove `.libtorch` to have the choice made anew.
"""

import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import zipfile

if sys.version_info < (3, 8):
    sys.exit("error: Python 3.8 or newer is needed, this is " + platform.python_version())

from fetch import (ROOT, NotFetched, Refusal, Wheel, cache_folder, check_space, folder_in_the_making, how_by_hand,
                   locked, publish_folder, run, say)

SERIES = "2.11"
VERSION = "2.11.0"
LINK = ROOT / ".libtorch"

TORCH = Wheel(
    "torch==2.11.0",
    "torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    "7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a",
)
# The wheel is a CUDA build, and its CPU library asks for these two even where no GPU is used.
CUPTI = Wheel(
    "nvidia-cuda-cupti==13.0.85",
    "nvidia_cuda_cupti-13.0.85-py3-none-manylinux_2_25_x86_64.whl",
    "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
)
CUDART = Wheel(
    "nvidia-cuda-runtime==13.0.96",
    "nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
    "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
)

# The three wheels (0.54 GB) and what is unpacked of them (0.52 GB) lie on the disk at the same time.
SPACE = 1_200_000_000

LOAD = "import ctypes, sys; [ctypes.CDLL(path) for path in sys.argv[1:]]"


def version_of(folder):
    """The version a libtorch folder states, or None."""
    try:
        return (folder / "build-version").read_text().strip()
    except OSError:
        pass
    for header in ("headeronly/version.h", "csrc/api/include/torch/version.h"):
        try:
            text = (folder / "include/torch" / header).read_text()
        except OSError:
            continue
        parts = [re.search(r"#define TORCH_VERSION_{} (\d+)".format(part), text)
                 for part in ("MAJOR", "MINOR", "PATCH")]
        if all(parts):
            return ".".join(part.group(1) for part in parts)
    return None


def fault_of(folder):
    """Why a folder cannot serve as libtorch 2.11, or None when it can."""
    if not folder.is_dir():
        return "is not a folder"
    for part in ("lib/libtorch_cpu.so", "lib/libc10.so", "include/torch/csrc/api/include/torch/torch.h"):
        if not (folder / part).is_file():
            return "has no {}".format(part)
    version = version_of(folder)
    if version is None:
        return "states no version (no build-version file, no torch/version.h)"
    if version.split("+")[0].rsplit(".", 1)[0] != SERIES:
        return "holds libtorch {}, {} is needed".format(version, SERIES)
    if (folder / "build-version").is_file() and version.split("+")[0] != VERSION:
        return "holds libtorch {}; the bindings accept {} alone".format(version, VERSION)
    return None


def load_fault(folder):
    """What the dynamic loader says against the folder's libraries, or None. Done in a process of its own."""
    libraries = [str(path) for path in (folder / "lib/libtorch.so", folder / "lib/libtorch_cpu.so") if path.is_file()]
    try:
        done = subprocess.run([sys.executable, "-c", LOAD] + libraries, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, timeout=300)
    except subprocess.TimeoutExpired:
        return "took longer than five minutes to load"
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["exit code {}".format(done.returncode)]
    return None if done.returncode == 0 else "does not load here ({})".format(lines[-1])


def from_variable():
    """The folder the person has named with LIBTORCH, which is used or refused, never passed over."""
    value = os.environ.get("LIBTORCH", "")
    if not value:
        return None
    folder = pathlib.Path(os.path.abspath(os.path.expanduser(value)))
    fault = fault_of(folder)
    if fault:
        raise Refusal("LIBTORCH={} {}; name another folder, or unset LIBTORCH to have one fetched".format(
            value, fault))
    fault = load_fault(folder)
    if fault:
        # Building against a CUDA libtorch on a machine without the CUDA libraries is legitimate.
        say("warning: LIBTORCH={} {}; programs built with it will not start".format(value, fault))
    return folder


def from_link():
    """What `.libtorch` points at, as long as it serves: changing it would rebuild every crate that links libtorch."""
    return pathlib.Path(os.path.realpath(LINK)) if fault_of(LINK) is None else None


def from_pytorch():
    """An installed PyTorch of this series, found without importing it."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    folder = pathlib.Path(spec.origin).resolve().parent
    fault = fault_of(folder) or load_fault(folder)
    if fault:
        say("the installed PyTorch at {} cannot be used: it {}".format(folder, fault))
        return None
    return folder


def extract(wheel, wanted, folder):
    """Unpacks the wheel's members for which `wanted(name)` gives a path below `folder`."""
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            target = None if member.is_dir() else wanted(member.filename)
            if target is None:
                continue
            path = folder / target
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, open(path, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            count += 1
    if count == 0:
        raise Refusal("{} holds none of the expected files".format(wheel.name))


def torch_member(name):
    """Where a file of PyTorch's wheel belongs in a CPU libtorch, or None."""
    if name.startswith("torch/include/"):
        return name[len("torch/"):]
    if name in ("torch/lib/libtorch_cpu.so", "torch/lib/libc10.so", "torch/lib/libgomp.so.1"):
        return name[len("torch/"):]
    return None


def one_library(library):
    """A choice for `extract`: the shared library of this name, whatever folder of the wheel it lies in."""
    return lambda name: "lib/" + library if name.rsplit("/", 1)[-1] == library else None


def from_index(final):
    """Fetches and unpacks the wheels into `final`."""
    check_space(final.parent, SPACE, "libtorch")
    say("libtorch {} for CPU is prepared once, in {} (540 MB to download)".format(VERSION, final))
    with folder_in_the_making(final) as temporary:
        wheels, folder = temporary / "wheels", temporary / "libtorch"
        wheels.mkdir()
        for wheel, wanted in ((CUPTI, one_library("libcupti.so.13")), (CUDART, one_library("libcudart.so.13")),
                              (TORCH, torch_member)):
            try:
                path = wheel.fetch(wheels)
            except NotFetched as error:
                names = [each.filename for each in (CUPTI, CUDART, TORCH)]
                raise Refusal("{}; {}; or set LIBTORCH to an unpacked libtorch {}".format(
                    error, how_by_hand(names), VERSION))
            say("unpacking {}".format(path.name))
            extract(path, wanted, folder)
        # The wheel's own libtorch.so pulls in the CUDA libraries.
        (folder / "lib/libtorch.so").symlink_to("libtorch_cpu.so")
        (folder / "build-version").write_text(VERSION + "+cpu\n")
        fault = fault_of(folder) or load_fault(folder)
        if fault:
            raise Refusal("the fetched libtorch {}; glibc 2.28 or newer is needed".format(fault))
        publish_folder(folder, final)


def from_cache():
    """The cached CPU libtorch, fetched first when it is not there."""
    final = cache_folder() / "libtorch-{}-cpu".format(VERSION)
    if fault_of(final) is not None:
        with locked(final.name):
            if fault_of(final) is not None:
                from_index(final)
    return final


def point_link_at(folder):
    """Sets `.libtorch`, and leaves it untouched when it already leads to `folder`."""
    if os.path.realpath(LINK) == os.path.realpath(folder):
        return
    if LINK.exists() and not LINK.is_symlink():
        raise Refusal("{} is not a symlink; move it away".format(LINK))
    replaced = LINK.is_symlink()
    temporary = LINK.with_name(".libtorch.tmp-{}".format(os.getpid()))
    if temporary.is_symlink():
        temporary.unlink()
    temporary.symlink_to(folder)
    os.replace(temporary, LINK)
    say("libtorch: {}".format(folder))
    if replaced and (ROOT / "target").is_dir() and shutil.which("cargo"):
        # Cargo sees the path alone, not where it leads: what was built against the other libtorch has to go.
        subprocess.run(["cargo", "clean", "--quiet", "--release", "-p", "torch-sys", "-p", "zf-sys"], cwd=ROOT,
                       stderr=subprocess.DEVNULL, timeout=600)


def main():
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Refusal("zenflow-rs runs on Linux x86-64, this is {} {}".format(platform.system(), platform.machine()))
    for source in (from_variable, from_link, from_pytorch, from_cache):
        folder = source()
        if folder is not None:
            point_link_at(folder)
            return


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(__doc__.strip())
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    run(main)
