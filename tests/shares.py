"""Of tests that repeat one mechanism, the share that a tier has: one case of so many, or none.

The default tier leaves the other cases to the full tier, and that leaves its others to `make sweep`.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping

import pytest

# Tests of one mechanism that go through every op, kernel, model, format or number: of the cases of each, the default
# tier has one of so many, and the full tier the others.
ONE_OF: dict[str, int] = {
    "tests/backends/test_attention_edges.py::TestPagesOutsideOfTheCache::test_they_are_not_followed": 3,
    "tests/backends/test_flashinfer_coded_experts.py::TestNvfp4::test_every_scale_counts": 2,
    "tests/backends/test_triton_mla.py::TestSplits::test_a_plan_declares_the_memory_that_its_splits_take": 4,
    "tests/backends/test_triton_moe.py::TestFewLaunches::test_the_bits_are_those_of_separate_launches": 3,
    "tests/cli/test_demo.py::test_attention_and_a_block_run_and_are_right": 2,
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
    "tests/compat/test_vllm_plugin.py::TestWrites::test_no_write_is_new_after_the_start": 5,
    "tests/cuda/test_fp8_gemm.py::test_nothing_beside_the_result_is_written": 5,
    "tests/cuda/test_latent_decode.py::test_each_pair_is_walked_once_and_merged": 3,
    "tests/cuda/test_paged_decode.py::test_a_ragged_plan_serves_steps_of_more_queries_than_it_was_prepared_for": 2,
    "tests/evidence/test_audit.py::test_a_case_of_any_op_can_be_kept_and_run_again": 4,
    "tests/evidence/test_audit.py::test_a_kernel_that_is_wrong_where_verification_does_not_look_is_found_in_time": 4,
    "tests/evidence/test_audit.py::test_a_right_kernel_is_never_accused": 4,
    "tests/evidence/test_audit.py::test_one_wrong_element_is_found_in_any_op": 4,
    "tests/evidence/test_cases.py::TestOfAnOp::test_the_reference_hears_every_feature": 4,
    "tests/evidence/test_liars.py::TestOfAttention::test_is_caught_by_its_code_and_the_next_kernel_is_chosen": 4,
    "tests/evidence/test_served.py::TestFaults::test_of_what_is_not_served_are_found_once_it_is": 3,
    "tests/evidence/test_served.py::TestFaults::test_of_what_is_served_are_found": 4,
    "tests/evidence/test_trust.py::TestWrongKernels::"
    "test_is_quarantined_and_not_selected_even_if_the_vendor_is_trusted": 4,
    "tests/examples/test_copying_weights.py::test_the_best_token_is_one_of_the_context_and_a_fault_changes_it": 2,
    "tests/examples/test_serve.py::test_tokens_are_those_of_transformers": 3,
    "tests/gluon/test_soak.py::test_draws_are_right_and_repeat": 5,
    "tests/gluon/test_soak.py::test_softcap_sinks_and_lse_over_float8": 3,
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
    "tests/ops/test_expert_comm.py::test_a_result_is_written_again": 5,
    "tests/ops/test_gradients.py::test_a_layer_around_attention_loses_no_gradient": 3,
    "tests/ops/test_gradients.py::test_every_op_refuses_a_gradient_where_torch_compile_traces_it": 4,
    "tests/ops/test_known_calls.py::test_a_known_call_does_not_let_another_through": 3,
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
    "tests/ops/test_not_finite.py::test_attention": 5,
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
    "tests/ops/test_wrong_values.py::test_a_wrong_value_is_refused_by_name": 3,
    "tests/runtime/test_seal.py::TestLines::test_of_every_op_makes_it_ready": 4,
}

# What repeats the full tier with other lies, ops, sizes or numbers, and what `make sweep` alone runs of it. Of warm-ups
# by several processes, tests/runtime/test_cache_locks.py shows the same of the lock that they wait for; a kernel for a
# fixed number of splits is that of any number.
SWEPT = frozenset(
    {
        "tests/faults/test_all.py::TestCounting::test_those_of_several_workers_are_gathered_and_printed",
        "tests/warming/test_traffic_of_models.py::test_with_tritons_compiler_for_an_h200_nothing_is_compiled_after_the_warm_up",
        "tests/backends/test_triton.py::TestMlaSplitKVFixed::test_a_plan_gives_what_the_call_gives",
        "tests/backends/test_triton.py::TestMlaSplitKVFixed::test_operands_may_have_any_strides",
        "tests/warming/test_processes.py::TestOneCompilerPerNode::test_a_wait_that_is_too_long_names_the_holder",
        "tests/warming/test_processes.py::TestOneCompilerPerNode::test_when_the_first_is_killed_the_second_goes_on",
        "tests/evidence/test_tuned_sizes.py::TestTriton::test_a_real_search_over_tiles_ends_with_tiles_that_are_right",
    }
)
# Of the cases of these, the full tier has one of so many, and `make sweep` the others.
ONE_OF_FULL: dict[str, int] = {
    "tests/backends/test_attention_edges.py::TestPagesOutsideOfTheCache::test_they_are_not_followed": 3,
    "tests/backends/test_cpp.py::TestTargets::test_every_code_is_decoded_exactly": 4,
    "tests/backends/test_cpp.py::TestTargets::test_experts_keep_theirs": 4,
    "tests/backends/test_cpp.py::TestTargets::test_keeps_the_contract": 4,
    "tests/backends/test_flashinfer_cutlass.py::TestPrefill::test_tables_are_as_large_as_the_tiles_are_many": 2,
    "tests/backends/test_flashinfer_packed_experts.py::TestMxfp4::test_every_control_counts": 2,
    "tests/backends/test_flashinfer_packed_experts.py::TestMxfp4::"
    "test_what_is_given_in_other_dtypes_comes_back_in_them": 3,
    "tests/backends/test_flashinfer_packed_experts.py::TestMxfp4::test_widths_are_filled_up": 4,
    "tests/backends/test_flashinfer_packed_experts.py::TestPackedExperts::test_a_map_says_which_experts_are_here": 4,
    "tests/backends/test_flashinfer_packed_experts.py::TestPackedExperts::"
    "test_a_plan_runs_a_checkpoint_s_weights_and_packed_ones": 4,
    "tests/backends/test_flashinfer_packed_experts.py::TestPackedExperts::"
    "test_an_expert_that_is_chosen_twice_counts_twice": 4,
    "tests/backends/test_flashinfer_packed_experts.py::TestPackedExperts::test_any_number_of_experts_per_token": 4,
    "tests/backends/test_flashinfer_packed_experts.py::TestPackedExperts::test_halves_of_w13_are_distinguished": 3,
    "tests/backends/test_flashinfer_packed_experts.py::TestPackedExperts::"
    "test_ids_outside_of_the_experts_are_left_out": 3,
    "tests/backends/test_flashinfer_packed_experts.py::TestPackedExperts::test_matches_the_reference_in_float64": 4,
    "tests/backends/test_flashinfer_packed_experts.py::TestPackedExperts::test_operands_may_have_any_strides": 4,
    "tests/backends/test_flashinfer_packed_experts.py::TestPackedExperts::"
    "test_packed_weights_may_lie_anywhere_in_memory": 4,
    "tests/backends/test_grouped_details.py::test_every_tile_of_other_gpus_gives_the_reference": 5,
    "tests/backends/test_import_faults.py::test_the_next_kernel_runs_and_the_reason_is_reported": 3,
    "tests/backends/test_triton.py::TestExperts::test_a_format_is_for_those_who_request_it": 3,
    "tests/backends/test_triton.py::TestQuantize::test_what_is_no_ordinary_number_has_the_reference_s_result": 4,
    "tests/backends/test_triton_mla.py::TestSplits::test_any_number_of_splits_gives_the_reference": 3,
    "tests/backends/test_weight_only.py::test_tiles_of_other_gpus_are_right": 2,
    "tests/cli/test_explain.py::TestJson::test_there_is_one_decision_for_every_registered_kernel": 3,
    "tests/cli/test_main.py::TestHelp::test_every_example_runs": 3,
    "tests/cli/test_main.py::TestImports::test_what_runs_no_kernel_and_asks_no_device_does_not_load_torch": 3,
    "tests/cli/test_schemas.py::TestPrinted::test_it_is_of_its_schema_where_much_runs": 2,
    "tests/cli/test_widths.py::TestWidths::test_in_a_pipe_no_line_depends_on_a_width": 3,
    "tests/cli/test_widths.py::TestWidths::"
    "test_no_line_is_wider_than_the_terminal_and_no_wrapped_column_narrower_than_20": 3,
    "tests/cli/test_without_torch.py::test_it_answers_without_torch_in_a_second_of_cpu": 3,
    "tests/compat/test_sglang_plugin.py::TestStart::test_steps_of_serving_are_ready_when_it_has_started": 4,
    "tests/compat/test_sglang_plugin.py::TestSteps::test_a_step_is_the_reference": 3,
    "tests/compat/test_vllm_plugin.py::TestSteps::test_a_step_is_the_reference": 3,
    "tests/contract/test_fp4_gemm_liars.py::test_products_that_lie_are_caught": 3,
    "tests/contract/test_grouped_gemm_liars.py::test_is_detected": 2,
    "tests/contract/test_linear_attention_liars.py::test_linear_attention_that_is_wrong_is_detected": 3,
    "tests/contract/test_moe_liars.py::test_experts_that_lie_are_caught": 3,
    "tests/cuda/test_emulated.py::test_cases_of_the_op_pass": 2,
    "tests/cuda/test_fp4_gemm.py::test_faults_are_found": 2,
    "tests/cuda/test_fp4_gemm.py::test_results_are_right": 3,
    "tests/cuda/test_fp8_gemm.py::test_planted_faults_are_found": 2,
    "tests/cuda/test_paged_decode.py::test_any_lengths_in_any_parts": 3,
    "tests/cuda/test_paged_decode.py::test_planted_faults_are_found": 2,
    "tests/cuda/test_paged_decode.py::test_planted_faults_of_one_launch_are_found": 2,
    "tests/cuda/test_paged_decode.py::test_planted_faults_of_ragged_steps_are_found": 2,
    "tests/cuda/test_paged_decode.py::test_ragged_steps_in_any_parts": 3,
    "tests/docs/test_types.py::test_a_type_checker_sees_each_result_and_flags_misspelt_names": 2,
    "tests/evidence/test_contract_liars.py::test_wrong_kernels_are_detected_and_right_ones_pass": 24,
    "tests/evidence/test_contract_liars.py::test_wrong_quantisers_are_detected_by_a_check": 4,
    "tests/evidence/test_memory_liars.py::test_what_reads_other_memory_is_detected": 4,
    "tests/evidence/test_right_kernels.py::test_kernels_of_triton_pass_quick_checks_under_its_interpreter": 5,
    "tests/evidence/test_right_kernels.py::test_the_kernel_that_a_cpu_gets_passes_quick_checks": 4,
    "tests/fuzz/test_fuzz.py::test_varied_calls_are_right_or_refused_by_name": 3,
    "tests/ops/test_calls_of.py::TestEveryModel::test_a_calls_problem_is_the_needs": 3,
    "tests/ops/test_compile_grouped_gemm.py::test_at_most_two_graphs_over_sizes": 4,
    "tests/ops/test_compile_quants.py::test_at_most_two_graphs_over_sizes": 3,
    "tests/ops/test_moe_numbers.py::test_products_of_halves_are_not_rounded_to_halves": 3,
    "tests/ops/test_moe_numbers.py::test_scales_of_any_size_lose_nothing": 3,
    "tests/ops/test_own_precision.py::test_settings_for_layers_alter_nothing": 3,
    "tests/ops/test_prepared_with_shapes.py::test_a_plan_is_the_same_for_shapes": 3,
    "tests/ops/test_problems_of.py::TestProblems::test_each_is_a_problem_of_its_op_that_something_can_run": 3,
    "tests/ops/test_wrong_values.py::test_a_scalar_of_numpy_is_the_python_value": 3,
    "tests/runtime/test_cache_faults.py::test_many_at_first_use_compile_once": 2,
    "tests/warming/test_processes.py::TestInterrupted::test_what_was_done_is_taken_over": 2,
    "tests/warming/test_traffic_of_models.py::test_no_traffic_of_a_model_that_was_warmed_up_is_refused": 3,
}

# Of wrong kernels a share is enough; the right ones beside them, by the end of their names, are never left out.
_TRUTHS = re.compile(r"[\[-](Dense|Paged)?(Truth|True[A-Z])")


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
