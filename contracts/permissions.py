"""Who may publish and subscribe to what on the bus: the least that each kind of NATS user needs.

Pure. The subjects come from contracts.subjects and contracts.topology; the server enforces the lists
(``headrace nats-config`` writes them down). Three things the server does not do, and who does:

- The reply subject of a request is not checked: services answer to inboxes only, and gateways take only reply subjects
  of the sender's own tenant for frames.
- The server itself answers calls of JetStream's API, and delivers to consumers, wherever the caller says. So whoever
  may make such calls (services, never tenants) could have the server write what is stored, and its own answers,
  anywhere: receivers decode strictly and ignore what is no message of theirs.
- Workers share a user, and so may speak for each other.
"""

from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from contracts import subjects, topology
from contracts.bus.types import INBOX
from contracts.subjects import form

Role = Literal["operator", "gateway", "scheduler", "worker", "ledger"]
ROLES: tuple[Role, ...] = get_args(Role)
"""The operator is people and the command line; the others are the services."""


class Permissions(msgspec.Struct, frozen=True):
    """Subjects with wildcards. ``answers``: may answer each request that it receives, once, wherever it asks for."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False


def user_of_tenant(tenant: str) -> str:
    """Name of the NATS user of a tenant's services, and of their inboxes; no role has a dot in its name."""
    return f"t.{subjects.encode(tenant)}"


def of_tenant(tenant: str) -> Permissions:
    """What a tenant's services may do: ask for themselves, and read what is theirs. Nothing of JetStream."""
    inbox = _inbox(user_of_tenant(tenant))
    asked = (subjects.submit, subjects.cancel, subjects.status, subjects.frames, subjects.usage_of)
    return Permissions(
        publish=(
            *(form(subject, tenant=tenant) for subject in asked),
            subjects.stream_owner_heartbeat(form(subjects.tenant_stream_owner, tenant=tenant)),
            inbox,
        ),
        subscribe=(subjects.tenant_reply_prefix(tenant) + ">", inbox),
    )


def of_role(role: Role) -> Permissions:
    """What a service of this kind may do; all that it needs, and the operator everything."""
    if role == "operator":
        return Permissions(publish=(">",), subscribe=(">",))
    publish, subscribe = _ROLES[role]
    streams = tuple(f"$JS.API.STREAM.INFO.{stream['name']}" for stream in topology.STREAMS)
    inbox = _inbox(role)
    return Permissions(publish=(*publish, *streams, inbox), subscribe=(*subscribe, inbox), answers=True)


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


_ADMINISTERED = (topology.KEYS, topology.USES, topology.TENANTS, topology.MODELS)

# Nothing that people manage is a gateway's to write: it asks the admin service.
_GATEWAY = (
    *(form(subject) for subject in (subjects.admit, subjects.request, subjects.gateway_cancel, subjects.status)),
    *(form(subject) for subject in (subjects.frames, subjects.queues)),
    subjects.USAGE_QUERIES,
    subjects.stream_owner_heartbeat(form(subjects.gateway_stream_owner)),
    *_watch(topology.KEYS, topology.TENANTS, topology.MODELS),
    *(each for bucket in _ADMINISTERED for each in _read(f"KV_{bucket}")),
    subjects.ADMIN_CALLS,
    subjects.ADMIN_ACTIVITY,
    form(subjects.body),
    f"$JS.API.STREAM.PURGE.{topology.BODIES}",
)

_SCHEDULER = (
    *(form(subject) for subject in (subjects.work, subjects.attempt, subjects.quarantine)),
    "reply.v1.>",
    form(subjects.control),
    form(subjects.loopback_heartbeat),
    *_pull(topology.REQUESTS, "*", form(subjects.requests_of)),
    *_follow(topology.ATTEMPTS, form(subjects.attempts_of)),
    *_read(topology.REQUESTS),
    *_read(topology.WORK),
    *_read(topology.ATTEMPTS),
    f"$JS.API.STREAM.MSG.DELETE.{topology.REQUESTS}",
    f"$JS.API.STREAM.MSG.DELETE.{topology.WORK}",
    *_read(topology.BODIES),
    f"$JS.API.STREAM.PURGE.{topology.BODIES}",
    f"$JS.API.CONSUMER.INFO.{topology.WORK}.*",
    *_watch(topology.TENANTS, topology.BUDGETS, topology.MODELS),
    *_keep(topology.LEASES, *_ADMINISTERED),
    form(subjects.audit),
)

_WORKER = (
    form(subjects.attempt),
    "reply.v1.>",
    form(subjects.worker_heartbeat),
    *_pull(topology.WORK, "*", form(subjects.work)),
    *_read(topology.ATTEMPTS),
    *_read(f"KV_{topology.MODELS}"),
    *_read(topology.BODIES),
)

_LEDGER = (
    subjects.DEAD_ATTEMPTS,
    *_pull(topology.ATTEMPTS, "ledger", "attempt.v1.>"),
    f"$JS.API.CONSUMER.INFO.{topology.ATTEMPTS}.ledger",
    f"$JS.API.STREAM.MSG.GET.{topology.ATTEMPTS}",
    f"$JS.API.STREAM.PURGE.{topology.ATTEMPTS}",
    *_keep(topology.BUDGETS),
    *_watch(topology.PRICES, topology.INVOICES),
    *_keep(topology.INVOICES),
)

_ROLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gateway": (_GATEWAY, (subjects.SUBMITS, form(subjects.gateway_reply_inbox))),
    "scheduler": (
        _SCHEDULER,
        (
            form(subjects.admit),
            form(subjects.cancels_of),
            form(subjects.status),
            form(subjects.queues),
            subjects.HEARTBEATS,
            subjects.ADMIN_CALLS,
            subjects.ADMIN_ACTIVITY,
        ),
    ),
    "worker": (_WORKER, (form(subjects.control), form(subjects.frames))),
    "ledger": (_LEDGER, (subjects.USAGE_QUERIES,)),
}
"""Role -> what it publishes, what it subscribes to; beside its own inbox."""
