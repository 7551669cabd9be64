"""The pages in a real browser, on a real stack: chat, and the console as operators use it, by hand and by keyboard."""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.support.browser import Browser, page
from tests.support.stack import Stack, StartStack


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with page() as found:
        yield found


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
    browser.run("document.getElementById('message').value = '<b>one</b> two'; document.getElementById('send').click()")
    browser.until("document.querySelectorAll('#talk .figures').length")
    assert "tokens/s" in text(browser, "#talk .figures") and text(browser, "#talk .user .text") == "<b>one</b> two"
    assert text(browser, "#talk .assistant .text") and not browser.errors


def test_the_console_shows_what_runs_as_it_runs(stack: Stack, browser: Browser) -> None:
    browser.open(f"{stack.run.admin_url}/console#key={stack.run.admin_key}")
    browser.until("document.body.dataset.drawn === 'live'")
    assert "worker-0" in text(browser, ".model") and "live" in text(browser, "#state")
    busy = {"tokens": ["x "] * 400, "itl_ms": 20}
    body = {"model": stack.model, "messages": [{"role": "user", "content": "hi"}], "stream": True, "simulate": busy}
    with stack.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        browser.until("[...document.querySelectorAll('.sums dd')][2].innerText.startsWith('1')")
        browser.until("/\\d\\/s/.test(document.querySelector('.sums dd').innerText)")
        browser.run("document.querySelector('.model details').open = true")
        browser.until("document.querySelector('.model details').innerText.includes('demo')")
    assert not browser.errors


def test_a_key_that_is_for_nothing_there_is_told_so(stack: Stack, browser: Browser) -> None:
    browser.open(f"{stack.run.admin_url}/console#key={stack.run.key}")
    browser.until("document.getElementById('notice').textContent.includes('areas of the administration')")
    assert text(browser, "#view") == ""


def test_the_console_says_when_no_scheduler_answers(start_stack: StartStack, browser: Browser) -> None:
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
