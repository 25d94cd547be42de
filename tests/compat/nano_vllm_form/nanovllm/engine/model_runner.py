"""Weights of a checkpoint: the names are Hugging Face's, some of them parts of one weight here."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import nn

PARTS = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def load_model(model: nn.Module, path: str) -> None:
    for file in Path(path).glob("*.safetensors"):
        for name, weight in load_file(file).items():
            *where, own, _ = [part for part in name.split(".") if part not in ("model", "self_attn", "mlp")]
            own, part = PARTS.get(own, (own, 0))
            module = model.get_submodule(".".join([*where, own]))
            if hasattr(module, "load"):
                module.load(part, weight)
            else:
                module.weight.data.copy_(weight)
