"""Streams over HTTP, read as cheaply as Python can, and what processes use meanwhile. For benchmarks.

CPU is that of whole processes with all their threads, by the kernel's clock of each, in nanoseconds.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from typing import cast
from urllib.parse import urlsplit

import msgspec

END = b"0\r\n\r\n"


class Answer(msgspec.Struct):
    """One streamed answer as its caller saw it; seconds of a monotonic clock."""

    asked_at: float
    first_at: float = 0.0
    ended_at: float = 0.0
    chunks: int = 0
    """Events with data, the last ones too; several that came together were counted together."""
    last_at: float = 0.0
    """When the last ones came."""
    pauses: list[float] = []


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of them is."""
    return sorted(values)[int(len(values) * share)]


class Caller(asyncio.Protocol):
    """One keep-alive connection. Of an answer it counts events and looks at nothing else."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.answer: Answer
        """The one under way, or the last one."""
        self.ended: asyncio.Future[Answer]
        """Of that one."""
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes) -> "asyncio.Future[Answer]":
        self.answer = Answer(asked_at=time.perf_counter(), pauses=[])
        self.ended = asyncio.get_running_loop().create_future()
        self._tail = b""
        self.transport.write(request)
        return self.ended

    def data_received(self, data: bytes) -> None:
        now, answer = time.perf_counter(), self.answer
        if not answer.last_at:
            answer.last_at = now
            if not data.startswith(b"HTTP/1.1 200 ") and not self.ended.done():
                self.ended.set_exception(ConnectionError(data.decode(errors="replace")))
        if count := data.count(b"data: {"):
            if answer.chunks:
                answer.pauses.append(now - answer.last_at)
            else:
                answer.first_at = now
            answer.chunks += count
            answer.last_at = now
        self._tail = (self._tail + data[-len(END) :])[-len(END) :]
        if self._tail == END and not self.ended.done():
            answer.ended_at = now
            self.ended.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if hasattr(self, "ended") and not self.ended.done():
            self.ended.set_exception(ConnectionError("closed in the middle of an answer"))


class Server(msgspec.Struct, frozen=True):
    """Whom to ask."""

    url: str
    model: str
    key: str = ""

    def request(self, *, tokens: int, **more: object) -> bytes:
        """A chat of three words, streamed."""
        messages = [{"role": "user", "content": "one two three"}]
        body = json.dumps({"model": self.model, "messages": messages, "stream": True, "max_tokens": tokens, **more})
        return (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {urlsplit(self.url).netloc}\r\n"
            f"Authorization: Bearer {self.key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        ).encode()

    async def connect(self) -> Caller:
        split = urlsplit(self.url)
        loop = asyncio.get_running_loop()
        _, caller = await loop.create_connection(Caller, split.hostname or "", split.port or 80)
        return caller


def cpu_s(pids: Iterable[int]) -> float:
    """What these processes have used, in seconds."""
    return sum(time.clock_gettime(((~pid) << 3) | 2) for pid in pids)  # CPUCLOCK_SCHED of a process, as libc makes it


async def first_tokens(server: Server, request: bytes, times: int) -> list[float]:
    """Seconds to the first event of each of so many answers, one after the other; the first 20 are not counted."""
    caller = await server.connect()
    answers = [await caller.ask(request) for _ in range(20 + times)][20:]
    caller.transport.abort()
    return [answer.first_at - answer.asked_at for answer in answers]


async def streams(server: Server, *, at_once: int, answers: int, request: bytes, spread_s: float = 0.0) -> list[Answer]:
    """``answers`` on each of ``at_once`` connections, one after the other; they begin over ``spread_s``."""
    callers = [await server.connect() for _ in range(at_once)]

    async def one(caller: Caller, delay_s: float) -> list[Answer]:
        await asyncio.sleep(delay_s)
        return [await caller.ask(request) for _ in range(answers)]

    try:
        each = (one(caller, spread_s * number / at_once) for number, caller in enumerate(callers))
        return [answer for found in await asyncio.gather(*each) for answer in found]
    finally:
        for caller in callers:
            caller.transport.abort()
