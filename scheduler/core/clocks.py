"""How far others' wall clocks are from ours, by their heartbeats. Shown to operators; nothing is decided by it."""

from collections import deque

APART_MS = 1_000
"""What is shown: more than a heartbeat's way takes, less than what misleads a person who reads two logs."""
BEATS = 20
"""Heartbeats looked at, 10 s. A late one looks like a clock behind, so the greatest difference is the truest."""
FORGOTTEN_MS = 60_000


class Clocks:
    """By process; one that is silent for a minute is forgotten."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[int, deque[int]]] = {}
        """When last, and by how much it was ahead: the latest heartbeats."""

    def heard(self, process: str, sent_at_ms: int, now_ms: int) -> None:
        """A heartbeat came; 0 says nothing of its sender's clock."""
        if sent_at_ms:
            _, ahead_ms = self._heard.pop(process, (0, deque(maxlen=BEATS)))
            ahead_ms.append(sent_at_ms - now_ms)
            self._heard[process] = now_ms, ahead_ms

    def pass_time(self, now_ms: int) -> None:
        """Forget who has gone."""
        while self._heard:
            process, (heard_at_ms, _) = next(iter(self._heard.items()))
            if heard_at_ms + FORGOTTEN_MS > now_ms:
                return
            del self._heard[process]

    def ahead_ms(self) -> dict[str, int]:
        """Milliseconds ahead of ours (negative: behind), by process."""
        return {process: max(ahead_ms) for process, (_, ahead_ms) in sorted(self._heard.items())}

    def apart(self) -> dict[str, int]:
        """Those that are APART_MS or more away."""
        return {process: ahead_ms for process, ahead_ms in self.ahead_ms().items() if abs(ahead_ms) >= APART_MS}
