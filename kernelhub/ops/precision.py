"""Products at their own precision: what torch operators inside kernels and references are shielded from.

Autocast and `torch.set_float32_matmul_precision` are meant for a model's layers. A kernel that torch operators make up
states its arithmetic, so it runs without autocast, and its float32 products are float32 products.

Autocast is switched off for the calling thread alone. The precision of float32 products, and whether float16 products
are summed in float16, are the process's: while a guarded function runs they are at the most precise, for the products
of other threads too, and then again as they were. Nothing is touched where nothing is set.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

from kernelhub.dispatch.making import at_fork

P = ParamSpec("P")
R = TypeVar("R")

_HIGHEST, _EXACT = "highest", ("ieee", "none")
_BACKENDS = ("cuda", "mkldnn")  # whose products torch 2.9 and later set apart

_lock = threading.Lock()
_entered = 0  # guarded functions that run with settings of the process raised
_turns = 0  # how often they were raised or put back, so that who reads them between two of these reads them again
_restore: Callable[[], None]

_any_autocast = torch._C._is_any_autocast_enabled
_allows_tf32 = torch._C._get_cublas_allow_tf32
_sums_halves = torch._C._get_cublas_allow_fp16_accumulation


def _alike(name: str, operation: str) -> str:
    """Before torch 2.9 one setting was for all backends."""
    return _EXACT[0] if torch._C._get_float32_matmul_precision() == _HIGHEST else "tf32"


_precision_of: Callable[[str, str], str] = getattr(torch._C, "_get_fp32_precision_getter", _alike)


def at_own_precision(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run without autocast and with float32 products in float32.

    Where nothing is set that costs 0.38 us, half of it for what torch says of precision (Python 3.11, torch 2.13).
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _any_autocast() and _is_exact():
            return function(*args, **kwargs)
        with own_precision():
            return function(*args, **kwargs)

    return run


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run without autocast: for one that has no float32 products. Where none is on: 0.13 us."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _any_autocast():
            return function(*args, **kwargs)
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def own_precision() -> Iterator[None]:
    """The same as a context."""
    with torch._C._DisableAutocast():
        if _is_exact():
            yield
            return
        _enter()
        try:
            yield
        finally:
            _leave()


def _is_exact() -> bool:
    """No setting of the process lowers the precision of products; not even one that a guarded function has raised."""
    turns = _turns
    try:
        if _allows_tf32() or _sums_halves() or _precision_of("mkldnn", "matmul") not in _EXACT:
            return False
    except RuntimeError:  # torch's older and newer settings disagree
        return False
    return not _entered and turns == _turns


def _enter() -> None:
    global _entered, _turns, _restore
    with _lock:
        _entered += 1
        if _entered == 1:
            _turns += 1
            _restore = _raised()


def _leave() -> None:
    global _entered, _turns
    with _lock:
        if _entered == 1:
            _restore()
            _turns += 1
        _entered = max(0, _entered - 1)  # 0 where the process forked in a guarded function


def _renew() -> None:
    """In a forked child the threads of guarded functions are gone: nothing else puts the settings back."""
    global _entered, _lock, _turns
    _lock = threading.Lock()
    if _entered:
        _restore()
        _turns += 1
        _entered = 0


at_fork(_renew)


def _raised() -> Callable[[], None]:
    """Set the process to exact products; returns what puts its settings back."""
    halves = _sums_halves()
    torch._C._set_cublas_allow_fp16_accumulation(False)
    of_backends = {name: _precision_of(name, "matmul") for name in _BACKENDS}
    try:
        common = torch._C._get_float32_matmul_precision()
    except RuntimeError:  # it was set for a backend on its own, and the common one cannot be read
        common = None
    if common is not None:
        torch._C._set_float32_matmul_precision(_HIGHEST)
    for name in of_backends:
        _set_precision_of(name, "ieee")

    def restore() -> None:
        torch._C._set_cublas_allow_fp16_accumulation(halves)
        if common is not None:
            torch._C._set_float32_matmul_precision(common)
        for name, precision in of_backends.items():
            _set_precision_of(name, "none")  # as the wider setting says, if that is where it came from
            if _precision_of(name, "matmul") != precision:
                _set_precision_of(name, precision)

    return restore


def _set_precision_of(name: str, precision: str) -> None:
    if _precision_of is not _alike:
        torch._C._set_fp32_precision_setter(name, "matmul", precision)
