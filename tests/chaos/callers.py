"""Callers of the long run: what each asks, over HTTP or the bus, what it reads, and whether it should have read that.

A caller asks again, as clients do, within ASKS_S: while it is refused for want of a server, a place or a bus, and after
a connection that broke before it had read anything. With an idempotency key it is one request, and asked for again also
when part of it was read; without one each try may be billed.
"""

import asyncio
import random
import time
import uuid
from typing import Any

from contracts.client import Client
from contracts.client.answers import ChatAnswer, ChatChunk
from contracts.errors import TABLE, HeadraceError
from tests.support.cluster import MODEL, Call, Cluster, chat

ASKS_S = 200.0
"""Longer than the longest cut, and than what must settle after it."""
PAUSE_S = (0.5, 3.0)
EXPECTED_ERRORS = {
    "worker_lost",
    "stream_interrupted",
    "engine_error",
    "request_quarantined",
    "shutting_down",
    "unavailable",
    "overloaded",
    "cancelled",
    "deadline_exceeded",
    "conflict",
}
"""What a caller may be told when something broke; ``cancelled`` where its gateway or service was not heard for 3 s,
``conflict`` where its key's answer is no longer kept."""
ASKED_AGAIN = {"unavailable", "overloaded", "shutting_down", "rate_limit_exceeded"}


class BusCall:
    """One call of a service over the bus; what it shows is as ``Call`` shows it."""

    def __init__(self, client: Client, body: dict[str, Any], key: str) -> None:
        self.text = ""
        self.code = ""
        self.broke = ""
        self.endings = 0
        self.asked_at = time.monotonic()
        self.first_at = 0.0
        kind: type[ChatChunk] | type[ChatAnswer] = ChatChunk if body["stream"] else ChatAnswer
        fields = {name: value for name, value in body.items() if name not in ("stream", "model")}
        self._stream = client._stream("chat/completions", kind, MODEL, (None, key), fields, stream=bool(body["stream"]))
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async for piece in self._stream:
                self.first_at = self.first_at or time.monotonic()
                self.text += piece.text
        except HeadraceError as error:
            self.code = error.code
        self.endings += 1

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def over(self) -> bool:
        return self._task.done()

    @property
    def complete(self) -> bool:
        return self.over and bool(self.endings) and not self.code

    async def done(self, limit_s: float) -> None:
        async with asyncio.timeout(limit_s):
            await asyncio.shield(self._task)

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def story(self) -> str:
        return f"{self.request_id} over the bus {self.code} {self.text[-60:]!r}"


class Request:
    """One caller's request and what it should read."""

    def __init__(self, number: int, source: random.Random) -> None:
        self.number = number
        self.tokens = [f"{number}.{index} " for index in range(source.randint(1, 40))]
        self.stream = source.random() < 0.7
        self.over_bus = source.random() < 0.5
        self.gateway = source.randrange(2)
        self.key = uuid.UUID(int=source.getrandbits(128)).hex if self.over_bus or source.random() < 0.5 else ""
        self.leaves_after_s = source.uniform(0, 0.3) if source.random() < 0.05 else None
        self.simulate: dict[str, object] = {"tokens": self.tokens}
        fate = source.random()
        if fate < 0.001:
            self.simulate["exit_after"] = 0
        elif fate < 0.02:
            self.simulate["fail_after"] = source.randrange(len(self.tokens))
        elif fate < 0.1:
            self.simulate["ttft_ms"] = source.randint(100, 2000)
        words = 20_000 if source.random() < 0.005 else source.randint(1, 50)
        self.words = ["word"] * words
        self.calls: list[Call | BusCall] = []
        """Its tries; the last one's ending is the caller's."""
        self.ended_at = 0.0

    @property
    def name(self) -> str:
        """What it calls itself in ``X-Request-Id``."""
        return f"long-run-{self.number}"

    @property
    def script(self) -> str:
        return "".join(self.tokens)

    @property
    def ttft_s(self) -> float:
        return float(self.simulate.get("ttft_ms", 0)) / 1000  # type: ignore[arg-type]

    @property
    def call(self) -> Call | BusCall | None:
        return self.calls[-1] if self.calls else None

    @property
    def ids(self) -> set[str]:
        """Of all its tries, as far as it was told."""
        return {call.request_id for call in self.calls if call.request_id}

    async def run(self, cluster: Cluster, clients: list[Client], source: random.Random) -> None:
        give_up_at = time.monotonic() + ASKS_S
        while True:
            call = self._ask(cluster, clients)
            self.calls.append(call)
            if self.leaves_after_s is not None:
                await asyncio.sleep(self.leaves_after_s)
                await call.leave()
                break
            await call.done(ASKS_S + 60)
            refused = call.code in ASKED_AGAIN and not call.text
            unread = bool(call.broke) and (bool(self.key) or not call.text)
            if not (refused or unread) or time.monotonic() > give_up_at:
                break
            await asyncio.sleep(source.uniform(*PAUSE_S))
        self.ended_at = time.monotonic()

    def _ask(self, cluster: Cluster, clients: list[Client]) -> "Call | BusCall":
        body = {"messages": chat(self.words), "stream": self.stream, "simulate": self.simulate, "max_tokens": 64}
        if self.over_bus:
            return BusCall(clients[self.number % len(clients)], body, self.key)
        headers = {"X-Request-Id": self.name} | ({"Idempotency-Key": self.key} if self.key else {})
        gateway = (self.gateway + len(self.calls)) % len(cluster.gateways)
        return Call(cluster, cluster.gateways[gateway], body, headers)

    def ending(self) -> str:
        """How it ended, for the count."""
        call = self.call
        if call is None:
            return "not sent"
        if self.leaves_after_s is not None:
            return "left"
        return "complete" if call.complete else "connection broken" if call.broke else call.code

    def story(self) -> str:
        return f"{self.problem()}: {self.call.story() if self.call is not None else ''}"

    def problem(self) -> str:
        """What the caller saw that it should not have; empty when all was well."""
        call = self.call
        if call is None:
            return "never sent"
        for each in self.calls:
            if not self.script.startswith(each.text):
                return f"wrong text {each.text!r}"
        if self.leaves_after_s is not None:
            return ""
        if not call.over:
            return "no end"
        if call.endings + bool(call.broke) != 1:
            return f"{call.endings} endings, connection {call.broke or 'whole'}"
        if call.complete:
            return "" if call.text == self.script else f"complete with {call.text!r} for {self.script!r}"
        if not call.broke and call.code not in EXPECTED_ERRORS:
            return f"unexpected error {call.code}"
        return ""


assert TABLE.keys() >= EXPECTED_ERRORS
