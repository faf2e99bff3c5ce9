#!/usr/bin/env python3
"""zf beside PyTorch's FSDP2 on the same model, data and cores, in one run.

    python3 benchmarks/fsdp2.py [--quick] [--dtypes float32,bfloat16] [--rounds 5] [--cases NAME,...] [--zf PATH]
                                [--fresh] [--record]

Two ranks, one core and one operator thread each: ZeRO stages 0 to 3 of zf over threads and over Gloo, FSDP2 and DDP over
Gloo, and for each side two independent one-rank runs, which is what two ranks could reach without any communication.
PyTorch is installed into ${XDG_CACHE_HOME:-~/.cache}/zenflow/peer-venv the first time. Rounds are interleaved, every other
one backwards, and ratios are medians of the ratios within a round. Finished measurements are kept in
target/bench-fsdp2.json: an interrupted run goes on; `--fresh`, another program or other settings begin anew. `--record`
writes the table into docs/benchmarks.md. Exit code 1 where a limit is missed.
"""

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT / "scripts")]

import peer  # noqa: E402
import report  # noqa: E402
from fetch import Refusal, run, say, write_atomically  # noqa: E402
from measure import Failed, Process, busy, measure  # noqa: E402

KEPT = ROOT / "target" / "bench-fsdp2.json"
RANKS = 2
# More than any measurement takes; all processes are ended before.
STEPS = 100_000

FULL = {
    "sizes": {"hidden": 512, "layers": 8, "intermediate": 1376, "heads": 8, "vocabulary": 8192},
    "length": 256, "micro_batch": 4, "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1,
    # A measurement: steps to warm up, then at least so many steps and seconds.
    "warm": 1, "steps": 2, "seconds": 4.0,
}
QUICK = dict(FULL, sizes={"hidden": 128, "layers": 2, "intermediate": 344, "heads": 4, "vocabulary": 1024},
             length=64, seconds=1.0)
DTYPES = ["float32", "bfloat16"]

# What is measured in every round, and what in the first alone because no limit depends on it.
LIMITED = ["zf-alone", "zf-stage-0", "zf-stage-1", "zf-stage-2", "zf-stage-3", "fsdp2"]
CASES = [*LIMITED, "zf-gloo-0", "zf-gloo-3", "ddp", "torch-alone"]

# Variables of a launcher around this script would speak of another world.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def parameters(sizes):
    """Parameters of the Llama: embedding, head, blocks of seven matrices and two norms, last norm."""
    hidden, inner = sizes["hidden"], sizes["intermediate"]
    block = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    return 2 * sizes["vocabulary"] * hidden + sizes["layers"] * block + hidden


def write_tokens(path, settings):
    """Token ids of which few are frequent, so that a few steps are enough for the loss to fall."""
    draw = random.Random(1).random
    count = 64 * RANKS * settings["micro_batch"] * settings["length"] + 1
    tokens = (int(settings["sizes"]["vocabulary"] * draw() ** 4) for _ in range(count))
    path.write_bytes(b"".join(token.to_bytes(2, "little") for token in tokens))


def run_file(settings, dtype, data, transport, ranks, stage, with_activation):
    """The run file of one zf run; it is ended before its last step."""
    sizes = settings["sizes"]
    tables = {
        "model": {
            "arch": "llama", "hidden_size": sizes["hidden"], "num_hidden_layers": sizes["layers"],
            "intermediate_size": sizes["intermediate"], "num_attention_heads": sizes["heads"],
            "num_key_value_heads": sizes["heads"], "vocab_size": sizes["vocabulary"],
            "max_position_embeddings": settings["length"], "tie_word_embeddings": False,
        },
        "data": {"path": str(data), "sequence_length": settings["length"], "order": "sequential"},
        "run": {
            "steps": STEPS, "global_batch": ranks * settings["micro_batch"],
            "micro_batch": settings["micro_batch"], "dtype": dtype, "seed": 1, "exact": False, "clip": 0.0,
            "checkpoint.every": 0,
        },
        "device": {"kind": "cpu", "threads": 1},
        "transport": {"kind": transport} | ({"ranks": ranks} if transport == "threads" else {}),
        "partition": {"kind": "zero", "stage": stage},
        "optim": {"kind": "adamw", "lr": settings["lr"], "betas": settings["betas"], "eps": 1e-8,
                  "weight_decay": settings["weight_decay"]},
        "schedule": {"kind": "constant"},
        "log": {"every": 1, "tensorboard": False, "trace": False},
    }
    if with_activation:
        tables["activation"] = {"kind": "keep"}
    return "\n".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
                     for name, table in tables.items())


def free_port():
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Bench:
    """Everything that stays the same over a run of the benchmark."""

    def __init__(self, zf, python, settings, cores, folder):
        self.zf, self.python, self.settings, self.cores, self.folder = zf, python, settings, cores, folder
        self.parameters = parameters(settings["sizes"])
        self.data = folder / "tokens.bin"
        write_tokens(self.data, settings)
        stages = subprocess.run([zf, "stages"], stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
        self.with_activation = re.search(r"^activation\b", stages, re.MULTILINE) is not None

    def zf_process(self, folder, dtype, cores, transport="threads", ranks=1, stage=0):
        """One `zf train`, or one `zf launch` of it."""
        folder.mkdir()
        file = folder / "run.toml"
        file.write_text(run_file(self.settings, dtype, self.data, transport, ranks, stage, self.with_activation))
        command = [self.zf, "train", file, "--out", folder / "out"]
        if transport == "c10d":
            command[1:1] = ["launch", "-n", str(ranks), "--"]
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHER} | {"OMP_NUM_THREADS": "1"}
        return Process(command, cores, folder / "out" / "metrics.jsonl", folder / "log", env)

    def torch_process(self, folder, dtype, kind, rank, world, port):
        """One rank of PyTorch, with the variables that torchrun sets."""
        folder.mkdir()
        job = {key: self.settings[key] for key in ("sizes", "length", "micro_batch", "lr", "betas", "weight_decay")}
        metrics = folder / "metrics.jsonl"
        job |= {"kind": kind, "dtype": dtype, "parameters": self.parameters, "data": str(self.data), "out": str(metrics),
                "steps": STEPS}
        env = peer.environment() | {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1,
        }
        env = {name: str(value) for name, value in env.items()}
        command = [self.python, HERE / "torch_rank.py", json.dumps(job)]
        core = self.cores[rank if world > 1 else int(folder.name)]
        return Process(command, [core], metrics, folder / "log", env)

    def processes(self, case, dtype, folder):
        """What a case starts, and the cores of the ranks of a process that has several."""
        numbers = range(RANKS)
        if case == "zf-alone":
            return [self.zf_process(folder / str(n), dtype, [self.cores[n]]) for n in numbers], None
        if case == "torch-alone":
            return [self.torch_process(folder / str(n), dtype, "alone", 0, 1, 0) for n in numbers], None
        if case in ("fsdp2", "ddp"):
            port = free_port()
            return [self.torch_process(folder / str(n), dtype, case, n, RANKS, port) for n in numbers], None
        transport, stage = re.fullmatch(r"zf-(stage|gloo)-(\d)", case).groups()
        transport = {"stage": "threads", "gloo": "c10d"}[transport]
        return [self.zf_process(folder / "0", dtype, self.cores, transport, RANKS, int(stage))], self.cores

    def run_case(self, case, dtype):
        """One measurement: tokens a second of both ranks together, and the first and last loss."""
        warm, steps, seconds = (self.settings[key] for key in ("warm", "steps", "seconds"))
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=case + "-") as folder:
            processes, pinned = self.processes(case, dtype, pathlib.Path(folder))
            found = measure(processes, warm, steps, seconds, pinned)
            if case.startswith("zf"):
                self.check_parameters(processes[0])
        # Ranks that wait for each other have one step time; independent runs have one each.
        tokens = self.settings["micro_batch"] * self.settings["length"]
        times = found["seconds"] if case.endswith("-alone") else [max(found["seconds"])] * RANKS
        for seconds, wall in zip(times, found["wall"]):
            if wall > 1.1 * seconds + 0.05:
                say(f"  warning: {case}: {seconds * 1e3:.0f} ms a step as reported, {wall * 1e3:.0f} ms by the clock")
        loss = [statistics.mean(each) for each in zip(*found["loss"])]
        if not loss[1] < loss[0]:
            raise Failed(f"nothing was learned: loss {loss[0]:.4f}, then {loss[1]:.4f}")
        return {"tokens_per_second": sum(tokens / seconds for seconds in times), "seconds": max(times), "loss": loss}

    def check_parameters(self, process):
        """Refuses a comparison of different models."""
        said = re.search(r"([\d,]+) parameters in", process.log.read_text(errors="replace"))
        if said is None or int(said[1].replace(",", "")) != self.parameters:
            raise Failed(f"zf names {said and said[1]} parameters, {self.parameters} were expected")


def identity(zf, settings, cores):
    """Stands for all that a kept measurement depends on."""
    digest = hashlib.sha256(zf.read_bytes())
    for name in ("torch_rank.py", "measure.py", "fsdp2.py"):
        digest.update((HERE / name).read_bytes())
    digest.update(json.dumps([settings, cores, peer.RECIPE]).encode())
    return digest.hexdigest()


def kept_results(path, name, fresh):
    """Measurements of an earlier, unfinished run."""
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(path.read_text())
        if not fresh and kept["identity"] == name:
            say(f"{len(kept['results'])} measurements are kept from {kept['date']}; --fresh measures them again")
            return kept
    return {"identity": name, "date": datetime.date.today().isoformat(), "busy": [], "results": {}}


def program(given):
    """The zf to be measured: the one given, or that of this repository, built first."""
    if given:
        path = pathlib.Path(given).resolve()
        if not os.access(path, os.X_OK):
            raise Refusal(f"--zf {given}: there is no such program")
        return path
    done = subprocess.run(["make", "--silent", "build", "PYTHON=" + sys.executable], cwd=ROOT, timeout=3600,
                          stdout=sys.stderr)
    if done.returncode != 0:
        raise Refusal("zf could not be built (see above)")
    return ROOT / "target" / "release" / "zf"


def measurements(rounds, dtypes, cases):
    """The order of all measurements; every other round runs backwards, so that a drift hits all cases alike."""
    for number in range(rounds):
        row = [case for case in CASES if case in cases and (number == 0 or case in LIMITED)]
        for dtype in dtypes:
            for case in row if number % 2 == 0 else row[::-1]:
                yield number, dtype, case


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and two rounds: does everything work?")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, help="default: 5, with --quick 2")
    parser.add_argument("--cases", default=",".join(CASES), help="default: %(default)s")
    parser.add_argument("--zf", help="the program to be measured, instead of building it")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--record", action="store_true", help="write the table into docs/benchmarks.md")
    given = parser.parse_args()
    given.dtypes, given.cases = given.dtypes.split(","), given.cases.split(",")
    given.rounds = given.rounds or (2 if given.quick else 5)
    for name, known in (("dtypes", DTYPES), ("cases", CASES)):
        wrong = [each for each in getattr(given, name) if each not in known]
        if wrong:
            parser.error(f"--{name}: unknown {', '.join(wrong)}; expected some of {', '.join(known)}")
    if given.rounds < 1 or given.quick and given.record:
        parser.error("--rounds is at least 1, and figures of --quick are not for the record")
    return given


def main():
    given = options()
    cores = sorted(os.sched_getaffinity(0))[:RANKS]
    if len(cores) < RANKS:
        raise Refusal(f"the comparison needs {RANKS} processor cores, {len(cores)} may be used here")
    zf, python = program(given.zf), peer.prepared()
    settings = QUICK if given.quick else FULL
    path = KEPT.with_name("bench-fsdp2-quick.json") if given.quick else KEPT
    kept = kept_results(path, identity(zf, settings, cores), given.fresh)
    (ROOT / "target").mkdir(exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="bench-fsdp2-", dir=ROOT / "target"))
    failed = []
    try:
        bench, started = Bench(zf, python, settings, cores, folder), time.monotonic()
        for number, dtype, case in measurements(given.rounds, given.dtypes, given.cases):
            key = f"{dtype}/{case}/{number}"
            if key in kept["results"] or any(key.startswith(each) for each in failed):
                continue
            kept["busy"].append(busy())
            try:
                result = bench.run_case(case, dtype)
            except Failed as failure:
                # The other cases go on; this one is not tried again.
                say(f"round {number + 1} {dtype} {case}: {failure}")
                failed.append(f"{dtype}/{case}/")
                continue
            kept["results"][key] = result
            write_atomically(path, json.dumps(kept, indent=1).encode())
            say(f"round {number + 1} {dtype} {case}: {result['tokens_per_second']:.0f} tokens/s, "
                f"{result['seconds'] * 1e3:.0f} ms a step, loss {result['loss'][0]:.3f} to {result['loss'][1]:.3f} "
                f"({time.monotonic() - started:.0f} s)")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text, missed = report.table(kept, settings, RANKS, given.rounds, given.dtypes, bench.parameters)
    print(text)
    if given.record:
        report.record(ROOT / "docs" / "benchmarks.md", kept, text)
    # A tiny model on a machine that does other things says nothing about speed.
    if failed or missed and not given.quick:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
