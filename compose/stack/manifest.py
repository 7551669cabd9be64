"""The manifest of a model that this machine can serve: what it is called, what it can do, where its files lie."""

import msgspec

from compose.stack.data_dir import Engine
from compose.stack.terminal import Terminal
from contracts import clock, registry
from contracts.messages.records import Manifest

SIMULATED_MODEL = "simulated"
SIMULATED_VERSION = "sim-1"
SIMULATED_OUTPUT_TOKENS = 16


def default_model(engine: Engine) -> str:
    """The model that is served when none is named."""
    if engine == "simulated":
        return SIMULATED_MODEL
    from compose.stack import models

    return models.DEFAULT_MODEL


def make_manifest(engine: Engine, name: str, sim_context: int) -> Manifest:
    """The manifest of a model; its files are prepared, with progress on the terminal, where it has any."""
    if engine == "simulated":
        made = Manifest(
            name=name,
            version=SIMULATED_VERSION,
            engine="simulated",
            context=sim_context,
            default_output_tokens=SIMULATED_OUTPUT_TOKENS,
        )
    else:
        from compose.stack import models

        terminal = Terminal(stderr=True)
        try:
            made = models.prepare(name, progress=terminal.show)
        finally:
            terminal.show("")
    registry.check_name("model name", made.name)
    return msgspec.structs.replace(made, created_at_ms=clock.now_ms())
