"""A lock file holds what was chosen: weaker than what users ask for, stronger than everything else, or it fails."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch

import kernelhub
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.fingerprint import own_version
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.dispatch.lock_file import FORMAT, Lock, Locked, lock_text, read_lock
from kernelhub.dispatch.problem_class import device_key
from kernelhub.errors import ConfigurationError, NoKernel
from kernelhub.ops.attention.problem import AttentionProblem
from kernelhub.probes.device import facts
from tests.dispatch.backends import EVERYWHERE

CPU = facts(torch.device("cpu"))
FACETS = {
    "causal": True,
    "head_dim_qk": 32,
    "head_dim_vo": 32,
    "num_q_heads": 4,
    "num_kv_heads": 4,
    "q_dtype": "float32",
}
FACETS |= {"kv_dtype": "float32", "q_len": "few"}


def call(**more):
    """A call of the problem that the file decides; the kernel that ran."""
    HUB.forget_report()
    q = torch.zeros(1, 8, 4, 32)
    kernelhub.attention(q, q, q, **{"causal": True, **more})
    return kernelhub.report().rows[-1].kernel


def selection(**more):
    q = torch.zeros(1, 8, 4, 32)
    return kernelhub.explain(kernelhub.attention, q, q, q, causal=True, **more)


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """Write a lock file that holds a kernel for that problem, and obey it."""

    def write(kernel="torch.blocked", device=CPU, missing="auto", **more):
        path = tmp_path / "held.json"
        item = Locked("attention", {**FACETS, **more}, kernel)
        path.write_text(lock_text(Lock(device_key(device), (item,), {"name": "llama-3.1-8b"}, own_version())))
        monkeypatch.setenv("KERNELHUB_LOCK", str(path))
        monkeypatch.setenv("KERNELHUB_LOCK_MISSING", missing)
        kernelhub.reload()
        return path

    return write


def test_without_a_file_another_kernel_is_chosen():
    assert call() != "torch.blocked"


class TestHolds:
    def test_the_locked_kernel_runs_and_explain_names_file_and_line(self, lock):
        path = lock()
        line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if '"kernel"' in text)
        assert call() == "torch.blocked"
        told = selection()
        assert (told.selected, told.source, told.because) == ("torch.blocked", "lock", f"{path}:{line}")
        others = [item for item in told.decisions if item.code == "not_requested"]
        assert others
        assert all(item.reason == f"supported, but {path}:{line} requests torch.blocked" for item in others)
        assert "unset KERNELHUB_LOCK" in others[0].remedy

    def test_a_reload_without_the_variable_ends_it(self, lock, monkeypatch):
        lock()
        monkeypatch.delenv("KERNELHUB_LOCK")
        kernelhub.reload()
        assert selection().source != "lock"

    def test_a_facet_that_the_file_does_not_name_has_its_default(self, lock):
        path = lock()
        document = json.loads(path.read_text())
        del document["decisions"][0]["problem"]["q_len"]  # whose default is many
        path.write_text(json.dumps(document))
        kernelhub.reload()
        assert selection().source != "lock"
        q = torch.zeros(1, 64, 4, 32)
        assert kernelhub.explain(kernelhub.attention, q, q, q, causal=True).because == f"{path}:1"

    def test_a_packing_plan_reads_the_same_selection(self, lock):
        lock()
        op = kernelhub.attention.op
        assert [kernel.name for kernel in op.ranked(selection().problem, None)] == ["torch.blocked"]


class TestPackedWeights:
    """What is decided for weights of a checkpoint is decided for them as the kernel packs them."""

    @pytest.fixture
    def held(self, tmp_path, monkeypatch):
        monkeypatch.setenv("KERNELHUB_LOCK_MISSING", "error")
        h200 = kernelhub.explain("fp4_gemm", device="H200").problem.device
        item = Locked("fp4_gemm", {"n": 4096, "k": 4096}, "triton.fp4_gemm")
        (tmp_path / "held.json").write_text(lock_text(Lock(device_key(h200), (item,))))
        monkeypatch.setenv("KERNELHUB_LOCK", str(tmp_path / "held.json"))
        kernelhub.reload()

    def test_by_a_lock_file(self, held):
        for layout in ("checkpoint", "fp4.tiles64x128.v1"):
            told = kernelhub.explain("fp4_gemm", device="H200", n=4096, k=4096, weight_layout=layout)
            assert (told.source, told.selected) == ("lock", "triton.fp4_gemm")
        other = kernelhub.explain("fp4_gemm", device="H200", n=4096, k=4096, weight_layout="fp4.scales128x4.v1")
        assert "not_locked" in {item.code for item in other.decisions}

    def test_by_an_agreement(self):
        selection = kernelhub.explain("fp4_gemm", device="H200", n=4096, k=4096, backend="triton")
        kernelhub.agree(what=selection)
        packed = kernelhub.explain("fp4_gemm", device="H200", n=4096, k=4096, weight_layout="fp4.tiles64x128.v1")
        assert packed.source == "ranks"


class TestPrecedence:
    """DESIGN section 4: `disable`, FORCE, backend=, use, configure; then the lock; then PREFER and all that ranks."""

    @pytest.mark.parametrize("word", ["force", "kwarg", "context", "configure"])
    def test_an_explicit_word_is_stronger_and_the_conflict_is_shown(self, lock, monkeypatch, word):
        path = lock()
        if word == "force":
            monkeypatch.setenv("KERNELHUB_FORCE", "torch.sdpa")
            kernelhub.reload()
        if word == "configure":
            kernelhub.configure(attention="torch.sdpa")
        with kernelhub.use(**({"attention": "torch.sdpa"} if word == "context" else {})):
            backend = {"backend": "torch.sdpa"} if word == "kwarg" else {}
            told = selection(**backend)
            assert call(**backend) == "torch.sdpa"
        assert (told.source, told.selected) == (word, "torch.sdpa")
        (sentence,) = told.overruled
        assert sentence.startswith(f"{path}:")
        assert "names torch.blocked, but" in sentence
        assert sentence in str(told)
        assert told.to_dict()["overruled"] == [sentence]

    @pytest.mark.parametrize("place", ["variable", "file", "context", "configure"])
    def test_the_lock_is_stronger_than_any_preference_and_the_conflict_is_shown(
        self, lock, monkeypatch, tmp_path, place
    ):
        lock()
        if place == "variable":
            monkeypatch.setenv("KERNELHUB_PREFER", "torch.sdpa")
        if place == "file":
            config = tmp_path / "kernelhub.toml"
            config.write_text('prefer = "torch.sdpa"\n')
            monkeypatch.setenv("KERNELHUB_CONFIG", str(config))
        kernelhub.reload()
        if place == "configure":
            kernelhub.configure(prefer="torch.sdpa")
        with kernelhub.use(prefer="torch.sdpa" if place == "context" else ()):
            told = selection()
        assert (told.source, told.selected) == ("lock", "torch.blocked")
        (sentence,) = told.overruled
        assert "names torch.sdpa" in sentence
        assert sentence.endswith("is stronger")

    def test_a_variable_of_another_project_is_weaker(self, lock, monkeypatch):
        lock()
        monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON_ATTN")
        kernelhub.reload()
        assert selection().source == "lock"

    def test_disable_is_stronger_and_then_the_lock_fails_closed(self, lock):
        path = lock()
        with kernelhub.use(disable="torch.blocked"):
            assert selection().selected is None
            with pytest.raises(NoKernel) as caught:
                call()
        message = str(caught.value)
        assert f"{path}:" in message
        assert "requests torch.blocked, which cannot run this" in message
        assert "disabled by use(disable='torch.blocked')" in message
        assert f"kernelhub lock --model llama-3.1-8b --out {path}" in message

    def test_unsafe_is_for_what_users_request_and_not_for_the_lock(self, lock):
        lock("torch.sdpa", softcap=True)  # which does not honour it
        with kernelhub.use(unsafe=True), pytest.raises(NoKernel, match="does not support softcap"):
            call(softcap=1.0)
        with kernelhub.use(unsafe=True, attention="torch.sdpa"):
            assert selection(softcap=1.0).selected == "torch.sdpa"


class TestFails:
    def test_a_kernel_that_can_no_longer_run_is_never_replaced(self, lock):
        path = lock("flashinfer.fa2_ragged")
        with pytest.raises(NoKernel) as caught:
            call()
        assert f"{path}:" in str(caught.value)
        assert "requests flashinfer.fa2_ragged, which cannot run this" in str(caught.value)
        decisions = {item.kernel: item for item in caught.value.selection.decisions}
        assert decisions["flashinfer.fa2_ragged"].code == "vendor"
        assert decisions["torch.blocked"].code == "not_requested"

    def test_nor_is_one_that_cannot_be_loaded(self, lock):
        record = Kernel(
            op="attention",
            name="absent.kernel",
            target="kernelhub_test_absent:Kernel",
            summary="",
            band=Band.PLUGIN,
            standings=EVERYWHERE,
            constraints=(anything(*AttentionProblem.__dataclass_fields__),),
            features=frozenset({"causal"}),
        )
        lock("absent.kernel")
        kernelhub.register_backend(SimpleNamespace(BACKEND=Backend("absent", ""), KERNELS=(record,)))
        assert selection().selected == "absent.kernel"
        with pytest.raises(NoKernel, match="load_failed: importing kernelhub_test_absent raised ModuleNotFoundError"):
            call()

    def test_it_needs_no_evidence_where_it_stands_in_a_lock(self, lock):
        kernelhub.register_backend(
            SimpleNamespace(
                BACKEND=Backend("fresh", ""),
                KERNELS=(
                    Kernel(
                        op="attention",
                        name="fresh.kernel",
                        target="kernelhub.backends.torch.attention.blocked:Blocked",
                        summary="",
                        band=Band.PLUGIN,
                        constraints=(anything(*AttentionProblem.__dataclass_fields__),),
                        features=frozenset({"causal"}),
                    ),
                ),
            )
        )
        assert selection().selected != "fresh.kernel"
        lock("fresh.kernel")
        assert selection().selected == "fresh.kernel"

    def test_a_kernel_that_is_no_more_is_reported(self, lock):
        lock("oldlib.kernel")
        with pytest.raises(NoKernel, match=r"pins oldlib\.kernel, and no kernel of that name is registered"):
            call()

    def test_what_is_asked_of_all_kernels_is_asked_of_the_locked_one(self, lock):
        lock("torch.sdpa")
        with kernelhub.use(batch_invariant=True):
            told = selection()
        assert told.selected is None
        assert next(item for item in told.decisions if item.kernel == "torch.sdpa").code == "batch_variant"


class TestMissing:
    def test_a_problem_that_is_not_in_the_file_is_chosen_for_freely_and_that_is_said_once(self, lock, caplog):
        path = lock()
        with caplog.at_level(logging.WARNING, "kernelhub.fallback"):
            assert call(causal=False) != ""
            call(causal=False, softcap=1.0)
        (record,) = (one for one in caplog.records if one.name == "kernelhub.fallback")
        assert f"{path} (for {CPU.name}, {CPU.arch}) has no entry for" in record.getMessage()
        assert "KERNELHUB_LOCK_MISSING=error" in record.getMessage()

    def test_or_it_is_an_error(self, lock):
        path = lock(missing="error")
        assert call() == "torch.blocked"
        with pytest.raises(NoKernel, match="no registered kernel can run this") as caught:
            call(causal=False)
        assert {item.code for item in caught.value.selection.decisions} == {"not_locked"}
        assert f"{path} has no entry for this problem" in str(caught.value)

    def test_but_not_where_a_user_requests_a_kernel(self, lock):
        lock(missing="error")
        assert call(causal=False, backend="torch.sdpa") == "torch.sdpa"

    def test_a_file_for_another_device_decides_nothing_here(self, lock, caplog):
        lock(device=kernelhub.explain("attention", device="H200").problem.device)
        with caplog.at_level(logging.WARNING, "kernelhub.fallback"):
            call()
        assert "(for NVIDIA H200, sm_90) has no entry" in caplog.text
        held = kernelhub.explain("attention", device="H200", **FACETS)
        assert held.source == "lock", "a device that is described is the one that the file is for"


class TestFiles:
    def test_what_is_written_is_read_again(self, tmp_path):
        items = (
            Locked(
                "fp8_gemm", {"n": 1, "k": 128}, "triton.x", {"triton": "3.7.1"}, "order: because", ("decode",), ("o",)
            ),
            Locked(
                "attention", FACETS, "torch.blocked", runner_ups={"b": "why", "a": "why"}, refused={"z": "code: why"}
            ),
        )
        lock = Lock(("nvidia", "sm_90", "NVIDIA H200"), items, {"name": "m", "tp": 8}, "0.1.0", {"triton": "3.7.1"})
        path = tmp_path / "lock.json"
        path.write_text(lock_text(lock))
        read = read_lock(path)
        assert [item.op for item in read.decisions] == ["attention", "fp8_gemm"], "ordered by op, then by problem"
        assert list(read.decisions[0].runner_ups) == ["b", "a"], "best first"
        assert read.decisions[1].versions == {"triton": "3.7.1"}
        assert (read.device, read.model, read.packages) == (lock.device, lock.model, lock.packages)
        assert lock_text(read) == path.read_text()

    def test_a_decision_is_a_fact_a_line_so_that_a_diff_shows_one(self):
        def text(kernel):
            return lock_text(Lock(("cpu", "avx512", "x"), (Locked("attention", FACETS, kernel),))).splitlines()

        changed = [line for line, other in zip(text("a.b"), text("c.d"), strict=True) if line != other]
        assert changed == ['   "kernel": "a.b",']

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "No such file"),
            ("{", "not JSON"),
            ("[]", "its format is null"),
            (json.dumps({"format": "kernelhub lock, version 9"}), "version 9', not"),
            (json.dumps({"format": FORMAT, "decisions": []}), "lacks a part"),
            (
                json.dumps({"format": FORMAT, "device": {"vendor": "cpu", "arch": "a", "name": "n"}, "decisions": [3]}),
                "part",
            ),
        ],
    )
    def test_what_is_no_lock_file_is_reported(self, tmp_path, monkeypatch, text, message):
        path = tmp_path / "lock.json"
        if text is not None:
            path.write_text(text)
        monkeypatch.setenv("KERNELHUB_LOCK", str(path))
        with pytest.raises(ConfigurationError, match=message):
            kernelhub.reload()

    def test_a_facet_or_op_that_this_version_does_not_know_is_reported_with_its_line(self, lock):
        path = lock()
        path.write_text(path.read_text().replace('"causal"', '"casual"'))
        with pytest.raises(ConfigurationError, match=rf"{path}:\d+: attention has no facet 'casual' in this version"):
            kernelhub.reload()
        path.write_text(path.read_text().replace('"attention"', '"old_attention"'))
        with pytest.raises(ConfigurationError, match="there is no op 'old_attention'"):
            kernelhub.reload()

    def test_two_decisions_for_one_problem_are_refused(self, lock):
        path = lock()
        document = json.loads(path.read_text())
        document["decisions"] *= 2
        path.write_text(json.dumps(document, indent=1))
        with pytest.raises(ConfigurationError, match=r":\d+: line \d+ has the same problem"):
            kernelhub.reload()

    def test_a_wrong_word_for_what_is_missing_is_reported(self, monkeypatch):
        monkeypatch.setenv("KERNELHUB_LOCK_MISSING", "maybe")
        with pytest.raises(ConfigurationError, match="'maybe' is neither auto nor error"):
            kernelhub.reload()


class TestClosed:
    """What a file says is one kernel for values of the facets' own kind, or an error with file and line."""

    @pytest.mark.parametrize("kernel", ["torch.*", "torch", "*", "torch.sdpa torch.blocked", "../x", "torch.", " "])
    def test_what_names_no_single_kernel_is_refused(self, lock, kernel):
        with pytest.raises(ConfigurationError, match=r"held\.json:\d+.*is not the name of one kernel.*kernelhub lock"):
            lock(kernel)

    @pytest.mark.parametrize(
        ("facet", "value"),
        [
            *(("head_dim_qk", value) for value in ("32", True, 32.0, -32)),
            *(("causal", 1), ("causal", "yes"), ("q_dtype", "fp32"), ("q_dtype", None), ("q_len", "several")),
        ],
    )
    def test_a_value_that_no_problem_has_is_refused(self, lock, facet, value):
        with pytest.raises(ConfigurationError, match=rf"held\.json:\d+: attention: {facet} is .*; it takes "):
            lock(**{facet: value})

    @pytest.mark.parametrize("missing", ["auto", "error"])
    def test_that_no_kernel_could_run_holds_too(self, lock, missing):
        path = lock("", missing=missing)
        with pytest.raises(NoKernel, match="says that no kernel could run this problem"):
            call()
        assert {item.code for item in selection().decisions} == {"not_locked"}
        assert str(path) in selection().decisions[0].reason
        assert call(causal=False) if missing == "auto" else True
