"""The host's AdamW beside torch.optim.AdamW(fused=True) and DeepSpeed's CPUAdam, on arrays of one size, one thread each.

DeepSpeed's two source files are fetched and compiled with the flags of its own builder, against the PyTorch of `make bench-peer`. An
update reads four float32 arrays and writes three: 28 bytes an element."""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import sysconfig
import tarfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "scripts")]

import peer  # noqa: E402
from fetch import cache_folder  # noqa: E402

VERSION = "0.18.2"
ELEMENTS = 1 << 24
BYTES = 28 * ELEMENTS

MEASURE = """
import sys, time, json, torch
sys.path.insert(0, sys.argv[1])
n, rounds = int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
def best(step):
    times = []
    for _ in range(rounds):
        start = time.perf_counter(); step(); times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
p = torch.nn.Parameter(torch.full((n,), 0.5)); p.grad = torch.full((n,), 1e-3)
fused = torch.optim.AdamW([p], lr=1e-3, fused=True)
fused.step()
found = {"torch fused": best(fused.step)}
import zf_cpu_adam as ds
a, g, m, v = (torch.full((n,), x) for x in (0.5, 1e-3, 1e-3, 1e-3))
ds.create_adam(0, 1e-3, 0.9, 0.95, 1e-8, 0.1, True, False)
count = [0]
def step():
    count[0] += 1
    ds.adam_update(0, count[0], 1e-3, 0.9, 0.95, 1e-8, 0.1, True, a, g, m, v)
step()
found["DeepSpeed CPUAdam"] = best(step)
print(json.dumps(found))
"""


def built(python):
    """A folder with DeepSpeed's CPUAdam as a Python module."""
    folder = pathlib.Path(cache_folder()) / f"cpu-adam-{VERSION}"
    module = folder / "zf_cpu_adam.so"
    if module.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "deepspeed", f"deepspeed=={VERSION}",
                    "-d", str(folder)], check=True)
    with tarfile.open(next(folder.glob("deepspeed-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = folder / f"deepspeed-{VERSION}" / "csrc"
    torch = next(pathlib.Path(python).resolve().parent.parent.glob("lib/python*/site-packages/torch"), None)
    torch = torch or next(pathlib.Path(python).parent.parent.glob("lib/python*/site-packages/torch"))
    code = [str(source / "adam" / name) for name in ("cpu_adam.cpp", "cpu_adam_impl.cpp")]
    flags = ["-O3", "-std=c++17", "-g", "-Wno-reorder", "-march=native", "-fopenmp", "-D__AVX512__", "-D__DISABLE_CUDA__"]
    includes = [source / "includes", torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    partial = folder / "partial.so"
    subprocess.run(["c++", *flags, "-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=zf_cpu_adam", *[f"-I{path}" for path in includes],
                    *code, "-o", str(partial), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"], check=True)
    partial.rename(module)
    return folder


def peers(rounds):
    python = peer.prepared()
    folder = built(python)
    done = subprocess.run([str(python), "-c", MEASURE, str(folder), str(ELEMENTS), str(rounds)], check=True, capture_output=True,
                          text=True, env={**peer.environment(), "OMP_NUM_THREADS": "1"})
    return json.loads(done.stdout.splitlines()[-1])


def own(cargo):
    done = subprocess.run([cargo, "bench", "--profile", "release", "-p", "zf-optim", "--bench", "adamw", "--", "^adamw/host$"],
                          check=True, capture_output=True, text=True, cwd=HERE.parent)
    number, unit = re.search(r"time:\s+\[\S+ \S+ (\S+) (\S+)", done.stdout).groups()
    return float(number) * {"ms": 1e-3, "µs": 1e-6, "s": 1.0}[unit]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cargo", default=os.environ.get("CARGO", "cargo"))
    arguments.add_argument("--rounds", type=int, default=15)
    arguments = arguments.parse_args()
    found = {}
    # Side by side: each in turn, three times, and the median of each.
    for _ in range(3):
        for name, seconds in {"zf host": own(arguments.cargo), **peers(arguments.rounds)}.items():
            found.setdefault(name, []).append(seconds)
    ours = statistics.median(found["zf host"])
    print("| AdamW, 16 Mi float32, one thread | ms | GB/s | time of zf's |\n|---|---|---|---|")
    for name, times in found.items():
        seconds = statistics.median(times)
        print(f"| {name} | {seconds * 1e3:.1f} | {BYTES / seconds / 1e9:.1f} | {seconds / ours:.2f} |")


if __name__ == "__main__":
    main()
