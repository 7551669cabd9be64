"""Points in time as people write them: UTC days, instants with a zone, UTC months. Pure. Unix ms throughout."""

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}\Z", re.ASCII)
_MONTH = re.compile(r"\d{4}-\d{2}\Z", re.ASCII)
_INSTANT = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?([Zz]|[+-]\d{2}:\d{2})\Z", re.ASCII)
YEAR_MAX = 2999
"""Beyond it nothing was used, and calendars end."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST_MS = (datetime(YEAR_MAX + 1, 1, 1, tzinfo=UTC) - _EPOCH) // timedelta(milliseconds=1) - 1
"""Of YEAR_MAX."""


def parse(text: str) -> int:
    """Unix ms of a UTC day's start (``2026-11-29``) or of an instant (``2026-11-29T18:00:00Z``, or with another
    offset). Raises ValueError for anything else, an instant without a zone too: nobody could say when it is.
    """
    if _DAY.match(text):
        found = datetime.fromisoformat(text).replace(tzinfo=UTC)
    elif _INSTANT.match(text):
        found = datetime.fromisoformat(text.upper().replace("Z", "+00:00"))
    else:
        raise ValueError("neither a day like 2026-11-29 nor an instant like 2026-11-29T18:00:00Z")
    if found.year > YEAR_MAX:
        raise ValueError(f"after the year {YEAR_MAX}")
    return (found - _EPOCH) // timedelta(milliseconds=1)


def month_of(at_ms: int) -> str:
    """The UTC month around an instant, ``2026-11``."""
    return _month_of_day(at_ms // 86_400_000)


@lru_cache(maxsize=64)
def _month_of_day(day: int) -> str:
    return f"{_EPOCH + timedelta(days=day):%Y-%m}"


def range_of_month(month: str) -> tuple[int, int]:
    """Half-open range of a UTC month such as ``2026-11``, in Unix ms; raises ValueError for anything else."""
    if not _MONTH.match(month) or not "1970" <= month[:4] < "2299":
        raise ValueError("a month reads like 2026-11")
    return month_around(parse(f"{month}-01"))


def month_around(at_ms: int) -> tuple[int, int]:
    """The UTC month around an instant, as a half-open range in Unix ms."""
    first = (_EPOCH + timedelta(milliseconds=at_ms)).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    after = (first + timedelta(days=32)).replace(day=1)
    return (first - _EPOCH) // timedelta(milliseconds=1), (after - _EPOCH) // timedelta(milliseconds=1)


def month_or_range(start_ms: int | None, end_ms: int | None, at_ms: int) -> tuple[int, int]:
    """[start, end) in Unix ms: what is not given is the UTC month's, of the end that is given, else of ``at_ms``.

    Raises ValueError when it is empty or reversed.
    """
    last_ms = at_ms if end_ms is None else end_ms - 1
    month = month_around(max(0, last_ms if start_ms is None else start_ms))
    start_ms, end_ms = month[0] if start_ms is None else start_ms, month[1] if end_ms is None else end_ms
    if start_ms >= end_ms:
        raise ValueError("the range is empty or reversed: its end is the first instant that is left out")
    return start_ms, end_ms
