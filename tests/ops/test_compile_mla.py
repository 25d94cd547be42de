"""Latent attention under torch.compile, torch.export and fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernelhub
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.cache.inputs import write_mla_cache_inputs
from kernelhub.ops.models.shapes import MlaModel
from tests.conftest import DEVICE
from tests.ops.test_compile import compiled

SMALL = MlaModel("small", 4, 32, 16)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def inputs(**changes: Any) -> dict[str, Any]:
    return mla_attention_inputs(SMALL, **{"dtype": torch.float32, "page_size": 16, "device": DEVICE} | changes)


class TestMlaAttention:
    @pytest.mark.parametrize("topk", [None, 6])
    def test_compiles_at_most_two_graphs_over_batch_sizes(self, topk: int | None) -> None:
        run, counter = compiled(lambda arguments: kernelhub.mla_attention(**arguments) + 1)
        for batch in (1, 2, 3, 5, 8):
            arguments = inputs(seq_lens=(30,) * batch, topk=topk)
            assert torch.equal(run(arguments), kernelhub.mla_attention(**arguments) + 1)
        assert counter.frame_count <= 2

    @pytest.mark.parametrize("kv_scale", ["value", "tensor"])
    def test_lse_out_scales_and_a_named_backend_go_through(self, kv_scale: str) -> None:
        arguments = inputs(seq_lens=(30, 7), q_lens=3, kv_dtype=torch.float8_e4m3fn)
        arguments["sinks"] = torch.ones(4, device=DEVICE)
        if kv_scale == "tensor":
            arguments["kv_scale"] = torch.tensor([arguments["kv_scale"]], device=DEVICE)
        options = {"return_lse": True, "backend": "torch.gathered"}
        want, want_lse = kernelhub.mla_attention(**arguments, **options)
        run, counter = compiled(lambda a, out: kernelhub.mla_attention(**a, out=out, **options))
        out = torch.full_like(want, torch.nan)
        got, lse = run(arguments, out)
        assert got is out
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
        assert counter.frame_count == 1

    def test_plans_run_inside_a_compiled_region(self) -> None:
        arguments = inputs(seq_lens=(30, 12), q_lens=3, topk=5)
        want = kernelhub.mla_attention(**arguments) * 2
        operands = [arguments[name] for name in ("q", "kv_cache", "block_table", "seq_lens")]
        listed = arguments["topk_indices"]
        plan = kernelhub.mla_attention.prepare(**arguments)
        step = plan.begin(*operands[2:])
        for call in (
            lambda q: plan.run(q, *operands[1:], topk_indices=listed) * 2,
            lambda q: step.run(q, operands[1], listed) * 2,
        ):
            run, counter = compiled(call)
            assert torch.equal(run(operands[0]), want)
            assert "kernelhub.mla_attention" in counter.graphs[0].code

    def test_fake_tensors_give_the_shapes_dtypes_and_device_of_the_real_call(self) -> None:
        with FakeTensorMode():
            q = torch.empty(7, 2, 16, 576, dtype=torch.bfloat16, device="cuda")
            kv_cache = torch.empty(30, 64, 576, dtype=torch.bfloat16, device="cuda")
            table = torch.empty(7, 4, dtype=torch.int32, device="cuda")
            lengths = torch.empty(7, dtype=torch.int32, device="cuda")
            out, lse = kernelhub.mla_attention(q, kv_cache, table, lengths, scale=0.1, return_lse=True)
            assert (tuple(out.shape), out.dtype, out.device.type) == ((7, 2, 16, 512), torch.bfloat16, "cuda")
            assert (tuple(lse.shape), lse.dtype) == ((7, 16, 2), torch.float32)

    def test_the_operators_pass_torch_s_own_check(self) -> None:
        a = inputs(seq_lens=(30, 7))
        operands = (a["q"], a["kv_cache"], a["block_table"], a["seq_lens"], 0.1, 32)
        arguments = (*operands, None, None, True, None, None, None, None, True, None)
        torch.library.opcheck(torch.ops.kernelhub.mla_attention.default, arguments)
        out = torch.empty(2, 4, 32, device=DEVICE)
        torch.library.opcheck(torch.ops.kernelhub.mla_attention_out.default, (*arguments, out))

    def test_a_parameter_is_taken_as_the_tensor_that_it_is(self) -> None:
        arguments = inputs(seq_lens=(30, 7))
        want = kernelhub.mla_attention(**arguments)
        held = torch.nn.Parameter(arguments["q"], requires_grad=False)
        assert torch.equal(kernelhub.mla_attention(**(arguments | {"q": held})), want)


class TestWriteMlaCache:
    def test_compiles_at_most_two_graphs_over_sizes_and_writes_the_cache(self) -> None:
        run, counter = compiled(lambda a: kernelhub.write_mla_cache(**a) * 2)
        for tokens in (2, 3, 9, 17):
            arguments = write_mla_cache_inputs(tokens=tokens, latent_dim=16, rope_dim=8, page_size=32, device=DEVICE)
            want = kernelhub.write_mla_cache.reference(**arguments)
            assert torch.equal(run(arguments), want * 2)
            assert torch.equal(arguments["kv_cache"], want)
        assert counter.frame_count <= 2

    @pytest.mark.parametrize("kv_scale", [0.03, torch.tensor([0.03])], ids=["value", "tensor"])
    def test_scales_and_a_named_backend_go_through(self, kv_scale) -> None:
        arguments = write_mla_cache_inputs(tokens=5, latent_dim=16, kv_dtype=torch.float8_e4m3fn, device=DEVICE)
        arguments["kv_scale"] = kv_scale.to(DEVICE) if isinstance(kv_scale, torch.Tensor) else kv_scale
        want = kernelhub.write_mla_cache.reference(**arguments)
        run, counter = compiled(lambda a: kernelhub.write_mla_cache(**a, backend="torch.scatter").view(torch.uint8))
        assert torch.equal(run(arguments), want.view(torch.uint8))
        assert counter.frame_count == 1

    def test_a_plan_runs_inside_a_compiled_region(self) -> None:
        arguments = write_mla_cache_inputs(tokens=5, latent_dim=16, device=DEVICE)
        want = kernelhub.write_mla_cache.reference(**arguments)
        plan = kernelhub.write_mla_cache.prepare(**arguments)
        run, counter = compiled(lambda a: plan.run(**a) * 1)
        assert torch.equal(run(arguments), want)
        assert "kernelhub.write_mla_cache" in counter.graphs[0].code

    def test_the_operator_passes_torch_s_own_check(self) -> None:
        a = write_mla_cache_inputs(tokens=5, latent_dim=16)
        operands = (a["kv_c"].clone(), a["k_rope"].clone(), a["slot_mapping"], None, None, None, a["kv_cache"])
        torch.library.opcheck(torch.ops.kernelhub.write_mla_cache.default, operands)
