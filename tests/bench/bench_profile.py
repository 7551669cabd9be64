"""Where the CPU of each service goes: at many streams, and at short requests.

    make bench ARGS=profile
    python -m tests.bench.bench_profile [--loads streams requests] [--streams 512] [--callers 64] [--seconds 8]

py-spy samples each service in turn, with native frames, while it holds the interpreter: waiting is left out, and so is
what C code does outside of it. ``all``: share of the samples in which a function, or what it calls, runs; ``own``: in
which nothing is below it. The bus's server is Go, and only its CPU is told. Sampling stops a process for an instant:
CPU is measured before. py-spy is installed in an environment of its own below the user's cache.
"""

import argparse
import asyncio
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from tests.bench.bench_peers import installed, machine
from tests.bench.stream_load import Server, cpu_s
from tests.support.stack import Stack

PY_SPY = "py-spy==0.4.3"
SERVICES = ("gateway", "worker", "scheduler", "ledger")
SAMPLES_PER_S = 250
SETTLE_S = 3.0
AGAIN_S = 0.5
"""A gateway that is stopped for a sample now and then refuses some."""
OURS = re.compile(r"\((?:contracts|gateway|worker|scheduler|ledger)/(?!service/process|__main__)(?!\w+/__main__)")
LINE = re.compile(r":\d+\)$")


@asynccontextmanager
async def load(server: Server, kind: str, at_once: int) -> AsyncIterator[None]:
    """``at_once`` callers that each ask again and again, also where they are refused: long streams, or one token."""
    request = server.request(tokens=2048) if kind == "streams" else server.request(tokens=1)
    callers = [await server.connect() for _ in range(at_once)]

    async def ask(number: int) -> None:
        await asyncio.sleep(number / at_once)
        while True:
            try:
                await callers[number].ask(request)
            except ConnectionError:
                callers[number].transport.abort()
                await asyncio.sleep(AGAIN_S)
                callers[number] = await server.connect()

    tasks = [asyncio.create_task(ask(number)) for number in range(at_once)]
    try:
        await asyncio.sleep(SETTLE_S)
        yield
    finally:
        for task in tasks:
            task.cancel()
        for caller in callers:
            caller.transport.abort()


async def stacks_of(py_spy: Path, pid: int, seconds: int, directory: Path) -> list[tuple[list[str], int]]:
    """Frames, the outermost first, and in how many samples they were so."""
    path = directory / f"{pid}.raw"
    options = ["--native", "--gil", "--rate", str(SAMPLES_PER_S), "--duration", str(seconds), "--format", "raw"]
    process = await asyncio.create_subprocess_exec(
        str(py_spy), "record", "--pid", str(pid), "--output", str(path), *options,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    _, error = await process.communicate()
    if process.returncode:
        raise SystemExit(f"py-spy: {error.decode()[-500:]}")
    lines = (line.rpartition(" ") for line in path.read_text().splitlines())
    return [([LINE.sub(")", frame) for frame in stack.split(";")], int(count)) for stack, _, count in lines]


def table(stacks: list[tuple[list[str], int]], top: int) -> Iterable[str]:
    """Our functions by what they and theirs take, beside all functions by what they take themselves."""
    every = sum(count for _, count in stacks) or 1
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for frames, count in stacks:
        own[frames[-1]] += count
        whole.update(dict.fromkeys((frame for frame in frames if OURS.search(frame)), count))
    yield f"    {'all':>5} {'ours, with what they call':66} {'own':>5} any, without"
    rows = zip(whole.most_common(top), own.most_common(top), strict=False)
    for (ours, all_count), (each, own_count) in rows:
        yield f"    {all_count / every:5.1%} {ours[:66]:66} {own_count / every:5.1%} {each[:66]}"


async def profile(stack: Stack, kind: str, at_once: int, seconds: int, top: int, directory: Path) -> None:
    """Print the tables of one load."""
    py_spy = installed("py-spy", PY_SPY) / "py-spy"
    server = Server(stack.run.url, stack.model, stack.run.key)
    async with load(server, kind, at_once):
        roles = (*SERVICES, "nats")
        before = {role: cpu_s(stack.run.pids[role]) for role in roles}
        await asyncio.sleep(seconds)
        used = {role: (cpu_s(stack.run.pids[role]) - before[role]) / seconds for role in roles}
        shares = ", ".join(f"{role} {share:.0%}" for role, share in used.items())
        print(f"\n{kind}, {at_once} at once; of a core: {shares}")
        for role in SERVICES:
            stacks = await stacks_of(py_spy, stack.run.pids[role][0], seconds, directory)
            print(f"  {role}, {sum(count for _, count in stacks)} samples")
            print("\n".join(table(stacks, top)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loads", nargs="+", default=["streams", "requests"], choices=["streams", "requests"])
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--top", type=int, default=14)
    options = parser.parse_args()
    print(machine())
    for kind in options.loads:
        with tempfile.TemporaryDirectory() as made:
            directory = Path(made)
            stack = Stack(directory / "data", "--engine", "simulated", "--sim-slots", "4096").wait_ready()
            try:
                at_once = options.streams if kind == "streams" else options.callers
                uvloop.run(profile(stack, kind, at_once, options.seconds, options.top, directory))
            finally:
                stack.stop()
    print(machine())


if __name__ == "__main__":
    main()
