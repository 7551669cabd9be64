"""The bus as an AsyncAPI 3 document, made from the subjects and messages themselves.

Pure. A channel is a subject with its names as parameters; its operations say who sends and who receives, and what comes
back. Records in buckets are channels, too: the bus keeps a bucket as the stream of its keys' subjects.
"""

import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin

import msgspec

from contracts import subjects, topology
from contracts.messages.administration import ActivityAnswer, AdminAnswer, AdminCall, AuditEntry, KeyActivity
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.attempts import AttemptEvent, DeadLetter, Quarantined
from contracts.messages.control import (
    Announce,
    CacheChange,
    CancelAnswer,
    CancelAttempt,
    CancelRequest,
    ControlAnswer,
    Evict,
    Hold,
    LoopbackHeartbeat,
    StatusAnswer,
    StatusRequest,
    StreamOwnerHeartbeat,
    SwitchVersion,
    WorkerHeartbeat,
    WorkerPulse,
)
from contracts.messages.deliveries import Deliveries
from contracts.messages.frames import (
    AcceptedData,
    EndData,
    ErrorData,
    FramesAnswer,
    FramesRequest,
    LostData,
    ReplyMessage,
)
from contracts.messages.queues import QueueAnswer, QueueQuery
from contracts.messages.records import (
    Alias,
    Budget,
    KeyRecord,
    KeyUse,
    Manifest,
    ModelRecord,
    Price,
    SharedQuota,
    Spending,
    TenantRecord,
)
from contracts.messages.request import RequestEnvelope, SubmitAnswer, SubmitRequest, WorkItem
from contracts.messages.rollouts import RolloutEvent, RolloutPlan, RolloutProgress
from contracts.messages.usage import (
    ExplainAnswer,
    ExplainQuery,
    Invoice,
    InvoiceAnswer,
    InvoiceQuery,
    LatencyAnswer,
    LatencyQuery,
    SlowestAnswer,
    SlowestQuery,
    UsageAnswer,
    UsageQuery,
)

Party = Literal["service", "gateway", "scheduler", "worker", "ledger", "operator"]
"""``service``: a tenant's own service."""

VERSION = "1"
_SCHEMA = "#/components/schemas/{name}"


_Parties = Sequence[Party]


class Channel(msgspec.Struct, frozen=True):
    """A subject, what travels there, from whom to whom, and what is answered. ``stream``: where it is stored."""

    name: str
    subject: Callable[..., str] | str
    carries: Sequence[type[msgspec.Struct]]
    senders: Sequence[Party]
    receivers: Sequence[Party]
    answers: Sequence[type[msgspec.Struct]] = ()
    stream: str = ""
    summary: str = ""
    """Where the subject is no function, whose first line says it."""


_OPERATED: Sequence[Party] = ("operator", "scheduler")
_ORDERS = (Announce, CancelAttempt, Evict, SwitchVersion, Hold)
_QUERIES = (UsageQuery, LatencyQuery, InvoiceQuery, ExplainQuery, SlowestQuery)
_ANSWERS = (UsageAnswer, LatencyAnswer, InvoiceAnswer, ExplainAnswer, SlowestAnswer)

_RECORDS: Sequence[tuple[str, str, type[msgspec.Struct], str, _Parties, _Parties]] = (
    ("key", topology.KEYS, KeyRecord, "API keys by id and HMAC of their secret.", _OPERATED, ["gateway"]),
    ("use", topology.USES, KeyUse, "When each key was last used, by its id.", ["scheduler"], ["operator", "gateway"]),
    ("alias", topology.ALIASES, Alias, "Names that stand for one of several models.", _OPERATED, ["gateway"]),
    ("tenant", topology.TENANTS, TenantRecord, "Tenants.", _OPERATED, ["gateway", "scheduler"]),
    ("model", topology.MODELS, ModelRecord, "Models.", _OPERATED, ["gateway", "scheduler", "worker"]),
    (
        "version",
        topology.VERSIONS,
        Manifest,
        "Versions of models, never changed.",
        _OPERATED,
        ["gateway", "scheduler", "worker"],
    ),
    (
        "rollout",
        topology.ROLLOUTS,
        RolloutPlan,
        "What is wanted of roll-outs.",
        _OPERATED,
        ["scheduler", "gateway", "worker"],
    ),
    ("budget", topology.BUDGETS, Budget, "What was billed in a month, by tenant.", ["ledger"], ["scheduler"]),
    (
        "spending",
        topology.SPENDING,
        Spending,
        "What a month cost that is not booked yet.",
        ["scheduler"],
        ["scheduler"],
    ),
    (
        "quota",
        topology.QUOTAS,
        SharedQuota,
        "What is taken of a tenant's limits on a model with shards.",
        ["scheduler"],
        ["scheduler"],
    ),
    ("invoice", topology.INVOICES, Invoice, "Issued invoices.", ["ledger"], ["ledger"]),
    ("price", topology.PRICES, Price, "Prices.", ["operator"], ["ledger"]),
)

CHANNELS = (
    Channel("submit", subjects.submit, [SubmitRequest], ["service"], ["gateway"], [SubmitAnswer]),
    Channel(
        "reply",
        "reply.v1.{tenant}.{inbox}",
        [ReplyMessage],
        ["worker", "scheduler"],
        ["service"],
        summary="Frames of a tenant's own service, on the reply subject that it named.",
    ),
    Channel("gatewayReplyInbox", subjects.gateway_reply_inbox, [ReplyMessage], ["worker", "scheduler"], ["gateway"]),
    Channel("cancel", subjects.cancel, [CancelRequest], ["service"], ["scheduler"], [CancelAnswer]),
    Channel("gatewayCancel", subjects.gateway_cancel, [CancelRequest], ["gateway"], ["scheduler"], [CancelAnswer]),
    Channel("status", subjects.status, [StatusRequest], ["service", "gateway"], ["scheduler"], [StatusAnswer]),
    Channel("frames", subjects.frames, [FramesRequest], ["service", "gateway"], ["worker"], [FramesAnswer]),
    Channel(
        "serviceHeartbeat",
        "hb.v1.stream-owner.{tenant}.{incarnation}",
        [StreamOwnerHeartbeat],
        ["service"],
        ["scheduler"],
        summary="Every 500 ms from a tenant's service that owns streams; when they stop, its requests are cancelled.",
    ),
    Channel(
        "gatewayHeartbeat",
        "hb.v1.stream-owner._gw.{gateway}.{life}",
        [StreamOwnerHeartbeat],
        ["gateway"],
        ["scheduler"],
        summary="Every 500 ms from a gateway.",
    ),
    Channel("usage", subjects.usage_of, _QUERIES, ["service", "gateway"], ["ledger"], _ANSWERS),
    Channel("usageOfAll", subjects.usage_all, _QUERIES, ["gateway", "operator"], ["ledger"], _ANSWERS),
    Channel("admit", subjects.admit, [AdmissionRequest], ["gateway"], ["scheduler"], [AdmissionAnswer]),
    Channel("body", subjects.body, [], ["gateway"], ["worker", "scheduler"], stream=topology.BODIES),
    Channel("part", subjects.part, [], ["operator"], ["gateway", "worker"], stream=topology.PARTS),
    Channel("request", subjects.request, [RequestEnvelope], ["gateway"], ["scheduler"], stream=topology.REQUESTS),
    Channel("work", subjects.work, [WorkItem], ["scheduler"], ["worker"], stream=topology.WORK),
    Channel(
        "attempt",
        subjects.attempt,
        [AttemptEvent],
        ["worker", "scheduler"],
        ["scheduler", "ledger"],
        stream=topology.ATTEMPTS,
    ),
    Channel("control", subjects.control, _ORDERS, ["scheduler"], ["worker"], [ControlAnswer]),
    Channel("queues", subjects.queues, [QueueQuery], ["gateway", "operator"], ["scheduler"], [QueueAnswer]),
    Channel("workerHeartbeat", subjects.worker_heartbeat, [WorkerHeartbeat], ["worker"], ["scheduler"]),
    Channel("workerCache", subjects.worker_cache, [CacheChange], ["worker"], ["scheduler"]),
    Channel("workerPulse", subjects.worker_pulse, [WorkerPulse], ["worker"], ["scheduler"]),
    Channel("loopbackHeartbeat", subjects.loopback_heartbeat, [LoopbackHeartbeat], ["scheduler"], ["scheduler"]),
    Channel("adminCall", subjects.admin_call, [AdminCall], ["gateway"], ["scheduler"], [AdminAnswer]),
    Channel(
        "keyActivity",
        subjects.ADMIN_ACTIVITY,
        [KeyActivity],
        ["gateway"],
        ["scheduler"],
        [ActivityAnswer],
        summary="Uses of keys and failed logins, every few seconds.",
    ),
    Channel(
        "deliveries",
        subjects.DELIVERIES,
        [Deliveries],
        ["gateway"],
        ["ledger"],
        summary="What gateways saw of finished requests, once a second.",
    ),
    Channel("audit", subjects.audit, [AuditEntry], ["scheduler", "operator"], ["operator"], stream=topology.AUDIT),
    Channel(
        "rolloutProgress",
        f"$KV.{topology.ROLLOUTS}.{{model}}.progress",
        [RolloutProgress],
        ["scheduler"],
        ["scheduler", "operator", "gateway", "worker"],
        stream=f"KV_{topology.ROLLOUTS}",
        summary="How far roll-outs are, with the evidence.",
    ),
    Channel(
        "rolloutEvent",
        subjects.rollout,
        [RolloutEvent],
        ["scheduler"],
        ["ledger", "operator"],
        stream=topology.ROLLOUT_EVENTS,
    ),
    Channel("quarantine", subjects.quarantine, [Quarantined], ["scheduler"], ["operator"], stream=topology.QUARANTINE),
    Channel(
        "deadLetter",
        subjects.DEAD_ATTEMPTS,
        [DeadLetter],
        ["ledger"],
        ["operator"],
        stream=topology.DEAD_LETTERS,
        summary="Attempt events that the ledger refused.",
    ),
    *(
        Channel(name, f"$KV.{bucket}.{{name}}", [kind], senders, receivers, stream=f"KV_{bucket}", summary=what)
        for name, bucket, kind, what, senders, receivers in _RECORDS
    ),
)

_FRAME_DATA = (AcceptedData, EndData, ErrorData, LostData)
"""What ``Frame.data`` may be; no message of their own."""


@cache
def document() -> dict[str, Any]:
    """The whole document, as JSON values."""
    kinds = {kind for channel in CHANNELS for kind in (*channel.carries, *channel.answers)}
    described = [_describable(kind) for kind in [*_by_name(kinds), *_FRAME_DATA]]
    _, schemas = msgspec.json.schema_components(described, ref_template=_SCHEMA)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Headrace on NATS",
            "version": VERSION,
            "description": inspect.cleandoc(_DESCRIPTION),
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {name: described for channel in CHANNELS for name, described in _channels(channel)},
        "operations": {name: operation for channel in CHANNELS for name, operation in _operations(channel)},
        "components": {"messages": {kind.__name__: _message(kind) for kind in _by_name(kinds)}, "schemas": schemas},
    }


_DESCRIPTION = """
    What travels between the services of Headrace, and between them and a tenant's own service, over NATS. Messages are
    JSON; unknown fields are ignored. Names in subjects are encoded: bytes of their UTF-8 form outside `[A-Za-z0-9-]`
    become `_` and two hex digits.

    A tenant's service sends a `SubmitRequest`, gets a `SubmitAnswer`, and then reads frames on the reply subject that
    it named, straight from the worker. With an `idempotency_key` it may send the request again, under a new stream
    name: what runs or ran under the key is joined (`joined`), and its frames are asked for at its worker. Its NATS
    user (`headrace nats-config --tenant NAME`) may use the channels that name `service` as sender or receiver, for its
    own tenant alone.
"""


@cache
def _describable(kind: Any) -> Any:
    """``kind`` with anything in the place of raw JSON: msgspec cannot describe the default of a raw field."""
    if kind is msgspec.Raw:
        return Any
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        config = kind.__struct_config__
        fields = [(field.name, _describable(field.type), _default(field)) for field in msgspec.structs.fields(kind)]
        namespace = {"__doc__": kind.__doc__}
        return msgspec.defstruct(
            kind.__name__, fields, namespace=namespace, kw_only=True, tag=config.tag, array_like=config.array_like
        )
    arguments = get_args(kind)
    if not arguments or get_origin(kind) is Literal:
        return kind
    described = tuple(_describable(argument) for argument in arguments)
    if isinstance(kind, types.UnionType):
        return functools.reduce(operator.or_, described)
    return get_origin(kind)[described]


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.type is msgspec.Raw:
        return msgspec.UNSET
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return msgspec.field(default=field.default) if field.default is not msgspec.NODEFAULT else msgspec.field()


def _by_name(kinds: set[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    return sorted(kinds, key=lambda kind: kind.__name__)


def _message(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        "name": kind.__name__,
        "summary": _first_line(kind),
        "payload": {"$ref": _SCHEMA.format(name=kind.__name__)},
    }


def _channels(channel: Channel) -> Iterator[tuple[str, dict[str, Any]]]:
    """The channel, and the asker's inbox where there is an answer."""
    subject = channel.subject
    address = subject if isinstance(subject, str) else subjects.form(subject, lambda parameter: f"{{{parameter}}}")
    described: dict[str, Any] = {
        "address": address,
        "summary": channel.summary or _first_line(subject),
        "messages": _refer_to_components(channel.carries),
    }
    if parameters := [token[1:-1] for token in address.split(".") if token.startswith("{")]:
        described["parameters"] = {parameter: {} for parameter in parameters}
    if channel.stream:
        described["description"] = f"Stored in the JetStream stream {channel.stream}."
    yield channel.name, described
    if channel.answers:
        yield (
            f"{channel.name}Answer",
            {
                "address": None,
                "summary": f"Inbox of who asked on {channel.name}.",
                "messages": _refer_to_components(channel.answers),
            },
        )


def _refer_to_components(kinds: Sequence[type[msgspec.Struct]]) -> dict[str, Any]:
    return {kind.__name__: {"$ref": f"#/components/messages/{kind.__name__}"} for kind in kinds}


def _operations(channel: Channel) -> Iterator[tuple[str, dict[str, Any]]]:
    """One for each party: what it sends, and what it receives and answers."""
    for action, parties in (("send", channel.senders), ("receive", channel.receivers)):
        for party in parties:
            operation: dict[str, Any] = {"action": action, "tags": [{"name": party}]}
            operation |= _refer_to_channel(channel.name, channel.carries)
            if channel.answers:
                operation["reply"] = {
                    "address": {"location": "$message.header#/reply", "description": "NATS's own reply subject."},
                    **_refer_to_channel(f"{channel.name}Answer", channel.answers),
                }
            yield f"{party}_{action}s_{channel.name}", operation


def _refer_to_channel(name: str, kinds: Sequence[type[msgspec.Struct]]) -> dict[str, Any]:
    return {
        "channel": {"$ref": f"#/channels/{name}"},
        "messages": [{"$ref": f"#/channels/{name}/messages/{kind.__name__}"} for kind in kinds],
    }


def _first_line(described: object) -> str:
    return (inspect.getdoc(described) or "").partition("\n")[0].replace("``", "`")
