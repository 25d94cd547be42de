"""Which cases each kernel takes is found out once for all workers of a run, and of several runs of the same sources.

To know it, the tensors of each case are made and each record is asked, in collection: 40 % of what that takes. Half of
the workers collect from the other end, so that one finds out what another does not yet need. The answers are kept in a
folder of the run, or in that which COMPILED_FOR_TESTS names.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelhub.testing
from kernelhub.evidence.cases import CASES
from kernelhub.testing import KernelCase

_ROOT = Path(__file__).parents[1]
_FOLDER = "ACCEPTED_CASES_OF_TESTS"  # an environment variable, which workers inherit
_PLACE = pytest.StashKey[int]()  # of a file or folder in its folder


def keep_in(folder: Path) -> None:
    """Keep answers below this folder, by what they depend on: the sources and the environment."""
    state = hashlib.sha256(repr((sys.version, sys.prefix, torch.__version__)).encode())
    for top in ("kernelhub", "tests"):
        for path in sorted((_ROOT / top).rglob("*.py")):
            status = path.stat()
            state.update(f"{path} {status.st_mtime_ns} {status.st_size}\n".encode())
    place = folder / f"accepted-{state.hexdigest()[:16]}"
    place.mkdir(parents=True, exist_ok=True)
    os.environ[_FOLDER] = str(place)


def once(question: str, find_out: Callable[[], Any], may_be_kept: Callable[[Any], bool] = lambda answer: True) -> Any:
    """The answer that this process or another found out; while another is at it, this one waits."""
    place = Path(os.environ[_FOLDER]) / hashlib.sha256(question.encode()).hexdigest()[:32]
    if not place.exists():
        with open(f"{place}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when the process ends
            if not place.exists():
                answer = find_out()
                if may_be_kept(answer):
                    unfinished = place.with_suffix(".part")
                    unfinished.write_bytes(pickle.dumps(answer))
                    unfinished.replace(place)
                return answer
    return pickle.loads(place.read_bytes())


def make_calls_once(patch: pytest.MonkeyPatch) -> None:
    """Make the tensors of the cases of each op of kernelhub once."""
    make = kernelhub.testing._calls

    @functools.lru_cache(maxsize=64)
    def calls(op: str, device: str) -> Any:
        if not type(CASES[op]).__module__.startswith("kernelhub."):
            return make(op, device)
        return once(f"calls of {op} on {device}", lambda: make(op, device))

    patch.setattr(kernelhub.testing, "_calls", calls)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """A class that is collected is asked once for its cases, not for each of its tests."""
    contract: Any = metafunc.cls
    if "case" not in metafunc.fixturenames or not hasattr(contract, "accepted_cases"):
        return (yield)
    name = metafunc.definition.parent.nodeid
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "accepted_cases", functools.partial(_accepted, name, contract.accepted_cases))
        return (yield)


_answers: dict[str, list[Any]] = {}


def _accepted(name: str, ask: Callable[[], list[Any]]) -> list[Any]:
    if name not in _answers:
        _answers[name] = once(name, ask, lambda cases: all(type(case) is KernelCase for case in cases))
    return _answers[name]


def _is_odd(config: pytest.Config) -> bool:
    return int(getattr(config, "workerinput", {"workerid": "gw0"})["workerid"].removeprefix("gw")) % 2 == 1


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Every second worker goes through folders backwards."""
    report = yield
    if isinstance(collector, pytest.Directory):
        for place, node in enumerate(report.result or ()):
            node.stash[_PLACE] = place
        if _is_odd(collector.config):
            report.result = list(report.result or ())[::-1]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All workers have all tests in one order, from which the scheduler tells them what to run."""
    _answers.clear()
    if hasattr(config, "workerinput"):
        named = _named(config)
        items.sort(key=lambda item: (named(item.path), *(node.stash.get(_PLACE, 0) for node in item.listchain())))


def _named(config: pytest.Config) -> Callable[[Path], int]:
    """Which argument of the command line a file is of: what is named first is run first."""
    given = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]

    @functools.cache
    def place(path: Path) -> int:
        return next((index for index, named in enumerate(given) if path.is_relative_to(named)), len(given))

    return place
