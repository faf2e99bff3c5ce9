"""A picture of validation and training curves, as SVG."""

import math

COLOURS = ["#222222", "#d1495b", "#edae49", "#00798c", "#7b4ea3", "#8a8a8a", "#3a7d44"]
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, KEY = 640, 300, 52, 34, 40, 18


def smooth(values, width):
    """The running mean over so many values, shorter at the start."""
    return [sum(values[max(0, i + 1 - width):i + 1]) / len(values[max(0, i + 1 - width):i + 1])
            for i in range(len(values))]


def panel(title, result, top):
    """One panel: validation losses as lines with points, training losses thin; `top` is where it begins."""
    cases = list(result["cases"].values())
    start = sum(result["before"]) / len(result["before"])
    shown = [loss for case in cases for loss in (*case["validation"], *smooth(case["training"], 10))]
    low, high = math.floor(min(shown) * 4 - 0.5) / 4, math.ceil(max(start, *shown) * 4) / 4
    bottom, right = top + HEIGHT - BOTTOM, WIDTH - 16

    def place(step, loss):
        x = LEFT + (right - LEFT) * step / result["steps"]
        return f"{x:.1f},{bottom - (bottom - top - TOP) * (loss - low) / (high - low):.1f}"

    def line(points, style):
        places = " ".join(place(step, loss) for step, loss in points)
        return f'<polyline points="{places}" fill="none" {style}/>'

    yield f'<text x="{LEFT}" y="{top + 18}" font-weight="bold" fill="#222222">{title}: loss (nats a byte) over steps</text>'
    ticks = round((high - low) / 0.25)
    for i in range(0, ticks + 1, 1 if ticks <= 6 else 2):
        x, y = place(0, low + i * 0.25).split(",")
        yield f'<path d="M{x} {y}H{right}" stroke="#e4e4e4"/>'
        yield f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end" fill="#444444">{low + i * 0.25:.2f}</text>'
    for i in range(5):
        step = result["steps"] * i // 4
        x = place(step, low).split(",")[0]
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle" fill="#444444">{step}</text>'
    yield f'<path d="M{LEFT} {top + TOP}V{bottom}H{right}" fill="none" stroke="#444444"/>'
    for colour, case in zip(COLOURS, cases):
        training = smooth(case["training"], 10)
        yield line(enumerate(training, 1), f'stroke="{colour}" stroke-width="0.8" stroke-opacity="0.35"')
    for colour, case in zip(COLOURS, cases):
        points = [(0, start), *zip(case["at"], case["validation"])]
        yield line(points, f'stroke="{colour}" stroke-width="1.8"')
        for step, loss in points:
            x, y = place(step, loss).split(",")
            yield f'<circle cx="{x}" cy="{y}" r="2.4" fill="{colour}"/>'
    for number, (colour, case) in enumerate(zip(COLOURS, cases)):
        y = top + TOP + 12 + number * KEY
        yield f'<path d="M{right - 372} {y - 4}h20" stroke="{colour}" stroke-width="2"/>'
        yield f'<text x="{right - 346}" y="{y}" fill="#222222">{case["name"]}</text>'


def draw(parts):
    """The picture of all (title, result) parts, one above the other."""
    height = HEIGHT * len(parts) + 24
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
             'font-family="sans-serif" font-size="12" role="img" aria-label="Losses of AdamW and ZenFlow over steps">',
             f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>']
    for number, (title, result) in enumerate(parts):
        lines += panel(title, result, number * HEIGHT)
    lines.append(f'<text x="{WIDTH / 2}" y="{height - 10}" text-anchor="middle" fill="#444444">means over seeds; '
                 'with points: validation, thin: training (running mean of 10 steps)</text>')
    return "\n".join([*lines, "</svg>", ""])
