"""Schedulers on a real NATS server: what they make of the streams, who owns a model, what a deposed owner can do."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from contracts import ids, registry, sealed, subjects, topology
from contracts.bus import Bus
from contracts.messages.attempts import AttemptEvent, Quarantined
from contracts.messages.base import Epoch
from contracts.messages.control import Announce, CancelAttempt, Evict, StreamOwnerHeartbeat
from contracts.messages.frames import ErrorData, LostData
from contracts.messages.records import Budget, Spending, TenantLimits, TenantRecord
from scheduler import recovery
from scheduler.core import events
from scheduler.core.core import Core
from scheduler.core.settings import Settings
from scheduler.recovery import Recovery
from scheduler.term import Term
from tests.support.nats_server import NatsServer
from tests.support.polling import day_with, until
from tests.support.scheduler_shell import BODY, LONG_LEASE, LOST_AFTER_S, MANIFEST, MODEL, TENANT, Shell


@pytest.fixture
async def shell(bus: Bus, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shell]:
    monkeypatch.setattr(recovery, "HEARD_WITHIN_S", 0.4)
    made = Shell(bus, nats_url)
    await made.open()
    yield made
    await made.close()


def logged(logs: list[Any], event: str) -> list[Any]:
    return [line for line in logs if line["event"] == event]


# One owner ---------------------------------------------------------------------------------------------------


async def test_a_request_is_dispatched_with_body_and_epoch_acknowledged_and_settled(shell: Shell) -> None:
    term = await shell.owner(await shell.start())
    worker = await shell.worker()
    request_id = await shell.submit()
    item = await shell.item(request_id)
    assert (item.attempt, item.worker, item.version, item.epoch) == (1, worker.name, "v1", term.core.epoch)
    assert bytes(item.request.body) == BODY
    await until(lambda: shell.is_empty(topology.REQUESTS), "WORK has it, REQUESTS needs it no more")
    await shell.run(worker, item, tokens=1)
    await shell.state(request_id, "running")
    await shell.end(worker, item)
    answer = await shell.state(request_id, "ended")
    assert (answer.outcome, answer.attempt, answer.last_seq, answer.end and answer.end.completion_tokens) == (
        *("completed", 1, 5, 4),
    )
    queue = await shell.queues()
    assert (queue.waiting, queue.running, queue.reserved_tokens) == (0, 0, 0)
    assert (queue.owner, queue.epoch) == (term.core.owner, term.core.epoch)


def unreadable(name: str) -> float:
    """How many messages of that name nobody could read so far."""
    labels = {"kind": f"{name}_undecodable"}
    return REGISTRY.get_sample_value("headrace_bus_unreadable_messages_total", labels) or 0


async def test_what_nobody_can_read_is_dropped_and_blocks_nothing(shell: Shell) -> None:
    store = shell.bus.jetstream.store
    await store(subjects.request(MODEL, TENANT), b"not JSON", msg_id="a")
    await store(subjects.work(MODEL, "v1", "w-1"), b'{"attempt": "one"}', msg_id="b")
    await store(subjects.attempt(MODEL, "r", 1), b"[]", msg_id="c")
    expected = {"request": 2, "work": 1, "heartbeat": 2, "admission": 1, "cancel": 1, "status": 1}
    before = {name: unreadable(name) for name in expected}
    await shell.owner(await shell.start())
    for subject in (
        subjects.worker_heartbeat(MODEL, "w-2"),
        subjects.stream_owner_heartbeat("acme.x"),
        subjects.admit(MODEL),
        subjects.cancel(MODEL, TENANT),
        subjects.status(MODEL, TENANT),
    ):
        await shell.bus.publish(subject, b"?")
    await store(subjects.request(MODEL, TENANT), b"{}", msg_id="d")
    worker = await shell.worker()
    item = await shell.item(await shell.submit())
    await shell.end(worker, item)
    await until(lambda: shell.is_empty(topology.REQUESTS), "REQUESTS is empty")
    await until(lambda: shell.is_empty(topology.WORK), "WORK is empty")
    assert {name: unreadable(name) - before[name] for name in expected} == expected
    assert len(await shell.messages(topology.ATTEMPTS)) == 2, "what the ledger is to judge stays"


async def test_an_end_that_nobody_can_read_or_that_was_not_told_ends_its_request(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is stored as something else; the second while the owner hears nothing of ATTEMPTS."""
    term = await shell.owner(await shell.start())
    worker = await shell.worker()
    item = await shell.item(request_id := await shell.submit())
    await shell.bus.jetstream.store(subjects.attempt(MODEL, request_id, 1), b"[]", msg_id="x", expect_last=0)
    ended = await shell.state(request_id, "ended")
    assert ended.outcome == "failed" and ended.error is not None and ended.error.code == "internal_error"
    await until(lambda: shell.is_empty(topology.WORK), "its message is deleted")
    item = await shell.item(await shell.submit())
    await shell.run(worker, item)
    await shell.state(item.request.request_id, "dispatched")
    with monkeypatch.context() as deaf:
        deaf.setattr(term._effects, "tell_end", lambda message: None)
        await shell.end(worker, item)
        newest = (await shell.messages(topology.ATTEMPTS))[-1].stream_seq
        await until(lambda: term._recovery._last_attempt_seq >= newest, "it was to be told")
    assert (await shell.state(item.request.request_id, "ended")).outcome == "completed"
    assert term.core.mended == {"attempts": 1}


async def test_a_body_beyond_the_cache_is_read_again_at_dispatch(shell: Shell) -> None:
    term = await shell.owner(await shell.start(body_cache_bytes=1000))
    bodies = [b'{"a":"%s"}' % (b"x" * 400), b'{"b":"%s"}' % (b"y" * 400), b'{"c":"%s"}' % (b"z" * 2000)]
    request_ids = [await shell.submit(body) for body in bodies]
    await until(lambda: len(term.core.queue) == 3, "all of them wait")
    assert len(term._effects.bodies._messages) == 1
    await shell.worker(slots=3)
    for request_id, body in zip(request_ids, bodies, strict=True):
        assert bytes((await shell.item(request_id)).request.body) == body
    await until(lambda: shell.is_empty(topology.REQUESTS), "all are acknowledged")
    assert term._effects.bodies._bytes == 0


async def test_a_body_that_is_gone_fails_its_request(shell: Shell) -> None:
    term = await shell.owner(await shell.start(body_cache_bytes=0))
    request_id = ids.request_id()
    await shell.admit(request_id)
    seq = await shell.publish(request_id)
    await until(lambda: len(term.core.queue) == 1, "it waits")
    await shell.bus.jetstream.delete(topology.REQUESTS, seq)
    await shell.worker()
    event = await shell.event(request_id)
    assert (event.outcome, event.error_code, event.reporter) == ("failed", "internal_error", "scheduler")
    assert await shell.is_empty(topology.WORK)


async def test_a_lost_worker_s_attempt_is_lost_once_and_given_to_another(shell: Shell) -> None:
    await shell.owner(await shell.start())
    first = await shell.worker()
    request_id = await shell.submit()
    item = await shell.item(request_id)
    await shell.run(first, item)
    await shell.state(request_id, "dispatched")
    await first.stop()
    second = await shell.worker()
    again = await shell.item(request_id, attempt=2)
    assert (again.worker, again.epoch, bytes(again.request.body)) == (second.name, item.epoch, BODY)
    lost = await shell.event(request_id)
    assert (lost.outcome, lost.reporter, lost.worker, lost.retryable) == ("lost", "scheduler", first.name, True)
    assert lost.engine_death, "it had told that it has the attempt"
    assert first.told(Evict)[-1].epoch == item.epoch
    epoch, frame = shell.frames[-1]
    assert (epoch, frame.kind, frame.attempt, frame.seq) == (item.epoch, "lost", 1, -1)
    assert msgspec.json.decode(frame.data, type=LostData).retry

    async def only_the_second() -> bool:
        return [left.attempt for left in await shell.work()] == [2]

    await until(only_the_second, "attempt 1 is deleted")


@pytest.mark.parametrize("pulled", [True, False])
async def test_an_attempt_counts_as_a_death_only_if_its_dead_worker_had_pulled_it(shell: Shell, pulled: bool) -> None:
    """It died before its next heartbeat; the server knows what it had delivered."""
    await shell.owner(await shell.start())
    worker = await shell.worker()
    request_id = await shell.submit()
    await shell.item(request_id)
    if pulled:
        await worker.pull()
    await worker.stop()
    assert (await shell.event(request_id)).engine_death is pulled


@pytest.mark.parametrize("keeps_bodies", [False, True])
async def test_a_request_that_kills_three_workers_is_kept_in_quarantine(shell: Shell, *, keeps_bodies: bool) -> None:
    """Its body only for who gave a key, and only that one can read it."""
    private, public = sealed.new_keys()
    settings = {"quarantine_public_key": public} if keeps_bodies else {}
    await shell.owner(await shell.start(**settings))
    request_id = await shell.submit()
    with capture_logs() as logs:
        for attempt in (1, 2, 3):
            worker = await shell.worker()
            item = await shell.item(request_id, attempt)
            assert bool(item.suspect_tokens) is (attempt == 3), "silence says nothing; a second death isolates"
            await shell.run(worker, item)
            await worker.stop()
            assert (await shell.event(request_id, attempt)).engine_death
        await until(lambda: shell.is_empty(topology.WORK), "nobody can run it again")
    (message,) = await shell.messages(topology.QUARANTINE)
    kept = msgspec.json.decode(message.data, type=Quarantined)
    assert (kept.request.request_id, kept.last.attempt) == (request_id, 3)
    assert not kept.request.body and BODY not in message.data
    assert bool(kept.sealed_body) is keeps_bodies
    if keeps_bodies:
        assert sealed.unseal(kept.sealed_body, private) == BODY
    assert await shell.is_empty(topology.REQUESTS)
    assert msgspec.json.decode(shell.frames[-1][1].data, type=ErrorData).code == "request_quarantined"
    assert len(logged(logs, "request_quarantined")) == 1


@pytest.mark.parametrize("sender", [subjects.cancel, subjects.gateway_cancel])
async def test_only_a_gateway_is_believed_that_the_service_failed(shell: Shell, sender: Callable[..., str]) -> None:
    """Nobody pays for what the service failed to deliver, so a tenant must not be able to say so."""
    await shell.owner(await shell.start())
    worker = await shell.worker()
    request_id = await shell.submit()
    await shell.item(request_id)
    await shell.cancel(request_id, "relay_failed", sender(MODEL, TENANT))
    (order,) = worker.told(CancelAttempt)
    assert order.reason == ("relay_failed" if sender is subjects.gateway_cancel else "client_cancelled")


async def test_a_cancel_is_durable_when_the_worker_does_not_have_the_attempt(shell: Shell) -> None:
    term = await shell.owner(await shell.start())
    worker = await shell.worker()
    request_id = await shell.submit()
    await shell.item(request_id)
    answer = await shell.cancel(request_id)
    assert (answer.durable, answer.outcome) == (True, "cancelled")
    order = worker.told(CancelAttempt)[0]
    assert (order.request_id, order.attempt, order.epoch, order.reason) == (
        *(request_id, 1, term.core.epoch, "client_cancelled"),
    )
    event = await shell.event(request_id)
    assert (event.outcome, event.reporter) == ("cancelled", "scheduler")
    await until(lambda: shell.is_empty(topology.WORK), "its work is deleted")


async def test_only_the_name_in_the_subject_says_which_stream_owner_leaves(shell: Shell) -> None:
    await shell.owner(await shell.start())
    leaving, staying = [await shell.submit(stream_owner=f"acme.{name}") for name in ("one", "two")]
    goodbye = StreamOwnerHeartbeat(stream_owner="acme.two", leaving=True)
    await shell.state(staying, "queued")
    await shell.bus.publish(subjects.stream_owner_heartbeat("acme.one"), msgspec.json.encode(goodbye))
    assert (await shell.event(leaving, 0)).outcome == "cancelled"
    assert (await shell.status(staying)).state == "queued"


async def test_the_sweep_deletes_work_that_nobody_needs(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SWEEP_EVERY_S", 0.2)
    await shell.owner(await shell.start())
    worker = await shell.worker()
    item = await shell.item(await shell.submit())
    await shell.end(worker, item)
    await shell.bus.jetstream.store(
        subjects.work(MODEL, "v1", worker.name), msgspec.json.encode(item), msg_id="stored late"
    )
    await until(lambda: shell.is_empty(topology.WORK), "a late copy is swept")


# Limits ------------------------------------------------------------------------------------------------------


async def test_the_monthly_budget_is_held_against_the_ledger_s_total(shell: Shell) -> None:
    month = day_with(10).strftime("%Y-%m")

    async def spent(tokens: int, of: str = month) -> None:
        await shell.bus.kv.put(
            topology.BUDGETS, subjects.encode(TENANT), msgspec.json.encode(Budget(month=of, tokens=tokens))
        )
        await until(lambda: term.core.admission.budgets.counted(TENANT, of) == (tokens, 0), "the total is known")

    await registry.create_tenant(shell.bus, TenantRecord(name=TENANT, monthly_budget_tokens=1000))
    term = await shell.owner(await shell.start())
    assert (await shell.admit()).admitted, "there is no total yet"
    await spent(10_000, "2020-01")
    assert (await shell.admit()).admitted, "the total is of another month"
    await spent(940)
    assert (await shell.admit()).admitted, "40 more are reserved"
    assert not (await shell.admit()).admitted, "60 more"
    await spent(1000)
    refused = await shell.admit()
    assert (refused.admitted, refused.code) == (False, "insufficient_quota")
    assert refused.retry_after_s and refused.retry_after_s <= 31 * 24 * 3600
    assert (await shell.admit(tenant="other")).admitted
    await registry.change_tenant(shell.bus, TENANT, lambda r: msgspec.structs.replace(r, monthly_budget_tokens=2000))
    await until(lambda: admits(shell), "a raised budget holds at once")


async def admits(shell: Shell) -> bool:
    return (await shell.admit()).admitted


async def test_a_spent_budget_is_known_to_the_next_owner(shell: Shell) -> None:
    month = day_with(10).strftime("%Y-%m")
    await registry.create_tenant(shell.bus, TenantRecord(name=TENANT, monthly_budget_tokens=1))
    await shell.bus.kv.put(
        topology.BUDGETS, subjects.encode(TENANT), msgspec.json.encode(Budget(month=month, tokens=1))
    )
    first = await shell.start()
    await shell.owner(first)
    second = await shell.start()
    await shell.stop(first)
    await shell.owner(second)
    assert (await shell.admit()).code == "insufficient_quota"


async def test_what_the_ledger_has_not_counted_is_known_to_the_next_owner(shell: Shell) -> None:
    month = day_with(10).strftime("%Y-%m")
    await registry.create_tenant(shell.bus, TenantRecord(name=TENANT, monthly_budget_tokens=30))
    first = await shell.start()
    await shell.owner(first)
    worker = await shell.worker()
    item = await shell.item(await shell.submit())
    await shell.end(worker, item, prompt_tokens=10, completion_tokens=4, billable=True)
    item = await shell.item(await shell.submit())
    key = f"{subjects.encode(MODEL)}.{subjects.encode(TENANT)}"

    async def told() -> bool:
        entry = await shell.bus.kv.get(topology.SPENDING, key)
        said = entry and msgspec.json.decode(entry.value, type=Spending)
        return bool(said and [seen.tokens for seen in said.later] == [14] and said.reserved_tokens == 20)

    await until(told, "an end and an open request are told")
    assert (await shell.admit()).code == "rate_limit_exceeded"
    await shell.end(worker, item, prompt_tokens=10, completion_tokens=6, billable=True)
    second = await shell.start()
    await shell.stop(first)
    term = await shell.owner(second)
    assert term.core.admission.budgets.counted(TENANT, month) == (30, 0)
    assert (await shell.admit()).code == "insufficient_quota"


async def test_limits_and_manifest_change_during_a_term(shell: Shell) -> None:
    scheduler = await shell.start()
    await shell.owner(scheduler)
    await registry.create_tenant(shell.bus, TenantRecord(name=TENANT, limits=TenantLimits(rpm=1)))
    await until(lambda: refuses(shell, "rate_limit_exceeded"), "the limit holds")
    await registry.change_model(shell.bus, MODEL, limits={"queued_requests": 2})
    await until(lambda: refuses(shell, "overloaded", tenant="other"), "the queue is full")
    await shell.bus.kv.delete(topology.MODELS, subjects.encode(MODEL))
    await until(lambda: MODEL not in scheduler._terms, "a model that is gone has no owner")


async def test_a_removed_model_takes_nothing_new_and_ends_what_it_has(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its owner dies meanwhile and nobody knew it before; then it is forgotten, and may be added again."""
    monkeypatch.setattr("scheduler.term.Settings", partial(Settings, removed_quiet_ms=500))
    first = await shell.start()
    await shell.owner(first)
    worker = await shell.worker(slots=1)
    running, queued = await shell.submit(), await shell.submit()
    item = await shell.item(running)
    await shell.run(worker, item, tokens=1)
    await registry.remove_model(shell.bus, MODEL)
    assert await registry.models(shell.bus) == []
    await until(lambda: refuses(shell, "model_not_found"), "nothing new is admitted")
    await shell.stop(first)
    second = await shell.start()
    await shell.owner(second)
    assert await refuses(shell, "model_not_found")
    await shell.end(worker, item)
    assert (await shell.state(running, "ended")).outcome == "completed"
    item = await shell.item(queued)
    await shell.run(worker, item, tokens=1)
    await shell.end(worker, item)
    assert (await shell.state(queued, "ended")).outcome == "completed"
    await until(lambda: not second._campaigns, "nobody is a candidate for it any more")
    assert await shell.bus.kv.get(topology.MODELS, subjects.encode(MODEL)) is None
    await registry.put_version(shell.bus, MANIFEST)
    await shell.owner(second)
    assert (await shell.admit()).admitted


async def test_a_model_that_is_added_again_while_it_is_removed_goes_on(shell: Shell) -> None:
    scheduler = await shell.start()
    term = await shell.owner(scheduler)
    await registry.remove_model(shell.bus, MODEL)
    await until(lambda: refuses(shell, "model_not_found"), "nothing new is admitted")
    await registry.put_version(shell.bus, MANIFEST)
    await until(lambda: admits(shell), "it is served again")
    assert scheduler._terms[MODEL] is term


async def refuses(shell: Shell, code: str, **fields: Any) -> bool:
    return (await shell.admit(**fields)).code == code


# Who owns the model ------------------------------------------------------------------------------------------


async def test_a_standby_takes_over_at_once_from_an_owner_that_stops(shell: Shell) -> None:
    first, second = await shell.start(lease_ttl_s=20), await shell.start(lease_ttl_s=20)
    before = await shell.queues()
    queued = await shell.submit()
    stopping = first if MODEL in first._terms else second
    standby = second if stopping is first else first
    started = time.monotonic()
    await shell.stop(stopping)
    term = await shell.owner(standby)
    assert time.monotonic() - started < 10, "the lease was given back, not waited for"
    assert term.core.epoch > before.epoch and term.core.owner != before.owner
    assert (await shell.status(queued)).state == "queued", "what was admitted stays admitted"


async def test_an_end_is_logged_once_whoever_reads_it_later(shell: Shell) -> None:
    with capture_logs() as logs:
        first = await shell.start()
        await shell.owner(first)
        request_id = await shell.submit()
        cancelled = await shell.cancel(request_id)
        assert cancelled.durable and cancelled.outcome == "cancelled"
        await until(lambda: len(logged(logs, "attempt_ended_by_scheduler")) == 1)
        second = await shell.start()
        await shell.stop(first)
        await shell.owner(second)
        known = await shell.status(request_id)
        assert (known.state, known.outcome) == ("ended", "cancelled"), "the new owner has read the event"
        assert len(logged(logs, "attempt_ended_by_scheduler")) == 1


async def test_a_new_owner_dispatches_only_when_every_worker_knows_it(shell: Shell) -> None:
    """One worker acknowledges nothing: the queue stands still until it is lost, then the other one gets all."""
    first = await shell.start()
    term = await shell.owner(first)
    deaf = await shell.worker()
    running = await shell.submit()
    await shell.run(deaf, await shell.item(running))
    deaf.deaf = True
    queued = await shell.submit()
    second = await shell.start()
    await shell.stop(first)
    well = await shell.worker(slots=2)
    heir: Term = await until(lambda: second._terms.get(MODEL), "there is a new owner")
    await until(lambda: well.epoch == heir.core.epoch and deaf.told(Announce)[-1].epoch == heir.core.epoch)
    await asyncio.sleep(2 * recovery.HEARD_WITHIN_S)
    assert heir.core.recovering and deaf.epoch == term.core.epoch
    assert [item.request.request_id for item in await shell.work()] == [running]
    item = await shell.item(queued)
    assert (item.worker, item.epoch, item.attempt) == (well.name, heir.core.epoch, 1)
    assert list(heir.core.pool.evicted) == [deaf.name] and deaf.told(Evict)
    assert (await shell.event(running)).outcome == "lost"


async def test_a_running_attempt_survives_the_change_of_owner(shell: Shell) -> None:
    first = await shell.start()
    await shell.owner(first)
    worker = await shell.worker()
    request_id = await shell.submit()
    item = await shell.item(request_id)
    await shell.run(worker, item, tokens=2)
    second = await shell.start()
    await shell.stop(first)
    heir = await shell.owner(second)
    assert [left.epoch for left in await shell.work()] == [item.epoch], "it was not dispatched again"
    assert (await shell.status(request_id)).state == "running"
    await shell.end(worker, item)
    await shell.state(request_id, "ended")
    assert heir.core.admission.reserved_tokens == 0


async def test_a_lease_lost_during_recovery_ends_the_term(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes next reads everything itself; the one that was late has answered and dispatched nothing."""
    stuck, catch_up = asyncio.Event(), Recovery._catch_up
    late: list[Recovery] = []

    async def slow(self: Recovery) -> None:
        if not late:
            late.append(self)
            stuck.set()
            await asyncio.sleep(60)
        await catch_up(self)

    monkeypatch.setattr(Recovery, "_catch_up", slow)
    request_id = ids.request_id()
    await shell.publish(request_id)
    worker = await shell.worker()
    with capture_logs() as logs:
        first = await shell.start()
        await stuck.wait()
        old: Term = first._terms[MODEL]
        await shell.depose(old)
        second = await shell.start()
        await until(lambda: first._terms.get(MODEL) is not old, "the term has ended")
        item = await shell.item(request_id)
    assert not old.core.requests and old.core.recovering
    assert (item.attempt, item.worker) == (1, worker.name) and item.epoch > old.core.epoch
    assert logged(logs, "model_released") and not any(
        line["epoch"] == list(msgspec.structs.astuple(old.core.epoch)) for line in logged(logs, "model_owned")
    )
    owner = first if MODEL in first._terms else second
    assert (await shell.queues()).epoch == (await shell.owner(owner)).core.epoch == item.epoch


async def test_a_broken_core_ends_the_process(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = await shell.start()
    await shell.owner(scheduler)

    def step(self: Core, event: events.Event, now_ms: int) -> list[events.Effect]:
        raise RuntimeError("a bug")

    with capture_logs() as logs:
        monkeypatch.setattr(Core, "step", step)
        assert str(await shell.ended(scheduler)) == "a bug"
    assert len(logged(logs, "term_broken")) == 1


async def test_a_bus_away_for_longer_than_the_lease_ends_the_term_and_loses_nothing(
    shell: Shell, nats: NatsServer
) -> None:
    scheduler = await shell.start()
    term = await shell.owner(scheduler)
    worker = await shell.worker()
    running, queued = await shell.submit(), await shell.submit()
    item = await shell.item(running)
    await shell.run(worker, item, tokens=1)
    await shell.state(running, "running")
    nats.stop()
    await until(lambda: scheduler._terms.get(MODEL) is not term, "the term is over")
    nats.start()
    heir = await shell.owner(scheduler)
    assert heir.core.epoch > term.core.epoch
    await until(lambda: heir.core.requests.keys() == {running, queued}, "both are open")
    assert not heir.core.pool.evicted, "nobody was lost for the bus's silence"
    await shell.end(worker, item)
    again = await shell.item(queued)
    assert (again.attempt, again.epoch) == (1, heir.core.epoch)
    assert [m.subject for m in await shell.messages(topology.ATTEMPTS)] == [subjects.attempt(MODEL, running, 1)]


async def test_a_short_cut_of_the_bus_changes_no_owner(shell: Shell, nats: NatsServer) -> None:
    scheduler = await shell.start(lease_ttl_s=10, lease_renew_s=1.0)
    term = await shell.owner(scheduler)
    worker = await shell.worker()
    running = await shell.submit()
    await shell.run(worker, await shell.item(running), tokens=1)
    await shell.state(running, "running")
    nats.stop()
    await asyncio.sleep(2 * LOST_AFTER_S)
    nats.start()
    queued = await shell.submit()
    await shell.state(queued, "queued")
    assert scheduler._terms[MODEL] is term and not term.core.pool.evicted
    assert (await shell.status(running)).state == "running"


# A deposed owner ---------------------------------------------------------------------------------------------


async def deposed(shell: Shell) -> tuple[Term, Term]:
    """An owner that was frozen for longer than its lease and does not know it, and its heir."""
    old = await shell.owner(await shell.start(**LONG_LEASE))
    second = await shell.start()
    await shell.depose(old)
    heir = await shell.owner(second)
    assert heir.core.owner != old.core.owner and heir.core.epoch > old.core.epoch
    return old, heir


async def test_a_deposed_owner_admits_nobody(shell: Shell) -> None:
    old, heir = await deposed(shell)
    request_id = ids.request_id()
    answer = await shell.admit(request_id)
    assert answer.admitted and answer.epoch == heir.core.epoch
    assert request_id in heir.core.requests and request_id not in old.core.requests
    queue = await shell.queues()
    assert (queue.owner, queue.epoch) == (heir.core.owner, heir.core.epoch)


async def test_a_deposed_owner_confirms_no_cancel_and_tells_no_status(shell: Shell) -> None:
    """It knows nothing of what its heir admitted: its word would be that nobody needs to do anything."""
    old, heir = await deposed(shell)
    request_id = await shell.submit()
    await until(lambda: heir.core.requests[request_id].request_seq, "the heir has it")
    for _ in range(20):
        assert (await shell.status(request_id)).state == "queued"
    answer = await shell.cancel(request_id)
    assert (answer.durable, answer.outcome) == (True, "cancelled")
    assert not old.core.tombstones.cancelled(request_id)
    event = await shell.event(request_id, 0)
    assert (event.outcome, event.reporter) == ("cancelled", "scheduler")


async def test_a_deposed_owner_dispatches_nothing(shell: Shell) -> None:
    """Both have the request in their queue when a worker gets ready."""
    old = await shell.owner(await shell.start(**LONG_LEASE))
    request_id = await shell.submit()
    await until(lambda: len(old.core.queue) == 1, "it waits")
    second = await shell.start()
    with capture_logs() as logs:
        await shell.depose(old)
        heir = await shell.owner(second)
        worker = await shell.worker(heard=False)
        worker.epoch = old.core.epoch
        old.feed(events.WorkerSeen(worker.heartbeat()))
        assert old.core.requests[request_id].worker == worker.name, "it has placed the request"
        await until(lambda: not old._effects._tasks, "its effects are through")
        assert await shell.is_empty(topology.WORK)
        await worker.start()
        item = await shell.item(request_id)
        await until(lambda: shell.is_empty(topology.REQUESTS), "the heir acknowledges")
    assert not logged(logs, "bus_consumer_lost"), "the heir's consumer of REQUESTS is left alone"
    assert (item.attempt, item.worker, item.epoch) == (1, worker.name, heir.core.epoch)
    assert len(await shell.work()) == 1 and await shell.is_empty(topology.ATTEMPTS)
    assert worker.epoch == heir.core.epoch


async def test_a_deposed_owner_ends_nothing(shell: Shell) -> None:
    """It thinks that the worker is lost, which its heir hears well."""
    old = await shell.owner(await shell.start(**LONG_LEASE))
    worker = await shell.worker()
    request_id = await shell.submit()
    item = await shell.item(request_id)
    await shell.run(worker, item, tokens=1)
    second = await shell.start()
    await shell.depose(old)
    heir = await shell.owner(second)
    for _ in range(old.core.settings.lost_after_beats + 1):
        old.feed(events.LoopbackSeen())
    assert worker.name in old.core.pool.evicted
    await asyncio.sleep(0.5)
    assert await shell.is_empty(topology.ATTEMPTS) and len(await shell.work()) == 1
    assert worker.name in heir.core.pool.workers and (await shell.status(request_id)).state == "running"
    stale = [order for order in worker.orders if order.epoch == old.core.epoch and isinstance(order, Evict)]
    assert stale and worker.epoch == heir.core.epoch, "the worker refuses the order by its epoch"


@pytest.mark.parametrize("kind", ["acknowledgement", "deletion", "end", "quarantine"])
async def test_no_effect_of_a_deposed_owner_changes_a_stream(shell: Shell, kind: str) -> None:
    old = await shell.owner(await shell.start(**LONG_LEASE))
    worker = await shell.worker()
    running, queued = await shell.submit(), await shell.submit()
    item = await shell.item(running)
    await shell.run(worker, item)
    await until(lambda: len(old.core.queue) == 1, "one waits")
    (request,) = await shell.messages(topology.REQUESTS)
    (work,) = await shell.messages(topology.WORK)
    await shell.depose(old)
    event = AttemptEvent(
        request_id=running,
        attempt=1,
        tenant=TENANT,
        key_id="k",
        model=MODEL,
        version="v1",
        endpoint="chat/completions",
        priority="interactive",
        outcome="lost",
        reporter="scheduler",
    )
    effects: dict[str, events.Effect] = {
        "acknowledgement": events.AckRequest(request.stream_seq),
        "deletion": events.DeleteWork(work.stream_seq),
        "end": events.StoreTerminal(event),
        "quarantine": events.Quarantine(item.request, event, "no reason", request.stream_seq, work.stream_seq),
    }
    old._effects.perform(effects[kind])
    await until(lambda: not old._effects._tasks, "it is through")
    assert [m.stream_seq for m in await shell.messages(topology.REQUESTS)] == [request.stream_seq]
    assert [m.stream_seq for m in await shell.messages(topology.WORK)] == [work.stream_seq]
    assert await shell.is_empty(topology.ATTEMPTS) and await shell.is_empty(topology.QUARANTINE)
    heir = await shell.owner(await shell.start())
    await shell.end(worker, item)
    again = await shell.item(queued)
    assert (again.epoch, again.attempt) == (heir.core.epoch, 1) and again.epoch > Epoch()
