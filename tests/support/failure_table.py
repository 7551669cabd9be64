"""The table "When something fails" of compose/OBSERVABILITY.md: what moves when, as tests look for it."""

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "compose" / "OBSERVABILITY.md"
_LABELS = re.compile(r"\{(.*)\}")


class Row(NamedTuple):
    """``metric``: of a process's page, with the labels that count, or ``absent(name)``. ``alert``: ``-`` for none."""

    metric: str
    log: str
    alert: str

    @property
    def name(self) -> str:
        """The metric's, bare."""
        return _LABELS.sub("", self.metric.removeprefix("absent(").removesuffix(")"))

    def figure(self, page: str) -> float:
        """What one process's page says; of an absence 0 where it is there."""
        labels = found[1].split(",") if (found := _LABELS.search(self.metric)) else []
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.startswith((f"{self.name}{{", f"{self.name} ")) and all(label in line for label in labels)
        ]
        return float(not values) if self.metric.startswith("absent(") else sum(values)


def table() -> dict[str, Row]:
    """By what happens."""
    part = PAGE.read_text().split("## When something fails", 1)[1].split("\n## ", 1)[0]
    lines = [[cell.strip(" `") for cell in line.strip("|\n").split("|")] for line in part.splitlines() if "|" in line]
    return {cells[0]: Row(*cells[1:]) for cells in lines[2:]}
