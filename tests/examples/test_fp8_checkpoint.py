"""benchmarks/fp8_checkpoint.py: the copying weights, by blocks in float8, under a checkpoint's names."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
    "rope_theta": 500000.0,
}


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("fp8_checkpoint")
    sys.path.remove(str(BENCHMARKS))
    for name in ("fp8_checkpoint", "copying_weights"):
        sys.modules.pop(name, None)


def dequantised(held: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    codes, scales = held[f"{name}.weight"].float(), held[f"{name}.weight_scale_inv"]
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes * wide[: codes.shape[0], : codes.shape[1]]


def test_its_layers_are_those_of_the_copying_weights(bench) -> None:
    held = dict(bench.tensors_of(CONFIG, torch.device("cpu")))
    shape = bench.Shape(SimpleNamespace(**CONFIG))
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            got = torch.cat([dequantised(held, f"{at}{name.split('.')[0]}.{part}_proj") for part in parts])
            want = bench.parameter(f"{at}{name}.weight", torch.empty(got.shape), shape)
            apart = (got - want).abs()
            assert (apart <= want.abs() / 16 + got.abs().max() / 448).all()  # three bits of mantissa; tiny ones less
    assert held["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert held["model.embed_tokens.weight"].dtype == torch.bfloat16
    scales = {name: float(held[name]) for name in held if name.endswith(("k_scale", "v_scale"))}
    assert len(set(scales.values())) == len(scales) == 4
    assert "model.layers.1.self_attn.v_proj.v_scale" in scales


def test_its_folder_has_config_tokenizer_and_weights(bench, tmp_path, monkeypatch) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    asked = [
        "--config",
        tmp_path / "config.json",
        "--tokenizer",
        tmp_path,
        "--out",
        tmp_path / "out",
        "--device",
        "cpu",
    ]
    monkeypatch.setattr(sys, "argv", ["fp8_checkpoint.py", *map(str, asked)])
    bench.main()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert (tmp_path / "out" / "tokenizer.json").exists()
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert held["model.layers.1.mlp.down_proj.weight_scale_inv"].shape == (2, 3)
