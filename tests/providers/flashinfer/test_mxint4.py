"""MXINT4 experts are packed as FlashInfer's own preparation packs them, and read as its own quantisation wrote them."""

from __future__ import annotations

import ast
import types
from typing import Any, Dict, Optional, Tuple  # noqa: UP035

import pytest
import torch

import kernelhub
from kernelhub.backends.shared.scales import tiled
from kernelhub.ops.formats import from_int4
from tests.backends.test_flashinfer import OnFake
from tests.backends.test_flashinfer_packed_experts import check, inputs, packed
from tests.providers.wheels import wheel

KERNEL = "flashinfer.trtllm_experts_mxint4"
VERSIONS = ("0.6.18.post1", "0.7.2.post1")
QUANTIZE, PREPARE = "_mxint4_quantize", "prepare_trtllm_mxint4_weights"
SOURCES = {
    "utils.py": (
        *("srcToDstBlk16RowMap", "srcToDstBlk32RowMap", "get_shuffle_block_size"),
        *("get_shuffle_matrix_a_row_indices", "get_shuffle_matrix_sf_a_row_indices"),
    ),
    "fused_moe/core.py": (
        *("_maybe_get_cached_w3_w1_permute_indices", "get_w2_permute_indices_with_cache"),
        *("get_reorder_rows_for_gated_act_gemm_row_indices", "convert_to_block_layout"),
    ),
    "fused_moe/prepare.py": (QUANTIZE, PREPARE, "_TRTLLM_MXINT4_PERMUTE_CACHE"),
}


def library(version: str) -> dict[str, Any]:
    """The library's preparation in one namespace; what puts scales into tiles is a kernel, so ours is in its place."""
    space: dict[str, Any] = {
        "torch": torch,
        "Dict": Dict,  # noqa: UP006
        "Optional": Optional,
        "Tuple": Tuple,  # noqa: UP006
        "block_scale_interleave": lambda scale: tiled(scale).flatten(),
        "_normalize_activation": lambda activation: types.SimpleNamespace(is_gated=True),
        "_gemm1_rows": lambda width, activation: 2 * width,
        "_activation_param_view": lambda activation, experts, device: {},
    }
    for path, names in SOURCES.items():
        tree = ast.parse((wheel("flashinfer-python", version) / "flashinfer" / path).read_text())
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", node)
            if getattr(target, "id", getattr(target, "name", None)) not in names:
                continue
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []
                node.body = [item for item in node.body if not isinstance(item, ast.ImportFrom)]
            exec(compile(ast.Module([node], []), path, "exec"), space)
    return space


@pytest.mark.parametrize("version", VERSIONS)
class TestLibrary(OnFake):
    def test_what_it_prepares_is_what_a_plan_packs(self, version) -> None:
        """Its quantisation of the layer gives the checkpoint's tensors; -8 and 7 are both among its codes."""
        space = library(version)
        arguments = inputs(KERNEL)
        experts, hidden, inner = 8, 256, 256
        layer = {"w13": torch.randn(experts, 2 * inner, hidden), "w2": torch.randn(experts, hidden, inner)}
        layer = {name: weight.bfloat16() / 16 for name, weight in layer.items()}
        for name, weight in layer.items():
            codes, scale = space[QUANTIZE](weight)
            scale = scale.view(*weight.shape[:2], -1)
            arguments |= {name: codes, f"{name}_scale": scale}
            values = from_int4(codes)
            assert values.unique().tolist() == list(range(-8, 8))
            steps = scale.float().repeat_interleave(32, 2)
            assert ((values * steps - weight.float()).abs() <= 0.54 * steps).all()  # scales are rounded, too
        sizes = {"num_local_experts": experts, "hidden_size": hidden, "intermediate_size": inner}
        up_first = layer["w13"].roll(inner, 1)
        want = space[PREPARE](up_first, layer["w2"], **sizes)
        mine = packed(KERNEL, arguments)
        for side, gemm in (("w13", "gemm1"), ("w2", "gemm2")):
            tensors = mine[side].tensors
            assert torch.equal(tensors["weight"], want[f"{gemm}_weights"])
            assert torch.equal(tensors["scale"].flatten(), want[f"{gemm}_weights_scale"].flatten())
        check(kernelhub.fused_moe(**mine, backend=KERNEL), arguments)

    def test_it_prepares_no_other_widths(self, version) -> None:
        source = (wheel("flashinfer-python", version) / "flashinfer/fused_moe/prepare.py").read_text()
        body = source.partition(f"\ndef {PREPARE}(")[2].partition("\ndef ")[0]
        assert "hidden_size % 256 != 0 or intermediate_size % 256 != 0" in body

    def test_it_takes_ids_and_weights_in_one_number_alone(self, version) -> None:
        """Once it takes them apart, the adapter should give them so: they lose nothing then."""
        source = (wheel("flashinfer-python", version) / "flashinfer/fused_moe/core.py").read_text()
        body = source.partition("\ndef trtllm_mxint4_block_scale_routed_moe(")[2].partition("\n@flashinfer_api")[0]
        assert "_split_precomputed_routing(" not in body
        assert "``(expert_id << 16) | (weight_bf16.view(int16))``" in body
