"""PyTorch 2.11 for the CPU, in a virtual environment of its own in the cache folder.

The wheel of the package index is a CUDA build of 530 MB whose libraries ask for ten CUDA libraries that no run on the CPU
ever calls; as packages these take another 3 GB. In their place lie empty libraries of the same names, made by the C
compiler, so that the loader is content; `libcudart` and `libcupti`, which are called while PyTorch starts, are the real ones.
"""

import os
import pathlib
import subprocess
import sys

from fetch import (Refusal, cache_folder, check_space, folder_in_the_making, how_by_hand, locked, pip, publish_folder,
                   require_pip, say)

VERSION = "2.11.0"
NAME = "peer-venv"
# Names what was installed, so that an environment made by another version of this file is made anew.
MARK = "peer.txt"
RECIPE = "torch {} cpu, recipe 1\n".format(VERSION)

# Nothing is resolved: PyTorch would bring the CUDA libraries in.
PACKAGES = [
    "torch==" + VERSION, "nvidia-cuda-cupti==13.0.*", "nvidia-cuda-runtime==13.0.*", "filelock", "typing-extensions>=4.10",
    "sympy>=1.13.3", "mpmath<1.4", "networkx>=2.5.1", "jinja2", "MarkupSafe>=2.0", "fsspec>=0.8.5",
]
SPACE = 3_000_000_000

# Python resolves every function of an extension while loading it, unless told otherwise; the empty libraries have none.
STARTUP = "import os, sys\nsys.setdlopenflags(os.RTLD_LAZY)\n"

STUBS = [
    "libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libcufft.so.12", "libcufile.so.0", "libcurand.so.10",
    "libcusparse.so.12", "libcusparseLt.so.0", "libnccl.so.2", "libnvshmem_host.so.3",
]
# Functions are looked up when they are first called, which never happens; what is here is looked up on loading.
ON_LOADING = {
    "libnvshmem_host.so.3": "void nvshmem_init(void) { __builtin_trap(); }\n"
                            "void nvshmemi_get_mem_handle(void) { __builtin_trap(); }\n"
                            "char nvshmemi_device_only_state[4096];\n",
}
# The version of a library's symbols is its name, but for one.
SYMBOL_VERSION = {"libnvshmem_host.so.3": "NVSHMEM"}

PROBE = ("import torch, torch.distributed as d, torch.distributed.fsdp as f; x = torch.ones(64, 64); "
         "assert (x @ x).sum() == 64**3 and f.fully_shard and d.is_gloo_available(); print(torch.__version__)")


def environment():
    """Variables for PyTorch's processes: those of a person that would change what is measured are left out."""
    # Without kept bytecode every start of PyTorch takes six seconds instead of two.
    dropped = ("LD_BIND_NOW", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "TORCH_LOGS",
               "TORCH_DISTRIBUTED_DEBUG")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    # NumPy is not installed, and nothing here needs it.
    return {**kept, "PYTHONWARNINGS": "ignore"}


def python_of(folder):
    """The environment's interpreter."""
    return folder / "bin" / "python"


def whole(folder):
    """Whether the environment was finished by this recipe and its interpreter still exists."""
    try:
        return (folder / MARK).read_text() == RECIPE and python_of(folder).exists()
    except OSError:
        return False


def probe(python):
    """What stands against PyTorch in this environment, or None."""
    done = subprocess.run([str(python), "-c", PROBE], env=environment(), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=300)
    if done.returncode == 0 and done.stdout.decode().strip().startswith(VERSION):
        return None
    lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "exit code {}".format(done.returncode)


def make_stubs(folder, temporary):
    """Puts the empty libraries beside PyTorch's own, where its run path looks last."""
    compiler = os.environ.get("CC", "cc")
    for name in STUBS:
        source, versions = temporary / "stub.c", temporary / "stub.map"
        source.write_text(ON_LOADING.get(name, ""))
        versions.write_text("{} {{ global: *; }};\n".format(SYMBOL_VERSION.get(name, name)))
        command = [compiler, "-shared", "-fPIC", "-nostdlib", "-Wl,-soname," + name,
                   "-Wl,--version-script," + str(versions), "-o", str(folder / name), str(source)]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
        except OSError as error:
            raise Refusal("{}: {}; a C compiler is needed (on Debian and Ubuntu: apt-get install gcc)".format(
                compiler, error.strerror))
        if done.returncode != 0:
            raise Refusal("{} could not make {}: {}".format(
                compiler, name, done.stdout.decode(errors="replace").strip()))


def make(final):
    """Makes the environment. It holds no absolute path that matters, so it can be renamed when it is finished."""
    check_space(final.parent, SPACE, "PyTorch for the comparison")
    require_pip()
    say("PyTorch {} for the comparison is installed once, in {} (550 MB to download, 1.2 GB kept)".format(
        VERSION, final))
    with folder_in_the_making(final) as temporary:
        folder = temporary / "venv"
        done = subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=300)
        if done.returncode != 0:
            raise Refusal("no virtual environment could be made: {}; on Debian and Ubuntu: apt-get install "
                          "python3-venv".format(done.stdout.decode(errors="replace").strip()))
        packages = next(folder.glob("lib/python*/site-packages"))
        if not pip(["install", "--no-deps", "--only-binary=:all:", "--no-compile", "--target", str(packages)] + PACKAGES,
                   temporary):
            raise Refusal("pip could not install PyTorch {} (see above); {}".format(
                VERSION, how_by_hand(["the packages of benchmarks/peer.py"])))
        (packages / "sitecustomize.py").write_text(STARTUP)
        make_stubs(packages / "torch" / "lib", temporary)
        fault = probe(python_of(folder))
        if fault:
            raise Refusal("PyTorch {} was installed but does not start: {}".format(VERSION, fault))
        (folder / MARK).write_text(RECIPE)
        publish_folder(folder, final)


def prepared():
    """The interpreter of the environment, which is made first when it is not there."""
    if sys.version_info < (3, 10):
        raise Refusal("PyTorch {} needs Python 3.10 or newer, this is {}.{}; run the script with a newer one".format(
            VERSION, *sys.version_info[:2]))
    final = pathlib.Path(cache_folder()) / NAME
    with locked(NAME):
        if not whole(final):
            make(final)
    return python_of(final)
