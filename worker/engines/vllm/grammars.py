"""Which constraints an engine may be given: those that could be compiled within bounds, in a process of their own.

An engine compiles for all its callers, and cannot be stopped at it: so it sees a constraint only after
``grammar_process`` compiled it. Verdicts are kept by hash; each tenant has one constraint compiled at a time, so that
nobody waits for more than one of everybody else's.
"""

import asyncio
import hashlib
import itertools
import json
import sys
from collections import OrderedDict
from contextlib import suppress
from weakref import WeakValueDictionary

import msgspec
import structlog

from worker.engines.base import EngineFailure
from worker.engines.vllm.grammar_process import Job, Kind, Outcome, Verdict

AT_ONCE = 2
"""Children at a time."""
KEPT = 4096
"""Verdicts, of 100 bytes each."""
LINE_BYTES_MAX = 1 << 16
"""Of a verdict."""

_log = structlog.get_logger()
_decode = msgspec.json.Decoder(Verdict).decode


class Grammars:
    """``tokenizer_info``: xgrammar's, as JSON. ``any_whitespace``: whether the engine lets JSON be spaced freely.

    The process starts with ``start``, and again when it died.
    """

    def __init__(self, tokenizer_info: str, *, any_whitespace: bool) -> None:
        self._tokenizer_info = tokenizer_info
        self._any_whitespace = any_whitespace
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Future[Outcome]] = {}
        self._numbers = itertools.count()
        self._known: OrderedDict[bytes, Outcome] = OrderedDict()
        self._places = asyncio.Semaphore(AT_ONCE)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By tenant, of those who have it or wait for it."""

    async def start(self) -> None:
        """Start the process; it is ready after some seconds, and what is asked before waits."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "worker.engines.vllm.grammar_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
            start_new_session=True,  # A terminal's Ctrl-C is not for it: it ends with us.
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a process without pipes")
        self._process.stdin.write(json.dumps(self._tokenizer_info).encode() + b"\n")
        self._reader = asyncio.create_task(self._read(self._process, self._process.stdout))

    async def close(self) -> None:
        """End it; who waits gets a failure."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
        if self._reader is not None:
            await self._reader

    async def check(self, tenant: str, kind: Kind, text: str) -> Outcome:
        """Compile it, unless that is known. Raises EngineFailure (retryable) when the process died meanwhile."""
        key = hashlib.blake2b(f"{kind} {text}".encode(errors="replace"), digest_size=32).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        if (turn := self._turns.get(tenant)) is None:
            turn = self._turns[tenant] = asyncio.Lock()
        await turn.acquire()
        try:
            await self._places.acquire()
        except asyncio.CancelledError:
            turn.release()
            raise
        # Who asked may leave; the child stays until it has ended, and so must its place be taken until then.
        job = Job(next(self._numbers), kind, text, self._any_whitespace)
        compiling = asyncio.create_task(self._compile(key, job, turn))
        compiling.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(compiling)

    async def _compile(self, key: bytes, job: Job, turn: asyncio.Lock) -> Outcome:
        try:
            if (outcome := self._known.get(key)) is None:
                outcome = self._known[key] = await self._ask(job)
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
            return outcome
        finally:
            self._places.release()
            turn.release()

    async def _ask(self, job: Job) -> Outcome:
        if self._process is None or self._process.returncode is not None:
            await self.start()
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("a process without pipes")
        answer = self._asked[job.number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            return await answer
        finally:
            del self._asked[job.number]

    async def _read(self, process: asyncio.subprocess.Process, lines: asyncio.StreamReader) -> None:
        """Hand out verdicts until the process ends."""
        while line := await lines.readline():
            verdict = _decode(line)
            if (answer := self._asked.get(verdict.number)) is not None and not answer.done():
                answer.set_result(verdict.outcome)
        status = await process.wait()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineFailure("unavailable", "the process for constraints ended", retryable=True))
        _log.info("grammar_process_ended", status=status)
