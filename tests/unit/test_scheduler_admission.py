"""The predicted wait and the line of those who were told to come back."""

import pytest

from contracts.errors import HeadraceError
from contracts.messages.admission import AdmissionRequest
from contracts.messages.records import TenantLimits, TenantRecord
from scheduler.core.admission import RETRY_AFTER_S_MAX, AdmissionControl
from scheduler.core.fair_queue import FairQueue
from scheduler.core.request import Request
from scheduler.core.throughput import ThroughputEstimate
from tests.support.scheduler_world import record

TOKENS = 60
TOKENS_PER_S = 10
DEADLINE_MS = 4000


def slow_pool() -> AdmissionControl:
    """A pool without room that has worked off 10 tokens a second for as long as it remembers."""
    admission = AdmissionControl(record(), FairQueue(ageing_ms=1_000_000), 0)
    admission.throughput.done(100 * TOKENS_PER_S, 1000)
    admission.throughput.pass_time(100_000, saturated=True, running_tokens=0)
    return admission


def refusal(admission: AdmissionControl, number: int) -> HeadraceError:
    asked = AdmissionRequest(
        request_id=f"r{number}",
        tenant="t",
        key_id="k",
        model="m",
        endpoint="chat/completions",
        prompt_tokens=TOKENS - 10,
        max_output_tokens=10,
        deadline_ms=DEADLINE_MS,
    )
    with pytest.raises(HeadraceError) as caught:
        admission.check(asked, 100_000, has_room=False)
    return caught.value


def test_who_hangs_up_after_the_queue_makes_nobody_slower() -> None:
    """A burst waited for a second, nothing of it ended meanwhile, and then all of it was cancelled."""
    throughput = ThroughputEstimate(0)
    throughput.pass_time(1_000, saturated=True, running_tokens=50_000)
    throughput.done(100, 900)
    throughput.pass_time(1_100, saturated=True, running_tokens=50_000)
    throughput.done(50_000, 1_500)
    throughput.pass_time(2_000, saturated=False, running_tokens=0)
    assert throughput.wait_ms(10_000) < 1_000, "it was never seen how long that much takes"
    for second in range(3, 60):
        throughput.done(1_000, 5_000)
        throughput.pass_time(second * 1_000, saturated=True, running_tokens=5_000)
    assert throughput.wait_ms(10_000) == pytest.approx(10_000, rel=0.1), "and now it was"


def test_many_prompts_reserve_each_prompt_once() -> None:
    """A hundred prompts of 500 tokens, two choices each, by all limits that are checked."""
    limits = TenantLimits(input_tpm=50_000, output_tpm=3_200, queued_tokens=53_200)
    admission = AdmissionControl(record(), FairQueue(ageing_ms=1_000_000), 0)
    admission.set_tenant("t", TenantRecord(name="t", limits=limits), 0)
    asked = AdmissionRequest(
        request_id="r",
        tenant="t",
        key_id="k",
        model="m",
        endpoint="completions",
        prompt_tokens=50_000,
        max_output_tokens=16,
        choices=200,
    )
    admission.check(asked, 0, has_room=True)
    request = Request.admitted(asked, version="v1", arm="", now_ms=0, publish_within_ms=1000, deadline_ms=1000)
    admission.reserve(request, 0)
    assert admission.reserved_tokens == admission.quota("t", 0).reserved_tokens == 53_200
    assert admission.quota("t", 0).input_bucket.level(0) == admission.quota("t", 0).output_bucket.level(0) == 0


def test_each_refusal_names_a_later_time_until_the_line_is_as_long_as_the_longest() -> None:
    admission = slow_pool()
    told = [refusal(admission, number).retry_after_s or 0 for number in range(1000)]
    assert told == sorted(told)
    assert 1 <= told[0] < 5
    assert told[-1] == RETRY_AFTER_S_MAX
    longest_s = RETRY_AFTER_S_MAX + DEADLINE_MS / 1000
    assert admission.retry_reservations.tokens <= longest_s * TOKENS_PER_S + TOKENS, (
        "refused requests do not add up for ever"
    )


JANUARY_31 = 1_801_353_600_000
"""2027-01-31 00:00 UTC."""
DAY_MS = 24 * 3_600_000
BUDGET = 1000


def with_budget(admission: AdmissionControl) -> AdmissionRequest:
    admission.set_tenant("t", TenantRecord(name="t", monthly_budget_tokens=BUDGET), JANUARY_31)
    return AdmissionRequest(
        request_id="r",
        tenant="t",
        key_id="k",
        model="m",
        endpoint="chat/completions",
        prompt_tokens=50,
        max_output_tokens=10,
    )


def test_a_spent_budget_refuses_until_the_month_ends() -> None:
    admission = AdmissionControl(record(), FairQueue(ageing_ms=1_000_000), JANUARY_31)
    asked = with_budget(admission)
    admission.budgets.ledger_said("t", "2027-01", BUDGET - 1, 1)
    admission.check(asked, JANUARY_31, has_room=True)
    admission.budgets.ledger_said("t", "2027-01", BUDGET, 2)
    with pytest.raises(HeadraceError, match=r"1000 tokens.*2027-02-01") as refused:
        admission.check(asked, JANUARY_31, has_room=True)
    assert refused.value.code == "insufficient_quota"
    assert refused.value.retry_after_s == DAY_MS // 1000
    assert admission.quota("t", JANUARY_31).open == 0, "a refused request charges nothing"
    admission.check(asked, JANUARY_31 + DAY_MS, has_room=True)


@pytest.mark.parametrize("known", [None, ("2026-12", 10 * BUDGET)], ids=["no total", "last month's total"])
def test_a_month_without_a_total_has_cost_nothing(known: tuple[str, int] | None) -> None:
    admission = AdmissionControl(record(), FairQueue(ageing_ms=1_000_000), JANUARY_31)
    asked = with_budget(admission)
    if known:
        admission.budgets.ledger_said("t", *known, 1)
    admission.check(asked, JANUARY_31, has_room=True)


def test_the_month_after_december_is_january() -> None:
    december_31 = JANUARY_31 - 31 * DAY_MS
    admission = AdmissionControl(record(), FairQueue(ageing_ms=1_000_000), december_31)
    asked = with_budget(admission)
    admission.budgets.ledger_said("t", "2026-12", BUDGET, 1)
    with pytest.raises(HeadraceError, match="2027-01-01"):
        admission.check(asked, december_31, has_room=True)
    admission.check(asked, december_31 + DAY_MS, has_room=True)
