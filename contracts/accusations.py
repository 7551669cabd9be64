"""What is put down to whom when an engine or a worker dies: the one rule of those who write the ends of its attempts.

A worker writes them when its engine dies under it, the owner when the worker fell silent. What follows for a request
is the scheduler's (``scheduler.core.accused``).
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class Exposed(NamedTuple):
    """An attempt that an engine ran when it died. ``body``: whose copies count as one; ``suspect``: not cleared yet."""

    body: Hashable
    suspect: bool


def put_down_to(exposed: Mapping[K, Exposed] | Iterable[tuple[K, Exposed]]) -> dict[K, int]:
    """By attempt: ``AttemptEvent.accused``. It is put down to the suspects that were there, without any to all.

    Of several copies of one body the first carries it, so that a death counts once for a body.
    """
    attempts = dict(exposed)
    suspects = {key: it for key, it in attempts.items() if it.suspect} or attempts
    first = {it.body: key for key, it in reversed(suspects.items())}
    return dict.fromkeys(attempts, 0) | dict.fromkeys(first.values(), len(first))
