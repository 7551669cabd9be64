"""Which bodies engines may have died of, and what follows: tried again beside whom, or never again.

The unit is a *body*, by its hash, of one tenant: its copies share one record, so that who asks again does not start
the count again. To whom a death is put down its writer has said (``AttemptEvent.accused``); by these events alone a
later owner comes to the same.

- A worker that fell silent whole says nothing about what it ran: all of it is tried again at once, as anything else.
- An engine that died under a living worker accuses all that it is put down to. So does any second death.
- The accused are suspects: of n that died together the square root of n share a worker, and who has died twice
  shares it with no other suspect, until each has got further than where it died (``suspect_tokens``). So the third
  death has one culprit. Halves would need as many deaths as rounds; with roots n of them need about root n rounds on
  two workers: 3 for 8, 4 for 16, 8 for 64.
- Who died as the only suspect, or a third time, is quarantined: it is refused for ten minutes, whoever repeats it.
- An answer clears: a body that completed since is as good as new.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable

from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import RequestDemand

ENGINES_MAX = 3
"""So many engines or workers die for a body, and no more."""
KEPT_MS = 600_000
"""After its last death: ten minutes, longer than an SDK repeats itself. A new owner reads back ends of so long."""
KEPT_MAX = 20_000
"""Bodies; each has cost an engine or worker at least, shared with those beside it. The oldest go first."""
UNHEARD_TOKENS = 64
"""A lost worker may have come so much further than its last heartbeat told, in half a second: a guess."""

BodyKey = tuple[str, str]
"""Tenant, hash of the body."""


class Body:
    """What is known of one body since its last answer."""

    __slots__ = ("condemned", "deaths", "ends", "suspect", "together", "tokens", "until_ms")

    def __init__(self) -> None:
        self.deaths = 0
        """Put down to it, alone or among others."""
        self.suspect = False
        self.together = 0
        """So many suspects may share a worker with it, itself included."""
        self.tokens = 0
        """How far an attempt had come, at most, when it died."""
        self.condemned = False
        """It is quarantined: no attempt of it is made."""
        self.ends: set[tuple[str, int]] = set()
        """Request and attempt of the deaths that were counted."""
        self.until_ms = 0

    @property
    def suspect_tokens(self) -> int:
        """See ``WorkItem.suspect_tokens``."""
        return self.tokens + 1 if self.suspect else 0

    def died(self, event: AttemptEvent) -> None:
        """An attempt died, and it is put down to this body among ``event.accused``."""
        silent = event.outcome == "lost"
        accused = self.suspect or not silent
        self.deaths += 1
        self.condemned |= self.deaths >= ENGINES_MAX or (accused and self.deaths > 1 and event.accused == 1)
        self.suspect = accused or self.deaths > 1
        self.together = max(1, math.isqrt(event.accused)) if self.deaths == 1 else 1
        self.tokens = max(self.tokens, event.completion_tokens + (UNHEARD_TOKENS if silent else 0))


INNOCENT = Body()
"""What is known of all others."""


class Accused:
    """The bodies of one model to which a death is put down."""

    def __init__(self) -> None:
        self._bodies: OrderedDict[BodyKey, Body] = OrderedDict()
        """The one whose last death is longest ago first."""

    def __len__(self) -> int:
        return len(self._bodies)

    def of(self, request: RequestDemand) -> Body:
        """What is known of the request's body."""
        return self._bodies.get(body_key(request), INNOCENT)

    def take(self, event: AttemptEvent, of: RequestDemand | AttemptEvent, now_ms: int) -> None:
        """Count a stored end, once however often it is told.

        ``of``: the request, where it is known; the event names the body only where it must.
        """
        key = body_key(of)
        body = self._bodies.get(key)
        if event.outcome == "completed":
            self._bodies.pop(key, None)
        if not (event.engine_death and event.accused):
            return
        end = (event.request_id, event.attempt)
        if body is None:
            body = self._bodies[key] = Body()
        if end in body.ends:
            return
        body.ends.add(end)
        body.died(event)
        body.until_ms = now_ms + KEPT_MS
        self._bodies.move_to_end(key)
        if len(self._bodies) > KEPT_MAX:
            self._bodies.popitem(last=False)

    def pass_time(self, now_ms: int, requests: Iterable[RequestDemand]) -> None:
        """Forget bodies whose last death is KEPT_MS ago, but for those of ``requests``, the open ones."""
        if not self._bodies or next(iter(self._bodies.values())).until_ms > now_ms:
            return
        open_bodies = set(map(body_key, requests))
        for key in [key for key, body in self._bodies.items() if body.until_ms <= now_ms]:
            if key in open_bodies:
                self._bodies[key].until_ms = now_ms + KEPT_MS
                self._bodies.move_to_end(key)
            else:
                del self._bodies[key]


def body_key(of: RequestDemand | AttemptEvent) -> BodyKey:
    """By the body's hash, or by its request where that is not known."""
    return of.tenant, of.body_hash or of.request_id


def may_share(body: Body, suspects: Iterable[Body]) -> bool:
    """Whether a worker that runs ``suspects`` may run this one beside them; who was answered elsewhere is none."""
    others = [other for other in suspects if other.suspect]
    return len(others) < min(it.together for it in [body, *others])
