"""The liars of the contract tests, right kernels with one defect each, are caught on a user's machine too."""

from __future__ import annotations

import importlib

import pytest

import kernelhub
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Band, Kernel
from tests.contract import test_liars as attention_liars
from tests.contract import test_quant_liars as quant_liars
from tests.dispatch.backends import register

SUBJECTS = (
    ("merge_attention_states", "test_liars", "Merge"),
    ("fp4_gemm", "test_fp4_gemm_liars", "Dequantised"),
    ("fp8_gemm", "test_fp8_liars", "Dequantized"),
    ("bmm_fp8", "test_fp8_liars", "DequantizedBatch"),
    ("grouped_gemm", "test_grouped_gemm_liars", "PerGroup"),
    ("mqa_logits", "test_indexer_liars", "Logits"),
    ("paged_mqa_logits", "test_indexer_liars", "PagedLogits"),
    ("topk_indices", "test_indexer_liars", "TopK"),
    ("linear_attention", "test_linear_attention_liars", "Chunked"),
    ("mla_attention", "test_mla_liars", "Gathered"),
    ("write_mla_cache", "test_mla_liars", "Scatter"),
    ("route_experts", "test_moe_liars", "Routing"),
    ("fused_moe", "test_moe_liars", "Experts"),
)


def liars() -> list[tuple[str, str]]:
    """(op, target) of every lie and of the truths among them."""
    found = []
    for op, module, base in SUBJECTS:
        home = importlib.import_module(f"tests.contract.{module}")
        lies = [lie for lie in getattr(home, base).__subclasses__() if lie.__module__ == home.__name__]
        found += [(op, f"{home.__name__}:{lie.__name__}") for lie in lies]
    for op, prefix in (("attention", "Dense"), ("paged_attention", "Paged")):
        for lie in (*attention_liars.LIES, attention_liars.Truth):
            found.append((op, f"{attention_liars.__name__}:{prefix}{lie.__name__}"))
    return found


def is_caught(op: str, target: str) -> bool:
    """Whether a quick run finds the kernel wrong, or else a full one."""
    _ = HUB.settings
    schema = HUB.registry.contracts[op].schema
    facets = (anything(*schema.structural),)
    same_bits = "OtherBits" not in target
    kernel = Kernel(
        op, "liar.k", target, "lies", Band.PLUGIN, facets, frozenset(schema.features), deterministic=not same_bits
    )
    handle = register("liar", kernel)
    try:
        asked = {"backend": "liar", "device": "cpu"}
        truth = ":True" in target or ":Truth" in target or target.endswith("Truth")
        quick = kernelhub.verify(op, quick=True, **asked)
        assert quick.results[0].checks
        if not quick.ok or truth:
            return not quick.ok
        return not kernelhub.verify(op, **asked).ok
    finally:
        handle.remove()


@pytest.mark.parametrize(("op", "target"), liars(), ids=lambda value: value.rpartition(":")[2] or value)
def test_wrong_kernels_are_detected_and_right_ones_pass(op, target) -> None:
    name = target.rpartition(":")[2]
    assert is_caught(op, target) == (not name.removeprefix("Dense").removeprefix("Paged").startswith("Tru"))


@pytest.mark.parametrize("lie", [*quant_liars.LIES, quant_liars.Truth], ids=lambda lie: lie.__name__)
def test_wrong_quantisers_are_detected_by_a_check(lie) -> None:
    caught = any(is_caught(op, quant_liars._make(lie, op)) for op in quant_liars.OPS)
    assert caught == (lie is not quant_liars.Truth)
