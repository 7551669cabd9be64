"""Which request a caller's idempotency key names, so that asking again joins it and never runs it twice.

A key names its request from admission until KEPT_MS after its end, then nothing. Each tenant has keys of its own. They
are kept in memory only: a new owner reads them from the requests and ends that the streams hold (``takeover``).
"""

from collections import OrderedDict

import msgspec

from contracts.messages.base import IdempotencyKey

KEPT_MS = 600_000
"""Ten minutes: longer than any client repeats itself. A new owner reads the ends of so long: 20,000 take 0.3 s of its
processor (measured)."""
KEYS_MAX = 20_000
"""Of a tenant's ended requests: 33 a second for all of KEPT_MS, some 7 MB. Beyond it the oldest are forgotten."""


class Named(msgspec.Struct, frozen=True):
    """What a key names. Without a ``request_id``: its request was cancelled before anybody knew of it."""

    request_id: str
    digest: str
    until_ms: int = 0
    """0: the request is open."""


_NONE: OrderedDict[str, Named] = OrderedDict()


class IdempotencyKeys:
    """The keys of one model."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], Named] = {}
        self._ended: dict[str, OrderedDict[str, Named]] = {}
        """By tenant; the first that ended first."""

    def find(self, tenant: str, key: str) -> Named | None:
        """What the key names now."""
        return self._open.get((tenant, key)) or self._ended_of(tenant).get(key)

    def _ended_of(self, tenant: str) -> OrderedDict[str, Named]:
        return self._ended.get(tenant, _NONE)

    def name(self, tenant: str, given: IdempotencyKey, request_id: str) -> bool:
        """The request under this key is open; whether the key names it, and not another one."""
        named = self.find(tenant, given.key)
        if named is not None and named.request_id != request_id:
            return False
        self._open[tenant, given.key] = Named(request_id, given.digest)
        self._forget(tenant, given.key)
        return True

    def end(self, tenant: str, given: IdempotencyKey, request_id: str, now_ms: int) -> None:
        """It has ended, for good as far as is known. Of several under one key the newest counts."""
        self.free(tenant, given, request_id)
        known = self._ended_of(tenant).get(given.key)
        if known is None or known.request_id <= request_id:
            self._keep(tenant, given.key, Named(request_id, given.digest, now_ms + KEPT_MS))

    def forbid(self, tenant: str, key: str, now_ms: int) -> None:
        """Should a request under this key come yet, it is not run."""
        self._keep(tenant, key, Named("", "", now_ms + KEPT_MS))

    def free(self, tenant: str, given: IdempotencyKey, request_id: str) -> None:
        """The request does not count as begun: its key may name another."""
        named = self._open.get((tenant, given.key))
        if named is not None and named.request_id == request_id:
            del self._open[tenant, given.key]

    def pass_time(self, now_ms: int) -> None:
        """Forget what ended longer than KEPT_MS ago."""
        for tenant, ended in list(self._ended.items()):
            while ended and next(iter(ended.values())).until_ms <= now_ms:
                ended.popitem(last=False)
            if not ended:
                del self._ended[tenant]

    def __len__(self) -> int:
        """Keys of open requests."""
        return len(self._open)

    def _keep(self, tenant: str, key: str, named: Named) -> None:
        self._forget(tenant, key)
        ended = self._ended.setdefault(tenant, OrderedDict())
        ended[key] = named
        if len(ended) > KEYS_MAX:
            ended.popitem(last=False)

    def _forget(self, tenant: str, key: str) -> None:
        if (ended := self._ended.get(tenant)) is not None:
            ended.pop(key, None)
