"""Rate limits in headers, and what a gateway knows of them between two answers of a scheduler."""

from contracts.messages.admission import RateLimit, RateLimits
from contracts.messages.records import TenantLimits, TenantRecord
from gateway.apis import rate_limit_headers
from gateway.intake import rate_limits
from gateway.intake.rate_limits import RateLimitsSeen

LIMITS = RateLimits(
    requests=RateLimit(limit=60, remaining=59, reset_ms=1000),
    input_tokens=RateLimit(limit=6000, remaining=5900, reset_ms=1500),
    output_tokens=RateLimit(limit=100, remaining=50, reset_ms=90_250),
)
TENANT = TenantRecord(name="t", limits=TenantLimits(rpm=60, input_tpm=6000, output_tpm=100))
NOW_MS = 1_800_000_000_000
"""2027-01-15 08:00 UTC."""


def test_e04_openais_names_and_spans() -> None:
    assert dict(rate_limit_headers.openai(LIMITS, NOW_MS)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"100",
        b"x-ratelimit-remaining-tokens": b"50",
        b"x-ratelimit-reset-tokens": b"1m30.25s",
    }
    assert rate_limit_headers.openai(RateLimits(), NOW_MS) == []


def test_e04_anthropics_names_and_instants() -> None:
    headers = dict(rate_limit_headers.anthropic(LIMITS, NOW_MS))
    assert len(headers) == 12
    assert headers[b"anthropic-ratelimit-tokens-limit"] == headers[b"anthropic-ratelimit-output-tokens-limit"] == b"100"
    assert headers[b"anthropic-ratelimit-input-tokens-remaining"] == b"5900"
    assert headers[b"anthropic-ratelimit-requests-reset"] == b"2027-01-15T08:00:01Z"
    assert headers[b"anthropic-ratelimit-tokens-reset"] == b"2027-01-15T08:01:31Z", "rounded up"


def test_what_was_told_is_refilled_since() -> None:
    seen = RateLimitsSeen()
    seen.keep("t", "m", LIMITS, 0)
    assert seen.at(TENANT, "m", 0) == LIMITS
    later = seen.at(TENANT, "m", 30_000)
    assert later.requests == RateLimit(limit=60, remaining=60, reset_ms=0)
    assert later.output_tokens == RateLimit(limit=100, remaining=100, reset_ms=60_250)
    assert seen.at(TENANT, "", 0) == LIMITS, "without a model, the one that was used last"
    assert seen.at(TENANT, "other", 0).output_tokens == RateLimit(limit=100, remaining=100, reset_ms=0)


def test_a_limit_that_has_changed_is_told_as_it_is() -> None:
    seen = RateLimitsSeen()
    seen.keep("t", "m", LIMITS, 0)
    changed = TenantRecord(name="t", limits=TenantLimits(rpm=0, input_tpm=6000))
    assert seen.at(changed, "m", 0) == RateLimits(
        requests=RateLimit(limit=0, remaining=0, reset_ms=0), input_tokens=LIMITS.input_tokens
    )


def test_what_is_kept_is_bounded() -> None:
    seen = RateLimitsSeen()
    for number in range(rate_limits.KEPT_MAX + 5):
        seen.keep(f"t{number}", "m", LIMITS, 0)
    assert len(seen._seen) == len(seen._last) == rate_limits.KEPT_MAX
