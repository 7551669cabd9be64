"""Model directories made for a test."""

import json


def safetensors(tensors: dict[str, bytes]) -> bytes:
    """A file of the format, each tensor of bytes."""
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values())


TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1, "Hello": 2, "user": 3}, "unk_token": "<unk>"},
    }
)
"""A ``tokenizer.json`` of four tokens."""
