"""Client for internal services: the APIs of ``submit`` over NATS, frames straight from the worker.

    mine = Credentials(seed_file="t.search.seed")
    async with Client("nats://...", tenant="search", credentials=mine) as client:
        async for chunk in client.chat(model="smol", messages=[{"role": "user", "content": "Hello"}]):
            print(chunk.text, end="")
        answer = await client.chat_once(model="smol", messages=[{"role": "user", "content": "Hello"}])
        print(answer.text, answer.usage)

One connection and one reply inbox serve all streams. While the client is open it sends heartbeats; when they stop, or
with the goodbye of ``close``, the schedulers cancel what it left open. A request's life is in contracts.client.stream.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from contracts import ids, permissions, subjects
from contracts.bus import ANONYMOUS, Bus, Credentials
from contracts.client.answers import (
    ApiObject,
    ChatAnswer,
    ChatChunk,
    CompletionChunk,
    EmbeddingsAnswer,
    MessageAnswer,
    MessageEvent,
    ResponseAnswer,
    ResponseEvent,
)
from contracts.client.stream import Access, ClientStream
from contracts.messages.base import Endpoint
from contracts.messages.frames import ErrorData
from contracts.messages.request import Reply, SubmitRequest
from contracts.streaming.subscriber import Subscriber

A = TypeVar("A", bound=ApiObject)

_Terms = tuple[int | None, str]
"""``deadline_ms`` and ``idempotency_key`` of a call."""

_OWN_FIELDS = ("prefix_caching", "price_ceiling")
"""Of a submit, and of no API: headers over HTTP."""

_encode = msgspec.json.Encoder().encode


class Client:
    """A tenant's access; ``async with`` connects and closes. Raises contracts.bus.Unavailable when it cannot connect.

    ``credentials``: the tenant's own (``headrace nats-config --tenant NAME`` makes its seed); files that are replaced
    are taken at once. ``retries``: how often a refusal (429, 503, 529) is tried again, after the pause that it names.
    """

    def __init__(self, nats_url: str, *, tenant: str, credentials: Credentials = ANONYMOUS, retries: int = 2) -> None:
        self.tenant = tenant
        self.incarnation = ids.incarnation("c")
        """Name of this client's life, under which it sends heartbeats."""
        self.reply_inbox = subjects.tenant_reply_prefix(tenant) + subjects.encode(self.incarnation)
        self.retries = retries
        self._nats_url = nats_url
        self._credentials = credentials
        self._access: Access | None = None

    async def __aenter__(self) -> Self:
        user = permissions.user_of_tenant(self.tenant)
        bus = await Bus.connect(self._nats_url, name=self.incarnation, user=user, credentials=self._credentials)
        subscriber = Subscriber(
            bus, reply_inbox=self.reply_inbox, stream_owner=subjects.tenant_stream_owner(self.tenant, self.incarnation)
        )
        try:
            await subscriber.start()
        except BaseException:
            await bus.close()
            raise
        self._access = Access(bus, subscriber, self.tenant, self.retries, self.incarnation)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every open stream and say goodbye, on which the schedulers cancel what still runs."""
        if self._access is None:
            return
        access, self._access = self._access, None
        try:
            access.subscriber.fail_all(ErrorData(code="cancelled", message="The client was closed."))
            await access.subscriber.close()
        finally:
            await access.bus.close()

    # One pair for each API that ``submit`` serves: ``chat`` streams, ``chat_once`` gives the whole answer, with its
    # usage. ``fields`` are the API's own. Each raises HeadraceError: ``submit``'s refusal, or how the request failed.
    # ``deadline_ms`` bounds the time to the first token, pauses between tries included; else the tenant's default does.
    # ``idempotency_key`` names the request: asked for again under it, also by another client of the tenant, it is
    # joined and not run twice, until ten minutes after its end. Without one a call has a key for its own tries.
    # Among ``fields``, and not the API's: ``prefix_caching=False``, neither to use a prompt that an engine remembers
    # nor to have this one remembered, and ``price_ceiling``, above whose tier nothing answers.

    def chat(
        self,
        *,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        deadline_ms: int | None = None,
        idempotency_key: str = "",
        **fields: Any,
    ) -> ClientStream[ChatChunk]:
        """OpenAI's chat completions, streamed. Sent when the iteration begins, as every stream."""
        return self._stream(
            "chat/completions", ChatChunk, model, (deadline_ms, idempotency_key), fields | {"messages": messages}
        )

    async def chat_once(
        self,
        *,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        deadline_ms: int | None = None,
        idempotency_key: str = "",
        **fields: Any,
    ) -> ChatAnswer:
        """A whole chat answer. The service tries again when a worker is lost: nothing has been shown."""
        return await self._once(
            "chat/completions", ChatAnswer, model, (deadline_ms, idempotency_key), fields | {"messages": messages}
        )

    def complete(
        self, *, model: str, prompt: object, deadline_ms: int | None = None, idempotency_key: str = "", **fields: Any
    ) -> ClientStream[CompletionChunk]:
        """OpenAI's completions, streamed."""
        return self._stream(
            "completions", CompletionChunk, model, (deadline_ms, idempotency_key), fields | {"prompt": prompt}
        )

    async def complete_once(
        self, *, model: str, prompt: object, deadline_ms: int | None = None, idempotency_key: str = "", **fields: Any
    ) -> CompletionChunk:
        """A whole completion."""
        return await self._once(
            "completions", CompletionChunk, model, (deadline_ms, idempotency_key), fields | {"prompt": prompt}
        )

    def respond(
        self, *, model: str, input: object, deadline_ms: int | None = None, idempotency_key: str = "", **fields: Any
    ) -> ClientStream[ResponseEvent]:
        """OpenAI's Responses, streamed."""
        return self._stream(
            "responses", ResponseEvent, model, (deadline_ms, idempotency_key), fields | {"input": input}
        )

    async def respond_once(
        self, *, model: str, input: object, deadline_ms: int | None = None, idempotency_key: str = "", **fields: Any
    ) -> ResponseAnswer:
        """A whole response."""
        return await self._once(
            "responses", ResponseAnswer, model, (deadline_ms, idempotency_key), fields | {"input": input}
        )

    def message(
        self,
        *,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        deadline_ms: int | None = None,
        idempotency_key: str = "",
        **fields: Any,
    ) -> ClientStream[MessageEvent]:
        """Anthropic's Messages, streamed; they want ``max_tokens``."""
        return self._stream(
            "messages", MessageEvent, model, (deadline_ms, idempotency_key), fields | {"messages": messages}
        )

    async def message_once(
        self,
        *,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        deadline_ms: int | None = None,
        idempotency_key: str = "",
        **fields: Any,
    ) -> MessageAnswer:
        """A whole message."""
        return await self._once(
            "messages", MessageAnswer, model, (deadline_ms, idempotency_key), fields | {"messages": messages}
        )

    async def embed(
        self, *, model: str, input: object, deadline_ms: int | None = None, idempotency_key: str = "", **fields: Any
    ) -> EmbeddingsAnswer:
        """OpenAI's embeddings, as lists of floats."""
        body = fields | {"input": input, "encoding_format": "float"}
        return await self._once("embeddings", EmbeddingsAnswer, model, (deadline_ms, idempotency_key), body)

    async def _once(self, endpoint: Endpoint, kind: type[A], model: str, terms: _Terms, body: dict[str, Any]) -> A:
        return await self._stream(endpoint, kind, model, terms, body, stream=False).whole()

    def _stream(
        self, endpoint: Endpoint, kind: type[A], model: str, terms: _Terms, body: dict[str, Any], *, stream: bool = True
    ) -> ClientStream[A]:
        if self._access is None:
            raise RuntimeError("the client is not connected: use it as `async with Client(...) as client`")
        deadline_ms, idempotency_key = terms
        own = {name: body.pop(name) for name in _OWN_FIELDS if name in body}
        request = SubmitRequest(
            endpoint=endpoint,
            reply=Reply(subject=self.reply_inbox, stream=self._access.new_name()),
            body=msgspec.Raw(_encode(body | {"stream": stream})),
            deadline_ms=deadline_ms,
            **own,
            stream_owner=self.incarnation,
            idempotency_key=idempotency_key or ids.request_id(),
        )
        return ClientStream(self._access, request, kind, model=model, stream=stream)
