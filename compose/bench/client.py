"""Sends a planned load over HTTP and notes what comes back and when."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import aiohttp
import msgspec

from compose.bench.measure import Seen
from compose.bench.workload import Planned

EVENT_BYTES_MAX = 1 << 22
ANSWER_BYTES_MAX = 1 << 16
"""Read of an error's body."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Error(msgspec.Struct):
    code: str | int | None = None
    type: str | None = None


class _Event(msgspec.Struct):
    """The parts of a chunk, or of an error, that are measured."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_event = msgspec.json.Decoder(_Event)


class Target(msgspec.Struct, frozen=True):
    """A server to load. ``url`` is its root, with or without ``/v1``."""

    url: str
    model: str
    keys: tuple[str, ...] = ("",)
    timeout_s: float = 600.0
    ignore_eos: bool = True
    """Ask for exactly as many tokens as planned; a server that does not know the field needs False."""

    @property
    def api(self) -> str:
        root = self.url.rstrip("/")
        return root if root.endswith("/v1") else f"{root}/v1"


class Generator:
    """One run. ``on_end`` is called with each request that has ended."""

    def __init__(self, target: Target, *, concurrency: int | None, on_end: Callable[[Seen], None]) -> None:
        self._target = target
        self._places = asyncio.Semaphore(concurrency) if concurrency else None
        self._on_end = on_end
        self._began = 0.0

    async def run(self, plan: Iterable[Planned], *, closed: bool) -> list[Seen]:
        """Send all; gives what was seen, in the order of sending.

        ``closed``: a request is due when a place is free for it, not at an instant of its own.
        """
        line: list[Seen] = []
        timeout = aiohttp.ClientTimeout(total=self._target.timeout_s, sock_connect=10)
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=EVENT_BYTES_MAX) as session,
            asyncio.TaskGroup() as group,
        ):
            self._began = time.perf_counter()
            for planned in plan:
                if self._places is not None and closed:
                    await self._places.acquire()
                elif (wait := planned.at_s - self._now()) > 0:
                    await asyncio.sleep(wait)
                due_s = self._now() if closed else planned.at_s
                group.create_task(self._converse(session, planned, due_s, line, placed=closed))
        return line

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _converse(
        self, session: aiohttp.ClientSession, planned: Planned, due_s: float, line: list[Seen], *, placed: bool
    ) -> None:
        """All turns of one conversation; it ends with the first that fails."""
        if self._places is not None and not placed:
            await self._places.acquire()
        try:
            messages = [{"role": "system", "content": planned.system}] if planned.system else []
            for turn, (said, tokens) in enumerate(planned.turns):
                messages.append({"role": "user", "content": said})
                seen = Seen(number=planned.number, turn=turn, tenant=planned.tenant, due_s=due_s)
                line.append(seen)
                answer = await self._ask(session, seen, messages, tokens)
                self._on_end(seen)
                if seen.error:
                    return
                messages.append({"role": "assistant", "content": answer})
                due_s = self._now()
        finally:
            if self._places is not None:
                self._places.release()

    async def _ask(
        self, session: aiohttp.ClientSession, seen: Seen, messages: Sequence[dict[str, str]], tokens: int
    ) -> str:
        """One request; gives the text of its answer."""
        body: dict[str, Any] = {
            "model": self._target.model,
            "messages": messages,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._target.ignore_eos:
            body["ignore_eos"] = True
        key = self._target.keys[seen.tenant % len(self._target.keys)]
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = msgspec.json.encode(body)
        parts: list[str] = []
        seen.sent_s = self._now()
        try:
            async with session.post(f"{self._target.api}/chat/completions", data=data, headers=headers) as answer:
                seen.status = answer.status
                seen.request_id = answer.headers.get("x-request-id", "")
                if answer.status != 200:
                    seen.error = _refusal(answer.status, await answer.content.read(ANSWER_BYTES_MAX))
                else:
                    await self._read(answer, seen, parts)
        except TimeoutError:
            seen.error = "timeout"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            seen.error = f"connection: {type(error).__name__}"
        seen.end_s = self._now()
        if not seen.error and math.isnan(seen.first_s):
            seen.error = "empty answer"
        return "".join(parts)

    async def _read(self, answer: aiohttp.ClientResponse, seen: Seen, parts: list[str]) -> None:
        """Events until [DONE]: without it the answer is not whole."""
        last = math.nan
        async for data in _events(answer.content):
            if data == b"[DONE]":
                return
            event = _event.decode(data)
            if event.error is not None:
                seen.error = str(event.error.code or event.error.type or "error")
                return
            if event.usage is not None:
                seen.prompt_tokens, seen.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
                details = event.usage.prompt_tokens_details
                seen.cached_tokens = (details.cached_tokens or 0) if details is not None else 0
            for choice in event.choices:
                if said := (choice.delta.content or choice.delta.reasoning or choice.delta.reasoning_content):
                    now = self._now()
                    if math.isnan(last):
                        seen.first_s = now
                    else:
                        seen.gaps.append(now - last)
                    last = now
                    parts.append(said)
        seen.error = "cut off"


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events; comments and other fields are passed over."""
    async for raw in content:
        if raw.startswith(b"data:"):
            yield raw[5:].strip()


def _refusal(status: int, data: bytes) -> str:
    """The code that the server gave, or the status."""
    try:
        error = _event.decode(data).error
    except msgspec.MsgspecError:
        error = None
    return str((error and (error.code or error.type)) or f"HTTP {status}")
