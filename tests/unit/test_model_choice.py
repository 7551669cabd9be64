"""Which model answers a request that names a model or an alias."""

from typing import Any

import pytest

from contracts.errors import HeadraceError
from contracts.messages.base import Endpoint
from contracts.messages.records import Alias
from gateway.intake.choice import Candidate, Need, Offer, capabilities_of, of_alias, of_model

CHAT: tuple[Endpoint, ...] = ("chat/completions",)
CHEAP = Offer("cheap", CHAT, ("json",), "economy", 0.5)
PLAIN = Offer("plain", CHAT, ("json", "tools"), "standard", 0.1)
DEAR = Offer("dear", CHAT, ("json", "tools", "reasoning"), "premium", 0.3)
VECTORS = Offer("vectors", ("embeddings",), ("embeddings",), "economy", 0.0)
ALL = {offer.model: offer for offer in (DEAR, CHEAP, VECTORS, PLAIN)}


def need(*capabilities: Any, ceiling: Any = "premium", endpoint: Any = "chat/completions") -> Need:
    return Need(endpoint, frozenset(capabilities), ceiling)


def asked(alias: Alias, of: Need, offers: dict[str, Offer] = ALL) -> list[str]:
    return [candidate.model for candidate in of_alias(alias, offers, of)]


@pytest.mark.parametrize(
    ("order", "models", "expected"),
    [
        ("cheapest", [], ["cheap", "plain", "dear"]),
        ("dearest", [], ["dear", "plain", "cheap"]),
        ("soonest", [], ["plain", "dear", "cheap"]),
        ("listed", ["plain", "cheap", "gone"], ["plain", "cheap"]),
    ],
)
def test_the_order_is_the_aliass(order: Any, models: list[str], expected: list[str]) -> None:
    assert asked(Alias(name="x", models=models, order=order), need()) == expected


def test_only_those_that_fit_are_asked() -> None:
    auto = Alias(name="auto", order="cheapest")
    assert asked(auto, need("tools")) == ["plain", "dear"]
    assert asked(auto, need("tools", ceiling="standard")) == ["plain"]
    assert asked(auto, need(endpoint="embeddings")) == ["vectors"]
    with pytest.raises(HeadraceError) as refused:
        of_alias(auto, ALL, need("reasoning", ceiling="standard"))
    assert refused.value.code == "invalid_request" and refused.value.param == "model"
    assert "cheap has no reasoning" in refused.value.message and "premium, above standard" in refused.value.message
    with pytest.raises(HeadraceError, match="none that you may use"):
        of_alias(auto, {}, need())


def test_who_is_down_comes_last_and_the_reason_says_so() -> None:
    offers = ALL | {"cheap": CHEAP._replace(load=None)}
    found = of_alias(Alias(name="auto", order="cheapest"), offers, need())
    assert [each.model for each in found] == ["plain", "dear", "cheap"]
    assert found[0].reason == "alias auto, cheapest; cheap is down"
    every = {name: offer._replace(load=None) for name, offer in ALL.items()}
    assert asked(Alias(name="auto", order="cheapest"), need(), every) == ["cheap", "plain", "dear"]


def test_a_named_model_is_first_and_fallbacks_are_compatible() -> None:
    found = of_model(PLAIN, [CHEAP, VECTORS, DEAR], need("tools"))
    assert found == [Candidate("plain", ""), Candidate("dear", "fallback of plain")]
    down = of_model(PLAIN._replace(load=None), [CHEAP, DEAR], need("tools"))
    assert down == [Candidate("dear", "fallback of plain; plain is down"), Candidate("plain", "")]
    assert of_model(CHEAP, [], need("tools")) == [Candidate("cheap", "")]  # Its engine says what it lacks.
    with pytest.raises(HeadraceError, match="premium, above economy"):
        of_model(DEAR, [CHEAP], need(ceiling="economy"))


def test_the_number_of_models_that_are_asked_is_bounded() -> None:
    many = {f"m{number}": PLAIN._replace(model=f"m{number}") for number in range(50)}
    assert len(of_alias(Alias(name="auto", order="cheapest"), many, need())) == 8


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, set()),
        ({"tools": [], "response_format": {"type": "text"}, "text": {"format": {"type": "text"}}}, set()),
        ({"tools": [{}], "tool_choice": "none"}, set()),
        ({"tools": [{}]}, {"tools"}),
        ({"response_format": {"type": "json_schema"}}, {"json"}),
        ({"text": {"format": {"type": "json_object"}}}, {"json"}),
        ({"output_config": {"format": {"type": "json_schema"}}}, {"json"}),
        ({"structured_outputs": {"regex": "a"}, "tools": [{}]}, {"json", "tools"}),
        ({"tools": 3, "response_format": "x", "text": [], "output_config": None}, {"tools"}),
    ],
)
def test_what_a_body_needs(body: dict[str, Any], expected: set[str]) -> None:
    assert capabilities_of(body) == expected
