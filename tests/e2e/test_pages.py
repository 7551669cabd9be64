"""The pages in a real browser, on a real stack: chat, and the console as operators use it, by hand and by keyboard."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import threading
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest

from contracts import clock, subjects
from contracts.administration import Actor, Administration
from contracts.bus import Bus
from contracts.messages.attempts import AttemptEvent
from contracts.messages.records import Manifest
from tests.support.browser import Browser, page, picture
from tests.support.polling import wait_until
from tests.support.stack import Stack, StartStack

HOSTILE = "<img src=x onerror=alert(1)>"
RIGHT_TO_LEFT = "شركة الاختبار"
LONG = "a-tenant-whose-name-is-as-long-as-names-may-be-" + "x" * 17


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with page() as found:
        yield found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two models, three workers, prices, tenants with odd names, and a week of usage."""
    models = ("--model", "chat-large", "--model", "chat-small", "--workers", "chat-large=2,chat-small=1")
    options = ("--engine", "simulated", *models)
    stack = Stack(tmp_path_factory.mktemp("pages") / "data", *options).wait_ready()
    try:
        with stack.admin() as admin:
            for name in ("acme", HOSTILE, RIGHT_TO_LEFT, LONG):
                new = {"name": name, "limits": {"rpm": 600}, "monthly_budget_tokens": 900_000}
                assert admin.post("/admin/v1/tenants", json=new).status_code == 201
            for model, price in (("chat-large", "0.60"), ("chat-small", "0.15")):
                new = {"model": model, "input": price, "output": price, "valid_from": "2026-01-01", "backdate": True}
                assert admin.post("/admin/v1/prices", json=new).status_code == 201
            key = next(each["id"] for each in admin.get("/admin/v1/keys").json()["data"] if each["tenant"] == "demo")
        asyncio.run(a_week_of_usage(stack, key))
        yield stack
    finally:
        stack.stop()


async def a_week_of_usage(stack: Stack, key: str) -> None:
    """Ends of requests of the last days, as workers would have stored them."""
    bus = await Bus.connect(stack.run.nats_url, name="operator", credentials=stack.credentials)
    try:
        for event in past_ends(key):
            subject = subjects.attempt(event.model, event.request_id, 1)
            await bus.jetstream.store(subject, msgspec.json.encode(event), msg_id=event.request_id)
    finally:
        await bus.close()


def past_ends(key: str) -> Iterator[AttemptEvent]:
    """Six days of them, always the same but for the present moment."""
    shape = random.Random(1)
    now_ms = clock.now_ms()
    for day in range(6):
        for number in range(24):
            at_ms = now_ms - day * 86_400_000 - number * 60_000 - 3_600_000
            model = "chat-large" if number % 3 else "chat-small"
            first_ms, output = at_ms + shape.randrange(60, 400), shape.randrange(100, 900)
            yield AttemptEvent(
                request_id=request_id_at(at_ms, shape),
                tenant="demo",
                key_id=key,
                model=model,
                version="sim-1",
                endpoint="chat/completions",
                priority="interactive",
                attempt=1,
                outcome="completed" if number % 12 else "failed",
                reporter="worker",
                worker="worker-0-a",
                billable=bool(number % 12),
                prompt_tokens=shape.randrange(200, 4000),
                cached_tokens=shape.randrange(0, 200),
                completion_tokens=output,
                admitted_at_ms=at_ms,
                dispatched_at_ms=at_ms + 20,
                started_at_ms=at_ms + 25,
                first_token_at_ms=first_ms,
                ended_at_ms=first_ms + output * 20,
            )


def request_id_at(at_ms: int, shape: random.Random) -> str:
    """A UUIDv7 of that moment."""
    return str(uuid.UUID(int=at_ms << 80 | 7 << 76 | shape.getrandbits(12) << 64 | 2 << 62 | shape.getrandbits(62)))


@contextlib.contextmanager
def busy(stack: Stack, callers: int = 10) -> Iterator[None]:
    """Callers of streams that go on until the block ends."""
    left = threading.Event()

    def call(number: int) -> None:
        model = "chat-large" if number % 3 else "chat-small"
        tokens = {"tokens": ["word "] * 600, "itl_ms": 20}
        body = {"model": model, "max_tokens": 600, "stream": True, "simulate": tokens}
        body["messages"] = [{"role": "user", "content": "tell me " * (40 * number + 40)}]
        with stack.client() as client:
            while not left.is_set():
                with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    for _ in answer.iter_lines():
                        if left.is_set():
                            return

    threads = [threading.Thread(target=call, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        left.set()
        for thread in threads:
            thread.join()


def text(browser: Browser, selector: str) -> str:
    found: str = browser.run(f"[...document.querySelectorAll({selector!r})].map(each => each.innerText).join('\\n')")
    return found


def test_pages_hold_nothing_inline_and_their_files_are_served(stack: Stack) -> None:
    for url, paths in ((stack.run.url, ("/", "/usage", "/docs")), (stack.run.admin_url, ("/console", "/admin/usage"))):
        for path in paths:
            answer = httpx.get(url + path, trust_env=False)
            policy = answer.headers["content-security-policy"]
            assert answer.status_code == 200 and "unsafe" not in policy and "script-src 'self'" in policy
            assert "<style" not in answer.text and " style=" not in answer.text and "<script>" not in answer.text
        for file in ("frame.css", "frame.js", "console.js", "icon.svg"):
            answer = httpx.get(f"{url}/static/{file}", trust_env=False)
            assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
            known = {"if-none-match": answer.headers["etag"]}
            assert httpx.get(f"{url}/static/{file}", headers=known, trust_env=False).status_code == 304
        for path in ("/static/", "/static/../pages.py", "/static/%2e%2e/pages.py", "/static/nothing"):
            assert httpx.get(url + path, trust_env=False).status_code == 404
    assert httpx.get(f"{stack.run.url}/console", trust_env=False).status_code == 404, "at the admin address alone"


def test_a_link_fills_in_the_key_and_leaves_no_trace_of_it(stack: Stack, browser: Browser) -> None:
    browser.open(f"{stack.run.url}/#key={stack.run.key}")
    browser.until("document.body.dataset.ready && !document.getElementById('model').disabled")
    assert browser.run("location.href") == f"{stack.run.url}/"
    assert browser.run("sessionStorage.getItem('key')") == stack.run.key
    assert stack.run.key not in browser.run("document.documentElement.outerHTML + document.cookie")
    assert browser.run("localStorage.length") == 0
    for log in (stack.data_dir / "logs").glob("*.log"):
        assert stack.run.key not in log.read_text(errors="replace"), log


def test_a_chat_streams_and_says_how_fast(stack: Stack, browser: Browser) -> None:
    browser.open(f"{stack.run.url}/#key={stack.run.key}")
    browser.until("document.body.dataset.ready && !document.getElementById('model').disabled")
    browser.run(f"document.getElementById('message').value = {HOSTILE!r}; document.getElementById('send').click()")
    browser.until("document.querySelectorAll('#talk .figures').length")
    assert "tokens/s" in text(browser, "#talk .figures") and text(browser, "#talk .user .text") == HOSTILE
    assert text(browser, "#talk .assistant .text") and not browser.errors
    picture(browser, "chat")


def test_a_month_of_usage_is_drawn(stack: Stack, browser: Browser) -> None:
    browser.open(f"{stack.run.url}/usage#key={stack.run.key}")
    browser.until("document.querySelectorAll('#spend rect').length >= 1")
    assert "USD" in text(browser, "#sums") and not browser.errors
    picture(browser, "usage")


def console(browser: Browser, stack: Stack, view: str = "", key: str = "") -> None:
    """The console as that key sees it."""
    browser.call("Page.navigate", url="about:blank")  # What follows is no change of the fragment alone.
    browser.open(f"{stack.run.admin_url}/console#key={key or stack.run.admin_key}")
    browser.until("document.querySelectorAll('#views a').length && document.body.dataset.drawn")
    if view:
        browser.run(f"location.hash = {view!r}")
        browser.until(
            f"document.querySelector('#views [aria-current]').hash === '#{view}' && document.body.dataset.drawn"
        )


def button(browser: Browser, label: str, inside: str = "document") -> None:
    """Press the first button that says so."""
    found = f"[...{inside}.querySelectorAll('button')].find(each => each.innerText === {label!r})"
    browser.until(f"Boolean({found})")
    browser.run(f"{found}.click()")


def test_the_console_shows_what_runs_as_it_runs(stack: Stack, browser: Browser) -> None:
    with busy(stack):
        console(browser, stack)
        assert "worker-0" in text(browser, ".model") and "live" in text(browser, "#state")
        browser.until("document.querySelectorAll('.sums dd')[2].innerText.startsWith('10')")
        browser.until("document.querySelector('.sums path').getAttribute('d').split('L').length > 12")
        assert not text(browser, ".sums dd").startswith(("0", "–"))
        browser.run("document.querySelector('.model details').open = true")
        browser.until("document.querySelector('.model details').innerText.includes('demo')")
        browser.run("document.querySelector('.model details').open = false")
        picture(browser, "console")
        browser.look(dark=True)
        picture(browser, "console-dark")
        browser.look(width=390, height=844)
        assert browser.run("document.documentElement.scrollWidth") == 390
        picture(browser, "console-phone")
        browser.look()
    assert not browser.errors


def test_a_worker_is_drained_and_a_request_cancelled_after_a_question(stack: Stack, browser: Browser) -> None:
    dialog = "document.querySelector('dialog')"
    with busy(stack, 3):
        console(browser, stack)
        button(browser, "Drain")
        browser.until(f"{dialog}.innerText.includes('takes nothing more')")
        browser.press("Escape")
        browser.until(f"!{dialog}")
        assert "held" not in text(browser, ".model"), "who says no changes nothing"
        button(browser, "Drain")
        button(browser, "Drain it", dialog)
        browser.until("document.querySelector('.model').innerText.includes('held')")
        button(browser, "Resume")
        button(browser, "Resume it", dialog)
        browser.until("!document.querySelector('.model').innerText.includes('held')")
        browser.run("document.querySelector('.model details').open = true")
        browser.until("document.querySelector('.model details').innerText.includes('demo')")
        button(browser, "Cancel", "document.querySelector('.model details')")
        button(browser, "Cancel it", dialog)
        browser.until(f"!{dialog}")
    done = [each["action"] for each in stack.cli_json("audit") if (each["via"], each["result"]) == ("console", "done")]
    assert done[-3:] == ["workers.change", "workers.change", "requests.cancel"]
    assert not browser.errors


def test_records_are_changed_by_keyboard_and_shown_as_text(stack: Stack, browser: Browser) -> None:
    console(browser, stack, "tenants")
    shown = text(browser, "#view")
    assert all(name in shown for name in (HOSTILE, RIGHT_TO_LEFT)) and browser.run("document.images.length") == 1
    console(browser, stack, "keys")
    browser.run("[...document.querySelectorAll('button')].find(each => each.innerText === 'New key').focus()")
    browser.press("Enter")
    browser.until("Boolean(document.activeElement.closest('dialog'))")
    browser.call("Input.insertText", text="acme")
    browser.press("Enter")
    secret = browser.until("document.querySelector('.secret')?.innerText")
    assert secret.startswith("hr_")
    button(browser, "I have it")
    browser.until("!document.querySelector('dialog') && document.querySelector('#view').innerText.includes('acme')")
    assert secret not in browser.run("document.documentElement.outerHTML")
    with stack.client(secret) as client:
        assert wait_until(lambda: client.get("/v1/models").status_code == 200, "the key works")
        browser.run("[...document.querySelectorAll('tr')].find(row => row.innerText.includes('acme'))"
                    ".querySelector('button.danger').click()")  # fmt: skip
        button(browser, "Revoke it")
        wait_until(lambda: client.get("/v1/models").status_code == 401, "it is revoked")
    assert not browser.errors


def fill(browser: Browser, **values: str) -> None:
    """The question's fields, by their labels' first words with underscores."""
    browser.until("Boolean(document.querySelector('dialog'))")
    for label, value in values.items():
        browser.run(
            "((label, value) => { const field = [...document.querySelectorAll('dialog label')]"
            ".find(each => each.innerText.trim().startsWith(label)).querySelector('input, select');"
            " field.value = value; field.dispatchEvent(new Event('change')); })"
            f"({json.dumps(label.replace('_', ' '))}, {json.dumps(value)})"
        )


def answer(browser: Browser, verb: str) -> str:
    """Press the question's button; what is said against it, or empty once it is done."""
    button(browser, verb, "document.querySelector('dialog')")
    said: str = browser.until(
        "!document.querySelector('dialog') ? 'done' : document.querySelector('dialog .error').innerText"
    )
    return said.removeprefix("done")


def press(browser: Browser, label: str) -> None:
    """The button that is read out so, once it is there; with the keyboard."""
    found = f"[...document.querySelectorAll('#view button')].find(each => each.ariaLabel === {label!r})"
    browser.until(f"Boolean({found})")
    browser.run(f"{found}.focus()")
    browser.press("Enter")


def last_done(stack: Stack, area: str) -> Any:
    """What the newest action of the area, which the console did, changed."""
    with stack.admin() as admin:
        entries = admin.get("/admin/v1/audit", params={"action": area}).json()["data"]
    newest = next(each for each in entries if each["result"] == "done")
    assert newest["via"] == "console"
    return newest["after"]


@pytest.fixture(scope="module")
def rolled(stack: Stack) -> str:
    """A model of two versions whose name an address could break at, and which has no worker."""
    model = "a/b%2f.. <i>ن"

    async def publish() -> None:
        bus = await Bus.connect(stack.run.nats_url, name="operator", credentials=stack.credentials)
        try:
            for version in ("v1", "v2"):
                made = Manifest(name=model, version=version, engine="simulated", context=1000, default_output_tokens=9)
                await Administration(bus, Actor(name="test", address="", via="cli")).publish(made)
        finally:
            await bus.close()

    asyncio.run(publish())
    return model


def faults(browser: Browser) -> list[str]:
    """What the page logged and no refusal explains."""
    browser.run("1")  # What it has said until now has been read.
    found = [error for error in browser.errors if not re.search(r"status of (400|401) ", error)]
    browser.errors.clear()
    return found


def test_bounds_of_queues_and_workers_are_changed(stack: Stack, browser: Browser, rolled: str) -> None:
    def limits() -> dict[str, Any]:
        with stack.admin() as admin:
            found = next(each for each in admin.get("/admin/v1/models").json()["data"] if each["name"] == rolled)
        return found["limits"] | {"fallbacks": found["fallbacks"]}

    console(browser, stack, "models")
    press(browser, f"Change the workers of {rolled}")
    fill(browser, workers_at_least="3", workers_at_most="2")
    assert "not below replicas_min" in answer(browser, "Change it"), "what is refused is said, and asked again"
    fill(browser, workers_at_most="5", seconds="60")
    assert answer(browser, "Change it") == ""
    assert [limits()[f"replicas_{of}"] for of in ("min", "max", "spare", "hold_s")] == [3, 5, 1, 60]
    asked = {"replicas_min": 3, "replicas_max": 5, "replicas_hold_s": 60}
    assert last_done(stack, "models") == {"limits": asked}, "what was left as it was is not asked for"
    browser.until(f"document.activeElement.ariaLabel === 'Change the workers of {rolled}'")
    browser.press("Enter")
    fill(browser, workers_at_most="")
    assert answer(browser, "Change it") == ""
    assert limits()["replicas_max"] is None, "empty is without a bound"
    press(browser, f"Change the queue of {rolled}")
    fill(browser, queued_requests="7", KV="1.25", fallbacks="chat-small, chat-large")
    assert answer(browser, "Change it") == ""
    now = limits()
    assert (now["queued_requests"], now["kv_overbooking"]) == (7, 1.25)
    assert now["fallbacks"] == ["chat-small", "chat-large"]
    assert not faults(browser)


def test_a_tenant_has_limits_of_its_own_for_one_model(stack: Stack, browser: Browser, rolled: str) -> None:
    def own() -> dict[str, Any]:
        with stack.admin() as admin:
            found: dict[str, Any] = admin.get("/admin/v1/tenants/acme").json()["model_limits"]
        return found

    console(browser, stack, "tenants")
    press(browser, "Set limits for one model")
    fill(browser, tenant="nobody", model=rolled)
    assert "no tenant nobody" in answer(browser, "Go on")
    fill(browser, tenant="acme")
    button(browser, "Go on", "document.querySelector('dialog')")
    browser.until("document.querySelector('dialog h2').innerText.startsWith('Limits of acme')")
    fill(browser, requests="3", at_once="2")
    assert answer(browser, "Set them") == ""
    assert (own()[rolled]["rpm"], own()[rolled]["concurrency"], own()[rolled]["input_tpm"]) == (3, 2, None)
    press(browser, f"Change acme for {rolled}")
    fill(browser, requests="")
    assert answer(browser, "Set them") == "" and own()[rolled]["rpm"] is None
    press(browser, f"Remove acme for {rolled}")
    browser.until("Boolean(document.querySelector('dialog'))")
    browser.press("Escape")
    browser.until("!document.querySelector('dialog')")
    assert own(), "who says no changes nothing"
    press(browser, f"Remove acme for {rolled}")
    assert answer(browser, "Remove them") == "" and own() == {}
    assert last_done(stack, "tenants") == {}, "a field that is as by default is left out"
    assert not faults(browser)


def test_who_changes_a_tenant_undoes_nothing_that_others_set(stack: Stack, browser: Browser) -> None:
    """Neither what another changed while the question stood open, nor what the question cannot show."""
    with stack.admin() as admin:
        address = "/admin/v1/tenants/frugal"
        admin.post("/admin/v1/tenants", json={"name": "frugal", "models": []}).raise_for_status()
        admin.patch(address, json={"model_limits": {"chat-small": {"rpm": 5}}}).raise_for_status()
        console(browser, stack, "tenants")
        press(browser, "Change frugal")
        browser.until("Boolean(document.querySelector('dialog'))")
        admin.patch(address, json={"limits": {"rpm": 9}}).raise_for_status()
        fill(browser, weight="2")
        assert answer(browser, "Change it") == ""
        found = admin.get(address).json()
        assert (found["models"], found["limits"]["rpm"], found["weight"]) == ([], 9, 2)
        press(browser, "Change frugal for chat-small")
        browser.until("Boolean(document.querySelector('dialog'))")
        admin.patch(address, json={"model_limits": {"chat-small": {"concurrency": 4}}}).raise_for_status()
        fill(browser, requests="6")
        assert answer(browser, "Set them") == ""
        own = admin.get(address).json()["model_limits"]["chat-small"]
        assert (own["rpm"], own["concurrency"]) == (6, 4)
        press(browser, "Change frugal")
        fill(browser, models="")
        assert answer(browser, "Change it") == "" and admin.get(address).json()["models"] is None
    assert not faults(browser)


def test_a_roll_out_is_started_paused_resumed_aborted_and_promoted(stack: Stack, browser: Browser, rolled: str) -> None:
    def plan() -> dict[str, Any]:
        with stack.admin() as admin:
            found: dict[str, Any] = admin.get(f"/admin/v1/models/{quote(rolled, safe='')}/rollout").json()
        return found

    console(browser, stack, "models")
    for last in ("Abort", "Promote"):
        button(browser, "Start roll-out")
        fill(browser, model=rolled, shares="5, nought", copies="0")
        assert browser.run("document.querySelectorAll('dialog select')[1].value") == "v2"
        assert "nought is no share" in answer(browser, "Start it")
        fill(browser, shares="5 %, 100", least="30", what="tenant")
        assert answer(browser, "Start it") == ""
        started = plan()["plan"]
        assert [started[of] for of in ("to", "steps", "hold_ms", "by", "shadow")] == [
            "v2",
            [5, 100],
            30_000,
            "tenant",
            0,
        ]
        wait_until(lambda: plan()["progress"], "its owner has begun")
        press(browser, f"Pause the roll-out of {rolled}")
        assert answer(browser, "Pause it") == ""
        browser.until("document.querySelector('#view').innerText.includes('paused')")
        press(browser, f"Resume the roll-out of {rolled}")
        assert answer(browser, "Resume it") == "" and plan()["plan"]["wanted"] == "run"
        browser.until("!document.querySelector('#view').innerText.includes('paused')")
        assert "errors" in text(browser, ".evidence"), "what the judge has seen"
        press(browser, f"{last} the roll-out of {rolled}")
        browser.until("Boolean(document.querySelector('dialog button.danger'))")
        assert answer(browser, f"{last} it") == "" and plan()["plan"]["wanted"] == last.lower()
        if last == "Abort":
            browser.until("document.querySelector('#view').innerText.includes('aborted')")
        assert last_done(stack, "rollouts") == {"wanted": last.lower()}
    assert not faults(browser)


def test_a_tab_that_nobody_looks_at_keeps_no_connection(stack: Stack, browser: Browser) -> None:
    console(browser, stack)
    browser.until("document.querySelector('#state').innerText === 'live'")
    browser.run("Object.defineProperty(document, 'hidden', { get: () => window.away, configurable: true })")
    browser.run("window.away = true, document.dispatchEvent(new Event('visibilitychange'))")
    browser.until("document.querySelector('#state').innerText === 'paused'")
    browser.run("window.away = false, document.dispatchEvent(new Event('visibilitychange'))")
    browser.until("document.querySelector('#state').innerText === 'live'")
    assert not faults(browser)


@pytest.mark.parametrize("view", ["live", "tenants", "models", "audit"])
def test_a_key_that_is_revoked_while_its_page_is_open_changes_nothing_more(
    stack: Stack, browser: Browser, view: str
) -> None:
    scopes = ["admin:models", "admin:tenants", "admin:keys"]
    with stack.admin() as admin:
        made = admin.post("/admin/v1/keys", json={"tenant": "demo", "scopes": scopes}).json()
        wait_until(lambda: stack_lets_in(stack, made["key"]), "the key works")
        console(browser, stack, view, made["key"])
        admin.delete(f"/admin/v1/keys/{made['id']}").raise_for_status()
    wait_until(lambda: not stack_lets_in(stack, made["key"]), "it is revoked")
    if view == "tenants":
        press(browser, "Change acme")
        assert "API key" in answer(browser, "Change it")
        browser.press("Escape")
    else:
        browser.until("document.getElementById('notice').textContent.includes('API key')")
    assert not faults(browser)


def test_every_view_is_drawn_on_a_phone_and_by_a_key_of_its_area_alone(stack: Stack, browser: Browser) -> None:
    views = ["live", "requests", "tenants", "keys", "models", "prices", "quarantine", "audit"]
    browser.look(width=360, height=780)
    for view in views:
        console(browser, stack, view)
        assert browser.run("document.body.dataset.drawn") != "failed", text(browser, "#notice")
        assert browser.run("document.documentElement.scrollWidth") == 360, view
        right = "[...document.querySelectorAll('#view button')].map(each => each.getBoundingClientRect().right)"
        assert browser.run(f"Math.max(0, ...{right})") <= 360, f"{view}: buttons can be reached without scrolling aside"
    browser.look()
    with stack.admin() as admin:
        key = admin.post("/admin/v1/keys", json={"tenant": "acme", "scopes": ["admin:keys"]}).json()["key"]
    wait_until(lambda: stack_lets_in(stack, key), "the key works")
    console(browser, stack, key=key)
    assert text(browser, "#views a").split() == ["Keys", "Audit"]
    assert not browser.errors


def stack_lets_in(stack: Stack, key: str) -> bool:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{stack.run.admin_url}/admin/v1/key", headers=headers, trust_env=False).status_code == 200


@pytest.mark.parametrize("workers", [0, 200])
def test_no_worker_and_two_hundred_are_shown(stack: Stack, browser: Browser, workers: int) -> None:
    """With a snapshot of ours in the place of the gateway's."""
    with stack.admin() as admin:
        view = admin.get("/admin/v1/live").json()
    model = next(each for each in view["models"] if each["model"] == "chat-large")
    [pool] = model["pools"]
    one = pool["workers"][0] | {"kv_tokens_used": 4_000, "slots": 8}
    states = ["ready"] * 12 + ["engine_down", "starting", "held"]
    pool["workers"] = [
        one | {"worker": f"worker-{index}-{index:012x}", "state": states[index % 15], "running": index % 9}
        for index in range(workers)
    ]
    pool["ready"] = workers - workers // 5
    body = f"event: live\ndata: {json.dumps(view | {'models': [model]})}\n\n"
    console(browser, stack, "prices")
    browser.run(
        "((real) => { window.fetch = (path, options) => String(path).endsWith('/live')"
        f" ? Promise.resolve(new Response({json.dumps(body)})) : real(path, options); }})(window.fetch)"
    )
    browser.run("location.hash = 'live'")
    browser.until("document.body.dataset.drawn === 'live'")
    if workers:
        assert browser.run("document.querySelectorAll('.cells > i').length") == workers
        assert len(text(browser, ".model td.mono").split()) == 8, "those that need a look, and the rest when asked for"
        button(browser, "Show all 200")
        browser.until("document.querySelectorAll('.model td.mono').length === 200")
        button(browser, "Show 8")
        picture(browser, "console-many")
    else:
        assert "no worker" in text(browser, ".model")


def test_a_key_that_is_for_nothing_there_is_told_so(stack: Stack, browser: Browser) -> None:
    browser.open(f"{stack.run.admin_url}/console#key={stack.run.key}")
    browser.until("document.getElementById('notice').textContent.includes('areas of the administration')")
    assert text(browser, "#view") == ""


def test_the_console_says_what_is_away_and_goes_on_when_it_is_back(start_stack: StartStack, browser: Browser) -> None:
    stack = start_stack()
    browser.open(f"{stack.run.admin_url}/console#key={stack.run.admin_key}")
    browser.until("document.body.dataset.drawn === 'live'")
    for pid in stack.run.pids["nats"]:
        os.kill(pid, signal.SIGSTOP)
    try:
        browser.until("/no scheduler answers|bus/.test(document.querySelector('.model .error').innerText)")
        assert "–" in text(browser, ".sums")
    finally:
        for pid in stack.run.pids["nats"]:
            os.kill(pid, signal.SIGCONT)
    browser.until("!document.querySelector('.model .error').innerText")
    [gateway] = stack.run.pids["gateway"]
    os.kill(gateway, signal.SIGKILL)
    browser.until("/again|reached/.test(document.getElementById('state').innerText)")
    browser.until("document.getElementById('state').innerText === 'live'")
    assert stack.run.pids["gateway"] != [gateway]
    browser.errors.clear()  # The browser logs what it could not reach.
