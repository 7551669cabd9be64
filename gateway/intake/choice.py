"""Which model answers: the order in which those that fit a request are asked, and why. Pure.

A request names a model or an alias. What fits it serves the API asked for, can what the body needs, and costs no more
than its ceiling. Who has no worker that is ready comes last, whatever the order: it may have one in a moment.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from contracts.errors import HeadraceError
from contracts.messages.base import Endpoint
from contracts.messages.records import PRICE_TIERS, Alias, AliasOrder, Capability, PriceTier

CANDIDATES_MAX = 8
"""Models that are asked for one request; each is a question on the bus, and perhaps another count of the prompt."""

MOVES_ON = ("overloaded", "unavailable", "model_not_found", "context_length_exceeded")
"""Refusals of one model after which the next one is asked: it is full or down, was removed, or is too small."""


class Offer(NamedTuple):
    """A model that the caller may use."""

    model: str
    endpoints: tuple[Endpoint, ...]
    capabilities: tuple[Capability, ...]
    tier: PriceTier
    load: float | None
    """Requests for each slot of its workers; None while none of these is ready."""


class Need(NamedTuple):
    """What a request asks of whoever answers it."""

    endpoint: Endpoint
    capabilities: frozenset[Capability]
    ceiling: PriceTier


class Candidate(NamedTuple):
    """A model to ask, and why it is asked; empty where it was named and nothing had to be chosen."""

    model: str
    reason: str


_ORDERS: dict[AliasOrder, Callable[[Offer], Any]] = {
    "listed": lambda _: 0,
    "cheapest": lambda offer: PRICE_TIERS.index(offer.tier),
    "dearest": lambda offer: -PRICE_TIERS.index(offer.tier),
    "soonest": lambda offer: (offer.load or 0.0, PRICE_TIERS.index(offer.tier)),
}


def lacks(offer: Offer, need: Need) -> str:
    """Why the model does not fit, for a person; empty when it does."""
    if need.endpoint not in offer.endpoints:
        return f"does not serve {need.endpoint}"
    if missing := sorted(need.capabilities - set(offer.capabilities)):
        return f"has no {' and no '.join(missing)}"
    return _too_dear(offer, need)


def _too_dear(offer: Offer, need: Need) -> str:
    if PRICE_TIERS.index(offer.tier) <= PRICE_TIERS.index(need.ceiling):
        return ""
    return f"is of the price tier {offer.tier}, above {need.ceiling}"


def of_alias(alias: Alias, offers: Mapping[str, Offer], need: Need) -> list[Candidate]:
    """Whom to ask, in order; raises HeadraceError when nobody fits. ``offers``: all that the caller may use."""
    listed = [offers[name] for name in alias.models if name in offers] if alias.models else list(offers.values())
    fitting = [offer for offer in listed if not lacks(offer, need)]
    if not fitting:
        why = "; ".join(f"{offer.model} {lacks(offer, need)}" for offer in listed[:CANDIDATES_MAX])
        message = f"No model of {alias.name!r} fits this request: {why or 'there is none that you may use'}."
        raise HeadraceError("invalid_request", message, param="model")
    return _candidates(sorted(fitting, key=_ORDERS[alias.order]), f"alias {alias.name}, {alias.order}")


def of_model(named: Offer, fallbacks: Sequence[Offer], need: Need) -> list[Candidate]:
    """The model that was named, and fallbacks that fit; raises HeadraceError when it is above the ceiling itself.

    What it lacks beside that its API or its engine tells.
    """
    if dear := _too_dear(named, need):
        raise HeadraceError("invalid_request", f"The model {named.model!r} {dear}.", param="model")
    fitting = [offer for offer in fallbacks if not lacks(offer, need)]
    found = _candidates([named, *fitting], f"fallback of {named.model}")
    return [Candidate(named.model, "") if each.model == named.model else each for each in found]


def _candidates(offers: Sequence[Offer], reason: str) -> list[Candidate]:
    """Those with a worker first; the reason names who would have come before."""
    up, down = [it for it in offers if it.load is not None], [it for it in offers if it.load is None]
    best = min((offers.index(offer) for offer in up), default=0)
    passed = [f"{offer.model} is down" for offer in offers[:best]]
    why = "; ".join([reason, *passed[:CANDIDATES_MAX]])
    return [Candidate(offer.model, why) for offer in (*up, *down)][:CANDIDATES_MAX]


def capabilities_of(body: Mapping[str, Any]) -> frozenset[Capability]:
    """What a body needs of a model, read without checking it: an odd value is for its API to refuse."""
    found: set[Capability] = set()
    if body.get("tools") and body.get("tool_choice") != "none":
        found.add("tools")
    formats = [body.get("response_format"), body.get("structured_outputs")]
    nested = [body.get("text"), body.get("output_config")]
    formats += [given.get("format") for given in nested if isinstance(given, dict)]
    if any(isinstance(given, dict) and given.get("type") != "text" for given in formats):
        found.add("json")
    return frozenset(found)
