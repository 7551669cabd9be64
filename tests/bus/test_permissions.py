"""Users and permissions as `headrace nats-config` writes them, on a real server: what each may do, and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from compose.stack import nats_config, tenant_users
from compose.stack.nats_system import Servers
from compose.stack.seeds import SYSTEM, Seeds
from contracts import audit, permissions, subjects, topology
from contracts.bus import ANONYMOUS, Bus, BusError, Credentials, Incoming
from contracts.messages.administration import AuditEntry
from contracts.messages.records import TenantRecord
from contracts.messages.rollouts import SHADOW_TENANT
from tests.support.cluster import OurNats
from tests.support.polling import until

ADMINISTERED = (
    topology.KEYS,
    topology.USES,
    topology.TENANTS,
    topology.MODELS,
    topology.VERSIONS,
    topology.ALIASES,
    topology.ROLLOUTS,
)
TENANTS = ("T1", "T2", "Café 1")
SERVICES = ("gateway-0", "gateway-1", "scheduler-0", "worker-0", "worker-1", "ledger-0")
STREAMS = tuple(stream["name"] for stream in topology.STREAMS)
SUBJECTS = {
    "admit": subjects.admit("m"),
    "request": subjects.request("m", "T1"),
    "work": subjects.work("m", "1", "worker-0-a"),
    "attempt": subjects.attempt("m", "r-1", 1),
    "quarantine": subjects.quarantine("m", "r-1"),
    "dead": subjects.DEAD_ATTEMPTS,
    "cancel T1": subjects.cancel("m", "T1"),
    "cancel T2": subjects.cancel("m", "T2"),
    "cancel T1 as a gateway": subjects.gateway_cancel("m", "T1"),
    "status T1": subjects.status("m", "T1"),
    "status T2": subjects.status("m", "T2"),
    "frames T1": subjects.frames("worker-0-a", "T1"),
    "frames T1 of another": subjects.frames("worker-1-b", "T1"),
    "frames T2": subjects.frames("worker-0-a", "T2"),
    "submit T1": subjects.submit("T1", "m"),
    "submit T2": subjects.submit("T2", "m"),
    "control": subjects.control("worker-0-a"),
    "control of another": subjects.control("worker-1-b"),
    "queues": subjects.queues("m"),
    "usage all": subjects.usage_all("usage"),
    "usage T1": subjects.usage_of("T1", "usage"),
    "usage T2": subjects.usage_of("T2", "usage"),
    "beat of worker-0": subjects.worker_heartbeat("m", "worker-0-a"),
    "beat of worker-1": subjects.worker_heartbeat("m", "worker-1-b"),
    "beat of gateway-0": subjects.stream_owner_heartbeat(subjects.gateway_stream_owner("gateway-0-a")),
    "beat of gateway-1": subjects.stream_owner_heartbeat(subjects.gateway_stream_owner("gateway-1-b")),
    "beat of T1": subjects.stream_owner_heartbeat(subjects.tenant_stream_owner("T1", "c-1")),
    "beat of T2": subjects.stream_owner_heartbeat(subjects.tenant_stream_owner("T2", "c-1")),
    "loopback of scheduler-0": subjects.loopback_heartbeat("scheduler-0-a"),
    "loopback of scheduler-1": subjects.loopback_heartbeat("scheduler-1-b"),
    "reply to gateway-0": subjects.gateway_reply_inbox("gateway-0-a"),
    "reply to gateway-1": subjects.gateway_reply_inbox("gateway-1-b"),
    "reply to T1": subjects.tenant_reply_prefix("T1") + "c-1",
    "reply to T2": subjects.tenant_reply_prefix("T2") + "c-1",
    **{f"inbox of {user}": f"_INBOX.{user}.x" for user in (*SERVICES, "operator", SYSTEM, "t.T1", "t.T2")},
    **{f"key of {name[3:]}": f"$KV.{name[3:]}.k" for name in STREAMS if name.startswith("KV_")},
    "body": subjects.body("m", "T1", "r"),
    "part": subjects.part("0" * 64),
    "account": "$JS.API.INFO",
    "streams": "$JS.API.STREAM.NAMES",
    "streams' settings": "$JS.API.STREAM.LIST",
    "stream made": "$JS.API.STREAM.CREATE.X",
    "admin call": subjects.admin_call("keys.create"),
    "activity of keys": subjects.ADMIN_ACTIVITY,
    "audit": subjects.audit("keys"),
    "rollout": subjects.rollout("m"),
    "copy of a request": subjects.request("m", SHADOW_TENANT),
    "system": "$SYS.REQ.SERVER.PING",
    "system of the account": "$SYS.REQ.ACCOUNT.HEADRACE.CONNZ",
    "nonsense": "something.else",
    **{
        f"{stream} {what}": subject.format(stream)
        for stream in STREAMS
        for what, subject in {
            "deleted": "$JS.API.STREAM.DELETE.{}",
            "changed": "$JS.API.STREAM.UPDATE.{}",
            "purged": "$JS.API.STREAM.PURGE.{}",
            "saved": "$JS.API.STREAM.SNAPSHOT.{}",
            "restored": "$JS.API.STREAM.RESTORE.{}",
            "stepped down": "$JS.API.STREAM.LEADER.STEPDOWN.{}",
            "seen": "$JS.API.STREAM.INFO.{}",
            "read": "$JS.API.STREAM.MSG.GET.{}",
            "read directly": "$JS.API.DIRECT.GET.{}",
            "thinned": "$JS.API.STREAM.MSG.DELETE.{}",
            "consumers": "$JS.API.CONSUMER.NAMES.{}",
            "followed": "$JS.API.CONSUMER.CREATE.{}.x",
            "followed for good": "$JS.API.CONSUMER.DURABLE.CREATE.{}.x",
            "followed on all": "$JS.API.CONSUMER.CREATE.{}.x.>",
            "unfollowed": "$JS.API.CONSUMER.DELETE.{}.x",
            "looked up": "$JS.API.CONSUMER.INFO.{}.x",
            "pulled": "$JS.API.CONSUMER.MSG.NEXT.{}.x",
            "acknowledged": "$JS.ACK.{}.x.1.1.1.1.0",
        }.items()
    },
    "work of worker-0 pulled": f"$JS.API.CONSUMER.CREATE.WORK.x.{subjects.work('m', '1', 'worker-0-a')}",
    "work of worker-1 pulled": f"$JS.API.CONSUMER.CREATE.WORK.x.{subjects.work('m', '1', 'worker-1-b')}",
}
"""One subject of each kind, by what a message there would mean."""

SEEN = {f"{stream} seen" for stream in STREAMS}
REPLIES = {f"reply to {owner}" for owner in ("gateway-0", "gateway-1", "T1", "T2")}


def kept(*buckets: str) -> set[str]:
    return {f"key of {each}" for each in buckets} | read(*(f"KV_{each}" for each in buckets))


def read(*streams: str) -> set[str]:
    return {f"{each} {how}" for each in streams for how in ("read", "read directly")}


def watched(*buckets: str) -> set[str]:
    return {f"KV_{each} unfollowed" for each in buckets}


def taken(*streams: str) -> set[str]:
    return {f"{each} {how}" for each in streams for how in ("unfollowed", "pulled", "acknowledged")}


MAY_PUBLISH: dict[str, set[str]] = {
    "gateway-0": {"admit", "request", "copy of a request", "queues", "usage all", "beat of gateway-0", "body"}
    | {f"{kind} {tenant}" for kind in ("status", "frames", "usage") for tenant in ("T1", "T2")}
    | {"frames T1 of another", "cancel T1 as a gateway", "BODIES purged"}
    | {"admin call", "activity of keys"}
    | read("PARTS", *(f"KV_{bucket}" for bucket in ADMINISTERED))
    | watched("keys", "tenants", "models", "versions", "aliases")
    | SEEN,
    "scheduler-0": {"work", "attempt", "quarantine", "control", "control of another", "loopback of scheduler-0"}
    | {"WORK thinned", "REQUESTS thinned", "WORK looked up", "ATTEMPTS unfollowed", "BODIES purged"}
    | read("REQUESTS", "WORK", "ATTEMPTS", "BODIES")
    | taken("REQUESTS")
    | {"audit", "rollout", "copy of a request"}
    | {"queues", "cancel T1 as a gateway", "QUARANTINE purged"}
    | read("AUDIT", "QUARANTINE")
    | kept("leases", "spending", "quotas", "prices", *ADMINISTERED)
    | watched("tenants", "budgets", "spending", "models", "versions", "rollouts")
    | REPLIES
    | SEEN,
    "worker-0": {"attempt", "beat of worker-0", "work of worker-0 pulled"}
    | taken("WORK")
    | read("ATTEMPTS", "KV_models", "KV_versions", "BODIES", "PARTS")
    | watched("models", "versions", "rollouts")
    | REPLIES
    | SEEN,
    "ledger-0": {"dead", "ATTEMPTS purged", "ATTEMPTS read"}
    | kept("budgets", "invoices")
    | watched("prices", "invoices")
    | read("ROLLOUT_EVENTS")
    | SEEN,
    "t.T1": {"submit T1", "cancel T1", "status T1", "frames T1", "frames T1 of another", "usage T1", "beat of T1"},
}
READABLE: dict[str, set[str]] = {
    "gateway-0": {"submit T1", "submit T2", "reply to gateway-0"},
    "scheduler-0": {"admit", "cancel T1", "cancel T2", "cancel T1 as a gateway", "status T1", "status T2", "queues"}
    | {"admin call", "activity of keys"}
    | {name for name in SUBJECTS if name.startswith(("beat of", "loopback of"))},
    "worker-0": {"control", "frames T1", "frames T2"},
    "ledger-0": {"usage all", "usage T1", "usage T2"},
    "t.T1": {"reply to T1"},
}
USERS = list(MAY_PUBLISH)
WIDE = (">", "_INBOX.>", "reply.v1.>", "reply.v1.*.*", "$JS.ACK.>", "req.v1.>", "$KV.>", "$SYS.>", "_R_.>")


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    made = Seeds(tmp_path_factory.mktemp("seeds"))
    made.ensure([*SERVICES, "operator", SYSTEM, *map(permissions.user_of_tenant, TENANTS)])
    return made


@pytest.fixture
def nats(nats_binary: str, tmp_path: Path, seeds: Seeds) -> Iterator[OurNats]:
    """A server with the users of a stack and of three tenants."""
    server = OurNats(nats_binary, tmp_path, seeds)
    server.start()
    yield server
    server.stop()


As = Callable[[str], Awaitable[Bus]]


@pytest.fixture
async def connect_as(nats: OurNats, seeds: Seeds) -> AsyncIterator[As]:
    """Connections by user, as the services and the client make them."""
    made: list[Bus] = []

    async def make(user: str) -> Bus:
        bus = await Bus.connect(nats.url, name="test", credentials=Credentials(seed_file=str(seeds.path(user))))
        made.append(bus)
        return bus

    yield make
    await asyncio.gather(*(bus.close() for bus in made))


@pytest.fixture
async def operator(connect_as: As) -> Bus:
    bus = await connect_as("operator")
    assert await topology.ensure(bus) == []
    return bus


def unheard(message: Incoming) -> None:
    """Takes a message that must not come, or does not matter."""


async def refused(bus: Bus, kind: str, tries: Callable[[str], Awaitable[object]]) -> set[str]:
    """Of SUBJECTS those for which the server answers a try with a permission violation."""
    with capture_logs() as logs:
        for subject in SUBJECTS.values():
            await tries(subject)
        await bus.session.barrier()
    said = {str(line.get("error", "")) for line in logs}
    return {name for name, subject in SUBJECTS.items() if any(violated(text, kind, subject) for text in said)}


def violated(text: str, kind: str, subject: str) -> bool:
    return f'permissions violation for {kind} to "{subject.lower()}"' in text


@pytest.mark.parametrize("user", USERS)
async def test_whatever_is_foreign_is_a_permission_violation_to_publish(
    operator: Bus, connect_as: As, user: str
) -> None:
    bus = await connect_as(user)
    own = MAY_PUBLISH[user] | {f"inbox of {user}"}
    assert await refused(bus, "publish", lambda subject: bus.publish(subject, b"probe")) == set(SUBJECTS) - own
    assert bus.session.reconnects == 0


@pytest.mark.parametrize("user", USERS)
async def test_whatever_is_foreign_is_a_permission_violation_to_read(operator: Bus, connect_as: As, user: str) -> None:
    bus = await connect_as(user)

    async def listen(subject: str) -> None:
        await bus.session.listen(subject, unheard)

    own = READABLE[user] | {f"inbox of {user}"}
    assert await refused(bus, "subscription", listen) == set(SUBJECTS) - own
    for wide in WIDE:
        with pytest.raises(BusError, match="may not subscribe"):
            await bus.subscribe(wide, lambda message: None)


async def test_what_a_user_may_publish_arrives(operator: Bus, connect_as: As) -> None:
    """With the services, over the border of a tenant's account, too."""
    arrived: set[str] = set()

    def note(message: Incoming) -> None:
        if message.data == b"probe":
            arrived.add(message.subject)

    await operator.subscribe(">", note)
    for user in USERS:
        bus = await connect_as(user)
        arrived.clear()
        for subject in SUBJECTS.values():
            await bus.publish(subject, b"probe")
        await bus.session.barrier()
        await operator.session.barrier()
        inbox = set() if user == "t.T1" else {f"inbox of {user}"}
        got = {name for name, subject in SUBJECTS.items() if subject in arrived}
        assert got == MAY_PUBLISH[user] | inbox, user


async def test_a_tenant_hears_what_is_sent_to_it_and_not_what_others_hear(operator: Bus, connect_as: As) -> None:
    first, second = await connect_as("t.T1"), await connect_as("t.T2")
    heard: list[str] = []
    await first.subscribe(SUBJECTS["reply to T1"], lambda message: heard.append(message.subject))
    await second.subscribe(SUBJECTS["reply to T2"], lambda message: heard.append(message.subject))
    worker = await connect_as("worker-0")
    await worker.publish(SUBJECTS["reply to T1"], b"frame")
    await worker.session.barrier()
    await asyncio.gather(first.session.barrier(), second.session.barrier())
    assert heard == [SUBJECTS["reply to T1"]]


async def test_a_service_answers_whoever_asked_it_and_once(operator: Bus, connect_as: As) -> None:
    """Without a permission on anybody's inbox."""
    worker, gateway = await connect_as("worker-0"), await connect_as("gateway-0")
    stolen: list[bytes] = []
    await operator.subscribe("_INBOX.gateway-1.x", lambda message: stolen.append(message.data))

    async def answer(message: Incoming) -> None:
        message.respond(b"one")
        message.respond(b"two")
        await worker.publish("_INBOX.gateway-1.x", b"unasked")

    await worker.subscribe(subjects.frames_of("worker-0-a"), answer)
    tenant = await connect_as("t.T1")
    for asker in (gateway, tenant):
        assert await asker.request(subjects.frames("worker-0-a", "T1"), b"") == b"one"
    await worker.session.barrier()
    assert stolen == []


async def test_an_answer_to_a_tenant_goes_to_its_own_account_whatever_it_names(operator: Bus, connect_as: As) -> None:
    """A reply subject of its choice is none of the services' subjects."""
    gateway, tenant = await connect_as("gateway-0"), await connect_as("t.T1")
    stolen: list[bytes] = []
    await operator.subscribe("_INBOX.operator.x", lambda message: stolen.append(message.data))
    answered = asyncio.Event()

    async def answer(message: Incoming) -> None:
        message.respond(b"one")
        answered.set()

    await gateway.subscribe(subjects.SUBMITS, answer)
    await tenant.publish(subjects.submit("T1", "m"), b"", reply="_INBOX.operator.x")
    await asyncio.wait_for(answered.wait(), 5)
    await gateway.session.barrier()
    await operator.session.barrier()
    assert stolen == []


async def test_a_tenants_name_is_no_pattern(operator: Bus, connect_as: As) -> None:
    bus = await connect_as(permissions.user_of_tenant("Café 1"))
    got = asyncio.Event()
    await operator.subscribe(subjects.submit("Café 1", "m"), lambda message: got.set())
    await bus.publish(subjects.submit("Café 1", "m"), b"")
    await asyncio.wait_for(got.wait(), 5)
    for name in ("*", ">", "a.b"):
        assert not {"*", ">"} & set(subjects.form(subjects.request, model="m", tenant=name).split("."))


async def test_services_that_find_no_stream_say_who_makes_it(connect_as: As) -> None:
    with pytest.raises(BusError, match="operator"):
        await topology.ensure(await connect_as("worker-0"))


# Changes while the server runs ------------------------------------------------------------------------------


@pytest.fixture
def servers(nats: OurNats, seeds: Seeds) -> Servers:
    return Servers(nats.url, Credentials(seed_file=str(seeds.path(SYSTEM))))


async def test_a_new_tenants_user_comes_and_goes_without_a_restart(
    nats: OurNats, operator: Bus, connect_as: As, seeds: Seeds, servers: Servers, tmp_path: Path
) -> None:
    """Nobody else who is connected notices; what the newcomer asks and hears crosses its account's border."""
    gateway, worker = await connect_as("gateway-0"), await connect_as("worker-0")
    await gateway.subscribe(subjects.SUBMITS, lambda message: message.respond(b"yes"))
    user = permissions.user_of_tenant("T3")
    seeds.ensure([user])
    nats_config.write(tmp_path, seeds)
    await servers.reload()
    newcomer = await connect_as(user)
    assert await newcomer.request(subjects.submit("T3", "m"), b"") == b"yes"
    frames: list[bytes] = []
    await newcomer.subscribe(subjects.tenant_reply_prefix("T3") + "c", lambda message: frames.append(message.data))
    await worker.publish(subjects.tenant_reply_prefix("T3") + "c", b"frame")
    await until(lambda: frames, "the frame has crossed")

    assert seeds.shut(user, shut=True)
    nats_config.write(tmp_path, seeds)
    await servers.reload()
    await until(lambda: not newcomer.connected, "the user is cut off")
    for bus in (gateway, worker, operator):
        await bus.session.barrier()
        assert bus.session.reconnects == 0
    seeds.path(user).unlink()


async def test_whoever_follows_the_tenants_cuts_off_those_that_are_disabled(
    nats: OurNats, operator: Bus, connect_as: As, seeds: Seeds, tmp_path: Path
) -> None:
    """Those that are disabled already, those that become so, and those whose record nobody can read."""
    key = subjects.encode("T2")

    async def record(disabled: bool) -> None:
        await operator.kv.put(topology.TENANTS, key, msgspec.json.encode(TenantRecord(name="T2", disabled=disabled)))

    await record(True)
    first, second = await connect_as("t.T1"), await connect_as("t.T2")
    said: list[str] = []
    keeping = tenant_users.keep_following(nats.url, ANONYMOUS, seeds, tmp_path, said.append)
    following = asyncio.create_task(keeping)
    try:
        await until(lambda: not second.connected, "who is disabled already is cut off")
        await record(False)
        await until(lambda: second.connected, "the tenant is back")
        await operator.kv.put(topology.TENANTS, key, b"?")
        await until(lambda: not second.connected, "nobody knows whether it is enabled")
        await record(False)
        await until(lambda: second.connected, "the tenant is back")
        await operator.kv.delete(topology.TENANTS, key)
        await until(lambda: not second.connected, "it is no tenant any more")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        seeds.shut("t.T2", shut=False)
    await first.session.barrier()
    assert (first.session.reconnects, said) == (0, [])


async def test_a_configuration_that_the_server_cannot_read_is_told(
    nats: OurNats, servers: Servers, tmp_path: Path
) -> None:
    (tmp_path / nats_config.FILE).write_text("accounts {")
    with pytest.raises(Exception, match="does not take its new configuration"):
        await servers.reload()


async def test_a_seed_is_replaced_and_nobody_notices(
    operator: Bus, connect_as: As, nats: OurNats, seeds: Seeds, servers: Servers, tmp_path: Path
) -> None:
    """The connection is made again with the new one, and then the former one is worth nothing."""
    former: dict[str, Any] = {"seed": seeds.path("worker-0").read_bytes(), "keys": set(seeds.public_keys("worker-0"))}
    worker, gateway = await connect_as("worker-0"), await connect_as("gateway-0")
    heard: list[bytes] = []
    await worker.subscribe(subjects.control("worker-0-a"), lambda message: heard.append(message.data))
    assert former["keys"] <= await servers.connected_keys()

    seeds.prepare(["worker-0"])
    nats_config.write(tmp_path, seeds)
    await servers.reload()
    assert worker.session.reconnects == 0
    seeds.switch(["worker-0"])
    await until(lambda: worker.session.reconnects == 1 and worker.connected, "the worker is connected anew")
    assert not former["keys"] & await servers.connected_keys()
    nats_config.write(tmp_path, seeds)
    await servers.reload()

    await operator.publish(subjects.control("worker-0-a"), b"still there")
    await until(lambda: heard, "the subscription holds")
    assert (worker.session.reconnects, gateway.session.reconnects) == (1, 0)
    stolen = tmp_path / "worker-0.seed"
    stolen.write_bytes(former["seed"])
    with pytest.raises(BusError, match="Authorization"):
        await Bus.connect(nats.url, name="thief", credentials=Credentials(seed_file=str(stolen)), timeout_s=0.5)


async def test_who_is_cut_off_comes_back_once_its_seed_is_right(
    operator: Bus, connect_as: As, seeds: Seeds, servers: Servers, tmp_path: Path
) -> None:
    """The server was told first: the connection ends, and is made again as soon as the file is replaced."""
    gateway = await connect_as("gateway-1")
    seed = seeds.path("gateway-1")
    held = seed.read_bytes()
    seed.unlink()
    seeds.ensure(["gateway-1"])
    renewed = seed.read_bytes()
    nats_config.write(tmp_path, seeds)
    seed.write_bytes(held)
    await servers.reload()
    await until(lambda: not gateway.connected, "the gateway is cut off")
    assert not gateway.closed.is_set()
    seed.write_bytes(renewed)
    await until(lambda: gateway.connected, "the gateway is back")


# What a tenant's account may use up -------------------------------------------------------------------------


async def test_a_tenant_has_so_many_connections_and_others_have_theirs(
    operator: Bus,
    connect_as: As,
    nats: OurNats,
    seeds: Seeds,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    servers: Servers,
) -> None:
    monkeypatch.setitem(nats_config.TENANT_LIMITS, "max_connections", 3)
    nats_config.write(tmp_path, seeds)
    await servers.reload()
    for _ in range(3):
        await connect_as("t.T1")
    mine = Credentials(seed_file=str(seeds.path("t.T1")))
    with pytest.raises(BusError, match="maximum account"):
        await Bus.connect(nats.url, name="one too many", credentials=mine, timeout_s=0.5)
    await connect_as("t.T2")


async def test_a_tenants_subscriptions_are_bounded(operator: Bus, connect_as: As) -> None:
    """Who asks for more loses the connection, and those that are well behaved keep theirs."""
    greedy, other = await connect_as("t.T1"), await connect_as("t.T2")
    for number in range(int(nats_config.TENANT_LIMITS["max_subscriptions"]) + 10):
        try:
            await greedy.session.listen(f"reply.v1.T1.c{number}", unheard)
        except BusError:
            break
    await until(lambda: greedy.session.reconnects > 0 or not greedy.connected, "the greedy one is cut off")
    await other.session.barrier()
    assert other.session.reconnects == 0


async def test_not_even_the_operator_shortens_the_audit_trail(operator: Bus) -> None:
    """By deleting its stream, or by an update after which all entries have passed their age."""
    record = AuditEntry(
        id="1", at_ms=1, actor="operator", address="a", via="cli", action="keys.revoke", target="k", result="done"
    )
    await audit.append(operator, record)
    config = next(stream for stream in topology.STREAMS if stream["name"] == topology.AUDIT)
    for call, question in (
        ("DELETE", None),
        ("UPDATE", {**config, "max_age": 1_000_000_000}),
        ("PURGE", None),
        ("MSG.DELETE", {"seq": 1}),
    ):
        with pytest.raises(BusError):
            await operator.jetstream.api(f"STREAM.{call}.{topology.AUDIT}", question, timeout_s=0.3)
    assert await audit.entries(operator) == [record]
