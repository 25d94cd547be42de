"""Which tests are the default tier, and which are `full`: the rules, all of them.

`python -m pytest` runs the default tier: every promise by its own tests, every kernel by one case for each feature.
`python -m pytest -m full` runs the rest, and `.ci/run` runs both. docs/testing.md says which tier proves what. A test
is `full` by where it is or by what its case shows, so that a new test has its tier without anybody writing it down.
Tests marked `ahead` are of neither tier, nor those marked `sweep`: sizes, ops and lies that repeat what the full tier
shows. A path named on the command line is run whole, both tiers of it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
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
        "tests/runtime/test_watches.py::TestTriton::test_what_is_in_its_cache_is_loaded_and_not_compiled",
        "tests/warming",
    ),
    "starts processes that import torch": (
        "tests/compat/test_transformers.py::TestRegister::test_importing_it_imports_no_transformers",
        "tests/compat/test_vllm_flashinfer.py::TestAsking::test_no_question_imports_or_connects",
        "tests/cli/test_main.py::TestImports::test_the_library_does_not_load_the_command_line",
        "tests/docs/test_docs.py::test_the_kernel_of_the_guide_is_found_right_and_runs",
        "tests/docs/test_verification.py::TestRecord::test_what_ran_is_noted_of_a_test",
        "tests/evidence/test_audit.py::test_nothing_of_audits_is_imported_while_they_are_off",
        "tests/evidence/test_store.py::TestWhereNothingIs::test_no_folder_is_made_and_nothing_is_imported_at_import",
        "tests/evidence/test_testing.py::test_a_package_of_somebody_else_s_runs_the_cases_with_pytest",
        "tests/evidence/test_trust.py::TestTune::test_verifies_before_it_measures",
        "tests/evidence/test_trust.py::TestWrongKernels::test_a_hang_costs_its_time_limit_and_no_more",
        "tests/evidence/test_tuned_tables.py::TestWriting::test_two_processes_that_tune_lose_nothing_of_each_other",
        "tests/examples/test_serving_benchmark.py::test_a_server_that_does_not_start_is_shown_with_its_log",
        "tests/faults/test_all.py::test_every_fault_is_injected_by_some_test_that_names_its_code",
        "tests/faults/test_devices.py::test_words_for_visible_devices_are_never_read_as_numbers",
        "tests/faults/test_network.py::test_addresses_that_lead_nowhere_are_never_asked",
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
        "tests/backends/test_triton_comm.py::test_more_ranks_get_the_sums_in_the_order_of_ranks",
        "tests/backends/test_triton_expert_comm.py::TestExact::test_rows_of_more_ranks_are_sent_in_pieces",
        "tests/backends/test_triton_expert_comm.py::TestExact::test_two_ranks_exchange_all_formats_dtypes_and_routings",
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
        "tests/backends/test_marlin_fp8.py::TestFloat16::test_a_packed_weight_is_traced",
        "tests/backends/test_triton_details.py::TestOneLaunch::test_what_may_not_count_is_merged_by_a_second_launch",
        "tests/cli/test_demo.py::TestChecks::test_a_prefill_that_is_checked_in_parts_is_checked_exactly",
        "tests/evidence/test_liars.py::TestQuarantine::test_a_quick_run_repeats_what_failed_before",
        "tests/evidence/test_liars.py::TestQuarantine::test_what_there_was_no_time_for_still_stands",
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

# Tests of one mechanism that go through every op, kernel, model, format or number: of the cases of each, the default
# tier has one of so many, and the full tier the others.
ONE_OF: dict[str, int] = {
    "tests/backends/test_attention_edges.py::TestPagesOutsideOfTheCache::test_they_are_not_followed": 3,
    "tests/backends/test_flashinfer_coded_experts.py::TestNvfp4::test_every_scale_counts": 2,
    "tests/backends/test_triton_mla.py::TestSplits::test_a_plan_declares_the_memory_that_its_splits_take": 4,
    "tests/cli/test_explain.py::TestJson::test_there_is_one_decision_for_every_registered_kernel": 5,
    "tests/cli/test_widths.py::TestWidths::test_in_a_pipe_no_line_depends_on_a_width": 3,
    "tests/cli/test_widths.py::TestWidths::"
    "test_no_line_is_wider_than_the_terminal_and_no_wrapped_column_narrower_than_20": 4,
    "tests/compat/test_env.py::test_nothing_that_flashinfer_reads_is_called_a_misspelt_name": 3,
    "tests/compat/test_sglang_plugin.py::TestSteps::test_a_step_is_the_reference": 4,
    "tests/compat/test_transformers.py::TestDecoders::test_decoding_after_padding_on_the_right": 3,
    "tests/compat/test_transformers.py::TestDecoders::test_generation": 3,
    "tests/compat/test_transformers.py::TestDecoders::test_generation_from_a_padded_batch": 3,
    "tests/compat/test_transformers.py::TestDecoders::test_generation_with_a_static_cache": 6,
    "tests/compat/test_vllm_hooks.py::TestFp8Linear::test_a_scale_for_all_or_each_row": 4,
    "tests/compat/test_vllm_plugin.py::TestStart::test_steps_of_serving_are_ready_when_it_has_started": 4,
    "tests/compat/test_vllm_plugin.py::TestSteps::test_a_step_is_the_reference": 4,
    "tests/compat/test_vllm_plugin.py::TestSteps::test_equal_numbers_of_speculative_tokens_are_one_batch": 4,
    "tests/evidence/test_audit.py::test_a_case_of_any_op_can_be_kept_and_run_again": 4,
    "tests/evidence/test_audit.py::test_a_kernel_that_is_wrong_where_verification_does_not_look_is_found_in_time": 4,
    "tests/evidence/test_audit.py::test_a_right_kernel_is_never_accused": 4,
    "tests/evidence/test_audit.py::test_one_wrong_element_is_found_in_any_op": 4,
    "tests/evidence/test_cases.py::TestOfAnOp::test_the_reference_hears_every_feature": 4,
    "tests/evidence/test_liars.py::TestOfAttention::test_is_caught_by_its_code_and_the_next_kernel_is_chosen": 4,
    "tests/evidence/test_trust.py::TestWrongKernels::"
    "test_is_quarantined_and_not_selected_even_if_the_vendor_is_trusted": 4,
    "tests/examples/test_copying_weights.py::test_the_best_token_is_one_of_the_context_and_a_fault_changes_it": 2,
    "tests/examples/test_serve.py::test_tokens_are_those_of_transformers": 3,
    "tests/ops/test_calls_of.py::TestEveryModel::test_a_calls_problem_is_the_needs": 6,
    "tests/ops/test_calls_of.py::TestEveryOp::test_with_features_they_are_what_is_asked_and_run": 4,
    "tests/ops/test_closed_schema.py::test_a_kernel_that_does_not_list_a_feature_is_refused_where_it_is_used": 5,
    "tests/ops/test_closed_schema.py::test_every_kernel_can_be_had_for_some_problem_on_some_device": 4,
    "tests/ops/test_compile_fp4_gemm.py::test_at_most_two_graphs_over_sizes": 3,
    "tests/ops/test_compile_fp4_gemm.py::test_packed_weights_and_plans_go_through": 2,
    "tests/ops/test_compile_fp8_gemm.py::test_at_most_two_graphs_over_sizes": 3,
    "tests/ops/test_compile_fp8_gemm.py::test_weights_alone_go_through": 2,
    "tests/ops/test_compile_fused_quant.py::test_every_number_of_results_goes_through": 3,
    "tests/ops/test_compile_indexer.py::TestCompiled::test_at_most_two_graphs_over_sizes": 3,
    "tests/ops/test_compile_kv_cache.py::test_scales_a_layout_and_a_plan_go_through": 2,
    "tests/ops/test_compile_linear_attention.py::test_at_most_two_graphs_over_sizes": 2,
    "tests/ops/test_compile_mla.py::TestMlaAttention::test_compiles_at_most_two_graphs_over_batch_sizes": 2,
    "tests/ops/test_compile_mla.py::TestMlaAttention::test_lse_out_scales_and_a_named_backend_go_through": 2,
    "tests/ops/test_compile_mla.py::TestWriteMlaCache::test_scales_and_a_named_backend_go_through": 2,
    "tests/ops/test_compile_moe.py::test_experts_compile_at_most_two_graphs_over_sizes": 4,
    "tests/ops/test_compile_moe.py::test_formats_of_activations_go_through": 2,
    "tests/ops/test_compile_quants.py::test_destinations_are_written": 4,
    "tests/ops/test_gradients.py::test_a_layer_around_attention_loses_no_gradient": 3,
    "tests/ops/test_gradients.py::test_every_op_refuses_a_gradient_where_torch_compile_traces_it": 4,
    "tests/ops/test_largest_scales.py::test_fp4_gemm": 4,
    "tests/ops/test_largest_scales.py::test_fused_moe": 3,
    "tests/ops/test_largest_scales.py::test_grouped_gemm": 4,
    "tests/ops/test_latent_and_indexer_operands.py::test_every_operand_may_have_any_strides": 3,
    "tests/ops/test_latent_and_indexer_operands.py::test_unused_entries_of_tables_and_lists_may_hold_anything": 3,
    "tests/ops/test_moe_numbers.py::test_a_gate_beyond_the_least_number_adds_nothing": 4,
    "tests/ops/test_moe_numbers.py::test_autocast_and_the_precision_of_others_change_nothing": 3,
    "tests/ops/test_moe_numbers.py::test_defaults_that_a_program_sets_change_nothing": 3,
    "tests/ops/test_moe_numbers.py::test_products_of_halves_are_not_rounded_to_halves": 4,
    "tests/ops/test_moe_numbers.py::test_scales_of_any_size_lose_nothing": 4,
    "tests/ops/test_own_precision.py::test_settings_for_layers_alter_nothing": 4,
    "tests/ops/test_packed_experts.py::TestPacking::test_they_go_through_torch_compile": 5,
    "tests/ops/test_parameters.py::test_a_call_with_parameters_gives_what_one_with_tensors_gives": 3,
    "tests/ops/test_prepared_with_shapes.py::test_a_plan_is_the_same_for_shapes": 5,
    "tests/ops/test_problems_of.py::TestProblems::test_each_is_a_problem_of_its_op_that_something_can_run": 4,
    "tests/ops/test_quant_operands.py::test_operands_lie_anywhere": 3,
    "tests/ops/test_scales_far_apart.py::test_fp8_gemm": 4,
    "tests/ops/test_scales_far_apart.py::test_grouped_gemm": 3,
    "tests/ops/test_small_weights.py::test_values_behind_small_weights": 4,
    "tests/ops/test_steps_of_threads.py::test_a_thread_that_ended_keeps_no_tensors": 3,
    "tests/ops/test_steps_of_threads.py::test_one_thread_keeps_one_step": 3,
    "tests/ops/test_weights_of_plans.py::TestEach::test_compiled_runs_do_the_same": 4,
    "tests/ops/test_wrong_values.py::test_a_scalar_of_numpy_is_the_python_value": 4,
    "tests/runtime/test_seal.py::TestLines::test_of_every_op_makes_it_ready": 4,
}

# What repeats the full tier with other lies, ops, sizes or numbers, and what `make sweep` alone runs of it.
SWEPT = frozenset(
    {
        "tests/faults/test_all.py::TestCounting::test_those_of_several_workers_are_gathered_and_printed",
        "tests/warming/test_traffic_of_models.py::test_with_tritons_compiler_for_an_h200_nothing_is_compiled_after_the_warm_up",
        "tests/evidence/test_tuned_sizes.py::TestTriton::test_a_real_search_over_tiles_ends_with_tiles_that_are_right",
    }
)
# Of the cases of these, the full tier has one of so many, and `make sweep` the others.
ONE_OF_FULL: dict[str, int] = {
    "tests/backends/test_attention_edges.py::TestPagesOutsideOfTheCache::test_they_are_not_followed": 3,
    "tests/backends/test_cpp.py::TestTargets::test_every_code_is_decoded_exactly": 2,
    "tests/backends/test_cpp.py::TestTargets::test_experts_keep_theirs": 2,
    "tests/backends/test_cpp.py::TestTargets::test_keeps_the_contract": 2,
    "tests/backends/test_flashinfer_cutlass.py::TestPrefill::test_tables_are_as_large_as_the_tiles_are_many": 2,
    "tests/backends/test_flashinfer_packed_experts.py::TestMxfp4::test_every_control_counts": 2,
    "tests/backends/test_flashinfer_packed_experts.py::TestMxfp4::"
    "test_what_is_given_in_other_dtypes_comes_back_in_them": 3,
    "tests/backends/test_flashinfer_packed_experts.py::TestMxfp4::test_widths_are_filled_up": 4,
    "tests/backends/test_flashinfer_packed_experts.py::TestPackedExperts::test_any_number_of_experts_per_token": 4,
    "tests/backends/test_flashinfer_packed_experts.py::TestPackedExperts::test_halves_of_w13_are_distinguished": 3,
    "tests/backends/test_flashinfer_packed_experts.py::TestPackedExperts::"
    "test_ids_outside_of_the_experts_are_left_out": 3,
    "tests/backends/test_flashinfer_packed_experts.py::TestPackedExperts::test_matches_the_reference_in_float64": 4,
    "tests/backends/test_grouped_details.py::test_every_tile_of_other_gpus_gives_the_reference": 4,
    "tests/cli/test_demo.py::TestWrongNumbers::test_they_are_found_and_exit_1": 2,
    "tests/cli/test_main.py::TestHelp::test_every_example_runs": 2,
    "tests/cli/test_main.py::TestImports::test_what_runs_no_kernel_and_asks_no_device_does_not_load_torch": 3,
    "tests/cli/test_schemas.py::TestPrinted::test_it_is_of_its_schema_where_much_runs": 2,
    "tests/cli/test_without_torch.py::test_it_answers_without_torch_in_a_second_of_cpu": 3,
    "tests/compat/test_sglang_plugin.py::TestStart::test_steps_of_serving_are_ready_when_it_has_started": 4,
    "tests/contract/test_fp4_gemm_liars.py::test_products_that_lie_are_caught": 3,
    "tests/contract/test_grouped_gemm_liars.py::test_is_detected": 2,
    "tests/contract/test_linear_attention_liars.py::test_linear_attention_that_is_wrong_is_detected": 3,
    "tests/contract/test_moe_liars.py::test_experts_that_lie_are_caught": 3,
    "tests/docs/test_types.py::test_a_type_checker_sees_each_result_and_flags_misspelt_names": 2,
    "tests/evidence/test_contract_liars.py::test_wrong_kernels_are_detected_and_right_ones_pass": 12,
    "tests/evidence/test_contract_liars.py::test_wrong_quantisers_are_detected_by_a_check": 4,
    "tests/evidence/test_memory_liars.py::test_what_reads_other_memory_is_detected": 4,
    "tests/evidence/test_right_kernels.py::test_kernels_of_triton_pass_quick_checks_under_its_interpreter": 5,
    "tests/evidence/test_right_kernels.py::test_the_kernel_that_a_cpu_gets_passes_quick_checks": 4,
    "tests/fuzz/test_fuzz.py::test_varied_calls_are_right_or_refused_by_name": 3,
    "tests/ops/test_compile_grouped_gemm.py::test_at_most_two_graphs_over_sizes": 4,
    "tests/ops/test_compile_quants.py::test_at_most_two_graphs_over_sizes": 3,
    "tests/runtime/test_cache_faults.py::test_many_at_first_use_compile_once": 2,
    "tests/warming/test_processes.py::TestInterrupted::test_what_was_done_is_taken_over": 2,
    "tests/warming/test_traffic_of_models.py::test_no_traffic_of_a_model_that_was_warmed_up_is_refused": 3,
}

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

# Kernels that run here as they do for users. Others are interpreted, or a stand-in of their library computes for them.
REAL = ("tests/backends/test_cpp", "tests/backends/test_torch", *([INTERPRETED] if HAS_GPU else []))
# Of the cases of those others that show no new pair of features, the full tier has one of so many.
OF_REPEATED = 12
# Of wrong kernels a share is enough; the right ones beside them, by the end of their names, are never left out.
_TRUTHS = re.compile(r"[\[-](Dense|Paged)?(Truth|True[A-Z])")

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
    items = [item for item in items if not (item.get_closest_marker("ahead") or item.get_closest_marker("sweep"))]
    items.sort(key=_elements)  # of the cases that show the same, the smallest is the first
    enough = _enough_cases(items)
    shown: dict[str, set[object]] = {}
    of_mechanisms, of_repetitions, repeats = Shares(ONE_OF), Shares(ONE_OF_FULL), Repeats()
    for item in items:
        if (
            _is_in(FULL, item.nodeid)
            or item.originalname in SWEEPS
            or (item.nodeid.startswith(INTERPRETED) and "case" not in item.fixturenames)
            or not STARTS.isdisjoint(item.fixturenames)
            or item.get_closest_marker("gpu")
            or (item.nodeid not in enough if _has_a_case(item) else not _shows_something_new(item, shown))
            or of_mechanisms.leaves_out(item)
        ):
            swept = _is_in(SWEPT, item.nodeid) or of_repetitions.leaves_out(item) or repeats(item)
            item.add_marker(pytest.mark.sweep if swept else pytest.mark.full)


class Shares:
    """Which cases are left out where one of so many of a test is enough, to be asked of all tests in their order."""

    def __init__(self, one_of: Mapping[str, int]) -> None:
        self._one_of = one_of
        self._places: collections.Counter[str] = collections.Counter()

    def leaves_out(self, item: pytest.Function) -> bool:
        name, _, label = item.nodeid.partition("[")
        if name not in self._one_of or _TRUTHS.search(f"[{label}"):
            return False
        place = self._places[name]
        self._places[name] += 1
        return place % self._one_of[name] != 0


class Repeats:
    """Which cases of interpreted kernels and stand-ins repeat others of the full tier, asked of all in their order."""

    def __init__(self) -> None:
        self._pairs: dict[str, set[object]] = {}
        self._places: collections.Counter[str] = collections.Counter()

    def __call__(self, item: pytest.Function) -> bool:
        if item.originalname != "test_case" or not item.nodeid.startswith("tests/backends/"):
            return False
        case: Any = getattr(getattr(item, "callspec", None), "params", {}).get("case")
        if item.nodeid.startswith(REAL) or not hasattr(case, "problem"):
            return False
        name = item.nodeid.partition("[")[0]
        pairs = {*case.problem, *itertools.combinations(sorted(case.problem), 2)}
        shown = self._pairs.setdefault(name, set())
        new = pairs - shown
        shown |= pairs
        place = self._places[name]
        self._places[name] += not new
        return not new and place % OF_REPEATED != 0


def _elements(item: pytest.Function) -> int:
    """Of the largest tensor of a case of a kernel; 0 of other tests."""
    case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
    return int(getattr(case, "elements", 0))


def _is_in(names: frozenset[str], nodeid: str) -> bool:
    """It is one of these folders, files, classes and functions, or lies in one."""
    return nodeid in names or any(nodeid[: end.start()] in names for end in _ENDS.finditer(nodeid))


def _has_a_case(item: pytest.Function) -> bool:
    """Its parameter is a case of a kernel's contract."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    return item.nodeid.startswith(OF_KERNELS) and "case" in params


def _enough_cases(items: Iterable[pytest.Function]) -> set[str]:
    """Of the cases of each test of each kernel, few that together show all that any of them shows.

    The first that is taken shows the most, and each further one the most of what is left; of equals the first.
    """
    groups: dict[str, dict[str, set[object]]] = {}
    for item in items:
        if _has_a_case(item):
            groups.setdefault(_of(item), {})[item.nodeid] = set(words(item.callspec.params))
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


def _of(item: pytest.Item) -> str:
    """The test and the kernel of a case."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    subject = sorted(f"{name}={params[name]}" for name in SUBJECTS if name in params)
    return " ".join([item.nodeid.split("[", 1)[0], *subject])


def _shows_something_new(item: pytest.Item, shown: dict[str, set[object]]) -> bool:
    """Of the parameters of one test of a kernel, those count that show something which no earlier ones show."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    if not item.nodeid.startswith(OF_KERNELS) or not params:
        return True
    shows = set(words(params))
    before = shown.setdefault(_of(item), set())
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
