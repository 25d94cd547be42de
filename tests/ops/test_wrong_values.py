"""Each parameter of each op refuses what its annotation does not name, on a call, a later one, `prepare` and `explain`.

The sweep is made from the signatures. An error names the public function and the parameter, or the partner that the
value contradicts. `prepare` and `explain` refuse what the call refuses, in the same words, also where a selection does
not depend on it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.errors import ConfigurationError, InvalidArgument
from kernelhub.evidence.poison import copied
from kernelhub.ops.comm.experts.cases import by_expert
from kernelhub.ops.comm.experts.received import Dispatched
from tests.fuzz.drawn import DRAWN

WRONG = (
    "yes", "3", b"x", -1, 1.5, True, 2 + 1j, float("nan"), [1], {}, object(), torch.float16, torch.tensor([0.5]),
    numpy.float32(0.5), numpy.float64(0.5), numpy.int64(3), numpy.bool_(True),
)  # fmt: skip
PARTNERS = {"a1_scale": "a2_scale", "a2_scale": "a1_scale"}  # of one comes none without the other


def call(function: Any, **given: Any) -> Any:
    return function(**given)


def known(function: Any) -> None:
    """Make a right call, which later ones are compared with."""
    if function.op.contract.name in DRAWN:
        function(**copied(DRAWN[function.op.contract.name](random.Random(1), torch.device("cpu"))))


def call_again(function: Any, **given: Any) -> Any:
    known(function)
    return function(**given)


def prepare(function: Any, **given: Any) -> Any:
    return function.prepare(**given)


def explain(function: Any, **given: Any) -> Any:
    return function.explain(**given)


def call_known(function: Any, **given: Any) -> Any:
    """After `known`: a call that is refused or differs leaves what is known as it is."""
    return function(**given)


WAYS = (call, call_known, prepare, explain)


def taken(annotation: str, value: Any) -> bool:
    """Whether a parameter of this annotation may take the value, which its contract decides."""
    if isinstance(value, numpy.generic):
        value = value.item()
    kinds = {"bool": bool, "int": int, "Window": int, "float": (float, int), "Scale": (float, int), "str": str}
    if isinstance(value, torch.Tensor):
        return "Tensor" in annotation or annotation == "Scale"
    if isinstance(value, torch.dtype):
        return "dtype" in annotation
    return any(
        word in annotation and isinstance(value, kind) and (isinstance(value, bool) == (kind is bool))
        for word, kind in kinds.items()
    )


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("op", sorted(DRAWN))
def test_a_wrong_value_is_refused_by_name(op: str, way: Callable[..., Any]) -> None:
    function = HUB.function(op)
    arguments = DRAWN[op](random.Random(1), torch.device("cpu"))
    for name, parameter in inspect.signature(function).parameters.items():
        if way is call_known:
            known(function)
        for value in WRONG:
            given = f"{way.__name__} of {op} with {name}={value!r}"
            try:
                way(function, **{**copied(arguments), name: value})
            except (InvalidArgument, ConfigurationError) as error:
                message = str(error)
                assert message.startswith((f"{op}:", f"{op}(", f"{op} has no facet")), f"{given}: {message}"
                assert name in message or PARTNERS.get(name, name) in message, f"{given}: {message}"
            else:
                assert taken(parameter.annotation, value), f"{given} is accepted"


@pytest.mark.parametrize("op", sorted(DRAWN))
def test_plans_and_explanations_refuse_in_the_words_of_the_call(op: str) -> None:
    function = HUB.function(op)
    arguments = DRAWN[op](random.Random(1), torch.device("cpu"))
    for name in inspect.signature(function).parameters:
        for value in (*WRONG, torch.zeros(2, 3, 5, dtype=torch.int16)):
            said = []
            for way in (call, prepare, explain):
                try:
                    way(function, **{**copied(arguments), name: value})
                except InvalidArgument as error:
                    said.append(str(error))
                except ConfigurationError:
                    continue
                else:
                    said.append("")
            assert len(set(said)) < 2, f"{name}={value!r}: {said}"


def test_plans_of_attention_refuse_wrong_metadata() -> None:
    kernelhub: Any = importlib.import_module("kernelhub")
    q, cache = torch.randn(2, 4, 16), torch.randn(3, 8, 2, 16)
    table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([3, 99], dtype=torch.int32)
    offsets = {"cu_seqlens_q": torch.tensor([0, 1, 2]).int(), "cu_seqlens_k": torch.tensor([0, 4, 2]).int()}
    for way in (call, prepare, explain):
        with pytest.raises(InvalidArgument, match="seq_lens is 99"):
            way(kernelhub.paged_attention, q=q, k_cache=cache, v_cache=cache, block_table=table, seq_lens=lengths)
        with pytest.raises(InvalidArgument, match="cu_seqlens_k falls from 4 to 2"):
            way(kernelhub.attention, q=q, k=q, v=q, **offsets)


@pytest.mark.parametrize("way", [call, prepare, explain], ids=lambda way: way.__name__)
@pytest.mark.parametrize("op", sorted(DRAWN))
def test_an_unknown_keyword_is_refused_with_the_name_of_the_function(op: str, way: Callable[..., Any]) -> None:
    arguments = DRAWN[op](random.Random(1), torch.device("cpu"))
    with pytest.raises(TypeError, match=rf"^{op}\(\) got an unexpected keyword argument 'cusal'"):
        way(HUB.function(op), **arguments, cusal=True)


NUMPY = {
    bool: (numpy.bool_,),
    int: (numpy.int8, numpy.int16, numpy.int32, numpy.int64, numpy.uint8, numpy.uint64),
    float: (numpy.float16, numpy.float32, numpy.float64, numpy.longdouble),
}


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
    """The results of a call as comparable data, or the parameter that it refuses."""
    try:
        made = function(**copied(arguments))
    except InvalidArgument as error:
        return [error.op, error.parameter]
    if isinstance(made, Dispatched):
        made = [*made.handle, *by_expert(made).values()]  # rows of no expert hold anything
    results = made if isinstance(made, tuple | list) else (made,)
    return [(item.dtype, tuple(item.shape), item.flatten().contiguous().view(torch.uint8).tolist()) for item in results]


def prepared_too(function: Any, **given: Any) -> Any:
    function.prepare(**given)
    return function(**given)


@pytest.mark.parametrize("op", [*sorted(DRAWN), "dequantize_fp8"])
def test_a_scalar_of_numpy_is_the_python_value(op: str) -> None:
    function = HUB.function(op)
    if op in DRAWN:
        arguments = DRAWN[op](random.Random(1), torch.device("cpu"))
    else:
        codes, scale = HUB.function("quantize_fp8")(torch.randn(4, 64), "group", 4)
        arguments = {"x": codes, "scale": scale}
    for name, parameter in inspect.signature(function).parameters.items():
        if not any(word in parameter.annotation for word in ("bool", "int", "float", "Window", "Scale")):
            continue
        for value in (True, False, 0, 1, 2, 4, 0.5, 2.0):
            want = outcome(function, {**arguments, name: value})
            for kind in NUMPY[type(value)]:
                for way in (call, call_again, prepared_too):
                    got = outcome(functools.partial(way, function), {**arguments, name: kind(value)})
                    assert got == want, f"{op} with {name}={kind(value)!r}"


def test_both_sides_of_a_window_may_be_scalars_of_numpy() -> None:
    q, k, v = torch.randn(3, 1, 6, 2, 16)
    attention: Any = HUB.function("attention")
    window = (numpy.int32(2), numpy.int64(1))
    assert torch.equal(attention(q, k, v, window=window), attention(q, k, v, window=(2, 1)))


def test_plans_and_steps_take_scalars_of_numpy() -> None:
    q, k, v = torch.randn(3, 6, 2, 16)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    attention: Any = HUB.function("attention")
    plan = attention.prepare(q, k, v, offsets, offsets, scale=numpy.float32(0.5), softcap=numpy.float16(2))
    step = plan.begin(offsets, offsets, max_seqlen_q=numpy.int64(4), max_seqlen_k=numpy.int32(4))
    want = attention(q, k, v, offsets, offsets, scale=0.5, softcap=2.0)
    assert torch.equal(step.run(q, k, v), want)
    assert torch.equal(plan.run(q, k, v, offsets, offsets, numpy.int64(4), numpy.int64(4)), want)
    with pytest.raises(InvalidArgument, match="max_seqlen_q is "):
        plan.begin(offsets, offsets, max_seqlen_q=numpy.float32(4))


def test_operators_of_torch_take_scalars_of_numpy() -> None:
    q, k, v = torch.randn(3, 1, 6, 2, 16)
    attention: Any = HUB.function("attention")
    given = {"causal": numpy.bool_(True), "window": (numpy.int64(2), numpy.int64(0)), "scale": numpy.float32(0.5)}
    got = attention(torch.nn.Parameter(q, requires_grad=False), k, v, **given)
    assert torch.equal(got, attention(q, k, v, causal=True, window=(2, 0), scale=0.5))
