"""What this gateway saw of keys, for the admin service: last uses, failed logins, keys under the previous pepper.

Gathered in bounded memory and reported every few seconds, so that a request costs no message. A gateway writes neither
keys nor the audit trail itself.
"""

import asyncio
import ipaddress
import math
from collections import Counter, OrderedDict

import structlog

from contracts import keys, subjects
from contracts.bus import Bus, BusError
from contracts.messages.administration import FAILED_MAX, OUTDATED_MAX, USED_MAX, FailedLogin, KeyActivity, LoginFailure
from contracts.messages.base import Codec

REPORT_S = 5.0
REPORT_TIMEOUT_S = 4.0
MINUTE_MS = 60_000

FAILURES_MAX = 60
"""Logins in a row that may fail from one address, and again one a second: people mistype a key a few times, and a
secret has 256 bits."""
REFILL_S = 1.0
ADDRESSES_MAX = 10_000
"""Addresses that are counted, the last ones to fail: 1 MB."""

_CODEC = Codec[KeyActivity](KeyActivity)
_log = structlog.get_logger()


class FailedLogins:
    """Bounds failures by address, and nothing else: who comes from the same address with a valid key is let in.

    Pure; an IPv6 caller has a whole /64 to choose addresses from, so that counts as one.
    """

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What may still fail, and when that was so; the last to fail comes last."""

    def count(self, address: str, now_s: float) -> int:
        """Note a failure. Seconds until the next one is taken; 0 when this one was within the bound."""
        place = _place(address)
        left, at_s = self._left.pop(place, (float(FAILURES_MAX), now_s))
        left = min(FAILURES_MAX, left + (now_s - at_s) / REFILL_S)
        within = left >= 1
        self._left[place] = (left - within, now_s)
        if len(self._left) > ADDRESSES_MAX:
            self._left.popitem(last=False)
        return 0 if within else max(1, math.ceil((1 - left) * REFILL_S))


def _place(address: str) -> str:
    try:
        plain = keys.plain_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((plain, 64), strict=False) if plain.version == 6 else plain)


class Activity:
    """Gathers between two reports. Pure."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._reported: dict[str, int] = {}
        """By key, so that one is reported once a minute; there are no more than keys."""
        self._outdated: set[str] = set()
        self._failed: Counter[tuple[str, LoginFailure, str]] = Counter()
        self._unlisted = 0

    def used(self, key_id: str, now_ms: int) -> None:
        """A key let somebody in."""
        minute = now_ms - now_ms % MINUTE_MS
        if self._reported.get(key_id) != minute:
            self._used[key_id] = minute

    def outdated(self, secret: bytes) -> None:
        """A valid key is under the previous pepper."""
        if len(self._outdated) < OUTDATED_MAX:
            self._outdated.add(secret.decode())

    def failed(self, address: str, reason: LoginFailure, key_id: str) -> None:
        """Somebody was not let in."""
        if (address, reason, key_id) in self._failed or len(self._failed) < FAILED_MAX:
            self._failed[address, reason, key_id] += 1
        else:
            self._unlisted += 1

    def take(self) -> KeyActivity | None:
        """What was gathered, from now on no longer here; None when there is nothing."""
        if not (self._used or self._outdated or self._failed):
            return None
        used = dict(list(self._used.items())[:USED_MAX])
        for key_id in used:
            del self._used[key_id]
        self._reported |= used
        taken = KeyActivity(
            used=used,
            outdated=sorted(self._outdated),
            failed=[
                FailedLogin(address=address, reason=reason, key_id=key_id, count=count)
                for (address, reason, key_id), count in self._failed.items()
            ],
            failed_unlisted=self._unlisted,
        )
        self._outdated, self._failed, self._unlisted = set(), Counter(), 0
        return taken


class Reporter:
    """Reports between ``start`` and ``close``; a report that nobody keeps is sent again."""

    def __init__(self, bus: Bus, activity: Activity) -> None:
        self._bus = bus
        self._activity = activity
        self._report: KeyActivity | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Report what is left, once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            if self._bus.connected:
                await self._send()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            await self._send()

    async def _send(self) -> None:
        self._report = self._report or self._activity.take()
        if self._report is None:
            return
        try:
            await self._bus.request(subjects.ADMIN_ACTIVITY, _CODEC.encode(self._report), timeout_s=REPORT_TIMEOUT_S)
        except BusError as error:
            _log.warning("key_activity_not_reported", reason=str(error))
        else:
            self._report = None
