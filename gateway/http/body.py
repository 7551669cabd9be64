"""Reading a request's body under bounds on size, time and inflation, before anything of it is parsed."""

import asyncio
import codecs
import time
import zlib
from collections import Counter
from typing import ClassVar, Self

from starlette.types import Receive

from contracts.errors import HeadraceError
from gateway.config import GatewayConfig
from gateway.http.caller import CallerLeft
from gateway.http.exchange import Exchange

RECEIVED_BYTES_MAX = 256 << 20
"""Of all bodies that are on their way in, whole or not; sixteen of the largest."""
TENANT_SHARE = 4
"""One tenant may have this part of it."""
_INFLATE_STEP = 256 << 10
"""Inflated bytes between two turns of the event loop: about a millisecond."""
_INFLATED_ALWAYS = 1 << 20
_RATIO_MAX = 100
"""Beyond the first MiB gzip may inflate by so much: JSON of real conversations does by 3 to 20, a bomb by 1,000."""
_INFLATING = asyncio.Lock()
"""Of all bodies that are inflated one is taken further before everything else has its turn."""
_MEMBERS_MAX = 100
"""Each costs a copy of what is behind it."""


async def read(exchange: Exchange, config: GatewayConfig) -> bytes:
    """The whole body, inflated when it came as gzip, and without a byte order mark. Bounds are the configuration's.

    Raises HeadraceError: unsupported_media_type, request_too_large (as soon as it is known), request_timeout,
    rate_limit_exceeded and overloaded (too much is being received from the tenant, or in all); and CallerLeft.
    """
    headers, bytes_max, s_max = exchange.scope["headers"], config.body_bytes_max, config.body_s_max
    given = dict(headers)
    _check_type(given.get(b"content-type", b""))
    gzipped = _is_gzip(b",".join(value for name, value in headers if name == b"content-encoding"))
    length = given.get(b"content-length", b"")
    if length.isdigit() and int(length) > bytes_max:
        raise _too_large(bytes_max)
    with _Received(exchange.tenant) as received:
        began = time.monotonic()
        try:
            async with asyncio.timeout(s_max):
                data = await _gather(exchange.receive, bytes_max, received)
        except TimeoutError:
            message = f"The request body did not arrive within {s_max:g} seconds."
            raise HeadraceError("request_timeout", message) from None
        finally:
            exchange.upload_s = time.monotonic() - began
        data = await _inflate(data, bytes_max, received) if gzipped else data
    return data.removeprefix(codecs.BOM_UTF8)


class _Received:
    """What is held of one body while it comes in, counted with all others in this process."""

    total = 0
    by_tenant: ClassVar[Counter[str]] = Counter()

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._bytes = 0

    def add(self, size: int) -> None:
        """Raises HeadraceError when it is too much."""
        self._count(size)
        if self.by_tenant[self._tenant] > RECEIVED_BYTES_MAX // TENANT_SHARE:
            message = "Too much of this tenant's request bodies is on its way in; send fewer at once."
            raise HeadraceError("rate_limit_exceeded", message, retry_after_s=1)
        if _Received.total > RECEIVED_BYTES_MAX:
            raise HeadraceError("overloaded", "Too many request bodies are on their way in.", retry_after_s=1)

    def _count(self, size: int) -> None:
        self._bytes += size
        _Received.total += size
        self.by_tenant[self._tenant] += size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._count(-self._bytes)
        if not self.by_tenant[self._tenant]:
            del self.by_tenant[self._tenant]


async def _gather(receive: Receive, bytes_max: int, received: _Received) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerLeft
        piece = message.get("body", b"")
        size += len(piece)
        if size > bytes_max:
            raise _too_large(bytes_max)
        received.add(len(piece))
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


_TAKEN_AS_JSON = (b"", b"application/json", b"text/plain", b"application/x-www-form-urlencoded")
"""Also no type at all, and what clients send that think of none: ``curl -d`` claims a form."""


def _check_type(value: bytes) -> None:
    kind = value.partition(b";")[0].strip().lower()
    if kind not in _TAKEN_AS_JSON and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise HeadraceError("unsupported_media_type", "Send the body as 'Content-Type: application/json'.")


def _is_gzip(value: bytes) -> bool:
    codings = [coding for part in value.split(b",") if (coding := part.strip().lower()) not in (b"", b"identity")]
    if not codings:
        return False
    if len(codings) == 1 and codings[0] in (b"gzip", b"x-gzip"):
        return True
    raise HeadraceError("unsupported_media_type", "The only Content-Encoding that is understood is gzip.")


async def _inflate(data: bytes, bytes_max: int, received: _Received) -> bytes:
    """One or more gzip members, as RFC 1952 has a file."""
    inflater = zlib.decompressobj(wbits=31)
    ratio_max = max(_INFLATED_ALWAYS, _RATIO_MAX * len(data))
    pieces: list[bytes] = []
    size, members = 0, 1
    while data or not inflater.eof:
        if inflater.eof:
            members += 1
            if members > _MEMBERS_MAX:
                raise HeadraceError("invalid_request", f"The body's gzip has more than {_MEMBERS_MAX} members.")
            inflater = zlib.decompressobj(wbits=31)
        async with _INFLATING:
            await asyncio.sleep(0)
        try:
            piece = inflater.decompress(data, _INFLATE_STEP)
        except zlib.error as error:
            raise HeadraceError("invalid_request", "The body is not valid gzip.") from error
        data = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
        if not piece and not data and not inflater.eof:
            raise HeadraceError("invalid_request", "The body's gzip ends too early.")
        size += len(piece)
        if size > bytes_max:
            raise _too_large(bytes_max)
        if size > ratio_max:
            raise HeadraceError(
                "request_too_large", f"The body's gzip inflates more than {_RATIO_MAX} times: send it as it is."
            )
        received.add(len(piece))
        pieces.append(piece)
    return b"".join(pieces)


def _too_large(bytes_max: int) -> HeadraceError:
    return HeadraceError("request_too_large", f"The request body is larger than {bytes_max} bytes.")
