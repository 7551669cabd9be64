"""How a roll-out's judge judges: seven kinds of versions, and a thousand good ones; in virtual time.

    python -m tests.bench rollout [RUNS] [GOOD_RUNS]

Prints the confusion matrix of RUNS seeded roll-outs of each kind (the scheduler's core with the simulated engine's
batches, 40 requests a second, steps of 5, 25 and 50 %, ten minutes at most): requests that the new version had been
given and seconds that had passed when the verdict came, and callers hurt, those of these requests that got a bad answer
in the end. Then the judge alone on GOOD_RUNS good versions at each of three shares, and on as many of which one side is
heard of late.
"""

import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from tests.support.judge_runs import LAGS, answers, run
from tests.support.rollout_world import KINDS, TOKENS_MAX, RolloutWorld

STEPS = [5.0, 25.0, 50.0]
SECONDS_MAX = 600
ENDED_S = 30
"""The longest answers have ended by then."""
GOOD_SHARES = {0.01: 4_000, 0.05: 2_000, 0.5: 1_000}
"""Share -> requests of a run."""
GOOD = answers(errors=0.01)


class Outcome(NamedTuple):
    """What became of one roll-out."""

    verdict: str
    canary: int
    """Requests that the new version had been given until the verdict."""
    seconds: float
    hurt: int
    """Of these, with a bad answer in the end."""


def roll_out(kind: int, seed: int) -> Outcome:
    """One seeded roll-out of a kind."""
    world = RolloutWorld(seed, KINDS[kind], stable=4, new=4)
    world.run(20)
    began = world.now
    world.start(steps=STEPS, hold_ms=30_000, shadow=0)
    while world.now < began + SECONDS_MAX * 1000 and not world.over and not _all_well(world):
        world.run(1)
    progress, well = world.progress, _all_well(world)
    seconds = (world.now - began) / 1000
    given = {request_id for _, request_id, version in world.dispatches if version == "v2"}
    world.run(ENDED_S)
    canary = [end for end in world.ends if end.request_id in given]
    hurt = sum(
        end.outcome != "completed"
        or end.completion_tokens in (0, TOKENS_MAX)
        or end.first_token_at_ms - end.dispatched_at_ms > 600
        for end in canary
    )
    verdict = "stopped" if progress.phase == "stopped" else "good" if well else "not known"
    return Outcome(verdict, len(given), seconds, hurt)


def _all_well(world: RolloutWorld) -> bool:
    rollout = world.core.versions.rollout
    return rollout is not None and rollout.step == len(STEPS) - 1 and not rollout.judge.missing()


def good_run(share: float, seed: int) -> bool:
    """Whether the judge alone stops a good version."""
    return run(seed, share, GOOD_SHARES[share], GOOD, GOOD).verdict is not None


def late_run(share: float, seed: int) -> bool:
    """The same where one side is heard of late, in one of several ways, or its callers leave."""
    lags = list(LAGS.values())
    way, lag = seed % (2 * len(lags) + 1), lags[seed % len(lags)]
    fields: dict[str, Any] = {"stable_leave": 0.7} if way == 2 * len(lags) else {}
    if not fields:
        fields = {"stable_lag" if way < len(lags) else "canary_lag": lag}
    return run(seed, share, max(2_000, GOOD_SHARES[share]), GOOD, GOOD, **fields).verdict is not None


def _row(name: str, made: Sequence[Outcome]) -> str:
    verdicts = Counter(each.verdict for each in made)
    canary = sorted(each.canary for each in made)
    seconds = statistics.median(each.seconds for each in made)
    hurt = statistics.median(each.hurt for each in made)
    counts = " | ".join(str(verdicts[verdict]) for verdict in ("stopped", "not known", "good"))
    middle, most = statistics.median(canary), canary[-1]
    return f"| {name} | {counts} | {middle:.0f} | {most} | {seconds:.0f} | {hurt:.0f} |"


def main(arguments: Sequence[str]) -> None:
    """Both tables."""
    runs = int(arguments[0]) if arguments else 50
    good_runs = int(arguments[1]) if len(arguments) > 1 else 1_000
    with ProcessPoolExecutor(2) as pool:
        print("| version | stopped | not known | good | canary requests, median | most | s, median | hurt, median |")
        print("|---|---|---|---|---|---|---|---|")
        for number, kind in enumerate(KINDS):
            print(_row(kind.name, list(pool.map(partial(roll_out, number), range(runs)))), flush=True)
        for share in GOOD_SHARES:
            for what, one in (("", good_run), (", one side heard of late", late_run)):
                stopped = sum(pool.map(partial(one, share), range(good_runs), chunksize=10))
                print(f"good versions stopped at {share:.0%}{what}: {stopped} of {good_runs}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
