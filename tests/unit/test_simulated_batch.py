"""The simulated engine's core: slots, prefill, KV cache and decode times, without an event loop."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.simulated.batch import BLOCK, Batch, EventKind, Sequence, Trigger, prefix_blocks


def sequence(prompt: int = 10, length: int = 3, **more: object) -> Sequence:
    return Sequence(
        **{"owner": None, "index": 0, "prompt_tokens": prompt, "blocks": [], "length": length, "itl_s": 0.02} | more  # type: ignore[arg-type]
    )


def run(batch: Batch, until: float = 1e9) -> list[tuple[float, Sequence, EventKind]]:
    """Step at each wake until nothing is due; gives (time, sequence, kind)."""
    events = []
    while (now := batch.next_wake) is not None and now <= until:
        events += [(now, *event) for event in batch.step(now)]
    return events


def test_first_token_comes_after_the_prefill_and_the_next_ones_at_the_interval() -> None:
    batch = Batch(slots=1, kv_tokens=1000, prefill_tps=100)
    one = sequence(prompt=10, length=3)
    batch.add(one, 0.0)
    events = run(batch)
    assert [kind for _, _, kind in events] == ["token", "token", "last"]
    assert [time for time, _, _ in events] == pytest.approx([0.1, 0.12, 0.14])
    assert batch.stats().prefill_tokens_total == 10
    assert batch.stats().decode_tokens_total == 3


def test_a_given_time_to_first_token_replaces_the_prefill() -> None:
    batch = Batch(slots=2, kv_tokens=1_000_000, prefill_tps=1)
    batch.add(sequence(prompt=100_000, length=1, ttft_s=0.5), 0.0)
    assert [time for time, _, _ in run(batch)] == pytest.approx([0.5])


def test_prefills_run_one_after_the_other() -> None:
    batch = Batch(slots=8, kv_tokens=1_000_000, prefill_tps=1000)
    long, short = sequence(prompt=5000, length=1), sequence(prompt=10, length=1)
    batch.add(long, 0.0)
    batch.add(short, 0.0)
    assert [(time, who) for time, who, _ in run(batch)] == [(5.0, long), (pytest.approx(5.01), short)]


def test_removing_the_prompt_in_computation_lets_the_next_one_begin() -> None:
    batch = Batch(slots=8, kv_tokens=1_000_000, prefill_tps=1000)
    long, short = sequence(prompt=5000, length=1), sequence(prompt=10, length=1)
    batch.add(long, 0.0)
    batch.add(short, 0.0)
    batch.remove(long, 1.0)
    [(time, who, _)] = run(batch)
    assert time == pytest.approx(1.01) and who is short


def test_more_sequences_than_slots_wait_in_order_of_arrival() -> None:
    batch = Batch(slots=1, kv_tokens=1000, prefill_tps=1000)
    queue = [sequence(length=2) for _ in range(3)]
    for one in queue:
        batch.add(one, 0.0)
    assert (batch.stats().running, batch.stats().waiting) == (1, 2)
    assert [who for _, who, kind in run(batch) if kind == "last"] == queue
    assert batch.stats().running == batch.stats().waiting == batch.stats().kv_tokens_used == 0


def test_a_full_cache_preempts_the_youngest_which_finishes_later_whole() -> None:
    batch = Batch(slots=8, kv_tokens=100, prefill_tps=100_000)
    old, young = sequence(prompt=40, length=30), sequence(prompt=40, length=30)
    batch.add(old, 0.0)
    batch.add(young, 0.0)
    events = run(batch)
    assert batch.stats().preemptions_total == 1
    assert [who for _, who, kind in events if kind == "last"] == [old, young]
    assert sum(who is young for _, who, _ in events) == 30
    assert batch.stats().prefill_tokens_total > 80, "the preempted one was computed again"
    assert batch.stats().kv_tokens_used == 0


def test_a_sequence_beyond_the_whole_cache_runs_alone() -> None:
    batch = Batch(slots=8, kv_tokens=100, prefill_tps=100_000)
    small, huge = sequence(length=2), sequence(prompt=500, length=3)
    batch.add(small, 0.0)
    batch.add(huge, 0.0)
    assert [who for _, who, kind in run(batch) if kind == "last"] == [small, huge]


def test_tokens_of_many_sequences_come_in_few_steps() -> None:
    batch = Batch(slots=64, kv_tokens=1_000_000, prefill_tps=1e9)
    dice = random.Random(1)
    for _ in range(64):
        batch.add(sequence(length=50, ttft_s=dice.random() * 0.02), 0.0)
    step_times = {time for time, _, _ in run(batch)}
    assert len(step_times) <= 64 + 50, "64 first tokens, then all of them in the same 50 steps"


def test_a_late_step_gives_one_token_and_slips() -> None:
    batch = Batch(slots=1, kv_tokens=1000, prefill_tps=1e9)
    batch.add(sequence(length=3, ttft_s=0.0), 0.0)
    assert len(batch.step(5.0)) == 1
    assert batch.next_wake == pytest.approx(5.02)
    assert len(batch.step(5.03)) == 1
    assert batch.next_wake == pytest.approx(5.04)


@pytest.mark.parametrize("action", ["fail", "crash", "exit"])
@pytest.mark.parametrize("after", [0, 2, 3])
def test_a_trigger_acts_in_place_of_the_next_token(action: str, after: int) -> None:
    batch = Batch(slots=1, kv_tokens=1000, prefill_tps=1000)
    batch.add(sequence(length=3, trigger=Trigger(action, after)), 0.0)  # type: ignore[arg-type]
    assert [kind for _, _, kind in run(batch)] == ["token"] * after + [action]


def test_a_trigger_beyond_the_end_never_acts() -> None:
    batch = Batch(slots=1, kv_tokens=1000, prefill_tps=1000)
    batch.add(sequence(length=3, trigger=Trigger("fail", 4)), 0.0)
    assert [kind for _, _, kind in run(batch)] == ["token", "token", "last"]


def test_a_hanging_sequence_keeps_its_slot_and_others_go_on() -> None:
    batch = Batch(slots=2, kv_tokens=1000, prefill_tps=1000)
    stuck, free = sequence(length=9, trigger=Trigger("hang", 1)), sequence(length=9)
    batch.add(stuck, 0.0)
    batch.add(free, 0.0)
    events = run(batch)
    assert sum(who is stuck for _, who, _ in events) == 1
    assert events[-1][1:] == (free, "last")
    assert batch.stats().running == 1
    batch.remove(stuck, 9.0)
    assert batch.stats().running == batch.stats().kv_tokens_used == 0


def test_an_answer_of_no_tokens_ends_when_its_first_would_come() -> None:
    batch = Batch(slots=1, kv_tokens=1000, prefill_tps=1000)
    batch.add(sequence(length=0, ttft_s=0.3), 0.0)
    assert [(time, kind) for time, _, kind in run(batch)] == [(0.3, "empty")]


def test_a_shared_prefix_under_the_same_salt_is_cached_in_whole_blocks() -> None:
    batch = Batch(slots=1, kv_tokens=10_000, prefill_tps=1000)
    words = [f"w{number}" for number in range(100)]

    def ask(salt: str, prompt: list[str]) -> int:
        one = sequence(prompt=len(prompt), length=1, blocks=prefix_blocks(salt, prompt))
        batch.add(one, 0.0)
        run(batch)
        return one.cached_tokens

    assert ask("a", words) == 0
    assert ask("a", words) == 96
    assert ask("a", [*words[:50], *["another", "end", "of", "the", "same", "conversation"]]) == 48
    assert ask("b", words) == 0
    assert ask("a", words[: 2 * BLOCK]) == BLOCK, "the last token is computed again"


@settings(max_examples=50, deadline=None)
@given(dice=st.randoms(use_true_random=False), steps=st.integers(1, 40))
def test_whatever_happens_every_sequence_ends_once_and_everything_is_freed(dice: random.Random, steps: int) -> None:
    batch = Batch(slots=dice.randint(1, 6), kv_tokens=dice.randint(50, 300), prefill_tps=5000)
    now, ended, live = 0.0, [], []
    for _ in range(steps):
        now += dice.random() * 0.05
        one = sequence(
            prompt=dice.randint(1, 80),
            length=dice.randint(0, 40),
            itl_s=dice.choice([0.0, 0.001, 0.02]),
            ttft_s=dice.choice([None, 0.01]),
            blocks=[dice.randint(1, 3)],
        )
        live.append(one)
        batch.add(one, now)
        for _ in range(dice.randint(0, 20)):
            if (wake := batch.next_wake) is not None:
                now = max(now, wake)
                ended += [who for who, kind in batch.step(now) if kind in ("last", "empty")]
        if dice.random() < 0.2:
            gone = dice.choice(live)
            batch.remove(gone, now)
            if gone not in ended:
                ended.append(gone)
        stats = batch.stats()
        assert stats.kv_tokens_used <= batch._kv_tokens or stats.running == 1
    ended += [who for _, who, kind in run(batch) if kind in ("last", "empty")]
    assert len(ended) == len(set(ended)) == len(live)
    stats = batch.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens_used) == (0, 0, 0)
