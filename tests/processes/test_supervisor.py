"""Children are kept up, given up, stopped in order, and never left behind. Real processes, small ones."""

import asyncio
import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from compose.stack import processes
from compose.stack.data_dir import ComposeError, Role
from compose.stack.ports import Ports
from compose.stack.processes import Child, Restarts, Spec, Supervisor
from tests.support.polling import until


async def always_ready() -> str:
    return ""


async def never_ready() -> str:
    return "not yet"


def spec(
    tmp_path: Path, program: str, *, role: Role = "worker", probe: processes.Probe = always_ready, grace_s: float = 10.0
) -> Spec:
    return Spec(
        name=f"{role}-0",
        role=role,
        command=[sys.executable, "-S", "-c", textwrap.dedent(program)],
        environment=dict(os.environ),
        log=tmp_path / f"{role}.log",
        probe=probe,
        grace_s=grace_s,
    )


def supervisor(restarted: Callable[[Child], None] = lambda _: None) -> tuple[Supervisor, list[str]]:
    said: list[str] = []
    return Supervisor(restarted=restarted, say=said.append), said


def alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


SLEEP = "import time; time.sleep(600)"


def test_the_delay_grows_and_a_steady_life_resets_it() -> None:
    restarts = Restarts()
    assert [restarts.after(1, True) for _ in range(7)] == [0.5, 1, 2, 4, 8, 10, 10]
    assert restarts.after(30, True) == 0.5


def test_a_child_that_is_never_ready_is_given_up() -> None:
    restarts = Restarts()
    lives = [restarts.after(60, False) for _ in range(processes.LIVES_MAX)]
    assert None not in lives[:-1] and lives[-1] is None


def test_one_ready_life_starts_the_count_of_failures_anew() -> None:
    restarts = Restarts()
    for _ in range(3):
        assert all(restarts.after(1, False) is not None for _ in range(processes.LIVES_MAX - 1))
        assert restarts.after(1, True) is not None


async def test_a_killed_child_is_started_again_and_told(tmp_path: Path) -> None:
    restarted: list[Child] = []
    keeper, said = supervisor(restarted.append)
    child = keeper.add(spec(tmp_path, SLEEP))
    await keeper.wait_ready([child])
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.pid not in (None, first))
    await keeper.wait_ready([child])
    assert restarted == [child] and "SIGKILL" in said[0]
    second = child.pid
    await keeper.stop(["worker"])
    assert second is not None and not alive(first) and not alive(second)


async def test_a_child_that_cannot_start_ends_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "DELAY_MAX_S", 0.01)
    monkeypatch.setattr(processes, "DELAY_MIN_S", 0.01)
    keeper, _ = supervisor()
    keeper.add(spec(tmp_path, "print('no licence'); raise SystemExit(3)", probe=never_ready))
    reason = await asyncio.wait_for(keeper.failed, 30)
    assert "worker-0 ended with exit code 3" in reason and "worker.log" in reason
    assert (tmp_path / "worker.log").read_text().count("no licence") == processes.LIVES_MAX
    await keeper.stop(["worker"])


async def test_others_go_on_without_a_dispensable_child(tmp_path: Path) -> None:
    said: list[str] = []
    keeper = Supervisor(
        restarted=lambda _: None, say=said.append, dispensable=lambda child: child.spec.role == "worker"
    )
    other = keeper.add(spec(tmp_path, SLEEP, role="gateway"))
    lost = keeper.add(spec(tmp_path, "raise SystemExit(2)", probe=never_ready))
    await until(lambda: lost not in keeper.children)
    assert "refuses its configuration" in lost.lost and "go on without it" in said[-1]
    assert not keeper.failed.done() and other.pid is not None
    await keeper.stop(["gateway"])


async def test_a_child_that_is_removed_may_finish_first_and_does_not_come_back(tmp_path: Path) -> None:
    keeper, _ = supervisor()
    program = """
    import signal, sys, time
    signal.signal(signal.SIGUSR1, lambda *_: (time.sleep(0.3), print("finished", flush=True), sys.exit(0)))
    print("ready", flush=True)
    time.sleep(600)
    """
    patient = keeper.add(spec(tmp_path, program))
    await until(lambda: "ready" in patient.spec.log.read_text())
    await keeper.remove(patient, 30)
    assert "finished" in patient.spec.log.read_text() and keeper.children == []
    program = "import signal, time; signal.signal(10, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    stubborn = keeper.add(spec(tmp_path, program))
    await until(lambda: "deaf" in stubborn.spec.log.read_text())
    await keeper.remove(stubborn, 0.1)
    assert stubborn.exited.is_set() and keeper.children == []
    await keeper.stop(["worker"])


async def test_a_child_that_refuses_its_configuration_is_not_started_again(tmp_path: Path) -> None:
    keeper, _ = supervisor()
    program = "import sys; sys.exit(print('HEADRACE_X: no number', file=sys.stderr) or 2)"
    keeper.add(spec(tmp_path, program, probe=never_ready))
    reason = await asyncio.wait_for(keeper.failed, 30)
    assert "refuses its configuration" in reason and reason.endswith("HEADRACE_X: no number")
    await keeper.stop(["worker"])


def test_the_end_of_a_log_is_shown_to_people(tmp_path: Path) -> None:
    log = tmp_path / "log"
    broke = {"event": "broke", "level": "error", "timestamp": "t", "reason": "x", "exception": "Trace\n  ValueError: y"}
    log.write_text(f"old\nplain text\n{json.dumps(broke)}\n7\n")
    assert processes.last_lines(log, 3) == ["plain text", "broke reason=x ValueError: y", "7"]


async def test_stop_goes_by_role_and_kills_what_does_not_end(tmp_path: Path) -> None:
    keeper, said = supervisor()
    order = tmp_path / "order"
    polite = """
        import signal, sys, time
        def end(*_):
            with open({order!r}, "a") as file: file.write({name!r} + " ")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("up", flush=True)
        time.sleep(600)
    """
    deaf = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        time.sleep(600)
    """
    keeper.add(spec(tmp_path, polite.format(order=str(order), name="nats"), role="nats"))
    keeper.add(spec(tmp_path, polite.format(order=str(order), name="gateway"), role="gateway"))
    keeper.add(spec(tmp_path, deaf, role="worker", grace_s=0.3))
    pids = [child.pid for child in keeper.children]
    for role in ("nats", "gateway", "worker"):
        log = tmp_path / f"{role}.log"
        await until(lambda log=log: log.exists() and "up" in log.read_text())  # type: ignore[misc]
    await keeper.stop(["gateway", "worker", "nats"])
    assert order.read_text().split() == ["gateway", "nats"]
    assert not any(pid is None or alive(pid) for pid in pids)
    assert any("worker-0 did not stop" in line for line in said)


async def test_hurry_skips_the_grace(tmp_path: Path) -> None:
    keeper, _ = supervisor()
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    child = keeper.add(spec(tmp_path, program, grace_s=600))
    await until(lambda: "up" in (tmp_path / "worker.log").read_text())
    stopping = asyncio.create_task(keeper.stop(["worker"]))
    await asyncio.sleep(0.05)
    keeper.hurry.set()
    await asyncio.wait_for(stopping, 10)
    assert child.pid is None


async def test_what_a_dead_child_leaves_in_its_group_is_killed(tmp_path: Path) -> None:
    keeper, _ = supervisor()
    program = """
        import os, sys, time
        if os.fork() == 0:
            print(os.getpid(), flush=True)
        time.sleep(600)
    """
    child = keeper.add(spec(tmp_path, program))
    await until(lambda: (tmp_path / "worker.log").read_text().strip().isdigit())
    grandchild = int((tmp_path / "worker.log").read_text())
    assert child.pid is not None and alive(grandchild)
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: not alive(grandchild))
    await keeper.stop(["worker"])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
async def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    program = f"""
        import asyncio, os, sys
        from pathlib import Path
        from compose.stack.processes import Spec, Supervisor
        async def ready() -> str: return ""
        async def main() -> None:
            keeper = Supervisor(restarted=lambda _: None, say=print)
            child = keeper.add(Spec(name="worker-0", role="worker", command=["sleep", "600"],
                environment=dict(os.environ), log=Path({str(tmp_path / "log")!r}), probe=ready, grace_s=1))
            print(child.pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    assert alive(child)
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(child))


def test_a_held_port_is_given_to_nobody_else_but_our_listeners() -> None:
    ours, theirs = Ports(), Ports()
    try:
        port = ours.take("127.0.0.1", 0, shared=True)
        with pytest.raises(ComposeError, match="in use"):
            theirs.take("127.0.0.1", port, shared=True)
        assert len({ours.free() for _ in range(20)}) == 20
    finally:
        ours.close()
        theirs.close()


async def test_a_child_that_fills_its_log_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut while the child writes; what was written last stands in one of the two files."""
    monkeypatch.setattr(processes, "LOG_BYTES_MAX", 100_000)
    monkeypatch.setattr(processes, "LOGS_EVERY_S", 0.05)
    kept, _ = supervisor()
    chatter = """
        import time
        for number in range(600_000):
            print(number, "x" * 100, flush=True)
            time.sleep(0.0001)
    """
    child = kept.add(spec(tmp_path, chatter))
    log, former = child.spec.log, child.spec.log.with_suffix(".log.1")

    def last(path: Path) -> int:
        return int(path.read_text().splitlines()[-2].split()[0])

    try:
        await until(former.exists, "the log was cut")
        cut_at = last(former)
        await until(lambda: last(former) > cut_at, "and once more")
        assert former.stat().st_size <= 100_000
        assert b"\0" not in log.read_bytes(), "no hole is left before what is appended"
    finally:
        await kept.stop(("worker",))
