"""What operators ask of a model's owner and of its workers while they run, and of the quarantine."""

import asyncio
import contextlib
import time

import msgspec

from contracts import shards, subjects, topology
from contracts.bus import Bus, BusError, Unavailable
from contracts.errors import HeadraceError
from contracts.messages.attempts import Quarantined
from contracts.messages.base import Codec, Outcome
from contracts.messages.control import CancelAnswer, CancelRequest, ControlAnswer, Hold, WorkerHeartbeat
from contracts.messages.queues import OpenRequest, QueueAnswer, QueueQuery, merged
from contracts.registry import check_name, find_model, models

ASK_TIMEOUT_S = 2.0
CANCEL_S_MAX = 10.0
CANCEL_AGAIN_S = 0.2

_query: Codec[QueueQuery] = Codec(QueueQuery)
_answer: Codec[QueueAnswer] = Codec(QueueAnswer)
_cancel: Codec[CancelRequest] = Codec(CancelRequest)
_cancelled: Codec[CancelAnswer] = Codec(CancelAnswer)
_hold: Codec[Hold] = Codec(Hold)
_held: Codec[ControlAnswer] = Codec(ControlAnswer)
_quarantined: Codec[Quarantined] = Codec(Quarantined)


async def queue(bus: Bus, model: str, *, requests: int = 0, request_id: str = "") -> QueueAnswer:
    """Live queues of one model, all its shards together, or of the shard of that name; raises HeadraceError.

    With so many of the open requests, or the one.
    """
    asked = (
        shard_queue(bus, shard, requests=requests, request_id=request_id) for shard in await shard_names(bus, model)
    )
    answer = merged(await asyncio.gather(*asked))
    return msgspec.structs.replace(answer, requests=answer.requests[:requests])


async def shard_names(bus: Bus, model: str) -> list[str]:
    """Of a model, in service or not, or only ``model`` where that is the name of a shard. Raises HeadraceError."""
    if shards.number_of(check_name("model name", model)):
        return [model]
    record = await find_model(bus, model)
    return shards.names(model, record.shards) if record else [model]


async def shard_queue(bus: Bus, shard: str, *, requests: int = 0, request_id: str = "") -> QueueAnswer:
    """Live queues of one shard; raises HeadraceError."""
    query = QueueQuery(requests=requests, request_id=request_id)
    try:
        subject = subjects.queues(check_name("model name", shard))
        return _answer.decode(await bus.request(subject, _query.encode(query), timeout_s=ASK_TIMEOUT_S))
    except (Unavailable, msgspec.MsgspecError) as error:
        raise HeadraceError("unavailable", f"No scheduler answers for {shard!r} now.", retry_after_s=2) from error


async def open_request(bus: Bus, model: str, request_id: str) -> tuple[str, OpenRequest]:
    """One that has not ended, and its shard; raises HeadraceError."""
    for shard in await shard_names(bus, model):
        for found in (await shard_queue(bus, shard, requests=1, request_id=request_id[:36])).requests:
            if found.request_id == request_id:
                return shard, found
    raise HeadraceError("not_found", f"{model!r} has no open request {request_id!r}: it has ended, or never was.")


async def model_of_request(bus: Bus, request_id: str) -> str:
    """The model that has it open; empty when none says so."""
    for record in await models(bus):
        with contextlib.suppress(HeadraceError):
            await open_request(bus, record.name, request_id)
            return record.name
    return ""


async def model_of_worker(bus: Bus, worker: str) -> tuple[str, str]:
    """The model of a worker, and its name on the bus, of which ``worker`` may be the process's alone (``worker-1``).

    Raises HeadraceError.
    """
    for record in await models(bus):
        with contextlib.suppress(HeadraceError):
            for beat in (await queue(bus, record.name)).workers:
                if worker in (beat.worker, beat.worker.rpartition("-")[0]):
                    return record.name, beat.worker
    raise HeadraceError("not_found", f"no model has a worker {worker!r}")


async def cancel(bus: Bus, model: str, request: OpenRequest) -> Outcome | None:
    """End a request, for all who read it and at nobody's cost; what it ended as. Raises HeadraceError."""
    asked = _cancel.encode(CancelRequest(request_id=request.request_id, reason="operator_cancelled"))
    subject = subjects.gateway_cancel(model, request.tenant)
    until = time.monotonic() + CANCEL_S_MAX
    while time.monotonic() < until:
        try:
            answer = _cancelled.decode(await bus.request(subject, asked, timeout_s=ASK_TIMEOUT_S))
            if answer.durable:
                return answer.outcome
        except (Unavailable, msgspec.MsgspecError):
            pass  # a new owner may be taking over: it is asked again
        await asyncio.sleep(CANCEL_AGAIN_S)
    raise HeadraceError("unavailable", "Nobody confirms the end; it may still come.", retry_after_s=2)


async def find_worker(bus: Bus, model: str, name: str) -> tuple[WorkerHeartbeat, QueueAnswer]:
    """A worker by its name on the bus, and what its owner says; raises HeadraceError."""
    for shard in await shard_names(bus, model):
        answer = await shard_queue(bus, shard)
        for beat in answer.workers:
            if beat.worker == name:
                return beat, answer
    raise HeadraceError("not_found", f"{model!r} has no worker {name!r}.")


async def hold(bus: Bus, worker: str, order: Hold) -> None:
    """Let it take nothing more, or take work again; raises HeadraceError."""
    try:
        data = await bus.request(subjects.control(worker), _hold.encode(order), timeout_s=ASK_TIMEOUT_S)
        stale = _held.decode(data).status == "stale"
    except (BusError, msgspec.MsgspecError) as error:
        raise HeadraceError("unavailable", f"The worker {worker} does not answer.", retry_after_s=2) from error
    if stale:
        raise HeadraceError("conflict", f"The worker {worker} has a new owner: try again.")


async def quarantined(bus: Bus, request_id: str = "*") -> list[Quarantined]:
    """Requests in quarantine, oldest first; all of them, or the one."""
    subject = quarantine_subject(request_id)
    return [_quarantined.decode(message.data) async for message in bus.jetstream.read(topology.QUARANTINE, subject)]


def quarantine_subject(request_id: str) -> str:
    """Over all models; ``*`` for every request."""
    token = request_id if request_id == "*" else subjects.encode(check_name("request id", request_id))
    return f"quarantine.v1.*.{token}"
