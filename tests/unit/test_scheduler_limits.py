"""Token buckets and quotas."""

import pytest

from contracts.errors import HeadraceError
from contracts.messages.admission import RateLimit
from contracts.messages.records import TenantLimits
from contracts.tokens import Cost
from scheduler.core.quotas import Quota, TokenBucket


def test_a_bucket_starts_full_refills_evenly_and_never_overflows() -> None:
    bucket = TokenBucket(60, 0)
    bucket.take(60, 0)
    assert bucket.level(0) == 0
    assert bucket.level(1_000) == pytest.approx(1)
    assert bucket.wait_ms(10, 1_000) == 9_000
    bucket.take(-100, 2_000)
    assert bucket.level(2_000) == 60


def test_a_lowered_limit_keeps_what_was_spent() -> None:
    bucket = TokenBucket(100, 0)
    bucket.take(50, 0)
    bucket.resize(20, 0)
    assert bucket.level(0) == -30
    bucket.resize(None, 0)
    assert bucket.wait_ms(10**9, 0) == 0


def test_a_refusal_names_the_limit_and_when_it_is_met() -> None:
    quota = Quota(TenantLimits(rpm=60, output_tpm=60), 0)
    quota.reserve(Cost(1, 60), 0)
    with pytest.raises(HeadraceError) as refused:
        quota.check(Cost(1, 30), 0, 0)
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.retry_after_s == 30
    assert "60 output tokens per minute" in refused.value.message


def test_settling_returns_what_was_not_used_at_once() -> None:
    quota = Quota(TenantLimits(output_tpm=200), 0)
    quota.reserve(Cost(10, 120), 0)
    quota.settle(Cost(10, 120), Cost(10, 40), 0, refund_request=False)
    assert quota.output_bucket.level(0) == 160 and quota.open == 0 and quota.reserved_tokens == 0


def test_headers_speak_of_the_scarcer_bucket() -> None:
    quota = Quota(TenantLimits(rpm=10, input_tpm=1000, output_tpm=100), 0)
    quota.reserve(Cost(10, 50), 0)
    limits = quota.rate_limits(0)
    assert limits.requests == RateLimit(limit=10, remaining=9, reset_ms=6_000)
    assert limits.tokens == limits.output_tokens == RateLimit(limit=100, remaining=50, reset_ms=30_000)
    assert limits.input_tokens == RateLimit(limit=1000, remaining=990, reset_ms=600)
    assert Quota(TenantLimits(output_tpm=0, input_tpm=5), 0).rate_limits(0).tokens == RateLimit(
        limit=0, remaining=0, reset_ms=0
    )
