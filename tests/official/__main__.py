"""``python -m tests.official --data-dir DIR [NAME ...]``: official clients, their examples, agents, load generators.

Each runs against the stack of DIR (``headrace up --model smollm2-135m-instruct``; ``--list`` says which take the
simulated engine, too) in an environment of its own in the cache, and prints a row of the table in tests/README. Exit 1
when an answer was not as expected. A tool that cannot be installed here is told, and counts for nothing.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from compose.stack.data_dir import DataDir, Run
from tests.official.tools import TOOLS, Missing, Place, Step, Tool

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace" / "official"
STEP_LIMIT_S = 600
"""For a small model on a busy machine; an idle one takes a minute at most."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data-dir", type=Path, default=Path(".headrace"))
    arguments.add_argument("--model", default="smollm2-135m-instruct")
    arguments.add_argument("--list", action="store_true")
    arguments.add_argument("names", nargs="*", metavar="NAME", choices=[[], *TOOLS])
    given = arguments.parse_args()
    if given.list:
        print(
            "\n".join(
                f"{name:20}{tool.what}{'; simulated engine, too' if tool.simulated else ''}"
                for name, tool in TOOLS.items()
            )
        )
        return 0
    run, bad = DataDir(given.data_dir).read_run(), 0
    for name in given.names or TOOLS:
        tool, began = TOOLS[name], time.monotonic()
        place = Place(CACHE / name, given.data_dir, run.url, run.key, given.model)
        try:
            steps = tool.prepare(place)
        except Missing as error:
            print(f"| `{name}` | {tool.what} | not run: {error} |", flush=True)
            continue
        failed = [label for step in steps if (label := _run(tool, step, place, run))]
        bad += bool(failed)
        told = f"{len(steps) - len(failed)} of {len(steps)}" + "".join(f"; {label}" for label in failed)
        print(f"| `{name}` | {tool.what} | {told} ({time.monotonic() - began:.0f} s) |", flush=True)
    return 1 if bad else 0


def _run(tool: Tool, step: Step, place: Place, run: Run) -> str:
    """What was not as expected; empty when all was."""
    keys = {"OPENAI_API_KEY": run.key, "OPENAI_BASE_URL": f"{run.url}/v1"}
    keys |= {"ANTHROPIC_API_KEY": run.key, "ANTHROPIC_BASE_URL": run.url}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            step.command,
            cwd=step.folder or place.folder,
            env=inherited | keys | tool.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{step.label}: not done after {STEP_LIMIT_S} s"
    (place.folder / f"{step.label}.log").write_text(done.stdout)
    if step.refused:
        return "" if re.search(step.refused, done.stdout) else f"{step.label}: not refused as it should be"
    if (done.returncode == 0 and re.search(step.says, done.stdout)) or (
        step.or_else and re.search(step.or_else, done.stdout)
    ):
        return ""
    return f"{step.label}: exit {done.returncode}, see {place.folder}"


if __name__ == "__main__":
    sys.exit(main())
