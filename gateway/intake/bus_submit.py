"""The NATS ingress: ``submit.v1.<tenant>.<model>``, answered by any gateway.

The tenant is the subject's, which the bus's permissions bind to the sender. Frames go from the worker straight to
the sender's own reply subject; the gateway is out of the way once it has answered.
"""

import time
from collections import Counter

import msgspec
import structlog

from contracts import ids, shards, subjects
from contracts.bus import Bus, BusError, Incoming, Subscription
from contracts.bus.complaints import seldom
from contracts.errors import HeadraceError
from contracts.messages.admission import DEADLINE_MS_MAX, RateLimits
from contracts.messages.base import Codec
from contracts.messages.frames import ErrorData
from contracts.messages.request import SubmitAnswer, SubmitRequest
from contracts.traceparent import checked
from gateway.apis.table import APIS
from gateway.deliveries import DeliveryReports
from gateway.intake.admission import AdmissionRefused, Intake, RequestContext, idempotency_key
from gateway.intake.auth import Directory, Identity
from gateway.intake.shedding import Shedding
from gateway.intake.submit_log import SubmitLog
from gateway.intake.turnstile import Turnstile
from gateway.metrics import SUBMITS_REFUSED

_log = structlog.get_logger()

QUEUE = "gateways"
KEY_ID = "bus"
"""In the place of a key's id: the sender's bus credentials admitted it."""
SUBMITS_MAX = 64
"""Submits of one tenant that are under way at a time in one gateway: a quarter of all that it handles at once."""
REASON_CHARS_MAX = 500
"""Of what the decoder says, which repeats what was sent."""

_submit_codec = Codec[SubmitRequest](SubmitRequest)
_answer_codec = Codec[SubmitAnswer](SubmitAnswer)


class NatsIngress:
    """Takes requests from the bus between ``start`` and ``close``."""

    def __init__(
        self,
        bus: Bus,
        directory: Directory,
        intake: Intake,
        shedding: Shedding,
        turnstile: Turnstile,
        deliveries: DeliveryReports,
    ) -> None:
        self._bus = bus
        self._directory = directory
        self._intake = intake
        self._shedding = shedding
        self._turnstile = turnstile
        self._deliveries = deliveries
        self._subscription: Subscription | None = None
        self._under_way: Counter[str] = Counter()

    async def start(self) -> None:
        """Share the subjects with the other gateways."""
        self._subscription = await self._bus.subscribe(subjects.SUBMITS, self._on_submit, queue=QUEUE, concurrent=True)

    async def close(self) -> None:
        """Take no more; what is under way is answered."""
        if self._subscription is not None:
            await self._subscription.close()
            self._subscription = None

    async def _on_submit(self, message: Incoming) -> None:
        request_id = ids.request_id()
        log = SubmitLog(request_id, KEY_ID)
        sender = message.subject.split(".")[2]
        self._under_way[sender] += 1
        try:
            self._shedding.check()
            if self._under_way[sender] > SUBMITS_MAX:
                SUBMITS_REFUSED.inc()
                text = f"More than {SUBMITS_MAX} submits of this tenant are under way."
                raise HeadraceError("rate_limit_exceeded", text, retry_after_s=1)
            answer = await self._submit(message, log)
        except HeadraceError as error:
            answer = _refusal(request_id, error)
        except BusError as error:
            _log.error("submit_failed", request_id=request_id, reason=str(error))
            answer = _refusal(request_id, HeadraceError("unavailable", "The bus failed.", retry_after_s=2))
        except Exception:
            if times := seldom("submit_unhandled"):
                _log.exception("unhandled", request_id=request_id, subject=message.subject, times=times)
            answer = _refusal(request_id, HeadraceError("internal_error", "Something went wrong inside the service."))
        finally:
            self._under_way -= Counter((sender,))
        message.respond(_answer_codec.encode(answer))
        if (delivery := log.write(answer)) is not None:
            self._deliveries.add(delivery)

    async def _submit(self, message: Incoming, log: SubmitLog) -> SubmitAnswer:
        try:
            tenant_name, model = subjects.tenant_and_model_of_submit(message.subject)
        except subjects.InvalidName as error:
            raise HeadraceError("invalid_request", f"The subject is malformed: {error}.") from error
        tenant = self._directory.tenant(tenant_name)
        if tenant is None:
            raise HeadraceError("permission_denied", "There is no such tenant, or it is disabled.")
        log.tenant = tenant_name
        try:
            submitted = _submit_codec.decode(message.data)
        except msgspec.MsgspecError as error:
            raise HeadraceError("invalid_json", f"Not a SubmitRequest: {str(error)[:REASON_CHARS_MAX]}.") from error
        log.endpoint = submitted.endpoint
        reply = submitted.reply.subject
        if not subjects.is_reply(reply) or not reply.startswith(subjects.tenant_reply_prefix(tenant_name)):
            raise HeadraceError(
                "permission_denied", "The reply subject is not under the tenant's own prefix.", param="reply"
            )
        deadline_ms = submitted.deadline_ms
        if deadline_ms is not None and not 0 < deadline_ms <= DEADLINE_MS_MAX:
            raise HeadraceError(
                "invalid_request", f"deadline_ms must be from 1 to {DEADLINE_MS_MAX}.", param="deadline_ms"
            )
        log.traceparent = checked(message.headers.get("traceparent", ""))
        context = RequestContext(
            request_id=log.request_id,
            identity=Identity(tenant, KEY_ID),
            api=APIS[submitted.endpoint],
            reply=submitted.reply,
            stream_owner=_stream_owner(tenant_name, submitted.stream_owner),
            deadline_ms=deadline_ms,
            price_ceiling=submitted.price_ceiling,
            prefix_caching=submitted.prefix_caching,
            traceparent=log.traceparent,
            idempotency_key=idempotency_key(key, "idempotency_key") if (key := submitted.idempotency_key) else "",
        )
        await self._turnstile.enter()
        try:
            parsed = await self._intake.parse(tenant, submitted.body or b"{}", model=model)
            log.model = parsed.name
            prepared = await self._intake.prepare(context, parsed)
            log.envelope, log.asked_at = prepared.envelope, time.monotonic()
            admitted = await self._intake.admit(prepared)
        except HeadraceError as error:
            return _refusal(log.request_id, error, self._intake.rate_limits(tenant, model))
        log.admitted_at = time.monotonic()
        log.envelope = envelope = admitted.envelope
        log.model, log.version = shards.model_of(envelope.model), admitted.version
        try:
            await self._intake.publish(admitted)
        except HeadraceError as error:
            return _refusal(log.request_id, error, admitted.limits)
        return SubmitAnswer(
            admitted=True,
            request_id=admitted.joined or log.request_id,
            joined=bool(admitted.joined),
            model=envelope.model,
            choice_reason=envelope.choice_reason,
            limits=admitted.limits,
        )


def _stream_owner(tenant: str, incarnation: str) -> str:
    """The sender's name as a stream owner: always one of its own tenant's."""
    try:
        return subjects.tenant_stream_owner(tenant, incarnation) if incarnation else ""
    except subjects.InvalidName as error:
        raise HeadraceError("invalid_request", f"stream_owner: {error}.", param="stream_owner") from error


def _refusal(request_id: str, error: HeadraceError, limits: RateLimits | None = None) -> SubmitAnswer:
    return SubmitAnswer(
        admitted=False,
        request_id=request_id,
        status=error.status,
        error=ErrorData(code=error.code, message=error.message, param=error.param, retry_after_s=error.retry_after_s),
        limits=(isinstance(error, AdmissionRefused) and error.limits) or limits,
    )
