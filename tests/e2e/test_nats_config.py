"""A tenant's own service on the bus of a whole stack: its user, what it gets, and what it cannot have."""

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from contracts import subjects
from contracts.bus import Bus, BusError, Credentials, Unavailable
from contracts.client import Client
from contracts.errors import HeadraceError
from tests.support.authority import Authority
from tests.support.polling import until
from tests.support.stack import Stack, StartStack, headrace

HELLO = [{"role": "user", "content": "one two three"}]


def admitted(stack: Stack, tenant: str) -> Credentials:
    """Those of the user of ``tenant``."""
    assert stack.cli("tenant", "create", tenant).returncode == 0
    done = stack.cli("nats-config", "--tenant", tenant)
    assert done.returncode == 0, done.stderr
    given = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert given["HEADRACE_NATS_URL"] == stack.run.nats_url
    return Credentials.from_environment(given)


async def test_a_tenants_service_is_admitted_to_a_running_bus(stack: Stack) -> None:
    nats = stack.run.pids["nats"]
    mine = admitted(stack, "Ser vice")
    assert mine.user == "t.Ser_20vice"
    seed = Path(mine.seed_file).read_bytes()
    assert admitted(stack, "Ser vice") == mine and Path(mine.seed_file).read_bytes() == seed
    async with Client(stack.run.nats_url, tenant="Ser vice", credentials=mine) as client:
        stream = client.chat(model=stack.model, messages=HELLO, max_tokens=4)
        assert "".join([chunk.text async for chunk in stream]) == "t0 t1 t2 t3"
        assert stream.usage is not None and stream.usage.outcome == "completed"
        left = client.chat(model=stack.model, messages=HELLO, max_tokens=2000)
        async for _ in left:
            break
        await left.cancel()
    assert stack.run.pids["nats"] == nats
    said = [(entry["action"], entry["target"], entry["result"]) for entry in stack.cli_json("audit")]
    assert ("users.make", "t.Ser_20vice", "done") in said


async def test_a_tenants_service_cannot_act_as_another(stack: Stack) -> None:
    url = stack.run.nats_url
    mine = admitted(stack, "mallory")
    bus = await Bus.connect(url, name="mallory", credentials=mine)
    async with Client(url, tenant="victim", credentials=admitted(stack, "victim")) as victim:
        stream = victim.chat(model=stack.model, messages=HELLO, max_tokens=200)
        chunks = aiter(stream)
        texts = [(await anext(chunks)).text]
        # Not even as the client library: it may not read the other's inbox.
        with pytest.raises((BusError, HeadraceError)):
            async with Client(url, tenant="victim", credentials=mine) as thief:
                await thief.chat_once(model=stack.model, messages=HELLO)
        with pytest.raises(BusError):
            await bus.subscribe(victim.reply_inbox, lambda message: None)
        for subject in (
            subjects.submit("victim", stack.model),
            subjects.cancel(stack.model, "victim"),
            subjects.status(stack.model, "victim"),
        ):
            with pytest.raises(Unavailable):
                await bus.request(subject, b"{}", timeout_s=0.3)
        # Its own cancel subject with the other's request: the scheduler binds both.
        await bus.request(
            subjects.cancel(stack.model, "mallory"), b'{"request_id":"%s"}' % stream.request_id.encode(), timeout_s=5
        )
        # A goodbye in the other's name.
        for owner in (victim.incarnation, subjects.tenant_stream_owner("victim", victim.incarnation)):
            await bus.publish(
                subjects.stream_owner_heartbeat(subjects.tenant_stream_owner("mallory", victim.incarnation)),
                b'{"stream_owner":"%s","leaving":true}' % owner.encode(),
            )
        texts += [chunk.text async for chunk in chunks]
        assert "".join(texts) == " ".join(f"t{number}" for number in range(200))
    await bus.close()


def test_users_can_be_made_for_a_server_of_ones_own(tmp_path: Path) -> None:
    done = headrace("nats-config", "--dir", str(tmp_path), "--user", "worker-7", "--tenant", "acme")
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "server" / "nats-users.conf").read_text()
    assert "# worker-7" in written and "# t.acme" in written and "submit.v1.acme.*" in written
    seeds = {path.name: path for path in (tmp_path / "seeds").glob("*/*")}
    assert set(seeds) == {"operator.seed", "system.seed", "worker-7.seed", "t.acme.seed"}
    assert {path.stat().st_mode & 0o777 for path in seeds.values()} == {0o600}
    for wrong in (("--tenant", ""), ("--user", "emperor"), ("--user", "worker-../x"), ("--rotate",)):
        assert headrace("nats-config", "--dir", str(tmp_path), *wrong).returncode == 1, wrong
    seeds["worker-7.seed"].write_text("")
    done = headrace("nats-config", "--dir", str(tmp_path))
    assert done.returncode == 1 and "the seed is empty" in done.stderr and "worker-7.seed" in done.stderr


async def test_a_disabled_tenants_service_is_cut_off_and_comes_back(stack: Stack) -> None:
    """Its connection ends, whoever disabled it; nobody else's does."""
    url, mine = stack.run.nats_url, admitted(stack, "naughty")
    other = await Bus.connect(url, name="other", credentials=admitted(stack, "good"))
    bus = await Bus.connect(url, name="naughty", credentials=mine)
    assert stack.cli("tenant", "set", "naughty", "--disable").returncode == 0
    await until(lambda: not bus.connected, "the service is cut off")
    with pytest.raises(BusError, match="Authorization"):
        await Bus.connect(url, name="again", credentials=mine, timeout_s=0.5)
    await other.session.barrier()
    assert other.session.reconnects == 0
    assert stack.cli("nats-config", "--tenant", "good").returncode == 0
    assert not bus.connected, "a change of others lets it in again"
    assert stack.cli("tenant", "set", "naughty", "--enable").returncode == 0
    await until(lambda: bus.connected, "the service is back")
    await asyncio.gather(bus.close(), other.close())


async def test_all_seeds_are_replaced_while_a_stream_runs(stack: Stack) -> None:
    """Of all services and of the service that reads: no token is lost, and no process is started anew."""
    mine = admitted(stack, "rotating")
    before, pids = Path(mine.seed_file).read_bytes(), stack.run.pids
    async with Client(stack.run.nats_url, tenant="rotating", credentials=mine) as client:
        stream = client.chat(model=stack.model, messages=HELLO, max_tokens=400)
        chunks = aiter(stream)
        texts = [(await anext(chunks)).text]
        rotating = asyncio.create_task(asyncio.to_thread(stack.cli, "nats-config", "--rotate"))
        texts += [chunk.text async for chunk in chunks]
        done = await rotating
        assert (done.returncode, done.stderr) == (0, "")
        assert "".join(texts) == " ".join(f"t{number}" for number in range(400))
        assert Path(mine.seed_file).read_bytes() != before
        assert (await client.chat_once(model=stack.model, messages=HELLO, max_tokens=2)).text == "t0 t1"
    assert stack.run.pids == pids


async def test_a_stack_whose_bus_speaks_tls_alone(start_stack: StartStack, tmp_path: Path) -> None:
    """Server, services, commands and the client library take the same three settings."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    files = Authority(tmp_path / "authority").credentials("stack")
    settings = {f"HEADRACE_NATS_{name.upper()}": getattr(files, name) for name in ("ca_file", "cert_file", "key_file")}
    stack = start_stack(**settings)
    with pytest.raises(BusError):
        await Bus.connect(stack.run.nats_url, name="plain", credentials=stack.credentials, timeout_s=0.5)
    listed = headrace("tenant", "list", "--json", "--data-dir", str(stack.data_dir), **settings)
    assert listed.returncode == 0, listed.stderr
    mine = msgspec.structs.replace(files, seed_file=stack.run.nats_seed_file)
    async with Client(stack.run.nats_url, tenant="demo", credentials=mine) as client:
        answer = await client.chat_once(model="simulated", messages=HELLO, max_tokens=2)
    assert answer.text == "t0 t1"
