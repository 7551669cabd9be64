"""An OpenAI server that streams an answer of ``max_tokens`` chunks, all streams in common steps 20 ms apart.

    python -m tests.bench.openai_engine PORT

What other routers are measured with, as cheap as Python can be. With ``"simulate": {"ttft_ms": 0}`` the first chunk
comes at once.
"""

import asyncio
import json
import sys
from typing import cast

import uvloop

STEP_S = 0.02
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"simulated","object":"model","created":0,"owned_by":"bench"}]}'
CHUNK = (
    b'data: {"id":"chatcmpl-01920d5e-7c1a-7abc-8def-0123456789ab","object":"chat.completion.chunk",'
    b'"created":1790000000,"model":"simulated","choices":[{"index":0,"delta":{"content":" t%d"},'
    b'"logprobs":null,"finish_reason":%b}]}\n\n'
)

streams: "dict[Connection, None]" = {}


class Connection(asyncio.Protocol):
    """One keep-alive connection; requests come one after the other."""

    def __init__(self) -> None:
        self._buffer = b""
        self._given = self._tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if not end or len(rest) < int(length or 0):
            return
        self._buffer = b""
        if not head.startswith(b"POST"):
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(MODELS), MODELS)
            )
            return
        asked = json.loads(rest)
        self._given, self._tokens = 0, asked.get("max_tokens") or 16
        streams[self] = None
        self._transport.write(HEAD)
        if asked.get("simulate", {}).get("ttft_ms") == 0:
            self.step()

    def step(self) -> None:
        """Give one token."""
        self._given += 1
        last = self._given == self._tokens
        event = CHUNK % (self._given, b'"length"' if last else b"null")
        data = b"%x\r\n%b\r\n" % (len(event), event)
        if last:
            del streams[self]
            data += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        self._transport.write(data)


async def serve(port: int) -> None:
    """Until killed."""
    loop = asyncio.get_running_loop()
    await loop.create_server(Connection, "127.0.0.1", port)
    due = loop.time()
    while True:
        due += STEP_S
        await asyncio.sleep(max(0.0, due - loop.time()))
        for connection in list(streams):
            connection.step()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
