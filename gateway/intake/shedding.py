"""Whether this gateway takes anything new: not while its event loop is late, for those it serves would suffer, nor
while more wait to be let in than it can let in soon.

Decided by its own state alone: one gateway that refuses does not make another refuse.
"""

from contracts.errors import HeadraceError
from contracts.service.vitals import Vitals
from gateway import metrics
from gateway.intake.turnstile import Turnstile

WAITED_S_MAX, WAITING_MAX = 1.0, 1024
"""Of requests before the turnstile. Who wants a thousand answers at once gets them, and who asks for more all the time
than the gateway can take is told so at once, not after a long wait."""
RETRY_AFTER_S_MAX = 60


class Shedding:
    """The gateway's own refusal."""

    def __init__(self, vitals: Vitals, turnstile: Turnstile) -> None:
        self._vitals = vitals
        self._turnstile = turnstile

    @property
    def refusing(self) -> bool:
        """Nothing new is taken."""
        waiting = self._turnstile
        return self._vitals.late or len(waiting) >= WAITING_MAX or waiting.waited_s() > WAITED_S_MAX

    def check(self) -> None:
        """Raises HeadraceError ``overloaded``; costs nothing, and comes before anything of a request is read."""
        if self.refusing:
            metrics.SHED.inc()
            raise HeadraceError(
                "overloaded",
                "This server has more to do than it can, and takes nothing new.",
                # What has lasted for so long lasts as long again, as far as anybody knows.
                retry_after_s=min(RETRY_AFTER_S_MAX, max(1, round(self._vitals.late_for_s))),
            )
