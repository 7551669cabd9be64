"""``headrace model publish`` and ``unpublish``: versions of models."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from compose.cli.common import DataDirOption, JsonOption, names, on_bus, show
from compose.stack.data_dir import ComposeError, Engine, Target
from contracts.messages.records import Capability, PriceTier

if TYPE_CHECKING:
    from contracts.bus import Bus
    from contracts.messages.records import Manifest

VersionOption = Annotated[str, typer.Option("--version", help="A name that this model has not used yet.")]


def publish(
    name: Annotated[str, typer.Argument(help="The model's name.")],
    version: VersionOption,
    source: Annotated[
        str, typer.Option("--from", help="Directory of a Hugging Face model, or its URL (file, s3, gs, https).")
    ] = "",
    base: Annotated[
        str, typer.Option(help="It is a LoRA adapter of this model, or of one version of it: model@version.")
    ] = "",
    store: Annotated[str, typer.Option(help="URL of a store for the parts; the bus's own without.")] = "",
    in_place: Annotated[bool, typer.Option("--in-place", help="Copy nothing: workers read the files there.")] = False,
    golden: Annotated[bool, typer.Option(help="Have the engine answer once, for workers to compare with.")] = True,
    engine: Annotated[Engine, typer.Option(help="Engine of the model's workers.")] = "vllm",
    context: Annotated[int | None, typer.Option(min=1, help="Tokens; the model's own without.")] = None,
    default_output_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    capabilities: Annotated[str | None, typer.Option(help="Such as tools,json,reasoning; 'none' for none.")] = None,
    price_tier: Annotated[PriceTier, typer.Option(help="What price ceilings are compared with.")] = "standard",
    engine_argument: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of the engine's own.")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Publish a version of a model: check, hash and upload its files, and enter its manifest, which never changes.

    Run it again after it was cut off: what is there is not sent again. The first version of a model is served at once,
    later ones when they are promoted. A LoRA adapter (--base) is a model of its own, of adapter_config.json and
    adapter_model.safetensors as PEFT writes them; the workers of its base serve it beside that, without a restart.
    """
    from compose.stack import publishing, records
    from contracts.administration import Administration
    from contracts.artifacts.files import BadArtifact

    if in_place and store:
        raise ComposeError("--in-place copies nothing, so there is nothing for --store")
    try:
        wanted = publishing.Publication(
            name=name,
            version=version,
            source=source,
            base=base,
            engine=engine,
            store=store,
            in_place=in_place,
            golden=golden,
            context=context,
            default_output_tokens=default_output_tokens,
            capabilities=None if capabilities is None else _capabilities(capabilities),
            price_tier=price_tier,
            engine_arguments=dict(map(_argument, engine_argument or [])),
        )
    except msgspec.ValidationError as error:
        raise ComposeError(str(error)) from error

    async def perform(bus: "Bus", _: Target) -> "Manifest":
        try:
            changed = await publishing.publish(bus, Administration(bus, records.operator()), wanted)
        except BadArtifact as error:
            raise ComposeError(str(error)) from error
        return changed.after  # type: ignore[return-value]

    manifest = on_bus(data_dir, perform)
    size = sum(artifact.size for artifact in manifest.artifacts.values())
    text = f"{manifest.name} {manifest.version}: {len(manifest.artifacts)} files, {size / 1e6:,.1f} MB"
    show(manifest, text, as_json=as_json)


def unpublish(name: str, version: VersionOption, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Remove a version that is not served, and the parts in the bus that no version refers to any more."""
    from compose.stack import publishing, records
    from contracts.administration import Administration
    from contracts.artifacts.files import BadArtifact

    async def perform(bus: "Bus", _: Target) -> int:
        try:
            return await publishing.unpublish(bus, Administration(bus, records.operator()), name, version)
        except BadArtifact as error:
            raise ComposeError(str(error)) from error

    parts = on_bus(data_dir, perform)
    shown = {"name": name, "version": version, "parts_deleted": parts}
    show(shown, f"{name} {version} is removed, {parts} parts deleted", as_json=as_json)


def _capabilities(text: str) -> tuple[Capability, ...]:
    try:
        return msgspec.convert([] if text == "none" else names(text), tuple[Capability, ...])
    except msgspec.ValidationError as error:
        raise ComposeError(f"--capabilities: {error}") from error


def _argument(text: str) -> tuple[str, Any]:
    """The value as JSON where it is some, else as text."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ComposeError(f"--engine-argument {text[:80]!r} is not NAME=VALUE")
    try:
        return name.replace("-", "_"), msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name.replace("-", "_"), value
