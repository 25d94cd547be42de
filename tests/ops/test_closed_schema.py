"""No kernel that lacks a feature is ever chosen where the feature is used; whatever is read is in the key."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernelhub
from kernelhub.dispatch.constraint import OneOf, SameValue
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.dispatch.problem import feature_name
from kernelhub.dispatch.standing import KNOWN_BAD, OPT_IN
from kernelhub.errors import ConfigurationError
from kernelhub.ops import functions
from kernelhub.probes.device import SIMULATED

OPS = {function.op.contract.name: function for function in functions()}
PACKAGES = {
    "triton": "3.7.1",
    "cuda": "13.0.1",
    "deep_gemm": "2.5.0",
    "flash_attn": "2.8.3",
    "flash_attn_interface": "3.0.0",
    "cutlass": "4.8.0",
    "flash_mla": "1.0.0",
    "cudnn": "1.32.0",
    "flashinfer": "0.6.18.post1",
    "vllm": "0.33.0",
    "sgl_kernel": "0.3.21",
    "xformers": "0.0.35",
}
FA3 = {name: PACKAGES[name] for name in ("triton", "flash_attn", "flash_attn_interface")}
MACHINE = SimulatedMachine(PACKAGES, variables={"TRITON_INTERPRET": "1"})


def kernels(op: str) -> list[Kernel]:
    _ = HUB.settings
    return list(HUB.registry.candidates(op).kernels)


def semantic(op: str) -> list[Any]:
    return [facet for facet in OPS[op].op.contract.schema.facets.values() if facet.semantic]


CASES = [(op, facet.name, value) for op in OPS for facet in semantic(op) for value in facet.values]


@pytest.mark.parametrize(("op", "name", "value"), CASES)
def test_a_kernel_that_does_not_list_a_feature_is_refused_where_it_is_used(op: str, name: str, value: Any) -> None:
    feature = feature_name(name, value)
    lacking = {kernel.name for kernel in kernels(op) if feature not in kernel.features}
    for device in SIMULATED:
        selection = kernelhub.explain(op, device=device, machine=MACHINE, **{name: value})
        assert selection.selected not in lacking
        for decision in selection.decisions:
            if decision.kernel in lacking:
                assert not decision.accepted
                assert any(item.code == "feature" and feature in item.reason for item in decision.rejections)


@pytest.mark.parametrize("op", OPS)
def test_every_feature_is_honoured_by_some_kernel_on_every_device(op: str) -> None:
    for device, facet in itertools.product(SIMULATED, semantic(op)):
        for value in facet.values:
            selection = kernelhub.explain(op, device=device, machine=MACHINE, **{facet.name: value})
            assert selection.selected is not None, f"{device}: nothing runs {facet.name}={value}"


_ATTENTION = [
    {"q_len": q_len, "ragged": ragged, "causal": True, "softcap": softcap, "head_dim_vo": width}
    for q_len in ("one", "many", "any")
    for ragged in (False, True)
    for softcap in (False, True)
    for width in (64, 128)
]
_MESSAGES = [
    {"world_size": 2, "link": "nvlink", "message": message} for message in ("32KB", "256KB", "1MB", "8MB", "32MB")
]
_TWO: dict[str, Any] = {"world_size": 2, "link": "nvlink"}
_KEPT = [{**_TWO, "rows": "kept", "capacity": capacity} for capacity in ("few", "exact")]
# Where an op's kernels differ in more than the device they run on: problems that reach each of them.
SWEEPS: dict[str, list[dict[str, Any]]] = {
    "all_reduce": [{}, *_MESSAGES],
    "reduce_scatter": [{}, _MESSAGES[0]],
    "all_gather": [{}, _MESSAGES[0]],
    "all_reduce_rms_norm": [{}, *_MESSAGES, {**_MESSAGES[0], "format": "fp8_group"}],
    "moe_dispatch": [{}, {**_TWO, "capacity": "few"}, {**_TWO, "capacity": "exact"}],
    "moe_combine": [{}, *({**_TWO, "capacity": of} for of in ("few", "exact")), *_KEPT],
    "attention": [
        *_ATTENTION,
        {"q_len": "many", "causal": True, "head_dim_qk": 192, "head_dim_vo": 128},
        {"q_len": "many", "causal": True, "kv_dtype": "float8_e4m3fn", "kv_scale": "value"},
    ],
    "paged_attention": [
        *_ATTENTION,
        {"q_len": "many", "causal": True, "page_size": 256},
        {"q_len": "many", "causal": True, "kv_dtype": "float8_e4m3fn", "kv_scale": "value"},
        {"sinks": True},
        {"num_kv_heads": 32, "lse": True},
    ],
    "write_kv_cache": [{}, {"rope": "neox", "rotary_dim": 128}, {"rope": "interleaved", "rotary_dim": 64, "q": True}],
    "linear_attention": [{"q_len": q_len} for q_len in ("one", "many")],
    "fp8_gemm": [
        *(
            {"scaling": scaling, "rows": rows}
            for scaling in ("tensor", "row", "block", "row_block", "mx")
            for rows in ("few", "many")
        ),
        {"scaling": "row", "k": 2048},
        {"a_scale_dtype": "float8_e8m0fnu", "b_scale_dtype": "float8_e8m0fnu"},
    ],
    "grouped_gemm": [
        {"rows": "many", "k": 7168, "a_dtype": "float8_e4m3fn", "a_scale": "token", "b_scale": "channel"},
        {
            "masked": True,
            **{f"{side}_dtype": "float4_e2m1fn_x2" for side in "ab"},
            **{f"{side}_scale": "nvfp4" for side in "ab"},
        },
        *(
            {"rows": rows, "masked": masked, **scales}
            for rows in ("few", "many")
            for masked in (False, True)
            for scales in ({}, {"b_scale": "block"}, {"a_scale": "group_e8m0", "b_scale": "block_e8m0"})
        ),
    ],
    "mqa_logits": [{}, {"dtype": "bfloat16"}],
    "paged_mqa_logits": [{}, {"dtype": "bfloat16"}],
    "topk_indices": [{"k": k} for k in (2048, 10000)],
    "mla_attention": [
        *(
            {"sparse": sparse, "num_heads": heads, "q_len": q_len}
            for sparse in (False, True)
            for heads in (16, 64)
            for q_len in ("one", "many")
        ),
        *({"sparse": sparse, "kv_dtype": "float8_e4m3fn", "kv_scale": "value"} for sparse in (False, True)),
    ],
    "expert_parallel_moe": [{}, {"weights": "fp8_block", "activation_dtype": "fp8_block"}],
    "fused_moe": [
        *({"weights": weights} for weights in ("plain", "fp8_block")),
        *(
            {"weights": "fp8_block", "activation_dtype": form, "weight_layout": "experts.up_gate_blocks.v1"}
            for form in ("fp8_block", "fp8_block_gate_up")
        ),
    ],
}


@pytest.mark.parametrize("op", OPS)
def test_every_kernel_can_be_had_for_some_problem_on_some_device(op: str) -> None:
    """By itself, or by its name where another one is expected to be faster, is trusted, or runs for who asks alone.

    A kernel that nothing can ever reach is an error. Each library is looked at without the others, too.
    """
    unreached = {kernel.name for kernel in kernels(op)}
    alone = [{"triton": PACKAGES["triton"], name: version} for name, version in PACKAGES.items()]
    problems = list(itertools.product(SIMULATED, SWEEPS.get(op, [{}])))
    for packages in (PACKAGES, *alone, {"flashinfer": PACKAGES["flashinfer"]}, FA3):
        machine = SimulatedMachine(packages, variables={"TRITON_INTERPRET": "1"})
        for device, values in problems:
            unreached.discard(kernelhub.explain(op, device=device, machine=machine, **values).selected)
    others = {"flashinfer": "0.7.2.post1", "sgl_kernel": "0.4.10", "deep_ep": "1.2.1", "deep_ep_cpp": "1.2.1"}
    releases = (MACHINE, SimulatedMachine({**PACKAGES, **others}))
    for kernel in (kernel for kernel in kernels(op) if kernel.name in unreached):
        if kernel.backend == "unsupported":  # records that say why there is no kernel
            continue
        defects = {"known_bad"} if kernel.name in bad_everywhere(op) else set()
        assert any(
            reasons_against(kernel, device, machine, fitted(kernel, values)) <= defects
            for (device, values), machine in itertools.product(problems, releases)
        ), kernel.name


def fitted(kernel: Kernel, values: dict[str, Any]) -> dict[str, Any]:
    """A problem with what a record says of single facets: one of the values that it takes, packed as it reads them."""
    contract = OPS[kernel.op].op.contract
    base = contract.problem(device=SIMULATED["H200"])
    problem = {name: getattr(base, name) for name in contract.schema.facets if name != "device"} | values
    for constraint in kernel.constraints:
        if isinstance(constraint, OneOf) and problem[constraint.field] not in constraint.values:
            problem[constraint.field] = constraint.values[0]
        if isinstance(constraint, SameValue):
            problem[constraint.field] = problem[constraint.other]
    for name, facet in contract.schema.facets.items():
        if facet.layout and problem[name] not in kernel.layouts:
            problem[name] = kernel.layouts[0]
    return problem


def reasons_against(kernel: Kernel, device: str, machine: SimulatedMachine, values: dict[str, Any]) -> set[str]:
    """Codes of what speaks against a kernel that is asked for by name."""
    try:
        selection = kernelhub.explain(kernel.op, device=device, machine=machine, backend=kernel.name, **values)
    except ConfigurationError as error:
        return {str(error)}  # values that do not go together
    return {item.code for made in selection.decisions if made.kernel == kernel.name for item in made.rejections}


OURS = (
    "cpp.",
    "triton.",
    "gluon.prefill_fp8",
    "cuda.paged_decode",
    "torch.packed",
    "torch.blocked",
    "torch.dequantized",
)


@pytest.mark.parametrize(
    ("op", "facet", "value"),
    [
        ("attention", "kv_dtype", "float8_e5m2"),
        ("paged_attention", "kv_dtype", "float8_e5m2"),
        ("fp8_gemm", "scaling", "row_block"),
    ],
)
def test_what_our_own_kernels_alone_take_every_library_refuses(op: str, facet: str, value: Any) -> None:
    """Whatever else it lacks: the constraint that reads the facet says so, with every library installed."""
    facets = OPS[op].op.contract.complete({facet: value})
    for device in SIMULATED:
        assert kernelhub.explain(op, device=device, machine=MACHINE, **facets).selected.startswith(OURS)
    problem = kernelhub.explain(op, device="H200", machine=MACHINE, **facets).problem
    usual = kernelhub.explain(op, device="H200", machine=MACHINE).problem
    for kernel in kernels(op):
        reading = [constraint for constraint in kernel.constraints if facet in constraint.fields]
        refused, before = (any(each.reject(one, MACHINE) for each in reading) for one in (problem, usual))
        if kernel.name.startswith(OURS):
            assert not refused or before, kernel.name  # such as decode of few heads, in any dtype
        else:
            assert refused, kernel.name


def bad_everywhere(op: str) -> set[str]:
    """Kernels of which a known defect has no condition: a caller alone can force them."""
    of_op, candidates = kernels(op), HUB.registry.candidates(op)
    return {k.name for k in of_op if any(not entry.where for entry in candidates.known_bad_of(k))}


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_that_is_bad_everywhere_is_for_who_asks(op: str) -> None:
    for kernel in kernels(op):
        if kernel.name in bad_everywhere(op):
            assert {standing.word for standing in kernel.standings} <= {OPT_IN, KNOWN_BAD}, kernel.name


@pytest.mark.parametrize("op", OPS)
def test_constraints_read_only_what_they_declare(op: str) -> None:
    """A facet that is not declared may take any value without changing what a constraint says."""
    contract = OPS[op].op.contract
    for kernel, device in itertools.product(kernels(op), SIMULATED.values()):
        problem = contract.problem(device=device)
        for constraint in kernel.constraints:
            watched = _Watched(problem)
            constraint.reject(watched, MACHINE)
            assert watched.read <= set(constraint.fields), f"{kernel.name}: {constraint} reads {watched.read}"


class _Watched:
    """A problem that notes which of its facets are read."""

    def __init__(self, problem: Any) -> None:
        self.__dict__["problem"] = problem
        self.__dict__["read"] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.problem, name)


widths = st.sampled_from((16, 64, 80, 128, 256))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.integers(0, 70),
    st.sampled_from(((4, 4), (4, 2), (8, 1))),
    widths,
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.booleans(),
    st.sampled_from((None, 3, (5, 2), (-1, 0))),
    st.sampled_from((None, 0.0, 2.0)),
    st.booleans(),
    st.booleans(),
)
def test_equal_keys_are_equal_problems_and_a_call_s_own_facets(
    batch, tokens, keys, heads, width, dtype, causal, window, softcap, sinks, lse
) -> None:
    q = torch.empty(batch, tokens, heads[0], width, dtype=dtype)
    k = torch.empty(batch, keys, heads[1], width, dtype=dtype)
    arguments = {"causal": causal, "window": window, "softcap": softcap, "return_lse": lse}
    arguments["sinks"] = torch.empty(heads[0]) if sinks else None
    op = kernelhub.attention.op
    key = op.parse(None, (q, k, k), arguments).key
    problem = op.contract.problem_of(key, -1)
    assert problem.head_dim_qk == width
    assert (problem.num_q_heads, problem.num_kv_heads) == heads
    assert problem.softcap == bool(softcap)
    assert problem.sinks == sinks
    assert problem.lse == lse
    other = torch.empty(2, 1 if tokens == 1 else 9 if tokens <= 16 else 40, heads[0], width, dtype=dtype)
    other_k = torch.empty(2, 7, heads[1], width, dtype=dtype)
    other_key = op.parse(None, (other, other_k, other_k), arguments).key
    assert other_key == key, "a key depends on a length"
    assert op.contract.problem_of(other_key, -1) == problem


def test_problems_can_be_distinguished_by_every_facet() -> None:
    for function in OPS.values():
        base = kernelhub.explain(function, device="H200").problem
        for facet in dataclasses.fields(base):
            if facet.name != "device":
                value = getattr(base, facet.name)
                facet_values = function.op.contract.schema.facets[facet.name].values
                others = [other for other in facet_values if other != value]
                others += [not value] if isinstance(value, bool) else [value * 2] if isinstance(value, int) else []
                changed = others[0] if others else None
                assert dataclasses.replace(base, **{facet.name: changed}) != base
