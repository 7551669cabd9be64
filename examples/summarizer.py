"""A summarizer: an internal service that asks over NATS and streams to callers of its own.

Post a text, read its summary while it is written. Beside a stack that runs in DIR:

    headrace tenant create library --data-dir DIR
    export $(headrace nats-config --tenant library --data-dir DIR)
    python examples/summarizer.py --tenant library --model smollm2-135m-instruct --port 9000
    curl -N --data-binary @README.md http://127.0.0.1:9000/summaries

What such a service has to think of:

- *Deadline*: the first token must come within DEADLINE_MS, else 504; SUMMARY_TOKENS bound what follows.
- *Refusals* (429, 529): the client waits as ``Retry-After`` says and asks again, as long as that fits the deadline;
  then the refusal is passed on, and our caller can obey it.
- *Callers that leave*: leaving the loop over a stream cancels the generation.
- *Failures after the first token*: the answer is cut off, so that half a summary never looks whole.
- *SIGTERM*: no new requests; running ones have GRACE_S to finish, the rest are cancelled; exit status 0.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from contracts.bus import Credentials
from contracts.client import ChatChunk, Client, ClientStream
from contracts.errors import HeadraceError

DEADLINE_MS = 10_000
GRACE_S = 10
SUMMARY_TOKENS = 200
ORDER = "Summarize the user's text in two or three plain sentences."
PASSED_ON = (400, 413, 429, 503, 504, 529)
"""What our caller can act upon; any other failure is ours, a 502."""

log = logging.getLogger("summarizer")


def application(nats_url: str, credentials: Credentials, tenant: str, model: str) -> FastAPI:
    """The service, at the expense of ``tenant``, whose own ``credentials`` are."""
    client = Client(nats_url, tenant=tenant, credentials=credentials)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:  # One connection for all requests. Its end cancels what is still open.
            yield

    app = FastAPI(title="Summarizer", lifespan=lifespan)

    @app.post("/summaries")
    async def summarize(request: Request) -> Response:
        text = (await request.body()).decode(errors="replace")
        stream = client.chat(
            model=model,
            messages=[{"role": "system", "content": ORDER}, {"role": "user", "content": text}],
            max_tokens=SUMMARY_TOKENS,
            deadline_ms=DEADLINE_MS,
        )
        chunks = aiter(stream)
        # The status line waits for the first token: until then a refusal is told by its status.
        first = await unless_gone(request, chunks)
        if first is None:
            return Response(status_code=499)
        return StreamingResponse(pieces(first, chunks, stream), media_type="text/plain; charset=utf-8")

    @app.exception_handler(HeadraceError)
    async def refused(_: Request, error: HeadraceError) -> Response:
        log.warning("refused: %s", error.code)
        status = error.status if error.status in PASSED_ON else 502
        headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        return PlainTextResponse(f"{error.message}\n", status, headers)

    return app


async def unless_gone(request: Request, chunks: AsyncIterator[ChatChunk]) -> ChatChunk | None:
    """The first chunk, or None when the caller left before it came. Raises HeadraceError."""
    first = asyncio.ensure_future(anext(chunks))
    gone = asyncio.ensure_future(request.receive())  # After the body nothing can come but the hang-up.
    try:
        await asyncio.wait({first, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await first if first.done() else None
    finally:
        first.cancel()
        gone.cancel()


async def pieces(
    first: ChatChunk, chunks: AsyncIterator[ChatChunk], stream: ClientStream[ChatChunk]
) -> AsyncIterator[str]:
    """The summary; the task that reads this is cancelled when the caller leaves, and so is the generation then."""
    yield first.text
    async for chunk in chunks:
        yield chunk.text
    if (used := stream.usage) is not None:
        log.info("%s: %d tokens in, %d out", stream.request_id, used.prompt_tokens, used.completion_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="Summarize texts over HTTP. HEADRACE_NATS_URL: the bus.")
    parser.add_argument("--tenant", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=9000)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # uvicorn raises it again when it has shut down.
    credentials = Credentials.from_environment(os.environ)
    app = application(os.environ["HEADRACE_NATS_URL"], credentials, options.tenant, options.model)
    uvicorn.run(app, port=options.port, timeout_graceful_shutdown=GRACE_S)


if __name__ == "__main__":
    main()
