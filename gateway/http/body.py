"""Reading a request's body under bounds on size, time and inflation, before anything of it is parsed."""

import asyncio
import codecs
import zlib

from starlette.types import Receive

from contracts.errors import HeadraceError
from gateway.config import GatewayConfig
from gateway.http.caller import CallerLeft
from gateway.http.exchange import Exchange

_INFLATE_STEP = 256 << 10
"""Inflated bytes between two turns of the event loop: about a millisecond."""

_INFLATED_ALWAYS = 1 << 20
_RATIO_MAX = 100
"""Beyond the first MiB gzip may inflate by so much: JSON of real conversations does by 3 to 20, a bomb by 1,000."""


async def read(exchange: Exchange, config: GatewayConfig) -> bytes:
    """The whole body, inflated when it came as gzip, and without a byte order mark. Bounds are the configuration's.

    Raises HeadraceError: unsupported_media_type, request_too_large (as soon as it is known), request_timeout;
    and CallerLeft.
    """
    headers, bytes_max, s_max = exchange.scope["headers"], config.body_bytes_max, config.body_s_max
    given = dict(headers)
    _check_type(given.get(b"content-type", b""))
    gzipped = _is_gzip(b",".join(value for name, value in headers if name == b"content-encoding"))
    length = given.get(b"content-length", b"")
    if length.isdigit() and int(length) > bytes_max:
        raise _too_large(bytes_max)
    try:
        async with asyncio.timeout(s_max):
            data = await _gather(exchange.receive, bytes_max)
    except TimeoutError:
        raise HeadraceError("request_timeout", f"The request body did not arrive within {s_max:g} seconds.") from None
    data = await _inflate(data, bytes_max) if gzipped else data
    return data.removeprefix(codecs.BOM_UTF8)


async def _gather(receive: Receive, bytes_max: int) -> bytes:
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


async def _inflate(data: bytes, bytes_max: int) -> bytes:
    """One or more gzip members, as RFC 1952 has a file."""
    inflater = zlib.decompressobj(wbits=31)
    ratio_max = max(_INFLATED_ALWAYS, _RATIO_MAX * len(data))
    pieces: list[bytes] = []
    size = 0
    while data or not inflater.eof:
        if inflater.eof:
            inflater = zlib.decompressobj(wbits=31)
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
        pieces.append(piece)
        await asyncio.sleep(0)
    return b"".join(pieces)


def _too_large(bytes_max: int) -> HeadraceError:
    return HeadraceError("request_too_large", f"The request body is larger than {bytes_max} bytes.")
