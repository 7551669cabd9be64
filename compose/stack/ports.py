"""TCP ports of the stack, kept from others while it lives."""

import errno
import socket

from compose.stack.data_dir import ComposeError


class Ports:
    """TCP ports held for the life of the stack: bound, never listening, so that nobody else is given them.

    A listener that sets SO_REUSEADDR (ours and nats-server do) may bind over such a socket; over that of a
    shared port only one that sets SO_REUSEPORT, so that a second stack is refused.
    """

    def __init__(self) -> None:
        self._bound: list[socket.socket] = []

    def free(self, host: str = "127.0.0.1", *, shared: bool = False) -> int:
        """A free port; ``shared``: for listeners that set SO_REUSEPORT."""
        return self._hold(host, 0, shared)

    def take(self, host: str, port: int, *, shared: bool = False, option: str = "--port") -> int:
        """Hold ``port``, which ``option`` names; raises ComposeError when it is in use or not ours to use."""
        try:
            return self._hold(host, port, shared)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                raise ComposeError(f"{host} is no address of this machine; choose another one with --host") from error
            raise ComposeError(
                f"port {port} on {host} cannot be used: {(error.strerror or str(error)).lower()}; "
                f"choose another one with {option}"
            ) from error

    def close(self) -> None:
        for each in self._bound:
            each.close()
        self._bound.clear()

    def _hold(self, host: str, port: int, shared: bool) -> int:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
            if shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError:
            bound.close()
            raise
        self._bound.append(bound)
        number: int = bound.getsockname()[1]
        return number
