"""From a body to a request in REQUESTS: resolve, validate, count, ask the scheduler, store.

One path for both front doors, HTTP and ``submit``. What it decides: whether the request is well-formed and fits the
model's context. Everything else (limits, capacity, order, deadline) is the scheduler's answer, passed on.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from contracts import errors, subjects, topology
from contracts.bus import Bus, BusError, StreamFull, TooLarge, Unavailable, Unconfirmed
from contracts.errors import HeadraceError
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest, RateLimits
from contracts.messages.base import Codec, Endpoint, Priority
from contracts.messages.control import CancelRequest
from contracts.messages.records import Manifest, TenantRecord
from contracts.messages.request import Reply, RequestEnvelope
from gateway import threads
from gateway.apis import json_limits, validation
from gateway.intake.auth import Identity
from gateway.intake.catalog import Catalog, Model

LARGE_BYTES = 256 << 10
"""Bodies over this are taken apart on a thread, in steps of tens of milliseconds at most (1M tokens, measured)."""
ASK_TIMEOUT_S = 1.0
"""One try at the scheduler; tries are repeated with the same id within the bound."""
ASK_PAUSE_S = 0.1
STORE_TIMEOUT_S_MAX = 5.0

_request_codec = Codec[AdmissionRequest](AdmissionRequest)
_answer_codec = Codec[AdmissionAnswer](AdmissionAnswer)
_envelope_codec = Codec[RequestEnvelope](RequestEnvelope)


class Call(msgspec.Struct, kw_only=True):
    """One request on its way in: who asks for what, and what was learned so far."""

    request_id: str
    identity: Identity
    endpoint: Endpoint
    reply: Reply
    stream_owner: str
    deadline_ms: int | None = None
    client_request_id: str = ""
    model: str = ""
    """Empty until the model is resolved."""
    stream: bool = False
    prompt_tokens: int = 0
    body: bytes = b""
    """What the engine will get, once it is known."""
    limits: RateLimits | None = None
    """The tenant's buckets after the decision."""


class Refused(HeadraceError):
    """The scheduler's refusal; its wording, and the state of the tenant's limits."""


class Admission:
    """The way in. ``cancel`` sends a cancel and repeats it until it is durable."""

    def __init__(
        self,
        bus: Bus,
        catalog: Catalog,
        cancel: Callable[[CancelRequest, str, str], None],
        *,
        claim_check_bytes: int,
        ask_s_max: float,
    ) -> None:
        self._bus = bus
        self._catalog = catalog
        self._cancel = cancel
        self._claim_check_bytes = claim_check_bytes
        self._ask_s_max = ask_s_max

    async def prepare(self, call: Call, data: bytes | msgspec.Raw, *, model: str = "") -> RequestEnvelope:
        """Check and count; the envelope still lacks the scheduler's part and the body.

        ``model`` stands in for one that the body does not name, and must not differ from it.

        Raises HeadraceError.
        """
        large = len(memoryview(data)) > LARGE_BYTES
        body = await threads.run(large, json_limits.decode, data)
        if model and body.setdefault("model", model) != model:
            raise HeadraceError(
                "invalid_request", "model: The body names another model than the subject.", param="model"
            )
        entry = self._catalog.resolve(validation.model_of(body), call.identity.tenant)
        manifest = entry.manifest
        call.model = manifest.name
        valid, prompts = await _counted(entry, call.endpoint, body, len(memoryview(data)))
        call.stream = valid.stream
        call.prompt_tokens = sum(prompts)
        limit = output_limit(manifest, prompts, valid)
        stated = {valid.limit_field: limit} if valid.limit_field else {}
        call.body = await threads.run(large, msgspec.json.encode, valid.fields | stated)
        tenant = call.identity.tenant
        return RequestEnvelope(
            request_id=call.request_id,
            tenant=tenant.name,
            key_id=call.identity.key_id,
            model=manifest.name,
            endpoint=call.endpoint,
            stream=valid.stream,
            prompt_tokens=call.prompt_tokens,
            max_output_tokens=limit,
            choices=valid.choices,
            priority=_priority(tenant),
            admitted_at_ms=0,
            publish_by_ms=0,
            deadline_at_ms=0,
            reply=call.reply,
            stream_owner=call.stream_owner,
            tokenizer_fingerprint=manifest.tokenizer_fingerprint,
            client_request_id=call.client_request_id,
            prefix_caching=tenant.prefix_caching,
        )

    async def count(self, identity: Identity, data: bytes) -> int:
        """Prompt tokens of a body of the Messages API, whose output limit is of no account. Raises HeadraceError."""
        body = await threads.run(len(data) > LARGE_BYTES, json_limits.decode, data)
        entry = self._catalog.resolve(validation.model_of(body), identity.tenant)
        _, prompts = await _counted(entry, "messages", body | {"max_tokens": 2**31 - 1}, len(data))
        return sum(prompts)

    async def admit(self, call: Call, envelope: RequestEnvelope) -> RequestEnvelope:
        """Ask the model's scheduler; the envelope with its answer.

        An overloaded model's request goes to the first of its fallbacks that admits it, where the tenant permits
        that; the envelope and ``call.model`` then name the model that will answer. Raises HeadraceError.
        """
        try:
            return await self._admit(call, envelope)
        except Refused as refused:
            if refused.code != "overloaded" or not call.identity.tenant.fallback:
                raise
            for name in self._catalog.resolve(envelope.model, call.identity.tenant).manifest.fallbacks:
                if (admitted := await self._admit_elsewhere(call, name)) is not None:
                    return admitted
            raise

    async def _admit_elsewhere(self, call: Call, name: str) -> RequestEnvelope | None:
        """The same request for another model; None when that one does not take it."""
        before = (call.model, call.body, call.prompt_tokens, call.limits)
        try:
            body = msgspec.json.encode({**msgspec.json.decode(call.body), "model": name})
            return await self._admit(call, await self.prepare(call, body))
        except HeadraceError:
            call.model, call.body, call.prompt_tokens, call.limits = before
            return None

    async def _admit(self, call: Call, envelope: RequestEnvelope) -> RequestEnvelope:
        answer = await self._ask(call, envelope)
        call.limits = answer.limits
        if not answer.admitted:
            code = answer.code if answer.code in errors.TABLE else "overloaded"
            raise Refused(code, answer.message, param=answer.param, retry_after_s=answer.retry_after_s)
        return msgspec.structs.replace(
            envelope,
            admitted_at_ms=_now_ms(),
            publish_by_ms=answer.publish_by_ms,
            deadline_at_ms=answer.deadline_at_ms,
        )

    async def publish(self, call: Call, envelope: RequestEnvelope) -> None:
        """Store an admitted request; from then on it survives any process.

        Raises HeadraceError, having cancelled the request.
        """
        try:
            envelope = await self._with_body(call, envelope)
            left_s = (envelope.publish_by_ms - _now_ms()) / 1000
            if left_s <= 0:
                raise Unconfirmed("the reservation lapsed before the request was stored")
            await self._bus.store(
                subjects.request(envelope.model, envelope.tenant),
                _envelope_codec.encode(envelope),
                msg_id=envelope.request_id,
                timeout_s=min(left_s, STORE_TIMEOUT_S_MAX),
            )
        except BusError as error:
            self._cancel(
                CancelRequest(request_id=envelope.request_id, reason="publish_unconfirmed"),
                envelope.model,
                envelope.tenant,
            )
            raise _not_stored(error) from error

    async def _ask(self, call: Call, envelope: RequestEnvelope) -> AdmissionAnswer:
        question = _request_codec.encode(
            AdmissionRequest(
                request_id=call.request_id,
                tenant=envelope.tenant,
                key_id=envelope.key_id,
                model=envelope.model,
                endpoint=envelope.endpoint,
                prompt_tokens=envelope.prompt_tokens,
                max_output_tokens=envelope.max_output_tokens,
                choices=envelope.choices,
                stream=envelope.stream,
                priority=envelope.priority,
                deadline_ms=call.deadline_ms,
                stream_owner=call.stream_owner,
                version=envelope.version,
            )
        )
        subject = subjects.admit(envelope.model)
        give_up_at = time.monotonic() + self._ask_s_max
        while True:
            try:
                data = await self._bus.request(subject, question, timeout_s=ASK_TIMEOUT_S)
                return _answer_codec.decode(data)
            except (Unavailable, msgspec.MsgspecError) as error:
                if time.monotonic() + ASK_PAUSE_S >= give_up_at:
                    raise HeadraceError(
                        "unavailable",
                        "No scheduler answers for this model at the moment.",
                        retry_after_s=2,  # A standby takes over within seconds.
                    ) from error
            await asyncio.sleep(ASK_PAUSE_S)

    async def _with_body(self, call: Call, envelope: RequestEnvelope) -> RequestEnvelope:
        """A large body goes to the object store, and its name travels (claim check)."""
        body, call.body = call.body, b""
        if len(body) <= self._claim_check_bytes:
            return msgspec.structs.replace(envelope, body=msgspec.Raw(body))
        await self._bus.object_put(topology.BODIES, envelope.request_id, body)
        return msgspec.structs.replace(envelope, body_object=envelope.request_id)


async def _counted(
    entry: Model, endpoint: Endpoint, body: dict[str, Any], size: int
) -> tuple[validation.Valid, list[int]]:
    """A body of ``size`` bytes, checked, and the tokens of each of its prompts. Raises HeadraceError."""
    manifest = entry.manifest
    if endpoint not in manifest.endpoints:
        raise HeadraceError("invalid_request", f"The model {manifest.name!r} does not serve {endpoint}.", param="model")
    await entry.tokens.ready()
    vocabulary = entry.tokens.vocabulary
    valid = await threads.run(size > LARGE_BYTES, validation.validate, endpoint, body, manifest, vocabulary)
    return valid, await entry.tokens.count(endpoint, valid.fields, size)


def output_limit(manifest: Manifest, prompts: list[int], valid: validation.Valid) -> int:
    """Output tokens per choice that are reserved and allowed; raises HeadraceError when they cannot fit."""
    part, longest = valid.prompt_field, max(prompts)
    if min(prompts) == 0:
        raise HeadraceError("invalid_request", f"{part}: The {part} has no tokens.", param=part)
    room = manifest.context - longest
    asked = valid.max_output_tokens
    if room < (1 if asked is None else asked):
        has = f"{longest} in the {part}"
        if asked is None:
            asks = f"you asked for {longest} tokens ({has}), and at least one must be left for the completion"
        elif valid.limit_field:
            asks = f"you asked for {longest + asked} tokens ({has}, {asked} in the completion)"
        else:
            asks = f"you asked for {longest} tokens"
        raise HeadraceError(
            "context_length_exceeded",
            f"This model's maximum context length is {manifest.context} tokens. However, {asks}. "
            f"Please reduce the length of the {part} or of the completion.",
            param=part,
        )
    return min(max(manifest.default_output_tokens, valid.least_output_tokens), room) if asked is None else asked


def _priority(tenant: TenantRecord) -> Priority:
    return "interactive" if "interactive" in tenant.priorities or not tenant.priorities else tenant.priorities[0]


def _not_stored(error: BusError) -> HeadraceError:
    if isinstance(error, TooLarge):
        return HeadraceError("request_too_large", "The request is too large for the service's message bus.")
    if isinstance(error, StreamFull):
        return HeadraceError("overloaded", "The service's queue is full.", retry_after_s=2)
    return HeadraceError("unavailable", "The request could not be stored; nothing was run.", retry_after_s=2)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
