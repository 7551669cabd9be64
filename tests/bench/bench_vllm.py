"""Real streams through Headrace beside vLLM's own server: the small model, the same arguments, in turn on one machine.

    make bench ARGS=vllm
    python -m tests.bench.bench_vllm [--streams 32] [--tokens 128] [--rounds 4]

Both engines stand all the time, and the one that is not asked sleeps. A round is ``streams`` answers of ``tokens`` at
once on each side, none of which ends before. A pause is the time between two reads of one answer; tokens a second are
of the whole round, with its prefills. CPU is of all processes of a side, the engine's too.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]
import uvloop

from compose.stack import models
from tests.bench.bench_peers import machine
from tests.bench.stream_load import Answer, Server, cpu_s, percentile, streams
from tests.support.stack import Stack
from tests.support.vllm import MODEL, VLLM_START_LIMIT_S, Direct

SETTLE_S = 2.0


class Side:
    """One of the two, and what was measured of it."""

    def __init__(self, name: str, server: Server, roots: list[int]) -> None:
        self.name = name
        self._server = server
        self._pids = [each.pid for root in roots for each in with_children(root)]
        self.forget()

    def forget(self) -> None:
        """What was measured so far."""
        self.rates: list[float] = []
        self.pauses: list[float] = []
        self.firsts: list[float] = []
        self.cpus: list[float] = []

    def round(self, at_once: int, tokens: int) -> None:
        """Ask, and print what came."""
        request = self._server.request(tokens=tokens, ignore_eos=True, temperature=0)
        used, began = cpu_s(self._pids), time.perf_counter()
        found = uvloop.run(streams(self._server, at_once=at_once, answers=1, request=request))
        took_s, given = time.perf_counter() - began, at_once * tokens
        pauses = [pause * 1000 for answer in found for pause in answer.pauses]
        firsts = [(answer.first_at - answer.asked_at) * 1000 for answer in found]
        self.rates.append(given / took_s)
        self.cpus.append((cpu_s(self._pids) - used) / given * 1000)
        self.pauses += pauses
        self.firsts += firsts
        print(f"{self.name:12} {figures(given / took_s, pauses, firsts, self.cpus[-1])} {together(found)}", flush=True)
        time.sleep(SETTLE_S)

    def __str__(self) -> str:
        return figures(statistics.median(self.rates), self.pauses, self.firsts, statistics.median(self.cpus))


def figures(rate: float, pauses: list[float], firsts: list[float], cpu_ms: float) -> str:
    return (
        f"| {rate:8.1f} | {' '.join(f'{percentile(pauses, share):6.1f}' for share in (0.5, 0.9, 0.99))} "
        f"| {percentile(firsts, 0.5):7.0f} {percentile(firsts, 0.99):6.0f} | {cpu_ms:6.2f} |"
    )


def together(found: list[Answer]) -> str:
    """Of how many reads there were more than one event in one."""
    reads = sum(1 + len(answer.pauses) for answer in found)
    return f"{sum(answer.chunks for answer in found) / reads:.2f} events a read"


def with_children(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    print(machine())
    path = Path(models.prepare(models.DEFAULT_MODEL, progress=print).path)
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        direct = Direct(path, directory / "direct.log")
        try:
            stack = Stack(directory / "data", "--model", models.DEFAULT_MODEL).wait_ready(VLLM_START_LIMIT_S)
            try:
                direct.wait_ready()
                ours = [pid for pids in stack.run.pids.values() for pid in pids]
                sides = [
                    Side("vLLM alone", Server(direct.url, MODEL), [direct.process.pid]),
                    Side("Headrace", Server(stack.run.url, MODEL, stack.run.key), ours),
                ]
                print(f"{options.streams} streams of {options.tokens} tokens")
                print("             | tokens/s | pause p50, p90, p99 ms | first p50, p99 ms | CPU ms a token |")
                for side in sides:
                    side.round(4, 8)  # Warms up.
                    side.forget()
                for number in range(options.rounds):
                    for side in sides if number % 2 else reversed(sides):
                        side.round(options.streams, options.tokens)
                alone, through = sides
                print("of all rounds")
                for side in sides:
                    print(f"{side.name:12} {side}")
                rate = statistics.median(through.rates) / statistics.median(alone.rates)
                pause = percentile(through.pauses, 0.99) / percentile(alone.pauses, 0.99)
                print(f"Headrace over vLLM alone: tokens/s {rate:.3f}, pause p99 {pause:.2f}")
            finally:
                stack.stop()
        finally:
            direct.stop()
    print(machine())


if __name__ == "__main__":
    main()
