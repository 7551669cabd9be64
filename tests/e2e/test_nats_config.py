"""A tenant's own service on the bus of a whole stack: its user, what it gets, and what it cannot have."""

import re

import pytest

from contracts import permissions, subjects
from contracts.bus import Bus, BusError, Unavailable
from contracts.client import Client
from contracts.errors import HeadraceError
from tests.support.stack import Stack, headrace

HELLO = [{"role": "user", "content": "one two three"}]


def admitted(stack: Stack, tenant: str) -> str:
    """Address of the bus with the user of ``tenant``."""
    assert stack.cli("tenant", "create", tenant).returncode == 0
    done = stack.cli("nats-config", "--tenant", tenant)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def test_a_tenants_service_is_admitted_to_a_running_bus(stack: Stack) -> None:
    nats = stack.run.pids["nats"]
    url = admitted(stack, "Ser vice")
    assert re.fullmatch(r"nats://t\.Ser_20vice:[0-9a-f]{48}@127\.0\.0\.1:\d+", url)
    assert admitted(stack, "Ser vice") == url
    async with Client(url, tenant="Ser vice") as client:
        stream = client.chat(model=stack.model, messages=HELLO, max_tokens=4)
        assert "".join([chunk.text async for chunk in stream]) == "t0 t1 t2 t3"
        assert stream.usage is not None and stream.usage.outcome == "completed"
        left = client.chat(model=stack.model, messages=HELLO, max_tokens=2000)
        async for _ in left:
            break
        await left.cancel()
    assert stack.run.pids["nats"] == nats


async def test_a_tenants_service_cannot_act_as_another(stack: Stack) -> None:
    url = admitted(stack, "mallory")
    victim_url = admitted(stack, "victim")
    bus = await Bus.connect(url, name="mallory", inbox=permissions.user_of_tenant("mallory"))
    async with Client(victim_url, tenant="victim") as victim:
        stream = victim.chat(model=stack.model, messages=HELLO, max_tokens=200)
        chunks = aiter(stream)
        texts = [(await anext(chunks)).text]
        # Not even as the client library: it may not read the other's inbox.
        with pytest.raises((BusError, HeadraceError)):
            async with Client(url, tenant="victim") as thief:
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


def test_the_block_can_be_printed_for_a_server_of_ones_own() -> None:
    services = headrace("nats-config")
    assert services.returncode == 0 and "$HEADRACE_NATS_PASSWORD_WORKER" in services.stdout
    tenant = headrace("nats-config", "--tenant", "acme")
    assert 'user: "t.acme"' in tenant.stdout and "submit.v1.acme.*" in tenant.stdout
    assert headrace("nats-config", "--tenant", "").returncode == 1
