"""Prompts that a tokenizer and a chat template are tried with; their token ids are part of a fingerprint.

New ones go to the end. A change gives every version another fingerprint: they must be published again.
"""

from typing import Any, NamedTuple


class Probe(NamedTuple):
    """``text`` of a completion, or ``chat``: the fields of a chat body that a template reads."""

    text: str = ""
    chat: dict[str, Any] | None = None


def _talk(*messages: tuple[str, Any], **fields: Any) -> Probe:
    return Probe(chat={"messages": [{"role": role, "content": content} for role, content in messages], **fields})


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Name, ü & <b>"},
        "days": {"type": "integer", "minimum": 1},
    },
    "required": ["city"],
}
_WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Looks.", "parameters": _PARAMETERS}}
_CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": [1, 2.50, null, true]}'},
}
_USER = {"role": "user", "content": "Will it rain?"}

TEXTS = (
    "a",
    "Hello, world!",
    " leading and trailing ",
    "two  three   four    spaces",
    "tab\tand\ttabs\t\tend",
    "line\nline\n\nline\n\n\n",
    "line\r\nline\r\n",
    "\u00a0no\u00a0break\u2003wide\u200bzero\ufeffmark",
    "The quick brown fox jumps over the lazy dog. THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG.",
    "don't can't we'll I'M they'Re",
    "0 1 12 123 1234 12345 123456 1,234,567.89 3.14e-10 0xFF 1/2 ½ ² ①",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2]}  # comment\n",
    '{"key": "value", "list": [1, 2.0, null, true]}\n',
    '<p class="x">&amp; &lt; &#x27;</p> https://example.org/a?b=c#d user@example.org',
    "Falsches Üben von Xylophonmusik quält jeden größeren Zwerg",
    "e\u0301 \u00e9 A\u030a \u00c5 \ufb01 \u1e9b\u0323 \uac00 \u1100\u1161",
    "Съешь же ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "敏捷的棕色狐狸跳过懒狗。今天天气怎么样？",
    "いろはにほへと チリヌルヲ 漢字とｶﾅ",
    "키스의 고유조건은 입술끼리 만나야",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "דג סקרן שט בים מאוכזב",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇨🇭 ❤️ ☺ 🧑‍🚀",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β = ¬(¬α ∨ β)",
    "\u202eright to left\u202c \u0000\u0007\u001b[0m",
    "<s> </s> <unk> <pad> <|endoftext|> <|im_start|> <|im_end|> [INST] [/INST] <bos> <eos> <think> </think>",
    "supercalifragilisticexpialidocious" * 3,
    "ab" * 50 + "." * 50 + " " * 50 + "!",
    "A sentence that goes on, and on; a comma, a dash - and more. " * 8,
)

CHATS = (
    _talk(("user", "Hello")),
    _talk(("user", "")),
    _talk(("user", "  spaces before and after  \n")),
    _talk(("system", "You are terse."), ("user", "Hello")),
    _talk(("system", ""), ("user", "Hello")),
    _talk(("system", "  One.\n\nTwo.  "), ("user", "a"), ("assistant", "b"), ("user", "c")),
    _talk(("user", "a"), ("assistant", " b\n"), ("user", "c"), ("assistant", ""), ("user", "d")),
    _talk(("user", "a"), ("user", "b")),
    _talk(("user", "a"), ("system", "late"), ("user", "b")),
    _talk(("developer", "Be kind."), ("user", "Hello")),
    _talk(("user", _parts("one", "two 🧑‍🚀"))),
    _talk(("system", _parts("S", "T")), ("user", _parts("one"))),
    _talk(("user", "Γειά 你好 שלום 👋🏽"), ("assistant", "<b>Grüezi</b> & \"so\"")),
    _talk(("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb"), ("user", "c")),
    _talk(("user", "<|im_end|>\n<|im_start|>system\n</s>[INST]<|eot_id|><start_of_turn>")),
    _talk(("user", "a"), add_generation_prompt=False),
    _talk(("user", "a"), ("assistant", "Once upon "), add_generation_prompt=False, continue_final_message=True),
    _talk(("user", "Rain?"), tools=[_WEATHER]),
    _talk(("system", "Be brief."), ("user", "Rain?"), tools=[_WEATHER, _CLOCK]),
    Probe(chat={"messages": [_USER, {"role": "assistant", "content": "Let me see.", "tool_calls": [_CALL]}]}),
    Probe(
        chat={
            "messages": [
                _USER,
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": false}'},
            ],
            "tools": [_WEATHER],
        }
    ),
    Probe(
        chat={
            "messages": [
                _USER,
                {"role": "assistant", "content": None, "tool_calls": [_CALL, _CALL | {"id": "call_2"}]},
                {"role": "tool", "tool_call_id": "call_1", "content": _parts("no", "rain")},
                {"role": "tool", "tool_call_id": "call_2", "content": ""},
                {"role": "assistant", "content": "No."},
                {"role": "user", "content": "Sure?"},
            ],
            "tools": [_WEATHER, _CLOCK],
        }
    ),
    _talk(("user", "Think."), chat_template_kwargs={"enable_thinking": False}),
    _talk(("user", "Think."), chat_template_kwargs={"enable_thinking": True}),
)  # fmt: skip
