"""Who may publish and subscribe to what on the bus: the least that each NATS user needs.

Pure. The subjects come from contracts.subjects and contracts.topology; the server enforces the lists
(``headrace nats-config`` writes them down). Each process of a service has a user, ``<role>-<what you like>``, and each
tenant one, in an account of the tenant's own, from which only the subjects listed here lead to the services.

What a user can still do to others, and what is done about it:

- The reply subject of a request is not checked within the services' account: services answer to inboxes only, and
  gateways take only reply subjects of the sender's own tenant for frames.
- The server itself answers calls of JetStream's API, and delivers to consumers, wherever the caller says. So whoever
  may make such calls (services, never tenants) could have the server write what is stored, and its own answers,
  anywhere: receivers decode strictly and ignore what is no message of theirs, and records of keys, tenants and models
  say where they belong. What is left: such a service could crowd out an area of the audit trail with copies, which are
  no entries, and restore a key that was revoked from a copy that it had made of it before.
- Subjects of frames and of terminal events name no worker: a worker may send frames to anybody, and end any attempt
  whose ids it knows. The first stored end wins, and frames name their worker, to whom stream owners are locked.
- Consumers of WORK have one token, their worker's whole name, so that the server cannot bind them to a user: a worker
  that learns another's name could take its work. It is not told any, but can read them in ATTEMPTS.
- Only the operator stores parts of models' files. Whoever reads one checks it against its name, the digest.
- Workers read bodies of all tenants, and gateways serve all: what they hold is as trusted as they are.

A server that is told to read its users again forgets whom it owes an answer (nats-server 2.15): an answer that comes
within that instant is refused, and logged as a violation. Whoever asked hears nothing, and asks again.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, get_args

import msgspec

from contracts import subjects, topology
from contracts.bus.types import INBOX
from contracts.messages.rollouts import SHADOW_TENANT
from contracts.subjects import form

Role = Literal["operator", "gateway", "scheduler", "worker", "ledger"]
ROLES: tuple[Role, ...] = get_args(Role)
"""The operator is people and the command line; the others are the services."""

OPERATOR = "operator"
_TENANT_USERS = "t."
_USER = re.compile(r"[a-z]+(-[A-Za-z0-9-]{1,40})?")


class Permissions(msgspec.Struct, frozen=True):
    """Subjects with wildcards. ``answers``: may answer each request that it receives, once, wherever it asks for.
    ``denied``: may not publish, whatever ``publish`` says.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False
    denied: tuple[str, ...] = ()


def user_of_tenant(tenant: str) -> str:
    """Name of the NATS user of a tenant's services, and of their inboxes; no other user's name has a dot."""
    return f"{_TENANT_USERS}{subjects.encode(tenant)}"


def tenant_of_user(user: str) -> str | None:
    """The tenant whose user that is; None when it is no tenant's. Raises InvalidName."""
    return subjects.decode(user.removeprefix(_TENANT_USERS)) if user.startswith(_TENANT_USERS) else None


def role_of(user: str) -> Role:
    """What a user of that name is: ``worker`` and ``worker-gpu7`` are workers. Raises InvalidName."""
    role = user.partition("-")[0]
    if role not in ROLES or not _USER.fullmatch(user):
        raise subjects.InvalidName(f"no user may have the name {user!r}: a role ({', '.join(ROLES)}) comes first")
    return role


def of_tenant(tenant: str) -> Permissions:
    """What a tenant's services may do: ask for themselves, and read what is theirs. Nothing of JetStream."""
    inbox = _inbox(user_of_tenant(tenant))
    return Permissions(
        publish=(*services_of_tenant(tenant), inbox), subscribe=(subjects.tenant_reply_prefix(tenant) + ">", inbox)
    )


def services_of_tenant(tenant: str = "") -> tuple[str, ...]:
    """Subjects on which the services hear a tenant; without one those of all tenants."""
    name = subjects.encode(tenant) if tenant else "*"

    def of(subject: Callable[..., str]) -> str:
        return form(subject, lambda parameter: name if parameter == "tenant" else "*")

    asked = (subjects.submit, subjects.cancel, subjects.status, subjects.frames, subjects.usage_of)
    return (*map(of, asked), subjects.stream_owner_heartbeat(of(subjects.tenant_stream_owner)))


def of_user(user: str) -> Permissions:
    """What the process of a service may do: all that it needs; the operator all but shorten the audit trail.

    Raises InvalidName.
    """
    role = role_of(user)
    if role == OPERATOR:
        return Permissions(publish=(">",), subscribe=(">",), denied=_TRAIL_KEPT)
    publish, subscribe = _ROLES[role]
    streams = (f"$JS.API.STREAM.INFO.{stream['name']}" for stream in topology.STREAMS)
    inbox = _inbox(user)
    return Permissions(
        publish=(*publish(partial(_own, user)), *streams, inbox),
        subscribe=(*subscribe(partial(_own, user)), inbox),
        answers=True,
    )


Own = Callable[..., str]
"""Gives the form of a subject that names a life of the user's own processes."""


def _own(user: str, subject: Callable[..., str]) -> str:
    return form(subject, lambda parameter: user if parameter in subjects.LIVES else "*")


def _inbox(user: str) -> str:
    return f"{INBOX}{user}.>"


def _read(stream: str) -> Iterator[str]:
    """By direct get, and from the leader where that finds nothing."""
    yield f"$JS.API.DIRECT.GET.{stream}"
    yield f"$JS.API.DIRECT.GET.{stream}.>"
    yield f"$JS.API.STREAM.MSG.GET.{stream}"


def _pull(stream: str, consumer: str, subject: str) -> Iterator[str]:
    """Take work by consumers of that name on that subject only."""
    yield f"$JS.API.CONSUMER.CREATE.{stream}.{consumer}.{subject}"
    yield f"$JS.API.CONSUMER.DELETE.{stream}.{consumer}"
    yield f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
    yield f"$JS.ACK.{stream}.{consumer}.>"


def _follow(stream: str, subject: str) -> Iterator[str]:
    """Follow what is stored on that subject, by ordered consumers, whose names are new each time."""
    yield f"$JS.API.CONSUMER.CREATE.{stream}.*.{subject}"
    yield f"$JS.API.CONSUMER.DELETE.{stream}.*"
    yield f"$JS.FC.{stream}.>"


def _watch(*buckets: str) -> Iterator[str]:
    for bucket in buckets:
        yield from _follow(f"KV_{bucket}", f"$KV.{bucket}.>")


def _keep(*buckets: str) -> Iterator[str]:
    """Read and write keys."""
    for bucket in buckets:
        yield f"$KV.{bucket}.>"
        yield from _read(f"KV_{bucket}")


_TRAIL_KEPT = tuple(f"$JS.API.STREAM.{call}.{topology.AUDIT}" for call in ("DELETE", "UPDATE", "PURGE", "MSG.DELETE"))
"""An update could let all entries pass their age. Who keeps the server's configuration may add a user that can."""
_ADMINISTERED = (
    topology.KEYS,
    topology.USES,
    topology.TENANTS,
    topology.MODELS,
    topology.VERSIONS,
    topology.ALIASES,
    topology.ROLLOUTS,
)


def _gateway_publishes(own: Own) -> Iterator[str]:
    """Nothing that people manage is a gateway's to write: it asks the admin service."""
    asked = (subjects.admit, subjects.request, subjects.gateway_cancel, subjects.status, subjects.frames)
    yield from (form(subject) for subject in (*asked, subjects.queues))
    yield subjects.USAGE_QUERIES
    yield subjects.stream_owner_heartbeat(own(subjects.gateway_stream_owner))
    yield from _watch(topology.KEYS, topology.TENANTS, topology.MODELS, topology.VERSIONS, topology.ALIASES)
    for bucket in _ADMINISTERED:
        yield from _read(f"KV_{bucket}")
    yield from _read(topology.PARTS)
    yield from (subjects.ADMIN_CALLS, subjects.ADMIN_ACTIVITY, subjects.DELIVERIES)
    yield from (form(subjects.body), f"$JS.API.STREAM.PURGE.{topology.BODIES}")


def _gateway_hears(own: Own) -> Iterator[str]:
    yield subjects.SUBMITS
    yield own(subjects.gateway_reply_inbox)


def _scheduler_publishes(own: Own) -> Iterator[str]:
    yield from (form(each) for each in (subjects.work, subjects.attempt, subjects.quarantine, subjects.control))
    yield "reply.v1.>"
    yield own(subjects.loopback_heartbeat)
    yield from _pull(topology.REQUESTS, "*", form(subjects.requests_of))
    yield from _follow(topology.ATTEMPTS, form(subjects.attempts_of))
    for stream in (topology.REQUESTS, topology.WORK, topology.ATTEMPTS, topology.BODIES):
        yield from _read(stream)
    yield f"$JS.API.STREAM.MSG.DELETE.{topology.REQUESTS}"
    yield f"$JS.API.STREAM.MSG.DELETE.{topology.WORK}"
    yield f"$JS.API.STREAM.PURGE.{topology.BODIES}"
    yield f"$JS.API.CONSUMER.INFO.{topology.WORK}.*"
    yield from _watch(topology.TENANTS, topology.BUDGETS, topology.SPENDING, topology.MODELS, topology.VERSIONS)
    yield from _watch(topology.ROLLOUTS)
    yield form(subjects.rollout)
    yield f"req.v1.*.{subjects.encode(SHADOW_TENANT)}"  # Copies of requests, for a new version.
    yield from _keep(topology.LEASES, topology.SPENDING, topology.QUOTAS, topology.PRICES, *_ADMINISTERED)
    yield form(subjects.audit)
    # For operators, who ask by way of a gateway that may not.
    yield from (form(subjects.queues), form(subjects.gateway_cancel))
    yield from (*_read(topology.AUDIT), *_read(topology.QUARANTINE))
    yield f"$JS.API.STREAM.PURGE.{topology.QUARANTINE}"


def _scheduler_hears(own: Own) -> Iterator[str]:
    asked = (subjects.admit, subjects.cancels_of, subjects.status, subjects.queues)
    yield from (form(subject) for subject in asked)
    yield from (subjects.HEARTBEATS, subjects.ADMIN_CALLS, subjects.ADMIN_ACTIVITY)


def _worker_publishes(own: Own) -> Iterator[str]:
    yield form(subjects.attempt)
    yield "reply.v1.>"
    yield own(subjects.worker_heartbeat)
    yield own(subjects.worker_pulse)
    yield own(subjects.worker_cache)
    yield from _pull(topology.WORK, "*", own(subjects.work))
    yield from _watch(topology.MODELS, topology.VERSIONS, topology.ROLLOUTS)
    for stream in (
        topology.ATTEMPTS,
        f"KV_{topology.MODELS}",
        f"KV_{topology.VERSIONS}",
        topology.BODIES,
        topology.PARTS,
    ):
        yield from _read(stream)


def _worker_hears(own: Own) -> Iterator[str]:
    yield own(subjects.control)
    yield own(subjects.frames)


def _ledger_publishes(own: Own) -> Iterator[str]:
    yield subjects.DEAD_ATTEMPTS
    yield from _pull(topology.ATTEMPTS, "ledger", "attempt.v1.>")
    yield f"$JS.API.CONSUMER.INFO.{topology.ATTEMPTS}.ledger"
    yield f"$JS.API.STREAM.MSG.GET.{topology.ATTEMPTS}"
    yield f"$JS.API.STREAM.PURGE.{topology.ATTEMPTS}"
    yield from _keep(topology.BUDGETS)
    yield from _watch(topology.PRICES, topology.INVOICES)
    yield from _read(topology.ROLLOUT_EVENTS)
    yield from _keep(topology.INVOICES)


def _ledger_hears(own: Own) -> Iterator[str]:
    yield subjects.USAGE_QUERIES
    yield subjects.DELIVERIES


Listing = Callable[[Own], Iterator[str]]

_ROLES: dict[Role, tuple[Listing, Listing]] = {
    "gateway": (_gateway_publishes, _gateway_hears),
    "scheduler": (_scheduler_publishes, _scheduler_hears),
    "worker": (_worker_publishes, _worker_hears),
    "ledger": (_ledger_publishes, _ledger_hears),
}
"""Role -> what it publishes, what it subscribes to; beside its own inbox."""


def table() -> str:
    """Who may use which subject, in Markdown: P publishes, S subscribes. ``{own}`` is the user, or the tenant."""
    granted = {role: _masked(of_user(f"{role}-{_MASK}"), f"{role}-{_MASK}") for role in ROLES if role != OPERATOR} | {
        "tenant": _masked(of_tenant(_MASK), _MASK)
    }
    rows = sorted({subject for each in granted.values() for subject in (*each.publish, *each.subscribe)}, key=_by_kind)
    lines = [
        "| Subject | " + " | ".join(granted) + " |",
        "|---|" + "---|" * len(granted),
        *(
            f"| `{subject}` | "
            + " | ".join(
                ("P" if subject in each.publish else "") + ("S" if subject in each.subscribe else "")
                for each in granted.values()
            )
            + " |"
            for subject in rows
        ),
    ]
    return "\n".join(line.replace("  |", " |") for line in lines) + "\n"


_MASK = "MASK"


def _masked(granted: Permissions, own: str) -> Permissions:
    def mask(subjects_: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(subject.replace(own, "{own}") for subject in subjects_)

    return Permissions(publish=mask(granted.publish), subscribe=mask(granted.subscribe), answers=granted.answers)


def _by_kind(subject: str) -> tuple[bool, str]:
    """Our own subjects before JetStream's."""
    return subject.startswith("$"), subject
