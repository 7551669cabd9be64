"""SECURITY.md says of every stream and bucket what it keeps, and for how long."""

import re
from pathlib import Path

from contracts import topology
from contracts.messages.admission import DEADLINE_MS_MAX
from worker.frame_buffer import KEEP_S

TEXT = (Path(__file__).parents[2] / "SECURITY.md").read_text()
ROWS = dict(re.findall(r"^\| `([A-Z]\w+)` \|[^|]*\| ([^|]*) \|$", TEXT, re.MULTILINE))


def spelled(max_age_ns: int) -> str:
    hours = max_age_ns // 3_600_000_000_000
    return f"{hours} h" if hours < 24 else f"{hours // 24} days"


def test_every_stream_is_listed_with_its_age() -> None:
    assert set(ROWS) == {stream["name"] for stream in topology.STREAMS}
    for stream in topology.STREAMS:
        longest = ROWS[stream["name"]]
        if stream["max_age"]:
            assert longest.startswith(spelled(stream["max_age"])), stream["name"]
        else:
            assert longest == f"the longest deadline, {spelled(DEADLINE_MS_MAX * 10**6)}" or longest.startswith("until")


def test_frames_stay_as_long_as_it_says() -> None:
    assert f"{KEEP_S:g} s after the end" in TEXT


def test_what_it_names_exists() -> None:
    root = Path(__file__).parents[2]
    for path in re.findall(r"`((?:contracts|gateway|ledger|tests|compose)/[\w./]+)`", TEXT):
        assert (root / path).exists(), path
