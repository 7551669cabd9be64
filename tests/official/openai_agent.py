"""An agent of OpenAI's SDK with a tool: ``openai_agent.py MODEL chat|responses whole|stream required|auto``."""

import asyncio
import sys

from agents import (  # type: ignore[import-not-found,unused-ignore]
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

MODEL, API, MODE, CHOICE = sys.argv[1:]
called: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    called.append(city)
    return "sunny, 20 degrees"


async def main() -> None:
    set_tracing_disabled(True)
    kind = OpenAIChatCompletionsModel if API == "chat" else OpenAIResponsesModel
    agent = Agent(
        name="weather",
        instructions="Answer in one sentence.",
        model=kind(model=MODEL, openai_client=AsyncOpenAI()),
        tools=[get_weather],
        model_settings=ModelSettings(temperature=0, max_tokens=80, tool_choice=CHOICE),
    )
    question = "What is the weather in Paris?"
    if MODE == "whole":
        result = await Runner.run(agent, question, max_turns=4)
    else:
        result = Runner.run_streamed(agent, question, max_turns=4)
        events = [event async for event in result.stream_events()]
        assert len(events) > 5
    assert called if CHOICE == "required" else True
    assert result.final_output
    print("answered", called)


asyncio.run(main())
