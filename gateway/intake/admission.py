"""From a body to a request in REQUESTS: parse, prepare (validate and count), admit (ask the scheduler), publish.

One path for HTTP and for the NATS ingress. Each step takes what the one before it gave, and changes nothing of it.
What is decided here: whether the request is well-formed and fits the model's context. Everything else (limits,
capacity, order, deadline) is the scheduler's answer, passed on.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from contracts import errors, shards, subjects, topology
from contracts.bus import Bus, BusError, StreamFull, TooLarge, Unavailable, Unconfirmed
from contracts.clock import monotonic_ms
from contracts.errors import HeadraceError
from contracts.limits import refuse_zero
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest, RateLimits
from contracts.messages.base import IDEMPOTENCY_KEY_MAX, Codec, IdempotencyKey, Priority, RequestDemand, fields_of
from contracts.messages.control import CancelReason
from contracts.messages.records import Manifest, ModelRecord, PriceTier, TenantLimits, TenantRecord
from contracts.messages.request import Reply, RequestEnvelope
from contracts.prefix import cache_salt
from contracts.traceparent import headers as tracing_headers
from gateway.apis import json_limits
from gateway.apis.api import Api, ValidBody
from gateway.apis.fields import model_of
from gateway.intake.auth import Identity
from gateway.intake.catalog import Catalog, Model
from gateway.intake.choice import MOVES_ON, Candidate, Need, capabilities_of
from gateway.intake.conversation import cache_salt_of, conversation_of
from gateway.intake.rate_limits import RateLimitsSeen
from gateway.intake.reading_budget import ReadingBudget
from gateway.prompt import threads
from gateway.prompt.token_counter import Counted

ON_THE_SPOT_BYTES = 256 << 10
"""Larger bodies are taken apart on a thread, in steps of tens of milliseconds at most (1M tokens, measured)."""
PROMPT_LOGPROBS_MAX = 65_536
"""Of all prompts of a request: some 4 MB of answer. An evaluation that asks for 1 beside the token's own scores 32,000
tokens at once."""
ASK_TIMEOUT_S = 1.0
"""One try at the scheduler; tries are repeated with the same id within the bound."""
ASK_PAUSE_S = 0.1
STORE_TIMEOUT_S_MAX = 5.0
REASON_CHARS_MAX = 500
"""Of why a model was chosen: its column's bound."""

_request_codec = Codec[AdmissionRequest](AdmissionRequest)
_answer_codec = Codec[AdmissionAnswer](AdmissionAnswer)
_envelope_codec = Codec[RequestEnvelope](RequestEnvelope)


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, by which API, and where the answer goes: known before anything of the body is."""

    request_id: str
    identity: Identity
    api: Api
    reply: Reply
    stream_owner: str
    deadline_ms: int | None = None
    client_request_id: str = ""
    price_ceiling: PriceTier | None = None
    """The caller's own, beside its tenant's."""
    traceparent: str = ""
    prefix_caching: bool = True
    """The caller's own choice, beside its tenant's."""
    idempotency_key: str = ""
    """The caller's own name for the request, checked by ``idempotency_key``; empty when it gave none."""


class ParsedBody(msgspec.Struct, frozen=True):
    """A JSON object, and the model or alias that it names; nothing else of it was looked at."""

    fields: dict[str, Any]
    bytes: int
    name: str


class Prepared(msgspec.Struct, frozen=True):
    """A request that is well-formed and fits the model."""

    context: RequestContext
    bytes_read: int
    """Of the caller's body, as charged to its tenant."""
    envelope: RequestEnvelope
    """Without the scheduler's part and without the body."""
    body: bytes
    """What the engine will get."""
    version: str
    """Of the model, unless the scheduler gives another one."""
    parsed: ParsedBody
    others: tuple[Candidate, ...] = ()
    """Models to ask when that one does not take it, in order; and why those before it did not."""
    passed: tuple[str, ...] = ()


class Admitted(msgspec.Struct, frozen=True):
    """A request that the owner of ``envelope.model`` admitted: a shard of the model asked for, or of a fallback.

    ``joined``: id of the request that runs or ran under the same idempotency key; then nothing was admitted.
    """

    envelope: RequestEnvelope
    """Without the body."""
    body: bytes
    limits: RateLimits | None
    """The tenant's token buckets after the decision."""
    asked_at_ms: int
    """When the scheduler was first asked, monotonic: the envelope's spans began no earlier."""
    version: str = ""
    """Empty for a joined one."""
    joined: str = ""


class AdmissionRefused(HeadraceError):
    """The scheduler's refusal; its wording, and the state of the tenant's limits."""

    def __init__(self, answer: AdmissionAnswer) -> None:
        code = answer.code if answer.code in errors.TABLE else "overloaded"
        super().__init__(code, answer.message, param=answer.param, retry_after_s=answer.retry_after_s)
        self.limits = answer.limits


class Intake:
    """The way in. ``cancel`` sends a cancel and repeats it until it is durable."""

    def __init__(
        self,
        bus: Bus,
        catalog: Catalog,
        cancel: Callable[[RequestEnvelope, CancelReason], object],
        *,
        body_bytes_max: int,
        claim_check_bytes: int,
        ask_s_max: float,
    ) -> None:
        self._limits_seen = RateLimitsSeen()
        self._budget = ReadingBudget(2 * body_bytes_max)
        self._bus = bus
        self._catalog = catalog
        self._cancel = cancel
        self._claim_check_bytes = claim_check_bytes
        self._ask_s_max = ask_s_max

    def rate_limits(self, tenant: TenantRecord, model: str) -> RateLimits:
        """What is known here of the tenant's limits on a model (empty: none is known yet)."""
        return self._limits_seen.at(tenant, model, monotonic_ms())

    async def parse(self, tenant: TenantRecord, data: bytes | msgspec.Raw, *, model: str = "") -> ParsedBody:
        """Decode the body, which is charged to the tenant, and find its model.

        ``model`` stands in for one that the body does not name, and must not differ from it. Raises HeadraceError.
        """
        size = len(memoryview(data))
        self._budget.take(tenant.name, size, time.monotonic())
        return await self._parse(tenant, data, size, model)

    async def _parse(self, tenant: TenantRecord, data: bytes | msgspec.Raw, size: int, model: str = "") -> ParsedBody:
        fields = await threads.run(tenant.name, size, ON_THE_SPOT_BYTES, json_limits.decode, data)
        if model and fields.setdefault("model", model) != model:
            raise HeadraceError(
                "invalid_request", "model: The body names another model than the subject.", param="model"
            )
        name = model_of(fields)
        self._catalog.check(name, tenant)
        return ParsedBody(fields, size, name)

    async def prepare(self, context: RequestContext, parsed: ParsedBody) -> Prepared:
        """Choose a model, check and count; raises HeadraceError."""
        tenant = context.identity.tenant
        need = Need(context.api.endpoint, capabilities_of(parsed.fields), context.price_ceiling or tenant.price_ceiling)
        return await self._prepare_first(context, parsed, self._catalog.candidates(parsed.name, tenant, need), ())

    async def _prepare_first(
        self, context: RequestContext, parsed: ParsedBody, candidates: Sequence[Candidate], passed: tuple[str, ...]
    ) -> Prepared:
        """For the first of the candidates whose context is long enough; raises HeadraceError, the first one's."""
        first: HeadraceError | None = None
        for number, candidate in enumerate(candidates):
            try:
                prepared = await self._prepare_for(context, parsed, candidate, passed)
                return msgspec.structs.replace(prepared, others=tuple(candidates[number + 1 :]), passed=passed)
            except HeadraceError as error:
                if error.code not in MOVES_ON or not candidate.reason:
                    raise
                first = first or error
                passed = (*passed, f"{candidate.model}: {error.code}")
        raise first or HeadraceError("model_not_found", "There is no other model.", param="model")

    async def _prepare_for(
        self, context: RequestContext, parsed: ParsedBody, candidate: Candidate, passed: tuple[str, ...]
    ) -> Prepared:
        api, tenant = context.api, context.identity.tenant
        model = self._catalog.resolve(candidate.model, tenant)
        manifest = model.manifest
        idempotency, limits = None, tenant.limits_of(manifest.name)
        if not context.idempotency_key:  # With one it may join what was admitted before the limit was lowered.
            refuse_zero(limits, generates=False)
        if key := context.idempotency_key:
            digest = await threads.run(
                tenant.name, parsed.bytes, ON_THE_SPOT_BYTES, _digest, api.endpoint, parsed.fields
            )
            idempotency = IdempotencyKey(key=key, digest=digest)
        own_salt = cache_salt_of(parsed.fields)
        shares = tenant.prefix_caching and context.prefix_caching
        salt = cache_salt(tenant.name, own_salt) if shares else ""
        valid, counted = await _counted(api, tenant, parsed, model, salt)
        prompts = counted.tokens
        check_prompt_logprobs(sum(prompts), valid)
        limit = output_limit(api, manifest, limits, prompts, valid)
        stated = {api.limit_field: limit} if api.limit_field else {}
        body, body_hash = await threads.run(
            tenant.name, parsed.bytes, ON_THE_SPOT_BYTES, _encoded, valid.fields | stated
        )
        envelope = RequestEnvelope(
            request_id=context.request_id,
            tenant=tenant.name,
            key_id=context.identity.key_id,
            model=manifest.name,
            version="" if candidate.model == manifest.name else manifest.version,
            endpoint=api.endpoint,
            stream=valid.stream,
            prompt_tokens=sum(prompts),
            max_output_tokens=limit,
            choices=valid.choices,
            priority=_priority(tenant),
            admitted_at_ms=0,
            publish_within_ms=0,
            deadline_ms=0,
            reply=context.reply,
            stream_owner=context.stream_owner,
            tokenizer_fingerprint=model.tokens.fingerprint,
            prompt_digest=counted.digest,
            client_request_id=context.client_request_id,
            traceparent=context.traceparent,
            idempotency=idempotency,
            conversation=conversation_of(parsed.fields),
            prefix_caching=shares,
            cache_salt=own_salt,
            prefix_keys=counted.prefix_keys,
            body_bytes=len(body) if len(body) > self._claim_check_bytes else 0,
            requested_model=parsed.name if parsed.name != manifest.name else "",
            choice_reason="; ".join((candidate.reason, *passed))[:REASON_CHARS_MAX] if candidate.reason else "",
            body_hash=body_hash,
        )
        envelope = msgspec.structs.replace(envelope, model=_shard(model.record, envelope))
        return Prepared(context, parsed.bytes, envelope, body, manifest.version, parsed)

    async def count(self, api: Api, tenant: TenantRecord, data: bytes) -> int:
        """Prompt tokens of a body that nobody will run; raises HeadraceError."""
        parsed = await self.parse(tenant, data)
        need = Need(api.endpoint, capabilities_of(parsed.fields), tenant.price_ceiling)
        [first, *_] = self._catalog.candidates(parsed.name, tenant, need)
        _, counted = await _counted(api, tenant, parsed, self._catalog.resolve(first.model, tenant), salt="")
        return sum(counted.tokens)

    async def admit(self, prepared: Prepared) -> Admitted:
        """Ask the model's scheduler, and where that one is full or down those of the others, in order.

        One that runs already under its idempotency key is joined, also where another model runs it. Raises
        HeadraceError; AdmissionRefused is the first model's refusal. What reading the body was charged is given back,
        unless the refusal is the tenant's own doing.
        """
        given_back = True
        try:
            return await self._admit_somewhere(prepared)
        except HeadraceError as error:
            given_back = error.status >= 500
            raise
        finally:
            if given_back:
                tenant = prepared.context.identity.tenant.name
                self._budget.give_back(tenant, prepared.bytes_read, time.monotonic())

    async def _admit_somewhere(self, prepared: Prepared) -> Admitted:
        envelope = prepared.envelope
        for other in prepared.others if envelope.idempotency is not None else ():
            record = self._catalog.resolve(other.model, prepared.context.identity.tenant).record
            elsewhere = msgspec.structs.replace(envelope, model=_shard(record, envelope), choice_reason=other.reason)
            try:
                return await self._admit(msgspec.structs.replace(prepared, envelope=elsewhere), join_only=True)
            except HeadraceError as refused:
                if refused.code not in ("not_found", "unavailable"):
                    raise
        first: HeadraceError | None = None
        while True:
            try:
                return await self._admit(prepared)
            except HeadraceError as refused:
                first = first or refused
                if refused.code not in MOVES_ON:
                    raise first from None
                passed = (*prepared.passed, f"{shards.model_of(prepared.envelope.model)}: {refused.code}")
            try:
                prepared = await self._prepare_first(prepared.context, prepared.parsed, prepared.others, passed)
            except HeadraceError:
                raise first from None

    async def _admit(self, prepared: Prepared, *, join_only: bool = False) -> Admitted:
        asked_at_ms = monotonic_ms()
        shard, answer = await self._ask(prepared, join_only=join_only)
        if not answer.admitted:
            raise AdmissionRefused(answer)
        if answer.joined:
            return Admitted(prepared.envelope, b"", answer.limits, asked_at_ms, joined=answer.joined)
        envelope = msgspec.structs.replace(
            prepared.envelope,
            model=shard,
            admitted_at_ms=answer.admitted_at_ms,
            publish_within_ms=answer.publish_within_ms,
            deadline_ms=answer.deadline_ms,
            version=answer.version,
            pinned=bool(prepared.envelope.version),
            arm=answer.arm,
        )
        version = envelope.version or prepared.version
        return Admitted(envelope, prepared.body, answer.limits, asked_at_ms, version)

    async def publish(self, admitted: Admitted) -> None:
        """Store an admitted request; from then on it survives any process. A joined one is stored already.

        Raises HeadraceError, having cancelled the request.
        """
        if admitted.joined:
            return
        envelope = admitted.envelope
        try:
            if envelope.body_bytes:  # The owner deletes it at the request's end, or when none comes for it.
                subject = subjects.body(envelope.model, envelope.tenant, envelope.request_id)
                digest = await self._bus.objects.put(topology.BODIES, subject, admitted.body)
                envelope = msgspec.structs.replace(envelope, body_digest=digest)
            else:
                envelope = msgspec.structs.replace(envelope, body=msgspec.Raw(admitted.body))
            left_s = (admitted.asked_at_ms + envelope.publish_within_ms - monotonic_ms()) / 1000
            if left_s <= 0:
                raise Unconfirmed("the reservation expired before the request was stored")
            await self._bus.jetstream.store(
                subjects.request(envelope.model, envelope.tenant),
                _envelope_codec.encode(envelope),
                msg_id=envelope.request_id,
                headers=tracing_headers(envelope.traceparent),
                timeout_s=min(left_s, STORE_TIMEOUT_S_MAX),
            )
        except BusError as error:
            self._cancel(envelope, "publish_unconfirmed")
            raise _not_stored(error, envelope) from error

    async def _ask(self, prepared: Prepared, *, join_only: bool) -> tuple[str, AdmissionAnswer]:
        """The shard that answers, and what; round after round until one does. Raises HeadraceError."""
        give_up_at = time.monotonic() + self._ask_s_max
        while True:
            for shard in self._owners(prepared):
                try:
                    return shard, await self._ask_one(shard, prepared, join_only=join_only)
                except (Unavailable, msgspec.MsgspecError) as error:
                    if join_only or time.monotonic() + ASK_PAUSE_S >= give_up_at:
                        raise HeadraceError(
                            "unavailable",
                            "No scheduler answers for this model at the moment.",
                            retry_after_s=2,  # A standby takes over within seconds.
                        ) from error
            await asyncio.sleep(ASK_PAUSE_S)

    def _owners(self, prepared: Prepared) -> Iterator[str]:
        """The request's shard; then, while nobody owns that one, the others, unless a key must find it there."""
        envelope = prepared.envelope
        yield envelope.model
        if envelope.idempotency is None:
            model = shards.model_of(envelope.model)
            record = self._catalog.resolve(model, prepared.context.identity.tenant).record
            yield from shards.others(model, record.shards, _shard_key(envelope))

    async def _ask_one(self, shard: str, prepared: Prepared, *, join_only: bool) -> AdmissionAnswer:
        envelope = msgspec.structs.replace(prepared.envelope, model=shard)
        question = AdmissionRequest(
            **fields_of(RequestDemand, envelope),
            deadline_ms=prepared.context.deadline_ms,
            reader=envelope.reply.stream,
            join_only=join_only,
        )
        data = await self._bus.request(subjects.admit(shard), _request_codec.encode(question), timeout_s=ASK_TIMEOUT_S)
        answer = _answer_codec.decode(data)
        self._limits_seen.keep(envelope.tenant, shards.model_of(shard), answer.limits, monotonic_ms())
        return answer


def _shard(record: ModelRecord, envelope: RequestEnvelope) -> str:
    """Who owns the request: the same for whatever is asked under one key, in one conversation, with one body.

    So a conversation stays with its workers, a key finds its request, and what ends engines is known again.
    """
    return shards.choose(record.name, record.shards, _shard_key(envelope))


def _shard_key(envelope: RequestEnvelope) -> str:
    given = envelope.idempotency
    key = f"key {given.key}" if given is not None else envelope.conversation or envelope.body_hash
    return f"{envelope.tenant} {key}"


def idempotency_key(given: str, param: str) -> str:
    """The checked key; ``param`` is what the caller calls it. Raises HeadraceError."""
    if 0 < len(given) <= IDEMPOTENCY_KEY_MAX and given.isascii() and given.isprintable():
        return given
    raise HeadraceError(
        "invalid_request", f"{param} must have 1 to {IDEMPOTENCY_KEY_MAX} printable ASCII characters.", param=param
    )


def _encoded(fields: dict[str, Any]) -> tuple[bytes, str]:
    """The body as engines get it, and its hash."""
    body = msgspec.json.encode(fields)
    return body, hashlib.blake2b(body, digest_size=16).hexdigest()


def _digest(endpoint: str, fields: dict[str, Any]) -> str:
    """Equal for bodies that ask for the same, however their JSON is written."""
    asked = msgspec.json.encode([endpoint, fields], order="deterministic")
    return hashlib.blake2b(asked, digest_size=16).hexdigest()


async def _counted(
    api: Api, tenant: TenantRecord, parsed: ParsedBody, model: Model, salt: str
) -> tuple[ValidBody, Counted]:
    """The checked body, and its prompts. Raises HeadraceError."""
    manifest, tokens = model.manifest, model.tokens
    if api.endpoint not in manifest.endpoints:
        raise HeadraceError(
            "invalid_request", f"The model {manifest.name!r} does not serve {api.endpoint}.", param="model"
        )
    await tokens.ready()
    valid = await threads.run(
        tenant.name,
        parsed.bytes,
        ON_THE_SPOT_BYTES,
        api.validate,
        parsed.fields,
        manifest,
        tokens.vocabulary,
        tokens.template_variables,
    )
    fields = await tokens.marked(api, valid.fields, parsed.bytes, tenant.name)
    valid = msgspec.structs.replace(valid, fields=fields)
    # Prompts that are scored are computed whole, and those of embeddings are.
    cached = api.limit_field and not valid.logprobs_per_prompt_token
    return valid, await tokens.count(api, fields, parsed.bytes, tenant.name, salt=salt if cached else "")


def check_prompt_logprobs(prompt_tokens: int, valid: ValidBody) -> None:
    """Raises HeadraceError when more log-probabilities of the prompt are asked for than an answer may hold."""
    each = valid.logprobs_per_prompt_token
    if prompt_tokens * each > PROMPT_LOGPROBS_MAX:
        param = "logprobs" if valid.fields.get("echo") else "prompt_logprobs"
        raise HeadraceError(
            "invalid_request",
            f"{param}: A request may ask for {PROMPT_LOGPROBS_MAX} log-probabilities of its prompts, and {each} for "
            f"each of {prompt_tokens} tokens are more. Ask for fewer, or for shorter prompts.",
            param=param,
        )


def output_limit(api: Api, manifest: Manifest, limits: TenantLimits, prompts: list[int], valid: ValidBody) -> int:
    """Output tokens per choice that are reserved and allowed; raises HeadraceError when they cannot fit.

    What the caller states is taken or refused. Where it states nothing the default is ours, and shrinks to what the
    context and the tenant's limits can ever hold.
    """
    part, longest = api.prompt_field, max(prompts)
    if min(prompts) == 0:
        raise HeadraceError("invalid_request", f"{part}: The {part} has no tokens.", param=part)
    room = manifest.context - longest
    asked = valid.max_output_tokens
    if room < (asked or bool(api.limit_field)):  # An engine has room for a token also where none is asked for.
        has = f"{longest} in the {part}"
        if not asked and api.limit_field:
            asks = f"you asked for {longest} tokens ({has}), and at least one must be left for the completion"
        elif asked:
            asks = f"you asked for {longest + asked} tokens ({has}, {asked} in the completion)"
        else:
            asks = f"you asked for {longest} tokens"
        raise HeadraceError(
            "context_length_exceeded",
            f"This model's maximum context length is {manifest.context} tokens. However, {asks}. "
            f"Please reduce the length of the {part} or of the completion.",
            param=part,
        )
    if asked is not None:
        return asked
    default = min(max(manifest.default_output_tokens, valid.least_output_tokens), room)
    if limits.output_tpm is not None:
        default = min(default, limits.output_tpm // valid.choices)
    if limits.queued_tokens is not None:
        default = min(default, (limits.queued_tokens - sum(prompts)) // valid.choices)
    return max(1, default)


def _priority(tenant: TenantRecord) -> Priority:
    return "interactive" if "interactive" in tenant.priorities or not tenant.priorities else tenant.priorities[0]


def _not_stored(error: BusError, envelope: RequestEnvelope) -> HeadraceError:
    if isinstance(error, TooLarge):
        return HeadraceError("request_too_large", "The request is too large for the service's message bus.")
    if isinstance(error, StreamFull):
        # The owner's limits are below the streams'; who finds one full cannot know when it will have room.
        full = "store for large bodies" if envelope.body_bytes and not envelope.body_digest else "queue"
        return HeadraceError("overloaded", f"The service's {full} is full, whatever the tenant's own limits say.")
    return HeadraceError("unavailable", "The request could not be stored; nothing was run.", retry_after_s=2)
