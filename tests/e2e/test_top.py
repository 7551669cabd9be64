"""``headrace top`` in a terminal of its own: drawn, resized, left by a key; printed once for a pipe and as JSON."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time

from tests.support.polling import wait_until
from tests.support.stack import ENVIRONMENT, HEADRACE, Stack, StartStack

_OF_TERMINAL = {name: value for name, value in ENVIRONMENT.items() if name not in ("COLUMNS", "LINES")} | {
    "TERM": "xterm"
}
"""What runs the tests may have named a size: the terminal's own counts."""


class Terminal:
    """A process in a terminal of its own, and all that it wrote."""

    def __init__(self, *command: str, rows: int, columns: int) -> None:
        self.master, slave = pty.openpty()
        self.resize(rows, columns)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=_OF_TERMINAL, start_new_session=True
        )
        self.slave = slave
        self.text = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> str:
        while select.select([self.master], [], [], 0)[0]:
            self.text += os.read(self.master, 65536).decode(errors="replace")
        return self.text

    def press(self, key: str) -> None:
        os.write(self.master, key.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.slave)
        os.close(self.master)


def test_it_is_drawn_and_resized_and_left_by_a_key(start_stack: StartStack) -> None:
    """On a stack of its own: what neighbours add leaves no room."""
    stack = start_stack()
    command = [*HEADRACE, "top", "--data-dir", str(stack.data_dir)]
    terminal = Terminal(*command, rows=30, columns=120)
    before = termios.tcgetattr(terminal.slave)
    try:
        wait_until(lambda: "workers ready" in terminal.read() and "prompt/s" in terminal.text, "the screen")
        terminal.text = ""
        terminal.resize(12, 40)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        wait_until(lambda: "KV" in terminal.read(), "it is drawn anew")
        assert "prompt/s" not in terminal.text.rsplit("headrace top", 1)[-1], "what has no room is left out"
        terminal.press("q")
        wait_until(lambda: terminal.process.poll() is not None, "it ends")
        assert terminal.process.returncode == 0
        assert "\x1b[?1049l" in terminal.read(), "the screen from before is back"
        assert termios.tcgetattr(terminal.slave) == before
    finally:
        terminal.close()


def test_once_for_people_and_for_programs(stack: Stack) -> None:
    done = stack.cli("top")
    assert done.returncode == 0 and "workers ready" in done.stdout and "\x1b" not in done.stdout, done.stderr
    began = time.time()
    seen = stack.cli_json("top", "--once")
    [model] = [each for each in seen["live"]["models"] if each["model"] == stack.model]
    assert began * 1000 - 5_000 < seen["live"]["at_ms"]
    assert model["error"] == "" and model["pools"][0]["ready"] >= 1
    assert model["pools"][0]["output_tokens_per_s"] is not None, "two looks a second apart"


def test_a_failure_is_seen(stack: Stack) -> None:
    body = {"model": stack.model, "messages": [{"role": "user", "content": "top"}], "simulate": {"fail_after": 0}}
    with stack.client() as client:
        failed = client.post("/v1/chat/completions", json=body)
    assert failed.status_code == 500
    found = [
        each
        for each in stack.cli_json("top", "--once")["failures"]
        if each["request_id"] == failed.headers["x-request-id"]
    ]
    assert [(each["outcome"], each["code"]) for each in found] == [("failed", "engine_error")] * 2, "both attempts"
