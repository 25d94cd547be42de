"""`problems_of`: what a model asks is what calls with its tensors ask, and its figures are the published ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kernelhub
from kernelhub.errors import ConfigurationError
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.problems import problems_of
from kernelhub.ops.models.published import CONFIGS, describe
from kernelhub.ops.models.shapes import ATTENTION, FP8_LAYERS

SHARED_OUT = [(name, tp) for name in CONFIGS for tp in (1, 8)]


def needs(model: str, op: str, phase: str = "", **more: Any) -> list[dict[str, Any]]:
    """The facets of an op that a model asks for."""
    found = [need for need in problems_of(model, **more) if need.op == op and (not phase or phase in need.phases)]
    return [dict(need.facets) for need in found]


def asked(op: Any, arguments: dict[str, Any]) -> Any:
    """The problem that a call asks."""
    return kernelhub.explain(op, **arguments).problem


class TestProblems:
    @pytest.mark.parametrize(("model", "tp"), SHARED_OUT)
    @pytest.mark.parametrize("device", ["H200", "CPU"])
    def test_each_is_a_problem_of_its_op_that_something_can_run(self, model, tp, device):
        listed = problems_of(model, tp=tp)
        assert len({(need.op, need.facets) for need in listed}) == len(listed)
        for need in listed:
            assert need.phases
            assert need.layers
            selection = kernelhub.explain(need.op, device=device, **dict(need.facets))
            assert selection.problem == need.problem(device)
            assert selection.selected, f"{need}: {selection}"

    @pytest.mark.parametrize("model", [name for name in ATTENTION if name in CONFIGS])
    def test_attention_is_what_calls_with_the_models_tensors_ask(self, model):
        """Their layers with the model's features; gemma's and gpt-oss's others have no window."""
        packed = asked(kernelhub.attention, attention_inputs(model, q_lens=(40, 40)) | {"max_seqlen_q": 40})
        decode = asked(kernelhub.paged_attention, paged_attention_inputs(model, seq_lens=(5,)))
        mixed = asked(kernelhub.paged_attention, paged_attention_inputs(model, seq_lens=(50,), q_lens=(40,)))
        problems = [need.problem("cpu") for need in problems_of(model)]
        for problem in (packed, decode, mixed):
            assert problem in problems

    @pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2-lite"])
    def test_latent_attention_is_what_calls_with_the_models_tensors_ask(self, model):
        decode = asked(kernelhub.mla_attention, mla_attention_inputs(model, seq_lens=(5,)))
        chunk = asked(kernelhub.mla_attention, mla_attention_inputs(model, seq_lens=(50,), q_lens=(40,)))
        problems = [need.problem("cpu") for need in problems_of(model)]
        assert decode in problems
        assert chunk.ragged
        assert any(problem.ragged and problem.q_len == "many" for problem in problems if hasattr(problem, "sparse"))

    def test_phases_can_be_requested_alone(self):
        assert {need.op for need in problems_of("llama-3.1-8b", phases=["prefill"])} == {"attention", "paged_attention"}
        assert {need.phases for need in problems_of("deepseek-v3", phases=["decode"])} == {("decode",)}

    def test_a_model_in_bfloat16_needs_no_products_of_ours_and_one_in_blocks_needs_them_all(self):
        assert needs("llama-3.1-70b", "fp8_gemm") == []
        shapes = {(item["n"], item["k"]) for item in needs("llama-3.1-70b", "fp8_gemm", quantization="fp8_channel")}
        assert shapes == {(layer.n, layer.k) for name, layer in FP8_LAYERS.items() if name.startswith("llama-3.1-70b")}
        rows = {item["rows"] for item in needs("llama-3.1-70b", "fp8_gemm", "decode", quantization="fp8_block")}
        assert rows == {"few"}
        nvfp4 = needs("llama-3.1-70b", "fp4_gemm", quantization="nvfp4")
        assert {(item["b_format"], item["rows"]) for item in nvfp4} == {("nvfp4", "few"), ("nvfp4", "many")}

    def test_kv_in_fp8_and_pages_are_as_asked(self):
        (decode,) = needs("llama-3.1-8b", "paged_attention", "decode", kv_dtype="float8_e4m3fn", page_size=64)
        assert (decode["kv_dtype"], decode["kv_scale"], decode["page_size"]) == ("float8_e4m3fn", "value", 64)
        assert needs("llama-3.1-8b", "paged_attention", "decode", kv_dtype="fp8", page_size=64) == [decode]
        (packed,) = needs("llama-3.1-8b", "attention", kv_dtype="float8_e4m3fn")
        assert packed["kv_dtype"] == "bfloat16", "new keys are not of the cache yet"

    def test_layers_with_and_without_a_window_are_two_problems(self):
        assert [item["window_left"] for item in needs("gpt-oss-120b", "attention")] == [False, True]
        assert [item["window_left"] for item in needs("mistral-7b-v0.1", "attention")] == [True]


class TestSharing:
    def test_heads_and_widths_are_those_of_one_rank(self):
        (one,) = needs("llama-3.1-70b", "attention", tp=8)
        assert (one["num_q_heads"], one["num_kv_heads"]) == (8, 1)
        experts, many = needs("mixtral-8x7b", "fused_moe", tp=8)
        assert (experts["rows"], many["rows"]) == ("few", "many")
        assert (experts["num_experts"], experts["intermediate_size"], experts["expert_map"]) == (8, 14336 // 8, False)
        (latent,) = needs("deepseek-v3.2", "mla_attention", "decode", tp=16)
        assert latent["num_heads"] == 8

    def test_kv_heads_that_are_too_few_are_repeated(self):
        (one,) = needs("qwen3-30b-a3b", "attention", tp=8)
        assert (one["num_q_heads"], one["num_kv_heads"]) == (4, 1)
        qkv = {(item["n"], item["k"]) for item in needs("qwen3-30b-a3b", "fp8_gemm", tp=8, quantization="fp8_block")}
        assert ((4 + 2) * 128, 2048) in qkv

    def test_experts_can_be_shared_out_whole(self):
        (experts,) = needs("deepseek-v3.2", "fused_moe", "decode", tp=8, ep=8)
        assert (experts["num_experts"], experts["intermediate_size"], experts["expert_map"]) == (32, 2048, True)

    @pytest.mark.parametrize(
        ("model", "ranks", "message"),
        [
            ("llama-3.1-8b", {"tp": 3}, "num_attention_heads is 32, which 3 ranks cannot share evenly"),
            ("minimax-m2.5", {"tp": 6}, "num_key_value_heads is 8, which 6"),
            ("deepseek-v3", {"ep": 7}, "num_experts is 256, which 7"),
            ("llama-3.1-8b", {"tp": 0}, "tp is 0; it is a number of ranks"),
            ("llama-3.1-8b", {"phases": ["draft"]}, "'draft' is not one of prefill, decode"),
            ("llama-3.1-8b", {"quantization": "int4"}, "quantization is 'int4'.*; it takes plain"),
        ],
    )
    def test_what_cannot_be_is_reported(self, model, ranks, message):
        with pytest.raises(ConfigurationError, match=message):
            problems_of(model, **ranks)


CLASSES = {
    "MistralConfig": "mistral-7b-v0.1",
    "MixtralConfig": "mixtral-8x7b",
    "GptOssConfig": "gpt-oss-120b",
    "DeepseekV3Config": "deepseek-v3",
    "DeepseekV32Config": "deepseek-v3.2",
    "GlmMoeDsaConfig": "glm-5",
    "MiniMaxM2Config": "minimax-m2.5",
}


class TestCheckpoints:
    @pytest.mark.parametrize("name", sorted(CLASSES))
    def test_a_config_json_that_transformers_writes_gives_the_same_problems(self, name, tmp_path):
        transformers = pytest.importorskip(
            "transformers", reason=f"transformers is not installed: {len(CLASSES)} cases"
        )
        if not hasattr(transformers, name):
            pytest.skip(f"this transformers has no {name}: 1 case")
        model = CLASSES[name]
        config = getattr(transformers, name)()
        if "quantization_config" in CONFIGS[model]:
            config.quantization_config = CONFIGS[model]["quantization_config"]
        config.save_pretrained(tmp_path)
        assert problems_of(tmp_path) == problems_of(tmp_path / "config.json") == problems_of(model)

    def write(self, folder: Any, **config: Any) -> Any:
        path = folder / "config.json"
        path.write_text(json.dumps({**CONFIGS["llama-3.1-8b"], **config}))
        return path

    def test_integers_of_four_bits_are_read_where_experts_alone_have_them(self, tmp_path):
        facets = needs("kimi-k2-thinking", "fused_moe", tp=8)
        assert {(item["weights"], item["activation_dtype"], item["num_experts"]) for item in facets} == {
            ("mxint4", "bfloat16", 384)
        }
        assert not needs("kimi-k2-thinking", "fp8_gemm")
        assert problems_of("kimi-k2", quantization="mxint4") == problems_of("kimi-k2-thinking")
        thinking = CONFIGS["kimi-k2-thinking"]
        held = thinking["quantization_config"]
        weights = held["config_groups"]["group_0"]["weights"]
        path = tmp_path / "config.json"

        def quantised(**changes: Any) -> dict[str, Any]:
            return held | {"config_groups": {"group_0": {"weights": weights | changes}}}

        others = (
            *(held | {"ignore": held["ignore"][:place] + held["ignore"][place + 1 :]} for place in (1, 2, 3)),
            *(quantised(**change) for change in ({"group_size": 128}, {"num_bits": 8}, {"symmetric": False})),
            quantised(actorder="group"),
            held | {"ignore": None},
        )
        for other in others:
            path.write_text(json.dumps({**thinking, "quantization_config": other}))
            with pytest.raises(ConfigurationError, match="weights quantised by 'compressed-tensors'"):
                describe(path)
        path.write_text(json.dumps({**thinking, "quantization_config": quantised()}))
        assert describe(path).experts.weights == "mxint4"

    @pytest.mark.parametrize(
        ("quantization", "linear"),
        [
            ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
            ({"quant_method": "fp8"}, "fp8_tensor"),
            ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
            ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8_tensor"),
            (
                {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
                },
                "fp8_channel",
            ),
            (
                {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 4, "group_size": 16}}},
                },
                "nvfp4",
            ),
        ],
        ids=str,
    )
    def test_the_format_of_weights_is_read(self, tmp_path, quantization, linear):
        path = self.write(tmp_path, quantization_config=quantization)
        assert describe(path).linear == linear
        assert describe(path, quantization="plain").linear == "plain"

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"model_type": "rwkv"}, "architecture 'rwkv' is not known; known are llama, mistral"),
            ({"model_type": "qwen4"}, r"did you mean qwen\d"),
            (
                {"hidden_size": None, "head_dim": None, "num_attention_heads": None},
                "hidden_size is null, not an integer",
            ),
            ({"quantization_config": {"quant_method": "awq"}}, "weights quantised by 'awq'"),
            ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, r"blocks of \[64, 64\]"),
        ],
    )
    def test_what_is_not_understood_is_reported(self, tmp_path, config, message):
        with pytest.raises(ConfigurationError, match=message):
            problems_of(self.write(tmp_path, **config))

    def test_a_field_that_is_missing_is_named(self, tmp_path):
        config = {name: value for name, value in CONFIGS["deepseek-v3"].items() if name != "kv_lora_rank"}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        with pytest.raises(ConfigurationError, match=r"config\.json of a deepseek_v3 lacks 'kv_lora_rank'"):
            problems_of(path)

    @pytest.mark.parametrize("text", ["", "[]", "{"])
    def test_what_is_no_config_json_is_reported(self, tmp_path, text):
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=r"config\.json"):
            problems_of(path)

    def test_a_folder_without_a_config_json_is_reported(self, tmp_path):
        with pytest.raises(
            ConfigurationError, match=f"model {tmp_path}: the folder has no config.json; name the folder"
        ):
            problems_of(tmp_path)

    def test_the_text_part_of_a_model_of_several_kinds_is_read(self, tmp_path):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": "llava", "text_config": CONFIGS["llama-3.1-8b"]}))
        assert problems_of(path) == problems_of("llama-3.1-8b")
