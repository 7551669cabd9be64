"""Loaded into vLLM's worker processes on a CPU: keeps vLLM 0.32.0 from its attention kernel for AMX.

On processors with AMX that kernel gives wrong attention for bfloat16 prompts of more than a few tokens: asked for the
capital of France, SmolLM2 answers "L'Étoile" in place of "Paris", and float16, float32 and transformers do not. The
vector kernel, which all other x86 processors use, is right. Measured: 338 tokens/s in place of 398 at 32 sequences.
"""

from typing import Any

import vllm.v1.attention.backends.cpu_attn as attention

_choose = attention._get_attn_isa


def _choose_without_amx(*args: Any, **more: Any) -> str:
    choice: str = _choose(*args, **more)
    return "vec" if choice == "amx" else choice


attention._get_attn_isa = _choose_without_amx


class Extension:
    """For vLLM's argument ``worker_extension_cls``, which is what has this module imported."""
