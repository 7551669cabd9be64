"""Bodies too large for a message: each goes with its request, whoever dies, and nobody fills the store for others."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from contracts import ids, registry, sealed, subjects, topology
from contracts.bus import Bus
from contracts.messages.attempts import Quarantined
from scheduler import recovery
from tests.support.polling import until
from tests.support.scheduler_shell import BODY, MODEL, TENANT, Shell

SIZE = 100_000
LARGE = b'{"messages":[{"role":"user","content":"%s"}]}' % (b"x" * SIZE)


@pytest.fixture
async def shell(bus: Bus, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shell]:
    monkeypatch.setattr(recovery, "HEARD_WITHIN_S", 0.4)
    made = Shell(bus, nats_url)
    await made.open()
    yield made
    await made.close()


async def upload(shell: Shell, request_id: str) -> dict[str, Any]:
    """Store a body as a gateway does; fields of the request's envelope."""
    digest = await shell.bus.objects.put(topology.BODIES, subjects.body(MODEL, TENANT, request_id), LARGE)
    return {"body_bytes": len(LARGE), "body_digest": digest}


async def submit(shell: Shell) -> str:
    request_id = ids.request_id()
    assert (await shell.admit(request_id, body_bytes=len(LARGE))).admitted
    await shell.publish(request_id, **await upload(shell, request_id))
    return request_id


async def gone(shell: Shell) -> None:
    await until(lambda: shell.is_empty(topology.BODIES), "the store is empty")


async def test_a_body_goes_when_its_request_completes_fails_or_is_cancelled(shell: Shell) -> None:
    await shell.owner(await shell.start())
    worker = await shell.worker()
    item = await shell.item(await submit(shell))
    assert (item.request.body_bytes, item.request.body) == (len(LARGE), msgspec.Raw())
    assert not await shell.is_empty(topology.BODIES), "a second attempt would need it"
    await shell.end(worker, item)
    await gone(shell)
    item = await shell.item(await submit(shell))
    await shell.end(worker, item, outcome="failed")
    await gone(shell)
    running = await shell.item(await submit(shell))
    waiting = await submit(shell)
    await shell.cancel(waiting)
    await until(lambda: _held(shell, 1), "the cancelled one's is gone, the other's stays")
    await shell.end(worker, running)
    await gone(shell)


async def _held(shell: Shell, count: int) -> bool:
    return len(await shell.bus.objects.subjects(topology.BODIES, "body.v1.>")) == count


async def test_a_body_outlives_its_owner_and_goes_after_the_takeover(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "SWEEP_EVERY_S", 0.2)
    first = await shell.start()
    await shell.owner(first)
    worker = await shell.worker()
    item = await shell.item(await submit(shell))
    queued = await submit(shell)
    await shell.stop(first)
    await shell.end(worker, item)  # Nobody owns the model.
    await shell.owner(await shell.start())
    await until(lambda: _held(shell, 1), "only what waits needs its body")
    await shell.cancel(queued)
    await gone(shell)


async def test_what_was_uploaded_and_never_submitted_is_swept(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway killed between the two, or in the middle of the first."""
    monkeypatch.setattr(recovery, "SWEEP_EVERY_S", 0.2)
    term = await shell.owner(await shell.start())
    kept = await submit(shell)
    await upload(shell, ids.request_id())
    await shell.bus.jetstream.store(subjects.body(MODEL, TENANT, ids.request_id()), b"a piece", msg_id="piece")
    await shell.bus.objects.put(topology.BODIES, subjects.body("another", TENANT, ids.request_id()), LARGE)
    await until(lambda: _held(shell, 2), "both are gone; another model's is its owner's to judge")
    assert kept in term.core.requests
    assert subjects.body(MODEL, TENANT, kept) in await shell.bus.objects.subjects(topology.BODIES, "body.v1.>")


async def test_a_quarantined_request_keeps_its_body_there_sealed(shell: Shell) -> None:
    private, public = sealed.new_keys()
    await shell.owner(await shell.start(quarantine_public_key=public))
    worker = await shell.worker()
    request_id = await submit(shell)
    died = {"engine_death": True, "accused": 1}
    for attempt in (1, 2):
        item = await shell.item(request_id, attempt)
        await shell.end(worker, item, outcome="failed", retryable=True, completion_tokens=0, **died)
    await until(lambda: _kept(shell), "it is quarantined")
    (message,) = await shell.messages(topology.QUARANTINE)
    assert sealed.unseal(msgspec.json.decode(message.data, type=Quarantined).sealed_body, private) == LARGE
    await gone(shell)


async def _kept(shell: Shell) -> bool:
    return not await shell.is_empty(topology.QUARANTINE)


async def test_no_tenant_takes_the_store_from_others_and_refusals_say_which_limit(shell: Shell) -> None:
    limits = {"body_bytes": 5 * len(LARGE), "tenant_body_bytes": 2 * len(LARGE)}
    await registry.change_model(shell.bus, MODEL, limits=limits)
    await shell.owner(await shell.start())
    worker = await shell.worker(slots=10)
    items = [await shell.item(await submit(shell)) for _ in range(2)]
    refused = await shell.admit(body_bytes=len(LARGE))
    assert (refused.code, "large bodies" in refused.message) == ("rate_limit_exceeded", True)
    assert refused.retry_after_s is not None
    assert (await shell.admit()).admitted, "a small body takes nothing of the store"
    for tenant in ("other", "third"):
        assert (await shell.admit(tenant=tenant, body_bytes=len(LARGE))).admitted
    assert (await shell.admit(tenant="other", body_bytes=len(LARGE))).admitted
    full = await shell.admit(tenant="third", body_bytes=len(LARGE))
    assert (full.code, "store for large bodies" in full.message) == ("overloaded", True)
    never = await shell.admit(body_bytes=2 * len(LARGE) + 1)
    assert (never.code, never.retry_after_s) == ("request_too_large", None)
    await shell.end(worker, items[0])
    await until(lambda: _admits(shell), "what ended gives its share back")


async def _admits(shell: Shell) -> bool:
    return (await shell.admit(body_bytes=len(BODY))).admitted
