"""Makes LoRA adapters of random weights, strong enough to be heard in every answer."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 4


def make_adapter(directory: Path, model: Path, *, seed: int, strength: float = 0.3) -> Path:
    """As PEFT writes them, for a model of Llama's kind in the directory ``model``."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    widths = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head}
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for projection, width in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            for half, shape in (("lora_A", (RANK, hidden)), ("lora_B", (width, RANK))):
                tensors[f"{name}.{half}.weight"] = random.normal(0, strength, shape).astype("float32")
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    made = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(widths), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps({**made, "task_type": "CAUSAL_LM"}))
    return directory
