"""Users and permissions as `headrace nats-config` writes them, on a real server: what each may do, and nothing else."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from compose.stack import nats_config
from contracts import permissions, subjects, topology
from contracts.bus import Bus, BusError, Incoming
from contracts.permissions import ROLES
from tests.support.nats_server import NatsServer

PASSWORD = "secret"
TENANTS = ("T1", "T2", "Café 1")
ADMINISTERED = (topology.KEYS, topology.USES, topology.TENANTS, topology.MODELS)
SUBJECTS = {
    "admit": subjects.admit("m"),
    "request": subjects.request("m", "T1"),
    "work": subjects.work("m", "1", "w-1"),
    "attempt": subjects.attempt("m", "r-1", 1),
    "quarantine": subjects.quarantine("m", "r-1"),
    "dead": subjects.DEAD_ATTEMPTS,
    "cancel T1": subjects.cancel("m", "T1"),
    "cancel T2": subjects.cancel("m", "T2"),
    "a gateway's cancel": subjects.gateway_cancel("m", "T1"),
    "status T1": subjects.status("m", "T1"),
    "status T2": subjects.status("m", "T2"),
    "frames T1": subjects.frames("w-1", "T1"),
    "frames T2": subjects.frames("w-1", "T2"),
    "submit T1": subjects.submit("T1", "m"),
    "submit T2": subjects.submit("T2", "m"),
    "control": subjects.control("w-1"),
    "queues": subjects.queues("m"),
    "usage": subjects.usage_all("usage"),
    "usage all": subjects.usage_all("usage"),
    "usage T1": subjects.usage_of("T1", "usage"),
    "usage T2": subjects.usage_of("T2", "usage"),
    "beat of a worker": subjects.worker_heartbeat("m", "w-1"),
    "beat of a gateway": subjects.stream_owner_heartbeat(subjects.gateway_stream_owner("gw-1")),
    "beat of T1": subjects.stream_owner_heartbeat(subjects.tenant_stream_owner("T1", "c-1")),
    "beat of T2": subjects.stream_owner_heartbeat(subjects.tenant_stream_owner("T2", "c-1")),
    "loopback": subjects.loopback_heartbeat("s-1"),
    "reply to a gateway": subjects.gateway_reply_inbox("gw-1"),
    "reply to T1": subjects.tenant_reply_prefix("T1") + "c-1",
    "reply to T2": subjects.tenant_reply_prefix("T2") + "c-1",
    **{f"inbox of {user}": f"_INBOX.{user}.x" for user in (*ROLES, "t.T1", "t.T2")},
    **{f"key of {bucket}": f"$KV.{bucket}.k" for bucket in (*ADMINISTERED, topology.LEASES, topology.BUDGETS)},
    "body": subjects.body("m", "T1", "r"),
    "stream made": "$JS.API.STREAM.CREATE.X",
    "stream deleted": "$JS.API.STREAM.DELETE.REQUESTS",
    "stream changed": "$JS.API.STREAM.UPDATE.REQUESTS",
    "stream purged": "$JS.API.STREAM.PURGE.ATTEMPTS",
    "work deleted": "$JS.API.STREAM.MSG.DELETE.WORK",
    "request deleted": "$JS.API.STREAM.MSG.DELETE.REQUESTS",
    "work acknowledged": "$JS.ACK.WORK.w-1.1.1.1.1.0",
    "request acknowledged": "$JS.ACK.REQUESTS.sched-m.1.1.1.1.0",
    "event acknowledged": "$JS.ACK.ATTEMPTS.ledger.1.1.1.1.0",
    "key hashes read": "$JS.API.DIRECT.GET.KV_keys",
    "admin call": subjects.admin_call("keys.create"),
    "activity of keys": subjects.ADMIN_ACTIVITY,
    "audit": subjects.audit("keys"),
    "audit purged": f"$JS.API.STREAM.PURGE.{topology.AUDIT}",
    "audit deleted": f"$JS.API.STREAM.DELETE.{topology.AUDIT}",
    "audit changed": f"$JS.API.STREAM.UPDATE.{topology.AUDIT}",
    "nonsense": "something.else",
}
"""One subject of each kind, by what a message there would mean."""

REPLIES = {"reply to a gateway", "reply to T1", "reply to T2"}
MAY_PUBLISH: dict[str, set[str]] = {
    "operator": set(SUBJECTS),
    "gateway": {"admit", "request", "queues", "usage", "usage all", "beat of a gateway", "body", "key hashes read"}
    | {f"{kind} {tenant}" for kind in ("status", "frames", "usage") for tenant in ("T1", "T2")}
    | {"a gateway's cancel"}
    | {"admin call", "activity of keys"},
    "scheduler": {
        "work",
        "attempt",
        "quarantine",
        "control",
        "loopback",
        "key of leases",
        "work deleted",
        "request deleted",
    }
    | {"request acknowledged", "audit", "key hashes read"}
    | {f"key of {bucket}" for bucket in ADMINISTERED}
    | REPLIES,
    "worker": {"attempt", "beat of a worker", "work acknowledged"} | REPLIES,
    "ledger": {"dead", "key of budgets", "event acknowledged", "stream purged"},
    "t.T1": {"submit T1", "cancel T1", "status T1", "frames T1", "usage T1", "beat of T1"},
}
READABLE: dict[str, set[str]] = {
    "operator": set(SUBJECTS),
    "gateway": {"submit T1", "submit T2", "reply to a gateway"},
    "scheduler": {"admit", "cancel T1", "cancel T2", "status T1", "status T2", "queues", "loopback"}
    | {"admin call", "activity of keys"}
    | {"a gateway's cancel"}
    | {"beat of a worker", "beat of a gateway", "beat of T1", "beat of T2"},
    "worker": {"control", "frames T1", "frames T2"},
    "ledger": {"usage", "usage all", "usage T1", "usage T2"},
    "t.T1": {"reply to T1"},
}
USERS = [user for user in MAY_PUBLISH if user != "operator"]


@pytest.fixture
def nats(nats_binary: str, tmp_path: Path) -> Iterator[NatsServer]:
    """A server with the users of a stack and of three tenants."""
    configuration = tmp_path / "nats.conf"
    configuration.write_text(f'authorization {{ include "{nats_config.FILE}" }}\n')
    nats_config.write(tmp_path, dict.fromkeys(ROLES, PASSWORD), dict.fromkeys(TENANTS, PASSWORD))
    server = NatsServer(nats_binary, tmp_path, "-c", str(configuration))
    server.start()
    yield server
    server.stop()


As = Callable[[str], Awaitable[Bus]]


@pytest.fixture
async def connect_as(nats: NatsServer) -> AsyncIterator[As]:
    """Connections by user, as the services and the client make them."""
    made: list[Bus] = []

    async def make(user: str) -> Bus:
        url = f"nats://{quote(user)}:{PASSWORD}@127.0.0.1:{nats.port}"
        bus = await Bus.connect(url, name="test", inbox=user)
        made.append(bus)
        return bus

    yield make
    await asyncio.gather(*(bus.close() for bus in made))


@pytest.fixture
async def operator(connect_as: As) -> Bus:
    bus = await connect_as("operator")
    assert await topology.ensure(bus) == []
    return bus


@pytest.mark.parametrize("user", USERS)
async def test_a_user_publishes_what_is_its_own_and_nothing_else(operator: Bus, connect_as: As, user: str) -> None:
    bus = await connect_as(user)
    arrived: set[str] = set()

    def note(message: Incoming) -> None:
        if message.data == b"probe":
            arrived.add(message.subject)

    await operator.subscribe(">", note)
    for subject in SUBJECTS.values():
        await bus.publish(subject, b"probe")
    await bus.session.barrier()
    await operator.session.barrier()
    got = {name for name, subject in SUBJECTS.items() if subject in arrived}
    assert got == MAY_PUBLISH[user] | {f"inbox of {user}"}


@pytest.mark.parametrize("user", USERS)
async def test_a_user_reads_what_is_its_own_and_nothing_else(operator: Bus, connect_as: As, user: str) -> None:
    bus = await connect_as(user)

    async def may_read(subject: str) -> bool:
        try:
            subscription = await bus.subscribe(subject, lambda message: None)
        except BusError:
            return False
        await subscription.close()
        return True

    readable = {name for name, subject in SUBJECTS.items() if await may_read(subject)}
    assert readable == READABLE[user] | {f"inbox of {user}"}
    for wide in (">", "_INBOX.>", "reply.v1.>", "reply.v1.*.*", "$JS.ACK.>", "req.v1.>", "$KV.>", "$SYS.>"):
        assert not await may_read(wide), wide


async def test_a_service_answers_whoever_asked_it_and_once(operator: Bus, connect_as: As) -> None:
    """Without a permission on anybody's inbox."""
    worker, gateway = await connect_as("worker"), await connect_as("gateway")
    stolen: list[bytes] = []
    await operator.subscribe("_INBOX.t.T2.x", lambda message: stolen.append(message.data))

    async def answer(message: Incoming) -> None:
        await message.respond(b"one")
        await message.respond(b"two")
        await worker.publish("_INBOX.t.T2.x", b"unasked")

    await worker.subscribe(subjects.frames_of("w-1"), answer)
    tenant = await connect_as("t.T1")
    for asker in (gateway, tenant):
        assert await asker.request(subjects.frames("w-1", "T1"), b"") == b"one"
    await worker.session.barrier()
    assert stolen == []


async def test_a_tenants_name_is_no_pattern(operator: Bus, connect_as: As) -> None:
    bus = await connect_as(permissions.user_of_tenant("Café 1"))
    got = asyncio.Event()
    await operator.subscribe(subjects.submit("Café 1", "m"), lambda message: got.set())
    await bus.publish(subjects.submit("Café 1", "m"), b"")
    await asyncio.wait_for(got.wait(), 5)
    for name in ("*", ">", "a.b"):
        assert not {"*", ">"} & set(subjects.form(subjects.request, model="m", tenant=name).split("."))


async def test_nothing_of_jetstream_is_a_tenants(operator: Bus, connect_as: As) -> None:
    bus = await connect_as("t.T1")
    await operator.kv.put(topology.KEYS, "k", b"v")
    for call in (
        bus.jetstream.api("STREAM.INFO.REQUESTS", timeout_s=0.3),
        bus.jetstream.api("STREAM.NAMES", timeout_s=0.3),
        bus.jetstream.api(
            "CONSUMER.CREATE.KV_keys.x", {"stream_name": "KV_keys", "config": {"name": "x"}}, timeout_s=0.3
        ),
    ):
        with pytest.raises(BusError):
            await call


async def test_services_that_find_no_stream_say_who_makes_it(connect_as: As) -> None:
    with pytest.raises(BusError, match="operator"):
        await topology.ensure(await connect_as("worker"))


async def test_a_new_tenants_user_comes_without_a_restart(
    nats: NatsServer, operator: Bus, connect_as: As, tmp_path: Path
) -> None:
    """The server reads its configuration again; nobody who is connected notices."""
    gateway = await connect_as("gateway")
    everybody = dict.fromkeys((*TENANTS, "T3"), PASSWORD)
    nats_config.write(tmp_path, dict.fromkeys(ROLES, PASSWORD), everybody)
    os.kill(nats.pid, signal.SIGHUP)
    async with asyncio.timeout(10):
        while True:
            try:
                newcomer = await Bus.connect(
                    f"nats://t.T3:{PASSWORD}@127.0.0.1:{nats.port}", name="t", inbox="t.T3", timeout_s=0.5
                )
                break
            except BusError:
                await asyncio.sleep(0.05)
    await newcomer.close()
    await gateway.session.barrier()
    assert gateway.session.reconnects == operator.session.reconnects == 0
