"""Whether this gateway takes anything new: not while its event loop is late, for those it serves would suffer, nor
while more wait to be let in than it can let in soon.

Decided by its own state alone: one gateway that refuses does not make another refuse.
"""

import time

from contracts.errors import HeadraceError
from contracts.service.vitals import Vitals
from gateway import metrics
from gateway.intake.turnstile import Turnstile

WAITED_S_MAX, WAITING_MAX = 1.0, 1024
"""Of requests before the turnstile. Who wants a thousand answers at once gets them, and who asks for more all the time
than the gateway can take is told so at once, not after a long wait."""
EXPECTED_S_BUSY = 0.1
CALM_S = 2.0
"""Within so long of a refusal nobody is let in who is to wait longer than EXPECTED_S_BUSY: what waits then is no burst,
and to wait longer would let nobody more in. By what is expected, not by how long the first one has waited: until that
shows, all who came meanwhile would wait for as many times as long as they are more than can be let in."""
RETRY_AFTER_S_MAX = 60
MESSAGE = "This server has more to do than it can, and takes nothing new."


class Shedding:
    """The gateway's own refusal."""

    def __init__(self, vitals: Vitals, turnstile: Turnstile) -> None:
        self._vitals = vitals
        self._turnstile = turnstile
        self._overloaded_at = -CALM_S

    @property
    def refusing(self) -> bool:
        """Nothing new is taken. Any thread may ask."""
        waiting, now = self._turnstile, time.monotonic()
        busy = now - self._overloaded_at < CALM_S
        long = waiting.expected_s() > EXPECTED_S_BUSY if busy else waiting.waited_s() > WAITED_S_MAX
        overloaded = long or self._vitals.late or len(waiting) >= WAITING_MAX
        if overloaded:
            self._overloaded_at = now
        return overloaded

    def admits(self) -> bool:
        """Whether one more is taken, which then comes to the turnstile."""
        if self.refusing:
            return False
        self._turnstile.comes()
        return True

    def shed(self) -> int:
        """Counts a refusal; gives its Retry-After in seconds."""
        metrics.SHED.inc()
        # What has lasted for so long lasts as long again, as far as anybody knows.
        return min(RETRY_AFTER_S_MAX, max(1, round(self._vitals.late_for_s)))

    def check(self) -> None:
        """Raises HeadraceError ``overloaded``; costs nothing, and comes before anything of a request is read."""
        if not self.admits():
            raise HeadraceError("overloaded", MESSAGE, retry_after_s=self.shed())
