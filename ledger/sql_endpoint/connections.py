"""Which connections to the SQL endpoint may stay; pure.

A connection is a stranger's until a request on it was authenticated. Strangers have places of their own, in all and for
each address, and a newcomer takes that of the longest waiting: so who is silent keeps nobody out, and whoever knows the
password finds a place that no stranger can hold.
"""

import ipaddress
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

STRANGERS_MAX = 64
STRANGERS_PER_ADDRESS_MAX = 16
KNOWN_MAX = 64

C = TypeVar("C", bound=Hashable)


class Connections(Generic[C]):
    """Open connections by what is known of them."""

    def __init__(self) -> None:
        self._strangers: dict[C, str] = {}
        """With their address, oldest first."""
        self._known: set[C] = set()

    def opened(self, connection: C, host: str) -> C | None:
        """The connection that must end for this one to stay; None: there is room. It counts as closed."""
        address = origin(host)
        self._strangers[connection] = address
        held = Counter(self._strangers.values())
        if held[address] <= STRANGERS_PER_ADDRESS_MAX:
            if len(self._strangers) <= STRANGERS_MAX:
                return None
            [(address, _)] = held.most_common(1)
        oldest = next(stranger for stranger, its in self._strangers.items() if its == address)
        self.closed(oldest)
        return oldest

    def authenticated(self, connection: C) -> bool:
        """Whether it may stay; from now on no stranger's."""
        if len(self._known - {connection}) >= KNOWN_MAX:
            return False
        self._strangers.pop(connection, None)
        self._known.add(connection)
        return True

    def closed(self, connection: C) -> None:
        self._strangers.pop(connection, None)
        self._known.discard(connection)


def origin(host: str) -> str:
    """What counts as one address: of IPv6 the first 64 bits, which one caller has to itself."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
