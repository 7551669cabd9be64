"""Child processes that are kept up: start, readiness, restart with a growing delay, ordered stop.

Children die with this process, also when it is killed: each asks the kernel for that before it runs its
program (Linux). Each leads its own process group, so that Ctrl-C on the terminal reaches the supervisor alone
and what a dead child leaves behind can be killed with its group.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from compose.stack.data_dir import Role

LIVES_MAX = 8
"""Lives in a row that end before the child was ready once: then it cannot be kept up. A guess."""
DELAY_MIN_S = 0.5
DELAY_MAX_S = 10.0
STEADY_S = 30.0
"""A life this long ends the growth of the delay. A guess."""
EXIT_CONFIGURATION = 2
LOG_BYTES_MAX = 16 * 2**20
"""Of each log; what a log had before it was cut stands beside it, as much again."""
LOGS_EVERY_S = 1.0
PROBE_S = 0.05
PROBE_TIMEOUT_S = 2.0

Probe = Callable[[], Awaitable[str]]
"""Why the child is not ready, or an empty string."""

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. ``grace_s`` is the time between SIGTERM and SIGKILL."""

    name: str
    role: Role
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    probe: Probe
    grace_s: float
    metrics_url: str = ""


class Restarts:
    """How long to wait before the next life of a child; pure."""

    def __init__(self) -> None:
        self._delay_s = DELAY_MIN_S
        self._never_ready = 0

    def after(self, lived_s: float, was_ready: bool) -> float | None:
        """Delay in seconds after a life that has ended; None when it is time to give up."""
        self._never_ready = 0 if was_ready else self._never_ready + 1
        if self._never_ready >= LIVES_MAX:
            return None
        if lived_s >= STEADY_S:
            self._delay_s = DELAY_MIN_S
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, DELAY_MAX_S)
        return delay_s


class Child:
    """One service and its present process. ``ready`` and ``reason`` are about the present life."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.exited = asyncio.Event()
        self.ready = asyncio.Event()
        self.reason = "starting"
        self.task: asyncio.Task[None] | None = None
        self.leaving = False
        """It is not started again."""
        self.lost = ""
        """Why it cannot be kept up, once that is so."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process; None between two lives."""
        return self._process.pid if self._process is not None and not self.exited.is_set() else None

    def spawn(self) -> None:
        """Start the process; its output is appended to the log file."""
        self.exited.clear()
        self.ready.clear()
        self.reason = "starting"
        parent = os.getpid()
        with self.spec.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.spec.command,
                env=dict(self.spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),  # noqa: PLW1509 (one system call, loaded before)
            )

    def reap(self) -> None:
        """Notice the end of the process and kill what it left of its group, before its id is free again."""
        if self._process is None or self.pid is None:
            return
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        self.kill()
        self._process.wait()
        self.exited.set()

    def send(self, number: signal.Signals) -> None:
        """A signal, to the process alone."""
        if self._process is not None and not self.exited.is_set():
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and its group."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    @property
    def refused_configuration(self) -> bool:
        """Whether the last process ended as every service does when its settings are wrong."""
        return self._process is not None and self._process.returncode == EXIT_CONFIGURATION

    @property
    def ending(self) -> str:
        """How the last process ended."""
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return "has not ended"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def die_with(parent: int) -> None:
    """In the child, before its program: get SIGKILL when the parent dies; end at once if it already has."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


class Supervisor:
    """Keeps children up until ``stop``; calls ``restarted`` with each child that was started again, ``say`` with
    news for people.

    ``failed`` resolves with the reason when a child cannot be kept up without which the others are of no use;
    ``dispensable`` says of which that is not so.
    """

    def __init__(
        self,
        *,
        restarted: Callable[[Child], None],
        say: Callable[[str], None],
        dispensable: Callable[[Child], bool] = lambda _: False,
    ) -> None:
        self.children: list[Child] = []
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.hurry = asyncio.Event()
        """Set: stop without any grace."""
        self._restarted = restarted
        self._say = say
        self._dispensable = dispensable
        self._stopping = asyncio.Event()
        self._logs = asyncio.get_running_loop().create_task(self._keep_logs_small(), name="logs")
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def add(self, spec: Spec) -> Child:
        """Start a child and keep it up from now on; returns at once."""
        child = Child(spec)
        child.spawn()
        self.children.append(child)
        child.task = asyncio.create_task(self._keep(child), name=spec.name)
        return child

    def of(self, role: Role) -> list[Child]:
        return [child for child in self.children if child.spec.role == role]

    async def wait_ready(self, children: Iterable[Child]) -> None:
        """Returns when each of ``children`` has been ready in its present life; never for one that is lost."""
        await asyncio.gather(*(child.ready.wait() for child in children))

    async def remove(self, child: Child, patience_s: float) -> None:
        """Stop one for good. It is asked to leave first (SIGUSR1), and has so long for it before it is stopped."""
        child.leaving = True
        if child.pid is not None:
            child.send(signal.SIGUSR1)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.exited.wait(), patience_s)
        await self._stop(child)
        self._forget(child)

    def _forget(self, child: Child) -> None:
        if child in self.children:
            self.children.remove(child)
        if child.task is not None:
            child.task.cancel()

    async def stop(self, roles: Sequence[Role]) -> None:
        """Stop everything, one role after the other; nothing runs afterwards."""
        self._stopping.set()
        for role in roles:
            await asyncio.gather(*(self._stop(child) for child in self.of(role)))
        tasks = [self._logs, *(child.task for child in self.children if child.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    async def _stop(self, child: Child) -> None:
        if child.pid is None:
            return
        child.send(signal.SIGTERM)
        ends = [asyncio.create_task(child.exited.wait()), asyncio.create_task(self.hurry.wait())]
        await asyncio.wait(ends, timeout=child.spec.grace_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if child.pid is not None:
            if not self.hurry.is_set():
                self._say(f"{child.spec.name} did not stop within {child.spec.grace_s:g} s: killed")
            child.kill()
            await child.exited.wait()

    async def _keep_logs_small(self) -> None:
        while True:
            await asyncio.sleep(LOGS_EVERY_S)
            for child in self.children:
                rotate(child.spec.log)

    def _reap(self) -> None:
        for child in self.children:
            child.reap()

    async def _keep(self, child: Child) -> None:
        restarts = Restarts()
        while True:
            started_s = time.monotonic()
            probing = asyncio.create_task(_watch(child))
            await child.exited.wait()
            probing.cancel()
            if self._stopping.is_set() or child.leaving:
                return
            was_ready = child.ready.is_set()
            delay_s = restarts.after(time.monotonic() - started_s, was_ready)
            if child.refused_configuration and not was_ready:
                self._give_up(child, "refuses its configuration")
                return
            if delay_s is None:
                self._give_up(child, f"{child.ending}, {LIVES_MAX} times before it was ready")
                return
            child.ready.clear()
            self._say(f"{child.spec.name} {child.ending}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            if self._stopping.is_set() or child.leaving:
                return
            child.spawn()
            self._restarted(child)

    def _give_up(self, child: Child, reason: str) -> None:
        tail = "\n".join(f"  {line}" for line in last_lines(child.spec.log))
        child.lost = f"{child.spec.name} {reason}; the end of its log ({child.spec.log}):\n{tail}"
        if self._dispensable(child):
            self._say(f"{child.lost}\nthe others go on without it")
            self._forget(child)
        elif not self.failed.done():
            self.failed.set_result(child.lost)


def rotate(log: Path) -> None:
    """Cut a log that is too long; its end is kept in ``<name>.log.1``. Who writes appends, and so goes on."""
    if log.stat().st_size <= LOG_BYTES_MAX:
        return
    with log.open("rb") as file:
        file.seek(-LOG_BYTES_MAX, os.SEEK_END)
        log.with_suffix(".log.1").write_bytes(file.read(LOG_BYTES_MAX))
    os.truncate(log, 0)


def last_lines(path: Path, lines: int = 5) -> list[str]:
    """The end of a log for a person: JSON records as event, values and the exception's last line."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 64 * 1024))
        return [_readable(line)[:300] for line in file.read().decode(errors="replace").splitlines()[-lines:]]


def _readable(line: str) -> str:
    try:
        record = json.loads(line)
        exception = record.pop("exception", "").splitlines()
        event = record.pop("event")
    except (ValueError, LookupError, AttributeError, TypeError):
        return line
    shown = [f"{name}={value}" for name, value in record.items() if name not in ("timestamp", "service", "level")]
    causes = [text for part in exception if (text := part.strip(" |+-"))]
    return " ".join([event, *shown, *causes[-1:]])


async def _watch(child: Child) -> None:
    """Probe the child until it is ready."""
    while True:
        try:
            child.reason = await asyncio.wait_for(child.spec.probe(), PROBE_TIMEOUT_S)
        except (OSError, TimeoutError, EOFError, ValueError):
            child.reason = "starting"
        if not child.reason:
            child.ready.set()
            return
        await asyncio.sleep(PROBE_S)
