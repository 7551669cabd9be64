"""What OpenTelemetry's GenAI conventions measure of a server, from gateways' words and attempts' ends; pure.

Names and attributes are those of the repository semantic-conventions-genai (in development); what has no name there is
told apart by attributes of ours, all of the operator's choosing.
"""

from collections.abc import Iterator
from typing import NamedTuple

from contracts.messages.attempts import AttemptEvent
from contracts.messages.deliveries import Delivery
from contracts.workload import workload
from ledger.core.spans import PROVIDER, operation

DURATION = "gen_ai.server.request.duration"
TTFT = "gen_ai.server.time_to_first_token"
TPOT = "gen_ai.server.time_per_output_token"
USAGE = "gen_ai.client.token.usage"
INSTRUMENTS = {
    DURATION: ("s", "From a request's first byte to its last, over HTTP"),
    TTFT: ("s", "From a request's first byte to its first chunk, streams that were completed"),
    TPOT: ("s", "Time per output token after the first, completed attempts"),
    USAGE: ("{token}", "Billable tokens of attempts"),
}
"""Histograms: unit and description."""


class Measure(NamedTuple):
    """One value of one histogram."""

    name: str
    value: float
    attributes: dict[str, str]


def of_delivery(delivery: Delivery) -> Iterator[Measure]:
    """A request over HTTP. What the bus took the gateway did not see the end of."""
    if not delivery.saw_the_end:
        return
    of = _attributes(delivery)
    done = delivery.outcome == "completed"
    error = {} if done else {"error.type": delivery.code or delivery.outcome}
    yield Measure(DURATION, delivery.total_ms / 1000, of | error)
    if done and delivery.stream and delivery.first_chunk_ms:
        yield Measure(TTFT, delivery.first_chunk_ms / 1000, of)


def of_attempt(event: AttemptEvent) -> Iterator[Measure]:
    """An attempt that the ledger has stored."""
    of = _attributes(event) | {"headrace.priority": event.priority}
    later = event.completion_tokens / max(1, event.choices) - 1
    if event.outcome == "completed" and event.first_token_at_ms and later >= 1:
        yield Measure(TPOT, max(0, event.ended_at_ms - event.first_token_at_ms) / 1000 / later, of)
    if event.billable:
        for kind, tokens in (("input", event.prompt_tokens), ("output", event.completion_tokens)):
            yield Measure(USAGE, tokens, of | {"gen_ai.token.type": kind})


def _attributes(known: Delivery | AttemptEvent) -> dict[str, str]:
    found = {
        "gen_ai.operation.name": operation(known.endpoint),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": known.model,
        "headrace.version": known.version,
        "headrace.workload": workload(known.prompt_tokens),
    }
    return {name: value for name, value in found.items() if value}
