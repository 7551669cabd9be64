"""Stream owners (gateways, client services): when each was last heard, and which requests are its own."""


class StreamOwners:
    """Time is counted in loopback heartbeats (``beats``), as in ``worker_pool``.

    An owner that was never heard counts from its first request.
    """

    def __init__(self) -> None:
        self._heard: dict[str, int] = {}
        self._requests: dict[str, dict[str, None]] = {}

    def add(self, owner: str, request_id: str, beats: int) -> None:
        """From now on the owner's silence ends the request."""
        self._heard.setdefault(owner, beats)
        self._requests.setdefault(owner, {})[request_id] = None

    def discard(self, owner: str, request_id: str) -> None:
        """The request is settled."""
        if (requests := self._requests.get(owner)) is not None:
            requests.pop(request_id, None)
            if not requests:
                del self._requests[owner]

    def heard(self, owner: str, beats: int) -> None:
        """A heartbeat of the owner came."""
        self._heard[owner] = beats

    def silent(self, beats: int, lost_after_beats: int) -> list[str]:
        """Those not heard for more than ``lost_after_beats``."""
        return [owner for owner, last in self._heard.items() if beats - last > lost_after_beats]

    def leave(self, owner: str) -> list[str]:
        """Forget the owner; gives its open requests, the oldest first."""
        self._heard.pop(owner, None)
        return list(self._requests.pop(owner, ()))

    def __len__(self) -> int:
        """Open requests whose owner is watched."""
        return sum(map(len, self._requests.values()))
