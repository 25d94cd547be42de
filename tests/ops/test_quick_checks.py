"""The quick half of a call's check lets nothing through that the full one refuses, and ordinary calls at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import _MOST_FORMS, Forms, alike, usable
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from kernelhub.ops.indexer.inputs import paged_logits_inputs
from kernelhub.ops.kv_cache.inputs import write_kv_cache_inputs
from kernelhub.ops.linear_attention.inputs import linear_inputs
from kernelhub.ops.mla.cache.inputs import write_mla_cache_inputs
from kernelhub.ops.moe.experts.adapter import ExpertsAdapter
from kernelhub.ops.moe.experts.checks import Operands
from kernelhub.ops.moe.experts.inputs import moe_inputs

FLOAT32, CPU = torch.float32, -1
TENSOR = torch.zeros(2, 3)


def wants_grad() -> Parameter:
    return Parameter(torch.zeros(2, 3))


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: TENSOR.double(), id="dtype"),
        pytest.param(lambda: TENSOR.to("meta"), id="meta"),
        pytest.param(wants_grad, id="grad"),
        pytest.param(lambda: TENSOR.as_subclass(Own), id="subclass"),
        pytest.param(lambda: None, id="None"),
        pytest.param(lambda: [0.0], id="list"),
    ],
)
def test_what_a_check_has_to_look_at_is_not_let_through(other) -> None:
    given = other()
    assert not usable(given, FLOAT32, CPU)
    assert not alike(given, (2, 3), FLOAT32, CPU)
    form = Forms(CPU).of([given])
    assert form is None or form != Forms(CPU).of([TENSOR])


def test_ordinary_tensors_and_parameters_are_let_through() -> None:
    for given in (TENSOR, Parameter(TENSOR, requires_grad=False)):
        assert usable(given, FLOAT32, CPU)
        assert alike(given, (2, 3), FLOAT32, CPU)
        assert not alike(given, (3, 2), FLOAT32, CPU)
        assert not alike(given, (2, 3), FLOAT32, 0)
        assert Forms(CPU).of([given]) is not None
        assert Forms(0).of([given]) is None
    with torch.no_grad():
        assert usable(wants_grad(), FLOAT32, CPU)


def test_forms_are_distinguished_by_all_that_a_check_looks_at_and_do_not_pile_up() -> None:
    forms = Forms(CPU)
    given = [TENSOR, TENSOR.double(), TENSOR.T, TENSOR.new_zeros(2, 3, 1)]
    assert len({forms.of([tensor]) for tensor in given}) == len(given)
    assert forms.of([TENSOR, None]) != forms.of([None, TENSOR])
    assert forms.of([TENSOR], 1.0) != forms.of([TENSOR], 2.0)
    for number in range(3 * _MOST_FORMS):
        forms.add(forms.of([TENSOR], number))
        assert forms.of([TENSOR], number) in forms
    assert len(forms._seen) <= _MOST_FORMS
    forms.add(None)
    assert None not in forms


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp4_gemm": (kernelhub.fp4_gemm, fp4_gemm_inputs(tokens=3, n=64, k=64)),
    "grouped_gemm": (kernelhub.grouped_gemm, grouped_gemm_inputs(n=16, k=32, spare=0)),
    "linear_attention": (kernelhub.linear_attention, linear_inputs(tokens=3)),
    "paged_mqa_logits": (kernelhub.paged_mqa_logits, paged_logits_inputs(seq_lens=(5, 3))),
    "write_kv_cache": (kernelhub.write_kv_cache, write_kv_cache_inputs(tokens=3)),
    "write_mla_cache": (kernelhub.write_mla_cache, write_mla_cache_inputs(tokens=3)),
    "fused_moe": (
        kernelhub.fused_moe,
        moe_inputs(num_experts=4, hidden_size=256, intermediate_size=128, top_k=2, weights="fp8_block"),
    ),
}


@pytest.mark.parametrize("op", CALLS)
def test_a_tensor_changed_in_place_after_a_call_is_looked_at_again(op) -> None:
    """Same objects, other shapes: nothing remembers tensors by what they are called."""
    function, arguments = CALLS[op]
    mine = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    function(**mine)
    function(**mine)
    for tensor in mine.values():
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
            whole = tensor.data
            tensor.data = torch.zeros(*(size + 1 for size in tensor.shape), dtype=tensor.dtype)
            with pytest.raises(InvalidArgument):
                function(**mine)
            tensor.data = whole
    function(**mine)


@pytest.mark.parametrize("op", ["fp4_gemm", "grouped_gemm", "fused_moe"])
def test_weights_that_are_parameters_are_checked_once(op, monkeypatch) -> None:
    function, arguments = CALLS[op]
    weights = {name: value for name, value in arguments.items() if name in ("b", "w13", "w2", "b_scale", "w13_scale")}
    held = {name: Parameter(value, requires_grad=False) for name, value in weights.items()}
    mine = {**arguments, **held}
    expected = function(**arguments)
    assert torch.equal(function(**mine), expected)
    module = __import__(function.op.contract.bind.__module__, fromlist=["check"])
    monkeypatch.setattr(module, "check", lambda *given: pytest.fail("checked again"))
    assert torch.equal(function(**mine), expected)


def test_lengths_in_cpu_memory_are_read_at_each_call() -> None:
    arguments = {**grouped_gemm_inputs(n=16, k=32)}
    arguments["offsets"] = arguments["offsets"].clone()
    kernelhub.grouped_gemm(**arguments)
    arguments["offsets"][0] = 1000
    with pytest.raises(InvalidArgument, match="offsets"):
        kernelhub.grouped_gemm(**arguments)
    cache = {**write_mla_cache_inputs(tokens=3)}
    cache["slot_mapping"] = cache["slot_mapping"].clone()
    kernelhub.write_mla_cache(**cache)
    cache["slot_mapping"][1] = 1 << 40
    with pytest.raises(InvalidArgument, match="slot_mapping"):
        kernelhub.write_mla_cache(**cache)


@pytest.mark.parametrize("scale", ["1", None, float("nan"), True])
def test_a_scale_is_looked_at_at_each_call(scale) -> None:
    arguments = linear_inputs(tokens=3)
    kernelhub.linear_attention(**arguments)
    with pytest.raises(InvalidArgument, match="scale"):
        kernelhub.linear_attention(**{**arguments, "scale": scale})
    moe = CALLS["fused_moe"][1]
    kernelhub.fused_moe(**moe)
    with pytest.raises(InvalidArgument, match="alpha"):
        kernelhub.fused_moe(**moe, alpha=scale)


def test_whole_numbers_reach_kernels_as_floats() -> None:
    moe = {**CALLS["fused_moe"][1], "activation": "swiglu_oai", "alpha": 2, "limit": 7}
    plan = kernelhub.fused_moe.prepare(**moe)
    seen = []
    run = kernelhub.fused_moe.op.contract.bind(
        type("Spy", (ExpertsAdapter,), {"launch": lambda self, *given: seen.append(given[5])})(plan.selection.problem),
        plan.selection.problem,
        CPU,
        int,
        None,
    )
    run(Operands(**{**dict.fromkeys(Operands._fields), **{n: v for n, v in moe.items() if n != "activation"}}))
    assert [type(number) for number in (seen[0].alpha, seen[0].limit)] == [float, float]


def test_a_dtype_that_cannot_be_hashed_is_refused_like_any_other() -> None:
    arguments = grouped_gemm_inputs(n=16, k=32)
    kernelhub.grouped_gemm(**arguments)
    for wrong in ([], "float32", 3):
        with pytest.raises(InvalidArgument, match="out_dtype"):
            kernelhub.grouped_gemm(**arguments, out_dtype=wrong)


@pytest.mark.parametrize("name", ["k_cache", "weights", "block_table", "seq_lens", "max_seq_len"])
def test_a_plan_refuses_what_is_no_tensor(name) -> None:
    arguments = paged_logits_inputs(seq_lens=(5, 3))
    plan = kernelhub.paged_mqa_logits.prepare(**arguments)
    with pytest.raises(InvalidArgument, match=name):
        plan.run(**{**arguments, name: "none"})
