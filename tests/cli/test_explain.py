"""``kernelhub explain``: the same selection as `kernelhub.explain`, on a problem written as flags."""

from __future__ import annotations

import json

import pytest

import kernelhub
from kernelhub.ops import functions
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.models.published import CONFIGS
from kernelhub.ops.models.shapes import ATTENTION
from tests.conftest import DEVICE

OPS = {function.op.contract.name: function for function in functions()}
TRITON = ("--with", "triton=3.7.1")


class TestJson:
    @pytest.mark.parametrize("op", OPS)
    @pytest.mark.parametrize("device", ["H200", "MI300X", "CPU", "sm_137"])
    def test_there_is_one_decision_for_every_registered_kernel(self, ask, op, device):
        selection = ask("explain", op, "--device", device, "--json").json
        assert sorted(decision["kernel"] for decision in selection["decisions"]) == list(OPS[op].kernels())
        for decision in selection["decisions"]:
            assert {"kernel", "accepted", "code", "reason", "remedy"} <= decision.keys()
            assert isinstance(decision["accepted"], bool)
            assert decision["code"]
            assert decision["reason"]
        selected = [item["kernel"] for item in selection["decisions"] if item["code"] == "selected"]
        assert selected == [selection["selected"]]
        assert selection["source"] in ("order", "band")

    def test_it_is_what_the_library_says_of_another_family(self, ask):
        flags = ("--dtype", "fp16", "--parts", "many", "--num-heads", "7", "--lse")
        facets = {"dtype": "fp16", "parts": "many", "num_heads": 7, "lse": True}
        answer = ask("explain", "merge_attention_states", "--device", "B200", "--json", *flags)
        assert answer.json == kernelhub.explain("merge_attention_states", device="B200", **facets).to_dict()

    def test_a_model_gives_the_facets_of_every_family(self, ask):
        problem = ask("explain", "merge_attention_states", "--model", "gpt-oss-120b", "--json").json["problem"]
        assert (problem["num_heads"], problem["head_dim"]) == (64, 64)

    @pytest.mark.parametrize("op", ["attention", "paged_attention"])
    def test_it_is_what_the_library_says(self, ask, op):
        flags = ("--q-dtype", "fp16", "--kv-dtype", "fp8", "--kv-scale", "head", "--softcap", "--q-len", "few")
        facets = {"q_dtype": "fp16", "kv_dtype": "fp8", "kv_scale": "head", "softcap": True, "q_len": "few"}
        answer = ask("explain", op, "--device", "B200", "--json", *flags)
        assert answer.json == kernelhub.explain(op, device="B200", **facets).to_dict()

    def test_a_facet_may_be_written_before_the_op(self, ask):
        before = ask("explain", "--head-dim-qk", "64", "--json", "attention", "--device", "H200").json
        after = ask("explain", "attention", "--device", "H200", "--head-dim-qk", "64", "--json").json
        assert before == after
        assert before["problem"]["head_dim_qk"] == 64

    def test_backend_is_that_of_the_call(self, ask):
        answer = ask("explain", "attention", "--backend", "torch.blocked,torch.sdpa", "--device", "CPU", "--json")
        assert answer.json["selected"] == "torch.blocked"
        assert answer.json["source"] == "kwarg"

    def test_a_bit_can_be_turned_off_again(self, ask):
        selection = ask(
            "explain", "attention", "--model", "gpt-oss-120b", "--no-sinks", "--device", "H200", "--json"
        ).json
        assert selection["problem"]["sinks"] is False
        assert selection["problem"]["window_left"] is True


class TestNoKernel:
    def test_it_is_exit_1_and_every_reason(self, ask):
        words = ("explain", "attention", "--backend", "torch.sdpa", "--softcap", "--sinks", "--device", "H200")
        answer = ask(*words)
        assert answer.code == 1
        assert answer.out.startswith("attention on NVIDIA H200, sm_90 (simulated): no kernel can run this")
        assert answer.row("torch.sdpa").endswith("does not support softcap; does not support sinks")
        assert answer.out.index("torch.sdpa") < answer.out.index("triton"), "what was asked for comes first"
        told = ask(*words, "--all")
        assert told.code == 1
        assert "does not support softcap" in told.out
        assert "does not support sinks" in told.out

    def test_as_json_it_is_exit_1_too(self, ask):
        answer = ask("explain", "attention", "--backend", "torch.sdpa", "--softcap", "--device", "H200", "--json")
        assert (answer.code, answer.json["selected"]) == (1, None)


class TestOtherMachines:
    def test_a_package_that_is_named_is_there(self, ask):
        answer = ask("explain", "paged_attention", "--device", "H200", *TRITON, "--json")
        assert answer.json["selected"].startswith("triton.")

    def test_a_package_that_is_not_named_is_not_there(self, ask):
        selection = ask("explain", "paged_attention", "--device", "H200", "--with", "torch=2.9.0", "--json").json
        triton = [item for item in selection["decisions"] if item["kernel"].startswith("triton.")]
        assert triton
        assert {item["code"] for item in triton} == {"package_missing"}
        assert all("pip install" in item["remedy"] for item in triton)

    @pytest.mark.parametrize("text", ["triton", "triton=", "=3.7", "triton=new"])
    def test_a_package_needs_a_name_and_a_version(self, ask, text):
        answer = ask("explain", "attention", "--with", text)
        assert answer.code == 2
        assert "is not PACKAGE=VERSION" in answer.err


class TestModels:
    @pytest.mark.parametrize("model", ATTENTION)
    def test_a_prefill_has_the_facets_of_the_models_call(self, ask, model):
        inputs = attention_inputs(model, q_tokens=17, device=DEVICE)
        selection = kernelhub.explain("attention", inputs.pop("q"), **inputs)
        words = ("--model", model, "--no-ragged", "--json")
        assert ask("explain", "attention", *words).json["problem"] == selection.to_dict()["problem"]

    @pytest.mark.parametrize("model", ATTENTION)
    def test_a_decode_has_the_facets_of_the_models_call(self, ask, model):
        inputs = paged_attention_inputs(model, seq_lens=(5, 17), device=DEVICE)
        selection = kernelhub.explain("paged_attention", inputs.pop("q"), **inputs)
        answer = ask("explain", "paged_attention", "--model", model, "--json")
        assert answer.json["problem"] == selection.to_dict()["problem"]

    def test_a_mixed_batch_has_the_facets_of_the_models_call(self, ask):
        inputs = paged_attention_inputs("gpt-oss-120b", seq_lens=(5, 17), q_lens=(1, 3), device=DEVICE)
        selection = kernelhub.explain("paged_attention", inputs.pop("q"), **inputs)
        words = ("--model", "gpt-oss-120b", "--ragged", "--q-len", "any", "--json")
        assert ask("explain", "paged_attention", *words).json["problem"] == selection.to_dict()["problem"]

    def test_what_is_written_wins_over_the_model(self, ask):
        words = ("--model", "llama-3.1-8b", "--num-q-heads", "8", "--json")
        problem = ask("explain", "attention", *words).json["problem"]
        assert (problem["num_q_heads"], problem["head_dim_qk"]) == (8, 128)

    def test_an_unknown_model_is_answered_with_the_nearest(self, ask):
        answer = ask("explain", "attention", "--model", "lama-3.1-8b")
        assert answer.code == 2
        assert "'lama-3.1-8b' is neither known (did you mean llama-3.1-8b?) nor a file" in answer.err

    def test_a_layer_of_an_op_is_suggested_too(self, ask):
        answer = ask("explain", "linear_attention", "--model", "minimax-text-1")
        assert answer.code == 2
        assert "(did you mean minimax-text-01?)" in answer.err

    def test_a_name_that_other_commands_take_is_taken(self, ask):
        answer = ask("explain", "paged_attention", "--model", "mixtral-8x7b", "--device", "H200")
        assert answer.code == 0
        assert answer.row("model").endswith("problems of this op, the others by --phase and facets")

    @pytest.mark.parametrize("whole", [False, True], ids=["config.json", "folder"])
    def test_a_checkpoint_is_taken_as_other_commands_take_it(self, ask, tmp_path, whole):
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gemma-2-9b"]))
        path = tmp_path if whole else tmp_path / "config.json"
        problem = ask("explain", "paged_attention", "--model", str(path), "--json").json["problem"]
        assert problem == ask("explain", "paged_attention", "--model", "gemma-2-9b", "--json").json["problem"]

    def test_a_phase_is_one_of_the_models_problems(self, ask):
        words = ("explain", "paged_attention", "--model", "llama-3.1-8b", "--json")
        lengths = [ask(*words, "--phase", phase).json["problem"]["q_len"] for phase in ("decode", "prefill")]
        assert lengths == ["one", "many"]
        assert ask("explain", "paged_attention", "--phase", "decode").code == 2

    def test_an_op_that_the_model_does_not_ask_is_refused_with_those_that_it_asks(self, ask):
        answer = ask("explain", "fused_moe", "--model", "llama-3.1-8b")
        assert answer.code == 2
        assert "llama-3.1-8b does not use fused_moe; it uses attention, paged_attention" in answer.err


class TestErrors:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("atention",), "'atention' is not an op (did you mean attention?)"),
            (("atention", "--head-dim-qk", "64"), "'atention' is not an op (did you mean attention?)"),
            (("attention", "--device", "H2OO"), "unknown device 'H2OO' (did you mean H200?); known: A100"),
            (("attention", "--backend", "tritn"), "'tritn' is not a backend or kernel (did you mean triton?)"),
            (("attention", "--backend", ","), "',' is empty"),
            (("paged_attention", "--kv-layout", "NDH"), "kv_layout is 'NDH' (did you mean NHD?); it takes NHD, HND"),
            (("attention", "--page-size", "16"), "--page-size"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
    )
    def test_it_says_what_is_wrong_and_what_would_be_right(self, ask, words, message):
        answer = ask("explain", *words, "--json")
        assert (answer.code, answer.out) == (2, "")
        assert message in answer.err

    @pytest.mark.parametrize(
        ("device", "named"),
        [("sm_95", "sm_90"), ("gfx940", "gfx950"), ("H2OO", "H200"), ("RTX 5900", "RTX5090")],
    )
    def test_a_device_that_does_not_exist_is_answered_with_the_nearest(self, ask, device, named):
        answer = ask("explain", "attention", "--device", device)
        assert (answer.code, answer.out) == (2, "")
        assert f"unknown device {device!r} (did you mean {named}?)" in answer.err

    @pytest.mark.parametrize(
        ("device", "meant"),
        [
            ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3, sm_90"),
            ("NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 5090, sm_120"),
            ("gfx942", "AMD Instinct MI300X, gfx942"),
            ("sm_137", "an sm_137 GPU, sm_137"),
        ],
    )
    def test_full_names_and_architectures_are_devices(self, ask, device, meant):
        assert ask("explain", "attention", "--device", device).out.startswith(f"attention on {meant} (simulated): ")

    @pytest.mark.parametrize(("package", "named"), [("flashinfre", "flashinfer"), ("flash_attn_3", "flash_attn")])
    def test_a_package_that_no_kernel_requires_is_answered_with_the_nearest(self, ask, package, named):
        answer = ask("explain", "attention", "--device", "H200", "--with", f"{package}=0.6")
        assert (answer.code, answer.out) == (2, "")
        assert f"no kernel requires a package {package!r} (did you mean {named}?)" in answer.err

    @pytest.mark.parametrize(
        ("variable", "text", "remedy"),
        [
            ("KERNELHUB_FORCE", "attention:torch", "did you mean attention=torch?"),
            ("KERNELHUB_CONFIG", "/nowhere/kernelhub.toml", "name a TOML file that can be read, or unset it"),
        ],
    )
    def test_a_wrong_variable_is_reported_with_what_to_write(self, ask, monkeypatch, variable, text, remedy):
        monkeypatch.setenv(variable, text)
        answer = ask("explain", "attention", "--device", "H200")
        assert answer.code == 2
        assert remedy in answer.err


class TestForPeople:
    def test_the_first_lines_are_the_answer_who_decided_and_the_question(self, ask):
        words = ("--device", "B200", "--model", "gpt-oss-120b", *TRITON)
        first, second, third, *_ = ask("explain", "paged_attention", *words).out.splitlines()
        assert first == "paged_attention on NVIDIA B200, sm_100 (simulated): triton.split_kv"
        assert second.startswith("decided by  order, fastest supported kernel in the order for")
        assert "head_dim_qk=64" in third
        assert third.endswith("window_left, sinks, page_size=16")

    def test_each_kernel_has_a_row_with_its_first_reason(self, ask):
        answer = ask("explain", "attention", "--device", "H200", "--softcap", *TRITON)
        assert answer.row("gluon.prefill_pipelined").split()[1] == "selected"
        assert answer.row("gluon.prefill_pipelined_any").split()[1] == "supported"
        assert answer.row("triton.prefill").split()[1] == "supported"
        assert answer.row("torch:").endswith("rejected   does not support softcap")

    def test_help_on_an_op_lists_every_facet_in_the_ops_words(self, ask):
        text = " ".join(ask("explain", "paged_attention", "--help").out.split())
        for facet in kernelhub.paged_attention.op.contract.schema.facets.values():
            if facet.name != "device":
                assert f"--{facet.name.replace('_', '-')}" in text
                assert facet.doc in text


def test_in_a_pipe_it_is_plain_and_complete(ask_shell):
    answer = ask_shell("explain", "attention", "--device", "H200", "--with", "torch=2.9.0", env={"COLUMNS": "40"})
    assert answer.code == 0
    assert "\x1b" not in answer.out
    assert "│" not in answer.out
    assert answer.row("triton:").endswith("rejected   triton is not installed")
    assert "--all lists every kernel" in answer.out


class TestKernelsOfOtherOps:
    def test_the_parts_of_a_sum_with_a_quantised_norm_are_shown(self, ask):
        facets = ("--world-size", "2", "--link", "nvlink", "--message", "256KB", "--hidden-size", "8320")
        words = ("explain", "all_reduce_rms_norm", "--device", "H200", *TRITON, *facets, "--format", "fp8_group")
        answer = ask(*words)
        assert answer.row("all_reduce").split(maxsplit=1)[1].startswith("triton.one_shot: fastest supported kernel")
        assert answer.row("rms_norm_quant").split(maxsplit=1)[1].startswith("triton.rows: fastest supported kernel")
        parts = ask(*words, "--json").json["parts"]
        assert [(part["op"], part["selected"]) for part in parts] == [
            ("all_reduce", "triton.one_shot"),
            ("rms_norm_quant", "triton.rows"),
        ]

    def test_the_steps_of_a_pair_are_shown_with_the_converters_between_them(self, ask):
        words = ("explain", "expert_parallel_moe", "--device", "H200", "--world-size", "4", "--weights", "fp8_block")
        answer = ask(*words, "--activation-dtype", "fp8_block", "--backend", "moe_pairs.masked_fp8")
        steps = answer.row("steps").split(maxsplit=1)[1]
        assert "moe_dispatch in format masked; grouped_gemm by w13; silu_and_mul of gate and up, in torch" in steps
        assert steps.endswith("moe_combine, which applies the weights of the router and sums")
        assert "\nsteps " not in ask("explain", "moe_dispatch", "--device", "H200", *TRITON).out

    def test_the_kernel_of_each_step_of_a_pair_is_named(self, ask):
        words = ("explain", "expert_parallel_moe", "--device", "H200", "--world-size", "4", "--link", "nvlink", *TRITON)
        answer = ask(*words)
        assert answer.row("moe_dispatch").split() == ["moe_dispatch", "triton.push"]
        assert answer.row("moe_combine").split() == ["moe_combine", "triton.push"]
        found = ask(*words, "--json").json["parts"]
        assert [part["op"] for part in found] == ["moe_dispatch", "fused_moe", "fused_moe", "moe_combine"]
        assert found[0]["problem"]["peers"] == "atomics"
        every = ask(*words, "--all").out
        assert "moe_dispatch: triton.push" in every
        assert "kernelhub does not call DeepEP 2 (ElasticBuffer)" in every


class TestWeights:
    def test_the_selection_says_how_weights_are_taken(self, ask):
        answer = ask("explain", "fp4_gemm", "--device", "H200", *TRITON)
        assert (
            answer.row("weights")
            .split(maxsplit=1)[1]
            .startswith("given as checkpoint; triton.fp4_gemm reads checkpoint or fp4.tiles64x128.v1")
        )
        assert "\nweights " not in ask("explain", "attention", "--device", "H200", *TRITON).out

    def test_a_layout_that_nobody_reads_is_exit_1_with_the_code(self, ask):
        answer = ask("explain", "fp4_gemm", "--weight-layout", "other.v1", "--device", "H200", *TRITON, "--json")
        assert (answer.code, answer.json["selected"]) == (1, None)
        for decision in answer.json["decisions"]:
            assert "layout" in {reason["code"] for reason in (decision, *decision.get("also", ()))}


def test_a_known_defect_is_reported_with_its_report_and_its_fix(ask):
    answer = ask("explain", "paged_attention", "--device", "H200", "--with", "flashinfer=0.6.16.post4", "--json")
    decision = next(item for item in answer.json["decisions"] if item["kernel"] == "flashinfer.xqa")
    assert decision["code"] == "known_bad"
    assert "https://github.com/flashinfer-ai/flashinfer/pull/4161" in decision["reason"]
    assert "flashinfer-python>=0.6.17" in decision["remedy"]
    people = ask("explain", "paged_attention", "--device", "H200", "--with", "flashinfer=0.6.16.post4", "--all").out
    assert "known_bad" in people


def test_a_machine_may_lack_a_toolkit_or_binaries(ask):
    words = ("explain", "paged_attention", "--device", "B200", "--with", "flashinfer=0.6.18", "--backend")
    kernel = "flashinfer.trtllm_gen"
    assert ask(*words, kernel, "--json").json["selected"] == kernel
    assert ask(*words, kernel, "--without", "cubins", "--json").json["selected"] is None
    words = (*words, "flashinfer")
    assert ask(*words, "--without", "cubins", "--json").json["selected"] == "flashinfer.xqa"
    bare = ask(*words, "--without", "cubins", "--without", "nvcc", "--without", "modules", "--json")
    assert (bare.code, bare.json["selected"]) == (1, None)
    codes = {item["kernel"]: item["code"] for item in bare.json["decisions"]}
    assert codes["flashinfer.trtllm_gen"] == "cubins_missing"
    assert codes["flashinfer.fa2_prefill"] == "toolkit_missing"
    alone = ask("explain", "paged_attention", "--without", "nvcc")
    assert alone.code != 0
    assert "--with" in alone.err


def test_what_would_be_faster_is_said_in_one_line_with_the_command(ask) -> None:
    flags = (*TRITON, "--with", "flashinfer=0.6.18.post1", "--num-q-heads", "64", "--q-len", "one")
    answer = ask("explain", "paged_attention", "--device", "B200", *flags)
    line = answer.row("faster")
    assert "flashinfer.trtllm_gen would be first; untested on sm_100 (published:" in line
    assert "kernelhub verify paged_attention --backend flashinfer.trtllm_gen --num-q-heads 64" in line
