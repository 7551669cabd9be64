"""What became of an inference request: one line of the log and the gateway's metrics, when it has ended."""

import time

import structlog

from contracts.errors import HeadraceError
from contracts.messages.admission import RateLimits
from contracts.messages.frames import ErrorData
from contracts.messages.request import RequestEnvelope
from gateway import metrics
from gateway.apis.api import Api
from gateway.http.exchange import Exchange
from gateway.intake.admission import AdmissionRefused
from gateway.streams.stream import GatewayStream

_log = structlog.get_logger()


class RequestLog:
    """Gathered on the request's way, by the one task that serves it."""

    def __init__(self, exchange: Exchange, api: Api) -> None:
        self._exchange = exchange
        self._api = api
        self.tenant = ""
        self.key_id = ""
        self.model = ""
        """Empty until the body is parsed; in the end the model that answered."""
        self.envelope: RequestEnvelope | None = None
        self.limits: RateLimits | None = None
        """The tenant's token buckets after the scheduler's decision."""
        self.stream: GatewayStream | None = None
        self.outcome = "completed"
        self.code = ""
        self.status = 0
        """HTTP status when it is not the code's own."""

    def refused(self, error: HeadraceError) -> None:
        """The request ended with an error."""
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
        """Once, when nothing more is sent."""
        exchange, stream, envelope = self._exchange, self.stream, self.envelope
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
            stream=envelope is not None and envelope.stream,
            outcome=self.outcome,
            code=self.code,
            http_status=exchange.status or 499,
            prompt_tokens=end.prompt_tokens
            if end is not None
            else envelope.prompt_tokens
            if envelope is not None
            else 0,
            completion_tokens=end.completion_tokens if end is not None else 0,
            attempt=stream.attempt if stream is not None else 0,
            ttft_ms=round((first_at - exchange.started_at) * 1000, 1) if first_at else None,
            duration_ms=round((now - exchange.started_at) * 1000, 1),
        )
