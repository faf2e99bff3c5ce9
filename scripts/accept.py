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


def toml(value):
    """A value as a run file has it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def train(name, keys, launch=None):
    """Runs `zf train` on lines of TOML in a folder of its own, in `launch` processes; its steps and its summary."""
    folder = WORK / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text("".join(f"{key} = {toml(value)}\n" for key, value in keys.items()))
    processes = [ZF, "launch", "-n", launch, "--"] if launch else [ZF]
    run([*processes, "train", folder / "run.toml", "--out", folder / "out"])
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


@check("ZF_TEST_RESUMES=41 cargo test --release -p zf-tests --test all -- --exact offload_life::resume::asynchronous_from_consecutive_steps")
def forty_resumptions():
    """Asynchronous ZenFlow, S = 4, R = 4 and 8, resumed from each of forty consecutive steps: losses and state of the end."""
    test("offload_life::resume::asynchronous_from_consecutive_steps", {"ZF_TEST_RESUMES": "41"})
    return "40 resumptions each, same losses and state hash"


@check("ZF_TEST_KILLS=20 cargo test --release -p zf-tests --test all -- --exact lifecycle::kill::a_run_survives_sigkill")
def twenty_kills():
    """SIGKILL at twenty random moments; losses and state of the end equal those of an undisturbed run."""
    output = test("lifecycle::kill::a_run_survives_sigkill", {"ZF_TEST_KILLS": "20"})
    seed = re.search(r"ZF_TEST_SEED=(\d+)", output)
    return f"20 kills, every resumption worked, same losses and state hash (ZF_TEST_SEED={seed[1] if seed else '?'})"


@check("ZF_TEST_MODELS=200 cargo test --release -p zf-tests --test all -- --exact random::any_layout_gives_the_bits_of_one_rank")
def random_models_exact():
    """Two hundred random models, each in four random layouts on one to four ranks: the bits of one rank."""
    output = test("random::any_layout_gives_the_bits_of_one_rank", {"ZF_TEST_MODELS": "200"})
    return f"{re.search(r'models of seeds .*', output)[0]}: same losses, norms and state hash"


@check("ZF_TEST_MODELS=200 cargo test --release -p zf-tests --test all -- --exact random::fast_layouts_differ_by_rounding")
def random_models_fast():
    """The same two hundred in fast mode with either reduce setting: what one rank gives, within rounding."""
    output = test("random::fast_layouts_differ_by_rounding", {"ZF_TEST_MODELS": "200"})
    return f"{re.search(r'models of seeds .*', output)[0]}: within rounding"


def scopes(ranks):
    """All scopes (p, g, o) on so many ranks: each divides the next, and o the ranks."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return [(p, g, o) for o in sizes for g in sizes if o % g == 0 for p in sizes if g % p == 0]


def exact_layouts(thorough):
    """Keys of runs that must all give the same bits."""
    for ranks, bucket in itertools.product([1, 2, 3, 4], ["25MB", "7KB", "1KB"] if thorough else ["7KB"]):
        for p, g, o in scopes(ranks):
            base = {
                "transport.ranks": ranks,
                "partition.bucket": bucket,
                "partition.scope": {"p": p, "g": g, "o": o},
            }
            yield base
            if thorough:
                yield base | {"transport.wrap": [{"kind": "blocking"}]}
            if p > 1:
                yield base | {"partition.prefetch": 0}
                yield base | {"partition.reshard_after_forward": False}
    for ranks, stage in itertools.product([2, 3], [0, 1, 2, 3]):
        yield {"transport.kind": "c10d", "launch": ranks, "partition.stage": stage}


def exactness(model, dtype, thorough):
    """Scopes x ranks x buckets x overlap x prefetch x transports over 12 steps: losses, norms and state are the same bits."""
    first, different, count = None, [], 0
    for layout in exact_layouts(thorough):
        keys = tiny(
            model, run_steps=12, run_global_batch=12, run_micro_batch=1, run_exact=True, run_dtype=dtype
        )
        launch = layout.pop("launch", None)
        steps, summary = train(f"exact-{model}-{dtype}", keys | adamw() | layout, launch)
        found = [(step["loss"], step["grad_norm"]) for step in steps], summary["state_hash"]
        first, count = first or found, count + 1
        if found != first:
            different.append(f"{launch or ''} {layout}")
    if different:
        raise Failed(f"{len(different)} of {count} layouts differ: {'; '.join(different)}")
    losses = [loss for loss, _ in first[0]]
    if len(losses) != 12 or not losses[-1] < losses[0]:
        raise Failed(f"nothing was learned: {losses}")
    return f"{count} layouts, one state ({first[1][:12]}), loss {losses[0]:.4f} to {losses[-1]:.4f}"


for _model, _dtype in itertools.product(["tiny-llama", "tiny-gpt2"], ["float32", "bfloat16", "float16"]):

    def _exact(model=_model, dtype=_dtype):
        return exactness(model, dtype, thorough=dtype == "float32")

    _exact.__name__ = f"exact_{_model}_{_dtype}".replace("-", "_")
    _exact.__doc__ = f"{_model} in {_dtype}: " + exactness.__doc__
    check(f"zf train with run.exact on all scopes of 1 to 4 ranks, by threads and processes ({_model}, {_dtype})")(_exact)


REFERENCE = {
    "adamw": ({}, 3e-6),
    "adamw_clip": ({"run.clip": 1.0}, 3e-6),
    "adamw_cosine": ({"schedule.kind": "cosine", "schedule.warmup": 5, "schedule.min_ratio": 0.1}, 3e-6),
    "sgd_momentum": ({"optim.kind": "sgd", "optim.lr": 0.05, "optim.momentum": 0.9}, 3e-6),
    "bf16_adamw": ({"run.dtype": "bfloat16"}, 2e-3),
}


@check("zf train on the runs of tests/golden/reference.json, 1, 2 and 4 ranks x stages 0 to 3 x both reduce settings")
def reference_runs():
    """Thirty steps of every reference run on any stage and number of ranks, against losses of plain PyTorch."""
    reference = json.loads((GOLDEN / "reference.json").read_text())["models"]
    worst = {}
    for model, runs in reference.items():
        for name, (keys, tolerance) in REFERENCE.items():
            if name not in runs["runs"]:
                continue
            expected = runs["runs"][name]["loss"]
            layouts = itertools.product([1, 2, 4], [0, 1, 2, 3], ["micro-batch", "boundary"])
            for ranks, stage, when in layouts:
                micro = 4 // ranks
                common = {"run.clip": 0.0} | ({} if "optim.kind" in keys else adamw())
                layout = tiny(
                    model,
                    run_steps=len(expected),
                    run_global_batch=8,
                    run_micro_batch=micro,
                    transport_ranks=ranks,
                    partition_stage=stage,
                    reduce_when=when,
                )
                steps, _ = train(f"reference-{model}-{name}", layout | common | keys)
                apart = max(abs(step["loss"] - wanted) for step, wanted in zip(steps, expected, strict=True))
                kind = "bf16" if "bf16" in name else "float32"
                worst[kind] = max(worst.get(kind, 0.0), apart)
                if not apart <= tolerance:
                    layout = f"N={ranks} stage {stage} {when}"
                    raise Failed(f"{model} {name} {layout}: losses differ by {apart:.2e} > {tolerance}")
    return ", ".join(f"{kind}: losses within {apart:.1e}" for kind, apart in sorted(worst.items()))


MEMORY = 24 << 20


def fits(layers, ranks, stage):
    """One rank's memory where a Llama of so many layers trains on the emulated device, else None."""
    keys = {
        "model.arch": "llama",
        "model.hidden_size": 128,
        "model.intermediate_size": 384,
        "model.num_hidden_layers": layers,
        "model.num_attention_heads": 4,
        "model.vocab_size": 256,
        "data.path": str(GOLDEN / "tokens.bin"),
        "data.sequence_length": 16,
        "run.steps": 2,
        "run.global_batch": ranks,
        "run.micro_batch": 1,
        "run.dtype": "bfloat16",
        "run.checkpoint": {"every": 0, "best": False},
        "device.kind": "emulated",
        "device.memory": f"{MEMORY}B",
        "transport.ranks": ranks,
        "partition.stage": stage,
        "log.trace": False,
        "log.tensorboard": False,
    }
    try:
        _, summary = train(f"largest-{ranks}-{stage}", keys)
    except Failed as error:
        if "memory" not in str(error):
            raise
        return None
    rank = max(summary["per_rank"], key=lambda rank: rank["memory"]["device_peak"])
    return summary["parameters"], rank["memory"]


def largest(ranks, stage):
    """Layers and memory of the largest model that trains, by doubling and halving."""
    good, best = 0, None
    step = 1
    while (found := fits(good + step, ranks, stage)) is not None:
        good, best, step = good + step, found, step * 2
    while step > 1:
        step //= 2
        if (found := fits(good + step, ranks, stage)) is not None:
            good, best = good + step, found
    if best is None:
        raise Failed(f"not even one layer fits under stage {stage} on {ranks} ranks")
    return good, best


@check("zf train of a growing Llama on device.kind = \"emulated\", stages 0 to 3, 1, 2 and 4 ranks")
def largest_model():
    """The largest Llama that trains on an emulated device, against what the formulas allow beside activations and buffers."""
    # Bytes a parameter with bfloat16 parameters and float32 gradients, by stage (ZeRO, section 5).
    states = {
        0: lambda n: 18,
        1: lambda n: 6 + 12 / n,
        2: lambda n: 2 + 16 / n,
        3: lambda n: 18 / n,
    }
    rows, apart, before = [], 0.0, {}
    for ranks, stage in [(1, 0), *itertools.product([2, 4], [0, 1, 2, 3])]:
        layers, (parameters, memory) = largest(ranks, stage)
        free = MEMORY - memory["activations"] - memory["buffers"]
        predicted = free / states[stage](ranks)
        apart = max(apart, abs(parameters / predicted - 1))
        rows.append(f"N={ranks} stage {stage}: {layers} layers, {parameters / 1e6:.2f} M ({parameters / predicted:.3f})")
        if ranks > 1 and parameters < before.get((ranks, stage - 1), 0):
            raise Failed(f"{rows[-1]} is less than under the stage before: {'; '.join(rows)}")
        before[ranks, stage] = parameters
    if apart > 0.10:
        raise Failed(f"{apart:.1%} from the formulas (limit 10 %): {'; '.join(rows)}")
    return f"{MEMORY >> 20} MiB, within {apart:.1%} of the formulas: " + "; ".join(rows)


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


ZENFLOW = json.loads((GOLDEN / "zenflow_reference.json").read_text())["runs"]


@check("zf train on the runs of tests/golden/zenflow_reference.json, 1 and 2 ranks x stages 0 to 3")
def zenflow_reference():
    """Forty steps of every reference run of ZenFlow on 1 and 2 ranks and all stages, against losses of a plain simulation."""
    worst, count = 0.0, 0
    for run, ranks, stage in itertools.product(ZENFLOW, [1, 2], [0, 1, 2, 3]):
        keys = tiny(
            "tiny-llama",
            run_steps=len(run["loss"]),
            run_global_batch=8,
            run_micro_batch=8 // ranks,
            run_clip=0.0,
            transport_ranks=ranks,
            partition_stage=stage,
        )
        offload = {
            "offload.kind": "zenflow",
            "offload.update_interval": run["interval"],
            "offload.asynchronous": run["asynchronous"],
            "offload.promotion": run["promotion"],
            "select.kind": "topk",
            "select.ratio": run["ratio"],
            "select.axis": run["axis"],
            "select.every": run["every"],
        }
        steps, _ = train("zenflow-reference", keys | adamw() | offload)
        apart = max(abs(step["loss"] - wanted) for step, wanted in zip(steps, run["loss"], strict=True))
        worst, count = max(worst, apart), count + 1
        if not apart <= 3e-6:
            raise Failed(f"{run['name']}, N={ranks} stage {stage}: losses differ by {apart:.2e}")
    return f"{count} runs, losses within {worst:.1e}"


def offload_layouts():
    """Keys of runs that must all give the bits of one rank, whatever is slow and wherever sums and states lie."""
    for ranks, stage in itertools.product([1, 2, 3, 4], [0, 1, 2, 3]):
        yield {"transport.ranks": ranks, "partition.stage": stage}
        yield {"transport.ranks": ranks, "partition.stage": stage, "offload.tier": "file"}
    for ranks, stage, accumulate in itertools.product([2, 4], [1, 3], ["host", "device"]):
        base = {"transport.ranks": ranks, "partition.stage": stage, "offload.accumulate": accumulate}
        yield base | {"offload.buffer": "1KiB", "offload.buffers": 2}
        yield base | {"host.bandwidth": "200MB/s"}
        link = {"kind": "emulated", "bandwidth": "200MB/s", "latency": "50us"}
        yield base | {"device.kind": "emulated", "device.memory": "64MiB", "device.link": link}
    for ranks, stage in [(2, 1), (3, 3)]:
        yield {"transport.kind": "c10d", "launch": ranks, "partition.stage": stage}


def offload_exactness(model, dtype):
    """ZenFlow in several forms on all stages, tiers, buffers, links and transports over 12 steps: the same bits within a form."""
    count = 0
    for form in [{}, {"offload.promotion": "late"}, {"offload.asynchronous": False}, {"offload.warmup": 2}]:
        first = None
        for layout in offload_layouts():
            keys = tiny(
                model, run_steps=12, run_global_batch=12, run_micro_batch=1, run_exact=True, run_dtype=dtype
            )
            launch = layout.pop("launch", None)
            offload = {
                "offload.kind": "zenflow",
                "offload.update_interval": 3,
                "select.kind": "topk",
                "select.ratio": 0.2,
                "select.every": 3,
            }
            steps, summary = train(f"offload-{model}-{dtype}", keys | adamw() | offload | form | layout, launch)
            found = [(step["loss"], step["grad_norm"]) for step in steps], summary["state_hash"]
            first, count = first or found, count + 1
            if found != first:
                raise Failed(f"{form} {launch or ''} {layout}: other bits than one rank")
    return f"{count} runs, one state for each form"


for _model, _dtype in [("tiny-llama", "float32"), ("tiny-llama", "bfloat16"), ("tiny-gpt2", "float16")]:

    def _offload(model=_model, dtype=_dtype):
        return offload_exactness(model, dtype)

    _offload.__name__ = f"offload_exact_{_model}_{_dtype}".replace("-", "_")
    _offload.__doc__ = f"{_model} in {_dtype}: " + offload_exactness.__doc__
    check(f"zf train with offload.kind = zenflow and run.exact on 1 to 4 ranks ({_model}, {_dtype})")(_offload)


@check(
    "ZF_TEST_MODELS=300 cargo test --release -p zf-tests --test all -- --exact "
    "offload::random::any_layout_and_setting_gives_the_bits_of_the_rules"
)
def offload_random_models():
    """Three hundred random models under random settings of ZenFlow and random layouts: the bits of a plain simulation."""
    output = test(
        "offload::random::any_layout_and_setting_gives_the_bits_of_the_rules", {"ZF_TEST_MODELS": "300"}
    )
    return f"{re.search(r'models of seeds .*', output)[0]}: same losses, masters and moments"


@check(
    "ZF_TEST_CHANGES=all cargo test --release -p zf-tests --test all -- --exact "
    "offload_life::absorb::from_one_kind_to_another_and_on"
)
def changes_of_kind():
    """Five kinds of offload, each changed in mid-window to each of seven others: the loss does not jump, and goes on falling."""
    test("offload_life::absorb::from_one_kind_to_another_and_on", {"ZF_TEST_CHANGES": "all"})
    return "35 changes, the loss goes on falling"


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
