"""What a vLLM engine is configured with: its settings, vLLM's command line and its environment. Imports no vLLM."""

from typing import Any

import msgspec

from contracts.messages.base import Endpoint


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. The defaults are for a CPU; with ``gpu_memory_utilization`` vLLM's own for a GPU hold."""

    model_path: str
    public_name: str
    """The model's name in requests and answers."""
    endpoints: tuple[Endpoint, ...] = ("chat/completions", "completions", "responses", "messages")
    """What the engine serves: either text, or embeddings alone."""
    slots: int = 32
    context: int | None = None
    """Longest sequence; None: the model's own."""
    kv_cache_bytes: int = 256 * 2**20
    """On a CPU. 23 KB a token with SmolLM2-135M: 11,000 tokens."""
    gpu_memory_utilization: float | None = None
    """Share of the GPU's memory that vLLM takes."""
    omp_threads_bind: str = ""
    """Cores of the engine, such as ``0``; on a CPU two engines on the same core run at a third of the speed."""
    check_timeout_s: float = 20.0
    """How long the engine's loop may be silent. A step of 512 prompt tokens takes 1 s on a CPU alone."""
    extra_engine_args: dict[str, Any] = {}
    """vLLM's command-line arguments with underscores, over those that are set here; null takes one out."""

    @property
    def embeds(self) -> bool:
        return "embeddings" in self.endpoints


def engine_arguments(config: VllmConfig) -> list[str]:
    """vLLM's command line."""
    arguments: dict[str, Any] = {
        "model": config.model_path,
        "served_model_name": config.public_name,
        "max_num_seqs": config.slots,
        "max_model_len": config.context,
        "use_tqdm_on_load": False,
    }
    if config.embeds:
        arguments |= {"runner": "pooling", "convert": "embed"}
    else:
        arguments |= {
            "enable_prompt_tokens_details": True,
            # Free white space lets small models run on in it for ever: 14 of 24 answers ended, without it 24 of 24.
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
            # With "auto" the arguments of tools that are not strict would be free text.
            "tool_strict_level": "parameter",
        }
    if config.gpu_memory_utilization is None:
        arguments |= {
            "enforce_eager": True,  # compilation takes 65 s and gains at most 15 %
            "block_size": 32,  # with 128, the default on a CPU, short prompts never hit the prefix cache
            "kv_cache_memory_bytes": config.kv_cache_bytes,
            "worker_extension_cls": "worker.engines.vllm.cpu.Extension",  # see there
            "max_num_batched_tokens": 512,  # a step of 2048 takes 3 s, and aborts wait for it
        }
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    line = []
    for name, value in (arguments | config.extra_engine_args).items():
        flag = name.replace("_", "-")
        if value is True:
            line.append(f"--{flag}")
        elif value is False:
            line.append(f"--no-{flag}")
        elif value is not None:
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            line.append(f"--{flag}={text}")
    return line


def engine_environment(config: VllmConfig) -> dict[str, str]:
    """Variables that vLLM and its child processes read; those that are set already stay."""
    variables = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "TQDM_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # A step that takes longer has hung; vLLM's own 300 s are too long for callers.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "30",
        # A fork would share this process's signal pipe and sockets: ending the child looks like SIGTERM to us.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if config.omp_threads_bind:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = config.omp_threads_bind
    return variables
