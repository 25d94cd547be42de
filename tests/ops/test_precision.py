"""Guarded functions compute at their own precision, and leave the process's settings as they were."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernelhub.ops.precision import at_own_precision, own_precision, without_autocast

SET_BY_BACKEND = hasattr(torch._C, "_get_fp32_precision_getter")  # from torch 2.9 on


@at_own_precision
def product(a: Tensor, b: Tensor) -> Tensor:
    """A float32 product."""
    return a @ b


def settings() -> tuple[str, ...]:
    """What the process has set for float32 products, of each backend where torch tells them apart."""
    try:
        common = torch.get_float32_matmul_precision()
    except RuntimeError:
        common = "they differ"
    if not SET_BY_BACKEND:
        return (common,)
    places = (("cuda", "matmul"), ("mkldnn", "matmul"), ("generic", "all"))
    return (common, *(torch._C._get_fp32_precision_getter(*place) for place in places))


@pytest.fixture(autouse=True)
def _settings_put_back() -> Iterator[None]:
    yield
    if SET_BY_BACKEND:
        for name in ("cuda", "mkldnn"):
            torch._C._set_fp32_precision_setter(name, "matmul", "none")
        torch._C._set_fp32_precision_setter("generic", "all", "none")
    torch.set_float32_matmul_precision("highest")


def common(precision: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(precision)


def of(backend: str, precision: str) -> Callable[[], None]:
    operation = "all" if backend == "generic" else "matmul"
    return lambda: torch._C._set_fp32_precision_setter(backend, operation, precision)


def high_but_bf16_on_a_cpu() -> None:
    common("high")()
    of("mkldnn", "bf16")()


SETTINGS = {"medium": common("medium"), "high": common("high")}
if SET_BY_BACKEND:
    SETTINGS |= {
        "tf32 of CUDA": of("cuda", "tf32"),
        "bf16 of a CPU": of("mkldnn", "bf16"),
        "tf32 of all": of("generic", "tf32"),
        "high, and bf16 of a CPU": high_but_bf16_on_a_cpu,
    }


@pytest.mark.parametrize("setting", SETTINGS)
def test_float32_products_are_float32_whatever_the_process_has_set(setting: str) -> None:
    a, b = torch.randn(64, 96), torch.randn(96, 80)
    exact = a @ b
    SETTINGS[setting]()
    before = settings()
    assert torch.equal(product(a, b), exact)
    with own_precision():
        inside = settings()[1:3] if SET_BY_BACKEND else settings()
        assert not {"tf32", "bf16", "high", "medium"} & set(inside)
    assert settings() == before


@pytest.mark.parametrize("guard", [at_own_precision, without_autocast])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_a_guarded_function(
    guard: Callable[..., Callable[..., Tensor]], dtype: torch.dtype
) -> None:
    a, b = torch.randn(64, 96), torch.randn(96, 80)
    with torch.autocast("cpu", dtype=dtype):
        made = guard(lambda: a @ b)()
        assert (a @ b).dtype is dtype  # and is as it was afterwards
    assert torch.equal(made, a @ b)


def test_a_function_that_raises_leaves_the_settings_as_they_were() -> None:
    torch.set_float32_matmul_precision("medium")
    before = settings()

    @at_own_precision
    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert settings() == before


def test_a_thread_that_leaves_first_takes_no_precision_from_another() -> None:
    torch.set_float32_matmul_precision("medium")
    before = settings()
    inside, left = threading.Event(), threading.Event()

    def first() -> None:
        with own_precision():
            inside.set()
            left.wait(10)

    with contextlib.ExitStack() as stack:
        other = threading.Thread(target=first)
        other.start()
        inside.wait(10)
        stack.enter_context(own_precision())
        left.set()
        other.join()
        assert settings()[0] == "highest"
    assert settings() == before
