"""What operators ask of a model's owner and of its workers while they run."""

import msgspec

from contracts import subjects
from contracts.bus import Bus, Unavailable
from contracts.errors import HeadraceError
from contracts.messages.base import Codec
from contracts.messages.queues import QueueAnswer, QueueQuery

ASK_TIMEOUT_S = 2.0

_query: Codec[QueueQuery] = Codec(QueueQuery)
_answer: Codec[QueueAnswer] = Codec(QueueAnswer)


async def queue(bus: Bus, model: str, *, requests: int = 0, request_id: str = "") -> QueueAnswer:
    """Live queues of one model, with so many of its open requests, or the one; raises HeadraceError."""
    query = QueueQuery(requests=requests, request_id=request_id)
    try:
        return _answer.decode(await bus.request(subjects.queues(model), _query.encode(query), timeout_s=ASK_TIMEOUT_S))
    except (Unavailable, msgspec.MsgspecError) as error:
        raise HeadraceError("unavailable", f"No scheduler answers for {model!r} now.", retry_after_s=2) from error
