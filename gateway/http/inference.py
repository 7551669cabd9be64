"""The inference endpoints: a request in, server-sent events or one JSON answer out.

The caller's disconnect is watched from the moment the body is read, streaming or not; it cancels the generation.
The status line of a stream waits for the first frame, so that early failures are plain HTTP errors.
"""

import asyncio
import time
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from contracts import shards
from contracts.errors import HeadraceError
from contracts.messages.admission import DEADLINE_MS_MAX
from contracts.messages.records import PRICE_TIERS, PriceTier
from contracts.messages.request import Reply
from contracts.workload import scope
from gateway import metrics
from gateway.apis.api import Api
from gateway.deliveries import DeliveryReports
from gateway.http import body
from gateway.http.caller import CallerLeft, CallerWatch
from gateway.http.exchange import Exchange, Headers
from gateway.http.request_log import RequestLog
from gateway.http.typed import Services
from gateway.intake.admission import Prepared, RequestContext, idempotency_key
from gateway.streams.hub import Hub
from gateway.streams.stream import GatewayStream

RETURN_S = 10.0
"""So long after its hang-up the request of a caller with an idempotency key goes on: clients pause for up to 8 s before
they ask again."""

_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_OWN_HEADERS = (b"x-headrace-", b"idempotency-key")


class Inference:
    """The APIs of the table, each as an ASGI application: ``partial(inference, api)``."""

    def __init__(self, services: Services, hub: Hub, deliveries: DeliveryReports) -> None:
        self._config = services.config
        self._directory = services.directory
        self._intake = services.intake
        self._turnstile = services.turnstile
        self._hub = hub
        self._deliveries = deliveries
        self.draining = False
        """New requests are refused."""
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def finished(self, within_s: float) -> bool:
        """Whether no request is under way any more, within this time."""
        try:
            await asyncio.wait_for(self._idle.wait(), within_s)
        except TimeoutError:
            return False
        return True

    async def __call__(self, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["headrace"]
        log = RequestLog(exchange, api)
        self._active += 1
        self._idle.clear()
        try:
            await self._serve(api, exchange, log)
        except HeadraceError as error:
            log.refused(error)
            if not exchange.status:
                await exchange.fail(error, status=log.status)
        except CallerLeft:
            log.outcome = "cancelled"
        except asyncio.CancelledError:
            log.outcome, log.code = "failed", "shutting_down"
            raise
        except Exception:
            log.outcome, log.code = "failed", "internal_error"
            raise
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()
            if (delivery := log.write()) is not None:
                self._deliveries.add(delivery)

    async def _serve(self, api: Api, exchange: Exchange, log: RequestLog) -> None:
        if self.draining:
            raise HeadraceError("shutting_down", "This server is shutting down; try again.", retry_after_s=1)
        given = exchange.scope["headers"]
        headers = [header for header in given if header[0].startswith(_OWN_HEADERS)]
        identity = self._directory.authenticate(given, exchange.address, "inference")
        exchange.tenant = identity.tenant.name
        log.tenant, log.key_id = identity.tenant.name, identity.key_id
        exchange.rate_limits = lambda: log.limits or self._intake.rate_limits(identity.tenant, log.model)
        context = RequestContext(
            request_id=exchange.request_id,
            identity=identity,
            api=api,
            reply=Reply(subject=self._hub.reply_inbox, stream=exchange.request_id),
            stream_owner=self._hub.stream_owner,
            deadline_ms=_deadline_ms(headers),
            client_request_id=exchange.client_request_id,
            price_ceiling=_price_ceiling(headers),
            prefix_caching=_prefix_caching(headers),
            traceparent=exchange.traceparent,
            idempotency_key=_idempotency_key(headers),
        )
        data = await body.read(exchange, self._config)
        with CallerWatch(exchange.receive) as caller:
            await self._turnstile.enter()
            prepared = await self._prepare(context, data, log)
            del data
            stream = log.stream = self._hub.listen(prepared.envelope)
            submitting: asyncio.Task[None] | None = None
            try:
                if stream.idempotency_key:  # It goes on without its caller, who may come back.
                    submitting = self._hub.spawn(self._submit(prepared, stream, log))
                    await asyncio.shield(submitting)
                else:
                    await self._submit(prepared, stream, log)
                del prepared  # The body is stored, and an answer may take minutes.
                if stream.relay.joined:
                    exchange.answer_as(stream.request_id)
                if stream.sse:
                    await _write_events(exchange, stream, caller, log)
                else:
                    await _write_answer(exchange, stream, caller, log)
            except asyncio.CancelledError:
                if submitting is not None:
                    self._hub.spawn(self._cancel_unless_joined(stream, submitting))
                else:
                    # Also before the request was stored: the scheduler remembers a cancel of an id it does not know.
                    self._hub.leave(stream, "client_disconnected")
                raise
            finally:
                self._hub.leave(stream)

    async def _prepare(self, context: RequestContext, data: bytes, log: RequestLog) -> Prepared:
        parsed = await self._intake.parse(context.identity.tenant, data)
        log.model = parsed.name
        prepared = await self._intake.prepare(context, parsed)
        log.envelope = prepared.envelope
        return prepared

    async def _submit(self, prepared: Prepared, stream: GatewayStream, log: RequestLog) -> None:
        """Admit and store, for the model that will answer, which may be a fallback; or join."""
        log.asked_at = time.monotonic()
        admitted = await self._intake.admit(prepared)
        log.admitted_at = time.monotonic()
        log.envelope, log.limits = admitted.envelope, admitted.limits
        stream.model = admitted.envelope.model
        log.model = shards.model_of(stream.model)
        log.version = admitted.version
        stream.scope = scope(admitted.envelope, admitted.envelope.version)
        await self._intake.publish(admitted)
        if admitted.joined:
            self._hub.join(stream, admitted.joined, streamed=stream.sse)

    async def _cancel_unless_joined(self, stream: GatewayStream, submitting: asyncio.Task[None]) -> None:
        """Who gave a key may come back for the answer, to any gateway; who does not has left."""
        try:
            await submitting
        except HeadraceError:
            return
        await asyncio.sleep(RETURN_S)
        await self._hub.cancel(stream, "client_disconnected")


async def _write_events(exchange: Exchange, stream: GatewayStream, caller: CallerWatch, log: RequestLog) -> None:
    """Server-sent events until the stream's end. Raises HeadraceError when it ends before anything was sent."""
    await stream.ready()
    if stream.ended and not stream.first_chunk_at:
        log.raise_for(stream)
    headers = [*_STREAM_HEADERS, *_answer_headers(log, stream)]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
    if not stream.ended:
        stream.write_to(exchange.writer)
        await stream.over()
    data = stream.take()
    failure = log.failure_of(stream)
    if failure is None:
        data += exchange.format.done
    else:
        metrics.ERRORS.labels(failure.code).inc()
        data += exchange.format.error_event(failure, stream.request_id, stream.attempt, stream.chunks)
    caller.let_go()
    await exchange.send({"type": "http.response.body", "body": data, "more_body": False})


async def _write_answer(exchange: Exchange, stream: GatewayStream, caller: CallerWatch, log: RequestLog) -> None:
    """One JSON answer. Raises HeadraceError when there is none."""
    await stream.over()
    log.raise_for(stream)
    caller.let_go()
    await exchange.respond(200, stream.take(), b"application/json", _answer_headers(log, stream))


def _deadline_ms(headers: Headers) -> int | None:
    given = [value for name, value in headers if name == b"x-headrace-deadline-ms"]
    if not given:
        return None
    if len(given) == 1 and given[0].isdigit() and 0 < int(given[0][:12]) <= DEADLINE_MS_MAX:
        return int(given[0])
    raise HeadraceError(
        "invalid_request",
        f"X-Headrace-Deadline-Ms must be a whole number of milliseconds from 1 to {DEADLINE_MS_MAX}.",
        param="X-Headrace-Deadline-Ms",
    )


def _price_ceiling(headers: Headers) -> PriceTier | None:
    given = [value.strip().decode("latin-1") for name, value in headers if name == b"x-headrace-price-ceiling"]
    if not given:
        return None
    for tier in PRICE_TIERS:
        if given == [tier]:
            return tier
    message = f"X-Headrace-Price-Ceiling must be one of {', '.join(PRICE_TIERS)}."
    raise HeadraceError("invalid_request", message, param="X-Headrace-Price-Ceiling")


def _prefix_caching(headers: Headers) -> bool:
    given = [value.strip().lower() for name, value in headers if name == b"x-headrace-prefix-caching"]
    if given in ([], [b"on"]):
        return True
    if given == [b"off"]:
        return False
    message = "X-Headrace-Prefix-Caching must be on or off."
    raise HeadraceError("invalid_request", message, param="X-Headrace-Prefix-Caching")


def _idempotency_key(headers: Headers) -> str:
    given = [value.strip() for name, value in headers if name == b"idempotency-key"]
    if not given:
        return ""
    return idempotency_key(given[0].decode("latin-1") if len(given) == 1 else "", "Idempotency-Key")


def _answer_headers(log: RequestLog, stream: GatewayStream) -> Headers:
    """Which version of which model answers, where that is known, and why the model does where it had to be chosen.

    The version is the worker's own word: what waits may be given another one than at its admission.
    """
    headers: Headers = []
    if log.envelope is None:
        return headers
    if version := stream.relay.version:
        log.version = version
        headers.append((b"x-headrace-model", _header_text(f"{shards.model_of(log.envelope.model)}@{version}")))
    if log.envelope.choice_reason and not stream.relay.joined:
        headers.append((b"x-headrace-choice", _header_text(log.envelope.choice_reason)))
    return headers


def _header_text(text: str) -> bytes:
    """Names may hold any character; a header only these (percent-encoded, as in a URL)."""
    return quote(text, safe=" @;:,./+=~!$'()*&").encode()
