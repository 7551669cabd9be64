"""The live view says what owners said, how fast tokens come, and nothing that nobody told."""

from typing import Any

from contracts.live import Rates
from contracts.messages.base import Epoch
from contracts.messages.control import WorkerHeartbeat
from contracts.messages.queues import QueueAnswer, TenantQueue
from contracts.messages.records import ModelRecord
from gateway.live import Live


def beat(name: str, *, version: str = "v1", state: str = "ready", prompt: int = 0, output: int = 0) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        worker=name,
        model="m",
        version=version,
        state=state,  # type: ignore[arg-type]
        slots=8,
        running=2,
        kv_tokens=100,
        kv_tokens_used=40,
        prefill_tokens_total=prompt,
        decode_tokens_total=output,
    )


def test_rates_are_over_the_last_seconds_and_unknown_before() -> None:
    rates = Rates()
    rates.take([beat("w", prompt=100, output=10)], 0.0)
    assert rates.of("w") == (None, None) == rates.of("another")
    rates.take([beat("w", prompt=300, output=30)], 2.0)
    assert rates.of("w") == (100.0, 10.0)
    rates.take([beat("w", prompt=300, output=30)], 12.0)
    assert rates.of("w") == (None, None), "what is older counts no more"
    rates.take([beat("w", prompt=300, output=30)], 14.0)
    assert rates.of("w") == (0.0, 0.0)


def test_an_engine_that_begins_anew_has_no_rate_at_first() -> None:
    rates = Rates()
    rates.take([beat("w", output=500)], 0.0)
    rates.take([beat("w", output=7)], 2.0)
    assert rates.of("w") == (None, None)
    rates.take([beat("w", output=17)], 4.0)
    assert rates.of("w") == (0.0, 5.0)


def test_who_is_silent_is_forgotten() -> None:
    rates = Rates()
    rates.take([beat("gone"), beat("w")], 0.0)
    rates.take([beat("w")], 9.0)
    assert list(rates._samples) == ["w"]


class Parts:
    """A bus and a catalog with one model."""

    connected = True

    def names(self) -> list[str]:
        return ["m"]

    def records(self) -> list[ModelRecord]:
        return [ModelRecord(name="m", stable="v1")]


def live() -> Live:
    parts: Any = Parts()
    return Live(parts, parts, "g-1")


def told(*workers: WorkerHeartbeat) -> QueueAnswer:
    tenant = TenantQueue(
        tenant="t", waiting=3, waiting_tokens=9, running=1, reserved_tokens=20, served_counter=1.0, oldest_wait_ms=70
    )
    return QueueAnswer(
        model="m",
        owner="s-1",
        epoch=Epoch(1, 1),
        waiting=3,
        running=1,
        reserved_tokens=20,
        workers=list(workers),
        tenants=[tenant],
    )


def test_pools_are_workers_of_one_version_and_sums_are_of_those_that_are_ready() -> None:
    view = live()
    view.note("m", told(beat("b"), beat("a", state="draining"), beat("c", version="v2")))
    [model] = view.snapshot().models
    assert [(pool.version, [worker.worker for worker in pool.workers]) for pool in model.pools] == [
        ("v1", ["a", "b"]),
        ("v2", ["c"]),
    ]
    first = model.pools[0]
    assert (first.ready, first.slots, first.kv_tokens, first.kv_tokens_used) == (1, 8, 100, 40)
    assert (first.running, first.desired, first.output_tokens_per_s) == (4, None, None)
    assert (model.oldest_wait_ms, model.waiting, model.error) == (70, 3, "")


def test_a_model_without_workers_has_an_empty_pool_and_one_without_owner_says_why() -> None:
    view = live()
    assert view.snapshot().models[0].error
    view.note("m", told())
    assert [(pool.version, pool.ready) for pool in view.snapshot().models[0].pools] == [("v1", 0)]
    view.note("m", "no scheduler answers")
    [model] = view.snapshot().models
    assert (model.error, model.waiting, model.pools) == ("no scheduler answers", None, [])


async def test_who_follows_has_each_round_and_the_end() -> None:
    view = live()
    seen = []
    async with view.following() as snapshots:
        async for data in snapshots:
            seen.append(data)
            if len(seen) == 3:
                view.close()
            view.note("m", f"reason {len(seen)}")
            view.round_ended()
    assert [b"reason 2" in data for data in seen] == [False, False, True]
