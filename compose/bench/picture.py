"""A run as one SVG: what its callers waited for, over time and as shares. Needs nothing but a browser to be read."""

from collections.abc import Iterator, Sequence
from html import escape

from compose.bench.measure import Seen

WIDTH, HEIGHT, PANEL = 960, 560, 400
LEFT, TOP = 70, 60
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.axis{stroke:#999}.grid{stroke:#ddd}"
    ".good{fill:#2a7ab0}.bad{fill:#c0392b}.ttft{stroke:#2a7ab0}.e2e{stroke:#c77d0a}.line{fill:none;stroke-width:2}"
)


def draw(line: Sequence[Seen], title: str) -> str:
    """Left: time to first token by the instant at which a request was due, failed ones in red at the top. Right: the
    share of requests that had their first token, and their end, within a time."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f'<title>{escape(title)}</title><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="30" style="font-size:16px">{escape(title)}</text>',
        *_over_time(line),
        *_shares(line),
        "</svg>",
    ]
    return "\n".join(parts)


def _over_time(line: Sequence[Seen]) -> Iterator[str]:
    done = [seen for seen in line if seen.ok]
    last_s = max((seen.due_s for seen in line), default=0.0) or 1.0
    most = max((seen.ttft for seen in done), default=0.0) or 1.0
    yield from _frame(LEFT, "due, s", last_s, "time to first token, s", most)
    for seen in line:
        x = LEFT + PANEL * seen.due_s / last_s
        y = TOP + PANEL * (1 - seen.ttft / most) if seen.ok else TOP
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" class="{"good" if seen.ok else "bad"}"/>'


def _shares(line: Sequence[Seen]) -> Iterator[str]:
    left = LEFT + PANEL + 70
    done = [seen for seen in line if seen.ok]
    most = max((seen.e2e for seen in done), default=0.0) or 1.0
    yield from _frame(left, "within, s", most, "share of requests, %", 100.0)
    for name, values in (("ttft", sorted(s.ttft for s in done)), ("e2e", sorted(s.e2e for s in done))):
        points = [
            f"{left + PANEL * value / most:.1f},{TOP + PANEL * (1 - (number + 1) / len(line)):.1f}"
            for number, value in enumerate(values)
        ]
        yield f'<polyline class="line {name}" points="{" ".join(points)}"/>'
    for number, (name, words) in enumerate((("ttft", "first token"), ("e2e", "end"))):
        y = TOP + PANEL + 70 + number * 18
        yield f'<line class="line {name}" x1="{left}" x2="{left + 24}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{left + 32}" y="{y + 4}">{words}; what failed never comes</text>'


def _frame(left: float, across: str, most_across: float, up: str, most_up: float) -> Iterator[str]:
    for part in (0, 0.25, 0.5, 0.75, 1):
        x, y = left + PANEL * part, TOP + PANEL * (1 - part)
        yield f'<line class="grid" x1="{left}" x2="{left + PANEL}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{most_up * part:.3g}</text>'
        yield f'<text x="{x}" y="{TOP + PANEL + 20}" text-anchor="middle">{most_across * part:.3g}</text>'
    yield f'<line class="axis" x1="{left}" x2="{left + PANEL}" y1="{TOP + PANEL}" y2="{TOP + PANEL}"/>'
    yield f'<text x="{left + PANEL / 2}" y="{TOP + PANEL + 42}" text-anchor="middle">{escape(across)}</text>'
    yield f'<text x="{left}" y="{TOP - 12}">{escape(up)}</text>'
