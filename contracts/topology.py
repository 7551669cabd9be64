"""The streams and buckets that Headrace needs: their settings, made idempotently, and what differs from them.

Each size says why it has that value. Replicas are the operator's: streams are made with one and not compared.
"""

from typing import Any

from contracts.bus import Bus, BusError, NotFound, Unavailable

REQUESTS = "REQUESTS"
WORK = "WORK"
ATTEMPTS = "ATTEMPTS"
DEAD_LETTERS = "DEAD_LETTERS"
QUARANTINE = "QUARANTINE"
AUDIT = "AUDIT"
ROLLOUT_EVENTS = "ROLLOUT_EVENTS"

KEYS = "keys"
USES = "uses"
TENANTS = "tenants"
MODELS = "models"
VERSIONS = "versions"
ALIASES = "aliases"
ROLLOUTS = "rollouts"
LEASES = "leases"
BUDGETS = "budgets"
SPENDING = "spending"
QUOTAS = "quotas"
PRICES = "prices"
INVOICES = "invoices"

BODIES = "BODIES"
PARTS = "PARTS"

LEASE_MARKER_TTL_S = 30
"""How long the marker of an expired lease stays. Any value does: watches compare, kv_create takes over from
it."""

_MIB = 1024 * 1024
_SECOND = 1_000_000_000
_DAY = 86_400 * _SECOND

_DUPLICATES = 120 * _SECOND
"""Longer than any sender repeats (store: 5 s) plus an outage; costs some 100 bytes an id (a guess). Nothing
rests on it."""


def _stream(name: str, subjects: list[str], **settings: Any) -> dict[str, Any]:
    return {
        "name": name,
        "subjects": subjects,
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "allow_direct": True,
        "duplicate_window": _DUPLICATES,
        "max_age": 0,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_msgs_per_subject": -1,
        **settings,
    }


def _bucket(name: str, mib: int, **settings: Any) -> dict[str, Any]:
    return _stream(
        f"KV_{name}",
        [f"$KV.{name}.>"],
        max_msgs_per_subject=1,
        max_bytes=mib * _MIB,
        allow_rollup_hdrs=True,
        deny_delete=True,
        allow_msg_ttl=True,
        **settings,
    )


# The server sets max_bytes aside from its storage limit (three quarters of the free disk by default), so the
# sum of about 4 GiB is kept moderate; a stream without max_bytes is bounded otherwise.
STREAMS: list[dict[str, Any]] = [
    # Bodies over 64 KB travel by reference: 512 MiB hold 8,000 of the largest messages, four full pools of
    # 2,000.
    _stream(REQUESTS, ["req.v1.>"], retention="workqueue", max_bytes=512 * _MIB),
    # What is dispatched and has not ended: bounded by the workers' slots, 8,000 of the largest.
    _stream(WORK, ["work.v1.>"], retention="workqueue", max_bytes=512 * _MIB),
    # 0.25 KB of the server's memory each: 1 GB in all, and some 3 GB of disk (0.7 KB
    # each, a guess). That is 11 h of a ledger that is down at 100 requests/s. An attempt must be able to end
    # at any time, hence discard old; the one event per subject is kept by Nats-Expected-Last-Subject-Sequence
    # (a limit per subject would need discard new).
    _stream(ATTEMPTS, ["attempt.v1.>"], discard="old", max_age=7 * _DAY, max_msgs=4_000_000),
    # Malformed events, some KB each, for a person to look at within a month.
    _stream(DEAD_LETTERS, ["dead.v1.>"], discard="old", max_age=30 * _DAY, max_bytes=128 * _MIB),
    # Requests that ended engines: for a person to look at within a week. Without bodies, or with sealed ones.
    _stream(QUARANTINE, ["quarantine.v1.>"], discard="old", max_age=7 * _DAY, max_bytes=128 * _MIB),
    # What operators did, and failed logins: appended and never taken away, by nobody. Entries of some 600 bytes;
    # 50,000 of each area, so that a flood of failed logins pushes out no action. The server ends them at last by
    # age or size.
    _stream(
        AUDIT,
        ["audit.v1.>"],
        discard="old",
        max_age=400 * _DAY,
        max_bytes=256 * _MIB,
        max_msgs_per_subject=50_000,
        deny_delete=True,
        deny_purge=True,
    ),
    # What became of roll-outs, some KB each: ten steps of a roll-out a day for years.
    _stream(ROLLOUT_EVENTS, ["rollout.v1.>"], discard="old", max_age=400 * _DAY, max_bytes=64 * _MIB),
    # Records of some 300 bytes: 64 MiB hold 200,000 keys, tenants or budgets.
    _bucket(KEYS, 64),
    # When each key was last used, some 150 bytes.
    _bucket(USES, 32),
    _bucket(TENANTS, 64),
    _bucket(MODELS, 64),
    # Manifests of some 10 KB, 600 KB for the largest models: hundreds of those.
    _bucket(VERSIONS, 256),
    _bucket(ALIASES, 16),
    # A plan and a progress of some 30 KB for each model.
    _bucket(ROLLOUTS, 64),
    _bucket(LEASES, 16, subject_delete_marker_ttl=LEASE_MARKER_TTL_S * _SECOND),
    _bucket(BUDGETS, 64),
    # Some 500 bytes for a model and a tenant with a budget.
    _bucket(SPENDING, 64),
    # Some 500 bytes for a tenant with limits and a model with shards.
    _bucket(QUOTAS, 64),
    _bucket(PRICES, 16),
    # Some 2 KB for a tenant and month: 1,000 tenants for ten years. Never overwritten.
    _bucket(INVOICES, 256),
    # Bodies of open requests; each goes with its request. Four models may use all that PoolLimits.body_bytes allows.
    # What an owner could not delete, of a model that has none any more say, goes after the longest request.
    _stream(BODIES, ["body.v1.>"], max_age=2 * 3600 * _SECOND, max_bytes=2048 * _MIB),
    # Parts of published files. As large as what is published: room for more is reserved before it is sent
    # (contracts.artifacts.stores), so that weights take none from requests.
    _stream(PARTS, ["part.v1.>"], max_bytes=16 * _MIB),
]


async def ensure(bus: Bus) -> list[str]:
    """Create what is missing; what is there and differs is left alone and returned, one line per setting.

    Any number of processes may do this at once: the server gives one of them the creation, and the same
    answer to the others. On a server with permissions only the operator may create: the services look, and raise
    BusError when something is missing.
    """
    drift: list[str] = []
    for wanted in STREAMS:
        drift += _differences(wanted, await _existing(bus, wanted))
    return drift


async def _existing(bus: Bus, wanted: dict[str, Any]) -> dict[str, Any]:
    name = wanted["name"]
    try:
        return await _config(bus, name)
    except NotFound:
        pass
    try:
        answer = await bus.jetstream.api(f"STREAM.CREATE.{name}", {**wanted, "num_replicas": 1})
        return dict(answer["config"])
    except BusError as error:
        # Somebody with other settings may have been first.
        try:
            return await _config(bus, name)
        except NotFound:
            if isinstance(error, Unavailable):
                raise BusError(f"{name} is not there, and only an operator may make it (headrace model add)") from error
            raise error from None


async def _config(bus: Bus, name: str) -> dict[str, Any]:
    return dict((await bus.jetstream.api(f"STREAM.INFO.{name}"))["config"])


_GROWING = {(PARTS, "max_bytes")}


def _differences(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The server leaves out settings that are zero or false."""
    return [
        f"{wanted['name']}: {setting} is {found.get(setting)!r}, should be {value!r}"
        for setting, value in wanted.items()
        if (found.get(setting) or 0) != (value or 0) and (wanted["name"], setting) not in _GROWING
    ]
