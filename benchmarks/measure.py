"""Runs the processes of one measurement on cores of their own and takes step times from the lines they write.

Both sides write one JSON object per step (`step`, `loss`, `seconds.step`), so both are read in the same way, and both are
ended when enough steps have been seen: neither spends time on a last checkpoint.
"""

import ctypes
import json
import os
import pathlib
import signal
import statistics
import subprocess
import time

POLL = 0.05
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class Failed(Exception):
    """A measurement that did not come about, and why."""


class Process:
    """A process with its output in a file, and its metrics in another."""

    def __init__(self, command, cores, metrics, log, env=None):
        self.command = [str(part) for part in command]
        self.cores = cores
        self.metrics = pathlib.Path(metrics)
        self.log = pathlib.Path(log)
        self.env = env
        self.child = None

    def start(self):
        """Starts it on its cores; it dies with this script.

        It stays in this script's session: Linux shares processor time out by session, so with sessions of their own two
        processes would get twice the time of one with two threads wherever the machine is not quiet."""
        cores = set(self.cores)

        def prepare():
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.sched_setaffinity(0, cores)

        with open(self.log, "wb") as log:
            self.child = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env,
                                          preexec_fn=prepare)

    def lines(self):
        """The whole lines written so far."""
        try:
            text = self.metrics.read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]

    def last_words(self):
        """The end of its output, for a message."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-6:]) or "no output"


def children(pid):
    """Processes under `pid`, itself included."""
    found = [pid]
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [each for child in task.read_text().split() for each in children(int(child))]
        except OSError:
            pass
    return found


def rank_of(pid, task):
    """Which rank a thread works for: its process's, under a launcher, or the number at the end of its name."""
    environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    for entry in environment:
        if entry.startswith(b"LOCAL_RANK="):
            return int(entry.split(b"=")[1])
    name = (task / "comm").read_text().strip()
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else None


def pin(pid, cores):
    """Puts each rank's threads under `pid` on that rank's core; how many ranks were seen."""
    ranks = set()
    for process in children(pid):
        for task in pathlib.Path(f"/proc/{process}/task").glob("*"):
            try:
                rank = rank_of(process, task)
                if rank is None or rank >= len(cores):
                    continue
                if os.sched_getaffinity(int(task.name)) != {cores[rank]}:
                    os.sched_setaffinity(int(task.name), {cores[rank]})
                ranks.add(rank)
            except OSError:
                # It has ended in the meantime.
                continue
    return len(ranks)


def end(processes):
    """Kills what still runs and waits until it is gone, descendants included: the next measurement needs the cores."""
    running = [process.child for process in processes if process.child is not None]
    descendants = [pid for child in running for pid in children(child.pid)]
    for child in running:
        if child.poll() is None:
            child.kill()
    for child in running:
        child.wait(timeout=60)
    deadline = time.monotonic() + 30
    while any(pathlib.Path(f"/proc/{pid}/task").is_dir() and not is_zombie(pid) for pid in descendants):
        if time.monotonic() > deadline:
            raise Failed("processes of the last measurement do not end")
        time.sleep(POLL)


def is_zombie(pid):
    """Whether the process has ended and waits to be collected."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def measure(processes, warm, steps, seconds, pinned=None, limit=300):
    """Step times (medians) and losses of processes that run side by side.

    The first `warm` steps of each are left out, and so is what one does before all are that far; then at least `steps`
    steps of each and `seconds` seconds are measured. `pinned` are the cores of the ranks of a process that runs more than
    one of them. The result has a list `seconds` with one median per process, `loss` with the first and that after
    `warm + steps` steps, and `wall`: the mean step by this script's clock, as a check."""
    deadline = time.monotonic() + limit
    first, begun, seen, ranks = None, 0.0, {}, 0
    try:
        for process in processes:
            process.start()
        while True:
            time.sleep(POLL)
            lines = [process.lines() for process in processes]
            if first is None and pinned:
                ranks = pin(processes[0].child.pid, pinned)
            counts = [len(each) for each in lines]
            if first is None and min(counts) >= warm:
                first, begun = counts, time.monotonic()
                if pinned and ranks != len(pinned):
                    raise Failed(f"threads of {ranks} ranks were found, {len(pinned)} were expected")
            for index, count in enumerate(counts):
                seen.setdefault((index, count), time.monotonic())
            if first is not None and all(count >= start + steps for count, start in zip(counts, first)):
                if time.monotonic() > begun + seconds:
                    break
            for process in processes:
                if process.child.poll() is not None:
                    raise Failed(f"{process.command[0]} ended with {process.child.returncode}: {process.last_words()}")
            if time.monotonic() > deadline:
                raise Failed(f"not over after {limit} s: {' '.join(process.command)}: {processes[0].last_words()}")
    finally:
        end(processes)
    taken = [each[start:] for each, start in zip(lines, first)]
    wall = [(seen[index, count] - seen[index, start]) / (count - start)
            for index, (start, count) in enumerate(zip(first, counts))]
    return {
        "seconds": [statistics.median(line["seconds"]["step"] for line in each) for each in taken],
        "wall": wall,
        "loss": [[each[0]["loss"], each[warm + steps - 1]["loss"]] for each in lines],
    }


def busy(seconds=0.5):
    """The part of the machine's processor time that is in use, or withheld by its host, while this script sleeps."""

    def read():
        fields = [int(field) for field in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    total, idle = read()
    time.sleep(seconds)
    total_after, idle_after = read()
    return 1 - (idle_after - idle) / max(total_after - total, 1)
