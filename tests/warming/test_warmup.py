"""`kernelhub.warmup`: what is asked for is ready afterwards, in every form; what that took is told, and done once."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.cpp import build
from kernelhub.dispatch.constraint import NOT_BUILT, Rule, anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.errors import ConfigurationError, NotWarmed
from kernelhub.evidence import apart, quarantine
from kernelhub.evidence.results import Check
from kernelhub.ops.models.description import FORMATS
from kernelhub.ops.models.features import FEATURES
from kernelhub.ops.models.problems import Need, problems_of
from kernelhub.ops.models.published import CONFIGS
from kernelhub.probes.device import facts
from kernelhub.runtime.caches.lock import myself
from kernelhub.runtime.progress import Beat, Heart
from kernelhub.warming.forms import forms_of
from kernelhub.warming.outcome import BEFORE, COMPILED, DECIDED, FAILED, LOADED
from kernelhub.warming.proof import Proof, chosen, interrupted
from kernelhub.warming.wanted import items_of
from tests.dispatch.backends import EVERYWHERE
from tests.evidence import liars

SMALL: dict[str, Any] = {"token_counts": (1, 8), "device": "cpu", "verify": False}
FP8 = Need("fp8_gemm", (("k", 128), ("n", 64)), ("decode",), ("o",))
QUANTIZE = Need("quantize_fp8", (("granularity", "group"),), ("decode",), ("o",), ((("width", 256),),))


def attention(tokens: int = 8, **more: Any) -> Any:
    q, kv = torch.zeros(1, tokens, 4, 16), torch.zeros(1, 32, 2, 16)
    return kernelhub.attention(q, kv, kv, **more)


class TestWhatIsAsked:
    def test_a_model_by_name_is_ready_in_every_form(self):
        done = kernelhub.warmup("llama-3.1-8b", tp=8, **SMALL)
        assert done.ok
        assert {item.op for item in done.items} == {"attention", "paged_attention"}
        cache = torch.zeros(4, 16, 1, 128, dtype=torch.bfloat16)
        table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([3, 16], dtype=torch.int32)
        offsets = torch.tensor([0, 1, 5], dtype=torch.int32)
        with kernelhub.seal():
            kernelhub.paged_attention(torch.zeros(2, 4, 128, dtype=torch.bfloat16), cache, cache, table, lengths)
            q = torch.zeros(5, 4, 128, dtype=torch.bfloat16)
            for longest in (None, 4, 16, 17):
                kernelhub.paged_attention(q, cache, cache, table, lengths, offsets, max_seqlen_q=longest)
            plan = kernelhub.paged_attention.prepare(q, cache, cache, table, lengths, offsets)
            plan.begin(table, lengths, offsets).run(q, cache, cache)
            with pytest.raises(NotWarmed):
                kernelhub.paged_attention(q, cache, cache, table, lengths, offsets, softcap=3.0)

    def test_a_config_json_is_too(self, tmp_path):
        config = {
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32,
        }  # fmt: skip
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        assert {item.op for item in kernelhub.warmup(path, **SMALL).items} == {"attention", "paged_attention"}

    def test_plans_selections_needs_lines_and_functions_are(self):
        x = torch.zeros(4, 192, dtype=torch.bfloat16)
        plan = kernelhub.quantize_fp8.prepare(x, "token")
        selection = kernelhub.explain("topk_indices", device="cpu", k=8, row_ends=True)
        with kernelhub.seal(), pytest.raises(NotWarmed) as refused:
            attention()
        ran = []
        done = kernelhub.warmup([plan, selection, FP8, refused.value.line, lambda: ran.append(1)], **SMALL)
        assert done.ok
        assert ran == [1]
        assert [*dict.fromkeys(item.op for item in done.items)][:3] == ["quantize_fp8", "topk_indices", "fp8_gemm"]
        assert "width 192" in done.items[0].label, "the width that the plan was prepared with"
        with kernelhub.seal():
            attention()

    def test_a_kernel_requested_by_name_is_made_ready_under_that_name(self):
        selection = kernelhub.attention.explain(*torch.zeros(3, 1, 8, 4, 16), backend="torch.blocked")
        done = kernelhub.warmup(selection, **SMALL)
        assert {item.kernel for item in done.items} == {"torch.blocked"}
        with kernelhub.seal():
            kernelhub.attention(*torch.zeros(3, 1, 16, 4, 16), backend="torch.blocked")

    def test_what_is_requested_twice_is_made_ready_once(self):
        once, twice = (kernelhub.warmup(what, **SMALL) for what in (FP8, [FP8, FP8]))
        assert len(once.items) == len(twice.items)

    @pytest.mark.parametrize(
        ("what", "more", "message"),
        [
            ("lama-3.1-8b", {}, "is neither known .did you mean llama-3.1-8b.. nor a file"),
            (3, {}, "'int' object is not iterable|3 cannot be prepared"),
            ([3], {}, "3 cannot be prepared; give a model's name"),
            ("import os; kernelhub.warm('x')", {}, "is not a line of NotWarmed"),
            ("kernelhub.warm(__import__('os').getcwd())", {}, "is not a line of NotWarmed"),
            (FP8, {"token_counts": ()}, "token_counts is empty"),
            (FP8, {"token_counts": (0,)}, "token_counts: 0 is not a number of tokens"),
            (FP8, {"jobs": 0}, "jobs is 0; give a number of processes"),
            (FP8, {"device": "H200"}, "this machine has no GPU, not H200.*--list"),
            ("llama-3.1-8b", {"tp": 3}, "which 3 ranks cannot share evenly"),
        ],
    )
    def test_what_cannot_be_is_reported(self, what, more, message):
        if torch.cuda.is_available() and more.get("device") == "H200":
            pytest.skip("there is a GPU here: 1 case")
        with pytest.raises((ConfigurationError, TypeError), match=message):
            kernelhub.warmup(what, **(SMALL | more))

    def test_a_sealed_process_is_not_warmed_up(self):
        with kernelhub.seal(), pytest.raises(ConfigurationError, match="warm up before seal"):
            kernelhub.warmup(FP8, **SMALL)


class TestHow:
    def test_compiled_then_ready_then_from_the_cache(self):
        first = kernelhub.warmup(FP8, **SMALL)
        assert [item.how for item in first.items] == [COMPILED, DECIDED]
        assert first.items[0].kernel == "cpp.fp8_gemm"
        assert first.items[0].seconds > 0
        again = kernelhub.warmup(FP8, **SMALL)
        assert [item.how for item in again.items] == [BEFORE, BEFORE]
        assert again.taken_over == 2
        build.library.cache_clear()
        HUB.restore()
        other = kernelhub.warmup(FP8, **SMALL)
        assert other.items[0].how == LOADED
        assert (other.taken_over, other.ok) == (2, True)

    def test_the_summary_has_all_of_it(self):
        done = kernelhub.warmup(FP8, **SMALL)
        told = json.loads(json.dumps(done.to_dict()))
        assert told["counts"] == {COMPILED: 1, LOADED: 0, DECIDED: 1, BEFORE: 0, FAILED: 0}
        assert told["peak"]["host_bytes"] > 1 << 20
        assert told["items"][0]["tokens"] == [1, 8]
        assert "1 compiled" in str(done)
        assert "cpp.fp8_gemm" in str(done)

    def test_what_fails_is_reported_and_the_rest_goes_on(self):
        def broken() -> None:
            raise RuntimeError("no such luck")

        done = kernelhub.warmup([broken, QUANTIZE], **SMALL)
        assert not done.ok
        (failure,) = done.failures
        assert (failure.op, failure.reason) == ("broken", "RuntimeError: no such luck")
        assert [item.how for item in done.items[:-1]] == [DECIDED, DECIDED]

    def test_what_no_kernel_can_run_says_so(self):
        with kernelhub.use(disable={"quantize_fp8": ["torch", "cpp", "triton"]}):
            done = kernelhub.warmup(QUANTIZE, **SMALL)
        assert {item.how for item in done.items} == {FAILED}
        assert "no registered kernel can run this" in done.items[0].reason

    def test_a_compiler_that_is_missing_gives_way_to_the_next_kernel_and_is_named(self, monkeypatch):
        monkeypatch.setenv("CXX", "/bin/false")
        done = kernelhub.warmup(FP8, **SMALL)
        assert done.ok
        assert done.items[0].kernel.startswith("torch.")
        assert "in place of cpp.fp8_gemm" in done.items[0].reason
        assert "/bin/false cannot compile" in done.items[0].reason

    def test_caches_that_cannot_be_written_are_no_obstacle(self, monkeypatch, tmp_path):
        file = tmp_path / "file"
        file.write_text("")
        for name in ("KERNELHUB_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "TMPDIR"):
            monkeypatch.setenv(name, str(file))
        done = kernelhub.warmup(QUANTIZE, **SMALL)
        assert done.ok
        assert any("no cache folder is writable" in note for note in done.notes)


def test_kernels_are_verified_several_at_a_time_in_children() -> None:
    needs = [
        Need("concat_mla_k", (), ("prefill",), ()),
        Need("route_experts", (("num_experts", 16), ("top_k", 2)), ("decode",), ("router",), ()),
    ]
    items, proof = items_of(needs, [1], {}, on_gpu=False), Proof()
    kernels = {kernel.name for kernel, _ in chosen(items, torch.device("cpu"))}
    assert proof.settle(items, torch.device("cpu"), Heart(None, None), jobs=2)
    assert {name for _, name in proof.verified} == kernels
    assert proof.quarantined == proof.unverified == []
    assert not Proof().settle(items, torch.device("cpu"), Heart(None, None), jobs=2), "the evidence is kept"


class TestInterruptedVerification:
    """A process ended while it verified the selected kernel: by itself, or by a scheduler or a user."""

    # The next kernels on a CPU are none that Triton interprets, which would be verified too.
    NEED = Need("route_experts", (("num_experts", 16), ("top_k", 2)), ("decode",), ("router",), ())

    def selected(self) -> str | None:
        return items_of([self.NEED], [1], {}, on_gpu=False)[0].selection(torch.device("cpu")).selected

    @pytest.fixture
    def kernel(self, monkeypatch) -> Iterator[Kernel]:
        """The kernel that would be selected, with the note of such a process."""
        items, cpu = items_of([self.NEED], [1], {}, on_gpu=False), torch.device("cpu")
        kernel, _ = chosen(items, cpu)[0]
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        with monkeypatch.context() as changed:
            changed.setattr(quarantine, "myself", lambda token: replace(myself(token), pid=process.pid))
            block = quarantine.begun(kernel, facts(cpu))
            block.__enter__()
        HUB.forget_evidence()
        decision = next(each for each in items[0].selection(cpu).decisions if each.kernel == kernel.name)
        assert decision.code == "quarantined"
        assert "ended while it verified the kernel" in decision.reason
        yield kernel
        del block  # until now: its end would replace the note

    def test_it_is_verified_again_in_a_child(self, kernel) -> None:
        done = kernelhub.warmup([self.NEED], **SMALL | {"verify": True})
        assert done.ok
        assert (kernel.op, kernel.name) in done.verified
        assert self.selected() == kernel.name

    def test_a_kernel_that_ends_the_child_too_stays_quarantined(self, kernel, monkeypatch) -> None:
        def ended(self: apart.Child, subject: Any, case: Any, ahead: Any) -> None:
            raise apart.Ended(Check(case.label, "crashed", "", math.inf, "its process ended", case.tokens))

        monkeypatch.setattr(apart.Child, "check", ended)
        items = items_of([self.NEED], [1], {}, on_gpu=False)
        assert interrupted(items, torch.device("cpu")) == [kernel]
        kernelhub.warmup([self.NEED], **SMALL | {"verify": True})
        assert self.selected() not in (None, kernel.name)

    def test_without_a_child_the_next_kernel_serves(self, kernel, monkeypatch) -> None:
        """And the warm-up ends: a child that does not start is tried once."""
        monkeypatch.setattr(apart, "_CODE", "import os; os._exit(9)")
        done = kernelhub.warmup([self.NEED], **SMALL | {"verify": True})
        assert [(op, name) for op, name, _ in done.unverified if name == kernel.name] == [(kernel.op, kernel.name)]
        assert "the child process does not start" in str(done.unverified)
        assert self.selected() not in (None, kernel.name)


class TestWaysToTell:
    def test_progress_has_every_item_and_heartbeats_come_while_something_runs(self):
        steps: list[Beat] = []
        beats: list[Beat] = []

        def slow() -> None:
            time.sleep(2.5)

        kernelhub.warmup([QUANTIZE, slow], **SMALL, progress=steps.append, heartbeat=beats.append)
        made = [beat for beat in steps if beat.stage == "making ready"]
        assert {beat.done for beat in made} == {0, 1, 2}
        assert {beat.total for beat in made} == {3}
        during = [beat for beat in beats if beat.label.startswith("slow")]
        assert len(during) >= 2
        assert max(later.seconds - sooner.seconds for sooner, later in itertools.pairwise(beats)) < 2.4

    def test_the_time_left_follows_the_pace(self):
        assert Beat("compiling", "x", 0, 4, 9.0, 8.0).remaining_s is None
        assert Beat("compiling", "x", 1, 4, 9.0, 8.0).remaining_s == 24.0

    def test_what_a_heartbeat_raises_reaches_the_caller(self):
        def dies(beat: Beat) -> None:
            raise ZeroDivisionError("of the probe")

        def slow() -> None:
            time.sleep(0.3)

        with pytest.raises(ZeroDivisionError, match="of the probe"):
            kernelhub.warmup([slow, slow, QUANTIZE], **SMALL, heartbeat=dies)

    def test_a_pipe_gets_a_line_for_each_item(self, capsys):
        kernelhub.warmup(QUANTIZE, **SMALL, progress=True)
        err = capsys.readouterr().err
        assert "making ready 0/2" in err
        assert "making ready 1/2" in err


class TestVerified:
    def test_a_wrong_kernel_is_quarantined_and_the_next_is_taken_and_warmed(self):
        liars.attention(liars.ThirtyPercentOff)
        need = Need(
            "attention",
            (("head_dim_qk", 64), ("head_dim_vo", 64), ("num_kv_heads", 2), ("num_q_heads", 4), ("q_dtype", "float32")),
            ("prefill",),
            ("attention",),
        )
        options = SMALL | {"verify": True, "token_counts": (20,)}
        done = kernelhub.warmup(need, **options)
        assert done.ok
        assert [(op, kernel) for op, kernel, _ in done.quarantined] == [("attention", "liar.k")]
        assert "its numbers are wrong" in done.quarantined[0][2]
        (item,) = done.items
        assert item.kernel != "liar.k"
        assert ("attention", item.kernel) in done.verified, "the next is held against the reference too"
        with kernelhub.seal():
            kernelhub.attention(*torch.zeros(2, 1, 20, 4, 64)[:1], *torch.zeros(2, 1, 20, 2, 64))

    def test_evidence_that_is_stored_is_taken(self):
        options = SMALL | {"verify": True, "token_counts": (4,)}
        first = kernelhub.warmup(QUANTIZE, **options)
        assert first.verified == (("quantize_fp8", "torch.quantize"),)
        second = kernelhub.warmup(QUANTIZE, **options)
        assert (second.verified, second.ok) == ((), True)


class Slow:
    """A kernel that has to be built first: building is making its adapter."""

    built = False


def slow_backend() -> Any:
    from kernelhub.backends.torch.quant import quantize

    class Built(quantize.QuantizeFp8):  # type: ignore[name-defined, misc]
        def __init__(self, problem: Any) -> None:
            super().__init__(problem)
            Slow.built = True

    schema = HUB.function("quantize_fp8").op.contract.schema
    unbuilt = Rule((), lambda _: None if Slow.built else "takes minutes", code=NOT_BUILT)
    globals()["Built"] = Built
    record = Kernel(
        op="quantize_fp8",
        name="slow.k",
        target=f"{__name__}:Built",
        summary="of a test",
        band=Band.PLUGIN,
        standings=EVERYWHERE,
        constraints=(unbuilt, anything(*schema.structural)),
        features=schema.features,
    )
    return kernelhub.register_backend(
        types.SimpleNamespace(BACKEND=Backend("slow", "of a test"), KERNELS=(record,), __name__="slow")
    )


class TestBuild:
    def test_what_takes_minutes_is_built_when_requested_only_and_then_chosen(self):
        Slow.built = False
        slow_backend()
        assert {item.kernel for item in kernelhub.warmup(QUANTIZE, **SMALL).items} == {"torch.quantize"}
        assert not Slow.built
        done = kernelhub.warmup(QUANTIZE, **SMALL, build=True)
        assert Slow.built
        assert {item.kernel for item in done.items} == {"slow.k"}


def test_every_model_lists_what_it_needs_on_any_device():
    from kernelhub.warming.there import list_wanted

    listed = list_wanted("deepseek-v3.2", tp=8, device="H200")
    assert {item.op for item in listed} == {need.op for need in problems_of("deepseek-v3.2", tp=8)}
    assert all(item.kernel for item in listed)
    products = [item for item in listed if item.op == "fp8_gemm" and "rows many" in item.label]
    assert 192 in products[0].tokens, "every tile of 64 rows"
    decode = [item for item in listed if item.op == "paged_mqa_logits"]
    assert decode[0].tokens == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class TestNotWarmed:
    def test_says_that_a_warm_up_covers_what_a_model_requires_and_of_nothing_else(self):
        q, kv = torch.zeros(8, 4, 16), torch.zeros(8, 2, 16)
        offsets = torch.tensor([0, 8], dtype=torch.int32)
        with kernelhub.seal():
            with pytest.raises(NotWarmed, match=r"kernelhub.warmup\(model, ...\) covers it"):
                kernelhub.attention(q, kv, kv, offsets, offsets, causal=True)
            for more in ({"return_lse": True}, {"window": (-1, 3)}):
                with pytest.raises(NotWarmed) as refused:
                    kernelhub.attention(q, kv, kv, offsets, offsets, **more)
                assert "warmup" not in str(refused.value)
            with pytest.raises(NotWarmed) as refused:
                kernelhub.dequantize_mxfp8(*kernelhub.quantize_mxfp8.reference(torch.ones(2, 32)))
            assert "warmup" not in str(refused.value)

    def test_the_table_is_what_published_models_require(self):
        found: dict[str, set[str]] = {}
        for model in CONFIGS:
            for quantization in (None, *FORMATS):
                for kv_dtype, ep in ((None, 1), ("float8_e4m3fn", 8)):
                    needs = problems_of(model, quantization=quantization, kv_dtype=kv_dtype, ep=ep)
                    for need in forms_of(needs):
                        schema = HUB.registry.contracts[need.op].schema
                        found.setdefault(need.op, set()).update(schema.features_used(need.problem("cpu")))
        assert found == FEATURES
