"""The table of the comparison with PyTorch, and whether its limits hold."""

import statistics

from fetch import Refusal, write_atomically

BEGIN, END = "<!-- benchmarks/fsdp2.py writes from here -->", "<!-- to here -->"

NAMES = {
    "zf-alone": "zf, two independent runs",
    "zf-stage-0": "zf stage 0, threads", "zf-stage-1": "zf stage 1, threads", "zf-stage-2": "zf stage 2, threads",
    "zf-stage-3": "zf stage 3, threads", "zf-gloo-0": "zf stage 0, Gloo", "zf-gloo-3": "zf stage 3, Gloo",
    "fsdp2": "PyTorch FSDP2, Gloo", "ddp": "PyTorch DDP, Gloo", "torch-alone": "PyTorch, two independent runs",
}
STAGES = ["zf-stage-0", "zf-stage-1", "zf-stage-2", "zf-stage-3"]
OF_ALONE, OF_STAGE_0 = 0.95, 0.95
OF_FSDP2 = {"float32": 1.15, "bfloat16": 1.35}

# A machine that does other things at the same time measures those too.
QUIET = 0.1

# Two models that start alike and see the same tokens lose alike. Their random starts differ.
SAME_LOSS = 0.25


def ratio(results, dtype, case, other):
    """The median over rounds of the ratio of two cases within a round, or None where they never met."""
    rounds = {key.rsplit("/", 1)[1] for key in results if key.startswith(f"{dtype}/{case}/")}
    both = [(f"{dtype}/{case}/{number}", f"{dtype}/{other}/{number}") for number in rounds]
    pairs = [results[one]["tokens_per_second"] / results[two]["tokens_per_second"]
             for one, two in both if two in results]
    return statistics.median(pairs) if pairs else None


def limits(results, dtype):
    """What is demanded, as (text, figure, limit)."""
    for stage in STAGES:
        yield f"{NAMES[stage]} / two independent runs", ratio(results, dtype, stage, "zf-alone"), OF_ALONE
    for stage in STAGES:
        yield f"{NAMES[stage]} / FSDP2", ratio(results, dtype, stage, "fsdp2"), OF_FSDP2[dtype]
    yield "stage 3 / stage 0", ratio(results, dtype, "zf-stage-3", "zf-stage-0"), OF_STAGE_0


def cell(value, form):
    """A figure, or a dash."""
    return "" if value is None else form.format(value)


def rows(results, dtype, rounds):
    """The lines of one type's table."""
    yield f"| {dtype} | tokens/s | step | of two independent zf runs | of FSDP2 | loss |"
    yield "|---|---|---|---|---|---|"
    for case, name in NAMES.items():
        found = [results[key] for number in range(rounds) if (key := f"{dtype}/{case}/{number}") in results]
        if not found:
            continue
        speed = [each["tokens_per_second"] for each in found]
        seconds = statistics.median(each["seconds"] for each in found)
        first, last = (statistics.median(each["loss"][index] for each in found) for index in (0, 1))
        spread = f" ({min(speed):,.0f} to {max(speed):,.0f})" if len(speed) > 1 else ""
        yield (f"| {name} | {statistics.median(speed):,.0f}{spread} | {seconds * 1e3:.0f} ms "
               f"| {cell(ratio(results, dtype, case, 'zf-alone'), '{:.3f}')} "
               f"| {cell(ratio(results, dtype, case, 'fsdp2'), '{:.3f}')} | {first:.3f} to {last:.3f} |")


def processor():
    """The machine in a few words, and what it has for bfloat16, on which the speed of that type depends."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        lines = [line.partition(":") for line in file]
    names = [value.strip() for key, _, value in lines if key.strip() == "model name"]
    flags = next((value.split() for key, _, value in lines if key.strip() == "flags"), [])
    units = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
    unit = next((unit for flag, unit in units.items() if flag in flags), "no AVX2")
    return f"{len(names)} x {names[0] if names else 'unknown processor'} ({unit})"


def table(kept, settings, ranks, rounds, dtypes, parameters):
    """The whole text in Markdown, and the limits that are missed."""
    results, sizes = kept["results"], settings["sizes"]
    usual, highest = statistics.median(kept["busy"] or [0.0]), max(kept["busy"], default=0.0)
    out = [
        f"{kept['date']}, {processor()}, PyTorch and libtorch 2.11. A Llama of {sizes['layers']} layers of {sizes['hidden']} "
        f"(intermediate {sizes['intermediate']}, {sizes['heads']} heads, vocabulary {sizes['vocabulary']}; {parameters:,} "
        f"parameters), sequences of {settings['length']}, {settings['micro_batch']} a rank and step, {ranks} ranks, "
        "one core and one operator thread each. "
        f"Medians of {rounds} interleaved rounds (lowest to highest in brackets); a ratio is the median of the ratios "
        f"within a round. Between measurements the machine was {usual:.0%} busy with other things (median; at most "
        f"{highest:.0%}).", ""]
    missed = []
    for dtype in dtypes:
        out += [*rows(results, dtype, rounds), ""]
        out += [f"| {dtype} | figure | at least | |", "|---|---|---|---|"]
        for text, figure, least in limits(results, dtype):
            holds = figure is None or figure >= least
            word = "not measured" if figure is None else "holds" if holds else "**missed**"
            out.append(f"| {text} | {cell(figure, '{:.3f}')} | {least} | {word} |")
            if not holds:
                missed.append(f"{dtype}: {text}")
        out.append("")
        ends = {side: [each["loss"][1] for key, each in results.items()
                       if key.startswith(f"{dtype}/") and key.split("/")[1] in cases]
                for side, cases in (("zf", STAGES), ("PyTorch", ["fsdp2", "ddp"]))}
        if all(ends.values()):
            low, high = min(map(min, ends.values())), max(map(max, ends.values()))
            if high - low > SAME_LOSS:
                missed.append(f"{dtype}: losses of {low:.3f} to {high:.3f} on the same data")
                out += [f"**Losses differ**: {low:.3f} to {high:.3f} on the same data.", ""]
    return "\n".join(out), missed


def record(path, kept, text):
    """Puts the text between the two marks of docs/benchmarks.md."""
    usual = statistics.median(kept["busy"] or [0.0])
    if usual > QUIET:
        raise Refusal(f"not recorded: between measurements the machine was {usual:.0%} busy with other things, at most "
                      f"{QUIET:.0%} is expected; measure again with --fresh when it is quiet")
    old = path.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        raise Refusal(f"{path.name} lacks the lines `{BEGIN}` and `{END}`, between which the table goes")
    head, rest = old.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    write_atomically(path, f"{head}{BEGIN}\n{text.strip()}\n{END}{tail}".encode())
