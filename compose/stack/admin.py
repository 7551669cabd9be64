"""What the command line asks of a running stack besides its records (contracts.registry): usage, queues, quarantine."""

import time
from pathlib import Path

from compose.stack.data_dir import ComposeError
from contracts import subjects, topology
from contracts.bus import Bus
from contracts.messages.attempts import Quarantined
from contracts.messages.base import Codec
from contracts.messages.queues import QueueAnswer
from contracts.registry import check_name

_QUARANTINED = Codec[Quarantined](Quarantined)
_QUEUE_ANSWER = Codec[QueueAnswer](QueueAnswer)


def read_pepper(path: Path | None) -> bytes:
    """The pepper's bytes, as gateways read them; raises ComposeError."""
    if path is None:
        raise ComposeError("the key pepper is not known: set HEADRACE_PEPPER_FILE to the gateways' file")
    try:
        pepper = path.read_bytes().strip()
    except OSError as error:
        raise ComposeError(f"the key pepper cannot be read: {path}: {error.strerror}") from error
    if not pepper:
        raise ComposeError(f"the key pepper is empty: {path}")
    return pepper


# Queues --------------------------------------------------------------------------------------------------


async def queue(bus: Bus, model: str) -> QueueAnswer:
    """Live queues of one model, from its scheduler."""
    return _QUEUE_ANSWER.decode(await bus.request(subjects.queues(model), b"{}"))


# Quarantine ------------------------------------------------------------------------------------------------


async def quarantined(bus: Bus, request_id: str = "*") -> list[Quarantined]:
    """Requests in quarantine, oldest first; all of them, or the one."""
    subject = _quarantine_subject(request_id)
    return [_QUARANTINED.decode(message.data) async for message in bus.jetstream.read(topology.QUARANTINE, subject)]


async def drop_quarantined(bus: Bus, request_id: str) -> bool:
    """Forget one; False when it is not there."""
    return await bus.jetstream.purge(topology.QUARANTINE, _quarantine_subject(request_id)) > 0


def _quarantine_subject(request_id: str) -> str:
    """Over all models; ``*`` for every request."""
    token = request_id if request_id == "*" else subjects.encode(check_name("request id", request_id))
    return f"quarantine.v1.*.{token}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
