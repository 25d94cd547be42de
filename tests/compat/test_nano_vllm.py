"""nano-vllm through kernelhub on a CPU, as benchmarks/nano_vllm.py serves it: logits are those of transformers.

Prompts, prompts with a cached prefix, and decode with a padded batch, by flash-attn's functions and by a plan's step,
on one rank and on two. The layers are those of nano_vllm_form, the interface rebuilt; where NANO_VLLM_CHECKOUT names a
folder of https://github.com/GeeeekExplorer/nano-vllm, its own, too, with its model, context and loader.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

import kernelhub
from tests.runtime.world import run_world

transformers = pytest.importorskip("transformers")

_BENCHMARK = importlib.util.spec_from_file_location(
    "nano_vllm_benchmark", Path(__file__).parents[2] / "benchmarks" / "nano_vllm.py"
)
nano_vllm = importlib.util.module_from_spec(_BENCHMARK)
_BENCHMARK.loader.exec_module(nano_vllm)

CHECKOUT = os.environ.get("NANO_VLLM_CHECKOUT")
SOURCES = {"rebuilt": str(Path(__file__).parent / "nano_vllm_form"), "checkout": CHECKOUT}
PAGE = 256
TABLES = [[3, 1, -1], [5, -1, -1], [0, 2, 4]]
# Of each step the first and the last token of each of three sequences: prompts, prompts with a cached prefix, decode.
PROMPTS = ([(0, 256), (0, 15), (0, 256)], [(256, 300), (15, 20), (256, 513)])
DECODES = [[(last + token, last + token + 1) for last in (300, 20, 513)] for token in range(3)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A Qwen3 with sharp attention, three sequences, and the logits of transformers after each of their tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    rest = {"initializer_range": 0.3, "rope_theta": 1e6, "attention_bias": False, "tie_word_embeddings": False}
    config = transformers.Qwen3Config(**sizes, **heads, **rest, bos_token_id=1, eos_token_id=2)
    model = transformers.Qwen3ForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    sequences = [torch.randint(3, 128, (length + 3,)) for length in (300, 20, 513)]
    with torch.no_grad():
        logits = [model(sequence[None]).logits[0] for sequence in sequences]
    torch.save((sequences, logits), folder / "expected.pt")
    return folder


def served(source: str, folder: str, by_steps: bool, rank: int, size: int) -> dict[str, Any]:
    """How far logits are from those of transformers at most, over their deviation, by step; and which kernels ran."""
    torch._dynamo.config.disable = True  # nano-vllm compiles its norms
    nano_vllm.through_kernelhub(source, by_steps)
    attention, context, models, runner = (
        importlib.import_module(f"nanovllm.{name}")
        for name in ("layers.attention", "utils.context", "models.qwen3", "engine.model_runner")
    )
    if hasattr(attention, "store_kvcache_kernel"):  # a Triton kernel, which a CPU does not run
        attention.store_kvcache = lambda *given: kernelhub.write_kv_cache(*given[:4], given[4].long())
        torch.set_default_dtype(torch.float16)  # its norms change their input in place where that is float32 already
    config = transformers.AutoConfig.from_pretrained(folder)
    model = models.Qwen3ForCausalLM(config)
    runner.load_model(model, folder)
    for module in model.modules():
        if hasattr(module, "k_cache"):
            shape = (7, PAGE, config.num_key_value_heads // size, config.head_dim)
            module.k_cache, module.v_cache = torch.full((2, *shape), float("nan"))
    sequences, expected = torch.load(Path(folder) / "expected.pt")
    wrong = []
    for at, spans in enumerate((*PROMPTS, *DECODES)):
        ids = torch.cat([sequence[slice(*span)] for sequence, span in zip(sequences, spans, strict=True)])
        positions = torch.cat([torch.arange(*span) for span in spans])
        slots = torch.cat([slots_of(row, *span) for row, span in enumerate(spans)])
        tables = torch.tensor(TABLES, dtype=torch.int32)
        if at < len(PROMPTS):
            starts = offsets([last - first for first, last in spans]), offsets([last for _, last in spans])
            longest = max(last - first for first, last in spans), max(last for _, last in spans)
            context.set_context(True, *starts, *longest, slots, None, tables if at else None)
        else:  # a captured batch has padding
            ids, positions, slots = (
                torch.cat([x, x.new_tensor([end])]) for x, end in ((ids, 0), (positions, 0), (slots, -1))
            )
            lens = torch.tensor([*(last for _, last in spans), 0], dtype=torch.int32)
            tables = torch.cat([tables, torch.zeros(1, 3, dtype=torch.int32)])
            context.set_context(False, slot_mapping=slots, context_lens=lens, block_tables=tables)
        with torch.inference_mode():
            logits = model.compute_logits(model(ids, positions))
        if rank == 0:
            want = torch.stack([whole[last - 1] for whole, (_, last) in zip(expected, spans, strict=True)])
            wrong.append(((logits[:3] - want).abs().max() / want.std()).item())
    ran = {row.op: row.kernel for row in kernelhub.report().rows}
    return {"wrong": wrong, "ran": ran, "from": attention.__file__}


def slots_of(row: int, first: int, last: int) -> Tensor:
    at = torch.arange(first, last)
    return (torch.tensor(TABLES[row])[at // PAGE] * PAGE + at % PAGE).int()


def offsets(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("by_steps", [False, pytest.param(True, marks=pytest.mark.full)], ids=["functions", "steps"])
@pytest.mark.parametrize("source", SOURCES)
def test_logits_are_those_of_transformers(source, by_steps, ranks, checkpoint, tmp_path) -> None:
    if SOURCES[source] is None:
        pytest.skip("NANO_VLLM_CHECKOUT names no checkout of nano-vllm: four cases of its own layers are left out")
    act = functools.partial(served, SOURCES[source], str(checkpoint), by_steps)
    found = run_world(ranks, act, tmp_path)
    assert all(isinstance(rank, dict) and "wrong" in rank for rank in found), found
    assert len(found[0]["wrong"]) == 5
    assert max(found[0]["wrong"]) < {"rebuilt": 1e-4, "checkout": 0.05}[source]  # float32, float16
    for rank in found:
        assert Path(rank["from"]).is_relative_to(Path(SOURCES[source]).resolve())
        assert {"attention", "paged_attention"} <= set(rank["ran"])
        assert ranks == 1 or rank["ran"]["all_reduce"] == "torch.distributed"
