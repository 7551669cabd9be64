"""The screen of ``headrace top``: whatever runs and however small it is, everything fits and nothing is made up."""

import io

import pytest
from rich.console import Console

from compose.watch.look import Failure, Rolling, Seen
from compose.watch.screen import screen
from contracts.live import LiveModel, LivePool, LiveView, LiveWorker
from contracts.messages.queues import ClockSkew, TenantQueue

ID = "019f0000-0000-7000-8000-000000000000"


def worker(number: int, *, rate: float | None = 20.0, state: str = "ready") -> LiveWorker:
    return LiveWorker(
        worker=f"worker-{number}-5ecfe4cf9d41", state=state, reason="", slots=8, running=number % 9, waiting=0,  # type: ignore[arg-type]
        kv_tokens=1_000, kv_tokens_used=450, prompt_tokens_per_s=rate, output_tokens_per_s=rate,
    )  # fmt: skip


def model(name: str, workers: int, tenants: int, *, rate: float | None = 20.0) -> LiveModel:
    running = [worker(number, rate=rate) for number in range(workers)]
    pool = LivePool(
        version="v1", ready=workers, desired=None, slots=8, running=1, waiting=0, kv_tokens=1, kv_tokens_used=1,
        prompt_tokens_per_s=rate, output_tokens_per_s=rate, workers=running,
    )  # fmt: skip
    queues = [
        TenantQueue(
            tenant=f"tenant-{number}", waiting=number, waiting_tokens=number * 1_000, running=1, reserved_tokens=50,
            served_counter=0, oldest_wait_ms=number * 1_500,
        )
        for number in range(tenants)
    ]  # fmt: skip
    return LiveModel(
        model=name, stable="v1", error="", owner="s", waiting=3, running=2, reserved_tokens=100, oldest_wait_ms=1_500,
        pools=[pool], tenants=queues, clocks=[],
    )  # fmt: skip


SILENT = LiveModel(
    model="silent", stable="v1", error="No scheduler answers for 'silent' now.", owner=None, waiting=None, running=None,
    reserved_tokens=None, oldest_wait_ms=None, pools=[], tenants=[], clocks=[],
)  # fmt: skip
FAILURE = Failure(
    at_ms=1_793_491_200_000, request_id=ID, attempt=1, tenant="acme", model="m", version="v1", worker="w-1",
    outcome="lost", code="worker_lost",
)  # fmt: skip
ROLLING = Rolling(model="m", stable="v1", to="v2", phase="live", paused=True, share=0.05, why="waits for evidence")


def seen(*models: LiveModel, failures: int = 0, rollouts: tuple[Rolling, ...] = ()) -> Seen:
    live = LiveView(at_ms=1_793_491_200_000, gateway="", bus="connected", models=list(models))
    return Seen(live=live, rollouts=list(rollouts), failures=[FAILURE] * failures)


def lines(what: Seen, width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, file=(written := io.StringIO()))
    console.print(screen(what, width, height))
    return written.getvalue().splitlines()


@pytest.mark.parametrize("width", [24, 42, 59, 60, 80, 99, 100, 200])
@pytest.mark.parametrize("height", [12, 24, 50, None])
def test_everything_fits(width: int, height: int | None) -> None:
    crowd = seen(model("m", 30, 40), failures=20, rollouts=(ROLLING,))
    shown = lines(crowd, width, height)
    assert all(len(line) <= width for line in shown)
    if height is not None:
        assert len(shown) <= max(height, 19), "three rows of each table, whatever there is"
        assert any("more workers" in line for line in shown)
        assert any("more tenants" in line for line in shown)


def test_what_is_wide_enough_is_whole() -> None:
    text = "\n".join(lines(seen(model("m", 2, 1), failures=1, rollouts=(ROLLING,)), 130))
    assert "m @v1  3 waiting (for 1.5 s)  2 running  20 tokens/s  2/2 workers ready  100 tokens reserved" in text
    assert "roll-out v1 > v2  live, paused  5 %  waits for evidence" in text
    assert "1/8" in text and "45%" in text and "tenant-0" in text
    assert "worker_lost" in text and "acme" in text


def test_where_there_is_no_room_names_are_cut_and_no_numbers() -> None:
    text = "\n".join(lines(seen(model("m", 2, 0), failures=1), 40))
    assert " KV" in text and "1/8" in text and "45%" in text and "\N{HORIZONTAL ELLIPSIS}" in text
    assert "00:00:00" in text


def test_an_id_is_never_cut() -> None:
    for width in (60, 72, 80, 100, 200):
        assert ID in "\n".join(lines(seen(model("a-model-with-a-rather-long-name", 1, 1), failures=1), width))


def test_what_nobody_knows_is_no_number() -> None:
    text = "\n".join(lines(seen(SILENT, model("m", 1, 0, rate=None)), 130))
    assert "No scheduler answers" in text and "? tokens/s" in text and " 0 waiting" not in text


def test_who_waits_longest_comes_first_and_a_wrong_clock_is_said() -> None:
    clocked = model("m", 1, 5)
    clocked.clocks = [ClockSkew(process="w", ahead_ms=-2_500)]
    shown = lines(seen(clocked), 160)
    assert "clock of w is -2.5 s" in "\n".join(shown)
    tenants = [line.split()[0] for line in shown if line.strip().startswith("tenant-")]
    assert tenants == [f"tenant-{number}" for number in (4, 3, 2, 1, 0)]


def test_names_are_names_and_no_mark_up() -> None:
    odd = model("m", 1, 1)
    odd.tenants = [
        TenantQueue(
            tenant="[red]x[/]\x1b[2J", waiting=1, waiting_tokens=0, running=0, reserved_tokens=0, served_counter=0,
            oldest_wait_ms=0,
        )
    ]  # fmt: skip
    text = "\n".join(lines(seen(odd), 100))
    assert "[red]x[/]" in text and "\x1b" not in text
