"""Who holds the streams (gateways, client services): when each was last heard, and which requests are its own."""


class Holders:
    """Ticks are the owner's own, as in ``pool``. A holder that was never heard counts from its first request."""

    def __init__(self) -> None:
        self._heard: dict[str, int] = {}
        self._requests: dict[str, dict[str, None]] = {}

    def add(self, holder: str, request_id: str, tick: int) -> None:
        self._heard.setdefault(holder, tick)
        self._requests.setdefault(holder, {})[request_id] = None

    def discard(self, holder: str, request_id: str) -> None:
        """The request is over."""
        if (requests := self._requests.get(holder)) is not None:
            requests.pop(request_id, None)
            if not requests:
                del self._requests[holder]

    def heard(self, holder: str, tick: int) -> None:
        self._heard[holder] = tick

    def silent(self, tick: int, lost_ticks: int) -> list[str]:
        """Those not heard for more than ``lost_ticks``."""
        return [holder for holder, last in self._heard.items() if tick - last > lost_ticks]

    def leave(self, holder: str) -> list[str]:
        """Forget the holder; gives its open requests, the oldest first."""
        self._heard.pop(holder, None)
        return list(self._requests.pop(holder, ()))

    def __len__(self) -> int:
        """Open requests that somebody holds."""
        return sum(map(len, self._requests.values()))
