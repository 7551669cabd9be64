"""The inference endpoints: a request in, server-sent events or one JSON answer out.

The caller's disconnect is watched from the moment the body is read, streaming or not; it cancels the generation.
The status line of a stream waits for the first frame, so that early failures are plain HTTP errors.
"""

import asyncio
import time
from types import TracebackType
from typing import Self

import structlog

from contracts.errors import HeadraceError
from contracts.messages.admission import DEADLINE_MS_MAX, RateLimits
from contracts.messages.frames import ErrorData
from contracts.messages.request import Reply
from gateway import metrics
from gateway.apis.api import Api
from gateway.config import GatewayConfig
from gateway.http import body
from gateway.http.body import CallerLeft
from gateway.http.exchange import Exchange, Headers, Receive, Scope, Send
from gateway.intake.admission import Admission, AdmissionRefused, Admitted, Prepared, RequestContext
from gateway.intake.auth import Directory
from gateway.streams.hub import Hub
from gateway.streams.stream import KEEP_ALIVE, GatewayStream

_log = structlog.get_logger()

_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Caller:
    """Watches for the hang-up of an HTTP caller: inside the block it becomes CallerLeft."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._over = False
        self._left = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()
        self._watcher.cancel()
        if self._left:
            self._task.uncancel()
            if kind is asyncio.CancelledError:
                raise CallerLeft from None

    def let_go(self) -> None:
        """What comes now ends the answer; a disconnect is no longer of interest."""
        self._over = True

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._over:
            self._left = True
            self._task.cancel()


class Inference:
    """The APIs of the table, each as an ASGI application: ``partial(inference, api)``."""

    def __init__(
        self,
        *,
        directory: Directory,
        admission: Admission,
        hub: Hub,
        config: GatewayConfig,
    ) -> None:
        self._directory = directory
        self._admission = admission
        self._hub = hub
        self._config = config
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
        log = _RequestLog(exchange, api)
        self._active += 1
        self._idle.clear()
        try:
            await self._serve(api, exchange, log)
        except HeadraceError as error:
            log.refused(error)
            if not exchange.status:
                await exchange.fail(error, _limit_headers(log.limits), status=log.status)
        except CallerLeft:
            log.outcome = "cancelled"
        except Exception:
            log.outcome, log.code = "failed", "internal_error"
            raise
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()
            log.write()

    async def _read(self, exchange: Exchange) -> bytes:
        config, headers = self._config, exchange.scope["headers"]
        return await body.read(headers, exchange.receive, bytes_max=config.body_bytes_max, s_max=config.body_s_max)

    async def _serve(self, api: Api, exchange: Exchange, log: "_RequestLog") -> None:
        if self.draining:
            raise HeadraceError("shutting_down", "This server is shutting down; try again.", retry_after_s=1)
        headers = exchange.scope["headers"]
        identity = self._directory.authenticate(headers)
        log.tenant, log.key_id = identity.tenant.name, identity.key_id
        context = RequestContext(
            request_id=exchange.request_id,
            identity=identity,
            api=api,
            reply=Reply(subject=self._hub.reply_inbox, stream=exchange.request_id),
            stream_owner=self._hub.stream_owner,
            deadline_ms=_deadline_ms(headers),
            client_request_id=exchange.client_request_id,
        )
        data = await self._read(exchange)
        with Caller(exchange.receive) as caller:
            prepared = await self._prepare(context, data, log)
            del data
            stream = log.stream = self._hub.listen(prepared.envelope)
            try:
                stream.model = await self._submit(prepared, log)
                del prepared  # The body is stored, and an answer may take minutes.
                if stream.sse:
                    await _write_events(exchange, stream, caller, log)
                else:
                    await _write_answer(exchange, stream, caller, log)
            except asyncio.CancelledError:
                # Also before the request was stored: the scheduler remembers a cancel of an id it does not know.
                self._hub.leave(stream, "client_disconnected")
                raise
            finally:
                self._hub.leave(stream)

    async def _prepare(self, context: RequestContext, data: bytes, log: "_RequestLog") -> Prepared:
        parsed = await self._admission.parse(context.identity.tenant, data)
        log.model = parsed.model.manifest.name
        prepared = await self._admission.prepare(context, parsed)
        log.requested(prepared)
        return prepared

    async def _submit(self, prepared: Prepared, log: "_RequestLog") -> str:
        """Admit and store; the model that will answer, which may be a fallback."""
        admitted = await self._admission.admit(prepared)
        log.requested(admitted)
        log.limits = admitted.limits
        await self._admission.publish(admitted)
        return admitted.envelope.model


async def _write_events(exchange: Exchange, stream: GatewayStream, caller: Caller, log: "_RequestLog") -> None:
    """Server-sent events until the stream's end. Raises HeadraceError when it ends before anything was sent."""
    await stream.ready()
    if stream.ended and not stream.first_chunk_at:
        log.raise_for(stream)
    headers = [*_STREAM_HEADERS, *_limit_headers(log.limits)]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
    stream.committed = True
    send = exchange.send_body
    data = stream.take() or KEEP_ALIVE
    while not stream.ended:
        stream.last_write_at = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        await stream.ready()
        data = stream.take()
    failure = log.failure_of(stream)
    if failure is None:
        data += exchange.format.done
    else:
        metrics.REFUSALS.labels(failure.code).inc()
        data += exchange.format.error_event(failure, stream.request_id, stream.attempt, stream.chunks)
    caller.let_go()
    await send({"type": "http.response.body", "body": data, "more_body": False})


async def _write_answer(exchange: Exchange, stream: GatewayStream, caller: Caller, log: "_RequestLog") -> None:
    """One JSON answer. Raises HeadraceError when there is none."""
    while not stream.ended:
        await stream.ready()
    log.raise_for(stream)
    caller.let_go()
    await exchange.respond(200, stream.take(), b"application/json", _limit_headers(log.limits))


def _deadline_ms(headers: Headers) -> int | None:
    given = [value.strip() for name, value in headers if name == b"x-headrace-deadline-ms"]
    if not given:
        return None
    if len(given) == 1 and given[0].isdigit() and 0 < int(given[0][:12]) <= DEADLINE_MS_MAX:
        return int(given[0])
    raise HeadraceError(
        "invalid_request",
        f"X-Headrace-Deadline-Ms must be a whole number of milliseconds from 1 to {DEADLINE_MS_MAX}.",
        param="X-Headrace-Deadline-Ms",
    )


def _limit_headers(limits: RateLimits | None) -> Headers:
    """OpenAI's x-ratelimit headers, for those limits that there are."""
    if limits is None:
        return []
    headers: Headers = []
    for kind, limit, remaining, reset_ms in (
        (b"requests", limits.limit_requests, limits.remaining_requests, limits.reset_requests_ms),
        (b"tokens", limits.limit_tokens, limits.remaining_tokens, limits.reset_tokens_ms),
    ):
        if limit is not None:
            headers += [
                (b"x-ratelimit-limit-" + kind, b"%d" % limit),
                (b"x-ratelimit-remaining-" + kind, b"%d" % max(0, remaining or 0)),
                (b"x-ratelimit-reset-" + kind, _span(reset_ms)),
            ]
    return headers


def _span(milliseconds: int) -> bytes:
    """As OpenAI writes spans: 12ms, 1.5s, 6m0s."""
    if milliseconds < 1000:
        return b"%dms" % max(0, milliseconds)
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:g}s"
    return (f"{minutes}m{seconds}" if minutes else seconds).encode()


class _RequestLog:
    """What became of a request, gathered on its way; one line of the log and the metrics when it has ended."""

    def __init__(self, exchange: Exchange, api: Api) -> None:
        self._exchange = exchange
        self._api = api
        self._stream = False
        self._prompt_tokens = 0
        self.tenant = ""
        self.key_id = ""
        self.model = ""
        """Empty until the body is parsed."""
        self.limits: RateLimits | None = None
        """The tenant's token buckets after the scheduler's decision."""
        self.stream: GatewayStream | None = None
        self.outcome = "completed"
        self.code = ""
        self.status = 0
        """HTTP status when it is not the code's own."""

    def requested(self, request: Prepared | Admitted) -> None:
        envelope = request.envelope
        self.model, self._stream, self._prompt_tokens = envelope.model, envelope.stream, envelope.prompt_tokens

    def refused(self, error: HeadraceError) -> None:
        self.code = error.code
        if self.outcome == "completed":
            self.outcome = "refused"
        if isinstance(error, AdmissionRefused):
            self.limits = error.limits

    def failure_of(self, stream: GatewayStream) -> ErrorData | None:
        """Why the ended stream is no complete answer; None when it is one."""
        failure = stream.error
        if failure is None and (stream.end is None or stream.end.outcome == "cancelled"):
            failure = ErrorData(code="cancelled", message="The request was cancelled.")
        if failure is not None:
            self.outcome = "cancelled" if failure.code in ("cancelled", "slow_reader") else "failed"
            self.code = failure.code
        return failure

    def raise_for(self, stream: GatewayStream) -> None:
        """Raises the failure of a stream as HeadraceError."""
        if (failure := self.failure_of(stream)) is not None:
            self.status = failure.status
            raise HeadraceError(failure.code, failure.message, param=failure.param, retry_after_s=failure.retry_after_s)

    def write(self) -> None:
        exchange, stream = self._exchange, self.stream
        now = time.monotonic()
        end = stream.end if stream is not None else None
        first_at = stream.first_chunk_at if stream is not None else 0.0
        metrics.DURATION.labels(self.model).observe(now - exchange.started_at)
        if stream is not None and stream.sse and first_at:
            metrics.FIRST_TOKEN.labels(self.model).observe(first_at - exchange.started_at)
        _log.info(
            "request_finished",
            request_id=exchange.request_id,
            client_request_id=exchange.client_request_id,
            tenant=self.tenant,
            key_id=self.key_id,
            model=self.model,
            endpoint=self._api.endpoint,
            stream=self._stream,
            outcome=self.outcome,
            code=self.code,
            http_status=exchange.status or 499,
            prompt_tokens=end.prompt_tokens if end is not None else self._prompt_tokens,
            completion_tokens=end.completion_tokens if end is not None else 0,
            attempt=stream.attempt if stream is not None else 0,
            ttft_ms=round((first_at - exchange.started_at) * 1000, 1) if first_at else None,
            duration_ms=round((now - exchange.started_at) * 1000, 1),
        )
