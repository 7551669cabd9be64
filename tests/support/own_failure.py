"""Failures that belong to no test: of a shared fixture's end. The plugin carries them from xdist's workers."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

OWN = pytest.StashKey[list[tuple[str, str]]]()
"""What xdist's worker has to tell at its end: names and texts. Workers may report tests alone."""


@contextmanager
def own_failure(config: pytest.Config, name: str) -> Iterator[None]:
    """What fails inside fails the run, under ``name``."""
    try:
        yield
    except (AssertionError, pytest.fail.Exception) as error:
        if hasattr(config, "workerinput"):
            config.stash.setdefault(OWN, []).append((name, str(error)))
        else:
            report(config, name, str(error))


def report(config: pytest.Config, name: str, text: str) -> None:
    """Report a failure as if a test of this name had it."""
    failure = pytest.TestReport(
        nodeid=name, location=("", None, name), keywords={}, outcome="failed", longrepr=text, when="call"
    )
    config.hook.pytest_runtest_logreport(report=failure)
