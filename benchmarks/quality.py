#!/usr/bin/env python3
"""How much of AdamW's gain ZenFlow keeps, in fine-tuning a pretrained model on text it has not seen, and from scratch.

    python3 benchmarks/quality.py [--zf PATH] [--out DIR] [--seeds 1,2,3] [--steps 160] [--scratch-steps 240]
                                  [--rates 5e-4,1e-3,2e-3] [--cases NAME,...] [--core N] [--svg FILE]

A byte-level Llama learns plays (`make data`) and is exported as a Hugging Face folder. It then learns this repository's
Rust sources: with AdamW at each of the rates on the first seed, of which the best one for AdamW is kept, and at that rate
on every seed with AdamW and with ZenFlow in several settings. A seed decides the order of the sequences, from scratch
also the initial weights. The validation text is held out: one KiB from the middle of every twentieth file, of which nothing
is trained on. The gain is the fall of the validation loss. It comes fast at first and slowly later, so the tables also say
after how many steps AdamW was as low as ZenFlow in the end. One rank, one operator thread, float32.

Resumable: a run that is complete and was asked for in the same words is not run again. Writes quality.json into the
folder of the runs, a picture where `--svg` says, and the tables, in Markdown, on standard output.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT / "scripts")]

from curves import draw  # noqa: E402
from fetch import Refusal, run, say, sha256_of, write_atomically  # noqa: E402

# A run of some hundred small steps that takes longer than this hangs.
LIMIT = 600

SIZES = """arch = "llama"
vocab_size = 256
hidden_size = 128
intermediate_size = 344
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 256
rope_theta = 10000.0
rms_norm_eps = 1e-5
tie_word_embeddings = false"""
LENGTH = 128
PRETRAIN_STEPS, PRETRAIN_RATE = 600, 2e-3

ADAMW = {"offload.kind": "none"}


def zenflow(ratio, every, **more):
    """Settings of asynchronous ZenFlow with the columns of the greatest gradients."""
    settings = {"offload.kind": "zenflow", "offload.update_interval": 4, "offload.asynchronous": True,
                "select.kind": "topk", "select.ratio": ratio, "select.every": every}
    return {**settings, **{key.replace("__", "."): value for key, value in more.items()}}


# A host so slow that one update takes about three steps of this device, which `auto` has to find out. With a fixed interval
# the speed of the host changes no bit.
SLOW_HOST = "60MB/s"
CASES = {
    "adamw": ("AdamW", ADAMW),
    "k0.1": ("ZenFlow, k = 0.1, S = 4, R = 4", zenflow(0.1, 4)),
    "k0.1-r8": ("ZenFlow, k = 0.1, S = 4, R = 8", zenflow(0.1, 8)),
    "k0.05": ("ZenFlow, k = 0.05, S = 4, R = 4", zenflow(0.05, 4)),
    "auto": ("ZenFlow, k = 0.1, S and R automatic",
             zenflow(0.1, "auto", offload__update_interval="auto", host__bandwidth=SLOW_HOST)),
    "random": ("ZenFlow, random columns, k = 0.1, S = 4, R = 4", zenflow(0.1, 4, select__kind="random")),
    "warmup": ("ZenFlow, k = 0.1, S = 4, R = 4, 40 steps of warm-up", zenflow(0.1, 4, offload__warmup=40)),
}
FINE = ["adamw", "k0.1", "k0.1-r8", "k0.05", "auto", "random"]
SCRATCH = ["adamw", "k0.1"]
TITLES = {"fine": "Fine-tuning", "scratch": "From scratch"}


def toml(settings):
    """Dotted keys as TOML."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


class Bench:
    """The folder of the runs, the texts in it, and how a run is made or found."""

    def __init__(self, options):
        self.options = options
        self.out = options.out.resolve()
        self.text, self.held_out = self.out / "train.txt", self.out / "validation.txt"

    def texts(self):
        """Makes the two texts once: a later commit must not change them between two runs of a comparison."""
        if self.text.exists() and self.held_out.exists():
            return
        listed = subprocess.run(["git", "ls-files", "-z", "*.rs"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        train, validation = [], []
        for number, name in enumerate(sorted(filter(None, listed.decode().split("\0")))):
            data = (ROOT / name).read_bytes()
            if number % 20 == 0:
                middle = len(data) // 2
                validation.append(data[middle:middle + 1024])
            else:
                train.append(data)
        write_atomically(self.text, b"".join(train))
        write_atomically(self.held_out, b"".join(validation))

    def train(self, name, model, steps, seed, rate, settings, data=None, validate=40):
        """The folder of the run `name`, trained now unless it is there in the same words."""
        path, validation = data or (self.text, str(self.held_out))
        given = {
            "data.path": str(path), "data.sequence_length": LENGTH, "data.validation": validation,
            "run.steps": steps, "run.global_batch": 8, "run.micro_batch": 8, "run.dtype": "float32", "run.seed": seed,
            "run.clip": 1.0, "run.validate.every": validate, "run.validate.sequences": 176, "run.checkpoint.every": 0,
            "device.threads": 1, "transport.kind": "threads", "transport.ranks": 1,
            "optim.kind": "adamw", "optim.lr": rate, "optim.betas": [0.9, 0.95], "optim.weight_decay": 0.1,
            "schedule.kind": "cosine", "schedule.warmup": 20, "schedule.min_ratio": 0.1, **settings,
        }
        words = toml(given) + "\n[model]\n" + model + "\n"
        asked, folder = self.out / f"{name}.toml", self.out / name
        if asked.exists() and asked.read_text() == words and complete(folder):
            return folder
        say(f"training {name}")
        shutil.rmtree(folder, ignore_errors=True)
        write_atomically(asked, words.encode())
        self.zf("train", asked, "--out", folder)
        return folder

    def zf(self, *arguments):
        """Runs the program to its end."""
        command = [str(part) for part in (self.options.zf, *arguments)]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
        except FileNotFoundError:
            raise Refusal(f"{self.options.zf} is missing; `make build` makes it") from None
        except subprocess.TimeoutExpired:
            raise Refusal(f"`{' '.join(command)}` took more than {LIMIT} s") from None
        if done.returncode:
            raise Refusal(f"`{' '.join(command)}` failed:\n{done.stdout[-2000:]}")

    def pretrained(self):
        """The Hugging Face folder of the model that knows plays, and the run that made it."""
        plays = ROOT / "data" / "shakespeare.txt"
        if not plays.exists():
            raise Refusal(f"{plays} is missing; `make data` makes it")
        folder, exported = self.out / "pretrain", self.out / "pretrained"
        kept = complete(folder)
        self.train("pretrain", SIZES, PRETRAIN_STEPS, 1, PRETRAIN_RATE, ADAMW, (plays, 0.02), 100)
        if not kept or not (exported / "config.json").exists():
            shutil.rmtree(exported, ignore_errors=True)
            self.zf("export", folder, "--to", exported)
        return exported, folder


def complete(folder):
    """Whether a run folder's run came to its end."""
    try:
        return json.loads((folder / "summary.json").read_text())["complete"]
    except (OSError, ValueError, KeyError):
        return False


def records(folder):
    """The lines of a run's metrics."""
    with open(folder / "metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def validations(folder):
    """(steps done, validation loss), as measured."""
    return [(r["step"] + 1, r["validation_loss"]) for r in records(folder) if r["validation_loss"] is not None]


def final(folder):
    """The validation loss at the end, after the drain."""
    return validations(folder)[-1][1]


def intervals(folder):
    """Update intervals that an automatic run took, as {steps: share of the windows' steps}."""
    path = folder / "decisions.jsonl"
    if not path.exists():
        return None
    decisions = [json.loads(line) for line in path.read_text().splitlines()]
    ends = [each["update"] for each in decisions[1:]] + [len(records(folder))]
    total = {}
    for each, end in zip(decisions, ends):
        total[each["interval"]] = total.get(each["interval"], 0) + end - each["update"]
    return {str(interval): round(steps / sum(total.values()), 3) for interval, steps in sorted(total.items())}


def mean(values):
    """The arithmetic mean."""
    return sum(values) / len(values)


def deviation(values):
    """The standard error of the mean; None for a single value."""
    if len(values) < 2:
        return None
    middle = mean(values)
    return (sum((value - middle) ** 2 for value in values) / (len(values) - 1) / len(values)) ** 0.5


def steps_to(loss, at, losses):
    """Steps after which a falling curve first is at `loss`, between two measurements on a straight line; None if never."""
    points = list(zip(at, losses))
    for (step, high), (later, low) in zip(points, points[1:]):
        if low <= loss <= high:
            return step + (later - step) * (high - loss) / (high - low) if high > low else later
    return None


def compare(bench, part, model, steps, seeds, rate, cases):
    """Runs all cases on all seeds; losses before and after and the share of the gain kept, with the curves."""
    before = [final(bench.train(f"{part}-before-{seed}", model, 1, seed, 0.0, ADAMW)) for seed in seeds]
    folders = {case: [bench.train(f"{part}-{case}-{seed}", model, steps, seed, rate, CASES[case][1]) for seed in seeds]
               for case in cases}
    base = [final(folder) for folder in folders["adamw"]]
    result = {"rate": rate, "steps": steps, "before": before, "cases": {}}
    for case, of_case in folders.items():
        after = [final(folder) for folder in of_case]
        kept = [(start - end) / (start - best) for start, end, best in zip(before, after, base)]
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in of_case]
        curves = [[loss for _, loss in validations(folder)] for folder in of_case]
        training = [[record["loss"] for record in records(folder)] for folder in of_case]
        result["cases"][case] = {
            "name": CASES[case][0], "settings": CASES[case][1], "after": after, "kept": kept, "kept_mean": mean(kept),
            "kept_error": deviation(kept), "intervals": [intervals(folder) for folder in of_case],
            "state_hashes": [summary["state_hash"] for summary in summaries],
            "at": [step for step, _ in validations(of_case[0])],
            "validation": [mean(losses) for losses in zip(*curves)],
            "training": [mean(losses) for losses in zip(*training)],
        }
    adamw = result["cases"]["adamw"]
    at, losses = [0, *adamw["at"]], [mean(before), *adamw["validation"]]
    for of_case in result["cases"].values():
        of_case["adamw_steps"] = steps_to(of_case["validation"][-1], at, losses)
    return result


def table(part, result, seeds):
    """The table of one part, in Markdown."""
    losses = [f"seed {seed}" for seed in seeds]
    run_of = f"{TITLES[part].lower()}, {result['steps']} steps, rate {result['rate']:g}"
    yield f"| {run_of} | {' | '.join(losses)} | mean | gain kept | AdamW there at step |"
    yield "|---" * (len(seeds) + 4) + "|"

    def row(name, values, kept, steps):
        there = "never" if steps is None else f"{steps:.0f}"
        return f"| {name} | {' | '.join(f'{value:.4f}' for value in values)} | {mean(values):.4f} | {kept} | {there} |"

    yield row("before", result["before"], "0 %", 0)
    for case, of_case in result["cases"].items():
        error = of_case["kept_error"]
        kept = f"{100 * of_case['kept_mean']:.1f} %" + (f" ± {100 * error:.1f}" if error is not None else "")
        yield row(of_case["name"], of_case["after"], "100 %" if case == "adamw" else kept, of_case["adamw_steps"])


def work(options):
    """All runs, then everything that is written."""
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    bench = Bench(options)
    bench.out.mkdir(parents=True, exist_ok=True)
    bench.texts()
    exported, pretraining = bench.pretrained()
    model = f"path = {json.dumps(str(exported))}"
    seeds = options.seeds
    # A single rate needs no trial.
    tried = {rate: final(bench.train(f"rate-{rate:g}", model, options.steps, seeds[0], rate, ADAMW))
             for rate in options.rates if len(options.rates) > 1}
    rate = min(tried, key=tried.get) if tried else options.rates[0]
    results = {
        "texts": {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
                  for path in (bench.text, bench.held_out)},
        "pretraining": {"steps": PRETRAIN_STEPS, "validation": final(pretraining)},
        "seeds": seeds, "rates": {f"{rate:g}": loss for rate, loss in tried.items()},
        "fine": compare(bench, "fine", model, options.steps, seeds, rate, options.cases),
    }
    if options.scratch_steps:
        results["scratch"] = compare(bench, "scratch", SIZES, options.scratch_steps, seeds, options.scratch_rate, SCRATCH)
    write_atomically(bench.out / "quality.json", json.dumps(results, indent=1).encode())
    parts = [part for part in TITLES if part in results]
    if options.svg:
        write_atomically(options.svg, draw([(TITLES[part], results[part]) for part in parts]).encode())
    if tried:
        losses = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in tried.items())
        print(f"AdamW after each rate, seed {seeds[0]}: {losses}")
    if "auto" in options.cases:
        print("Intervals of auto, and their shares:", results["fine"]["cases"]["auto"]["intervals"])
    for part in parts:
        print()
        print("\n".join(table(part, results[part], seeds)))


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zf", type=pathlib.Path, default=ROOT / "target" / "release" / "zf", help="the program")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "quality", help="folder of the runs")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=160, help="steps of fine-tuning")
    parser.add_argument("--scratch-steps", type=int, default=240, help="steps from scratch; 0: none")
    parser.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")],
                        default=[5e-4, 1e-3, 2e-3], help="learning rates of which the best for AdamW is taken")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=FINE,
                        help=f"cases of fine-tuning, of {', '.join(CASES)}")
    parser.add_argument("--scratch-rate", type=float, default=2e-3, help="learning rate from scratch")
    parser.add_argument("--core", type=int, help="bind everything to this core")
    parser.add_argument("--svg", type=pathlib.Path, help="where to write the picture of the curves")
    options = parser.parse_args()
    if not options.seeds or not options.rates:
        parser.error("at least one seed and one rate")
    if "adamw" not in options.cases or not set(options.cases) <= set(CASES):
        parser.error(f"--cases: `adamw` and any of {', '.join(list(CASES)[1:])}")
    run(lambda: work(options))


if __name__ == "__main__":
    main()
