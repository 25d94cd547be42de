"""Tensors whose memory only torch's operators reach: fake ones, those of torch.export, asynchronous collectives'.

Kernels take addresses. A fake tensor's is 0, which ended the process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import InvalidArgument
from kernelhub.evidence.cases import CASES
from tests.fuzz.bases import DEFAULT, draw

WITHOUT_GROUPS = [op for op in CASES if "group" not in inspect.signature(HUB.function(op)).parameters]


def call_of(op: str, backend: str = "", forced: bool = False) -> dict[str, Any]:
    """A call of an op, of tensors that have elements; one for which a kernel of the backend is selected, if one is.

    `forced`: by a request for the backend.
    """
    request = {"backend": backend.rstrip(".")} if forced else {}
    random = Random(3)
    for _ in range(50):
        base = draw(op, DEFAULT, torch.device("cpu"), random, 20_000)
        if base is None or not all(tensor.numel() for tensor in tensors_in(base.arguments)):
            continue
        if HUB.function(op).explain(**base.arguments, **request).selected.startswith(backend):
            return dict(base.arguments)
    pytest.skip(f"no kernel of {backend or 'any backend'} is selected here: a call of {op}")


def tensors_in(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def faked(mode: FakeTensorMode, value: Any) -> Any:
    return tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, value)


def taken_by(plan: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What of a call its plan's run takes, without weights that the plan has."""
    kept = {*plan.weights} - {*plan.call.split(", ")}
    return {
        name: value for name, value in arguments.items() if name in {*inspect.signature(plan.run).parameters} - kept
    }


@pytest.mark.parametrize("op", WITHOUT_GROUPS)
def test_a_plan_makes_fake_results_of_fake_tensors(op: str) -> None:
    arguments = call_of(op)
    plan = HUB.function(op).prepare(**arguments)
    given = taken_by(plan, arguments)
    real = [(leaf.shape, leaf.dtype) for leaf in tensors_in(plan.run(**given))]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        results = list(tensors_in(plan.run(**faked(mode, given))))
    assert [(leaf.shape, leaf.dtype) for leaf in results] == real
    assert any(isinstance(leaf, FakeTensor) for leaf in results)


@pytest.mark.parametrize("op", WITHOUT_GROUPS)
def test_one_fake_tensor_beside_real_ones_is_refused_by_name(op: str) -> None:
    """Also where a call like it was made before. With a fake first operand all is torch's own affair."""
    function, arguments = HUB.function(op), call_of(op)
    function(**arguments)
    for name in [*inspect.signature(function).parameters][1:]:
        if not list(tensors_in(arguments.get(name))):
            continue
        given = arguments | {name: faked(FakeTensorMode(), arguments[name])}
        with pytest.raises(InvalidArgument, match="is a FakeTensor; give a plain tensor"):
            function(**given)


@pytest.mark.parametrize("strict", [False, True])
def test_a_module_with_a_plan_can_be_exported(strict: bool) -> None:
    q, k, v = torch.randn(3, 2, 9, 4, 16)
    plan = kernelhub.attention.prepare(q, k, v, causal=True)
    step = plan.begin()

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plan.run(q, k, v) + step.run(q, k, v)

    program = torch.export.export(Layer(), (q, k, v), strict=strict)
    assert sum("kernelhub.attention" in str(node.target) for node in program.graph.nodes) == 2
    assert torch.equal(program.module()(q, k, v), Layer()(q, k, v))


def runs_of_steps() -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    q, k, v = torch.randn(3, 2, 9, 4, 16)
    dense = kernelhub.attention.prepare(q, k, v)
    with_lse = kernelhub.attention.prepare(q, k, v, return_lse=True)
    table, lengths = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32), torch.tensor([20, 32], dtype=torch.int32)
    pages, latents = torch.randn(4, 16, 2, 16), torch.randn(4, 16, 32)
    paged = kernelhub.paged_attention.prepare(q[:, 0], pages, pages, table, lengths)
    paged_lse = kernelhub.paged_attention.prepare(q[:, 0], pages, pages, table, lengths, return_lse=True)
    latent_q = torch.randn(2, 4, 32)
    mla = kernelhub.mla_attention.prepare(latent_q, latents, table, lengths, scale=0.1, value_dim=24)
    return {
        "attention": (dense.begin().run, [q, k, v]),
        "attention with LSE": (with_lse.begin().run, [q, k, v]),
        "paged_attention": (paged.begin(table, lengths).run, [q[:, 0], pages, pages]),
        "paged_attention with LSE": (paged_lse.begin(table, lengths).run, [q[:, 0], pages, pages]),
        "mla_attention": (mla.begin(table, lengths).run, [latent_q, latents]),
    }


@pytest.mark.parametrize("name", runs_of_steps())
def test_a_step_makes_fake_results_of_fake_tensors(name: str) -> None:
    run, operands = runs_of_steps()[name]
    real = [leaf.shape for leaf in tensors_in(run(*operands))]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        results = list(tensors_in(run(*(mode.from_tensor(operand) for operand in operands))))
    assert [leaf.shape for leaf in results] == real
    assert all(isinstance(leaf, FakeTensor) for leaf in results)


@pytest.mark.parametrize("op", ["attention", "bmm_fp8", "fp4_gemm", "fp8_gemm", "fused_moe", "route_experts"])
def test_a_traced_call_of_plain_tensors_is_recorded_or_refused(op: str) -> None:
    """make_fx gives the plain tensors themselves to what it traces, and saw no kernel of C++: the graph lacked it."""
    function, arguments = HUB.function(op), call_of(op, "cpp.")
    with pytest.raises(InvalidArgument, match=f"{op}: the call is traced by make_fx"):
        make_fx(lambda: function(**arguments))()
    plan = function.prepare(**arguments)
    given = taken_by(plan, arguments)
    names = [name for name, value in given.items() if isinstance(value, Tensor)]
    graph = make_fx(lambda *tensors: plan.run(**given | dict(zip(names, tensors, strict=True))))(
        *(given[name] for name in names)
    )
    assert any(f"kernelhub.{op}" in str(node.target) for node in graph.graph.nodes)
    results, want = graph(*(given[name] for name in names)), plan.run(**given)
    for result, expected in zip(tensors_in(results), tensors_in(want), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("op", ["attention", "fp8_gemm", "fused_moe", "quantize_fp8", "rms_norm_quant"])
@pytest.mark.parametrize("traced", [lambda call: make_fx(call)(), lambda call: within(FakeTensorMode, call)])
def test_a_traced_call_of_a_triton_kernel_is_refused(op: str, traced: Callable[[Callable[[], Any]], Any]) -> None:
    function, arguments = HUB.function(op), call_of(op, "triton.", forced=True)
    with pytest.raises(InvalidArgument, match="_kernel: the call is traced by make_fx"):
        traced(lambda: function(**arguments, backend="triton"))


def within(mode: Any, call: Callable[[], Any]) -> Any:
    """A call of plain tensors under a mode of fake ones."""
    with mode(allow_non_fake_inputs=True):
        return call()


def test_a_mode_that_only_looks_on_lets_kernels_run() -> None:
    q, k, v = torch.randn(3, 2, 9, 4, 16)
    with FlopCounterMode(display=False):
        counted = kernelhub.attention(q, k, v)
    assert torch.equal(counted, kernelhub.attention(q, k, v))


class Wrapped(Tensor):
    """A tensor that stands for another, as those of asynchronous collectives do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(leaf: Any) -> Any:
            return leaf.inner if isinstance(leaf, Wrapped) else leaf

        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def test_a_plan_reads_what_a_wrapped_tensor_stands_for() -> None:
    q, k, v = torch.randn(3, 2, 9, 4, 16)
    plan = kernelhub.attention.prepare(q, k, v)
    want = plan.run(q, k, v)
    for given in ((Wrapped(q), k, v), (q, Wrapped(k), v), (q, k, Wrapped(v))):
        assert torch.equal(plan.run(*given), want)
