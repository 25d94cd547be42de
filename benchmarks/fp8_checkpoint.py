"""Write a checkpoint of a Llama in float8, one scale for each block of 128 x 128, with scales of its KV cache.

    python benchmarks/fp8_checkpoint.py --config llama8b/config.json --tokenizer llama8b --out llama8b-fp8

The weights are those of copying_weights.py, so that greedy tokens need attention and hardly depend on rounding. The
folder has config.json, the tokenizer's files and model.safetensors with the names that Hugging Face checkpoints of
this format have. Each layer has scales of keys and values of its own; an engine uses them if its KV cache is float8.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from copying_weights import Shape, parameter
from torch import Tensor

BLOCK, LARGEST = 128, 448.0  # of float8 e4m3fn
QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="config.json of the model in bfloat16")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer the checkpoint gets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    config = json.loads(options.config.read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if options.tokenizer is not None and (options.tokenizer / name).exists():
            shutil.copy(options.tokenizer / name, options.out)
    from safetensors.torch import save_file

    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors_of(config, torch.device(options.device))}
    save_file(tensors, options.out / "model.safetensors", metadata={"format": "pt"})
    (options.out / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}, indent=1))


@torch.inference_mode()
def tensors_of(config: dict[str, Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the checkpoint."""
    given = SimpleNamespace(**config)
    shape, inner = Shape(given), given.intermediate_size
    rows = [shape.heads * shape.width, shape.kv_heads * shape.width, shape.kv_heads * shape.width]

    def made(name: str, *size: int) -> Tensor:
        return parameter(f"{name}.weight", torch.empty(size, device=device), shape)

    for name, size in (("model.embed_tokens", given.vocab_size), ("lm_head", given.vocab_size), ("model.norm", None)):
        sizes = (shape.hidden,) if size is None else (size, shape.hidden)
        yield f"{name}.weight", made(name, *sizes).bfloat16()
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", made(at + name, shape.hidden).bfloat16()
        fused = {
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj": (f"{at}self_attn.qkv_proj", sum(rows), rows),
            "mlp.gate_proj mlp.up_proj": (f"{at}mlp.gate_up_proj", 2 * inner, [inner, inner]),
        }
        for names, (name, size, parts) in fused.items():
            for part, weight in zip(names.split(), made(name, size, shape.hidden).split(parts), strict=True):
                yield from quantised(at + part, weight)
        yield from quantised(f"{at}self_attn.o_proj", made(f"{at}self_attn.o_proj", shape.hidden, rows[0]))
        yield from quantised(f"{at}mlp.down_proj", made(f"{at}mlp.down_proj", shape.hidden, inner))
        for letter, scale in zip("kv", cache_scales(layer), strict=True):
            yield f"{at}self_attn.{letter}_proj.{letter}_scale", torch.tensor(scale)


def cache_scales(layer: int) -> tuple[float, float]:
    """Scales of a layer's keys and values, whose largest are about 16 and 5: all of them differ."""
    return 0.05 + 0.003 * layer, 0.02 + 0.0013 * layer


def quantised(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A layer's codes and the scales of its blocks."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    blocks = weight.new_zeros(rows * BLOCK, columns * BLOCK, dtype=torch.float32)
    blocks[: weight.shape[0], : weight.shape[1]] = weight
    blocks = blocks.view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / LARGEST
    codes = (blocks / scales[:, None, :, None]).view(rows * BLOCK, columns * BLOCK)[
        : weight.shape[0], : weight.shape[1]
    ]
    yield f"{name}.weight", codes.to(torch.float8_e4m3fn)
    yield f"{name}.weight_scale_inv", scales


if __name__ == "__main__":
    main()
