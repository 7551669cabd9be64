"""``headrace explain`` says what the test made happen, after each kind of failure."""

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
import pytest_asyncio

from compose.stack import records
from compose.stack.data_dir import ComposeError
from contracts import ids, registry
from contracts.bus import BusError
from contracts.messages.attempts import AttemptEvent
from contracts.messages.records import TenantLimits
from contracts.messages.usage import ExplainAnswer
from tests.support import failure_table
from tests.support.cluster import TENANT, Call, Cluster, Service
from tests.support.otlp import OtlpReceiver
from tests.support.polling import until
from tests.support.stack import headrace

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
CLUSTER = {"gateways": 2, "workers": 2, "ledger": True, "sim_slots": 2, "sim_itl_ms": 20, "stall_s": 4, "grace_s": 1}

DIED = "Its worker died, stood still or was cut off."
UNSAFE = "tokens had been produced for a streaming caller, so a repetition would not have been safe."
QUARANTINED = "the request ended 3 workers or engines and was quarantined."


SEEN = {
    "test_a_completed_request_and_one_that_was_refused": ["spike"],
    "test_a_worker_that_dies_before_the_first_token": ["worker dies before the first token"],
    "test_a_worker_that_dies_after_tokens": ["worker dies after tokens were sent"],
    "test_a_worker_that_freezes_and_wakes": ["worker freezes and wakes later"],
    "test_an_engine_that_fails": ["engine fails inside a live worker", "a version misbehaves outside of a roll-out"],
    "test_an_engine_that_hangs": ["engine hangs or dies inside a live worker"],
    "test_a_request_that_kills_workers": ["request that kills engines"],
    "test_a_queue_that_callers_leave_and_time_runs_out_in": [
        "caller leaves while queued",
        "time runs out in the queue",
        "caller leaves while generating",
    ],
    f"test_a_gateway_that_ends[{signal.SIGKILL}]": ["gateway dies"],
    "test_a_worker_that_is_shut_down": ["worker is shut down"],
    "test_what_dies_beside_a_stream_changes_nothing_of_it[scheduler]": ["scheduler dies"],
    "test_what_dies_beside_a_stream_changes_nothing_of_it[nats]": ["NATS restarts or is cut off"],
    "test_what_dies_beside_a_stream_changes_nothing_of_it[ledger]": ["ledger dies"],
}
"""Of the table in compose/OBSERVABILITY.md: the rows whose metric and log line must move, by test."""


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def seen(cluster: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Each row's metric rises at some process and its log line is written, while the test runs or soon after."""
    rows = [failure_table.table()[what] for what in SEEN.get(request.node.name, [])]

    async def figures(row: failure_table.Row) -> dict[str, float]:
        pages = {service.name: await service.page() for service in cluster.services if service.alive}
        if row.metric.startswith("absent("):
            return {"all": row.figure("\n".join(pages.values()))}
        return {name: row.figure(page) for name, page in pages.items()}

    def logged(row: failure_table.Row) -> int:
        return sum(service.says(row.log) for service in cluster.services)

    before = [(await figures(row), logged(row)) for row in rows]
    risen: set[int] = set()

    async def look() -> bool:
        for number, row in enumerate(rows):
            now = await figures(row)
            if any(value > before[number][0].get(name, 0.0) for name, value in now.items()):
                risen.add(number)
        return len(risen) == len(rows)

    async def keep_looking() -> None:
        while not await look():  # noqa: ASYNC110 (each look asks all processes)
            await asyncio.sleep(0.3)

    looking = asyncio.create_task(keep_looking())
    try:
        yield
        await until(looking.done, f"the metrics of {rows} move; those that did: {risen}")
        await until(lambda: all(logged(row) > count for row, (_, count) in zip(rows, before, strict=True)), "log lines")
    finally:
        looking.cancel()


class Told:
    """What the command says of one request."""

    def __init__(self, answer: ExplainAnswer) -> None:
        self.attempts: list[AttemptEvent] = answer.attempts
        self.outcomes = [(event.attempt, event.outcome) for event in answer.attempts]
        self.workers = [event.worker for event in answer.attempts]
        self.tokens = [event.completion_tokens for event in answer.attempts]
        self.billed = [event.attempt for event in answer.attempts if event.billable]
        self.lines = answer.text

    def says(self, *parts: str) -> None:
        """Each part is in a line of its own, in this order; what is charged comes last and fits."""
        lines = iter(self.lines)
        for part in parts:
            assert any(part in line for line in lines), f"{part!r} is not said, or not there:\n" + "\n".join(self.lines)
        end = self.lines[-1]
        if self.billed:
            (event,) = (event for event in self.attempts if event.billable)
            used = f"{event.prompt_tokens} prompt and {event.completion_tokens} completion tokens"
            assert end.startswith(f"Billed: {used} of attempt {event.attempt};")
        else:
            assert end == "Nothing is billed."


async def told(cluster: Cluster, call: Call | str, attempts: int = 1) -> Told:
    """What the command says once the ledger knows of so many attempts, beside the answer that it was given."""
    request_id = call if isinstance(call, str) else call.request_id

    async def known() -> ExplainAnswer | None:
        async with cluster.bus() as bus:
            with suppress(ComposeError, BusError):
                answer = await records.explain(bus, request_id)
                return answer if len(answer.attempts) >= attempts else None
        return None

    answer: ExplainAnswer = await until(known, f"the ledger has {attempts} attempts of {request_id}")
    shown = await explain(cluster, request_id)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[: len(answer.text)] == answer.text
    assert answer.times is not None and shown.stdout.splitlines()[-1].startswith("It took ")
    return Told(answer)


async def explain(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(headrace, "explain", *arguments, **cluster.environment)


async def killed(cluster: Cluster) -> str:
    """Kill the worker that holds something; the name it had."""
    worker = await cluster.busy_worker()
    worker.kill()
    return worker.joined_as


@asynccontextmanager
async def kept_up(services: Sequence[Service]) -> AsyncIterator[None]:
    """Start again what dies, as a supervisor does."""

    async def keep() -> None:
        while True:
            for service in services:
                if not service.alive:
                    service.start()
            await asyncio.sleep(0.2)

    keeper = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeper.cancel()


async def test_a_completed_request_and_one_that_was_refused(cluster: Cluster) -> None:
    done = await cluster.ask(max_tokens=3, headers={"X-Request-Id": "mine"}).done()
    of_done = await told(cluster, done)
    assert (of_done.outcomes, of_done.tokens, of_done.billed) == ([(1, "completed")], [3], [1])
    of_done.says(
        f"Request {done.request_id} of tenant {TENANT}",
        "The caller's own id is mine.",
        "8 tokens reserved",
        "(finish reason length), as the worker reports.",
        "5 prompt tokens (0 cached), 3 completion tokens (0 reasoning); billed.",
    )
    structured = json.loads((await explain(cluster, done.request_id, "--json")).stdout)
    assert structured["text"] == of_done.lines
    assert msgspec.convert(structured["attempts"], list[AttemptEvent]) == of_done.attempts
    busy = cluster.ask(max_tokens=2000)
    await busy.shows(1)
    await limit(cluster, TenantLimits(concurrency=1))
    try:
        refused = await cluster.ask(max_tokens=3).done()
    finally:
        await busy.leave()
        await limit(cluster, TenantLimits())
    assert refused.status == 429, refused.story()
    nothing = await explain(cluster, ids.request_id())
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert "holds no attempt of this request: it was refused, has not ended, or never came" in nothing.stderr

    async def said() -> str:
        return (await explain(cluster, refused.request_id)).stdout

    text = await until(said, "the ledger has the gateway's word")
    assert "refused with status 429 (rate_limit_exceeded)" in text and "Nothing is billed." in text


async def limit(cluster: Cluster, limits: TenantLimits) -> None:
    """Change the tenant's limits, and wait until they hold."""
    async with cluster.bus() as bus:
        await registry.change_tenant(bus, TENANT, lambda record: msgspec.structs.replace(record, limits=limits))

    async def holds() -> bool:
        return ((await cluster.ask(max_tokens=1).done()).status == 200) == (limits.concurrency is None)

    await until(holds, "the limit holds")


async def test_a_worker_that_dies_before_the_first_token(cluster: Cluster) -> None:
    call = cluster.ask(simulate={"tokens": ["a", "b"], "ttft_ms": 1500})
    dead = await killed(cluster)
    await call.done()
    assert call.complete and call.text == "ab", call.story()
    of_call = await told(cluster, call, 2)
    assert of_call.outcomes == [(1, "lost"), (2, "completed")] and of_call.workers[0] == dead != of_call.workers[1]
    assert (of_call.tokens, of_call.billed) == ([0, 2], [2])
    of_call.says(
        f"Attempt 1: version sim-1 on worker {dead}, dispatched after",
        f"no tokens known from its worker's heartbeats; not billed. {DIED} Another attempt followed.",
        f"Attempt 2: version sim-1 on worker {of_call.workers[1]}, dispatched after",
        "5 prompt tokens (0 cached), 2 completion tokens (0 reasoning); billed.",
    )


async def test_a_request_is_followed_through_the_loss_of_its_worker(cluster: Cluster) -> None:
    """By its caller's own id, from before it came to its end."""
    following = asyncio.create_task(
        asyncio.to_thread(headrace, "trace", "followed", "--follow", "--json", **cluster.environment)
    )
    await asyncio.sleep(1)  # However long the command takes to start: it finds what is there, or waits for it.
    call = cluster.ask(simulate={"tokens": ["a"] * 30, "ttft_ms": 1500}, headers={"X-Request-Id": "followed"})
    dead = await killed(cluster)
    await call.done()
    done = await asyncio.wait_for(following, 30)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert {step["request_id"] for step in steps} == {call.request_id}
    exact = [(step["what"], step["attempt"]) for step in steps if step["what"] not in ("prefill", "decoding")]
    assert exact == [
        ("admitted", 0), ("queued", 0), ("dispatched", 1), ("attempt_ended", 1), ("retry", 2), ("dispatched", 2),
        ("first_token", 2), ("attempt_ended", 2), ("relayed", 2), ("ended", 2),
    ]  # fmt: skip
    by_name = {(step["what"], step["attempt"]): step["facts"] for step in steps}
    assert by_name["attempt_ended", 1]["outcome"] == "lost" and by_name["attempt_ended", 1]["worker"] == dead
    assert by_name["dispatched", 2]["worker"] != dead and by_name["ended", 2]["outcome"] == "completed"
    assert by_name["attempt_ended", 2]["completion_tokens"] == 30 == call.tokens


def measured(receiver: OtlpReceiver) -> bool:
    """Both requests were measured under the names of OpenTelemetry's GenAI conventions, the lost attempt in none."""
    of = {"gen_ai__request__model": "simulated", "gen_ai__operation__name": "chat", "headrace__version": "sim-1"}
    found = {
        name: receiver.histogram(f"gen_ai.{name}", **of, **more)
        for name, more in (
            ("server.request.duration", {}),
            ("server.time_to_first_token", {}),
            ("server.time_per_output_token", {}),
            ("client.token.usage", {"gen_ai__token__type": "output"}),
        )
    }
    if any(each is None or each.values < 2 for each in found.values()):
        return False
    units = {name: each.unit for name, each in found.items() if each is not None and each.exponential}
    assert units == dict.fromkeys(found, "s") | {"client.token.usage": "{token}"}
    duration, usage = found["server.request.duration"], found["client.token.usage"]
    assert duration is not None and usage is not None
    assert 1.5 < duration.most <= duration.sum and usage.sum >= 4
    return True


async def test_a_retried_request_is_one_trace(cluster: Cluster) -> None:
    """In the caller's own trace, which need not say that it is sampled: a lost attempt is reason enough."""
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    (ledger,) = cluster.ledgers
    with OtlpReceiver() as receiver:
        collected = {
            "HEADRACE_OTLP_ENDPOINT": receiver.url,
            "HEADRACE_TRACE_SAMPLE": "0",
            "HEADRACE_OTLP_METRICS_ENDPOINT": receiver.metrics_url,
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }
        ledger.settings |= collected
        try:
            ledger.kill()
            ledger.start()
            await cluster.all_ready()
            plain = await cluster.ask(max_tokens=2).done()
            call = cluster.ask(simulate={"tokens": ["a", "b"], "ttft_ms": 1500}, headers={"traceparent": parent})
            await killed(cluster)
            await call.done()
            assert call.complete and call.text == "ab", call.story()
            spans = await until(lambda: receiver.of(parent[3:35]), "the trace comes")
            assert await ledger.metric("headrace_ledger_spans_total") >= len(spans)
            await until(lambda: measured(receiver), "both requests are in the metrics")
        finally:
            for name in collected:
                del ledger.settings[name]
            ledger.kill()
    names = {span.span_id: span.name for span in spans}
    root, *others = spans
    assert (root.parent, root.attributes["headrace.request_id"]) == (parent[36:52], call.request_id)
    assert root.attributes["gen_ai.usage.output_tokens"] == 2 and not root.error
    assert {span.name: names[span.parent] for span in others} == {
        **dict.fromkeys(("edge", "admission", "queue 1", "attempt 1", "queue 2", "attempt 2"), root.name),
        **dict.fromkeys(("dispatch 2", "prefill 2", "decode 2"), "attempt 2"),
        **dict.fromkeys(("relay", "caller", "ledger"), root.name),
    }
    by_name = {span.name: span for span in spans}
    assert by_name["attempt 1"].error == "worker_lost" and not by_name["attempt 2"].error
    assert by_name["attempt 2"].links == (by_name["attempt 1"].span_id,)
    assert all(span.start_ns <= span.end_ns for span in spans)
    assert not receiver.of(plain.request_id.replace("-", "")), "what went well is not sampled"


async def test_a_worker_that_dies_after_tokens(cluster: Cluster) -> None:
    call = cluster.ask(max_tokens=2000)
    await call.shows(40)
    dead = await killed(cluster)
    await call.done()
    assert call.code == "worker_lost", call.story()
    of_call = await told(cluster, call)
    assert (of_call.outcomes, of_call.workers, of_call.billed) == ([(1, "lost")], [dead], [])
    assert 0 < of_call.tokens[0] <= call.tokens + 5
    of_call.says("lost after", f"at least 5 prompt tokens (0 cached), {of_call.tokens[0]} completion tokens", UNSAFE)


async def test_a_worker_that_freezes_and_wakes(cluster: Cluster) -> None:
    call = cluster.ask(max_tokens=2000)
    await call.shows(40)
    frozen = await cluster.busy_worker()
    name, evictions = frozen.joined_as, frozen.says("evicted")
    frozen.freeze()
    await call.done()
    asleep = await told(cluster, call)
    frozen.thaw()
    await until(lambda: frozen.says("evicted") > evictions, "it was told")
    await cluster.whole()
    awake = await told(cluster, call)
    assert awake.lines == asleep.lines, "what it did too late changes nothing"
    assert (awake.outcomes, awake.workers, awake.billed) == ([(1, "lost")], [name], [])
    awake.says(f"Worker {name} was not heard for too long.", DIED, UNSAFE)


async def test_an_engine_that_fails(cluster: Cluster) -> None:
    early = await cluster.ask(max_tokens=20, simulate={"fail_after": 0}).done()
    late = await cluster.ask(max_tokens=20, simulate={"fail_after": 7}).done()
    gathered = await cluster.ask(stream=False, max_tokens=20, simulate={"fail_after": 7}).done()
    twice = [(1, "failed"), (2, "failed")]
    for call, outcomes, tokens, why in (
        (early, twice, [0, 0], "it had been tried twice, which is the most."),
        (late, twice[:1], [7], UNSAFE),
        (gathered, twice, [7, 7], "it had been tried twice, which is the most."),
    ):
        of_call = await told(cluster, call, len(outcomes))
        assert (of_call.outcomes, of_call.tokens, of_call.billed) == (outcomes, tokens, [])
        of_call.says(
            "(engine_error: the engine failed as the request asked), as the worker reports.",
            f"{tokens[0]} completion tokens (0 reasoning); not billed.",
            f"No attempt followed attempt {len(outcomes)}: {why}",
        )


async def test_an_engine_that_hangs(cluster: Cluster) -> None:
    call = await cluster.ask(max_tokens=20, simulate={"hang_after": 5}).done()
    of_call = await told(cluster, call)
    assert (of_call.outcomes, of_call.tokens, of_call.billed) == ([(1, "failed")], [5], [])
    of_call.says("(engine_error: the engine makes no progress)", "Its engine died or hung.", UNSAFE)


async def test_a_request_that_kills_workers(cluster: Cluster) -> None:
    async with kept_up(cluster.workers):
        simulate = {"exit_after": 0, "ttft_ms": 600, "tokens": ["x"]}
        call = await cluster.ask(stream=False, simulate=simulate).done()
        assert call.status == 500 and '"request_quarantined"' in call.data[0], call.story()
        of_call = await told(cluster, call, 3)
    assert of_call.outcomes == [(1, "lost"), (2, "lost"), (3, "lost")] and len(set(of_call.workers)) == 3
    assert of_call.billed == []
    of_call.says("Attempt 1", f"{DIED} Another attempt followed.", "Attempt 3", DIED, QUARANTINED)


async def test_a_queue_that_callers_leave_and_time_runs_out_in(cluster: Cluster) -> None:
    before = await cluster.newest()
    # Bodies of their own: of one that workers died with earlier tests few copies would run side by side.
    busy = [cluster.ask(max_tokens=2000, words=[f"busy{number}"]) for number in range(4)]
    for call in busy:
        await call.shows(5)
    leaving = cluster.ask(max_tokens=5)
    await cluster.runs(4, 1)
    late = await cluster.ask(max_tokens=5, headers={"X-Headrace-Deadline-Ms": "800"}).done()
    assert late.status == 504, late.story()
    await leaving.leave()
    await busy[0].leave()
    await cluster.ended(busy[0].request_id)
    ends = await cluster.events_since(before)
    (left,) = [event.request_id for event in ends if event.outcome == "cancelled" and not event.attempt]
    queued = "Before any dispatch:", "It was never dispatched to a worker."
    of_left = await told(cluster, left)
    assert (of_left.outcomes, of_left.tokens, of_left.billed) == ([(0, "cancelled")], [0], [])
    of_left.says(*queued)
    of_left.says("(client_disconnected: the caller hung up), as the scheduler reports.")
    of_late = await told(cluster, late)
    assert (of_late.outcomes, of_late.tokens, of_late.billed) == ([(0, "expired")], [0], [])
    of_late.says(*queued)
    of_late.says("(deadline_exceeded: No first token within the deadline; waited")
    of_busy = await told(cluster, busy[0])
    assert (of_busy.outcomes, of_busy.billed) == ([(1, "cancelled")], [1])
    assert busy[0].tokens <= of_busy.tokens[0] < 2000
    of_busy.says(
        "(client_disconnected: the caller hung up), as the worker reports.",
        f"{of_busy.tokens[0]} completion tokens (0 reasoning); billed.",
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_gateway_that_ends(cluster: Cluster, how: signal.Signals) -> None:
    call = cluster.ask(gateway=1, max_tokens=2000)
    await call.shows(5)
    cluster.gateways[1].signal(how)
    await call.done()
    of_call = await told(cluster, call)
    assert (of_call.outcomes, of_call.billed) == ([(1, "cancelled")], []), "nobody pays for our failures"
    assert call.tokens <= of_call.tokens[0] < 2000
    of_call.says(
        "(gateway_lost: its gateway was lost)" if how == signal.SIGKILL else "(shutdown: its gateway was shut down)"
    )


async def test_a_worker_that_is_shut_down(cluster: Cluster) -> None:
    call = cluster.ask(max_tokens=2000)
    await call.shows(5)
    (await cluster.busy_worker()).signal(signal.SIGTERM)
    await call.done()
    assert call.code == "shutting_down", call.story()
    of_call = await told(cluster, call)
    assert (of_call.outcomes, of_call.billed) == ([(1, "failed")], [])
    # The token of the turn in which the engine is stopped is counted, and may be fetched by nobody.
    assert call.tokens <= of_call.tokens[0] <= call.tokens + 1
    of_call.says("(shutting_down: the worker is shutting down), as the worker reports.", UNSAFE)


@pytest.mark.parametrize("what", ["scheduler", "nats", "ledger"])
async def test_what_dies_beside_a_stream_changes_nothing_of_it(cluster: Cluster, what: str) -> None:
    call = cluster.ask(max_tokens=150)
    await call.shows(5)
    if what == "nats":
        cluster.nats.restart()
        await call.done()
    else:
        (service,) = cluster.schedulers if what == "scheduler" else cluster.ledgers
        service.kill()
        await call.done()
        if what == "ledger":
            away = await explain(cluster, call.request_id)
            assert (away.returncode, away.stdout) == (1, "") and "no answer" in away.stderr
        service.start()
    assert call.complete and call.tokens == 150, call.story()
    of_call = await told(cluster, call)
    assert (of_call.outcomes, of_call.tokens, of_call.billed) == ([(1, "completed")], [150], [1])
    of_call.says("completed after", "150 completion tokens (0 reasoning); billed.")
