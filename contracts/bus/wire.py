"""NATS's protocol as bytes: what the server sends taken apart, and what is published put together.

In place of the library's parser and writer, which take several times as long for each message. Pure.
"""

import re
from collections.abc import Callable, Mapping

LINE_BYTES_MAX = 4096
"""The server's own bound on a line; a longer one is no NATS server's."""

_UNFIT = re.compile(r"[ \t\r\n]")
_LINE_ENDS = str.maketrans("\r\n", "  ")
_MESSAGE, _MESSAGE_WITH_HEADERS = ord("M"), ord("H")

OnMessage = Callable[[int, bytes, bytes, bytes, bytes], None]
"""Subscription's number, subject, reply, headers as they came (empty: none), data."""


class Malformed(Exception):
    """What came is no NATS."""


class Reader:
    """``feed`` it what came in; each whole message goes to ``on_message``, and all other lines come back."""

    def __init__(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self.reset()

    def reset(self) -> None:
        """Forget what was begun: the next bytes are those of another connection."""
        self._buffer = bytearray()
        self._least = 1
        """Bytes that must be there before anything can be whole."""

    def feed(self, data: bytes) -> list[bytes]:
        """Lines that are no message, without their ends: INFO, PING, PONG, +OK and -ERR. Raises Malformed.

        ``on_message`` must not raise, and may call ``reset``.
        """
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._least:
                return []  # Of 8 MB in pieces each is looked at once.
            data = bytes(self._buffer)
        self._buffer, self._least = buffer, _ = bytearray(), 1
        at, lines = 0, []
        while (end := data.find(b"\r\n", at, at + LINE_BYTES_MAX)) >= 0:
            kind = data[at] if end > at else 0
            if kind not in (_MESSAGE, _MESSAGE_WITH_HEADERS):
                lines.append(data[at:end])
                at = end + 2
                continue
            try:
                number, subject, reply, headers, size = _arguments(data[at:end], kind)
            except (ValueError, IndexError) as error:
                raise Malformed(f"{data[at:end][:100]!r}") from error
            start = end + 2
            if len(data) < start + size + 2:
                self._least = start + size + 2 - at
                break
            body = start + headers
            self._on_message(number, subject, reply, data[start:body], data[body : start + size])
            if self._buffer is not buffer:
                return lines  # It was reset.
            at = start + size + 2
        else:
            if len(data) - at > LINE_BYTES_MAX:
                raise Malformed(f"a line of more than {LINE_BYTES_MAX} bytes")
        buffer += memoryview(data)[at:]
        return lines


def _arguments(line: bytes, kind: int) -> tuple[int, bytes, bytes, int, int]:
    """Of ``MSG <subject> <number> [reply] <bytes>`` and ``HMSG <subject> <number> [reply] <of headers> <bytes>``: the
    number, the subject, the reply, bytes of headers and bytes in all."""
    words = line.split()
    lengths = 1 if kind == _MESSAGE else 2
    if words[0] not in (b"MSG", b"HMSG") or not 3 <= len(words) - lengths <= 4:
        raise ValueError
    size = int(words[-1])
    headers = int(words[-2]) if lengths == 2 else 0
    if not 0 <= headers <= size:
        raise ValueError
    return int(words[2]), words[1], words[3] if len(words) - lengths == 4 else b"", headers, size


def headers_of(raw: bytes) -> dict[str, str]:
    """Headers of a message; a status line's as ``Status`` and ``Description``."""
    first, *lines = raw.decode("utf-8", "replace").split("\r\n")
    found: dict[str, str] = {}
    if status := first[8:].strip():  # behind NATS/1.0
        found["Status"], _, description = status.partition(" ")
        if description:
            found["Description"] = description.strip()
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found[name.strip()] = value.strip()
    return found


def publication(subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> bytes:
    """One message to the server; raises ValueError for a subject that would be more than one word."""
    if not subject or _UNFIT.search(subject) or _UNFIT.search(reply):
        raise ValueError(f"no subject: {subject[:100]!r}, reply {reply[:100]!r}")
    if headers is None:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(data), data)
    lines = "".join(f"{name}: {value.translate(_LINE_ENDS)}\r\n" for name, value in headers.items())
    head = f"NATS/1.0\r\n{lines}\r\n".encode()
    sizes = len(head), len(head) + len(data)
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject.encode(), reply.encode(), *sizes, head, data)
