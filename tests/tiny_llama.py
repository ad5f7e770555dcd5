"""A checkpoint of two small Llama layers, in the layout of a downloaded one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

E, H, HKV, D = 32, 4, 2, 8
LLAMA = {
    "model_type": "llama", "hidden_size": E, "num_attention_heads": H, "num_key_value_heads": HKV,
    "head_dim": D, "num_hidden_layers": 2, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
    "attention_bias": False, "max_position_embeddings": 128,
}  # fmt: skip


def llama_weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {"q": (H * D, E), "k": (HKV * D, E), "v": (HKV * D, E), "o": (E, H * D)}
    return {
        f"model.layers.{layer}.self_attn.{name}_proj.weight": 0.2
        * torch.randn(shape, generator=random)
        for layer in (0, 1)
        for name, shape in shapes.items()
    }


def write_tiny_llama(folder: Path) -> None:
    """Write the folder of the checkpoint."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    save_file(llama_weights(), folder / "model.safetensors")
