"""``chat_template_kwargs``: which variables of a model's chat template a caller may set, and how large.

The gateway passes on those that the model's template reads; both gateway and worker hold what is said here. vLLM hands
whatever is left to ``apply_chat_template`` of transformers, where some names are arguments of its own: they would pad,
cut or replace the prompt behind the back of whoever counted it.
"""

from typing import Any

import msgspec

from contracts.errors import HeadraceError

FIELD = "chat_template_kwargs"
BYTES_MAX = 8192
"""Of all names and values together, as JSON: switches and short instructions."""
LEVELS_MAX = 4
"""Objects and lists inside each other, the field's own object among them."""

_RESERVED = {
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "additional_special_tokens",
}


def is_reserved(name: str) -> bool:
    """Whether ``name`` is an argument of the renderer, or the model's own token, and no caller's."""
    return name in _RESERVED or name.startswith("return_") or name.endswith("_token")


def check(variables: dict[str, Any]) -> None:
    """Raises HeadraceError (invalid_request) that names a variable nobody may set, or the field that is too large."""
    for name in variables:
        if is_reserved(name):
            where = f"{FIELD}.{name[:64]}"
            raise HeadraceError(
                "invalid_request", f"{where}: No variable of a chat template has this name. Leave it out.", param=where
            )
    if len(msgspec.json.encode(variables)) > BYTES_MAX:
        raise HeadraceError("invalid_request", f"{FIELD}: This has more than {BYTES_MAX} bytes.", param=FIELD)
    if _deeper_than(variables, LEVELS_MAX):
        raise HeadraceError("invalid_request", f"{FIELD}: This is nested deeper than {LEVELS_MAX} levels.", param=FIELD)


def _deeper_than(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(part, levels - 1) for part in parts)
