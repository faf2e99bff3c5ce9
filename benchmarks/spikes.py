"""Whether choosing columns again, or a host that is held up, shows in the steps of a device: ZenFlow alone, many steps.

Link and host have the proportions of benchmarks/stall.py. First some hundred steps with the automatic interval, columns chosen
again every second window. Then S = 20, of which the host needs less than half, with the host's thread stopped (ptrace) for half of
every second window. Run it on a machine that does nothing else; Linux only."""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import time

import stall

ZENFLOW = ["-o", "offload.kind=zenflow", "-o", "offload.gradient_rule=false", "-o", "select.kind=topk", "-o", "select.ratio=0.1", "-o",
           'select.wrap=[{ kind = "hysteresis", margin = 0.5 }]']
LEFT_OUT = 24  # first steps: the interval is found, and the host comes into step
WINDOW = 20  # updates, where the host is stopped
SEIZE, INTERRUPT, DETACH, ALL = 0x4206, 0x4207, 17, 0x40000000  # <sys/ptrace.h>, __WALL of <sys/wait.h>


def train(zf, link, host, steps, interval, every):
    return [zf, "train", stall.MODEL, *stall.slowed(link, host), *ZENFLOW, "-o", f"run.steps={steps}", "-o", f"offload.update_interval={interval}",
            "-o", f"select.every={every}"]


def quantile(values, part):
    values = sorted(values)
    return values[min(len(values) - 1, int(part * len(values)))]


def choices(zf, link, host, folder, steps):
    """Steps that choose columns again beside those that do not."""
    stall.run([*train(zf, link, host, steps + LEFT_OUT, "auto", 16), "--out", folder])
    lines = stall.lines(folder)[LEFT_OUT:]
    median = statistics.median(line["seconds"]["step"] for line in lines)
    lost = lambda lines: [line["seconds"]["stall"] + line["seconds"]["update"] for line in lines]
    chose = [line for line in lines if line["turnover"] is not None]
    turnover = [line["turnover"] for line in chose]
    # What moves may still be coming in the step after.
    steps_of = {line["step"] + after for line in chose for after in (0, 1)}
    print(f"\n{len(lines)} steps, S = {lines[-1]['interval']}, {len(chose)} choices, turnover {min(turnover):.2f} to {max(turnover):.2f} (mean "
          f"{statistics.mean(turnover):.2f}); step {median * 1e3:.0f} ms (median), {statistics.mean(line['seconds']['step'] for line in lines) * 1e3:.0f} (mean)")
    print("| stall + update, of the median step | 50 % | 90 % | 99 % | most |\n|---|---|---|---|---|")
    for name, part in [("all steps", lines), ("steps that choose, and the next", [line for line in lines if line["step"] in steps_of]),
                       ("others", [line for line in lines if line["step"] not in steps_of])]:
        print(f"| {name} | " + " | ".join(f"{quantile(lost(part), q) / median:.3f}" for q in (0.5, 0.9, 0.99, 1)) + " |")
    return quantile(lost(lines), 0.99) / median


class Stopped:
    """A thread that does not run within the block."""

    def __init__(self, thread):
        self.thread = thread
        self.ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self.ptrace.argtypes = [ctypes.c_long] * 4

    def call(self, request):
        if self.ptrace(request, self.thread, 0, 0):
            raise OSError(ctypes.get_errno(), f"ptrace of thread {self.thread}: {os.strerror(ctypes.get_errno())}")

    def __enter__(self):
        self.call(SEIZE)
        self.call(INTERRUPT)
        os.waitpid(self.thread, ALL)

    def __exit__(self, *_):
        self.call(DETACH)


def thread_of(process, name):
    for task in pathlib.Path(f"/proc/{process}/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            return int(task.name)
    raise SystemExit(f"process {process} has no thread {name}")


def wait_for(process, folder, steps):
    """Until so many steps are written down; whether the run still goes on."""
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return True


def held_up(zf, link, host, folder, windows):
    """The host is stopped for half of every second window."""
    # Columns are chosen once: a choice waits for what the host hands over.
    steps = windows * WINDOW + 1
    command = [*map(str, train(zf, link, host, steps, WINDOW, (windows + 1) * WINDOW)), "--out", str(folder)]
    print("$", *command, flush=True)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for window in range(3, windows, 2):
        if wait_for(process, folder, window * WINDOW + 1):
            with Stopped(thread_of(process.pid, "zf-host-0")):
                wait_for(process, folder, window * WINDOW + 1 + WINDOW // 2)
    if process.wait():
        raise SystemExit(f"exit code {process.returncode}")
    lines = stall.lines(folder)
    # What the host does in a window is waited for in the first step of the next.
    mean = lambda window: statistics.mean(line["seconds"]["step"] for line in lines[window * WINDOW + 1:(window + 1) * WINDOW + 1])
    stopped, free = [mean(window) for window in range(3, windows, 2)], [mean(window) for window in range(2, windows, 2)]
    print(f"\nS = {WINDOW}, the host stopped for {WINDOW // 2} steps of every second window: {statistics.mean(stopped) * 1e3:.0f} ms a step "
          f"in those windows, {statistics.mean(free) * 1e3:.0f} in the others")
    return statistics.mean(stopped) / statistics.mean(free) - 1


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--zf", type=pathlib.Path, default=stall.HERE / "target/release/zf")
    arguments.add_argument("--out", type=pathlib.Path, default=stall.HERE / "runs/spikes")
    arguments.add_argument("--steps", type=int, default=330)
    arguments.add_argument("--windows", type=int, default=8, help="of which every second one is held up")
    arguments = arguments.parse_args()
    step, link, host = stall.calibrate(arguments.zf, arguments.out)
    spikes = choices(arguments.zf, link, host, arguments.out / "choices", arguments.steps)
    slower = held_up(arguments.zf, link, host, arguments.out / "held-up", arguments.windows)
    print(f"\n99 % of stall + update: {spikes:.3f} of the median step (at most 0.2: {'holds' if spikes <= 0.2 else 'missed'})")
    print(f"a host held up for half a window: steps {slower:+.1%} (less than 5 %: {'holds' if slower < 0.05 else 'missed'})")
    (arguments.out / "spikes.json").write_text(json.dumps({"step": step, "link": link, "host": host, "p99": spikes, "held_up": slower}, indent=1))


if __name__ == "__main__":
    main()
