"""What callers wrote of a chat, with marks in the control tokens that it spells (``contracts.control_tokens``)."""

from collections.abc import Callable
from typing import Any

from contracts.control_tokens import ControlTokens
from gateway.apis.fields import refuse

_TEXT = ("messages", "input", "system", "instructions", "chat_template_kwargs")
_NAMES = {"role", "type", "name", "id", "call_id", "tool_call_id", "tool_use_id"}
"""They are compared or given back, so they stay as they are and must spell no control token."""


def marked(fields: dict[str, Any], control: ControlTokens) -> dict[str, Any]:
    """The fields of a chat's valid body; raises HeadraceError for a control token in a name.

    Of tools the descriptions are text; the rest comes back in calls or constrains them.
    """

    def text(where: str, name: str, value: str) -> str:
        if name in _NAMES and control.spelled_in(value):
            refuse(where, "A name must not hold a control token of the model.")
        return value if name in _NAMES else control.marked(value)

    def tool(where: str, name: str, value: str) -> str:
        if name != "description" and control.spelled_in(value):
            refuse(where, "Beside descriptions, tools must not hold a control token of the model.")
        return control.marked(value) if name == "description" else value

    changed = {name: _each(name, "", fields[name], text) for name in _TEXT if name in fields}
    if "tools" in fields:
        changed["tools"] = _each("tools", "", fields["tools"], tool)
    return fields | changed


def _each(where: str, name: str, value: Any, text: Callable[[str, str, str], str]) -> Any:
    """``value`` with each of its strings, keys too, as ``text`` gives it: of the field, the nearest key, the string."""
    if isinstance(value, str):
        return text(where, name, value)
    if isinstance(value, list):
        return [_each(where, name, item, text) for item in value]
    if isinstance(value, dict):
        return {text(where, "", key): _each(where, key, item, text) for key, item in value.items()}
    return value
