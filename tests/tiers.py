"""Which tests are the default tier, and which are `full`: the rules, all of them.

`python -m pytest` runs the default tier: every promise by its own tests, every kernel by one case for each feature.
`python -m pytest -m full` runs the rest, and `.ci/run` runs both. docs/testing.md says which tier proves what. A test
is `full` by where it is or by what its case shows, so that a new test has its tier without anybody writing it down.
Tests marked `ahead` are of neither tier. A path named on the command line is run whole, both tiers of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

DEFAULT = "not full and not ahead"
BOTH = "not ahead"

# Folders, files, classes and functions, each with what keeps it out of five minutes of two cores.
FULL = {
    "tests/backends/test_cpp.py::TestBuild::test_processes_that_compile_at_once_do_not_disturb_each_other": "compiles",
    "tests/backends/test_cpp.py::TestTargets": "compiles for every level of a CPU",
    "tests/backends/test_flashinfer_cutlass.py::TestPrefill::test_tables_are_as_large_as_the_tiles_are_many": "sizes",
    "tests/backends/test_grouped_details.py::test_every_tile_of_other_gpus_gives_the_reference": "every tile",
    "tests/backends/test_import_faults.py": "every fault of every library, in a process of its own",
    "tests/backends/test_triton_ahead.py": "compiles ahead of time",
    "tests/evidence/test_contract_liars.py": "every lie of the contracts again, by `kernelhub verify`",
    "tests/evidence/test_right_kernels.py": "every check of every kernel",
    "tests/evidence/test_trust.py::TestWarmUp": "warms up",
    "tests/evidence/test_tuned_sizes.py::TestTriton::test_a_real_search_over_tiles_ends_with_tiles_that_are_right": (
        "searches all tiles"
    ),
    "tests/fuzz": "sweeps of attacks",
    "tests/gpu": "runs on a GPU only",
    "tests/providers": "downloads wheels of libraries",
    "tests/runtime/test_ranks.py": "starts processes of ranks",
    "tests/runtime/test_traffic.py::TestWithTritonsCompiler": "compiles ahead of time",
    "tests/runtime/test_tuned_ranks.py": "starts processes of ranks",
    "tests/warming": "compiles and warms whole models",
}

# Statements of a contract that go through every pattern of bits, of every kernel that inherits them.
SWEEPS = {
    "test_every_bfloat16_has_the_reference_s_bits",
    "test_every_byte_reads_back_as_the_reference_s",
    "test_every_code_is_decoded_exactly",
}

# Where cases are those of kernels, and what a case names its kernel by: each kernel shows every feature.
OF_KERNELS = ("tests/backends/", "tests/contract/")
SUBJECTS = ("backend", "kernel", "op", "target")


def pytest_configure(config: pytest.Config) -> None:
    """A path that is named is run whole. Workers of a parallel run are told by the same option."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    if named and config.option.markexpr == DEFAULT:
        config.option.markexpr = BOTH


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that are `full` as a whole are not imported for the default tier."""
    if config.option.markexpr != DEFAULT or not collection_path.is_relative_to(config.rootpath):
        return None
    return collection_path.relative_to(config.rootpath).as_posix() in FULL or None


def mark_full(items: list[pytest.Function]) -> None:
    """Mark the tests of the full tier."""
    shown: dict[str, set[object]] = {}
    for item in items:
        if item.get_closest_marker("ahead"):
            continue
        left_out = _is_named(item.nodeid) or item.originalname in SWEEPS or item.get_closest_marker("gpu")
        if left_out or not _shows_something_new(item, shown):
            item.add_marker(pytest.mark.full)


def _is_named(nodeid: str) -> bool:
    """It is one of `FULL`, or lies in one."""
    return any(nodeid == name or nodeid.startswith((f"{name}/", f"{name}::", f"{name}[")) for name in FULL)


def _shows_something_new(item: pytest.Item, shown: dict[str, set[object]]) -> bool:
    """Of the cases of one test of a kernel, those count that show something which no earlier one of them shows."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    if not item.nodeid.startswith(OF_KERNELS) or not params:
        return True
    words = set(_words(params))
    subject = sorted(f"{name}={params[name]}" for name in SUBJECTS if name in params)
    before = shown.setdefault(" ".join([item.nodeid.split("[", 1)[0], *subject]), set())
    new = words - before
    before |= words
    return bool(new)


def _words(value: Any, name: str = "") -> Iterator[tuple[str, object]]:
    """What a case shows: each parameter that it sets, with its value if that is no size.

    A number, and a row of numbers, is a size: (8, 64) and (1, 3) show the same. A label shows nothing.
    """
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in ("label", "name"):
                yield from _words(item, f"{name}.{key}")
    elif isinstance(value, tuple | list | frozenset):
        for item in value:
            yield from _words(item, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, "a size"
    else:
        yield name, str(value)
