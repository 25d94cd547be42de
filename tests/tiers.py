"""Which tests are the default tier, and which are `full`: where a test is, and what it does.

`python -m pytest` runs the default tier: every promise by its own tests, every kernel by one case for each feature.
`python -m pytest -m full` runs the rest, and `.ci/run` runs both. docs/testing.md says which tier proves what. A test
is `full` by where it is or by what its case shows (`shown.py`), so that a new test has its tier without anybody writing
it down. Tests marked `ahead` are of neither tier, nor those marked `sweep`: sizes, ops and lies that repeat what the
full tier shows (`shares.py`). A path named on the command line is run whole, both tiers of it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.shares import ONE_OF, ONE_OF_FULL, SWEPT, Shares
from tests.shown import (
    enough_cases,
    has_a_case,
    is_another_statement,
    of_the_largest_tensor,
    repeated,
    shows_something_new,
)

DEFAULT = "not full and not ahead and not sweep"
BOTH = "not ahead and not sweep"
ON_A_GPU = "gpu or device"

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
        "tests/backends/test_cpp.py::TestFailures::test_a_compiler_without_avx512_bf16_is_reported",
        "tests/backends/test_cpp.py::TestTargets",
        "tests/backends/test_direct_launch.py::test_launches_on_a_stub",
        "tests/backends/test_direct_launch.py::test_what_the_driver_receives",
        "tests/backends/test_triton_ahead.py",
        "tests/backends/test_triton_early.py::TestCompiled",
        "tests/cpu/test_sanitized.py",
        "tests/cuda/test_emulated.py",
        "tests/cuda/test_fp4_gemm.py",
        "tests/cuda/test_nvrtc.py::test_nvrtc_compiles_it_for_every_generation",
        "tests/cuda/test_nvrtc.py::test_nvrtc_compiles_float4_products_for_hopper",
        "tests/cuda/test_nvrtc.py::test_nvrtc_compiles_paged_decode_for_hopper",
        "tests/cuda/test_paged_decode.py::test_any_lengths_in_any_parts",
        "tests/cuda/test_paged_decode.py::test_planted_faults_are_found",
        "tests/cuda/test_paged_decode.py::test_planted_faults_of_one_launch_are_found",
        "tests/cuda/test_paged_decode.py::test_planted_faults_of_ragged_steps_are_found",
        "tests/cuda/test_paged_decode.py::test_ragged_steps_in_any_parts",
        "tests/cuda/test_fp8_gemm.py::test_each_form_gives_the_reference",
        "tests/cuda/test_nvrtc.py::test_nvrtc_compiles_products_for_hopper_without_spills",
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
        "tests/runtime/test_watches.py::TestTriton::test_what_is_in_its_cache_is_loaded_and_not_compiled",
        "tests/warming",
    ),
    "starts processes that import torch": (
        "tests/compat/test_transformers.py::TestRegister::test_importing_it_imports_no_transformers",
        "tests/compat/test_vllm_flashinfer.py::TestAsking::test_no_question_imports_or_connects",
        "tests/cli/test_main.py::TestImports::test_the_library_does_not_load_the_command_line",
        "tests/cli/test_doctor.py::TestProviders::test_a_copy_inside_vllm",
        "tests/docs/test_docs.py::test_the_kernel_of_the_guide_is_found_right_and_runs",
        "tests/docs/test_verification.py::TestRecord::test_what_ran_is_noted_of_a_test",
        "tests/dispatch/test_errors.py::test_a_pool_of_processes_passes_them_on",
        "tests/evidence/test_ahead.py::test_orders_to_a_real_child_name_the_cases",
        "tests/evidence/test_audit.py::test_nothing_of_audits_is_imported_while_they_are_off",
        "tests/evidence/test_case_run.py::test_children_of_a_warm_up_share_the_cases_of_one_kernel",
        "tests/evidence/test_store.py::TestWhereNothingIs::test_no_folder_is_made_and_nothing_is_imported_at_import",
        "tests/evidence/test_testing.py::test_a_package_of_somebody_else_s_runs_the_cases_with_pytest",
        "tests/evidence/test_trust.py::TestTune::test_verifies_before_it_measures",
        "tests/evidence/test_trust.py::TestWrongKernels::test_a_hang_costs_its_time_limit_and_no_more",
        "tests/evidence/test_tuned_tables.py::TestWriting::test_two_processes_that_tune_lose_nothing_of_each_other",
        "tests/examples/test_gpu_scripts.py::TestVerifyOnGpu::test_another_call_goes_on_with_what_has_not_ended",
        "tests/examples/test_serve.py::test_a_misspelt_kernel_of_a_variable_ends_with_the_nearest_name",
        "tests/examples/test_serving_benchmark.py::test_a_server_that_does_not_start_is_shown_with_its_log",
        "tests/faults/test_all.py::test_every_fault_is_injected_by_some_test_that_names_its_code",
        "tests/faults/test_devices.py::test_words_for_visible_devices_are_never_read_as_numbers",
        "tests/faults/test_network.py::test_addresses_that_lead_nowhere_are_never_asked",
        "tests/faults/test_network.py::test_without_any_network_all_answers_and_nothing_tries_to_reach_it",
        "tests/laws/test_going_on.py::test_what_passed_is_left_out_until_nothing_is_left",
        "tests/laws/test_import_hygiene.py::test_a_call_on_the_cpu_asks_no_gpu_and_imports_no_triton",
        "tests/laws/test_import_hygiene.py::test_a_process_may_fork_after_the_import_and_after_a_call",
        "tests/laws/test_import_hygiene.py::test_a_wrong_variable_does_not_break_the_import_only_the_first_decision",
        "tests/laws/test_import_hygiene.py::test_it_works_without_a_home_and_with_an_unwritable_one",
        "tests/runtime/test_interrupted.py",
    ),
    "starts ranks, or workers": (
        "tests/backends/test_custom_all_reduce.py::test_sums_of_more_ranks_and_dtypes",
        "tests/backends/test_deep_ep.py::test_a_layer_on_more_ranks",
        "tests/backends/test_flashinfer_comm.py::test_sums_of_more_ranks_and_dtypes",
        "tests/backends/test_flashinfer_exchange.py::test_two_ranks_exchange_all_formats_and_dtypes",
        "tests/backends/test_flashinfer_exchange.py::test_four_ranks_exchange_every_bit",
        "tests/backends/test_triton_comm.py::test_long_messages_are_sent_in_pieces",
        "tests/backends/test_triton_comm.py::test_quantised_norms_of_many_rows_are_made_in_pieces",
        "tests/backends/test_triton_parts.py::test_ranks_get_the_rows_and_sums_of_all",
        "tests/backends/test_triton_comm.py::test_more_ranks_get_the_sums_in_the_order_of_ranks",
        "tests/backends/test_triton_expert_comm.py::TestExact::test_rows_of_more_ranks_are_sent_in_pieces",
        "tests/backends/test_triton_expert_comm.py::TestExact::test_two_ranks_exchange_all_formats_dtypes_and_routings",
        "tests/backends/test_triton_expert_comm.py::test_four_ranks_exchange_every_bit",
        "tests/backends/test_triton_expert_comm.py::test_many_rows_are_sent_in_pieces",
        "tests/backends/test_triton_expert_comm.py::test_sums_of_several_parts_of_a_row",
        "tests/backends/test_triton_expert_comm.py::test_two_ranks_exchange_all_dtypes_routings_and_numbers_of_choices",
        "tests/docs/test_docs.py::test_examples_of_ranks_are_right_on_four",
        "tests/docs/test_docs.py::test_examples_of_ranks_say_how_many_there_may_be",
        "tests/faults/test_all.py::TestCounting::test_those_of_several_workers_are_gathered_and_printed",
        "tests/runtime/test_comm_ranks.py",
        "tests/runtime/test_comm_sizes.py",
        "tests/runtime/test_expert_ranks.py",
        "tests/runtime/test_ranks.py",
        "tests/runtime/test_tuned_ranks.py",
        "tests/runtime/test_unlike_ranks.py",
    ),
    "goes through every case, lie, attack, fault or tile": (
        "tests/backends/test_flash_attn.py::test_the_adapter_keeps_the_contract",
        "tests/backends/test_flash_mla.py::TestSparsePadded::test_a_plan_gives_what_the_call_gives",
        "tests/backends/test_flash_mla.py::TestSparsePadded::test_operands_may_have_any_strides",
        "tests/backends/test_flash_mla.py::TestSparsePadded::test_tokens_past_the_last_offset_are_left_alone",
        "tests/backends/test_flash_mla.py::TestSparsePadded::test_without_out_and_lse_the_result_is_the_same",
        "tests/backends/test_varlen_attn.py::test_the_adapter_keeps_the_contract",
        "tests/backends/test_vllm_attention.py::test_the_adapter_keeps_the_contract",
        "tests/backends/test_xformers.py::test_the_adapter_keeps_the_contract",
        "tests/backends/test_flashinfer_packed_experts.py",
        "tests/cuda/test_fp8_gemm.py::test_planted_faults_are_found",
        "tests/backends/test_grouped_details.py::test_every_tile_of_other_gpus_gives_the_reference",
        "tests/backends/test_import_faults.py",
        "tests/gluon/test_attention.py::test_every_interleaving_gives_the_reference",
        "tests/gluon/test_attention.py::test_pages_of_every_size",
        "tests/gluon/test_attention.py::test_a_window_and_keys_of_other_lengths",
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
    "torch.compile by an op's further ways": (
        "tests/ops/test_compile.py::TestCompile::test_a_selection_made_after_compiling_is_honoured",
        "tests/ops/test_compile.py::TestCompile::test_merge_in_place_goes_through",
        "tests/ops/test_compile.py::TestCompile::test_paged_plans_do_too",
        "tests/ops/test_compile_fp8_gemm.py::test_batches_compile_at_most_two_graphs_over_sizes",
        "tests/ops/test_compile_grouped_gemm.py::test_the_operators_pass_torch_s_own_check",
        "tests/ops/test_compile_indexer.py::TestCompiled::test_a_plan_runs_inside",
        "tests/ops/test_compile_kv_cache.py::test_the_operator_passes_torch_s_own_check",
        "tests/ops/test_compile_linear_attention.py::test_a_plan_runs_inside",
        "tests/ops/test_compile_mla.py::TestMlaAttention::test_plans_run_inside_a_compiled_region",
        "tests/ops/test_compile_mla.py::TestMlaAttention::test_the_operators_pass_torch_s_own_check",
        "tests/ops/test_compile_mla.py::TestWriteMlaCache::test_a_plan_runs_inside_a_compiled_region",
        "tests/ops/test_compile_mla.py::TestWriteMlaCache::test_the_operator_passes_torch_s_own_check",
        "tests/ops/test_compile_moe.py::test_experts_write_into_given_tensors_also_of_operands",
        "tests/ops/test_compile_moe.py::test_plans_run_inside_a_compiled_region",
        "tests/ops/test_compile_moe.py::test_scales_and_dtypes_of_activations_go_through",
        "tests/ops/test_compile_moe.py::test_the_operators_pass_torch_s_own_check",
        "tests/ops/test_compile_quants.py::test_plans_run_inside_a_compiled_region",
        "tests/ops/test_parameters.py::test_what_is_handed_to_the_traced_form_are_the_parameters_alone",
    ),
    "repeats, measures, or is large": (
        "tests/backends/test_cudnn.py::test_warm_up_builds_the_graphs_of_all_sequences_and_lengths",
        "tests/backends/test_cutlass.py::test_sums_of_14_bits_agree_up_to_the_k_that_records_take_and_not_far_beyond",
        "tests/backends/test_flashinfer.py::TestPlans::test_scratch_that_is_too_small_is_made_larger",
        "tests/backends/test_marlin_fp8.py::TestFloat16::test_a_packed_weight_is_traced",
        "tests/backends/test_triton_details.py::TestOneLaunch::test_what_may_not_count_is_merged_by_a_second_launch",
        "tests/cli/test_demo.py::TestChecks::test_a_prefill_that_is_checked_in_parts_is_checked_exactly",
        "tests/evidence/test_liars.py::TestQuarantine::test_a_quick_run_repeats_what_failed_before",
        "tests/evidence/test_liars.py::TestQuarantine::test_what_there_was_no_time_for_still_stands",
        "tests/evidence/test_served.py::TestFaults::test_of_what_is_not_served_are_found_by_a_whole_run",
        "tests/evidence/test_served.py::TestFaults::test_that_were_found_are_tried_again_first",
        "tests/evidence/test_tuned_sizes.py::TestTrying::test_measuring_again_begins_with_the_kernels_own",
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
        "tests/examples/test_gpu_scripts.py::TestVerifyOnGpu::test_no_part_has_more_than_is_left_of_all_seconds",
        "tests/ops/test_compile_grouped_gemm.py::test_at_most_two_graphs_over_sizes",
        "tests/ops/test_compile_quants.py::test_at_most_two_graphs_over_sizes",
        "tests/runtime/test_cache_locks.py::TestDeadHolders::"
        "test_signs_of_life_keep_the_lock_of_a_process_that_cannot_be_asked",
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

# Fixtures that start a process, by which a test of a command repeats what another asks within this process.
STARTS = {"ask_shell"}


def pytest_configure(config: pytest.Config) -> None:
    """A path that is named is run whole. Workers of a parallel run are told by the same option."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    if named and config.option.markexpr == DEFAULT:
        config.option.markexpr = BOTH


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that are `full` as a whole are not imported for the default tier, those without a mark not for a GPU."""
    if config.option.markexpr == ON_A_GPU and collection_path.suffix == ".py":
        return re.search(r"\bmark\.(gpu|device)\b", collection_path.read_text()) is None or None
    if config.option.markexpr != DEFAULT or not collection_path.is_relative_to(config.rootpath):
        return None
    return collection_path.relative_to(config.rootpath).as_posix() in FULL or None


def mark_full(items: list[pytest.Function]) -> None:
    """Mark the tests of the full tier, and those that repeat them."""
    items = [item for item in items if not (item.get_closest_marker("ahead") or item.get_closest_marker("sweep"))]
    items.sort(key=of_the_largest_tensor)  # of the cases that show the same, the smallest is the first
    enough = enough_cases(items)
    shown: dict[str, set[object]] = {}
    of_mechanisms, of_repetitions = Shares(ONE_OF), Shares(ONE_OF_FULL)
    full = [
        item
        for item in items
        if (
            _is_in(FULL, item.nodeid)
            or item.originalname in SWEEPS
            or is_another_statement(item)
            or not STARTS.isdisjoint(item.fixturenames)
            or item.get_closest_marker("gpu")
            or (item.nodeid not in enough if has_a_case(item) else not shows_something_new(item, shown))
            or of_mechanisms.leaves_out(item)
        )
    ]
    repeats = repeated(items, full)
    for item in full:
        swept = _is_in(SWEPT, item.nodeid) or of_repetitions.leaves_out(item) or item.nodeid in repeats
        item.add_marker(pytest.mark.sweep if swept else pytest.mark.full)


def _is_in(names: frozenset[str], nodeid: str) -> bool:
    """It is one of these folders, files, classes and functions, or lies in one."""
    return nodeid in names or any(nodeid[: end.start()] in names for end in _ENDS.finditer(nodeid))
