"""One list of attention's optional tensors, and one of its features: nothing that reads them may lack one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.evidence.audit.launches import READERS, Rows
from kernelhub.evidence.cases import CASES
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import FEATURES, OPTIONAL_TENSORS, Given, Values, arguments_of, extras_of
from kernelhub.ops.attention.problem import ATTENTION, PAGED_ATTENTION, AttentionProblem
from kernelhub.probes.device import facts_of

OPS = {"attention": kernelhub.attention, "paged_attention": kernelhub.paged_attention}
OF_A_CALL = {"q", "k", "v", "k_cache", "v_cache", "out", "block_table", "seq_lens", "cu_seqlens_q", "cu_seqlens_k"}
OF_THE_FORM = {"ragged", "kv_layout"}  # facets that follow from the tensors of a call and its layout


@pytest.mark.parametrize("op", OPS)
def test_every_optional_tensor_of_the_signature_is_in_the_list(op: str) -> None:
    parameters = inspect.signature(OPS[op]).parameters.values()
    tensors = {item.name for item in parameters if "Tensor" in str(item.annotation) or str(item.annotation) == "Scale"}
    assert tensors - OF_A_CALL == {item.parameter for item in OPTIONAL_TENSORS}
    assert {item.parameter for item in OPTIONAL_TENSORS} <= set(Values._fields) & set(Given._fields)
    assert set(Given._fields) <= {item.name for item in parameters}


@pytest.mark.parametrize("record", [ATTENTION, PAGED_ATTENTION], ids=lambda record: record.name)
def test_every_feature_is_in_the_key_and_has_a_case(record: Any) -> None:
    schema = record.schema
    assert {name for name, item in schema.facets.items() if item.semantic} - OF_THE_FORM == set(FEATURES)
    assert {item.facet for item in OPTIONAL_TENSORS} <= set(FEATURES)
    for item in OPTIONAL_TENSORS:
        assert set(item.forms) <= set(schema.facets[item.facet].values)
    seen: set[str] = set()
    for case in CASES[record.name].cases():
        if not seen >= schema.features:
            seen |= set(schema.features_used(OPS[record.name].explain(**case.make(torch.device("cpu"))).problem))
    assert seen >= schema.features


def _with_all(record: Any, form: str) -> Any:
    """A problem with every feature; scales in one form."""
    every = {item.name: item.values[-1] for item in record.schema.facets.values() if item.semantic}
    every |= {"kv_scale": form, "ragged": False, "causal": False}
    facets = record.complete({"num_q_heads": 4, "num_kv_heads": 2, "q_len": "few", **every})
    return record.problem(device=facts_of(-1), **{name: value for name, value in facets.items() if name != "device"})


@pytest.mark.parametrize("form", ["value", "tensor", "head"])
@pytest.mark.parametrize("record", [ATTENTION, PAGED_ATTENTION], ids=lambda record: record.name)
def test_the_audit_reads_every_feature_of_a_launch(record: Any, form: str) -> None:
    """The arguments that the audit gives to the reference are a call of the same problem."""
    problem = _with_all(record, form)
    scale: Any = {"value": 2.0, "tensor": torch.ones(1), "head": torch.ones(2)}[form]
    values = Values(0.5, 3, 4, 5.0, torch.zeros(4), scale, scale)
    q, kv = torch.zeros(1, 2, 4, 128, dtype=torch.bfloat16), torch.zeros(1, 16, 2, 128).to(torch.float8_e4m3fn)
    if record is ATTENTION:
        step: Any = DenseStep(None, None, None, None)
    else:
        kv = kv.transpose(1, 2)
        step = PagedStep(torch.zeros(1, 1, dtype=torch.int32), torch.full((1,), 9, dtype=torch.int32))
    read = READERS[record.name](problem, (q, kv, kv, step, values, q.clone(), torch.zeros(1, 4, 2)))
    made = {name: value.copied() if isinstance(value, Rows) else value for name, value in read.arguments.items()}
    assert OPS[record.name].explain(**made).problem == problem
    assert {name: made[name] for name in arguments_of(problem, values)} == arguments_of(problem, values)


def test_the_extras_of_a_problem_are_the_tensors_of_its_call() -> None:
    for sinks in (False, True):
        for form in (None, "value", "tensor", "head"):
            problem = AttentionProblem(device=facts_of(-1), sinks=sinks, kv_scale=form)
            want = ["sinks"] * sinks + ["k_scale", "v_scale"] * (form in ("tensor", "head"))
            assert [Values._fields[at] for at in extras_of(problem)] == want
