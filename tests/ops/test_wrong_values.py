"""Each parameter of each op refuses what its annotation does not name, on a call, a later one, `prepare` and `explain`.

The sweep is made from the signatures. An error names the public function and the parameter, or the partner that the
value contradicts. `prepare` and `explain` do not read tensors that a selection does not depend on, such as `out`.
"""

from __future__ import annotations

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
from tests.fuzz.drawn import DRAWN

WRONG = (
    "yes", "3", b"x", -1, 1.5, True, 2 + 1j, float("nan"), [1], {}, object(), torch.float16, torch.tensor([0.5]),
    numpy.float32(0.5), numpy.float64(0.5), numpy.int64(3), numpy.bool_(True),
)  # fmt: skip
PARTNERS = {"a1_scale": "a2_scale", "a2_scale": "a1_scale"}  # of one comes none without the other


def call(function: Any, **given: Any) -> Any:
    return function(**given)


def call_again(function: Any, **given: Any) -> Any:
    function(**copied(DRAWN[function.op.contract.name](random.Random(1), torch.device("cpu"))))
    return function(**given)


def prepare(function: Any, **given: Any) -> Any:
    return function.prepare(**given)


def explain(function: Any, **given: Any) -> Any:
    return function.explain(**given)


WAYS = (call, call_again, prepare, explain)


def taken(annotation: str, value: Any) -> bool:
    """Whether a parameter of this annotation may take the value, which its contract decides."""
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
        for value in WRONG:
            given = f"{way.__name__} of {op} with {name}={value!r}"
            try:
                way(function, **{**copied(arguments), name: value})
            except (InvalidArgument, ConfigurationError) as error:
                message = str(error)
                assert message.startswith((f"{op}:", f"{op}(", f"{op} has no facet")), f"{given}: {message}"
                assert name in message or PARTNERS.get(name, name) in message, f"{given}: {message}"
            else:
                unread = way in (prepare, explain) and "Tensor" in parameter.annotation
                assert unread or taken(parameter.annotation, value), f"{given} is accepted"


@pytest.mark.parametrize("way", [call, prepare, explain], ids=lambda way: way.__name__)
@pytest.mark.parametrize("op", sorted(DRAWN))
def test_an_unknown_keyword_is_refused_with_the_name_of_the_function(op: str, way: Callable[..., Any]) -> None:
    arguments = DRAWN[op](random.Random(1), torch.device("cpu"))
    with pytest.raises(TypeError, match=rf"^{op}\(\) got an unexpected keyword argument 'cusal'"):
        way(HUB.function(op), **arguments, cusal=True)


def test_a_factor_of_numpy_that_is_a_float_is_one() -> None:
    for op in ("route_experts", "attention", "mla_attention", "linear_attention"):
        name = "scaling_factor" if op == "route_experts" else "scale"
        arguments = DRAWN[op](random.Random(1), torch.device("cpu")) | {name: 0.5}
        got, want = (HUB.function(op)(**{**copied(arguments), name: kind(0.5)}) for kind in (numpy.float64, float))
        for one, other in zip(*((made if isinstance(made, tuple) else (made,)) for made in (got, want)), strict=True):
            assert torch.equal(one, other)
