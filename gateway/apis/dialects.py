"""Constraints in the spelling of another server, or of another API: to ignore one would change the answer."""

from collections.abc import Collection
from typing import Any

from gateway.apis.fields import refuse

_OURS = {
    "chat/completions": "'response_format' or 'structured_outputs'",
    "completions": "'response_format' or 'structured_outputs'",
    "responses": "'text.format' or 'structured_outputs'",
    "messages": "'output_config.format'",
}
_ELSEWHERE = (
    "json_schema",  # llama.cpp
    "grammar",  # llama.cpp, TGI
    "format",  # Ollama
    "regex",  # SGLang
    "ebnf",
    "structural_tag",
    "response_format",  # OpenAI's chat
    "structured_outputs",  # vLLM
    "guided_json",  # vLLM's former names
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    "output_format",  # Anthropic's former name
)
_NVEXT_HARMLESS = ("annotations", "agent_hints", "backend_instance_id", "use_raw_prompt")


def refuse_dialects(endpoint: str, fields: dict[str, Any], known: Collection[str]) -> None:
    """Raises HeadraceError that names the field and ours; ``known`` are the fields that the API has."""
    if (ours := _OURS.get(endpoint)) is None:
        return
    for name in _ELSEWHERE:
        if name in fields and name not in known:
            refuse(name, f"This field is not known here: say it in {ours}.")
    for name in ("text", "output_config"):
        if name not in known and isinstance(fields.get(name), dict) and "format" in fields[name]:
            refuse(f"{name}.format", f"This field is not known here: say it in {ours}.")
    if fields.get("extra_body"):
        refuse("extra_body", "Client libraries put what it holds into the body itself; send it there.")
    for name in fields.get("nvext") or () if isinstance(fields.get("nvext"), dict) else ():
        if name not in _NVEXT_HARMLESS:
            refuse(f"nvext.{name[:64]}", f"This extension is not known here: say it in the body itself, or in {ours}.")
    form = fields.get("response_format")
    if isinstance(form, dict) and form.get("type") in ("json_object", "text"):
        for name in ("schema", "json_schema"):
            if form.get(name) is not None:
                refuse(
                    f"response_format.{name}",
                    "A schema needs the type 'json_schema', and stands in 'json_schema.schema'.",
                )
    adds = endpoint == "completions"
    if fields.get("add_special_tokens") not in (None, adds) and endpoint != "messages":
        refuse("add_special_tokens", f"Here it is {str(adds).lower()}; send token ids for another prompt.")
