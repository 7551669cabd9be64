"""How vLLM is started: its command line and its environment. Imports no vLLM.

Without ``vllm_gpu_memory_utilization`` the engine runs on a CPU, with measured defaults; with it on a GPU, with vLLM's.
"""

from typing import Any

import msgspec

from contracts.messages.records import Manifest
from worker.config import WorkerConfig

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TQDM_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # A step that takes longer has hung; vLLM's own 300 s are too long for callers.
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "30",
    # A fork would share this process's signal pipe and sockets: ending the engine looks like SIGTERM to us.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Variables that vLLM and its engine processes read; those that are set already stay."""


def task_of(manifest: Manifest) -> str:
    """vLLM's name for what the engine does: it serves either text, or embeddings alone."""
    return "embed" if "embeddings" in manifest.endpoints else "generate"


def engine_arguments(config: WorkerConfig, manifest: Manifest, more: dict[str, Any] | None = None) -> list[str]:
    """vLLM's command line. ``more``: arguments of one start."""
    arguments: dict[str, Any] = {
        "model": manifest.path,
        "served_model_name": manifest.name,
        "max_num_seqs": config.vllm_slots,
        "max_model_len": manifest.context,
        "load_format": "safetensors",  # never a pickle
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        # Workers fetch nothing for a caller: without a list vLLM takes every domain. Operators name theirs here.
        "allowed_media_domains": ["none.invalid"],
    }
    if task_of(manifest) == "embed":
        arguments |= {"runner": "pooling", "convert": "embed"}
    else:
        arguments |= {
            "enable_prompt_tokens_details": True,
            # Free white space lets small models run on in it for ever: 14 of 24 answers ended, without it 24 of 24.
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
        }
    if config.vllm_adapters and task_of(manifest) == "generate":
        arguments |= {"enable_lora": True, "max_loras": config.vllm_adapters, "max_lora_rank": config.vllm_adapter_rank}
    if config.vllm_gpu_memory_utilization is None:
        arguments |= {
            "enforce_eager": True,  # compilation takes 65 s and gains at most 15 %
            "block_size": 32,  # with 128, the default on a CPU, short prompts never hit the prefix cache
            "kv_cache_memory_bytes": config.vllm_kv_cache_bytes,
            "worker_extension_cls": "worker.engines.vllm.cpu.Extension",  # see there
            "max_num_batched_tokens": 512,  # a step of 2048 takes 3 s, and aborts wait for it
        }
    else:
        arguments["gpu_memory_utilization"] = config.vllm_gpu_memory_utilization
    line = []
    for name, value in (arguments | manifest.engine_arguments | config.vllm_engine_args | (more or {})).items():
        flag = name.replace("_", "-")
        if value is True:
            line.append(f"--{flag}")
        elif value is False:
            line.append(f"--no-{flag}")
        elif isinstance(value, list):
            line += [f"--{flag}", *map(str, value)]
        elif value is not None:
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            line.append(f"--{flag}={text}")
    return line
