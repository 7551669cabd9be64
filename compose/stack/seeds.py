"""NKey seeds of the bus's users: made once, kept in files of mode 0600, replaced on rotation.

A server's configuration has the public keys alone. Before a seed is replaced the server takes the next one's, too.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from compose.stack.data_dir import ComposeError, write_private

SYSTEM = "system"
"""The user of the server's own account: has it read its configuration again, and sees who is connected."""


class Seeds:
    """``<user>.seed``, during a rotation ``<user>.next``, and ``<user>.shut`` of who is shut out.

    Each user's files are in a directory of their own, to be mounted alone.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, user: str) -> Path:
        """Where the user's seed is, or would be."""
        return self.directory / user / f"{user}.seed"

    def users(self) -> list[str]:
        """Who has a seed."""
        return sorted(path.name.removesuffix(".seed") for path in self.directory.glob("*/*.seed"))

    def ensure(self, users: Iterable[str]) -> None:
        """Make the seeds that are missing."""
        for user in users:
            self.path(user).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.path(user).exists():
                write_private(self.path(user), _new())

    def public_keys(self, user: str) -> list[str]:
        """Those that the server takes for the user: its seed's, and the next one's. Raises ComposeError."""
        following = self._next(user)
        return [_public(path) for path in (self.path(user), following) if path == self.path(user) or path.exists()]

    def shut(self, user: str, *, shut: bool) -> bool:
        """Whether that is a change: a user that is shut out keeps its seed, and the servers do not know it."""
        if not self.path(user).exists() or shut == self._shut(user).exists():
            return False
        if shut:
            write_private(self._shut(user), b"")
        else:
            self._shut(user).unlink()
        return True

    def admitted(self) -> list[str]:
        """Users that are not shut out."""
        return [user for user in self.users() if not self._shut(user).exists()]

    def prepare(self, users: Iterable[str]) -> None:
        """Make the next seeds, which nobody uses yet; a rotation that was broken off goes on."""
        for user in users:
            if not self._next(user).exists():
                write_private(self._next(user), _new())

    def switch(self, users: Iterable[str]) -> None:
        """The next seeds are the users' from now on."""
        for user in users:
            self._next(user).replace(self.path(user))

    def _shut(self, user: str) -> Path:
        return self.path(user).with_name(f"{user}.shut")

    def _next(self, user: str) -> Path:
        return self.path(user).with_name(f"{user}.next")


def _new() -> bytes:
    import nkeys

    seed: bytes = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    return seed + b"\n"


def _public(path: Path) -> str:
    from contracts.bus import BusError, Credentials

    try:
        return Credentials(seed_file=str(path)).sign(b"").public_key
    except BusError as error:
        raise ComposeError(str(error)) from error
