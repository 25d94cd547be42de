"""What the cases of kernels show: few of them show each feature, few more each pair of features.

The default tier has the former, the full tier the latter and a share of the others, which differ in sizes and in
combinations of more features; `make sweep` has the rest.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

# Where kernels are interpreted, 100 times slower than they run: of a kernel's contract, its cases alone. So it is where
# kernels are emulated.
INTERPRETED = "tests/backends/test_triton.py::"
EMULATED = "tests/gluon/"

# Of the cases that show no new pair of features, the full tier has one of so many: of kernels that run here as they do
# for users, and of those that are interpreted or whose library a stand-in computes for.
REAL = {"tests/backends/test_cpp": 3, "tests/backends/test_torch": 8} | ({INTERPRETED: 1} if HAS_GPU else {})
OF_REPEATED = 24

# Where cases are those of kernels, and what a case names its kernel by: each kernel shows every feature.
OF_KERNELS = ("tests/backends/", "tests/contract/", "tests/gluon/")
SUBJECTS = ("backend", "kernel", "op", "target")


def of_the_largest_tensor(item: pytest.Function) -> int:
    """Of the largest tensor of a case of a kernel; 0 of other tests."""
    case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
    return int(getattr(case, "elements", 0))


def has_a_case(item: pytest.Function) -> bool:
    """Its parameter is a case of a kernel's contract."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    return item.nodeid.startswith(OF_KERNELS) and "case" in params


def is_another_statement(item: pytest.Function) -> bool:
    """It is a statement of the contract of an interpreted kernel, and none of its cases."""
    of_a_contract = item.nodeid.startswith(EMULATED) and hasattr(getattr(item, "cls", None), "accepted_cases")
    return (item.nodeid.startswith(INTERPRETED) or of_a_contract) and "case" not in item.fixturenames


def enough_cases(items: Iterable[pytest.Function]) -> set[str]:
    """Of the cases of each test of each kernel, few that together show all that any of them shows.

    The first that is taken shows the most, and each further one the most of what is left; of equals the first.
    """
    groups: dict[str, dict[str, set[object]]] = {}
    for item in items:
        if has_a_case(item):
            groups.setdefault(of_a_kernel(item), {})[item.nodeid] = set(words(item.callspec.params))
    return {nodeid for shown in groups.values() for nodeid in few(shown)}


def few(shown: Mapping[str, set[object]]) -> list[str]:
    """Of names by what they show, few that together show everything."""
    enough = []
    missing = set().union(*shown.values())
    while missing:
        best = max(shown, key=lambda name: len(shown[name] & missing))
        enough.append(best)
        missing -= shown[best]
    return enough


def repeated(items: Iterable[pytest.Function], full: Iterable[pytest.Function]) -> set[str]:
    """Which cases of the full tier repeat others: no pair of features needs them, and no share of them is asked for.

    Args:
        items: all tests, the smallest cases first.
        full: those which are not in the default tier.
    """
    of_full = {item.nodeid for item in full}
    shown: dict[str, set[object]] = {}  # by the default tier
    groups: dict[str, dict[str, set[object]]] = {}
    for item in items:
        case: Any = getattr(getattr(item, "callspec", None), "params", {}).get("case")
        is_of_a_kernel = item.originalname == "test_case" and item.nodeid.startswith(
            ("tests/backends/", "tests/gluon/")
        )
        if not is_of_a_kernel or not hasattr(case, "problem"):
            continue
        name, pairs = item.nodeid.partition("[")[0], {*case.problem, *itertools.combinations(sorted(case.problem), 2)}
        if item.nodeid in of_full:
            groups.setdefault(name, {})[item.nodeid] = pairs
        else:
            shown.setdefault(name, set()).update(pairs)
    repeats: set[str] = set()
    for name, cases in groups.items():
        one_of = next((share for start, share in REAL.items() if name.startswith(start)), OF_REPEATED)
        before = shown.get(name, set())
        needed = {*few({nodeid: pairs - before for nodeid, pairs in cases.items()})}
        others = [nodeid for nodeid in cases if nodeid not in needed]
        repeats.update(nodeid for place, nodeid in enumerate(others) if place % one_of)
    return repeats


def of_a_kernel(item: pytest.Item) -> str:
    """The test and the kernel of a case."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    subject = sorted(f"{name}={params[name]}" for name in SUBJECTS if name in params)
    return " ".join([item.nodeid.split("[", 1)[0], *subject])


def shows_something_new(item: pytest.Item, shown: dict[str, set[object]]) -> bool:
    """Of the parameters of one test of a kernel, those count that show something which no earlier ones show."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    if not item.nodeid.startswith(OF_KERNELS) or not params:
        return True
    shows = set(words(params))
    before = shown.setdefault(of_a_kernel(item), set())
    new = shows - before
    before |= shows
    return bool(new)


def words(value: Any, name: str = "") -> Iterator[tuple[str, object]]:
    """What a case shows: each parameter that it sets, with its value if that is no size.

    A number, and a row of numbers, is a size: (8, 64) and (1, 3) show the same. A label shows nothing.
    """
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in ("label", "name"):
                yield from words(item, f"{name}.{key}")
    elif isinstance(value, tuple | list | frozenset):
        for item in value:
            yield from words(item, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, "a size"
    else:
        yield name, str(value)
