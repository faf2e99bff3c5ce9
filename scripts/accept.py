#!/usr/bin/env python3
"""The checks that are too long for `make test`, with their figures in docs/accept.md.

Resumable: what passed with the same program is not run again (target/accept/state.json); `--fresh` forgets it. Each check
is a function that returns its figure or raises Failed. Each has a small form among the tests.

    scripts/accept.py [--list] [--fresh] [--only NAME ...]
"""

import argparse
import datetime
import hashlib
import itertools
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
ZF = TARGET / "release" / "zf"
WORK = TARGET / "accept"
STATE = WORK / "state.json"
REPORT = ROOT / "docs" / "accept.md"
GOLDEN = ROOT / "tests" / "golden"
CARGO = os.environ.get("CARGO", "cargo")

# A check that hangs is a failed check.
LIMIT = 1800


class Failed(Exception):
    """A check that did not pass, and why."""


CHECKS = {}


def check(command):
    """Registers a function under its own name, with the command that a reader can repeat."""

    def register(function):
        CHECKS[function.__name__] = (function, command)
        return function

    return register


def run(command, env=None, limit=LIMIT):
    """Runs a command to its end and returns its output; its last lines are the reason where it fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"not over after {limit} s: {command}") from error
    except OSError as error:
        raise Failed(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        tail = " / ".join(done.stdout.strip().splitlines()[-4:])
        raise Failed(f"exit code {done.returncode}: {tail}")
    return done.stdout


def test(name, env=None):
    """Runs one test by its full name and returns what it printed."""
    command = [CARGO, "test", "--release", "-p", "zf-tests", "--test", "all", "--", "--exact", name, "--nocapture"]
    output = run(command, env)
    if "1 passed" not in output:
        raise Failed(f"there is no test {name}")
    return output


def train(name, keys):
    """Runs `zf train` on lines of TOML in a folder of its own; its steps and its summary."""
    folder = WORK / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    run([ZF, "train", folder / "run.toml", "--out", folder / "out"])
    steps = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "out" / "summary.json").read_text())
    shutil.rmtree(folder)
    return steps, summary


def tiny(model, **keys):
    """The keys of a tiny reference model; an underscore in a name stands for the dot after the section."""
    base = {
        "model.path": str(GOLDEN / model),
        "data.path": str(GOLDEN / "tokens.bin"),
        "data.sequence_length": 64,
        "data.order": "sequential",
        "log.tensorboard": False,
        "log.trace": False,
    }
    return base | {key.replace("_", ".", 1): value for key, value in keys.items()}


def adamw():
    return {"optim.kind": "adamw", "optim.lr": 1e-3, "optim.betas": [0.9, 0.95], "optim.weight_decay": 0.1}


@check("ZF_TEST_KILLS=20 cargo test --release -p zf-tests --test all -- --exact lifecycle::kill::a_run_survives_sigkill")
def twenty_kills():
    """SIGKILL at twenty random moments; losses and state of the end equal those of an undisturbed run."""
    output = test("lifecycle::kill::a_run_survives_sigkill", {"ZF_TEST_KILLS": "20"})
    seed = re.search(r"ZF_TEST_SEED=(\d+)", output)
    return f"20 kills, every resumption worked, same losses and state hash (ZF_TEST_SEED={seed[1] if seed else '?'})"


def exactness(model, dtype):
    """N x stage x bucket over 12 steps of 12 sequences: losses, norms and state hash are the same bits."""
    layouts = list(itertools.product([1, 2, 3, 4], [0, 1], ["25MB", "7KB", "1KB"]))
    first, different = None, []
    for ranks, stage, bucket in layouts:
        keys = tiny(
            model,
            run_steps=12,
            run_global_batch=12,
            run_micro_batch=1,
            run_exact=True,
            run_dtype=dtype,
            transport_ranks=ranks,
            partition_stage=stage,
            partition_bucket=bucket,
        )
        steps, summary = train(f"exact-{model}-{dtype}", keys | adamw())
        found = [(step["loss"], step["grad_norm"]) for step in steps], summary["state_hash"]
        first = first or found
        if found != first:
            different.append(f"N={ranks} stage {stage} bucket {bucket}")
    if different:
        raise Failed(f"{len(different)} of {len(layouts)} layouts differ: {', '.join(different)}")
    losses = [loss for loss, _ in first[0]]
    if len(losses) != 12 or not losses[-1] < losses[0]:
        raise Failed(f"nothing was learned: {losses}")
    return f"{len(layouts)} layouts, one state ({first[1][:12]}), loss {losses[0]:.4f} to {losses[-1]:.4f}"


for _model, _dtype in itertools.product(["tiny-llama", "tiny-gpt2"], ["float32", "bfloat16", "float16"]):

    def _exact(model=_model, dtype=_dtype):
        return exactness(model, dtype)

    _exact.__name__ = f"exact_{_model}_{_dtype}".replace("-", "_")
    _exact.__doc__ = f"{_model} in {_dtype}: " + exactness.__doc__
    check(f"zf train with run.exact on 4 rank counts x 2 stages x 3 buckets ({_model}, {_dtype})")(_exact)


REFERENCE = {
    "adamw": ({}, 3e-6),
    "adamw_clip": ({"run.clip": 1.0}, 3e-6),
    "adamw_cosine": ({"schedule.kind": "cosine", "schedule.warmup": 5, "schedule.min_ratio": 0.1}, 3e-6),
    "sgd_momentum": ({"optim.kind": "sgd", "optim.lr": 0.05, "optim.momentum": 0.9}, 3e-6),
    "bf16_adamw": ({"run.dtype": "bfloat16"}, 2e-3),
}


@check("zf train on the runs of tests/golden/reference.json, on four layouts each")
def reference_runs():
    """Thirty steps of every reference run on four layouts, against losses of plain PyTorch."""
    reference = json.loads((GOLDEN / "reference.json").read_text())["models"]
    worst = {}
    for model, runs in reference.items():
        for name, (keys, tolerance) in REFERENCE.items():
            if name not in runs["runs"]:
                continue
            expected = runs["runs"][name]["loss"]
            for ranks, stage, micro in [(1, 0, 8), (2, 0, 4), (2, 1, 2), (4, 1, 1)]:
                common = {"run.clip": 0.0} | ({} if "optim.kind" in keys else adamw())
                layout = tiny(
                    model,
                    run_steps=len(expected),
                    run_global_batch=8,
                    run_micro_batch=micro,
                    transport_ranks=ranks,
                    partition_stage=stage,
                )
                steps, _ = train(f"reference-{model}-{name}", layout | common | keys)
                apart = max(abs(step["loss"] - wanted) for step, wanted in zip(steps, expected, strict=True))
                kind = "bf16" if "bf16" in name else "float32"
                worst[kind] = max(worst.get(kind, 0.0), apart)
                if not apart <= tolerance:
                    raise Failed(f"{model} {name} N={ranks} stage {stage}: losses differ by {apart:.2e} > {tolerance}")
    return ", ".join(f"{kind}: losses within {apart:.1e}" for kind, apart in sorted(worst.items()))


@check("zf train recipes/demo.toml -o run.steps=60 (twice, the second time interrupted and resumed)")
def demo_resumed():
    """The recipe of `make demo`, shortened: interrupted by SIGTERM and resumed, it ends in the same state."""
    folder = WORK / "runs" / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    command = [str(ZF), "train", str(ROOT / "recipes" / "demo.toml"), "-o", "run.steps=60", "-o", "log.trace=false", "--out"]
    run([*command, folder / "whole"])
    part = folder / "part"
    child = subprocess.Popen([*command, str(part)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        metrics = part / "metrics.jsonl"
        end = time.monotonic() + LIMIT
        while child.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < 15):
            if time.monotonic() > end:
                raise Failed("no 15 steps in time")
            time.sleep(0.05)
        child.terminate()
        code = child.wait(LIMIT)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if code != 130:
        raise Failed(f"SIGTERM gave exit code {code}, expected 130")
    run([*command, part, "--resume", "auto"])
    whole, resumed = (json.loads((folder / name / "summary.json").read_text()) for name in ("whole", "part"))
    if whole["state_hash"] != resumed["state_hash"]:
        raise Failed(f"state {resumed['state_hash'][:12]}, undisturbed {whole['state_hash'][:12]}")
    run([ZF, "generate", part, "--prompt", "KING HENRY.", "--tokens", "20"])
    shutil.rmtree(folder)
    medians = whole["medians"]
    return (
        f"same state; loss {whole['final_loss']:.3f} after 60 steps, "
        f"{medians['tokens_per_second']:.0f} tokens/s on {whole['ranks']} ranks"
    )


def program():
    """What a passed check belongs to: the program and the tests' own sources."""
    digest = hashlib.sha256(ZF.read_bytes())
    for path in sorted((ROOT / "tests").rglob("*.rs")) + [pathlib.Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def write_atomic(path, text):
    """The file is the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def read_state():
    """What is known of each check."""
    return json.loads(STATE.read_text()) if STATE.exists() else {}


def report(state):
    """docs/accept.md: one row a check, in their order."""
    rows = []
    for name, (_, command) in CHECKS.items():
        entry = state.get(name)
        if entry:
            figure = entry["figure"].replace("|", "\\|").replace("\n", " ")
            rows.append(f"| {name} | `{command}` | {figure} | {entry['date']} |")
        else:
            rows.append(f"| {name} | `{command}` | not run yet | |")
    text = (
        "# Acceptance\n\n"
        "The checks of `make accept`, which are too long for `make test`; every one has a small form there. This file is\n"
        "written by `scripts/accept.py`. Figures are those of the machine and the day given.\n\n"
        "| check | command | figure | date |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    write_atomic(REPORT, text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="names and what they check")
    parser.add_argument("--fresh", action="store_true", help="run again what passed before")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(CHECKS), help="these checks alone")
    options = parser.parse_args()
    if options.list:
        for name, (function, _) in CHECKS.items():
            print(f"{name:28} {function.__doc__}")
        return 0
    if not ZF.is_file():
        print(f"error: {ZF} is missing; build it with `make build`", file=sys.stderr)
        return 2
    WORK.mkdir(parents=True, exist_ok=True)
    key, failed = program(), []
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    for name in options.only or CHECKS:
        function, _ = CHECKS[name]
        entry = read_state().get(name, {})
        if entry.get("passed") and entry.get("program") == key and not options.fresh:
            print(f"{name}: passed before")
            continue
        print(f"{name} ...", flush=True)
        started = time.monotonic()
        try:
            figure, passed = function(), True
        except Failed as error:
            figure, passed = f"FAILED: {error}", False
            failed.append(name)
        seconds = time.monotonic() - started
        print(f"{name}: {figure} ({seconds:.0f} s)", flush=True)
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
        figure = f"{figure} ({seconds:.0f} s, {machine})"
        # Read anew: another check may have run beside this one.
        state = read_state()
        state[name] = {"passed": passed, "program": key, "figure": figure, "date": date}
        write_atomic(STATE, json.dumps(state, indent=1) + "\n")
        report(state)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
