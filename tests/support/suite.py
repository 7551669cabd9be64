"""Runs the tests: ``python -m tests.support.suite [--all] [--second-look] [pytest's arguments]``.

Three runs of pytest, because they want the machine differently: files side by side where tests wait more than they
compute; the real vLLM, which takes all cores; and chaos, which must be alone because it is about time. ``--all`` adds
what is marked slow. Arguments that are paths are run instead of everything.

Red is red. ``--second-look`` (CI) allows one exception: a single test of chaos that failed, in a run that pytest ended
by itself, is looked at once more with all tests of its file. It is told with its first failure at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
SLOWEST = 20
OK, FAILED, NOTHING_RUN = 0, 1, 5
"""pytest's exit codes."""


@dataclass(frozen=True)
class Run:
    """One run of pytest."""

    name: str
    marks: str
    arguments: tuple[str, ...] = ()
    second_look: bool = False
    """Whether a failure may be looked at again."""


SIDE_BY_SIDE = ("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder")
RUNS = (
    Run("side by side", "not vllm and not chaos", SIDE_BY_SIDE),
    Run("vllm", "vllm and not chaos"),
    Run("chaos", "chaos", second_look=True),
)


@dataclass
class Result:
    """How a run of pytest ended: its exit code, its reports as the plugin writes them, seconds."""

    code: int
    reports: list[dict[str, str | float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> dict[str, str]:
        """First failure of each test that failed, by the test's name."""
        found: dict[str, str] = {}
        for report in self.reports:
            if report["outcome"] == "failed":
                found.setdefault(str(report["test"]), str(report["text"]))
        return found


Pytest = Callable[[Sequence[str]], Result]


def pytest(arguments: Sequence[str]) -> Result:
    """Run pytest in a process of its own."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as outcomes:
        # One word: apart, the file would pass for a place of tests until our plugin is loaded.
        command = [sys.executable, "-m", "pytest", f"--outcomes={outcomes.name}", *arguments]
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        return Result(code, [json.loads(line) for line in outcomes], time.monotonic() - began)


def look_again(result: Result, pytest: Pytest) -> str:
    """Why a run that failed stays red; empty when a second look at its one failure found nothing."""
    failed = list(result.failed)
    if result.code != FAILED:
        return f"pytest ended with {result.code}"
    if len(failed) != 1:
        return f"{len(failed)} tests failed"
    file, _, test = failed[0].partition("::")
    if not test:
        return f"no single test failed but {failed[0]}"
    print(f"\n--- a second look at {file}, for {test} failed", flush=True)
    again = pytest([file])
    return "" if again.code == OK else "it failed again"


def suite(
    runs: Sequence[Run], chosen: Sequence[str] = (), *, second_look: bool = False, pytest: Pytest = pytest
) -> int:
    """All runs, whatever fails in them; the exit code, which is 0 only when something ran and nothing failed."""
    results: dict[str, Result] = {}
    red: dict[str, str] = {}
    rescued: dict[str, str] = {}
    for run in runs:
        print(f"\n--- {run.name}", flush=True)
        result = results[run.name] = pytest(["-m", run.marks, *run.arguments, *chosen])
        if result.code in (OK, NOTHING_RUN):
            continue
        why = look_again(result, pytest) if second_look and run.second_look else f"pytest ended with {result.code}"
        if why:
            red[run.name] = why
        else:
            rescued |= result.failed
    print("\n".join(table(results)))
    for test, text in rescued.items():
        print(f"\nRESCUED by a second look: {test}. Its first failure:\n{text}")
    for name, why in red.items():
        print(f"\nRED: {name}: {why}\n" + "\n".join(f"  {test}" for test in results[name].failed))
    if not red and all(result.code == NOTHING_RUN for result in results.values()):
        print("\nRED: no test was run")
        return NOTHING_RUN
    passed, failed, skipped = counts(results)
    print(f"\n{passed} passed, {failed - len(rescued)} failed, {skipped} skipped")
    return FAILED if red else OK


def counts(results: dict[str, Result]) -> tuple[int, int, int]:
    """How many passed, failed and were skipped. A test that fails after it passed counts as both."""
    reports = [report for result in results.values() for report in result.reports]
    failed = sum(len(result.failed) for result in results.values())
    passed = sum(report["when"] == "call" and report["outcome"] == "passed" for report in reports)
    return passed, failed, sum(report["outcome"] == "skipped" for report in reports)


def table(results: dict[str, Result]) -> list[str]:
    """Minutes of each run and of each folder's tests, and the slowest tests."""
    tests: dict[str, float] = defaultdict(float)
    folders: dict[str, float] = defaultdict(float)
    for result in results.values():
        for report in result.reports:
            name, seconds = str(report["test"]), float(report["seconds"])
            tests[name] += seconds
            folders["/".join(name.split("/")[:2])] += seconds
    total = sum(result.seconds for result in results.values())
    slowest = sorted(tests.items(), key=lambda it: -it[1])[:SLOWEST]
    return [
        f"\n--- {total / 60:.1f} minutes: {minutes({name: it.seconds for name, it in results.items()})}",
        f"minutes of tests by folder: {minutes(folders)}",
        *(f"{seconds:7.1f} s  {test}" for test, seconds in slowest),
    ]


def minutes(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value / 60:.1f}" for name, value in seconds.items())


def plan(everything: bool, marks: str = "") -> list[Run]:
    """The runs; without what is slow unless ``everything`` is wanted; of these what ``marks``, as for -m, says."""
    more = ("" if everything else " and not slow") + (f" and ({marks})" if marks else "")
    return [replace(run, marks=run.marks + more) for run in RUNS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="what is slow too")
    parser.add_argument("--second-look", action="store_true", help="at a single failure of chaos")
    parser.add_argument("-m", dest="marks", default="", help="only what these marks say")
    options, rest = parser.parse_known_args()
    if options.all:
        os.environ.setdefault("HEADRACE_EXPLORE_WORLDS", "25000")
    return suite(plan(options.all, options.marks), rest, second_look=options.second_look)


if __name__ == "__main__":
    sys.exit(main())
