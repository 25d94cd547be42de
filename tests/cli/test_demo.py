"""``kernelhub demo``: real attention through the hub, compared with the reference and timed."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

import kernelhub
from kernelhub.cli.showcase import FULL, Size, cases
from kernelhub.cli.showcase import QUICK as QUICK_SIZES
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.evidence.timing import time_calls
from kernelhub.ops.attention.adapter import AttentionAdapter
from tests.cli.small import SMALL
from tests.dispatch.backends import EVERYWHERE

QUICK = ("demo", "--quick", "--device", "cpu")
BLOCK = "block of DeepSeek V3's shape"
TITLES = [
    "prefill",
    "paged decode",
    "prefill with a window and sinks",
    *(f"{BLOCK}: {part}" for part in ("latent attention", "routing", "experts")),
]
OPS = ["attention", "paged_attention", "attention", "mla_attention", "route_experts", "fused_moe"]


class Liar(AttentionAdapter):
    """A kernel that gives zeros, or NaN."""

    value = 0.0

    def launch(self, q, k, v, step, values, out, lse):
        out.fill_(self.value)


class NaN(Liar):
    value = torch.nan


def lying_backend(adapter: str) -> SimpleNamespace:
    contract = kernelhub.attention.op.contract
    record = Kernel(
        op="attention",
        name="liar.always",
        target=f"{__name__}:{adapter}",
        summary="gives what is wrong",
        band=Band.PLUGIN,
        standings=EVERYWHERE,
        constraints=(anything(*contract.schema.facets),),
        features=contract.schema.features,
    )
    return SimpleNamespace(BACKEND=Backend("liar", "lies"), KERNELS=(record,))


@pytest.fixture(params=["small", "of the command"])
def size(request, monkeypatch):
    """Those that users get, and such that take a tenth of the time, as of all other tests here."""
    if request.param == "small":
        monkeypatch.setitem(QUICK_SIZES, "cpu", SMALL)


@pytest.mark.usefixtures("size")
def test_attention_and_a_block_run_and_are_right(ask):
    answer = ask(*QUICK, "--json")
    assert answer.code == 0
    assert answer.json["ok"] is True
    assert [result["title"] for result in answer.json["results"]] == TITLES
    for result in answer.json["results"]:
        decided = sorted(decision["kernel"] for decision in result["decisions"])
        assert decided == list(getattr(kernelhub, result["op"]).kernels())
        assert result["selected"] in decided
        error = result["error"]
        assert error["ok"] is True
        assert error["largest"] <= error["largest_allowed"]
        assert error["rms_ratio"] <= error["rms_ratio_allowed"]
        assert result["tokens_per_s"] > 0
        assert result["torch"]["ratio"] == pytest.approx(result["tokens_per_s"] / result["torch"]["tokens_per_s"])
    assert [result["op"] for result in answer.json["results"]] == OPS


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(QUICK_SIZES, "cpu", SMALL)


@pytest.mark.usefixtures("small")
class TestQuick:
    def test_for_people_it_says_what_ran_why_how_exact_and_how_fast(self, ask):
        answer = ask(*QUICK)
        assert answer.code == 0
        for title, op in zip(TITLES, OPS, strict=True):
            first, second = (
                line.removeprefix(title).split() for line in answer.out.splitlines() if line.startswith(f"{title}  ")
            )
            kernel, error, speed, ratio = first
            assert kernel in getattr(kernelhub, op).kernels()
            assert 0 <= float(error) <= 1
            assert float(speed.replace(",", "")) > 0
            assert re.fullmatch(r"\d+\.\d\dx", ratio)
            assert re.fullmatch(r"next best: .+; \d+ unsupported here", " ".join(second))
        assert "the fastest plain torch call" in answer.out
        assert re.search(r"^\d+ unsupported here, --all lists them", answer.out, re.MULTILINE)
        assert len(answer.out.splitlines()) <= 24
        *_, first, second = answer.out.splitlines()
        assert "kernelhub explain paged_attention --device B200" in first
        assert "kernelhub doctor" in second

    def test_all_lists_every_kernel_with_every_reason(self, ask):
        answer = ask(*QUICK, "--all")
        for word in ("ran ", "decided by ", "numbers ", "checked against ", "speed ", "torch ", "ratio "):
            assert len(re.findall(rf"^  {word}", answer.out, re.MULTILINE)) == len(TITLES)
        assert "tokens/s through one layer" in answer.out
        assert "does not support sinks" in answer.out

    def test_in_a_pipe_progress_is_lines_on_stderr(self, ask):
        lines = ask(*QUICK).err.splitlines()
        assert lines[0] == "demo 0/18, 0 s: prefill: draw the inputs"
        begun = [line.partition(",")[0] for line in lines]
        assert list(dict.fromkeys(begun)) == [f"demo {step}/18" for step in range(18)]
        assert all("s left" in line for line in lines[2:])

    def test_what_the_user_said_decides(self, ask, monkeypatch):
        monkeypatch.setenv("KERNELHUB_FORCE", "attention=torch.blocked;paged_attention=torch.blocked")
        for result in ask(*QUICK, "--json").json["results"]:
            forced = (result["selected"], result["source"]) == ("torch.blocked", "force")
            assert forced == (result["op"] in ("attention", "paged_attention"))

    def test_no_kernel_is_exit_1_with_every_reason(self, ask, monkeypatch):
        monkeypatch.setenv("KERNELHUB_FORCE", "torch.sdpa")
        answer = ask(*QUICK, "--json")
        assert (answer.code, answer.out) == (1, "")
        assert (
            "KERNELHUB_FORCE=torch.sdpa requests torch.sdpa, and no kernel of paged_attention has that name"
            in answer.err
        )
        assert "Traceback" not in answer.err


@pytest.mark.usefixtures("small")
class TestWrongNumbers:
    @pytest.mark.parametrize("adapter", ["Liar", "NaN"])
    def test_they_are_found_and_exit_1(self, ask, adapter):
        kernelhub.register_backend(lying_backend(adapter))
        answer = ask(*QUICK, "--json")
        assert answer.code == 1
        right = {result["title"]: result["error"]["ok"] for result in answer.json["results"]}
        assert right == {title: op != "attention" for title, op in zip(TITLES, OPS, strict=True)}

    def test_people_get_one_word(self, ask):
        kernelhub.register_backend(lying_backend("Liar"))
        assert " WRONG " in ask(*QUICK).out


class TestChecks:
    @pytest.mark.parametrize("title", ["prefill", "prefill with a window and sinks"])
    def test_a_prefill_that_is_checked_in_parts_is_checked_exactly(self, title):
        case = cases(Size(500, 2, 64, 8, 0.1), torch.device("cpu"))[title]()
        assert case.checked == "384 of 500 queries: the first, middle and last ones"
        whole = kernelhub.attention.reference(**case.arguments)
        assert case.check(whole.to(torch.bfloat16)).ok
        for row in (0, 250, 499):
            wrong = whole.to(torch.bfloat16)
            wrong[:, row] += 1.0
            assert not case.check(wrong).ok

    def test_the_dense_peer_of_decode_reads_as_many_tokens(self):
        for size in FULL.values():
            small = Size(1, size.num_seqs, size.kv_tokens // 16, 8, 0.1)
            case = cases(small, torch.device("cpu"))["paged decode"]()
            assert int(case.arguments["seq_lens"].sum()) == small.num_seqs * small.kv_tokens


class TestDevice:
    def test_a_gpu_that_is_not_there_is_refused_with_where_to_look(self, ask, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        answer = ask("demo", "--device", "cuda")
        assert (answer.code, answer.out) == (2, "")
        assert "torch sees no GPU here; `kernelhub doctor` says why" in answer.err

    def test_calls_on_a_gpu_are_timed_by_its_events(self, monkeypatch):
        clock = [0.0]

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at_ms = clock[0]

            def elapsed_time(self, end):
                return end.at_ms - self.at_ms

        def call(duration_ms):
            clock[0] += duration_ms

        class Flushed:
            def zero_(self):
                clock[0] += 7.0

        monkeypatch.setattr(torch, "empty", lambda *_, **__: Flushed())
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        one, other = time_calls((lambda: call(0.5), lambda: call(4.0)), torch.device("cuda"), budget_s=0.1)
        assert (one.median_s, other.median_s) == pytest.approx((0.0005, 0.004))
