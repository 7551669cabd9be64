"""Loaded into vLLM's worker processes on a CPU: keeps vLLM 0.32.0 from three faults there.

A batch of requests with and without LoRA adapters: the latter have the index -1, which PyTorch reads as the last
adapter, so that a request for the base was answered with an adapter's weights. Here their part is zero. (On a GPU
vLLM's kernels leave them out.)

The scores of a prompt's tokens (``prompt_logprobs``, ``echo`` with ``logprobs``), where the engine can load adapters:
their logits are taken with the adapters of the tokens that are sampled, which are others and of another number; the
engine died of it. Here they are the base's, which they are anyway for an adapter that leaves ``lm_head`` alone.

The attention kernel for AMX:
On processors with AMX that kernel gives wrong attention for bfloat16 prompts of more than a few tokens: asked for the
capital of France, SmolLM2 answers "L'Étoile" in place of "Paris", and float16, float32 and transformers do not. The
vector kernel, which all other x86 processors use, is right. Measured: 338 tokens/s in place of 398 at 32 sequences.
"""

from typing import Any

import torch
import vllm.v1.attention.backends.cpu_attn as attention
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

_choose = attention._get_attn_isa


def _choose_without_amx(*args: Any, **more: Any) -> str:
    choice: str = _choose(*args, **more)
    return "vec" if choice == "amx" else choice


attention._get_attn_isa = _choose_without_amx

_shrink = lora_ops.bgmv_shrink


def shrink_for_those_with_an_adapter(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, scaling: float = 1.0
) -> None:
    """``output`` [tokens, rank]: the first half of what an adapter adds; zero where the index [tokens] is below 0."""
    _shrink(inputs, weights, output, indices, scaling)
    output[: indices.shape[0]].masked_fill_((indices < 0).unsqueeze(1), 0)


lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrink_for_those_with_an_adapter


_add_logits = punica_cpu.PunicaWrapperCPU.add_lora_logits


def add_to_sampled_logits(
    self: punica_cpu.PunicaWrapperCPU, y: torch.Tensor, x: torch.Tensor, *weights: Any, **more: Any
) -> None:
    """``y`` [tokens, vocabulary] gets what adapters add, where the tokens are those that are sampled."""
    if x.numel() // x.shape[-1] == self.sampler_indices.shape[0]:
        _add_logits(self, y, x, *weights, **more)


punica_cpu.PunicaWrapperCPU.add_lora_logits = add_to_sampled_logits


class Extension:
    """For vLLM's argument ``worker_extension_cls``, which is what has this module imported."""
