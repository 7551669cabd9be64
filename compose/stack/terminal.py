"""What ``headrace up`` shows: plain lines, and on a terminal one moving line about what is waited for."""

import logging
import sys

import structlog
from rich.console import Console
from rich.status import Status


def quiet_logs() -> None:
    """Of what the bus adapter logs in this process only errors are shown, and never on standard output."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


class Terminal:
    """Lines stay; the status is replaced by the next one and goes away with the last."""

    def __init__(self, *, stderr: bool = False) -> None:
        self._console = Console(stderr=stderr, highlight=False, soft_wrap=True)
        self._status: Status | None = None

    def say(self, text: str) -> None:
        """One or more lines, never cut or decorated: people copy from them."""
        self._console.print(text, markup=False)

    def show(self, text: str) -> None:
        """What is being waited for; empty when nothing is. Off a terminal it is a line."""
        if self._status is not None and text:
            self._status.update(text)
        elif self._status is not None:
            self._status.stop()
            self._status = None
        elif text and self._console.is_terminal:
            self._status = self._console.status(text, spinner="dots")
            self._status.start()
        elif text:
            self.say(text)


def printable(text: str) -> str:
    """``text`` for a terminal: what would move its cursor or color it is shown as a mark."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
