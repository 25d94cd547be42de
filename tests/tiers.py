"""Which tests are the default tier, and which are `full`: the rules, all of them.

`python -m pytest` runs the default tier: every promise by its own tests, every kernel by one case for each feature.
`python -m pytest -m full` runs the rest, and `.ci/run` runs both. docs/testing.md says which tier proves what. A test
is `full` by where it is or by what its case shows, so that a new test has its tier without anybody writing it down.
Tests marked `ahead` are of neither tier, nor those marked `sweep`: sizes of interpreted kernels and lies that repeat
what the full tier shows. A path named on the command line is run whole, both tiers of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

DEFAULT = "not full and not ahead and not sweep"
BOTH = "not ahead and not sweep"

# Kernels that are wrong in one way each, which the statements of the contracts must find.
LIARS = tuple(
    f"tests/contract/test_{name}liars.py"
    for name in ("", "fp4_gemm_", "fp8_", "grouped_gemm_", "indexer_", "linear_attention_", "mla_", "moe_", "quant_")
)

# Folders, files, classes and functions, by what keeps them out of five minutes of two cores.
NAMED = {
    "runs on a GPU only": ("tests/gpu",),
    "downloads libraries": ("tests/providers",),
    "compiles or warms up more than one kernel": (
        "tests/backends/test_cpp.py::TestBuild::test_processes_that_compile_at_once_do_not_disturb_each_other",
        "tests/backends/test_cpp.py::TestTargets",
        "tests/backends/test_direct_launch.py::test_what_the_driver_receives",
        "tests/backends/test_triton_ahead.py",
        "tests/cpu/test_sanitized.py",
        "tests/cuda/test_emulated.py",
        "tests/cuda/test_nvrtc.py::test_nvrtc_compiles_it_for_every_generation",
        "tests/gluon/test_ahead.py",
        "tests/compat/test_transformers.py::TestOtherModels::test_compiled_models",
        "tests/cli/test_warmup.py::TestHere::test_the_chosen_kernels_are_verified_unless_said_otherwise",
        "tests/cli/test_warmup.py::TestHere::test_everything_is_reported_with_its_kernel_and_a_summary",
        "tests/compat/test_sglang_plugin.py::TestStart::test_steps_of_serving_are_ready_when_it_has_started",
        "tests/evidence/test_trust.py::TestWarmUp",
        "tests/runtime/test_cache_faults.py::test_a_slower_kernel_for_want_of_a_place_is_said_with_its_code",
        "tests/runtime/test_cache_faults.py::test_many_at_first_use_compile_once",
        "tests/runtime/test_cache_faults.py::test_the_library_that_compiles_works_without_the_named_folder",
        "tests/runtime/test_cache_locks.py::test_sixteen_processes_compile_the_same_and_the_one_that_does_is_killed",
        "tests/runtime/test_traffic.py::TestWithTritonsCompiler",
        "tests/warming",
    ),
    "starts ranks, or workers": (
        "tests/backends/test_custom_all_reduce.py::test_sums_of_more_ranks_and_dtypes",
        "tests/backends/test_deep_ep.py::test_a_layer_on_more_ranks",
        "tests/backends/test_flashinfer_comm.py::test_sums_of_more_ranks_and_dtypes",
        "tests/backends/test_flashinfer_exchange.py::test_four_ranks_exchange_every_bit",
        "tests/backends/test_triton_comm.py::test_long_messages_are_sent_in_pieces",
        "tests/backends/test_triton_comm.py::test_quantised_norms_of_many_rows_are_made_in_pieces",
        "tests/backends/test_triton_comm.py::test_more_ranks_get_the_sums_in_the_order_of_ranks",
        "tests/backends/test_triton_expert_comm.py::test_four_ranks_exchange_every_bit",
        "tests/backends/test_triton_expert_comm.py::test_many_rows_are_sent_in_pieces",
        "tests/backends/test_triton_expert_comm.py::test_sums_of_several_parts_of_a_row",
        "tests/backends/test_triton_expert_comm.py::test_two_ranks_exchange_all_dtypes_routings_and_numbers_of_choices",
        "tests/faults/test_all.py::TestCounting::test_those_of_several_workers_are_gathered_and_printed",
        "tests/runtime/test_comm_ranks.py",
        "tests/runtime/test_expert_ranks.py",
        "tests/runtime/test_ranks.py",
        "tests/runtime/test_tuned_ranks.py",
    ),
    "goes through every lie, attack, fault or tile": (
        "tests/backends/test_flashinfer_packed_experts.py",
        "tests/backends/test_grouped_details.py::test_every_tile_of_other_gpus_gives_the_reference",
        "tests/backends/test_import_faults.py",
        "tests/gluon/test_attention.py::TestPagedPrefill",
        "tests/gluon/test_attention.py::TestPrefill",
        "tests/gluon/test_attention.py::test_every_interleaving_gives_the_reference",
        "tests/gluon/test_attention.py::test_pages_of_every_size",
        "tests/gluon/test_attention.py::test_a_window_and_keys_of_other_lengths",
        "tests/gluon/test_attention.py::test_operands_of_any_strides",
        "tests/gluon/test_attention.py::test_planted_faults_are_found",
        "tests/gluon/test_mla.py::TestDecode",
        "tests/gluon/test_mla.py::test_every_interleaving_gives_the_reference",
        "tests/gluon/test_mla.py::test_long_sequences_are_shared_by_all_programs",
        "tests/gluon/test_mla.py::test_strided_operands",
        "tests/gluon/test_mla.py::test_two_tokens_and_sinks",
        "tests/gluon/test_mla.py::test_planted_faults_are_found",
        "tests/gluon/test_fp8_gemm.py::TestFp8Gemm",
        "tests/gluon/test_fp8_gemm.py::test_planted_faults_are_found",
        "tests/gluon/test_experts.py",
        "tests/gluon/test_grouped_gemm.py",
        "tests/backends/test_weight_only.py::test_tiles_of_other_gpus_are_right",
        "tests/cli/test_verify.py::test_it_says_whose_code_runs_and_leaves_third_parties_out_where_asked",
        "tests/cli/test_verify.py::test_json_holds_every_check",
        *LIARS,
        "tests/evidence/test_contract_liars.py",
        "tests/evidence/test_memory_liars.py",
        "tests/evidence/test_right_kernels.py",
        "tests/evidence/test_tuned_sizes.py::TestTriton::test_a_real_search_over_tiles_ends_with_tiles_that_are_right",
        "tests/fuzz",
    ),
    "repeats, measures, or is large": (
        "tests/cli/test_main.py::TestHelp::test_every_example_runs",
        "tests/cli/test_schemas.py::TestPrinted::test_it_is_of_its_schema_where_much_runs",
        "tests/cli/test_without_torch.py",
        "tests/backends/test_flashinfer_cutlass.py::TestPrefill::test_tables_are_as_large_as_the_tiles_are_many",
        "tests/cli/test_demo.py::TestQuick::test_for_people_it_says_what_ran_why_how_exact_and_how_fast",
        "tests/cli/test_demo.py::TestQuick::test_all_lists_every_kernel_with_every_reason",
        "tests/cli/test_demo.py::TestQuick::test_in_a_pipe_progress_is_lines_on_stderr",
        "tests/cli/test_demo.py::TestQuick::test_what_the_user_said_decides",
        "tests/cli/test_demo.py::TestWrongNumbers",
        "tests/docs/test_docs.py::test_commands_of_the_readme_are_understood",
        "tests/docs/test_docs.py::test_examples_run",
        "tests/docs/test_types.py::test_a_type_checker_sees_each_result_and_flags_misspelt_names",
        "tests/evidence/test_tune.py",
        "tests/ops/test_compile_grouped_gemm.py::test_at_most_two_graphs_over_sizes",
        "tests/ops/test_compile_quants.py::test_at_most_two_graphs_over_sizes",
        "tests/runtime/test_growth.py",
        "tests/backends/test_triton_formats.py::test_more_tokens_than_a_program_takes_in_one_step",
        "tests/backends/test_triton_formats.py::test_the_most_choices",
    ),
}
FULL = frozenset(name for names in NAMED.values() for name in names)
# Where the name of a folder, file, class or function ends within the name of a test.
_ENDS = re.compile(r"/|::|\[")

# Statements of a contract that go through every format or pattern of bits, of every kernel that inherits them.
SWEEPS = {
    "test_a_format_is_for_those_who_request_it",
    "test_every_bfloat16_has_the_reference_s_bits",
    "test_every_byte_reads_back_as_the_reference_s",
    "test_every_code_is_decoded_exactly",
    "test_what_is_no_ordinary_number_has_the_reference_s_result",
}

# Where kernels are interpreted, 100 times slower than they run: of a kernel's contract, its cases alone.
INTERPRETED = "tests/backends/test_triton.py::"

# Of interpreted cases that show no new pair of features, and of lies that `verify` is to find, the full tier has one of
# so many. What the lies do is also found by the contracts' own tests, all of them.
OF_INTERPRETED, OF_LIES = 3, 4
LIES_VERIFIED = "tests/evidence/test_contract_liars.py::test_wrong_kernels_are_detected_and_right_ones_pass["

# Fixtures that start a process, by which a test of a command repeats what another asks within this process.
STARTS = {"ask_shell"}

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
    repeats = Repeats()
    for item in sorted(items, key=_elements):  # of the cases that show the same, the smallest is the first
        if item.get_closest_marker("ahead") or item.get_closest_marker("sweep"):
            continue
        if (
            _is_named(item.nodeid)
            or item.originalname in SWEEPS
            or (item.nodeid.startswith(INTERPRETED) and "case" not in item.fixturenames)
            or not STARTS.isdisjoint(item.fixturenames)
            or item.get_closest_marker("gpu")
            or not _shows_something_new(item, shown)
        ):
            item.add_marker(pytest.mark.sweep if repeats(item) else pytest.mark.full)


class Repeats:
    """Which tests of the full tier repeat others of it, to be asked of all tests in their order."""

    def __init__(self) -> None:
        self._pairs: dict[str, set[object]] = {}
        self._places: dict[str, int] = {}

    def __call__(self, item: pytest.Function) -> bool:
        name, _, label = item.nodeid.partition("[")
        if item.nodeid.startswith(LIES_VERIFIED):
            return not re.search(r"-(Dense|Paged)?Tru", label) and self._is_left_out(name, OF_LIES)
        if HAS_GPU or not item.nodeid.startswith(INTERPRETED) or item.originalname != "test_case":
            return False
        words = item.callspec.params["case"].problem
        pairs = {*words, *itertools.combinations(sorted(words), 2)}
        shown = self._pairs.setdefault(name, set())
        new = pairs - shown
        shown |= pairs
        return not new and self._is_left_out(name, OF_INTERPRETED)

    def _is_left_out(self, name: str, one_of: int) -> bool:
        place = self._places[name] = self._places.get(name, -1) + 1
        return place % one_of != 0


def _elements(item: pytest.Function) -> int:
    """Of the largest tensor of a case of a kernel; 0 of other tests."""
    case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
    return int(getattr(case, "elements", 0))


def _is_named(nodeid: str) -> bool:
    """It is one of `FULL`, or lies in one."""
    return nodeid in FULL or any(nodeid[: end.start()] in FULL for end in _ENDS.finditer(nodeid))


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
