"""An agent of Anthropic's SDK, its tool runner: ``claude_agent.py MODEL whole|stream|cut``."""

import sys
from typing import Any

from anthropic import Anthropic, beta_tool

MODEL, MODE = sys.argv[1:]
called: list[str] = []


@beta_tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    called.append(city)
    return "sunny, 20 degrees"


def main() -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 60,
        "tools": [get_weather],
        "tool_choice": {"type": "any"},
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "extra_body": {"temperature": 0},
        "max_iterations": 3,
    }
    if MODE == "cut":
        # The limit ends the call in its middle: the runner must not run it.
        last = Anthropic().beta.messages.tool_runner(**body | {"max_tokens": 12}).until_done()
        assert last.stop_reason == "max_tokens" and not called, (last, called)
    elif MODE == "whole":
        messages = list(Anthropic().beta.messages.tool_runner(**body))
        assert len(messages) == 3 and len(called) >= 2, (messages, called)
    else:
        for stream in Anthropic().beta.messages.tool_runner(**body, stream=True):
            assert [event.type for event in stream][-1] == "message_stop"
        assert len(called) >= 2, called
    print("answered", called)


main()
