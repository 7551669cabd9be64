"""Subjects of the bus: how names become subject tokens, and every subject that Headrace uses.

A name (tenant, model, version, worker) is kept reversibly and without collisions: each byte of its UTF-8 form
outside ``[A-Za-z0-9-]`` becomes ``_`` and two lower-case hex digits. A token that starts with ``_`` and no hex
digits can therefore never be a name; ours (``_gw``) start so.
"""

import inspect
import re
import secrets
from collections.abc import Callable

MAX_NAME_CHARACTERS = 64
MAX_NAME_BYTES = 128
"""Longest name in UTF-8 bytes, before encoding."""

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-")
_PLAIN_NAME = re.compile(rf"[A-Za-z0-9-]{{1,{MAX_NAME_CHARACTERS}}}")
"""Most names are so, and stand as they are."""
_TOKEN = re.compile(r"(?:[A-Za-z0-9-]|_[0-9a-f]{2})+\Z")
_GATEWAY = "_gw"
"""In the place of a tenant: no encoded name, so no tenant can take it."""


class InvalidName(ValueError):
    """A name or token that cannot stand in a subject; the text says why."""


def encode(name: str) -> str:
    """Subject token of ``name``; raises InvalidName when it is empty, too long or not encodable as UTF-8."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    try:
        raw = name.encode()
    except UnicodeEncodeError as error:
        raise InvalidName("the name holds a lone surrogate, which has no UTF-8 form") from error
    if not raw:
        raise InvalidName("the name is empty")
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidName(f"the name has {len(name)} characters; at most {MAX_NAME_CHARACTERS} are kept")
    if len(raw) > MAX_NAME_BYTES:
        raise InvalidName(f"the name has {len(raw)} bytes; at most {MAX_NAME_BYTES} are kept")
    return "".join(chr(byte) if byte in _PLAIN else f"_{byte:02x}" for byte in raw)


def encode_or_empty(name: str) -> str:
    """Subject token of ``name``; empty where there is none."""
    try:
        return encode(name)
    except InvalidName:
        return ""


def decode(token: str) -> str:
    """The name that ``encode`` made ``token`` from; raises InvalidName for anything that encode cannot give."""
    if not _TOKEN.match(token):
        raise InvalidName(f"not an encoded name: {token!r}")
    raw = bytearray()
    position = 0
    while position < len(token):
        if token[position] == "_":
            byte = int(token[position + 1 : position + 3], 16)
            if byte in _PLAIN:
                raise InvalidName(f"not an encoded name: {token!r} escapes a plain character")
            raw.append(byte)
            position += 3
        else:
            raw.append(ord(token[position]))
            position += 1
    try:
        name = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidName(f"not an encoded name: {token!r} is not UTF-8") from error
    if len(raw) > MAX_NAME_BYTES or len(name) > MAX_NAME_CHARACTERS:
        raise InvalidName(f"not an encoded name: {len(raw)} bytes")
    return name


def _process(incarnation: str) -> str:
    """Two tokens for one life of a process, ``<user>-<life>``: permissions are by its user, the first of them."""
    user, _, life = incarnation.rpartition("-")
    return f"{encode(user)}.{encode(life)}"


def request(model: str, tenant: str) -> str:
    """Where a gateway publishes an admitted request (stream REQUESTS)."""
    return f"req.v1.{encode(model)}.{encode(tenant)}"


def requests_of(model: str) -> str:
    """All of a model's admitted requests."""
    return f"req.v1.{encode(model)}.*"


def body(model: str, tenant: str, request_id: str) -> str:
    """Where the gateway stores the body of a request that is too large for a message (stream BODIES)."""
    return f"body.v1.{encode(model)}.{encode(tenant)}.{encode(request_id)}"


def part(digest: str) -> str:
    """Where a part of a model's files is stored (stream PARTS), by the SHA-256 of its bytes."""
    return f"part.v1.{digest}"


def bodies_of(model: str) -> str:
    """All bodies of a model's requests."""
    return f"body.v1.{encode(model)}.*.*"


def request_of_body(subject: str) -> str:
    """Id of the request whose body is on this subject; raises InvalidName."""
    return decode(subject.rsplit(".", 1)[1])


def work(model: str, version: str, worker: str) -> str:
    """Where the scheduler publishes a dispatched attempt for one worker incarnation (stream WORK)."""
    return f"work.v1.{encode(model)}.{encode(version)}.{_process(worker)}"


def work_of(model: str) -> str:
    """All of a model's dispatched attempts."""
    return f"work.v1.{encode(model)}.>"


def attempt(model: str, request_id: str, attempt_number: int) -> str:
    """Where the terminal event of one attempt is stored, once (stream ATTEMPTS)."""
    return f"attempt.v1.{encode(model)}.{encode(request_id)}.{attempt_number}"


def attempts_of(model: str) -> str:
    """All of a model's terminal events."""
    return f"attempt.v1.{encode(model)}.>"


def attempts_of_request(request_id: str) -> str:
    """All terminal events of one request, of whichever model."""
    return f"attempt.v1.*.{encode(request_id)}.*"


def quarantine(model: str, request_id: str) -> str:
    """Where the scheduler keeps a request that ends engines (stream QUARANTINE)."""
    return f"quarantine.v1.{encode(model)}.{encode(request_id)}"


def admit(model: str) -> str:
    """Admission request to the model's scheduler."""
    return f"admit.v1.{encode(model)}"


def cancel(model: str, tenant: str) -> str:
    """Cancel request to the model's scheduler; the tenant is what the sender may cancel for."""
    return f"cancel.v1.{encode(model)}.{encode(tenant)}"


def gateway_cancel(model: str, tenant: str) -> str:
    """Cancel request of a gateway, whose word counts when it says that the service failed."""
    return f"cancel.v1.{encode(model)}.{_GATEWAY}.{encode(tenant)}"


def cancels_of(model: str) -> str:
    """All cancel requests to a model's scheduler."""
    return f"cancel.v1.{encode(model)}.>"


def is_gateway_cancel(subject: str) -> bool:
    """Whether a cancel request came from a gateway."""
    return subject.split(".")[3] == _GATEWAY


def status(model: str, tenant: str) -> str:
    """Status request to the model's scheduler about one request."""
    return f"status.v1.{encode(model)}.{encode(tenant)}"


def statuses_of(model: str) -> str:
    """All status requests to a model's scheduler."""
    return f"status.v1.{encode(model)}.*"


def submit(tenant: str, model: str) -> str:
    """NATS ingress of internal services: any gateway answers."""
    return f"submit.v1.{encode(tenant)}.{encode(model)}"


SUBMITS = "submit.v1.*.*"


def tenant_and_model_of_submit(subject: str) -> tuple[str, str]:
    """Tenant and model of a ``submit`` subject; raises InvalidName."""
    parts = subject.split(".")
    if len(parts) != 4:
        raise InvalidName(f"not a submit subject: {subject!r}")
    return decode(parts[2]), decode(parts[3])


def tenant_of_last_token(subject: str) -> str:
    """Tenant of a ``cancel``, ``status``, ``frames`` or ``req`` subject; raises InvalidName."""
    return decode(subject.rsplit(".", 1)[1])


def control(worker: str) -> str:
    """Orders of the scheduler to one worker incarnation."""
    return f"ctl.v1.{_process(worker)}"


def frames(worker: str, tenant: str) -> str:
    """Request to a worker for frames that were missed; the tenant is whose streams the sender may read."""
    return f"frames.v1.{_process(worker)}.{encode(tenant)}"


def frames_of(worker: str) -> str:
    """All requests to a worker for missed frames."""
    return f"frames.v1.{_process(worker)}.*"


DEAD_ATTEMPTS = "dead.v1.attempts"
"""Attempt events that the ledger refused (stream DEAD_LETTERS)."""

DELIVERIES = "delivery.v1"
"""What gateways saw of finished requests."""

USAGE_QUERIES = "usage.v1.>"
"""The ledger's query API."""


def usage_all(query: str) -> str:
    """A query about any tenant or all: ``usage``, ``latency``, ``invoice``, ``explain``, ``slowest``. For operators."""
    return f"usage.v1.all.{query}"


def usage_of(tenant: str, query: str) -> str:
    """A query whose answer is about this tenant alone, whatever the message says."""
    return f"usage.v1.of.{encode(tenant)}.{query}"


def scope_of_usage(subject: str) -> tuple[str | None, str]:
    """Tenant (None: all) and kind of query of a subject under ``usage.v1.``; raises InvalidName."""
    match subject.split(".")[2:]:
        case ["all", query]:
            return None, query
        case ["of", token, query]:
            return decode(token), query
    raise InvalidName(f"not a query about usage: {subject!r}")


def queues(model: str) -> str:
    """Request to a model's scheduler for its live queues."""
    return f"queues.v1.{encode(model)}"


def rollout(model: str) -> str:
    """What becomes of a model's roll-outs (stream ROLLOUT_EVENTS)."""
    return f"rollout.v1.{encode(model)}"


ADMIN_CALLS = "admin.v1.do.>"
"""All actions of operators."""

ADMIN_ACTIVITY = "admin.v1.activity"
"""What gateways saw of keys."""


def admin_call(action: str) -> str:
    """An operator's action by way of a gateway, which any scheduler performs; ``keys.create`` is area and verb."""
    return f"admin.v1.do.{action}"


def action_of_admin_call(subject: str) -> str:
    """The action of an ``admin_call`` subject."""
    return subject.removeprefix("admin.v1.do.")


def audit(area: str) -> str:
    """Where an area's entries of the audit trail are appended (stream AUDIT)."""
    return f"audit.v1.{encode(area)}"


HEARTBEATS = "hb.v1.>"


def worker_heartbeat(model: str, worker: str) -> str:
    """Heartbeat of a worker: its state, its room, and its attempts in flight."""
    return f"hb.v1.worker.{encode(model)}.{_process(worker)}"


def worker_heartbeats_of(model: str) -> str:
    """All workers of a model."""
    return f"hb.v1.worker.{encode(model)}.>"


def worker_cache(model: str, worker: str) -> str:
    """What a worker tells of its engine's prefix cache; ``worker`` is its incarnation."""
    return f"hb.v1.cache.{encode(model)}.{_process(worker)}"


def worker_pulse(model: str, worker: str) -> str:
    """That a worker lives, and how late its event loop is."""
    return f"hb.v1.pulse.{encode(model)}.{_process(worker)}"


STREAM_OWNER_HEARTBEATS = "hb.v1.stream-owner."
"""Prefix of stream owners' heartbeats; what follows is the owner's name on the bus."""


def gateway_stream_owner(gateway: str) -> str:
    """Name of a gateway as stream owner."""
    return f"{_GATEWAY}.{_process(gateway)}"


def is_gateway(stream_owner: str) -> bool:
    """Whether the stream owner of that name is a gateway."""
    return stream_owner.startswith(_GATEWAY + ".")


def tenant_stream_owner(tenant: str, incarnation: str) -> str:
    """Name of a tenant's service as stream owner."""
    return f"{encode(tenant)}.{encode(incarnation)}"


def stream_owner_heartbeat(owner: str) -> str:
    """Where a stream owner of that name sends heartbeats; who may publish there speaks for it."""
    return STREAM_OWNER_HEARTBEATS + owner


def loopback_heartbeat(observer: str) -> str:
    """A scheduler's heartbeat to itself, through the bus to its own subscription."""
    return f"hb.v1.loopback.{_process(observer)}"


GATEWAY_REPLIES = f"reply.v1.{_GATEWAY}."
"""Prefix of gateways' reply inboxes."""


def gateway_reply_inbox(gateway: str) -> str:
    """Where frames of all streams of one gateway go."""
    return f"{GATEWAY_REPLIES}{_process(gateway)}"


def tenant_reply_prefix(tenant: str) -> str:
    """What a reply subject of a tenant's own service must start with."""
    return f"reply.v1.{encode(tenant)}."


_REPLY = re.compile(r"reply\.v1(\.[A-Za-z0-9_-]+)+\Z")


def is_reply(subject: str) -> bool:
    """Whether frames may be published to ``subject``: a plain subject under ``reply.v1.``, at most 512 bytes."""
    return len(subject) <= 512 and _REPLY.match(subject) is not None


_MARK = secrets.token_hex(16)
"""A plain token that no name can be meant to equal."""


LIVES = ("worker", "gateway", "observer")
"""Parameters that name one life of a process, and so stand for two tokens: its user, and ``life``."""


def form(subject: Callable[..., str], fill: Callable[[str], str] = lambda parameter: "*", **names: str) -> str:
    """The subject that ``subject`` gives, with ``fill(parameter)`` for each of its parameters without a name.

    Permissions and documents are made so, from the functions that make the subjects themselves.
    """
    open_parameters = [parameter for parameter in inspect.signature(subject).parameters if parameter not in names]
    marks = {parameter: f"{_MARK}{parameter.replace('_', '')}" for parameter in open_parameters}
    lives = {parameter: f"{mark}-{_MARK}life" for parameter, mark in marks.items() if parameter in LIVES}
    text = subject(**marks | lives | names)
    for parameter, mark in {**marks, "life": f"{_MARK}life"}.items():
        text = text.replace(mark, fill(parameter))
    return text
