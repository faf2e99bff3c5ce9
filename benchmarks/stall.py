"""Stalls of a device that waits for its host: recipes/stall.toml with the published proportions, scaled to this machine.

Llama-2-7B on four A100 (ZenFlow, 2025, read off its chart): device step 0.65 s, host update 4.6 s, each transfer 0.5 s. A run
without offload gives the device step of this machine; the emulated link and host are then slowed down so that bytes and updates take
as long in proportion. Copies and updates are real. Run it on a machine that does nothing else."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent.parent
MODEL = HERE / "recipes/stall-model.toml"
DEVICE, HOST, TRANSFER = 0.65, 4.6, 0.5  # seconds, published
STATES = 2 * 3 * 4  # bytes read and written an element: master and two moments in float32
WIRE = 2  # bytes of a gradient and of a parameter on the link, bfloat16
LEFT_OUT = 16  # first steps: before the first update is visible, and while the interval is found


def run(command):
    print("$", " ".join(map(str, command)), flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def device_step(zf, recipe, folder):
    run([zf, "train", recipe, "--out", folder, "-o", "run.steps=10", "-o", "log.trace=false"])
    return statistics.median(line["seconds"]["step"] for line in lines(folder)[2:])


def rates(step, parameters):
    """Bytes a second of the link each way, and of the host's workers."""
    link = WIRE * parameters / (step * TRANSFER / DEVICE)
    host = (STATES + 2 * WIRE) * parameters / (step * HOST / DEVICE)
    return link, host


def calibrate(zf, out):
    """This machine's device step in seconds, and the rates of link and host in bytes a second that go with it. Makes `out`."""
    if out.exists():
        sys.exit(f"{out} exists; remove it or name another folder with --out")
    out.mkdir(parents=True)
    step = device_step(zf, MODEL, out / "calibration")
    parameters = json.loads((out / "calibration/summary.json").read_text())["parameters"]
    link, host = rates(step, parameters)
    print(f"calibration: {parameters} parameters, device step {step * 1e3:.0f} ms; link {link / 1e6:.1f} MB/s each way, host "
          f"{host / 1e6:.1f} MB/s: a transfer takes {step * TRANSFER / DEVICE * 1e3:.0f} ms, a host update "
          f"{step * HOST / DEVICE * 1e3:.0f} ms", flush=True)
    return step, link, host


def slowed(link, host):
    """The settings that give link and host these rates."""
    return ["-o", f'device.link={{ bandwidth = "{link / 1e3:.3f}KB/s", latency = "10us" }}', "-o", f"host.bandwidth={host / 1e3:.3f}KB/s"]


def case(folder):
    steady = lines(folder)[LEFT_OUT:]
    summary = json.loads((folder / "summary.json").read_text())
    seconds = [line["seconds"] for line in steady]
    stalls = sorted(line["stall"] + line["update"] for line in seconds)
    return {
        "step": statistics.mean(line["step"] for line in seconds),
        "stall": statistics.mean(line["stall"] for line in seconds),
        "median": statistics.median(line["step"] for line in seconds),
        "p99": stalls[min(len(stalls) - 1, int(0.99 * len(stalls)))],
        "interval": steady[-1].get("interval"),
        "loss": steady[-1]["loss"],
        "link": [sum(line["link_bytes"][way] for line in steady) / len(steady) for way in ("to_host", "to_device", "moves")],
        "parameters": summary["parameters"],
    }


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--zf", type=pathlib.Path, default=HERE / "target/release/zf")
    arguments.add_argument("--out", type=pathlib.Path, default=HERE / "runs/stall")
    arguments.add_argument("--steps", type=int, default=64)
    arguments = arguments.parse_args()
    step, link, host = calibrate(arguments.zf, arguments.out)
    cases = arguments.out / "cases"
    run([arguments.zf, "ablate", HERE / "recipes/stall.toml", "--out", cases,
         *slowed(link, host), "-o", f"run.steps={arguments.steps}"])
    names = ["no-offload", "zero-offload", "zenflow-s4", "zenflow-auto"]
    found = {name: case(cases / "cases" / name) for name in names}
    base, zero = found["no-offload"]["step"], found["zero-offload"]["step"]
    print("\n| case | S | step, ms | of no offload | of ZeRO-Offload's speed | stall, ms | 99 % of stall + update, of the median step | "
          "to host, to device, moves, bytes a step | loss |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in names:
        f = found[name]
        print(f"| {name} | {f['interval'] or '-'} | {f['step'] * 1e3:.0f} | {f['step'] / base:.2f} | {zero / f['step']:.2f} | "
              f"{f['stall'] * 1e3:.1f} | {f['p99'] / f['median']:.2f} | {', '.join(f'{b:.0f}' for b in f['link'])} | {f['loss']:.3f} |")
    saved = 1 - found["zenflow-auto"]["stall"] / found["zero-offload"]["stall"]
    print(f"\nstall of zenflow-auto: {saved:.1%} less than that of ZeRO-Offload (published: 85 %)")
    (arguments.out / "stall.json").write_text(json.dumps({"step": step, "link": link, "host": host, "cases": found}, indent=1))
    run([arguments.zf, "timeline", cases, "--out", arguments.out / "timeline.svg"])


if __name__ == "__main__":
    main()
