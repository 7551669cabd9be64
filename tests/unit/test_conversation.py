"""By what a roll-out tells conversations apart."""

from typing import Any

import pytest

from gateway.intake.conversation import conversation_of


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "Be short."}


def test_every_turn_of_a_chat_is_of_one_conversation() -> None:
    first = conversation_of({"messages": [SYSTEM, user("Hello")]})
    turn = [SYSTEM, user("Hello"), {"role": "assistant", "content": "Hi"}, user("And now?")]
    assert first == conversation_of({"messages": turn})
    assert len(first) == 16
    assert first != conversation_of({"messages": [SYSTEM, user("Hello!")]})
    assert first != conversation_of({"messages": [user("Hello")]})


def test_a_callers_own_key_goes_first() -> None:
    assert conversation_of({"prompt_cache_key": "a", "messages": [user("x")]}) == conversation_of(
        {"prompt_cache_key": "a", "messages": [user("y")]}
    )


def test_parts_are_told_by_their_texts() -> None:
    assert conversation_of({"messages": [user([{"type": "text", "text": "a"}])]}) != conversation_of(
        {"messages": [user([{"type": "text", "text": "b"}])]}
    )


@pytest.mark.parametrize(
    "fields", [{}, {"prompt": "x"}, {"messages": []}, {"messages": [SYSTEM]}, {"messages": ["x"]}, {"messages": "x"}]
)
def test_where_nothing_tells_there_is_none(fields: dict[str, Any]) -> None:
    assert conversation_of(fields) == ""
