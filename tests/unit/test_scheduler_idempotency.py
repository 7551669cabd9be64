"""One idempotency key names one request: who asks again joins it, whatever became of it, and never runs it twice."""

from typing import Any

import pytest

from contracts.messages.base import IdempotencyKey
from contracts.messages.control import CancelReason, CancelRequest, StreamOwnerHeartbeat
from scheduler.core import events, idempotency
from scheduler.core.asking import READERS_MAX
from scheduler.core.idempotency import KEPT_MS, IdempotencyKeys
from scheduler.core.transitions import State
from tests.support.scheduler_world import World

KEY = IdempotencyKey(key="order-7", digest="d")
FIRST, SECOND = "_gw.first", "_gw.second"


def asks(world: World, reader: str = "", key: IdempotencyKey = KEY, **fields: Any) -> str:
    """Submit under the key; gives the request's id."""
    return world.submit(idempotency=key, reader=reader or f"r{len(world.asked)}", **fields)


def answer(world: World, request_id: str) -> Any:
    return world.answers[request_id]


def cancel(world: World, reason: CancelReason = "client_disconnected", **fields: Any) -> bool | None:
    """Whether the cancel is durable; None while there is no answer yet."""
    before = len(world.cancel_answers)
    world.feed(events.CancelAsked("t0", CancelRequest(reason=reason, **fields), "c"))
    world.run_pending()
    return world.cancel_answers[-1].durable if len(world.cancel_answers) > before else None


def ended(world: World, outcome: str, **fields: Any) -> str:
    """A request under the key that ended so."""
    worker = world.ready_worker()
    request_id = asks(world, **fields)
    world.run_pending()
    world.pull(worker)
    world.end(worker, worker.running.pop((request_id, 1)), outcome)  # type: ignore[arg-type]
    world.run_pending()
    assert not world.core.requests
    return request_id


def take_over(world: World) -> None:
    world.begin_term()
    world.read_streams()
    world.feed(events.Recovered())


def test_a_running_request_is_joined_and_charged_once() -> None:
    world = World()
    first = asks(world)
    taken = world.core.admission.reserved_tokens
    again = asks(world)
    assert (answer(world, first).joined, answer(world, again).joined) == ("", first)
    assert list(world.core.requests) == [first] and world.core.admission.reserved_tokens == taken


@pytest.mark.parametrize("outcome", ["completed", "cancelled", "failed"])
@pytest.mark.parametrize("owner", ["the same owner", "a later owner"])
def test_an_ended_request_is_named_for_ten_minutes(outcome: str, owner: str) -> None:
    world = World()
    request_id = ended(world, outcome)
    if owner == "a later owner":
        take_over(world)
    world.now += KEPT_MS - 1
    world.feed(events.TimePassed())
    assert answer(world, asks(world)).joined == request_id
    assert not world.core.requests
    world.now += 2
    world.feed(events.TimePassed())
    assert answer(world, asks(world)).joined == ""


@pytest.mark.parametrize("when", ["queued", "dispatched"])
def test_a_later_owner_knows_the_keys_of_open_requests(when: str) -> None:
    world = World()
    if when == "dispatched":
        world.ready_worker()
    request_id = asks(world)
    world.run_pending()
    take_over(world)
    assert answer(world, asks(world)).joined == request_id


def test_another_request_under_the_same_key_is_refused() -> None:
    world = World()
    first = asks(world)
    refused = answer(world, asks(world, key=IdempotencyKey(key=KEY.key, digest="other")))
    assert (refused.admitted, refused.code) == (False, "idempotency_key_reused")
    assert first in refused.message


def test_keys_are_the_tenants_own() -> None:
    world = World()
    asks(world)
    assert answer(world, asks(world, tenant="t2")).joined == ""
    world.feed(events.CancelAsked("t1", CancelRequest(idempotency_key=KEY.key), "c"))
    assert len(world.core.requests) == 2


def test_a_refused_request_leaves_the_key_free() -> None:
    world = World()
    assert answer(world, asks(world, tenant="t1", prompt_tokens=10_000_000)).code == "request_exceeds_limit"
    assert answer(world, asks(world, tenant="t1")).joined == ""


def test_a_reservation_that_expired_leaves_the_key_free() -> None:
    world = World()
    world.ask(idempotency=KEY, reader="a")
    world.now += 5_000
    world.feed(events.TimePassed())
    assert answer(world, asks(world)).joined == ""


def test_who_asks_while_it_is_not_stored_yet_joins_once_it_is() -> None:
    """It may never be: then who joined would wait for nothing."""
    world = World()
    first = world.ask(idempotency=KEY, reader="a")
    second = world.ask(idempotency=KEY, reader="b")
    assert second not in world.answers
    world.publish(first)
    assert answer(world, second).joined == first
    assert world.core.requests[first].readers == {"a": "", "b": ""}


def test_who_asks_while_it_is_not_stored_yet_is_admitted_when_it_never_is() -> None:
    world = World()
    first = world.ask(idempotency=KEY, reader="a")
    world.ask(idempotency=KEY, reader="b")
    assert cancel(world, "publish_unconfirmed", request_id=first, reader="a") is True
    assert answer(world, asks(world, "b")).joined == ""


def test_while_a_takeover_goes_on_nothing_new_is_admitted_under_a_key() -> None:
    """The owner before may have dispatched one whose message is found only at the second look."""
    world = World()
    worker = world.ready_worker()
    first = asks(world)
    world.begin_term()
    second = world.ask(idempotency=KEY, reader="b")
    assert second not in world.answers
    world.run_pending()  # The one before us dispatches it.
    world.pull(worker)
    world.read_streams()
    world.feed(events.Recovered())
    assert answer(world, second).joined == first


# Who was told to try again ------------------------------------------------------------------------------------


def test_after_a_withdrawn_publish_the_key_is_free_once_the_end_is_known() -> None:
    """The gateway told its caller that nothing was run, and cancels what it may have stored."""
    world = World()
    worker = world.ready_worker()
    request_id = asks(world)
    world.run_pending()
    world.pull(worker)
    assert cancel(world, "publish_unconfirmed", request_id=request_id, reader=request_id) is True
    assert answer(world, asks(world)).joined == "", "the cancelled one is not billed, and nobody was told of it"
    take_over(world)
    assert answer(world, asks(world)).joined == "r1"


def test_while_it_is_being_withdrawn_the_key_is_refused_for_a_moment() -> None:
    world = World()
    worker = world.ready_worker()
    request_id = asks(world)
    world.run_pending()
    world.pull(worker)
    worker.frozen = True
    assert cancel(world, "publish_unconfirmed", request_id=request_id, reader=request_id) is None
    refused = answer(world, asks(world))
    assert (refused.code, refused.retry_after_s) == ("unavailable", 1)


def test_who_asks_during_a_takeover_does_not_join_what_is_being_withdrawn() -> None:
    """A publish that nobody confirmed reaches a new owner late, after its cancel: found by the explorer."""
    world = World()
    world.ready_worker()
    first = world.ask(idempotency=KEY, reader="a")
    world.begin_term()
    assert cancel(world, "publish_unconfirmed", request_id=first, reader="a") is True
    second = world.ask(idempotency=KEY, reader="b")
    world.publish(first)
    world.feed(events.Recovered())
    assert (world.answers[second].code, world.answers[second].retry_after_s) == ("unavailable", 1)
    world.run_pending()
    assert answer(world, asks(world, "b")).joined == ""


def test_who_was_told_to_ask_again_and_gives_up_is_not_the_one_who_cancels() -> None:
    """Its first try joined late what its second had stored without hearing so: found by the explorer."""
    world = World()
    worker = world.ready_worker()
    first, _ = asks(world, "a"), asks(world, "b")
    world.run_pending()
    world.pull(worker)
    worker.frozen = True
    assert cancel(world, "publish_unconfirmed", request_id=first, reader="a") is False
    assert cancel(world, "client_cancelled", idempotency_key=KEY.key, reader="b") is None
    assert world.core.requests[first].cancel_reason == "publish_unconfirmed", "of the service's own faults, so no bill"


def test_after_a_takeover_nobody_joins_what_only_its_withdrawn_reader_is_known_to_read() -> None:
    world = World()
    world.ready_worker()
    first = asks(world, "a")
    world.run_pending()
    take_over(world)
    assert cancel(world, "publish_unconfirmed", request_id=first, reader="a") is False
    refused = answer(world, asks(world, "b"))
    assert (refused.code, refused.retry_after_s) == ("unavailable", 1)


def test_who_completed_in_spite_of_its_withdrawal_is_joined() -> None:
    world = World()
    worker = world.ready_worker()
    request_id = asks(world)
    world.run_pending()
    world.pull(worker)
    worker.frozen = True
    cancel(world, "publish_unconfirmed", request_id=request_id, reader=request_id)
    world.end(worker, worker.running.pop((request_id, 1)), "completed")
    world.run_pending()
    assert answer(world, asks(world)).joined == request_id, "it is billed"


def test_two_admissions_under_one_key_run_one_request() -> None:
    """An owner admitted the first, which was stored only when the next owner had admitted the second."""
    world = World()
    world.ready_worker()
    first = world.ask(idempotency=KEY, reader="a")
    take_over(world)
    second = asks(world)
    assert answer(world, second).joined == ""
    world.publish(first)
    world.run_pending()
    assert list(world.core.requests) == [second]
    (event,) = [event for (rid, _), event in world.attempts.items() if rid == first]
    assert (event.outcome, event.error_code, event.attempt, event.billable) == ("failed", "unavailable", 0, False)
    take_over(world)
    assert answer(world, asks(world)).joined == second


# Cancelling without an id ---------------------------------------------------------------------------------------


def test_a_cancel_by_key_ends_what_runs_under_it() -> None:
    world = World()
    worker = world.ready_worker()
    request_id = asks(world)
    world.run_pending()
    world.pull(worker)
    assert cancel(world, idempotency_key=KEY.key) is True
    assert world.attempts[request_id, 1].outcome == "cancelled"
    assert cancel(world, idempotency_key=KEY.key) is True


def test_a_cancel_by_key_forbids_what_has_not_come_yet() -> None:
    world = World()
    assert cancel(world, idempotency_key=KEY.key) is True
    assert answer(world, asks(world)).code == "cancelled"
    world.now += KEPT_MS + 1
    world.feed(events.TimePassed())
    assert answer(world, asks(world)).admitted


# Several readers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaver", ["the first", "the joined"])
def test_a_request_goes_on_while_anybody_reads_it(leaver: str) -> None:
    world = World()
    request_id = asks(world, "a")
    asks(world, "b")
    names = ("a", "b") if leaver == "the first" else ("b", "a")
    assert cancel(world, request_id=request_id, reader=names[0]) is False
    assert world.core.requests[request_id].state is State.QUEUED
    assert cancel(world, request_id=request_id, reader=names[0]) is False, "said twice"
    assert cancel(world, request_id=request_id, reader=names[1]) is True


def test_a_cancel_that_names_no_reader_ends_it_for_all() -> None:
    world = World()
    request_id = asks(world, "a")
    asks(world, "b")
    assert cancel(world, "client_cancelled", request_id=request_id) is True


@pytest.mark.parametrize("gone", [FIRST, SECOND])
def test_the_loss_of_one_owner_ends_nothing_that_another_reads(gone: str) -> None:
    world = World()
    request_id = asks(world, "a", stream_owner=FIRST)
    asks(world, "b", stream_owner=SECOND)
    other = FIRST if gone == SECOND else SECOND
    world.feed(events.StreamOwnerSeen(StreamOwnerHeartbeat(stream_owner=gone, leaving=True)))
    assert request_id in world.core.requests
    world.feed(events.StreamOwnerSeen(StreamOwnerHeartbeat(stream_owner=other, leaving=True)))
    world.run_pending()
    assert not world.core.requests and not len(world.core.stream_owners)


def test_readers_say_to_a_later_owner_that_they_joined() -> None:
    world = World()
    request_id = asks(world, "a", stream_owner=FIRST)
    asks(world, "b", stream_owner=SECOND)
    world.run_pending()
    take_over(world)
    assert cancel(world, request_id=request_id, reader="a") is False, "others may read it"
    world.feed(events.StatusAsked("t0", request_id, "s", reader="b", stream_owner=SECOND))
    world.now += world.core.settings.readers_heard_ms
    world.feed(events.TimePassed())
    assert request_id in world.core.requests
    assert cancel(world, request_id=request_id, reader="b") is True


def test_what_nobody_claims_after_a_takeover_is_cancelled() -> None:
    world = World()
    request_id = asks(world, "a", stream_owner=FIRST)
    world.run_pending()
    take_over(world)
    assert cancel(world, request_id=request_id, reader="a") is False
    world.now += world.core.settings.readers_heard_ms
    world.feed(events.TimePassed())
    world.run_pending()
    assert not world.core.requests


def test_strangers_do_not_become_readers() -> None:
    world = World()
    request_id = asks(world, "a")
    world.feed(events.StatusAsked("t1", request_id, "s", reader="b", stream_owner=SECOND))
    assert world.core.requests[request_id].readers == {"a": ""}


# Bounds -------------------------------------------------------------------------------------------------------


def test_readers_of_one_request_are_bounded() -> None:
    world = World()
    for number in range(READERS_MAX):
        asks(world, f"reader-{number}")
    assert answer(world, asks(world, "one more")).code == "conflict"


def test_keys_of_a_tenant_are_bounded_and_cost_no_other_tenant_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "KEYS_MAX", 2)
    keys = IdempotencyKeys()
    for tenant, key in (("other", "k0"), ("t", "k0"), ("t", "k1"), ("t", "k2")):
        keys.end(tenant, IdempotencyKey(key=key, digest="d"), f"r-{key}", 0)
    assert keys.find("t", "k0") is None
    assert keys.find("t", "k2") and keys.find("other", "k0")
    keys.pass_time(KEPT_MS)
    assert keys.find("t", "k2") is None is keys.find("other", "k0")
