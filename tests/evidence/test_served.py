"""A warm-up runs the cases that concern what its kernels serve: faults there are found, and the evidence says which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.torch.attention.blocked import BlockedPaged
from kernelhub.dispatch.explain import problem_from
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.evidence.case_run import CaseRun, quick_run
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.here import Here
from kernelhub.evidence.quarantine import keep, kept_of, now
from kernelhub.evidence.results import EVERY, WRONG, Check, Result
from kernelhub.ops.models.problems import Need
from kernelhub.probes.device import facts
from tests.evidence import liars

CPU = torch.device("cpu")
NARROWED = [op for op, cases in CASES.items() if cases.read]
HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128, "head_dim_vo": 128}
DECODE = {**HEADS, "q_len": "one"}
RAGGED = {**DECODE, "ragged": True, "causal": True}
LLAMA = (DECODE, RAGGED)
FP8 = {"kv_dtype": "float8_e4m3fn", "kv_scale": "tensor"}
GEMMA = tuple({**each, "head_dim_qk": 256, "head_dim_vo": 256, "softcap": True} for each in LLAMA)
GPT_OSS = tuple({**each, "head_dim_qk": 64, "head_dim_vo": 64, "sinks": True, "window_left": True} for each in LLAMA)


class Planted(BlockedPaged):
    """Right, unless `wrong` says something about a call; or unless `change` changes its values."""

    wrong: ClassVar[Callable[..., bool]] = staticmethod(lambda problem, q, step: False)
    change: ClassVar[Callable[..., Any]] = staticmethod(lambda problem, values: values)

    def launch(self, q: Any, k: Any, v: Any, step: Any, values: Any, out: Any, lse: Any) -> None:
        super().launch(q, k, v, step, type(self).change(self.problem, values), out, lse)
        if type(self).wrong(self.problem, q, step):
            out *= 1.3


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(Planted, "wrong", staticmethod(lambda problem, q, step: False))
    monkeypatch.setattr(Planted, "change", staticmethod(lambda problem, values: values))
    liars.other("paged_attention", Planted)
    return next(each for each in HUB.registry.candidates("paged_attention").kernels if each.name == "liar.k")


def problems(*of: dict[str, Any]) -> list[Any]:
    return [problem_from(HUB.function("paged_attention").op.contract, facts(CPU), dict(each)) for each in of]


def verified(kernel: Kernel, *served: dict[str, Any]) -> Result:
    asked_in = Here()
    try:
        result = quick_run(kernel, CPU, problems(*served)).ask(asked_in)
    finally:
        asked_in.close()
    assert result is not None
    return result


def labels(kernel: Kernel, *served: dict[str, Any]) -> list[str]:
    return [case.label for case in quick_run(kernel, CPU, problems(*served))._cases]


def lens(step: Any) -> list[int]:
    return [int(length) for length in step.seq_lens]


FAULTS: dict[str, tuple[Callable[..., bool], tuple[dict[str, Any], ...]]] = {
    "everywhere": (lambda problem, q, step: True, LLAMA),
    "this width": (lambda problem, q, step: problem.head_dim_qk == 128, LLAMA),
    "ragged steps": (lambda problem, q, step: problem.ragged, LLAMA),
    "empty sequences": (lambda problem, q, step: problem.ragged and 0 in lens(step), LLAMA),
    "long sequences": (lambda problem, q, step: max(lens(step), default=0) > 256, LLAMA),
    "three sequences": (lambda problem, q, step: len(lens(step)) == 3, LLAMA),
    "one sequence": (lambda problem, q, step: len(lens(step)) == 1, LLAMA),
    "wider tensors": (lambda problem, q, step: not q.is_contiguous(), LLAMA),
    "a group of three": (lambda problem, q, step: problem.num_q_heads == 3 * problem.num_kv_heads, LLAMA),
    "its width of 256": (lambda problem, q, step: problem.head_dim_qk == 256, GEMMA),
    "softcap": (lambda problem, q, step: problem.softcap, GEMMA),
    "sinks": (lambda problem, q, step: problem.sinks, GPT_OSS),
    "windows": (lambda problem, q, step: problem.window_left, GPT_OSS),
    "float8 of this width": (
        lambda problem, q, step: problem.kv_dtype == "float8_e4m3fn" and problem.head_dim_qk == 128,
        tuple(each | FP8 for each in LLAMA),
    ),
}


class TestFaults:
    @pytest.mark.parametrize("fault", FAULTS)
    def test_of_what_is_served_are_found(self, fault, kernel, monkeypatch) -> None:
        wrong, served = FAULTS[fault]
        monkeypatch.setattr(Planted, "wrong", staticmethod(wrong))
        result = verified(kernel, *served)
        assert result.status == WRONG
        assert kept_of(kernel, facts(CPU)).result.failures  # type: ignore[union-attr]

    def test_of_a_scale_that_is_ignored_are_found(self, kernel, monkeypatch) -> None:
        def change(problem: Any, values: Any) -> Any:
            return values._replace(scale=1 / math.sqrt(problem.head_dim_qk))

        monkeypatch.setattr(Planted, "change", staticmethod(change))
        assert verified(kernel, *LLAMA).status == WRONG

    @pytest.mark.parametrize(("fault", "served"), [("softcap", GEMMA), ("sinks", GPT_OSS), ("windows", GPT_OSS)])
    def test_of_what_is_not_served_are_found_once_it_is(self, fault, served, kernel, monkeypatch) -> None:
        monkeypatch.setattr(Planted, "wrong", staticmethod(FAULTS[fault][0]))
        assert verified(kernel, *LLAMA).status == "right"
        assert verified(kernel, *served).status == WRONG, "the evidence of another model did not cover it"

    def test_of_what_is_not_served_are_found_by_a_whole_run(self, kernel, monkeypatch) -> None:
        monkeypatch.setattr(Planted, "wrong", staticmethod(FAULTS["softcap"][0]))
        assert verified(kernel, *LLAMA).status == "right"
        assert not kernelhub.verify("paged_attention", backend="liar", device="cpu", quick=True).ok

    def test_that_were_found_are_tried_again_first(self, kernel, monkeypatch) -> None:
        monkeypatch.setattr(Planted, "wrong", staticmethod(FAULTS["softcap"][0]))
        failed = [check.case for check in verified(kernel, *GEMMA).failures]
        assert failed
        assert labels(kernel, *LLAMA)[: len(failed)] == failed
        assert verified(kernel, *LLAMA).status == WRONG
        monkeypatch.undo()
        assert verified(kernel, *LLAMA).status == "right"


class TestEvidence:
    def test_names_what_it_covers_and_other_problems_add_their_cases(self, kernel) -> None:
        first = verified(kernel, *LLAMA)
        covered = kept_of(kernel, facts(CPU)).result  # type: ignore[union-attr]
        assert len(covered.covers) == len(LLAMA)
        assert labels(kernel, *LLAMA) == [], "all of it has passed"
        more = labels(kernel, *GEMMA)
        assert more
        assert not set(more) & {check.case for check in first.checks}
        whole = verified(kernel, *GEMMA)
        assert {check.case for check in whole.checks} == {check.case for check in first.checks} | set(more)
        assert set(whole.covers) > set(covered.covers)

    def test_of_an_older_release_covers_everything(self, kernel, monkeypatch) -> None:
        keep(kernel, facts(CPU), Result(kernel.op, kernel.name, (Check("decode, width 64", "ok", ""),)), now())
        assert kept_of(kernel, facts(CPU)).result.covers == ()  # type: ignore[union-attr]
        read = kernelhub.evidence.store.read

        def older(*given: Any) -> Any:
            document = read(*given)
            return {name: value for name, value in document.items() if name != "covers"}

        monkeypatch.setattr(kernelhub.evidence.store, "read", older)
        assert kept_of(kernel, facts(CPU)).result.covers == (EVERY,)  # type: ignore[union-attr]

    def test_of_one_case_covers_nothing(self, kernel) -> None:
        found = kernelhub.verify("paged_attention", backend="liar", device="cpu", case="decode, width 64")
        assert found.ok
        assert kept_of(kernel, facts(CPU)).result.covers == ()  # type: ignore[union-attr]

    def test_of_all_quick_cases_covers_every_problem(self, kernel) -> None:
        assert CaseRun(quick_run(kernel, CPU).subject, True, 60.0)._covers == (EVERY,)

    def test_warm_ups_of_two_models_run_each_case_once(self, kernel) -> None:
        facets = {"q_dtype": "float32", "kv_dtype": "float32", "num_q_heads": 4, "num_kv_heads": 2, "page_size": 16}
        widths = {"head_dim_qk": 64, "head_dim_vo": 64}

        def warmed(**more: Any) -> Any:
            need = Need("paged_attention", tuple(sorted({**facets, **widths, **more}.items())), ("decode",), ("a",))
            with kernelhub.use(paged_attention="liar"):
                done = kernelhub.warmup(need, token_counts=(2,), device="cpu", context_len=32, max_context_len=64)
            assert done.ok
            return [name for _, name in done.verified]

        assert warmed() == ["liar.k"]
        first = {check.case for check in kept_of(kernel, facts(CPU)).result.checks}  # type: ignore[union-attr]
        assert not any("softcap" in case or "width 128" in case for case in first)
        assert warmed() == []
        assert warmed(softcap=True) == ["liar.k"]
        second = {check.case for check in kept_of(kernel, facts(CPU)).result.checks}  # type: ignore[union-attr]
        assert any("softcap" in case for case in second - first)
        assert second > first
        assert warmed(softcap=True) == []


def test_a_model_s_decode_needs_a_fraction_of_the_quick_cases(kernel) -> None:
    whole = len(quick_run(kernel, CPU)._cases)
    assert whole >= 60
    assert len(labels(kernel, *LLAMA)) <= 12
    assert len(labels(kernel, *(each | FP8 for each in LLAMA))) <= 13
    assert len(labels(kernel, *GPT_OSS)) <= 13


class Read:
    """A problem that notes which of its facets are read."""

    def __init__(self, problem: Any, read: set[str]) -> None:
        self._problem, self._read = problem, read

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._problem, name)


def of_cases(op: str) -> Iterator[tuple[Any, Any]]:
    for case in CASES[op].cases():
        if case.quick:
            yield case, HUB.function(op).explain(**case.make(CPU)).problem


def chosen(op: str, **facets: Any) -> list[str]:
    served = problem_from(HUB.function(op).op.contract, facts(CPU), facets)
    return [case.label for case, problem in of_cases(op) if CASES[op].concerns(problem, served)]


class TestExpertsAndLatents:
    def test_experts_of_a_quantised_format_have_cases_of_their_activation(self) -> None:
        kept = chosen("fused_moe", weights="mxfp4", activation="swiglu_oai", w13_bias=True, w2_bias=True)
        assert {"mxfp4, 5 experts", "limit of swiglu_oai, 5 experts", "ids: some nowhere, 5 experts"} <= set(kept)
        assert not any("fp8" in label or "gelu" in label or "expert_map" in label for label in kept)
        assert len(kept) < 20

    def test_experts_in_float8_have_those_of_blocks(self) -> None:
        kept = chosen("fused_moe", weights="fp8_block", activation_dtype="float8_e4m3fn")
        assert {"fp8_block, 5 experts", "0 tokens, fp8_block, 5 experts", "tiny scales, fp8_block, 5 experts"} <= set(
            kept
        )
        assert not any("channel" in label or "mxfp4" in label for label in kept)

    def test_latents_have_their_width_and_steps(self) -> None:
        kept = chosen("mla_attention", q_len="one")
        assert {"decode, deepseek, pages of 64", "0 sequences, deepseek, pages of 64"} <= set(kept)
        assert not any("small" in label or "sparse" in label or "sinks" in label or "fp8" in label for label in kept)
        assert set(chosen("mla_attention", q_len="one", sparse=True)) > set(kept)


@pytest.mark.parametrize("op", NARROWED)
class TestEveryOp:
    def test_a_case_concerns_its_own_problem(self, op) -> None:
        assert [case.label for case, problem in of_cases(op) if not CASES[op].concerns(problem, problem)] == []

    def test_a_problem_s_name_in_evidence_has_all_that_decides(self, op) -> None:
        cases = CASES[op]
        known = [problem for _, problem in of_cases(op)]
        read: set[str] = set()
        for served in known[:: max(1, len(known) // 12)]:
            for problem in known:
                cases.concerns(problem, Read(served, read))
        assert read <= set(cases.read)
        assert set(cases.formats) <= set(cases.read) <= {each.name for each in fields(known[0])}
