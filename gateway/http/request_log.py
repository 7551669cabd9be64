"""What became of an inference request: one line of the log and the gateway's metrics, when it has ended."""

import time

import structlog

from contracts.errors import HeadraceError
from contracts.messages.admission import RateLimits
from contracts.messages.deliveries import Delivery
from contracts.messages.frames import ErrorData
from contracts.messages.request import RequestEnvelope
from contracts.workload import scope
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
        self.version = ""
        """Of the model: the one that it was admitted to, then the one that answers."""
        self.envelope: RequestEnvelope | None = None
        self.limits: RateLimits | None = None
        """The tenant's token buckets after the scheduler's decision."""
        self.stream: GatewayStream | None = None
        self.asked_at = 0.0
        """When the scheduler was asked, and when it had admitted; monotonic, 0 before."""
        self.admitted_at = 0.0
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

    def write(self) -> Delivery | None:
        """Once, when nothing more is sent. What the ledger is told: nothing of strangers, nor of one who joined."""
        now = time.monotonic()
        self._count(now)
        self._log(now)
        joined = self.stream is not None and self.stream.relay.joined
        return self._delivery(now) if self.tenant and not joined else None

    def _log(self, now: float) -> None:
        exchange, stream, envelope = self._exchange, self.stream, self.envelope
        end = stream.end if stream is not None else None
        first_at = stream.first_chunk_at if stream is not None else 0.0
        asked = envelope.prompt_tokens if envelope is not None else 0
        _log.info(
            "request_finished",
            request_id=exchange.request_id,
            client_request_id=exchange.client_request_id,
            tenant=self.tenant,
            key_id=self.key_id,
            model=self.model,
            version=self.version,
            requested_model=envelope.requested_model if envelope is not None else "",
            choice_reason=envelope.choice_reason if envelope is not None else "",
            priority=envelope.priority if envelope is not None else "",
            endpoint=self._api.endpoint,
            stream=envelope is not None and envelope.stream,
            outcome=self.outcome,
            code=self.code,
            http_status=exchange.status or 499,
            prompt_tokens=end.prompt_tokens if end is not None else asked,
            cached_tokens=end.cached_tokens if end is not None else 0,
            completion_tokens=end.completion_tokens if end is not None else 0,
            attempt=stream.attempt if stream is not None else 0,
            chunks=stream.chunks if stream is not None else 0,
            upload_ms=_ms(exchange.upload_s),
            edge_ms=_ms(self.edge_s),
            admission_ms=_ms(self.admission_s),
            ttft_ms=_ms(first_at - exchange.started_at) if first_at else None,
            blocked_ms=_ms(self.blocked_s),
            duration_ms=_ms(now - exchange.started_at),
        )

    def _delivery(self, now: float) -> Delivery:
        exchange, stream, envelope = self._exchange, self.stream, self.envelope
        since = exchange.started_at
        first_at, ended_at = (stream.first_chunk_at, stream.ended_at) if stream is not None else (0.0, 0.0)
        return Delivery(
            request_id=exchange.request_id,
            tenant=self.tenant,
            key_id=self.key_id,
            model=self.model,
            version=self.version,
            endpoint=self._api.endpoint,
            outcome=self.outcome,
            code=self.code,
            status=exchange.status or 499,
            stream=envelope is not None and envelope.stream,
            attempt=stream.attempt if stream is not None else 0,
            prompt_tokens=envelope.prompt_tokens if envelope is not None else 0,
            upload_ms=_ms(exchange.upload_s),
            edge_ms=_ms(self.edge_s),
            admission_ms=_ms(self.admission_s),
            first_chunk_ms=_ms(first_at - since) if first_at else 0.0,
            ended_ms=_ms(ended_at - since) if ended_at else 0.0,
            blocked_ms=_ms(self.blocked_s),
            total_ms=_ms(now - since),
            client_request_id=exchange.client_request_id,
            traceparent=exchange.traceparent,
        )

    @property
    def blocked_s(self) -> float:
        """How long writing waited for the caller."""
        return self.stream.blocked_s if self.stream is not None else 0.0

    @property
    def edge_s(self) -> float:
        """Until the scheduler was asked, less what the caller took to send its body; 0 when it was never asked."""
        return max(0.0, self.asked_at - self._exchange.started_at - self._exchange.upload_s) if self.asked_at else 0.0

    @property
    def admission_s(self) -> float:
        """Until the scheduler had answered that it is admitted."""
        return self.admitted_at - self.asked_at if self.admitted_at else 0.0

    def _count(self, now: float) -> None:
        """In the metrics."""
        exchange, stream, envelope = self._exchange, self.stream, self.envelope
        if stream is not None:
            stream.count_gaps()
        if not self.tenant:
            return
        where = scope(envelope, self.version) if envelope is not None else (self.model, "", "", "")
        metrics.finished(*where, self.outcome, self.code).inc()
        if self.admitted_at:
            metrics.PHASE.of("edge").observe(self.edge_s)
            metrics.PHASE.of("admission").observe(self.admission_s)
            metrics.PHASE.of("upload").observe(exchange.upload_s)
        if stream is None or not stream.first_chunk_at:
            return
        metrics.PHASE.of("reading").observe(self.blocked_s)
        if stream.sse:
            metrics.FIRST_TOKEN.of(*where).observe(stream.first_chunk_at - exchange.started_at)
        if self.outcome == "completed":
            metrics.E2E.of(*where).observe(now - exchange.started_at)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
