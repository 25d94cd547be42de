"""Errors reach the processes that wait for a worker: as copies that say and hold the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

import kernelhub
from kernelhub import errors, testing
from kernelhub.errors import DeviceLost, InvalidArgument, KernelhubError, LockTimeout, NoKernel, NotWarmed


def refused() -> None:
    q = torch.randn(1, 3, 8, 64)
    kernelhub.attention(q, q, q, softcap=-1.0)


def without_a_kernel() -> None:
    q = torch.randn(1, 3, 8, 64)
    kernelhub.attention(q, q, q, softcap=3.0, backend="torch.sdpa")


def not_warmed() -> None:
    with kernelhub.seal():
        kernelhub.route_experts(torch.randn(2, 8), 3)


def raised(call: Callable[[], None]) -> KernelhubError:
    with pytest.raises(KernelhubError) as caught:
        call()
    return caught.value


ERRORS: dict[str, Callable[[], KernelhubError]] = {
    "InvalidArgument": lambda: raised(refused),
    "NoKernel": lambda: raised(without_a_kernel),
    "NotWarmed": lambda: raised(not_warmed),
    "RanksDisagree": lambda: errors.RanksDisagree("rank_dead", "rank 3 is dead", (3,)),
    "LockTimeout": lambda: LockTimeout("/a/lock", "process 7", 3.0),
    "DeviceLost": lambda: DeviceLost(0, "attention", "triton.prefill", "CUDA error", 1.0, ("attention, 3 calls",)),
    "CacheError": lambda: errors.CacheError(28, "No space left on device", "a/file"),
    "ConfigurationError": lambda: errors.ConfigurationError("KERNELHUB_FORCE: unknown"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_a_copy_says_and_holds_the_same(name: str, again: Callable[[KernelhubError], KernelhubError]) -> None:
    error = ERRORS[name]()
    made = again(error)
    assert type(made) is type(error)
    assert (str(made), made.args) == (str(error), error.args)
    held = {item: value for item, value in vars(error).items() if item != "selection"}
    assert {item: value for item, value in vars(made).items() if item != "selection"} == held
    if isinstance(error, NoKernel):
        assert isinstance(made, NoKernel)
        assert made.selection.to_dict() == error.selection.to_dict()
    if isinstance(error, NotWarmed):
        assert isinstance(made, NotWarmed)
        assert made.line == error.line


def test_so_does_one_of_a_wrong_result() -> None:
    made = pickle.loads(pickle.dumps(testing.WrongResult("strides", "q has other strides")))
    assert (made.code, str(made)) == ("strides", "q has other strides")


def test_a_pool_of_processes_passes_them_on() -> None:
    """An error that cannot be unpickled breaks the pool, and the message is lost."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with pytest.raises(InvalidArgument, match=r"softcap is -1\.0") as caught:
            pool.submit(refused).result(timeout=120)
        assert caught.value.parameter == "softcap"
        with pytest.raises(NoKernel, match=r"torch\.sdpa"):
            pool.submit(without_a_kernel).result(timeout=120)
