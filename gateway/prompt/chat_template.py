"""The chat template: messages to the text that vLLM will tokenize.

Follows vLLM 0.32 (``vllm.renderers.chat_utils``, ``vllm.renderers.hf``) and transformers'
``render_jinja_template``: content parts are joined with newlines unless the template itself walks over them, tool
arguments become objects, ``developer`` becomes ``system`` where the template does not know it, and the sandboxed
Jinja environment has the same options, filters and functions.
"""

import json
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from contracts import fingerprint
from contracts.errors import HeadraceError
from contracts.template_variables import is_reserved
from gateway.apis.messages import BILLING_HEADER


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant wrote; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    """Local time, as transformers gives it."""
    return datetime.now().strftime(form)  # noqa: DTZ005


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A model's template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = _environment()
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens
        given = environment.globals.keys() | special_tokens.keys()
        self.variables = frozenset(
            name for name in jinja2.meta.find_undeclared_variables(tree) - given if not is_reserved(name)
        )
        """What it reads and a caller may set."""
        self._walks_parts = next(_loops_over_content(tree), None) is not None
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self.tells_time = "strftime_now" in source
        """It may render otherwise a moment later."""
        self.system_first = _wants_system_first(source)
        """The template takes system text only at the start."""

    @classmethod
    def from_directory(cls, directory: Path) -> "ChatTemplate | None":
        """From ``chat_template.jinja``, or else from ``tokenizer_config.json``; None when the model has none."""
        source = fingerprint.chat_template(directory)
        if source is None:
            return None
        try:
            return cls(source, fingerprint.special_tokens(fingerprint.settings(directory)))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template cannot be read: {error}") from error

    def render(self, fields: dict[str, Any], *, now: datetime | None = None) -> str:
        """The prompt of a validated chat body, at another time than now; raises HeadraceError when the template
        refuses it.
        """
        messages = [self._normal(message) for message in fields["messages"]]
        if not self._knows_developer and any(message["role"] == "developer" for message in messages):
            messages = _developer_to_system(messages)
        tools = [_tool(tool) for tool in fields["tools"]] if "tools" in fields else None
        if continued := fields.get("continue_final_message", False):
            _mark_end(messages[-1])
        try:
            text = self._template.render(
                {
                    **self._special_tokens,
                    **self._extras(fields),
                    **({} if now is None else {"strftime_now": now.strftime}),
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": fields.get("add_generation_prompt", True),
                }
            )
            return _up_to_mark(text) if continued else text
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise HeadraceError(
                "invalid_request", f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def _extras(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The caller's variables, where the template reads them."""
        extras = dict(fields.get("chat_template_kwargs") or {})
        if (effort := fields.get("reasoning_effort")) is not None:
            extras.setdefault("enable_thinking", effort != "none")
            extras["reasoning_effort"] = effort
        return {name: value for name, value in extras.items() if name in self.variables}

    def _normal(self, message: dict[str, Any]) -> dict[str, Any]:
        role = message["role"]
        texts = _texts(message.get("content"))
        if role == "system":
            texts = _without_billing_header(texts)
        normal: dict[str, Any] = {"role": role}
        if self._walks_parts and role != "tool":
            normal["content"] = [{"type": "text", "text": text} for text in texts]
        else:
            normal["content"] = "\n".join(text for text in texts if text)
        if role == "assistant":
            if calls := message.get("tool_calls"):
                normal["tool_calls"] = [_tool_call(call) for call in calls]
            reasoning = message.get("reasoning", message.get("reasoning_content"))
            if reasoning is not None:
                normal["reasoning"] = normal["reasoning_content"] = reasoning
        elif role == "tool" and "tool_call_id" in message:
            normal["tool_call_id"] = message["tool_call_id"]
        if "name" in message:
            normal["name"] = message["name"]
        return normal


_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""As transformers has it: what follows it in the text belongs to the template, not to the message."""


def _mark_end(message: dict[str, Any]) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _MARK
    elif content:
        content[-1] = content[-1] | {"text": content[-1]["text"] + _MARK}


def _up_to_mark(text: str) -> str:
    """Raises ValueError when the template swallowed the message's end."""
    at = text.rindex(_MARK.strip())
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


def _wants_system_first(source: str) -> bool:
    """As vLLM finds out, in a plain environment, where a template that needs more of it counts as one that does."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        environment.from_string(source).render(messages=messages, add_generation_prompt=False)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError):
        return True
    return False


def _texts(content: str | list[dict[str, Any]] | None) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [part["refusal"] if part["type"] == "refusal" else part["text"] for part in content]


def _without_billing_header(texts: list[str]) -> list[str]:
    """Claude Code puts a line first in its system prompt that vLLM drops, in chats, too."""
    kept = []
    for text in texts:
        if text.startswith(BILLING_HEADER):
            text = text.partition("\n")[2]
            if not text:
                continue
        kept.append(text)
    return kept


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """As vLLM's models dump it: fields in this order, description and parameters always there."""
    function = tool["function"]
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": "function", "function": shown}


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments as an object: templates expect one. What is none counts as empty."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _developer_to_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system text in one message at the start: some templates take it nowhere else."""
    messages = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    if not any(message["role"] == "system" for message in messages[1:]):
        return messages
    system = []
    for message in messages:
        if message["role"] == "system" and message["content"]:
            content = message["content"]
            system.append(content if isinstance(content, str) else "\n".join(part["text"] for part in content))
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *others]


# The same static look at the template's tree as vLLM's, so that both sides decide alike.


def _accesses(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether ``node`` is the variable ``name`` (its member ``key``), perhaps filtered, tested or sliced."""
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return _accesses(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _accesses(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return _accesses_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _accesses_name(node.node, name) and node.attr == key


def _accesses_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _aliases(tree: nodes.Template, name: str) -> list[str]:
    """``name`` and the variables that are assigned from it."""
    found, waiting = [name], deque([name])
    while waiting:
        source = waiting.popleft()
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            if isinstance(target, nodes.Name) and target.name not in found and _accesses(assign.node, source):
                found.append(target.name)
                waiting.append(target.name)
    return found


def _loops_over_content(tree: nodes.Template) -> Iterator[nodes.For]:
    """Loops over a message's content, directly, by a variable named ``content``, or by a macro's parameter."""
    lists = _aliases(tree, "messages")
    messages = [
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_accesses(loop.iter, name) for name in lists)
    ]
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        fed = _parameters_fed_with_content(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros[id(loop)] = fed or in_macros.get(id(loop), set())
    for loop in tree.find_all(nodes.For):
        if any(_accesses(loop.iter, name, "content") for name in messages):
            yield loop
        elif isinstance(loop.iter, nodes.Name):
            fed_names = in_macros.get(id(loop))
            if loop.iter.name in (fed_names if fed_names is not None else {"content"}):
                yield loop


def _parameters_fed_with_content(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    fed: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [(parameter.name, value) for parameter, value in zip(macro.args, call.args, strict=False)]
        given += [(keyword.key, keyword.value) for keyword in call.kwargs]
        for name, value in given:
            if any(_accesses(value, message, "content") for message in messages):
                fed.add(name)
    return fed
