"""`write_kv_cache` inside of torch.compile: one opaque operator, which writes both caches."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.ops.kv_cache.inputs import write_kv_cache_inputs
from tests.conftest import DEVICE
from tests.ops.test_compile import compiled

SIZES = {"num_kv_heads": 2, "num_q_heads": 1, "head_dim_qk": 16, "page_size": 32, "device": DEVICE}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def test_compiles_at_most_two_graphs_over_sizes_and_writes_the_caches() -> None:
    run, counter = compiled(lambda a: kernelhub.write_kv_cache(**a)[1] * 2)
    for tokens in (2, 3, 9, 17):
        arguments = write_kv_cache_inputs(tokens=tokens, **SIZES)
        want = kernelhub.write_kv_cache.reference(**arguments)
        assert torch.equal(run(arguments), want[1] * 2)
        assert torch.equal(arguments["k_cache"], want[0])
        assert torch.equal(arguments["v_cache"], want[1])
    assert counter.frame_count <= 2


@pytest.mark.parametrize("scale", [0.03, torch.tensor([0.03, 0.5])], ids=["value", "head"])
def test_scales_a_layout_and_a_plan_go_through(scale) -> None:
    made = write_kv_cache_inputs(tokens=5, kv_dtype=torch.float8_e5m2, kv_layout="HND", **SIZES)
    scale = scale.to(DEVICE) if isinstance(scale, torch.Tensor) else scale
    arguments = made | {"k_scale": scale, "v_scale": scale}
    want = kernelhub.write_kv_cache.reference(**arguments)
    run, counter = compiled(lambda a: kernelhub.write_kv_cache(**a, backend="torch.scatter")[0].view(torch.uint8))
    assert torch.equal(run(arguments), want[0].view(torch.uint8))
    assert counter.frame_count == 1
    plan = kernelhub.write_kv_cache.prepare(**arguments)
    del arguments["kv_layout"]
    run, counter = compiled(lambda a: plan.run(**a)[1].view(torch.uint8) * 1)
    assert torch.equal(run(arguments), want[1].view(torch.uint8))
    assert "kernelhub.write_kv_cache" in counter.graphs[0].code


def test_the_operator_passes_torch_s_own_check() -> None:
    a = write_kv_cache_inputs(tokens=5, **SIZES | {"device": "cpu"})
    read = (a["k"].clone(), a["v"].clone(), a["slot_mapping"], None, None, None, None, "NHD", None, None, True, None)
    torch.library.opcheck(torch.ops.kernelhub.write_kv_cache.default, (*read, a["k_cache"], a["v_cache"], None))


def test_queries_are_rotated_in_place() -> None:
    run, counter = compiled(lambda a: kernelhub.write_kv_cache(**a)[2] * 2)
    for tokens in (2, 3, 9):
        arguments = write_kv_cache_inputs(tokens=tokens, rope="neox", **SIZES)
        arguments |= {name: arguments[name].clone() for name in ("k", "v", "q")}
        want = kernelhub.write_kv_cache.reference(**arguments)
        assert torch.equal(run(arguments), want[2] * 2)
        assert torch.equal(arguments["q"], want[2])
        assert torch.equal(arguments["k_cache"], want[0])
    assert counter.frame_count <= 2
