"""Every public name of vLLM's two modules is here, with the parameters that vLLM's has."""

from __future__ import annotations

import inspect

import pytest

from kernelhub.compat.vllm import deep_gemm, flashinfer
from kernelhub.compat.vllm.library import Lazy
from tests.compat import vllm_names

FUNCTIONS = [
    pytest.param(module, name, parameters, id=name)
    for module, names in ((flashinfer, vllm_names.FLASHINFER), (deep_gemm, vllm_names.DEEP_GEMM))
    for name, parameters in names.items()
    if parameters not in ("value", "class") and not parameters.startswith("->")
]
PASSED_ON = {name: target[3:] for name, target in vllm_names.FLASHINFER.items() if target.startswith("->")}


def written(function) -> str:
    """Parameters of a function as the table writes them."""
    parts = []
    parameters = inspect.signature(function).parameters.values()
    bare = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not bare:
            parts.append("*")
            bare = True
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(f"{star}{parameter.name}{default}")
    return ", ".join(parts).replace("=[128, 128]", "=DEFAULT_BLOCK_SIZE")


@pytest.mark.parametrize(("module", "name", "parameters"), FUNCTIONS)
def test_a_function_has_the_parameters_of_vllm_s(module, name, parameters) -> None:
    assert name in module.__all__
    assert written(getattr(module, name)) == parameters


@pytest.mark.parametrize("name", PASSED_ON)
def test_what_vllm_passes_on_is_passed_on(name) -> None:
    lazy = getattr(flashinfer, name)
    assert isinstance(lazy, Lazy)
    assert lazy.target == PASSED_ON[name]


def test_values_and_classes_are_there() -> None:
    for module, names in ((flashinfer, vllm_names.FLASHINFER), (deep_gemm, vllm_names.DEEP_GEMM)):
        assert set(names) <= set(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)
    assert [item.name for item in deep_gemm.DeepGemmQuantScaleFMT] == ["FLOAT32", "FLOAT32_CEIL_UE8M0", "UE8M0"]


def test_names_of_older_releases_are_kept() -> None:
    older = ["has_flashinfer_all2all", "flashinfer_disable_q_quantization", "fp4_quantize"]
    assert set(older) <= set(flashinfer.__all__)
    assert {"fp8_mqa_logits", "fp8_paged_mqa_logits"} <= set(deep_gemm.__all__)


@pytest.mark.parametrize("module", [flashinfer, deep_gemm], ids=["flashinfer", "deep_gemm"])
def test_every_name_says_what_it_is(module) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value):
            assert value.__doc__, name
