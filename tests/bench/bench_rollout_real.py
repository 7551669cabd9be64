"""A roll-out between two versions of the small real model on vLLM, under streams that never stop.

    python -m tests.bench.bench_rollout_real [--streams 50] [--hold 8s] [--steps 25,50,100] [--tokens 16]

Publishes a second version (the same weights, the last norm changed a little), starts a worker of it, and rolls it out
while so many callers stream answers, each the next one when the last has ended; once it is promoted the old worker is
moved. Then looks at each stream (whole, of one version) and at its row in the ledger (of that version). Two engines on
two cores: some 4 GB of memory, ten minutes.
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from compose.stack import models
from tests.support.stack import ENVIRONMENT, HEADRACE, Stack
from tests.support.vllm import MODEL, VLLM_START_LIMIT_S

SECONDS_MAX = 1_500
QUESTIONS = ("What is the capital of France?", "Name a river.", "Count to five.", "Say hello.", "What is a mill?")


class Answer(msgspec.Struct):
    """One stream as its caller saw it."""

    request_id: str
    version: str
    whole: bool
    text: str
    began_at: float
    first_s: float


def second_version(original: Path, directory: Path) -> None:
    """The model with another last norm: as good, and with other words now and then."""
    shutil.copytree(original, directory, symlinks=False)
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + size])["model.norm.weight"]["data_offsets"]
    for at in range(8 + size + begin, 8 + size + end, 2):
        data[at] ^= 0x08  # A bit of a bfloat16's mantissa: 6 %.
    path.write_bytes(data)


class Callers:
    """So many at a time, until ``stop``."""

    def __init__(self, stack: Stack, streams: int, tokens: int) -> None:
        self.answers: list[Answer] = []
        self.refused: Counter[int] = Counter()
        self._stack = stack
        self._tokens = tokens
        self._rng = random.Random(1)
        self._going = True
        self._client = stack.async_client(limits=httpx.Limits(max_connections=None))
        self._client.timeout = httpx.Timeout(300)
        self._tasks = [asyncio.create_task(self._call_again()) for _ in range(streams)]

    async def stop(self) -> None:
        self._going = False
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def _call_again(self) -> None:
        while self._going:
            await self._call()

    async def _call(self) -> None:
        asked = f"{self._rng.choice(QUESTIONS)} ({self._rng.randrange(10_000)})"
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": asked}],
            "stream": True,
            "max_tokens": self._rng.randrange(self._tokens // 2, self._tokens + 1),
            "ignore_eos": True,
        }
        began = time.monotonic()
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                self.refused[response.status_code] += 1
                await response.aread()
                await asyncio.sleep(1)
                return
            version = response.headers.get("x-headrace-model", "@").rpartition("@")[2]
            answer = Answer(response.headers["x-request-id"], version, False, "", began, 0.0)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    answer.whole = True
                elif line.startswith("data: ") and '"error"' not in line:
                    answer.first_s = answer.first_s or time.monotonic() - began
                    for choice in json.loads(line[6:]).get("choices", []):
                        answer.text += choice["delta"].get("content") or ""
        self.answers.append(answer)


async def cli(stack: Stack, *arguments: str) -> Any:
    """Of a command that may take minutes."""
    command = [*HEADRACE, *arguments, "--json", "--data-dir", str(stack.data_dir)]
    process = await asyncio.create_subprocess_exec(*command, env=ENVIRONMENT, stdout=-1)
    out, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return json.loads(out)


async def until(look: Callable[[], Any], what: str) -> Any:
    for _ in range(SECONDS_MAX):
        if found := await look():
            return found
        await asyncio.sleep(1)
    raise SystemExit(f"not within {SECONDS_MAX} s: {what}")


def memory_mb(stack: Stack) -> list[int]:
    """Of each worker with all of its processes."""
    found = []
    for pid in stack.run.pids["worker"]:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        found.append(round(sum(each.memory_full_info().uss for each in family) / 1e6))
    return found


def rows(stack: Stack) -> dict[str, set[str]]:
    """Versions in the ledger by request, of all attempts."""
    sql = json.loads((stack.data_dir / "sql.json").read_text())
    query = "SELECT request_id, version FROM attempts FINAL FORMAT JSONEachRow"
    answer = httpx.post(sql["url"], auth=(sql["user"], sql["password"]), content=query, trust_env=False, timeout=60)
    found: dict[str, set[str]] = {}
    for line in answer.raise_for_status().text.splitlines():
        row = json.loads(line)
        found.setdefault(row["request_id"], set()).add(row["version"])
    return found


async def measure(directory: Path, options: argparse.Namespace) -> int:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    manifest = models.prepare(models.DEFAULT_MODEL, progress=say)
    await asyncio.to_thread(second_version, Path(manifest.path), directory / "second")
    stack = Stack(directory / "data", "--model", models.DEFAULT_MODEL)
    try:
        await asyncio.to_thread(stack.wait_ready, VLLM_START_LIMIT_S)
        [first] = {each["stable"] for each in await cli(stack, "model", "list")}
        say(f"serves {first}; memory of the worker {memory_mb(stack)} MB")
        at = time.monotonic()
        source = str(directory / "second")
        golden = "--no-golden" if options.no_golden else "--golden"
        await cli(stack, "model", "publish", MODEL, "--version", "second", "--from", source, golden)
        say(f"published ({golden}) in {time.monotonic() - at:.0f} s")
        at = time.monotonic()
        await cli(stack, "worker", "add", MODEL, "--version", "second")
        say(f"a worker of it is ready after {time.monotonic() - at:.0f} s; memory {memory_mb(stack)} MB")
        callers = Callers(stack, options.streams, options.tokens)
        await until(lambda: _have(callers, options.streams), "streams")
        plan = ("--to", "second", "--steps", options.steps, "--hold", options.hold, "--shadow", str(options.shadow))
        await cli(stack, "rollout", "start", MODEL, *plan)
        await _watch(stack, say)
        await until(lambda: _moved(stack), "the old worker is moved")
        say("the old worker serves the new version")
        moved_at = time.monotonic()
        await asyncio.sleep(10)
        await callers.stop()
        say(f"{len(callers.answers)} streams ended; refused: {dict(callers.refused)}")
        return await report(stack, callers, moved_at)
    finally:
        stack.stop()


async def _have(callers: Callers, count: int) -> bool:
    return len(callers.answers) >= count


async def _watch(stack: Stack, say: Callable[[str], None]) -> None:
    """Tells of each step until it is over."""
    said = ""
    while True:
        shown = await cli(stack, "rollout", "status", MODEL)
        progress = shown["progress"] or {"phase": "not begun"}
        served = [(step.get("canary", 0), step.get("stable", 0)) for step in progress.get("evidence", [])]
        now = f"{progress['phase']} at {progress.get('share', 0):.0%}"
        if now != said:
            say(f"{now}; served so far, new and old, by step: {served} {progress.get('reason', '')}")
            said = now
        if progress["phase"] in ("promoted", "aborted", "stopped"):
            return
        await asyncio.sleep(5)


async def _moved(stack: Stack) -> bool:
    [queue] = await cli(stack, "queue", "--model", MODEL)
    ready = [each["version"] for each in queue["workers"] if each["state"] == "ready"]
    return ready == ["second", "second"]


async def report(stack: Stack, callers: Callers, moved_at: float) -> int:
    """Prints what held and what did not; how many things were wrong."""
    answers = callers.answers

    async def booked() -> dict[str, set[str]] | None:
        found = await asyncio.to_thread(rows, stack)
        return found if all(each.request_id in found for each in answers) else None

    ledger = await until(booked, "the ledger has all")
    broken = [each for each in answers if not each.whole]
    unnamed = [each for each in answers if not each.version]
    other = [each for each in answers if ledger[each.request_id] != {each.version} and each.version]
    versions = Counter(each.version for each in answers)
    after = {each.version for each in answers if each.began_at > moved_at}
    print(f"streams by version: {dict(versions)}; after the move: {after}")
    print(f"broken streams: {len(broken)}; without a version in their head: {len(unnamed)}")
    print(f"streams whose rows in the ledger name another version: {len(other)}")
    for version in versions:
        firsts = sorted(each.first_s for each in answers if each.version == version)
        middle, high = statistics.median(firsts), firsts[int(len(firsts) * 0.95)]
        print(f"first token of {version}: median {middle:.2f} s, 95 % {high:.2f} s")
    return len(broken) + len(other)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--hold", default="8s")
    parser.add_argument("--steps", default="25,50,100")
    parser.add_argument("--no-golden", action="store_true")
    parser.add_argument("--shadow", type=float, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        return asyncio.run(measure(Path(directory), options))


if __name__ == "__main__":
    sys.exit(main())
