"""After `seal()` a call runs at once or says what was missing; nothing is launched, and nothing else is chosen."""

from __future__ import annotations

import importlib
import json
import threading
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import ConfigurationError, NotWarmed
from kernelhub.ops import functions
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from tests.dispatch.backends import Ones, qkv, record, register


class TestSealed:
    @pytest.mark.fault("decide_after_seal")
    def test_a_ready_call_runs_and_a_new_one_says_so(self) -> None:
        kernelhub.attention(*qkv())
        with kernelhub.seal():
            assert kernelhub.attention(*qkv()).shape == (1, 4, 4, 16)
            with pytest.raises(NotWarmed, match="decide which kernel runs") as refused:
                kernelhub.attention(*qkv(), softcap=2.0)
        error = refused.value
        assert (error.op, error.kind) == ("attention", "decide")
        assert error.line.startswith("kernelhub.warm('attention', q='float32[1, 4, 4, 16]'")
        assert "softcap=2.0" in error.line
        assert "differs in softcap=True (ready: False)" in str(error)

    def test_nothing_is_launched_and_nothing_is_counted(self) -> None:
        register("ones", record("ones.k", "Ones"))
        kernelhub.attention(*qkv())
        launches, rows = Ones.launches, kernelhub.report().rows
        with kernelhub.seal(), pytest.raises(NotWarmed):
            kernelhub.attention(*qkv(), causal=True)
        assert (Ones.launches, kernelhub.report().rows) == (launches, rows)

    def test_a_plan_is_prepared_only_where_it_is_ready(self) -> None:
        plan = kernelhub.attention.prepare(*qkv())
        with kernelhub.seal():
            assert kernelhub.attention.prepare(*qkv()).kernel == plan.kernel
            plan.run(*qkv())
            with pytest.raises(NotWarmed) as refused:
                kernelhub.attention.prepare(*qkv(), window=3)
        assert "window=3" in refused.value.line

    def test_explain_goes_on(self) -> None:
        with kernelhub.seal():
            assert kernelhub.explain("attention", device="H200", head_dim_qk=96).selected

    def test_keys_that_mean_the_same_are_ready_together(self) -> None:
        """A bound that the caller gives is no new configuration where the bucket is the same."""
        q = torch.zeros(8, 4, 16)
        cache = torch.zeros(4, 16, 2, 16)
        table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.full((2,), 9, dtype=torch.int32)
        offsets = torch.tensor([0, 4, 8], dtype=torch.int32)
        kernelhub.paged_attention(q, cache, cache, table, lengths, offsets, max_seqlen_q=4)
        with kernelhub.seal():
            kernelhub.paged_attention(q, cache, cache, table, lengths, offsets, max_seqlen_q=7)

    def test_a_context_is_part_of_what_is_warmed(self) -> None:
        kernelhub.attention(*qkv())
        said = kernelhub.use(deterministic=True, disable="triton")
        with kernelhub.seal(), said, pytest.raises(NotWarmed) as refused:
            kernelhub.attention(*qkv())
        assert refused.value.line.startswith("with kernelhub.use(disable={'*': ('triton',)}, deterministic=True): ")
        exec(refused.value.line, {"kernelhub": kernelhub})
        with kernelhub.seal(), kernelhub.use(deterministic=True, disable="triton"):
            kernelhub.attention(*qkv())

    def test_no_selection_falls_back_to_another_kernel(self) -> None:
        """A kernel that cannot be loaded gives way before seal, and not after."""
        register("gone", record("gone.k", "no_such_module_anywhere:Kernel"))
        kernelhub.attention(*qkv())
        assert [item.kernel for item in kernelhub.report().fallbacks] == ["gone.k"]
        HUB.forget_selections()
        HUB.machine.load_failures = {}
        with kernelhub.seal(), pytest.raises(NotWarmed):
            kernelhub.attention(*qkv())

    @pytest.mark.parametrize("word", ["configure", "reload", "register_backend", "remove", "verify", "agree"])
    def test_what_would_undo_every_selection_is_refused(self, word: str) -> None:
        handle = register("ones", record("ones.k", "Ones"))
        act = {
            "configure": lambda: kernelhub.configure(prefer="torch"),
            "reload": kernelhub.reload,
            "register_backend": lambda: register("twos", record("twos.k", "Twos")),
            "remove": handle.remove,
            "verify": lambda: kernelhub.verify("concat_mla_k", backend="torch", device="cpu", quick=True),
            "agree": lambda: kernelhub.agree(device="cpu"),
        }[word]
        kernelhub.attention(*qkv())
        with kernelhub.seal():
            with pytest.raises(ConfigurationError, match=f"{word}.*sealed"):
                act()
            assert float(kernelhub.attention(*qkv()).mean()) == 1.0
        act()

    def test_warm_is_for_before(self) -> None:
        with kernelhub.seal(), pytest.raises(ConfigurationError, match="before seal"):
            kernelhub.warm("attention", device="cpu")

    def test_all_threads_are_sealed(self) -> None:
        kernelhub.attention(*qkv())
        answers: list[object] = []

        def call(**more: object) -> None:
            try:
                answers.append(kernelhub.attention(*qkv(), **more).shape)
            except NotWarmed as error:
                answers.append(error.kind)

        with kernelhub.seal():
            threads = [threading.Thread(target=call, kwargs=more) for more in ({}, {"causal": True})]
            for thread in threads:
                thread.start()
                thread.join()
        assert answers == [(1, 4, 4, 16), "decide"]

    def test_unseal_allows_all(self) -> None:
        kernelhub.seal()
        assert kernelhub.report().sealed
        kernelhub.unseal()
        kernelhub.attention(*qkv())
        assert not kernelhub.report().sealed

    def test_under_torch_compile_too(self) -> None:
        q, k, v = qkv()
        compiled = torch.compile(lambda q, k, v: kernelhub.attention(q, k, v) + 1, backend="eager", fullgraph=True)
        compiled(q, k, v)
        with kernelhub.seal():
            compiled(q, k, v)
            with pytest.raises(NotWarmed), kernelhub.use(backend="torch.blocked"):
                compiled(q, k, v)


@pytest.fixture
def packing():
    """A call of `fp4_gemm` without its weight, the weight, and a plan whose kernel packs it."""
    call = fp4_gemm_inputs(tokens=4, n=64, k=128)
    if kernelhub.explain(kernelhub.fp4_gemm, **call, backend="triton").selected is None:
        pytest.skip("Triton's fp4_gemm, which packs its weights, needs Triton 3.6: 2 cases")
    plan = kernelhub.fp4_gemm.prepare(**call, backend="triton")
    weight = {name: call.pop(name) for name in ("b", "b_scale", "b_global_scale")}
    return call, weight, plan


class TestPacking:
    @pytest.mark.fault("pack_after_seal")
    def test_a_weight_is_not_packed_while_serving(self, packing) -> None:
        _, weight, plan = packing
        plan.pack(**weight)
        packed = [item for item in kernelhub.report().work if item.kind == "pack"]
        assert [(item.op, item.kernel) for item in packed] == [("fp4_gemm", plan.kernel)]
        with kernelhub.seal(), pytest.raises(NotWarmed, match="while the model is loaded"):
            plan.pack(**weight)


class TestSyncs:
    """Lengths on a device: reading them on the host would wait."""

    @pytest.mark.fault("sync_after_seal")
    @pytest.mark.gpu
    def test_lengths_that_are_on_the_device_are_not_read(self) -> None:
        register("reads", record("reads.k", "tests.runtime.test_seal:ReadsLengths", op="paged_attention"))
        cache = torch.zeros(4, 16, 2, 16, device="cuda")
        there = (torch.zeros(2, 4, dtype=torch.int32).cuda(), torch.full((2,), 9, dtype=torch.int32).cuda())
        plan = kernelhub.paged_attention.prepare(torch.zeros(2, 4, 16, device="cuda"), cache, cache, *there)
        with kernelhub.seal():
            with pytest.raises(NotWarmed, match="wait for the device to read seq_lens") as refused:
                plan.begin(*there)
            plan.begin(*there, seq_lens_cpu=[9, 9])
        assert (refused.value.op, refused.value.kind) == ("paged_attention", "sync")
        assert "seq_lens_cpu=" in str(refused.value)


class ReadsLengths(Ones):
    """Plans with the lengths."""

    def begin(self, step: PagedStep | DenseStep) -> None:
        assert isinstance(step, PagedStep)
        step.state = step.lengths()


SMALL: dict[str, dict[str, Any]] = {
    "attention": {"q_tokens": 5},
    "paged_attention": {"seq_lens": (5, 1)},
    "merge_attention_states": {"tokens": 3, "num_heads": 4},
    "mla_attention": {"seq_lens": (5, 1), "num_heads": 2},
    "write_kv_cache": {"tokens": 5, "num_kv_heads": 2},
    "write_mla_cache": {"tokens": 5},
    "concat_mla_k": {"tokens": 3, "num_heads": 2},
    "mqa_logits": {"tokens": 3, "keys": 9},
    "paged_mqa_logits": {"seq_lens": (70, 3)},
    "topk_indices": {"tokens": 2, "keys": 40, "k": 8},
    "linear_attention": {"tokens": 5},
    "all_reduce": {"tokens": 3},
    "all_reduce_rms_norm": {"tokens": 3, "hidden_size": 64},
    "moe_dispatch": {"tokens": 3, "hidden_size": 64, "num_experts": 8, "top_k": 2},
    "moe_combine": {"tokens": 3, "hidden_size": 64, "num_experts": 8, "top_k": 2},
    "reduce_scatter": {"tokens": 3},
    "all_gather": {"tokens": 3},
    **{
        f"{way}quantize_{form}": {"tokens": 3, "width": 256} for way in ("", "de") for form in ("fp8", "mxfp4", "mxfp8")
    },
    **{f"{way}quantize_nvfp4": {"tokens": 3, "width": 256} for way in ("", "de")},
    "rms_norm_quant": {"tokens": 3, "width": 256},
    "silu_and_mul_quant": {"tokens": 3, "width": 256},
    "fp4_gemm": {"tokens": 3, "n": 64, "k": 128},
    "bmm_fp8": {"batch": 2, "tokens": 3, "n": 32, "k": 32},
    "fp8_gemm": {"tokens": 3, "n": 64, "k": 128},
    "grouped_gemm": {"sizes": (3, 0, 2), "n": 32, "k": 64},
    "fused_moe": {"tokens": 3, "num_experts": 4, "hidden_size": 64, "intermediate_size": 32, "top_k": 2},
    "expert_parallel_moe": {
        "tokens": 3,
        "num_experts": 4,
        "hidden_size": 64,
        "intermediate_size": 32,
        "top_k": 2,
    },
    "route_experts": {"tokens": 3},
}


def small_call(function: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an op: its example's, or for what quantises back, what quantising them gave."""
    name = str(function.__name__)
    module, _, example = function.op.contract.example.partition(":")
    made = getattr(importlib.import_module(module), example)(**SMALL[name])
    return (getattr(kernelhub, name[2:])(**made), {}) if name.startswith("dequantize") else ((), made)


class TestLines:
    @pytest.mark.parametrize("function", functions(), ids=lambda function: str(function.__name__))
    def test_of_every_op_makes_it_ready(self, function: Any) -> None:
        args, kwargs = small_call(function)
        with kernelhub.seal(), pytest.raises(NotWarmed) as refused:
            function(*args, **kwargs)
        assert refused.value.op == function.__name__
        exec(refused.value.line, {"kernelhub": kernelhub, "torch": torch})
        with kernelhub.seal():
            function(*args, **kwargs)

    def test_of_a_packed_weight_too(self, packing) -> None:
        call, weight, plan = packing
        packed = plan.pack(**weight)
        HUB.forget_selections()
        with kernelhub.seal(), pytest.raises(NotWarmed) as refused:
            kernelhub.fp4_gemm(call["a"], packed)
        assert f"'layout': '{packed.layout}'" in refused.value.line
        exec(refused.value.line, {"kernelhub": kernelhub, "torch": torch})
        with kernelhub.seal():
            kernelhub.fp4_gemm(call["a"], packed)

    def test_a_warmed_call_gives_its_selection(self) -> None:
        shape = "float32[1, 4, 4, 16]"
        selection = kernelhub.warm("attention", q=shape, k=shape, v=shape, device="cpu", backend="torch.blocked")
        assert selection.selected == "torch.blocked"


class TestReport:
    def test_reports_of_work_as_text_and_json(self) -> None:
        compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
        kernelhub.attention(*qkv())  # what tells of torch.compile hooks it at a decision, once it was imported
        torch._dynamo.reset()
        compiled(torch.ones(3))
        report = kernelhub.report()
        graphs = [item for item in report.work if item.by == "torch.compile"]
        assert len(graphs) == 1
        assert graphs[0].op is None
        assert "compile by torch.compile for others: 1" in str(report)
        assert json.loads(json.dumps(report.to_dict()["work"]))[0]["by"] == "torch.compile"

    def test_foreign_work_after_seal_is_allowed_and_reported(self) -> None:
        torch.compile(lambda x: x + 1, backend="eager")
        kernelhub.attention(*qkv())
        with kernelhub.seal():
            torch.compile(lambda x: x.cos() + 2, backend="eager")(torch.ones(4))
            assert [item.by for item in kernelhub.report().after_seal] == ["torch.compile"]
