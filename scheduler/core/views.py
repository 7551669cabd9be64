"""What the core shows of itself: one request's status, the live queues, and the rules that always hold."""

import heapq

from contracts.messages.control import RequestState, StatusAnswer
from contracts.messages.queues import ClockSkew, OpenRequest, QueueAnswer, QueueQuery, TenantQueue
from scheduler.core import outcomes
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.request import Request
from scheduler.core.transitions import WAITING, State

_SHOWN: dict[State, RequestState] = {
    State.ADMITTED: "admitted",
    State.QUEUED: "queued",
    State.DISPATCHING: "queued",
    State.DISPATCHED: "dispatched",
    State.RUNNING: "running",
    State.ENDING: "running",
    State.CLEARING: "queued",
}


_PLAIN = QueueQuery()


def status(life: Lifecycle, tenant: str, request_id: str) -> StatusAnswer:
    """What ``tenant`` may know of a request; another tenant's is unknown to it."""
    request = life.requests.get(request_id)
    if request is not None and request.tenant == tenant:
        return StatusAnswer(state=_SHOWN[request.state], attempt=request.open_attempt, worker=request.worker)
    ended = life.tombstones.ended(request_id)
    if request is None and ended is not None and ended.event.tenant == tenant:
        event = ended.event
        return StatusAnswer(
            state="ended",
            attempt=event.attempt,
            worker=event.worker,
            outcome=event.outcome,
            last_seq=event.last_seq,
            error=ended.error,
            end=outcomes.end_data(event),
        )
    return StatusAnswer(state="unknown")


def queues(life: Lifecycle, query: QueueQuery = _PLAIN) -> QueueAnswer:
    """The live queues, for operators and gateways' readiness; as of the last step."""
    oldest: dict[str, int] = {}
    running: dict[str, int] = {}
    for request in life.requests.values():
        if request.state in WAITING:
            since = request.envelope.admitted_at_ms
            oldest[request.tenant] = min(oldest.get(request.tenant, since), since)
        else:
            running[request.tenant] = running.get(request.tenant, 0) + 1
    tenants = []
    for name, quota in sorted(life.admission.quotas.items()):
        if quota.open:
            share = life.queue.shares.get(name)
            tenants.append(
                TenantQueue(
                    tenant=name,
                    waiting=quota.waiting,
                    waiting_tokens=quota.waiting_tokens,
                    running=running.get(name, 0),
                    reserved_tokens=quota.reserved_tokens,
                    served_counter=share.counter if share else 0.0,
                    oldest_wait_ms=life.now_ms - oldest[name] if name in oldest else 0,
                )
            )
    return QueueAnswer(
        model=life.model,
        owner=life.owner,
        epoch=life.epoch,
        waiting=life.admission.waiting,
        running=len(life.requests) - life.admission.waiting,
        reserved_tokens=life.admission.reserved_tokens,
        workers=[worker.beat for worker in life.pool.workers.values()],
        tenants=tenants,
        clocks=[ClockSkew(process=name, ahead_ms=ahead) for name, ahead in life.clocks.apart().items()],
        requests=_open_requests(life, query) if query.requests else [],
        replicas=life.replicas.plan,
    )


def _open_requests(life: Lifecycle, query: QueueQuery) -> list[OpenRequest]:
    if query.request_id:
        found = [request for request in (life.requests.get(query.request_id),) if request is not None]
    else:
        found = heapq.nsmallest(query.requests, life.requests.values(), key=lambda each: each.envelope.admitted_at_ms)
    return [_open_request(request, life.now_ms) for request in found]


def _open_request(request: Request, now_ms: int) -> OpenRequest:
    envelope = request.envelope
    return OpenRequest(
        request_id=request.id,
        tenant=request.tenant,
        key_id=envelope.key_id,
        version=envelope.version,
        priority=envelope.priority,
        state=_SHOWN[request.state],
        attempt=request.attempt,
        worker=request.worker if request.state not in WAITING else "",
        age_ms=max(0, now_ms - envelope.admitted_at_ms),
        prompt_tokens=envelope.prompt_tokens,
        max_output_tokens=envelope.max_output_tokens,
        completion_tokens=request.progress.completion_tokens if request.progress else 0,
    )


def check_invariants(life: Lifecycle) -> None:
    """Raise AssertionError when the state contradicts itself; tests call it after every step."""
    requests = list(life.requests.values())
    admission = life.admission
    waiting = [request for request in requests if request.state in WAITING]
    queued = [request for request in waiting if request.state is State.QUEUED]
    assert admission.waiting == len(waiting), (admission.waiting, len(waiting))
    assert admission.waiting_tokens == sum(request.cost.total for request in waiting)
    assert admission.reserved_tokens == sum(request.cost.total for request in requests)
    assert admission.body_bytes == sum(request.envelope.body_bytes for request in requests)
    assert len(life.queue) == len(queued)
    assert all(request.id in life.queue for request in queued)
    assert not any(life.tombstones.ended(request.id) for request in requests)
    assert len(life.keys) <= sum(request.envelope.idempotency is not None for request in requests)
    for name, quota in admission.quotas.items():
        own = [request for request in requests if request.tenant == name]
        assert quota.open == len(own), name
        assert quota.waiting == sum(request.state in WAITING for request in own), name
        assert quota.reserved_tokens == sum(request.cost.total for request in own), name
        assert quota.body_bytes == sum(request.envelope.body_bytes for request in own), name
    for name, share in life.queue.shares.items():
        own = [request for request in requests if request.tenant == name]
        assert share.waiting == sum(request.state is State.QUEUED for request in own), name
        assert share.running == sum(request.dispatched_at_ms > 0 for request in own), name
    for worker in life.pool.workers.values():
        assert worker.slots_reserved == sum(load.slots for load in worker.work.values())
        assert worker.kv_reserved == sum(load.kv_tokens for load in worker.work.values())
        assert worker.slots_reserved <= worker.beat.slots or worker.beat.state == "starting"
        for request_id in worker.work:
            assert life.requests[request_id].worker == worker.beat.worker
            assert life.requests[request_id].envelope.version in ("", worker.beat.version), "it keeps its version"
    for request in requests:
        assert request.state not in (State.NEW, State.SETTLED), request
        assert not (request.state is State.QUEUED and request.dispatched_at_ms), request
