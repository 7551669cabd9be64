"""Commands that people type: what they print, what they change, what they refuse."""

from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.polling import day_with, wait_until
from tests.support.stack import Stack, StartStack, headrace


def test_models_and_prices_are_entered_and_listed(start_stack: StartStack) -> None:
    stack = start_stack()
    made = stack.cli_json("model", "add", "added", "--engine", "simulated", "--sim-context", "4096")
    assert (made["name"], made["engine"], made["context"]) == ("added", "simulated", 4096)
    assert "added" in [each["name"] for each in stack.cli_json("model", "list")]
    with stack.client() as client:
        wait_until(lambda: "added" in [each["id"] for each in client.get("/v1/models").json()["data"]], "it is listed")
    _prices_are_listed_as_they_were_set(stack)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["model", "add", "/no/such/directory"], "unknown model"),
        (["price", "set", "m", "--input", "-1", "--output", "1"], "from 0 to 1000000"),
        (["price", "set", "m", "--input", "1.0000001", "--output", "1"], "at most 6 digits"),
        (["price", "set", "m", "--input", "1", "--output", "1", "--from", "2020-01-01"], "--backdate"),
        *(
            (["price", "set", "m", "--input", "1", "--output", "1", "--currency", code], "ISO 4217")
            for code in ("usd", "")
        ),
        (["usage", "--from", "2026-02-30"], "day is out of range for month"),
        (["usage", "--by", "colour"], "is not one of"),
        (["latency", "--by", "key"], "is not one of"),
        (["invoice", "demo", "2026-13"], "month must be in 1..12"),
        (["key", "create", "demo", "--scopes", "root"], "'root' is not one of inference, usage, admin:"),
        (["key", "create", "demo", "--out", "/no/such/key"], "No such file or directory: '/no/such"),
        (["nats-config", "--dir", "/dev/null/x", "--user", "gateway-1"], "/dev/null/x"),
    ],
)
def test_what_makes_no_sense_is_refused(stack: Stack, arguments: list[str], reason: str) -> None:
    done = headrace(*arguments, "--data-dir", str(stack.data_dir))
    assert done.returncode in (1, 2)
    assert reason in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""


def test_no_key_is_made_that_cannot_be_written(stack: Stack, tmp_path: Path) -> None:
    before = stack.cli_json("key", "list", "--tenant", "demo")
    (tmp_path / "taken").touch()
    for out in ("no/such/directory/key", "taken"):
        assert stack.cli("key", "create", "demo", "--out", str(tmp_path / out)).returncode == 1
    assert stack.cli_json("key", "list", "--tenant", "demo") == before
    refused = stack.cli("key", "create", "nobody", "--out", str(tmp_path / "new"))
    assert refused.returncode == 1 and not (tmp_path / "new").exists()


def _prices_are_listed_as_they_were_set(stack: Stack) -> None:
    tomorrow = (day_with(20) + timedelta(days=1)).date().isoformat()
    set_now = stack.cli("price", "set", "cli", "--input", "0.15", "--output", "0.6", "--cached", "0.075")
    assert set_now.returncode == 0 and "no model 'cli' yet" in set_now.stderr, "a slip of the pen is seen"
    known = stack.cli("price", "set", "added", "--input", "1", "--output", "1")
    assert known.returncode == 0 and known.stderr == ""
    stack.cli_json(
        "price", "set", "cli", "--input", "0.05", "--output", "0.2", "--tier", "batch", "--from", "2099-01-01"
    )
    listed = [price for price in stack.cli_json("price", "list") if price["model"] == "cli"]
    fields = ("tier", "valid_from", "currency", "input", "cached_input", "output", "reasoning")
    assert [tuple(price[field] for field in fields) for price in listed] == [
        ("batch", tomorrow, "USD", 150_000, 75_000, 600_000, 600_000),
        ("batch", "2099-01-01", "USD", 50_000, 50_000, 200_000, 200_000),
        ("interactive", tomorrow, "USD", 150_000, 75_000, 600_000, 600_000),
    ]
    shown = headrace("price", "list", "--data-dir", str(stack.data_dir)).stdout.splitlines()
    assert shown[0].split() == [
        "MODEL",
        "VERSION",
        "TIER",
        "FROM",
        "CURRENCY",
        "INPUT",
        "CACHED",
        "OUTPUT",
        "REASONING",
    ]
    assert ["cli", "-", "batch", tomorrow, "USD", "0.15", "0.075", "0.6", "0.6"] in [line.split() for line in shown]
