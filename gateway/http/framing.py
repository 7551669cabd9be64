"""Where a request begins and ends in a connection's bytes, and what its head says (RFC 9112).

Pure: bytes in, values out. llhttp reads a head, which it is given whole and as it came. In what form a body comes is
decided here, strictly: what two readers could take for different requests is refused, and so are trailers. No part of
a request may grow without bound.
"""

import re
import urllib.parse

import httptools
import msgspec

HEAD_BYTES_MAX = 64 << 10
METHOD_BYTES_MAX = 32
HEADERS_MAX = 100
"""As Apache has it; what stands behind proxies has about 30."""
CHUNK_LINE_BYTES_MAX = 256
"""Size and extensions of a chunk; nobody is known to send extensions."""
SMALL_CHUNK_BYTES = 64
SMALL_CHUNKS_MAX = 8_192
"""Of a body: each costs us about 2 us and its sender a few bytes."""
CHUNKS_AT_ONCE = 128
"""Chunks that are taken before others have their turn: less than half a millisecond."""

_EMPTY_LINES = re.compile(rb"(?:\r\n)+")
# A target has no fragment (RFC 9112, 3.2): one reader drops it, another does not.
_METHOD = re.compile(rb"[A-Z-]{1,32}(?: |\Z)")
_FIRST_LINE = re.compile(rb"[A-Z-]+ [!\"$-~]+ HTTP/\d\.\d\r\n")
_NO_LINE_END = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)")
_NO_METHOD = "The request does not begin with a method, a target and HTTP/1.1."
_TLS = "This port speaks plain HTTP, and this is TLS: ask by http://."
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[\t\x20-\x7e\x80-\xff]*)?")


class BadRequest(Exception):
    """What came is no request that we take; ``status`` is the answer's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Head(msgspec.Struct, frozen=True):
    """A request's head. Names of headers are in lower case, values without white space around them."""

    method: str
    path: str
    """Decoded from percent encoding."""
    raw_path: bytes
    query: bytes
    version: str
    """1.0 or 1.1."""
    headers: list[tuple[bytes, bytes]]
    keep_alive: bool
    """The connection may be used again; never with HTTP/1.0."""
    continues: bool
    """The caller sends its body only when told to."""
    length: int | None
    """Bytes of the body; None: it comes in chunks."""


def without_empty_lines(buffer: bytearray) -> bool:
    """Removes those that stand before a request, as some clients send (RFC 9112, 2.2); whether there were any."""
    found = _EMPTY_LINES.match(buffer)
    if found:
        del buffer[: found.end()]
    return found is not None


def head_bytes(buffer: bytearray, seen: int) -> int:
    """Bytes of the head that ``buffer`` begins with, its empty line too; 0 while it is not whole.

    ``seen`` bytes were there at the last look. Raises BadRequest, and at once about what is another protocol: who
    speaks that waits for an answer, and never sends an end.
    """
    if buffer and seen <= METHOD_BYTES_MAX and not _METHOD.match(buffer):
        raise BadRequest(_TLS if buffer[0] == 0x16 else _NO_METHOD)
    end = buffer.find(b"\r\n\r\n", max(0, seen - 3))
    size = end + 4 if end >= 0 else len(buffer)
    if size > HEAD_BYTES_MAX:
        raise BadRequest("The request's headers are too large.", 431)
    if _NO_LINE_END.search(buffer, max(0, seen - 1), size):
        raise BadRequest("A line of the request's head ends in a bare CR or LF.")
    return size if end >= 0 else 0


def parse_head(data: bytes) -> Head:
    """A whole head, from its first line to its empty one; raises BadRequest."""
    if data.count(b"\n") - 2 > HEADERS_MAX:
        raise BadRequest(f"The request has more than {HEADERS_MAX} headers.", 431)
    if not _FIRST_LINE.match(data):
        raise BadRequest(_NO_METHOD)
    seen = _Seen()
    parser = httptools.HttpRequestParser(seen)
    seen.parser = parser
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # Offered, and not taken: the request is served as if nothing had been.
    except httptools.HttpParserError as error:
        raise BadRequest(f"The request is not valid HTTP: {error}.") from error
    if seen.ended != 1:
        raise BadRequest("The request is not valid HTTP.")
    method, version = parser.get_method().decode("ascii"), parser.get_http_version()
    if version not in ("1.0", "1.1"):
        raise BadRequest("Only HTTP/1.1 and 1.0 are served here.", 505)
    length = _length(seen.headers, version)
    path, raw_path, query = _target(method, seen.url)
    if (hosts := sum(name == b"host" for name, _ in seen.headers)) > 1 or (version == "1.1" and not hosts):
        raise BadRequest("A request of HTTP/1.1 has one Host header.")
    return Head(
        method=method,
        path=path,
        raw_path=raw_path,
        query=query,
        version=version,
        headers=seen.headers,
        keep_alive=seen.keep_alive and version == "1.1",
        continues=version == "1.1" and (b"expect", b"100-continue") in [(n, v.lower()) for n, v in seen.headers],
        length=length,
    )


class _Seen:
    """What the parser calls. Anything but one head is an error."""

    parser: httptools.HttpRequestParser

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.begun = 0
        self.ended = 0
        self.keep_alive = False

    def on_message_begin(self) -> None:
        self.begun += 1
        if self.begun > 1:
            raise BadRequest("a second request in a head")

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.ended += 1
        self.keep_alive = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        raise BadRequest("a body in a head")


def _length(headers: list[tuple[bytes, bytes]], version: str) -> int | None:
    """Of the body, None: in chunks. Both at once, and either twice, never came this far: llhttp refuses them."""
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    lengths = [value for name, value in headers if name == b"content-length"]
    if codings:
        if codings != [b"chunked"] or version == "1.0" or lengths:
            raise BadRequest("The only Transfer-Encoding that is understood is chunked, of HTTP/1.1.", 501)
        return None
    if len(lengths) > 1 or (lengths and not re.fullmatch(rb"[0-9]{1,18}", lengths[0])):
        raise BadRequest("Content-Length is one whole number.")
    return int(lengths[0]) if lengths else 0


def _target(method: str, url: bytes) -> tuple[str, bytes, bytes]:
    """Path, raw path and query; of an absolute form, too, whose host is ignored."""
    if url == b"*" and method == "OPTIONS":
        return "*", url, b""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserError as error:
        raise BadRequest("The request's target is not valid.") from error
    raw_path = parsed.path or (b"/" if parsed.schema else b"")
    if parsed.schema not in (None, b"http", b"https") or not raw_path.startswith(b"/") or not raw_path.isascii():
        raise BadRequest("The request's target is not a path.")
    path = raw_path.decode("ascii")
    return urllib.parse.unquote(path) if "%" in path else path, raw_path, parsed.query or b""


class Sized:
    """A body of a stated length."""

    more = False

    def __init__(self, length: int) -> None:
        self.left = length
        """Bytes that have not been taken."""

    @property
    def done(self) -> bool:
        """Nothing of it is missing."""
        return self.left == 0

    def take(self, buffer: bytearray) -> bytes:
        """Moves what is there of it out of the connection's buffer."""
        data = bytes(buffer[: self.left])
        del buffer[: len(data)]
        self.left -= len(data)
        return data


class Chunked:
    """A body in chunks."""

    def __init__(self) -> None:
        self.done = False
        """Nothing of it is missing."""
        self.more = False
        """The last ``take`` left some for its next turn."""
        self._left = 0
        """Bytes of the present chunk, its line end too; 0: a size is due."""
        self._last = False
        self._small = 0

    def take(self, buffer: bytearray) -> bytes:
        """Moves what is there of it out of the connection's buffer; raises BadRequest."""
        pieces: list[bytearray] = []
        at = chunks = 0
        while chunks < CHUNKS_AT_ONCE and not self.done:
            if not self._left:
                begin = self._begin(buffer, at)
                if begin == at:
                    break
                at = begin
                chunks += 1
            size = min(self._left - 2, len(buffer) - at)
            pieces.append(buffer[at : at + size])
            at += size
            self._left -= size
            if self._left > 2:
                break
            end = bytes(buffer[at : at + 2])
            if not b"\r\n".startswith(end):
                raise BadRequest(
                    "Trailers are not accepted." if self._last else "A chunk of the body has a wrong size."
                )
            if len(end) < 2:
                break
            at += 2
            self._left = 0
            self.done = self._last
        self.more = chunks == CHUNKS_AT_ONCE and not self.done
        del buffer[:at]
        return b"".join(pieces)

    def _begin(self, buffer: bytearray, at: int) -> int:
        """Reads a chunk's first line; where its data begins, or ``at`` when the line is not whole."""
        end = buffer.find(b"\r\n", at, at + CHUNK_LINE_BYTES_MAX + 2)
        if end < 0:
            if len(buffer) - at > CHUNK_LINE_BYTES_MAX or buffer.find(b"\n", at) >= 0:
                raise BadRequest("A chunk of the body does not begin with its size.")
            return at
        line = _CHUNK_LINE.fullmatch(buffer, at, end)
        if line is None:
            raise BadRequest("A chunk of the body does not begin with its size.")
        size = int(line[1], 16)
        self._small += size < SMALL_CHUNK_BYTES
        if self._small > SMALL_CHUNKS_MAX:
            raise BadRequest("The body comes in too many small chunks.")
        self._left = size + 2
        self._last = size == 0
        return end + 2
