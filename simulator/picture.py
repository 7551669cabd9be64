"""A run as one SVG, over time: goodput, time to first token, how many workers there were. Needs a browser only."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from simulator.report import Report

WIDTH, PANEL, LEFT, TOP, GAP = 960, 150, 80, 60, 60
ACROSS = WIDTH - LEFT - 40
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.grid{stroke:#ddd}.line{fill:none;stroke-width:1.5}"
    ".a{stroke:#2a7ab0}.b{stroke:#c0392b}.c{stroke:#999;stroke-dasharray:4 3}.d{stroke:#e08e0b}.e{stroke:#8e44ad}"
)
_STYLES = "cdebacdeba"
"""Of what is compared: the last one of five is blue."""
Line = Sequence[tuple[float, float]]
Panel = tuple[str, list[tuple[str, str, Line]], bool]
"""Its name; its lines as (style, name, points); whether they go in steps."""


def draw(report: Report, title: str) -> str:
    """Requests a second that came and that were good, the first token's median and 95th percentile, workers."""
    series = report.series
    workers = _sum(list(report.replicas.values()))
    panels: list[Panel] = [
        (
            "requests a second",
            [
                ("c", "asked", [(it.at_s, it.asked_per_s) for it in series]),
                ("a", "good", [(it.at_s, it.good_per_s) for it in series]),
                ("b", "refused or failed", [(it.at_s, it.bad_per_s) for it in series]),
            ],
            False,
        ),
        (
            "time to first token, ms",
            [
                ("a", "median", [(it.at_s, it.ttft_p50_ms) for it in series]),
                ("b", "95 %", [(it.at_s, it.ttft_p95_ms) for it in series]),
            ],
            False,
        ),
        ("workers", [("a", "there", workers)], True),
    ]
    return _drawing(f"{title}: seed {report.seed}", panels, report.simulated_s)


def compare(reports: Mapping[str, Report], title: str) -> str:
    """Runs of one demand, by name: what was asked, workers that there were, requests that were not good."""
    first = next(iter(reports.values()))
    span_s = max(report.simulated_s for report in reports.values())
    named = list(zip(_STYLES[-len(reports) :], reports.items(), strict=True))
    panels: list[Panel] = [
        ("requests a second", [("c", "asked", [(it.at_s, it.asked_per_s) for it in first.series])], False),
        ("workers", [(style, name, _sum(list(it.replicas.values()))) for style, (name, it) in named], True),
        (
            "not good, a second",
            [
                (style, name, [(each.at_s, max(0.0, each.asked_per_s - each.good_per_s)) for each in it.series])
                for style, (name, it) in named
            ],
            False,
        ),
    ]
    return _drawing(title, panels, span_s)


def _drawing(title: str, panels: Sequence[Panel], span_s: float) -> str:
    height = TOP + len(panels) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f'<title>{escape(title)}</title><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="28" style="font-size:16px">{escape(title)}</text>',
    ]
    for number, (name, lines, steps) in enumerate(panels):
        parts += _panel(TOP + number * (PANEL + GAP), name, lines, span_s, steps=steps)
    return "\n".join([*parts, "</svg>"])


def _panel(top: float, name: str, lines: list[tuple[str, str, Line]], span_s: float, *, steps: bool) -> Iterator[str]:
    most = max((value for _, _, line in lines for _, value in line), default=0.0) or 1.0
    for part in (0, 0.5, 1):
        y = top + PANEL * (1 - part)
        yield f'<line class="grid" x1="{LEFT}" x2="{LEFT + ACROSS}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{_short(most * part)}</text>'
    for part in (0, 0.25, 0.5, 0.75, 1):
        x = LEFT + ACROSS * part
        yield f'<text x="{x}" y="{top + PANEL + 18}" text-anchor="middle">{_short(span_s * part)} s</text>'
    yield f'<text x="{LEFT}" y="{top - 8}">{escape(name)}</text>'
    for number, (style, words, line) in enumerate(lines):
        points = []
        before = None
        for at_s, value in line:
            x = LEFT + ACROSS * min(1.0, at_s / span_s)
            y = top + PANEL * (1 - value / most)
            if steps and before is not None:
                points.append(f"{x:.1f},{before:.1f}")
            points.append(f"{x:.1f},{y:.1f}")
            before = y
        if steps and before is not None:
            points.append(f"{LEFT + ACROSS:.1f},{before:.1f}")
        yield f'<polyline class="line {style}" points="{" ".join(points)}"/>'
        x = LEFT + 150 + number * 145
        yield f'<line class="line {style}" x1="{x}" x2="{x + 24}" y1="{top - 12}" y2="{top - 12}"/>'
        yield f'<text x="{x + 30}" y="{top - 8}">{escape(words)}</text>'


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _sum(replicas: list[list[tuple[float, int, int]]]) -> Line:
    """Workers of all models, at each change of one."""
    changes = sorted((at_s, number, workers) for number, line in enumerate(replicas) for at_s, workers, _ in line)
    now = [0] * len(replicas)
    found = []
    for at_s, number, workers in changes:
        now[number] = workers
        found.append((at_s, float(sum(now))))
    return found
