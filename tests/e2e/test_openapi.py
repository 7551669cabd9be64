"""The documents of both interfaces are served with pages to read them."""

import httpx

from tests.support.stack import Stack


def test_the_documents_and_their_pages_are_served_without_a_key(stack: Stack) -> None:
    for path, start in (("/openapi.json", '{"openapi":"3.1'), ("/asyncapi.json", '{"asyncapi":"3.0')):
        answer = httpx.get(stack.run.url + path, trust_env=False)
        assert answer.status_code == 200 and answer.text.startswith(start)
    for path in ("/docs", "/asyncapi", "/docs/"):
        answer = httpx.get(stack.run.url + path, trust_env=False)
        assert answer.status_code == 200 and "<title>Headrace" in answer.text
        assert "default-src 'none'" in answer.headers["content-security-policy"]
