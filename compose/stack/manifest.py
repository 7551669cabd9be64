"""The manifest of a model that this machine can serve: what it is called, what it can do, where its files lie."""

from compose.stack.data_dir import ComposeError, Engine
from compose.stack.terminal import Terminal
from contracts import clock, registry
from contracts.messages.records import Manifest

SIMULATED_MODEL = "simulated"
SIMULATED_VERSION = "sim-1"
OUTPUT_TOKENS = {"simulated": 16, "vllm": 512}
"""Output limit of a request that states none."""


def default_model(engine: Engine) -> str:
    """The model that is served when none is named."""
    if engine == "simulated":
        return SIMULATED_MODEL
    from compose.stack import models

    return models.DEFAULT_MODEL


def make_manifest(engine: Engine, name: str, sim_context: int) -> Manifest:
    """The manifest of a model; its files are prepared, with progress on the terminal, where it has any."""
    created_at_ms = clock.now_ms()
    if engine == "simulated":
        return Manifest(
            name=registry.check_name("model name", name),
            version=SIMULATED_VERSION,
            engine="simulated",
            context=sim_context,
            default_output_tokens=OUTPUT_TOKENS["simulated"],
            created_at_ms=created_at_ms,
        )
    from compose.stack import models

    terminal = Terminal(stderr=True)
    try:
        prepared = models.prepare(name, progress=terminal.show)
    except models.ModelError as error:
        raise ComposeError(str(error)) from error
    finally:
        terminal.show("")
    return Manifest(
        name=registry.check_name("model name", prepared.name),
        version=prepared.version,
        engine="vllm",
        context=prepared.context,
        endpoints=prepared.endpoints,
        default_output_tokens=OUTPUT_TOKENS["vllm"],
        artifacts=prepared.files,
        path=str(prepared.path),
        tokenizer_fingerprint=prepared.tokenizer_fingerprint,
        created_at_ms=created_at_ms,
    )
