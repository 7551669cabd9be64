"""What was seen of each request, and what it comes to: latencies, throughput, goodput. Pure.

All delays count from the instant at which a request was due, not from the one at which it was sent: a generator or
server that falls behind delays its callers, and leaving that out would flatter it (coordinated omission). How late it
was sent is told beside.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

Span = Literal["ttft", "tpot", "itl", "e2e"]
SPANS: dict[Span, str] = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end to end",
}
QUANTILES = (50.0, 90.0, 95.0, 99.0)


class Seen(msgspec.Struct):
    """One request. Times in seconds after the run's start."""

    number: int
    turn: int
    tenant: int
    due_s: float
    sent_s: float = math.nan
    first_s: float = math.nan
    """Its first token came."""
    end_s: float = math.nan
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """As the server's usage says."""
    gaps: list[float] = []
    """Between events that carried text."""
    status: int = 0
    """Of HTTP; 0: there was no answer."""
    error: str = ""
    """Why it is no good: the server's code, or what happened to the connection."""
    request_id: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        return self.first_s - self.due_s

    @property
    def e2e(self) -> float:
        return self.end_s - self.due_s

    @property
    def tpot(self) -> float:
        """nan for an answer of one token."""
        return (self.end_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan

    @property
    def itls(self) -> list[float]:
        """A pause a token: an event that carries several tokens has its gap shared among them."""
        tokens = self.output_tokens - 1
        if not self.gaps or tokens <= len(self.gaps):
            return self.gaps
        each = tokens / len(self.gaps)
        return [gap / each for gap in self.gaps]


class Quantiles(msgspec.Struct, frozen=True):
    """In milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class Summary(msgspec.Struct, frozen=True):
    """A run."""

    duration_s: float
    completed: int
    failed: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    """Tokens a second."""
    good: int
    request_goodput: float
    """Requests within the service level a second; those that failed are not good."""
    token_goodput: float
    spans: dict[Span, Quantiles | None]
    """None: there was nothing to measure."""
    send_lag_p99_ms: float
    """How late this generator was: much of the first token's delay means that it was too small for the load."""


def is_good(seen: Seen, level: dict[Span, float]) -> bool:
    """Whether a request ended well and within ``level``, in milliseconds."""
    return seen.ok and not any(value * 1000 > level[span] for span, value in _values(seen) if span in level)


def _values(seen: Seen) -> Iterator[tuple[Span, float]]:
    yield "ttft", seen.ttft
    yield "e2e", seen.e2e
    if not math.isnan(seen.tpot):
        yield "tpot", seen.tpot
    for gap in seen.itls:
        yield "itl", gap


def summarize(line: Sequence[Seen], level: dict[Span, float]) -> Summary:
    """The whole run's figures."""
    done = [seen for seen in line if seen.ok]
    good = [seen for seen in done if is_good(seen, level)]
    ends = [seen.end_s for seen in line if not math.isnan(seen.end_s)]
    duration = max(ends, default=0.0) - min((seen.due_s for seen in line), default=0.0)
    values: dict[Span, list[float]] = {span: [] for span in SPANS}
    for seen in done:
        for span, value in _values(seen):
            values[span].append(value * 1000)
    errors: dict[str, int] = {}
    for seen in line:
        if seen.error:
            errors[seen.error] = errors.get(seen.error, 0) + 1

    def per_s(count: float) -> float:
        return count / duration if duration > 0 else math.nan

    return Summary(
        duration_s=duration,
        completed=len(done),
        failed=len(line) - len(done),
        errors=dict(sorted(errors.items(), key=lambda item: -item[1])),
        prompt_tokens=sum(seen.prompt_tokens for seen in done),
        cached_tokens=sum(seen.cached_tokens for seen in done),
        output_tokens=sum(seen.output_tokens for seen in done),
        request_throughput=per_s(len(done)),
        output_throughput=per_s(sum(seen.output_tokens for seen in done)),
        good=len(good),
        request_goodput=per_s(len(good)),
        token_goodput=per_s(sum(seen.output_tokens for seen in good)),
        spans={span: quantiles(found) for span, found in values.items()},
        send_lag_p99_ms=percentile(sorted((s.sent_s - s.due_s) * 1000 for s in line if not math.isnan(s.sent_s)), 0.99),
    )


def quantiles(values: list[float]) -> Quantiles | None:
    """None when there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return Quantiles(statistics.fmean(ordered), *(percentile(ordered, share / 100) for share in QUANTILES))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of values in order, between the two next to it, as numpy has it; nan when there are none."""
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def vllm_result(line: Sequence[Seen], summary: Summary, about: dict[str, Any]) -> dict[str, Any]:
    """As ``vllm bench serve --save-result --save-detailed`` writes it, so that its readers read ours.

    Times in seconds in lists, in milliseconds in totals; ``itls`` are the gaps between events, as there. Failed
    requests are in the lists, too, with an error. What there is no place for there has names of our own.
    """
    result: dict[str, Any] = {
        **about,
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.prompt_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.request_goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.output_throughput + summary.prompt_tokens / (summary.duration_s or math.nan),
        "token_goodput": summary.token_goodput,
        "cached_tokens": summary.cached_tokens,
        "send_lag_p99_ms": summary.send_lag_p99_ms,
        "error_counts": summary.errors,
        "input_lens": [seen.prompt_tokens for seen in line],
        "output_lens": [seen.output_tokens for seen in line],
        "ttfts": [seen.ttft if seen.ok else 0.0 for seen in line],
        "itls": [seen.gaps if seen.ok else [] for seen in line],
        "start_times": [seen.due_s for seen in line],
        "errors": [seen.error for seen in line],
    }
    for span, found in summary.spans.items():
        name = "e2el" if span == "e2e" else span
        if found is not None:
            result |= {
                f"mean_{name}_ms": found.mean,
                f"median_{name}_ms": found.p50,
                f"p90_{name}_ms": found.p90,
                f"p95_{name}_ms": found.p95,
                f"p99_{name}_ms": found.p99,
            }
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in result.items()}


def request_line(seen: Seen, level: dict[Span, float]) -> dict[str, Any]:
    """One request for a file of JSON lines; times in milliseconds, null where there is none."""
    spans = {"due": seen.due_s, "sent": seen.sent_s, "ttft": seen.ttft, "tpot": seen.tpot, "e2e": seen.e2e}
    return {
        "number": seen.number,
        "turn": seen.turn,
        "tenant": seen.tenant,
        "request_id": seen.request_id or None,
        **{f"{name}_ms": None if math.isnan(value) else round(value * 1000, 3) for name, value in spans.items()},
        "prompt_tokens": seen.prompt_tokens,
        "cached_tokens": seen.cached_tokens,
        "output_tokens": seen.output_tokens,
        "gaps_ms": [round(gap * 1000, 3) for gap in seen.gaps],
        "status": seen.status,
        "error": seen.error or None,
        "good": is_good(seen, level),
    }
