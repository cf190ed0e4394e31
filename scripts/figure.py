"""Draw learning curves as a figure in SVG: one panel for each env.

    python scripts/figure.py outputs --output curves.svg --metric eval/success_rate

It takes run directories, directories with runs, or files of curves (curves.py). With `--minutes`
each env has a second panel, over minutes of training.
"""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightning_rl.extensions.reports.comparison import (
    METRIC,
    Comparison,
    Curve,
    compare_each,
    thinned,
)
from lightning_rl.extensions.reports.rendering import METHOD, TITLES
from scripting import parser_of

LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#7b4b2a", "#3d3d3d")
"""Colours of the curves on a light page, as in page.html: Okabe and Ito 2008, distinguishable by
the colour-blind."""

DARK = ("#4da6e0", "#ff8b4a", "#2ecc9b", "#ea9fca", "#f0c23b", "#9bd6f7", "#c99b76", "#c8c8c8")
"""Lighter colours of the curves, on a dark page."""

WIDTH, HEIGHT, ROW = 330, 250, 17
"""Size of a panel without its legend, and height of a line of the legend."""

LEFT, RIGHT, TOP, BOTTOM = 64, 20, 30, 44
"""Margins of a panel."""

PANELS, POINTS, LETTERS = 3, 60, 46
"""Most panels in a row, points of a curve, and letters of a name."""


def as_svg(comparisons: Sequence[Comparison], minutes: bool = False) -> str:
    """Return a figure with a panel for each comparison; a name has one colour in all of them."""
    colours: dict[str, int] = {}
    for one in comparisons:
        taken = {colours[group.name] for group in one.groups if group.name in colours}
        for group in one.groups:
            if group.name not in colours:
                free = (i for i in range(len(one.groups) + len(taken)) if i not in taken)
                colours[group.name] = next(free)
                taken.add(colours[group.name])
    axes = [(one, over) for one in comparisons for over in (False, True)[: 1 + minutes]]
    columns = 2 if len(axes) == 4 else min(PANELS, len(axes))
    height = HEIGHT + ROW * max(len(one.groups) for one in comparisons) + 6
    rows = math.ceil(len(axes) / columns)
    panels = [
        f'<g transform="translate({WIDTH * (i % columns)} {height * (i // columns)})">'
        f"{_panel(one, colours, over)}</g>"
        for i, (one, over) in enumerate(axes)
    ]
    envs = html.escape(", ".join(one.env for one in comparisons))
    size = f'width="{WIDTH * columns}" height="{height * rows}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
            f'viewBox="0 0 {WIDTH * columns} {height * rows}">',
            f"<title>Learning curves: {envs}</title><desc>{html.escape(METHOD)}</desc>",
            _style(),
            f'<rect class="ground" {size} rx="6"/>',
            *panels,
            "</svg>\n",
        ]
    )


def _style() -> str:
    def rules(ground: str, ink: str, line: str, colours: Sequence[str]) -> str:
        each = "".join(f".c{i}{{color:{colour}}}" for i, colour in enumerate(colours))
        return f".ground{{fill:{ground}}}text{{fill:{ink}}}.grid{{stroke:{line}}}{each}"

    return (
        '<style>text{font:12px system-ui,"Segoe UI",Roboto,Arial,sans-serif}.e{text-anchor:end}'
        ".m{text-anchor:middle}.h{font-weight:600}.grid,.line{fill:none}.line{stroke:currentColor;stroke-width:2;"
        "stroke-linejoin:round}.band,.dot{fill:currentColor}.band{opacity:.2}"
        f".part{{stroke-dasharray:5 4}}{rules('#fff', '#333c49', '#d9dee6', LIGHT)}"
        f"@media(prefers-color-scheme:dark){{{rules('#12161d', '#ccd3dd', '#2c3440', DARK)}}}"
        "</style>"
    )


def _panel(comparison: Comparison, colours: dict[str, int], minutes: bool) -> str:
    metric = comparison.metric
    curves = [
        (group, replace(curve, env_steps=curve.seconds / 60) if minutes else curve)
        for group in comparison.groups
        for curve in [group.curves[metric]]
    ]
    ends = [curve.env_steps[-1] for _, curve in curves]
    if not np.isfinite(ends).all():
        raise SystemExit(f"--minutes: not all curves of {comparison.env} have seconds.")
    values = np.concatenate(
        [part[np.isfinite(part)] for _, c in curves for part in (c.centre, c.low, c.high)]
    )
    low, high = _span(float(values.min()), float(values.max()), metric)
    most = float(max(ends)) or 1.0

    def x(value: float) -> str:
        return f"{LEFT + value / most * (WIDTH - LEFT - RIGHT):.1f}".removesuffix(".0")

    def y(value: float) -> str:
        share = (value - low) / (high - low)
        return f"{HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM):.1f}".removesuffix(".0")

    parts = [f'<text x="{LEFT}" y="18" class="h">{_short(comparison.env)}</text>']
    for tick, text in _ticks(0.0, most, 5):
        parts.append(f'<path class="grid" d="M{x(tick)} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="m" x="{x(tick)}" y="{HEIGHT - BOTTOM + 16}">{text}</text>')
    for tick, text in _ticks(low, high, 6):
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick)}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="e" x="{LEFT - 6}" y="{float(y(tick)) + 4:.1f}">{text}</text>')
    middle, axis = (LEFT + WIDTH - RIGHT) / 2, "Minutes" if minutes else "Env steps"
    parts.append(f'<text class="m" x="{middle}" y="{HEIGHT - BOTTOM + 33}">{axis}</text>')
    upright = f"translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"
    title = html.escape(TITLES.get(metric, metric))
    parts.append(f'<text class="m" transform="{upright}">{title}</text>')
    for i, (group, curve) in reversed(list(enumerate(curves))):  # the best is drawn last
        at = HEIGHT + ROW * i + 8
        runs = f" ({len(group.runs)} runs)" if len(group.runs) > 1 else " (1 run)"
        parts.append(
            f'<g class="c{colours[group.name] % len(LIGHT)}">{_drawn(curve, x, y)}'
            f'<path class="line" d="M14 {at - 4}h18"/>'
            f'<text x="38" y="{at}">{_short(group.name)}{runs}</text></g>'
        )
    return "\n".join(parts)


def _drawn(curve: Curve, x: Callable[[float], str], y: Callable[[float], str]) -> str:
    kept = thinned(np.arange(len(curve.env_steps)), POINTS)
    steps, centre = curve.env_steps[kept], curve.centre[kept]
    low, high, runs = curve.low[kept], curve.high[kept], curve.runs[kept]

    def path(points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{x(at)} {y(value)}" for at, value in points)

    if len(steps) == 1:
        return f'<circle class="dot" cx="{x(steps[0])}" cy="{y(centre[0])}" r="3.5"/>'
    points = list(zip(steps, centre, strict=True))
    first, last = np.flatnonzero(runs == runs.max())[[0, -1]]  # dashed elsewhere, as in page.html
    parts = [f'<path class="line" d="{path(points[first : last + 1])}"/>']
    for some in (points[: first + 1], points[last:]):
        if len(some) > 1:
            parts.append(f'<path class="line part" d="{path(some)}"/>')
    there = np.isfinite(low)
    if there.sum() > 1:
        above = list(zip(steps[there], high[there], strict=True))
        below = list(zip(steps[there], low[there], strict=True))
        parts.insert(0, f'<path class="band" d="{path(above + below[::-1])}Z"/>')
    return "".join(parts)


def _span(low: float, high: float, metric: str) -> tuple[float, float]:
    if metric.endswith("_rate"):
        return 0.0, 1.02
    pad = (high - low or abs(high) or 1.0) * 0.05
    return (0.0 if 0 <= low < 8 * pad else low - pad), high + pad


def _ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """Return about `count` round numbers between low and high, and their texts."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= 0.999 * rough)
    found = [k * step for k in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]
    most = max(map(abs, found))
    by, unit = (1e6, "M") if most >= 1e6 else (1e3, "k") if most >= 1e4 else (1.0, "")
    places = max(0, -math.floor(math.log10(step / by) + 1e-9))
    return [(at, f"{at / by:,.{places}f}{unit}".replace("-", "−") if at else "0") for at in found]


def _short(text: str) -> str:
    return html.escape(text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--metric", default=METRIC)
    parser.add_argument("--minutes", action="store_true")
    args = parser.parse_args()
    args.output.write_text(as_svg(compare_each(args.runs, args.metric), args.minutes))


if __name__ == "__main__":
    main()
