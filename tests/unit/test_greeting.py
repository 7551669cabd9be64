"""What ``headrace up`` says: links with keys to a terminal, no key to a file."""

from compose.stack.greeting import Greeting

GREETING = Greeting(
    url="http://127.0.0.1:8080",
    admin_url="http://127.0.0.1:8081",
    metrics_url="http://127.0.0.1:8082/metrics/stack",
    sql="",
    key="hr_callers",
    admin_key="hr_operators",
    key_file=".headrace/key",
    directory=".headrace",
    models=["m"],
)


def test_a_terminal_is_told_links_that_fill_in_the_keys() -> None:
    text = GREETING.text(took_s=1.0, terminal=True)
    assert "http://127.0.0.1:8080/#key=hr_callers\n" in text
    assert "http://127.0.0.1:8081/console#key=hr_operators\n" in text


def test_a_file_is_told_no_key() -> None:
    text = GREETING.text(took_s=1.0, terminal=False)
    assert "hr_" not in text and "http://127.0.0.1:8081/console\n" in text
    assert text.endswith("Headrace is ready at http://127.0.0.1:8080")
