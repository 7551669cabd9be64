"""From a request to its price: command line, HTTP, SQL endpoint and page, on a real stack of its own."""

import csv
import io
import json
import stat
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from typing import Any

import clickhouse_connect
import httpx
import pytest

from contracts import ids
from tests.support.browser import choose, enter_key, page
from tests.support.polling import day_with, wait_until
from tests.support.stack import Stack

REQUESTS = 5
DAY_LEFT_S = 180
"""More than this file takes: the rows of a day, and an invoice that is open, are those of one month."""


class UsedStack(Stack):
    """One that was used today."""

    today: str
    month: str
    other_key: str


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UsedStack]:
    """A stack with a price, whose demo tenant has been answered REQUESTS times and whose other tenant once."""
    now = day_with(DAY_LEFT_S)
    stack = UsedStack(tmp_path_factory.mktemp("usage") / "data", "--engine", "simulated")
    stack.today, stack.month = now.strftime("%Y-%m-%d"), now.strftime("%Y-%m")
    try:
        model = stack.wait_ready().model
        price = (
            "price",
            "set",
            model,
            "--input",
            "0.15",
            "--cached",
            "0.0375",
            "--output",
            "0.6",
            "--reasoning",
            "2.4",
        )
        assert stack.cli(*price).returncode == 0  # from tomorrow
        refused = stack.cli(*price, "--from", stack.today)
        assert refused.returncode == 1 and "--backdate" in refused.stderr
        assert stack.cli(*price, "--from", "2026-01-01", "--backdate").returncode == 0
        assert stack.cli("tenant", "create", "other").returncode == 0
        other = stack.cli_json("key", "create", "other")["key"]
        body = {"model": model, "max_tokens": 7, "messages": [{"role": "user", "content": "hi there"}]}
        with stack.client() as client:
            for _ in range(REQUESTS):
                assert client.post("/v1/chat/completions", json=body).status_code == 200
        thought = body | {"simulate": {"tokens": ["<think>", "so", " it", "</think>", "is", " so"]}}
        with stack.client(other) as client:
            assert wait_until(lambda: client.post("/v1/chat/completions", json=thought).is_success, "the new key")
        stack.other_key = other
        wait_until(lambda: len(rows(stack)) == 2 and rows(stack)["demo"]["requests"] == REQUESTS, "usage is booked")
        yield stack
    finally:
        stack.stop()


def rows(stack: Stack) -> dict[str, Any]:
    return {row["tenant"]: row for row in stack.usage("--by", "tenant")}


def test_usage_has_its_price(used: UsedStack) -> None:
    row = rows(used)["demo"]
    fresh = row["prompt_tokens"] - row["cached_tokens"]
    exact = (
        fresh * Decimal("0.15") + row["cached_tokens"] * Decimal("0.0375") + row["completion_tokens"] * Decimal("0.6")
    )
    assert Decimal(row["amount"]) == exact / 1_000_000
    assert row["unpriced_tokens"] == 0
    assert row["completion_tokens"] == 7 * REQUESTS


def test_reasoning_tokens_are_told_and_priced(used: UsedStack) -> None:
    row = rows(used)["other"]
    assert (row["completion_tokens"], row["reasoning_tokens"]) == (6, 2)
    fresh = row["prompt_tokens"] - row["cached_tokens"]
    exact = fresh * Decimal("0.15") + row["cached_tokens"] * Decimal("0.0375") + 4 * Decimal("0.6") + 2 * Decimal("2.4")
    assert Decimal(row["amount"]) == exact / 1_000_000


def test_the_command_line_tells_usage_in_every_form(used: UsedStack) -> None:
    wanted = rows(used)["demo"]
    table = used.cli("usage", "--by", "day", "--by", "model", "--tenant", "demo", "--from", f"{used.month}-01")
    assert used.today in table.stdout and "AMOUNT USD" in table.stdout
    printed = used.cli("usage", "--by", "outcome", "--csv", "--tenant", "demo")
    [line] = csv.DictReader(io.StringIO(printed.stdout))
    assert line["outcome"] == "completed"
    assert line["amount"] == wanted["amount"] and line["currency"] == "USD"
    for arguments in (("--from", "2026-02-30"), ("--from", "2026-11-02", "--to", "2026-11-01"), ("--from", "now")):
        assert used.cli("usage", *arguments).returncode == 2
    for command in ("usage", "latency"):
        none = used.cli(command, "--from", "2020-01-01", "--to", "2020-02-01", "--json")
        told = json.loads(none.stdout)
        assert (told["data"] if command == "usage" else told) == []
        assert "nothing from 2020-01-01 00:00:00Z to 2020-02-01" in none.stderr
    assert used.cli_json("latency", "--tenant", "demo")[0]["first_token_ms"]["count"] == REQUESTS
    assert "first token" in used.cli("latency").stdout


def test_an_invoice_adds_up(used: UsedStack) -> None:
    made = used.cli_json("invoice", "demo", used.month)
    assert sum(Decimal(line["amount"]) for line in made["lines"]) == Decimal(made["total"])
    used_lines = [line for line in made["lines"] if line["kind"] != "rounding"]
    assert sum(Decimal(line["amount"]) for line in used_lines) == Decimal(rows(used)["demo"]["amount"])
    for line in used_lines:
        assert Decimal(line["amount"]) == line["tokens"] * Decimal(line["price"]) / 1_000_000
    printed = list(csv.DictReader(io.StringIO(used.cli("invoice", "demo", used.month, "--csv").stdout)))
    assert sum(Decimal(line["amount"]) for line in printed) == Decimal(made["total"])
    assert not made["closed"] and "not closed" in used.cli("invoice", "demo", used.month).stderr
    assert used.cli("invoice", "demo", "2026-13").returncode == 1


def test_a_request_is_explained(used: UsedStack) -> None:
    with used.client() as client:
        body = {"model": used.model, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
        answer = client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
    request_id = answer.headers["x-request-id"]
    done = wait_until(lambda: used.cli("explain", request_id).stdout, "the request is in the ledger")
    for part in ("of tenant demo", "The caller's own id is mine-1", "Attempt 1: version", "completed", "Billed: "):
        assert part in done
    assert used.cli_json("explain", request_id)["attempts"][0]["completion_tokens"] == 2
    for unknown in (ids.request_id(), "nonsense"):
        assert used.cli("explain", unknown).returncode == 1
    assert used.cli_json("ledger", "dead") == []


def test_why_a_request_was_slow_is_told_by_phase(used: UsedStack) -> None:
    """To its tenant by its own key, to operators, and by the command line; also of one that was refused."""
    slow = {"model": used.model, "max_tokens": 30, "messages": [{"role": "user", "content": "x"}], "stream": True}
    with used.client() as client:
        answer = client.post("/v1/chat/completions", json=slow | {"simulate": {"itl_ms": 30}})
        wrong = client.post("/v1/chat/completions", json=slow | {"max_tokens": 10**9})
        assert (answer.status_code, wrong.status_code) == (200, 400)
        request_id, refused_id = (each.headers["x-request-id"] for each in (answer, wrong))

        def known() -> Any:
            found = client.get(f"/v1/usage/requests/{request_id}").json()
            return all(phase["ms"] is not None for phase in found["phases"]) and found

        times = wait_until(lambda: client.get(f"/v1/usage/requests/{request_id}").is_success and known(), "it is told")
        phases = {phase["name"]: phase["ms"] for phase in times["phases"]}
        assert set(phases) == {"edge", "admission", "queue", "dispatch", "prefill", "decode", "relay", "caller"}
        assert max(phases, key=lambda name: phases[name]) == "decode"
        assert times["total_ms"] - 1 <= sum(phases.values()) <= times["total_ms"] + 5
        assert "generating 30 tokens" in times["why"]
        assert client.get(f"/v1/usage/requests/{ids.request_id()}").status_code == 404
        own = client.get("/v1/usage/slowest", params={"limit": 1}).json()["data"]
        assert [(row["tenant"], row["request_id"]) for row in own] == [("demo", request_id)]
        assert client.get("/v1/usage/slowest", params={"order": "size"}).status_code == 400
    with used.client(used.other_key) as client:
        assert client.get(f"/v1/usage/requests/{request_id}").status_code == 404
        assert {row["tenant"] for row in client.get("/v1/usage/slowest").json()["data"]} == {"other"}
    refused = wait_until(partial(_explained, used, refused_id), "the refusal is told")
    assert "refused with status 400 (context_length_exceeded)" in refused and "Nothing is billed." in refused
    shown = used.cli("explain", request_id).stdout
    assert "generating 30 tokens" in shown and "decode" in shown and "█" in shown
    listed = used.cli("explain", "--slowest", "--limit", "1").stdout.splitlines()
    assert len(listed) == 3 and request_id in listed[1] and "other" in listed[2]
    assert used.cli_json("explain", "--slowest", "--model", used.model, "--tenant", "demo", "--first-token")
    assert used.cli("explain").returncode == 2
    with used.admin() as admin:
        everyones = admin.get("/admin/v1/usage/slowest").json()["data"]
        assert {row["tenant"] for row in everyones} == {"demo", "other"}
        told = admin.get(f"/admin/v1/usage/requests/{request_id}").json()
        assert told["times"]["request_id"] == request_id and any("Attempt 1" in line for line in told["text"])


def _explained(stack: Stack, any_id: str) -> str:
    return stack.cli("explain", any_id).stdout


def test_d18_any_id_that_a_caller_has_finds_the_request(used: UsedStack) -> None:
    chat = {"model": used.model, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    text = {"model": used.model, "max_tokens": 2, "prompt": "x"}
    with used.client() as client:
        answers = [
            client.post(f"/v1/{path}", json=body, headers={"x-request-id": "d18"})
            for path, body in (("chat/completions", chat), ("completions", text))
        ]
    first, second = (answer.headers["x-request-id"] for answer in answers)
    for answer, request_id in zip(answers, (first, second), strict=True):
        of_body = answer.json()["id"]
        assert of_body != request_id
        found = wait_until(partial(_explained, used, of_body), "it is found by its body's id")
        assert f"Request {request_id} " in found
    found = used.cli("explain", "d18").stdout
    assert f"Request {second} " in found and f"The caller gave that id before, too: {first}." in found


def test_usage_over_http_is_ones_own_and_ranges_are_exact(used: UsedStack) -> None:
    with used.client() as client:
        whole = client.get("/v1/usage", params={"by": "day,key", "from": f"{used.month}-01"}).json()
        assert whole["data"][0]["day"] == used.today and whole["currency"] == "USD"
        assert sum(row["requests"] for row in whole["data"]) >= REQUESTS
        total = client.get("/v1/usage", params={"by": "model", "tenant": "other", "tenant_id": "other"}).json()
        assert total["data"][0]["requests"] >= REQUESTS
        by_hour = client.get("/v1/usage", params=[("by", "hour"), ("by", "outcome")]).json()
        assert sum(row["requests"] for row in by_hour["data"]) == total["data"][0]["requests"]
        page = client.get("/v1/usage", params={"by": "key,outcome", "limit": "1"}).json()
        assert (len(page["data"]), page["has_more"]) == (1, False)
        for bad in (
            {"from": "2026-11-02", "to": "2026-11-01"},
            {"from": "2026-11-01", "to": "2026-11-01"},
            {"from": "2026-02-30"},
            {"from": "2026-11-01T00:00:00"},
            {"from": "2026-11-01T00:00:00 05:30"},
            {"by": "moon"},
            {"limit": "0"},
            {"limit": "10001"},
            {"after": "-1"},
            {"from": "1969-12-31"},
            {"by": "hour", "from": "2026-01-01", "to": "2026-12-31"},
        ):
            answer = client.get("/v1/usage", params=bad)
            assert answer.status_code == 400, bad
            assert answer.json()["error"]["code"] == "invalid_request"
        offset = client.get("/v1/usage", params={"from": "2026-11-01T05:30:00+05:30", "to": "2027-01-01T00:00:00Z"})
        assert offset.json()["from"] == "2026-11-01T00:00:00.000Z"
        latency = client.get("/v1/usage/latency", params={"by": "day"}).json()["data"]
        assert latency[0]["first_token_ms"]["p50"] > 0
    url = f"{used.run.admin_url}/admin/v1/usage"
    assert httpx.get(url, headers={"Authorization": f"Bearer {used.run.key}"}, trust_env=False).status_code == 403


def test_operators_see_all_tenants(used: UsedStack) -> None:
    with used.admin() as client:
        found = client.get("/admin/v1/usage", params={"by": "tenant"}).json()["data"]
        assert [row["tenant"] for row in found] == ["demo", "other"]
        one = client.get("/admin/v1/usage", params={"by": "model", "tenant": "other"}).json()["data"]
        assert one[0]["requests"] == 1
        assert client.get("/admin/v1/usage", params={"tenant_id": "other"}).status_code == 400
        assert client.get("/admin/v1/usage", params={"tenant": "x" * 200}).status_code == 400
        assert len(client.get("/admin/v1/usage/latency", params={"by": "tenant"}).json()["data"]) == 2
    assert httpx.get(f"{used.run.admin_url}/admin/v1/usage", trust_env=False).status_code == 401


def test_the_sql_endpoint_is_open_to_analysts(used: UsedStack) -> None:
    path = used.data_dir / "sql.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    sql = json.loads(path.read_text())
    assert sql["url"] in used.output.read_text()
    url = httpx.URL(sql["url"])
    with clickhouse_connect.get_client(
        host=url.host, port=url.port, username=sql["user"], password=sql["password"], database="headrace"
    ) as client:
        found = client.query("SELECT sum(amount_pico), any(currency) FROM billed WHERE tenant = 'other'").first_row
        assert found == (int(Decimal(rows(used)["other"]["amount"]) * 10**12), "USD")
        with pytest.raises(clickhouse_connect.driver.exceptions.DatabaseError):
            client.command("DROP TABLE attempts")


def test_the_page_draws_a_month(used: UsedStack) -> None:
    with page() as browser:
        browser.open(f"{used.run.url}/usage")
        assert browser.run("document.getElementById('content').hidden")
        enter_key(browser, used.run.key)
        browser.until("document.body.dataset.drawn && document.body.dataset.drawn !== 'failed'")
        assert browser.run("document.querySelectorAll('.charts svg').length") == 6
        assert browser.run("document.querySelectorAll('#spend rect').length") == 1
        assert browser.run("document.querySelectorAll('#latency circle').length") == 4
        assert used.today in browser.run("document.querySelector('tbody').innerText")
        assert browser.run("document.querySelectorAll('#slowest .track').length") >= 1
        assert browser.run("sessionStorage.getItem('key')") == used.run.key
        assert used.run.key not in browser.run("location.href + document.documentElement.outerHTML")
        choose(browser, "by", "outcome")
        browser.until("document.querySelector('tbody').innerText.includes('completed')")
        assert not browser.errors
        enter_key(browser, "hr_wrong")
        browser.until("document.getElementById('notice').textContent.includes('API key')")
        browser.open(f"{used.run.admin_url}/admin/usage#key={used.run.admin_key}")
        browser.until("document.body.dataset.drawn && document.body.dataset.drawn !== 'failed'")
        assert browser.run("document.querySelectorAll('#spend-key .legend li').length") == 2
