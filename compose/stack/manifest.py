"""The manifest of a model that this machine can serve: what it is called, what it can do, where its files lie."""

import msgspec

from compose.stack.data_dir import Engine
from compose.stack.terminal import Terminal
from contracts import registry
from contracts.messages.records import Manifest, PriceTier

SIMULATED_MODEL = "simulated"
SIMULATED_CONTEXT = 1_048_576
SIMULATED_OUTPUT_TOKENS = 16


def default_model(engine: Engine) -> str:
    """The model that is served when none is named."""
    if engine == "simulated":
        return SIMULATED_MODEL
    from compose.stack import models

    return models.DEFAULT_MODEL


def make_manifest(engine: Engine, name: str, sim_context: int, price_tier: PriceTier = "standard") -> Manifest:
    """The manifest of a model; its files are prepared, with progress on the terminal, where it has any."""
    if engine == "simulated":
        made = Manifest(
            name=name,
            version="sim-1" if sim_context == SIMULATED_CONTEXT else f"sim-1-{sim_context}",
            engine="simulated",
            context=sim_context,
            default_output_tokens=SIMULATED_OUTPUT_TOKENS,
            capabilities=("tools", "json", "reasoning"),  # Its answers are scripted.
        )
    else:
        from compose.stack import models

        terminal = Terminal(stderr=True)
        try:
            made = models.prepare(name, progress=terminal.show)
        finally:
            terminal.show("")
    registry.check_name("model name", made.name)
    if price_tier != made.price_tier:
        made = msgspec.structs.replace(made, price_tier=price_tier)
        made = msgspec.structs.replace(made, version=f"v1-{registry.identity(made)[:8]}")
    return made
