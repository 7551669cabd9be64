"""What became of one submit at this gateway: a line of the log, its metrics, and the gateway's word for the ledger.

How an admitted one ends the gateway does not see: its attempts tell.
"""

import time
from typing import Any

import structlog

from contracts.messages.deliveries import SUBMITTED, Delivery
from contracts.messages.request import RequestEnvelope, SubmitAnswer
from contracts.workload import scope
from gateway import metrics

_log = structlog.get_logger()


class SubmitLog:
    """Gathered by the one task that answers the submit; times are monotonic, 0 while it has not come to that."""

    def __init__(self, request_id: str, key_id: str) -> None:
        self.request_id = request_id
        self.tenant = ""
        """Empty while it is not known that there is one."""
        self.model = ""
        """Empty until the body is parsed."""
        self.version = ""
        self.endpoint = ""
        self.traceparent = ""
        self.envelope: RequestEnvelope | None = None
        self.asked_at = 0.0
        self.admitted_at = 0.0
        self._key_id = key_id
        self._started_at = time.monotonic()

    def write(self, answer: SubmitAnswer) -> Delivery | None:
        """Once, with what is answered. What the ledger is told: nothing of one who joined.

        What is refused before its tenant is known is counted elsewhere, and no line: under overload it is most of all.
        """
        if not self.tenant:
            return None
        now, envelope = time.monotonic(), self.envelope
        code = answer.error.code if answer.error is not None else ""
        outcome = SUBMITTED if answer.admitted else "refused"
        spans: dict[str, Any] = {
            "edge_ms": _ms(self.asked_at - self._started_at) if self.asked_at else 0.0,
            "admission_ms": _ms(self.admitted_at - self.asked_at) if self.admitted_at else 0.0,
            "total_ms": _ms(now - self._started_at),
        }
        _log.info(
            "request_submitted",
            request_id=answer.request_id,
            joined=answer.joined,
            tenant=self.tenant,
            model=self.model,
            version=self.version,
            endpoint=self.endpoint,
            outcome=outcome,
            code=code,
            prompt_tokens=envelope.prompt_tokens if envelope is not None else 0,
            **spans,
        )
        self._count(outcome, code)
        if answer.joined:
            return None
        return Delivery(
            request_id=self.request_id,
            tenant=self.tenant,
            key_id=self._key_id,
            model=self.model,
            version=self.version,
            endpoint=self.endpoint,
            outcome=outcome,
            code=code,
            status=0 if answer.admitted else answer.status,
            stream=envelope is not None and envelope.stream,
            prompt_tokens=envelope.prompt_tokens if envelope is not None else 0,
            traceparent=self.traceparent,
            **spans,
        )

    def _count(self, outcome: str, code: str) -> None:
        """Of an admitted one its phases; its end is the scheduler's and the worker's to count."""
        envelope = self.envelope
        if outcome == "refused":
            where = scope(envelope, self.version) if envelope is not None else (self.model, "", "", "")
            metrics.finished(*where, outcome, code).inc()
        if self.admitted_at:
            metrics.PHASE.of("edge").observe(self.asked_at - self._started_at)
            metrics.PHASE.of("admission").observe(self.admitted_at - self.asked_at)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
