"""What the bus's servers do and tell by their system account: read their configuration again, who is connected."""

import asyncio
from typing import Any

import msgspec

from compose.stack.data_dir import ComposeError
from compose.stack.seeds import SYSTEM
from contracts.bus import Bus, BusError, Credentials, Incoming

TIMEOUT_S = 5.0
SERVERS_SILENT_S = 0.3
"""After this without another answer all servers of a cluster have answered."""
RELOADS = 2
"""nats-server 2.15.1 connects the imports of an account that is new only when it reads the configuration once more."""
LISTED_MAX = 10_000


class Servers:
    """All servers of a bus. Every method raises ComposeError."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        self._url = url
        self._credentials = credentials

    async def reload(self) -> None:
        """Have each server read its configuration again; who is no user any more is cut off when this returns."""
        async with asyncio.timeout(4 * TIMEOUT_S):
            bus = await self._connect()
            try:
                for _ in range(RELOADS):
                    for server in [answer["server"]["id"] for answer in await _all(bus, "$SYS.REQ.SERVER.PING")]:
                        await self._reload(bus, server)
            finally:
                await bus.close()

    async def connected_keys(self) -> set[str]:
        """Public keys of the users that are connected now."""
        bus = await self._connect()
        try:
            answers = await _all(bus, "$SYS.REQ.SERVER.PING.CONNZ", {"auth": True, "limit": LISTED_MAX})
        finally:
            await bus.close()
        found = [each for answer in answers for each in answer["data"].get("connections", ())]
        return {each.get("nkey") or each.get("authorized_user", "") for each in found}

    async def _connect(self) -> Bus:
        try:
            return await Bus.connect(self._url, name=SYSTEM, credentials=self._credentials, timeout_s=TIMEOUT_S)
        except BusError as error:
            raise ComposeError(f"{error}; is the stack running?") from error

    async def _reload(self, bus: Bus, server: str) -> None:
        try:
            answer = msgspec.json.decode(
                await bus.request(f"$SYS.REQ.SERVER.{server}.RELOAD", b"", timeout_s=TIMEOUT_S)
            )
        except BusError as error:
            raise ComposeError(f"the server does not take its new configuration; its log says why ({error})") from error
        if refusal := answer.get("error"):
            raise ComposeError(f"the server does not take its new configuration: {refusal.get('description')}")


async def _all(bus: Bus, subject: str, question: object = None) -> list[Any]:
    """The answers of all servers."""
    answers: list[Any] = []
    came = asyncio.Event()

    def take(message: Incoming) -> None:
        answers.append(msgspec.json.decode(message.data))
        came.set()

    inbox = bus.session.new_inbox()
    subscription = await bus.subscribe(inbox, take)
    await bus.publish(subject, msgspec.json.encode(question) if question else b"", reply=inbox)
    try:
        while True:
            async with asyncio.timeout(SERVERS_SILENT_S if answers else TIMEOUT_S):
                await came.wait()
                came.clear()
    except TimeoutError:
        pass
    finally:
        await subscription.close()
    if not answers:
        raise ComposeError("no server of the bus answers the system account")
    return answers
