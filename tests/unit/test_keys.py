"""What a key's holder may do, and what a gateway notes of keys: decisions without a bus."""

from typing import Any

import msgspec
import pytest

from contracts import keys
from contracts.forms import LimitsChange, NewTenant, TenantChange
from contracts.messages.administration import FAILED_MAX, OUTDATED_MAX, USED_MAX
from contracts.messages.records import KeyRecord, TenantRecord
from gateway.intake.activity import ADDRESSES_MAX, FAILURES_MAX, Activity, FailedLogins

NOW = 1_000_000
KEY = KeyRecord(id="k", tenant="T")
TENANT = TenantRecord(name="T")


def change(record: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(record, **fields)


@pytest.mark.parametrize(
    ("records", "tenant", "reason"),
    [
        ([KEY], TENANT, None),
        ([], None, "unknown"),
        ([KEY], None, "tenant"),
        ([KEY], change(TENANT, disabled=True), "tenant"),
        ([change(KEY, revoked_at_ms=1)], TENANT, "revoked"),
        ([change(KEY, expires_at_ms=NOW)], TENANT, "expired"),
        ([change(KEY, expires_at_ms=NOW + 1)], TENANT, None),
        ([change(KEY, addresses=("10.0.0.0/8",))], TENANT, "address"),
        ([change(KEY, addresses=("10.0.0.0/8", "192.0.2.0/24"))], TENANT, None),
        ([KEY, change(KEY, revoked_at_ms=1)], TENANT, "revoked"),
        ([change(KEY, addresses=("10.0.0.0/8",)), KEY], TENANT, "address"),
    ],
)
def test_what_one_record_forbids_is_forbidden(records: list[KeyRecord], tenant: Any, reason: str | None) -> None:
    assert keys.failure_of(records, tenant, "192.0.2.7", NOW) == reason


@pytest.mark.parametrize(
    ("address", "network", "within"),
    [
        ("10.1.2.3", "10.0.0.0/8", True),
        ("11.1.2.3", "10.0.0.0/8", False),
        ("::ffff:10.1.2.3", "10.0.0.0/8", True),
        ("10.1.2.3", "::/0", False),
        ("2001:db8::1", "2001:db8::/32", True),
        ("fe80::1%eth0", "fe80::/10", True),
        ("", "0.0.0.0/0", False),
        ("localhost", "0.0.0.0/0", False),
    ],
)
def test_addresses_are_judged_as_numbers(address: str, network: str, within: bool) -> None:
    assert keys.comes_from(address, (network,)) is within
    assert keys.comes_from(address, ())


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"scopes": ("inference", "usage")}, ""),
        ({"scopes": keys.ADMIN_SCOPES}, ""),
        ({"scopes": ()}, "scopes"),
        ({"scopes": ("inference", "admin:keys")}, "scopes"),
        ({"addresses": ("10.0.0.1/8",)}, "addresses"),
        ({"addresses": ("everywhere",)}, "addresses"),
        ({"addresses": ("10.0.0.0/8",) * 65}, "addresses"),
        ({"note": "a\nb"}, "note"),
        ({"note": "n" * 129}, "note"),
    ],
)
def test_a_key_that_cannot_be_is_refused_by_its_field(fields: dict[str, Any], wrong: str) -> None:
    asked = {"scopes": ("usage",), "addresses": (), "note": ""} | fields
    assert (keys.problem_of(**asked) or ("",))[0] == wrong


def test_failures_of_one_address_are_bounded_and_come_back_with_time() -> None:
    failures = FailedLogins()
    assert [failures.count("192.0.2.1", 0.0) for _ in range(FAILURES_MAX)] == [0] * FAILURES_MAX
    assert failures.count("192.0.2.1", 0.0) == failures.count("::ffff:192.0.2.1", 0.4) == 1
    assert failures.count("192.0.2.2", 0.0) == 0
    assert failures.count("192.0.2.1", 1.0) == 0
    assert failures.count("192.0.2.1", 1.5) == 1


def test_an_ipv6_network_counts_as_one_and_memory_is_bounded() -> None:
    failures = FailedLogins()
    spent = [failures.count(f"2001:db8::{number:x}", 0.0) for number in range(FAILURES_MAX + 1)]
    assert spent == [0] * FAILURES_MAX + [1]
    for number in range(ADDRESSES_MAX + 50):
        failures.count(f"2001:db8:{number:x}::1", 0.0)
    assert len(failures._left) == ADDRESSES_MAX


def test_a_key_is_reported_once_a_minute() -> None:
    activity = Activity()
    for at_ms in (60_000, 60_001, 119_999):
        activity.used("k", at_ms)
    report = activity.take()
    assert report is not None and report.used == {"k": 60_000}
    activity.used("k", 119_999)
    assert activity.take() is None
    activity.used("k", 120_000)
    report = activity.take()
    assert report is not None and report.used == {"k": 120_000}


def test_a_report_is_bounded_whatever_strangers_do() -> None:
    activity = Activity()
    for number in range(5 * FAILED_MAX):
        for _ in range(2):
            activity.failed(f"10.0.{number >> 8}.{number & 255}", "unknown", "")
        activity.outdated(f"hr_{number}".encode())
    for number in range(USED_MAX + 10):
        activity.used(f"key_{number}", 60_000)
    report = activity.take()
    assert report is not None
    assert (len(report.failed), len(report.outdated), len(report.used)) == (FAILED_MAX, OUTDATED_MAX, USED_MAX)
    assert sum(each.count for each in report.failed) + report.failed_unlisted == 10 * FAILED_MAX
    rest = activity.take()
    assert rest is not None and len(rest.used) == 10 and not rest.failed and not rest.failed_unlisted


def test_limits_of_one_model_begin_with_those_for_all() -> None:
    record = NewTenant(name="T", limits=LimitsChange(rpm=5, output_tpm=7)).record()
    changed = TenantChange(model_limits={"m": LimitsChange(rpm=None)}).apply(record)
    assert (changed.model_limits["m"].rpm, changed.model_limits["m"].output_tpm) == (None, 7)
    assert TenantChange(model_limits={"m": None}).apply(changed) == record
