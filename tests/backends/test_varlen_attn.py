"""`torch.varlen_attn` keeps the contract, given an operator that keeps torch's word; and what it is not asked for."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.shared.operators import mismatch
from kernelhub.backends.torch import attention as records
from kernelhub.backends.torch.attention.varlen import SCHEMA
from kernelhub.dispatch.constraint import OnDevice, TorchBuilt, anything
from kernelhub.dispatch.kernel import Backend, Band
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import NoKernel
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import attention_inputs
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.models.shapes import AttentionModel
from tests.backends.flash_attn_numbers import check_bounds, check_operands, run
from tests.contract.attention import DenseContract
from tests.contract.few import check_few_cases
from tests.contract.test_liars import failures
from tests.dispatch.backends import EVERYWHERE, OF_TRUST

# As released versions declare it (2.10 has not been read).
SCHEMAS = {
    "2.11": SCHEMA.replace(") -> (", ", Tensor? seqused_k=None, Tensor? alibi_slopes=None) -> (", 1),
    "2.13 and 2.14": SCHEMA.replace(
        ") -> (",
        ", Tensor? seqused_k=None, Tensor? alibi_slopes=None, Tensor? block_table=None, int? num_splits=None) -> (",
        1,
    ),
}


def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right,
            **unused):  # fmt: skip
    """FlashAttention-2's conventions; the result of a token in no sequence is anything."""
    assert not any(value is not None for value in unused.values())
    assert (dropout, debug) == (0.0, False)
    check_operands(q, k, v)
    assert q.shape[-1] == v.shape[-1]
    check_bounds(cu_q, max_q, cu_k, max_k)
    assert max_q > 1, "heads are taken for queries"
    assert not (causal and window_size_left >= 0)
    left, right = (-1 if side >= max_k else side for side in (window_size_left, window_size_right))
    if not causal and max(left, right) >= 0:  # as the operator reads a side without a limit
        window_size_left, window_size_right = (max_k if side < 0 else side for side in (left, right))
    out = q.new_full(q.shape, math.nan)
    window = (window_size_left, -1 if causal else window_size_right)
    lse = run(q, k, v, scale, causal, window, 0.0, None, math.inf, out, cu_q, cu_k, None, None, False)
    return out, lse, q.new_empty(0), q.new_empty(0), q.new_empty(0)


@pytest.fixture
def on_the_cpu(clean_hub):
    """The record as it is, but for a CPU, where the operator has an implementation meanwhile."""
    record = next(kernel for kernel in records.KERNELS if kernel.name == "torch.varlen_attn")
    own = tuple(item for item in record.constraints if not isinstance(item, (OnDevice, TorchBuilt)))
    copy = dataclasses.replace(
        record, name="fake.varlen_attn", band=Band.PLUGIN, standings=EVERYWHERE, constraints=(anything("device"), *own)
    )
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    handle = kernelhub.register_backend(
        SimpleNamespace(__name__="fake", BACKEND=Backend("fake", "torch's in plain torch"), KERNELS=[copy])
    )
    yield
    handle.remove()
    library._destroy()


def test_each_feature_is_right(on_the_cpu) -> None:
    check_few_cases(DenseContract, "fake.varlen_attn")


def test_the_adapter_keeps_the_contract(on_the_cpu) -> None:
    subject = type("Subject", (DenseContract,), {"kernel": "fake.varlen_attn", "device": "cpu"})
    assert len(subject.accepted_cases()) >= 30
    assert failures(DenseContract, "fake.varlen_attn", "cpu") == []


def test_tokens_past_the_last_sequence_are_left_as_they_are(on_the_cpu) -> None:
    arguments = attention_inputs(AttentionModel("grouped", 6, 2, 64, 64), q_lens=(17, 0, 3), kv_lens=(17, 9, 30))
    arguments |= {"q": torch.cat([arguments["q"], torch.randn_like(arguments["q"][:5])]), "causal": True}
    for sizes in ({}, {"max_seqlen_q": 17, "max_seqlen_k": 30}):
        out = torch.full((25, 6, 64), 3.0, dtype=torch.bfloat16)
        kernelhub.attention(**arguments, **sizes, out=out, backend="fake.varlen_attn")
        want = kernelhub.attention.reference(**arguments)
        assert compare_out(out[:20], want[:20], largest_value(arguments)).ok
        assert (out[20:] == 3.0).all()


@pytest.mark.parametrize("window", [(3, -1), (-1, 2), (3, 2), (40, 30), (0, -1)])
@pytest.mark.parametrize("bounds", [{}, {"max_seqlen_q": 12, "max_seqlen_k": 8}])
def test_windows_of_sequences_of_more_queries_than_keys(on_the_cpu, window, bounds) -> None:
    """The operator reads an open side of a window as the bound on keys, which does not reach that far."""
    arguments = attention_inputs(AttentionModel("grouped", 4, 2, 64, 64), q_lens=(12, 3, 1), kv_lens=(4, 8, 0))
    sizes = {name: value for name, value in arguments.items() if not name.startswith("max_seqlen")} | bounds
    out = kernelhub.attention(**sizes, window=window, backend="fake.varlen_attn")
    want = kernelhub.attention.reference(**sizes, window=window)
    assert compare_out(out, want, largest_value(sizes)).ok


@pytest.mark.parametrize("version", SCHEMAS)
def test_the_call_fits_the_schemas_of_released_versions(version) -> None:
    name = "aten::_flash_attention_forward"
    assert mismatch(torch._C.parse_schema(name + SCHEMAS[version]), name, SCHEMA) is None


def test_the_installed_torch_has_one_of_them() -> None:
    schema = torch.ops.aten._flash_attention_forward.default._schema
    assert mismatch(schema, "aten::_flash_attention_forward", SCHEMA) is None


def test_an_operator_with_other_parameters_is_reported(on_the_cpu, monkeypatch) -> None:
    monkeypatch.setattr(
        "kernelhub.backends.torch.attention.varlen.SCHEMA", SCHEMA.replace("Tensor query, Tensor key", "Tensor key")
    )
    arguments = attention_inputs(AttentionModel("grouped", 6, 2, 64, 64), q_tokens=20)
    with pytest.raises(NoKernel, match=r"_flash_attention_forward takes \(Tensor query"):
        kernelhub.attention(**arguments, backend="fake.varlen_attn")


def test_it_is_not_taken_for_what_a_user_put_in_its_place(on_the_cpu, monkeypatch) -> None:
    monkeypatch.setattr("kernelhub.backends.torch.attention.varlen.current_flash_attention_impl", lambda: "FA4")
    arguments = attention_inputs(AttentionModel("grouped", 6, 2, 64, 64), q_tokens=20)
    with pytest.raises(NoKernel, match="FA4 has been activated in torch"):
        kernelhub.attention(**arguments, backend="fake.varlen_attn")


@pytest.mark.parametrize(
    ("device", "facets", "code"),
    [
        *((device, {}, None) for device in ("A100", "L40S", "H200")),
        *((device, {}, "capability") for device in ("sm_75", "B200")),
        ("cpu", {}, "vendor"),
        ("H200", {"ragged": True, "window_left": True, "lse": True}, None),
        ("H200", {"softcap": True}, "feature"),
        ("H200", {"sinks": True}, "feature"),
        ("H200", {"q_dtype": "float32", "kv_dtype": "float32"}, "dtype"),
        ("H200", {"head_dim_qk": 192, "head_dim_vo": 128}, "mismatch"),
        ("H200", {"head_dim_qk": 36, "head_dim_vo": 36}, "divisibility"),
        ("H200", {"head_dim_qk": 512, "head_dim_vo": 512}, "range"),
    ],
)
def test_limits(device: str, facets: dict[str, Any], code: str | None) -> None:
    machine = SimulatedMachine({"triton": "3.7.1"})
    selection = kernelhub.explain("attention", device=device, machine=machine, **{"q_len": "many", **facets})
    own = next(item for item in selection.decisions if item.kernel == "torch.varlen_attn")
    assert {rejection.code for rejection in own.rejections} - OF_TRUST == ({code} if code else set())


def test_it_answers_ragged_prefill_where_there_is_no_triton() -> None:
    nothing = SimulatedMachine({})
    for facets in ({"ragged": True, "causal": True}, {"window_left": True, "causal": True}):
        selection = kernelhub.explain("attention", device="A100", machine=nothing, q_len="many", **facets)
        assert selection.selected == "torch.varlen_attn"
