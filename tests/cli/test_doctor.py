"""``kernelhub doctor``: what is here, what it means, what to do; it never crashes on what it is to find."""

from __future__ import annotations

import dataclasses
import re
import sys
from importlib import metadata

import pytest

import kernelhub
from kernelhub.cli import link_facts, machine_facts
from kernelhub.cli.fact import PARTS
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.dispatch.standing import published
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.probes.peers import Pair, PeerFacts
from tests.backends.deep_gemm_copies import FAKE
from tests.conftest import DEVICE
from tests.dispatch.backends import record, register


def facts(answer, status=None):
    return [fact for fact in answer.json["facts"] if status in (None, fact["status"])]


def about(answer, text):
    """The fact that mentions something."""
    found = [fact for fact in facts(answer) if text in fact["what"]]
    assert found, f"no fact about {text} in {[fact['what'] for fact in facts(answer)]}"
    return found[0]


class TestAHealthyMachine:
    def test_each_line_has_a_status_and_says_what_it_means(self, ask):
        answer = ask("doctor", "--json")
        assert answer.code == 0
        assert answer.json["ok"] is True
        for fact in facts(answer):
            assert fact.keys() == {"status", "what", "meaning", "remedy", "part"}
            assert fact["status"] in ("ok", "note", "absent")
            assert fact["part"] in PARTS
            assert fact["what"]
            assert fact["meaning"]

    def test_it_speaks_of_each_part_of_the_machine(self, ask):
        answer = ask("doctor", "--json")
        for part in ("Python 3", "torch", "CPU", "NVIDIA driver", "nvcc", "C compiler", "triton", "rich", "KERNELHUB_"):
            about(answer, part)

    def test_it_reports_what_each_op_would_run(self, ask):
        answer = ask("doctor", "--json")
        for op, inputs in (("paged_attention", paged_attention_inputs), ("attention", attention_inputs)):
            selected = kernelhub.explain(op, **inputs("llama-3.1-8b", device=DEVICE)).selected
            assert selected in next(fact["what"] for fact in facts(answer) if fact["what"].startswith(f"{op} on "))

    def test_for_people_each_fact_is_a_row_and_the_end_sums_up(self, ask):
        answer = ask("doctor", "--all")
        *_, last = answer.out.splitlines()
        head = answer.out.splitlines()[0].split()
        assert head in (
            ["status", "what", "what", "it", "means"],
            ["status", "what", "what", "it", "means", "what", "to", "do"],
        )
        assert last.startswith("no problems, ")

    def test_one_screen_names_each_part_of_the_machine_and_what_is_not_installed_once(self, ask):
        answer = ask("doctor")
        assert answer.code == 0
        assert len(answer.out.splitlines()) <= 24
        for part in ("machine", "toolchain", "caches", "settings", "libraries", "kernels"):
            assert answer.row(part)
        for name in ("vllm", "flashinfer"):
            assert answer.row("not").count(f" {name},") == 1
        assert "ops run the first kernel of their order" in answer.row("kernels")


@pytest.mark.usefixtures("an_h200")
class TestWithAGpu:
    def test_the_gpu_is_reported_with_its_facts(self, ask):
        fact = about(ask("doctor", "--json"), "GPU 0")
        assert fact["what"] == "GPU 0: NVIDIA H200, sm_90, 132 SMs, 141 GiB"
        assert "hopper" in fact["meaning"]

    def test_what_would_run_is_reported_of_the_gpu_alone(self, ask):
        told = [
            fact["what"] for fact in facts(ask("doctor", "--json")) if fact["what"].startswith("paged_attention on ")
        ]
        assert [what.partition(":")[0] for what in told] == ["paged_attention on NVIDIA H200"]

    @pytest.mark.usefixtures("no_triton")
    def test_a_faster_kernel_that_lacks_its_package_is_named_with_the_remedy(self, ask):
        answer = ask("doctor", "--json")
        assert answer.code == 0
        fact = about(answer, "paged_attention on NVIDIA H200")
        assert fact["status"] == "note"
        assert fact["what"].endswith("torch.blocked")
        assert "triton.split_kv" in fact["meaning"]
        assert 'pip install "triton' in fact["remedy"]

    def test_a_library_is_reported_with_its_copy_and_what_its_kernels_lack(self, ask, monkeypatch, tmp_path):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        version = metadata.version("triton")
        fact = next(fact for fact in facts(ask("doctor", "--json")) if fact["what"].startswith(f"triton {version} ("))
        assert "site-packages" in fact["what"]
        assert fact["status"] == "ok"
        (tmp_path / "file").touch()
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
        HUB.restore()
        fact = next(fact for fact in facts(ask("doctor", "--json")) if fact["what"].startswith(f"triton {version} ("))
        assert fact["status"] == "note"
        assert re.match(r"0 of .* can run here; \d+ lack this: .* is not a folder", fact["meaning"])
        assert "TRITON_CACHE_DIR" in fact["remedy"]

    @pytest.mark.usefixtures("no_triton")
    def test_a_kernel_that_this_gpu_can_never_run_is_not_recommended(self, ask):
        assert "torch.packed" not in about(ask("doctor", "--json"), "paged_attention on NVIDIA H200")["meaning"]

    def test_a_gpu_that_fails_is_a_problem_and_no_crash(self, ask, monkeypatch):
        import torch

        def fail(device):
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

        monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
        answer = ask("doctor", "--json")
        assert answer.code == 1
        assert "uncorrectable ECC error" in about(answer, "GPU 0")["meaning"]

    def test_no_kernel_at_all_is_a_problem(self, ask, monkeypatch):
        monkeypatch.setenv("KERNELHUB_DISABLE", "paged_attention=torch,triton,gluon")
        answer = ask("doctor", "--json")
        assert answer.code == 1
        fact = about(answer, "paged_attention on NVIDIA H200")
        assert (fact["status"], fact["what"].rpartition(": ")[2]) == ("problem", "no kernel")
        assert "remove it from KERNELHUB_DISABLE" in fact["remedy"]


@pytest.mark.usefixtures("an_h200")
class TestProviders:
    """Each library on fake site folders: found where, which copy, which version, what its kernels lack, what to do."""

    @pytest.fixture
    def site(self, monkeypatch, tmp_path):
        """Put packages, as distributions of a version, on the path."""
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
        for program in ("nvcc", "cuobjdump"):
            file = tmp_path / "cuda" / "bin" / program
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()

        def install(distribution, version, *files):
            for name in files:
                file = tmp_path / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(FAKE if name == "deep_gemm/__init__.py" else "")
            info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
            (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))

        yield install
        HUB.restore()

    @staticmethod
    def about(ask, backend):
        """What is told of a backend's libraries."""
        HUB.restore()
        (fact,) = [
            item for item in facts(ask("doctor", "--json")) if f"kernels of backend {backend}" in item["meaning"]
        ]
        return fact

    def test_none(self, ask, site):
        fact = self.about(ask, "deep_gemm")
        assert fact["what"] == "deep_gemm is not installed"
        assert re.fullmatch(
            r"0 of \d+ kernels of backend deep_gemm can run here; \d+ are for other devices", fact["meaning"]
        )
        assert fact["remedy"] == 'pip install "kernelhub[deep-gemm]"'

    def test_a_distribution_of_another_name(self, ask, site, tmp_path):
        files = ("deep_gemm/__init__.py", "deep_gemm/_C.cpython-312.so", "deep_gemm/include/deep_gemm/a.cuh")
        site("tokenspeed-deepgemm", "2.5.0", *files)
        fact = self.about(ask, "deep_gemm")
        assert f"(tokenspeed-deepgemm 2.5.0, {tmp_path / 'deep_gemm'})" in fact["what"]
        assert (fact["status"], fact["remedy"]) == ("ok", "")
        assert re.search(r"^[1-9]\d* of \d+ kernels of backend deep_gemm can run here", fact["meaning"])
        assert "lack this" not in fact["meaning"]

    def test_one_without_headers(self, ask, site, tmp_path):
        site("deep-gemm", "1.0.0", "deep_gemm/__init__.py", "deep_gemm/_C.cpython-312.so")
        fact = self.about(ask, "deep_gemm")
        assert fact["what"] == f"deep_gemm 1.0.0 (deep-gemm, {tmp_path / 'deep_gemm'})"
        assert fact["meaning"].startswith("0 of ")
        assert "has no include/deep_gemm" in fact["meaning"]
        assert fact["remedy"] == 'pip uninstall deep-gemm, then pip install "kernelhub[deep-gemm]"'

    def test_a_copy_inside_vllm(self, ask, site, tmp_path):
        """vLLM's wheel alone: its DeepGEMM, FlashAttention, CUTLASS and Marlin."""
        inside = "vllm/third_party/deep_gemm"
        compiled = ("_C_stable_libtorch.abi3.so", "vllm_flash_attn/_vllm_fa3_C.abi3.so")
        files = (f"{inside}/__init__.py", f"{inside}/_C.abi3.so", f"{inside}/include/deep_gemm/a.cuh")
        site("vllm", "0.33.0", "vllm/__init__.py", *files, *(f"vllm/{name}" for name in compiled))
        here = f"vllm 0.33.0 (vllm, {tmp_path / 'vllm'})"
        assert {self.about(ask, name)["what"] for name in ("deep_gemm", "flash_attn", "cutlass", "marlin")} == {here}
        assert "deep_gemm has no fp8_gemm_nt" in self.about(ask, "deep_gemm")["meaning"]
        assert self.about(ask, "flash_attn")["meaning"].startswith("2 of ")
        assert re.fullmatch(r"fits \d+ kernels of backend marlin", self.about(ask, "marlin")["meaning"])
        backends = {item["name"]: item for item in ask("backends", "--json").json["backends"]}
        assert backends["deep_gemm"]["library"]["ok"]

    def test_what_speaks_against_a_plain_call_only_is_not_held_against_the_library(self, ask, site):
        site("vllm", "0.33.0", "vllm/__init__.py", "vllm/_C_stable_libtorch.abi3.so")
        meaning = self.about(ask, "cutlass")["meaning"]
        assert re.match(r"2 of \d+ kernels of backend cutlass can run here", meaning), (
            "sums of long K are another call's matter"
        )
        assert "4096" not in meaning

    def test_one_that_is_too_old_beside_one_that_fits(self, ask, site):
        site("flash-attn", "2.5.0", "flash_attn/__init__.py")
        site("vllm", "0.33.0", "vllm/__init__.py", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
        fact = self.about(ask, "flash_attn")
        assert fact["what"].startswith("flash_attn 2.5.0 is installed, >=2.7,<3 is needed (flash-attn, ")
        assert "; vllm 0.33.0 (vllm, " in fact["what"]
        assert fact["meaning"].startswith("2 of ")


@pytest.mark.usefixtures("an_h200")
class TestKnownDefects:
    """Of kernels that could run here: each is a note with the report and its fix."""

    @staticmethod
    def told(ask, monkeypatch, packages):
        HUB.restore()
        monkeypatch.setattr(HUB, "machine", SimulatedMachine({"torch": "2.11.0", "triton": "3.7.1", **packages}))
        found = facts(ask("doctor", "--json"), "note")
        return {fact["what"].rpartition(" ")[2]: fact for fact in found if fact["what"].startswith("known defect of ")}

    def test_those_of_what_is_installed_are_reported(self, ask, monkeypatch):
        told = self.told(ask, monkeypatch, {"flashinfer": "0.6.10"})
        attention = ("fa2_prefill", "fa2_sinks", "fa2_ragged", "xqa", "mla_fa2", "mla_fa3")
        assert set(told) == {f"flashinfer.{name}" for name in (*attention, "cutlass_experts_mxfp4")}
        assert "https://github.com/flashinfer-ai/flashinfer/issues/3130" in told["flashinfer.mla_fa3"]["meaning"]
        assert "flashinfer-python>=0.6.11" in told["flashinfer.mla_fa3"]["remedy"]
        assert "never selected for window_left: True; causal: False" in told["flashinfer.fa2_prefill"]["meaning"]

    def test_a_version_without_them_lacks_the_notes(self, ask, monkeypatch):
        assert set(self.told(ask, monkeypatch, {"flashinfer": "0.6.18"})) == {
            "flashinfer.fa2_prefill",
            "flashinfer.fa2_sinks",
            "flashinfer.fa2_ragged",
        }

    def test_those_of_what_is_not_installed_or_of_other_devices_are_not(self, ask, monkeypatch):
        assert self.told(ask, monkeypatch, {}) == {}


class TestTrust:
    def test_what_would_be_first_is_summed_up_with_the_command(self, ask):
        stated = published("cpu", evidence="https://example.com/fast", figure="2.1x")
        register("vendor", record("vendor.fast", standings=(stated,)))
        fact = about(ask("doctor", "--json"), "would rank first")
        assert "vendor.fast would rank first on" in fact["what"]
        assert "for plain calls of attention the next best kernel runs" in fact["meaning"]
        assert "kernelhub warmup --model NAME" in fact["remedy"]
        assert "kernelhub verify attention --backend vendor.fast" in fact["remedy"]

    def test_what_was_verified_here_is_counted(self, ask, tmp_path, monkeypatch):
        monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path))
        kernelhub.reload()
        facets = {"num_q_heads": 2, "num_kv_heads": 2, "head_dim_qk": 16, "head_dim_vo": 16}
        kernelhub.verify("attention", backend="torch.blocked", facets=facets, token_counts=[1, 17], device="cpu")
        fact = about(ask("doctor", "--json"), "problem classes")
        assert fact["what"].startswith("1 kernels verified for 1 problem classes on")


class TestADriverThatTorchCannotUse:
    @pytest.fixture
    def driver(self, monkeypatch):
        from kernelhub.probes.finding import found

        monkeypatch.setattr(machine_facts, "driver", lambda: found("NVIDIA driver", "580.1", "NVIDIA driver 580.1"))

    @pytest.mark.usefixtures("driver")
    def test_a_torch_for_cpus_is_named_as_the_reason(self, ask, monkeypatch):
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", None)
        fact = about(ask("doctor", "--json"), "no GPU for torch")
        assert fact["status"] == "note"
        assert "built for CPUs only" in fact["meaning"]
        assert "CUDA build of torch" in fact["remedy"]

    @pytest.mark.usefixtures("driver")
    def test_devices_hidden_by_a_variable_are_named_as_the_reason(self, ask, monkeypatch):
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert "CUDA_VISIBLE_DEVICES is ''" in about(ask("doctor", "--json"), "no GPU for torch")["meaning"]


class TestWrongSettings:
    @pytest.mark.parametrize(
        ("name", "text", "what"),
        [
            ("KERNELHUB_FORSE", "torch", "did you mean KERNELHUB_FORCE?"),
            ("KERNELHUB_STRICT", "maybe", "'maybe' is neither true"),
            ("KERNELHUB_FORCE", "tritn", "did you mean triton?"),
            ("KERNELHUB_CONFIG", "/nowhere/kernelhub.toml", "No such file or directory"),
        ],
    )
    def test_it_is_a_line_with_the_reason_and_exit_1(self, ask, monkeypatch, name, text, what):
        monkeypatch.setenv(name, text)
        answer = ask("doctor", "--json")
        assert answer.code == 1
        (problem,) = facts(answer, "problem")
        assert what in problem["what"]
        assert name in problem["remedy"]
        assert about(answer, "triton") is not None

    def test_a_right_one_is_reported_as_being_in_force(self, ask, monkeypatch):
        monkeypatch.setenv("KERNELHUB_PREFER", "torch.sdpa")
        assert about(ask("doctor", "--json"), "KERNELHUB_PREFER=torch.sdpa")["status"] == "ok"

    def test_what_a_config_file_says_is_reported(self, ask, monkeypatch, tmp_path):
        path = tmp_path / "kernelhub.toml"
        path.write_text('prefer = "torch"\n')
        monkeypatch.setenv("KERNELHUB_CONFIG", str(path))
        assert about(ask("doctor", "--json"), f"config file {path}")["meaning"] == "prefer torch"


class TestBrokenThings:
    def test_a_broken_plugin_is_a_note_with_the_reason(self, ask, broken_plugin):
        answer = ask("doctor", "--json")
        assert answer.code == 0
        fact = about(answer, f"backend {broken_plugin}")
        assert fact["status"] == "note"
        assert "libsunken.so" in fact["meaning"]
        assert "KERNELHUB_PLUGINS" in fact["remedy"]

    def test_a_cache_that_cannot_be_written_is_a_note(self, ask, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
        fact = about(ask("doctor", "--json"), "is not a folder")
        assert fact["status"] == "note"
        assert "TRITON_CACHE_DIR" in fact["remedy"]

    def test_a_compiler_that_is_not_there_is_a_note(self, ask, monkeypatch):
        monkeypatch.setenv("CC", "no-such-compiler")
        fact = about(ask("doctor", "--json"), "CC=no-such-compiler")
        assert (fact["status"], "gcc" in fact["remedy"]) == ("note", True)

    def test_without_a_compiler_a_checkout_says_what_runs_on_a_cpu(self, ask, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler")
        fact = about(ask("doctor", "--json"), "CXX=no-such-compiler")
        assert (fact["status"], fact["meaning"]) == ("note", "torch's operators run on this CPU")
        assert "g++" in fact["remedy"]

    def test_a_torch_that_does_not_import_is_a_problem_and_no_crash(self, ask_shell, tmp_path):
        before = f"sys.modules.pop('torch', None); sys.path.insert(0, {str(tmp_path)!r})"
        folder = tmp_path / "torch"
        folder.mkdir()
        (folder / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
        answer = ask_shell("doctor", "--json", before=before)
        assert answer.code == 1
        (problem,) = facts(answer, "problem")
        assert "libcudart.so.13" in problem["meaning"]
        assert "reinstall torch" in problem["remedy"]


class TestAsAProcess:
    def test_with_a_home_that_cannot_be_written_it_answers(self, ask_shell, tmp_path):
        home = tmp_path / "home"
        home.write_text("a file where a folder should be")
        answer = ask_shell("doctor", env={"HOME": str(home)})
        assert answer.code == 0
        assert f"{home} is not a folder" in answer.out
        assert "\x1b" not in answer.out

    def test_without_rich_it_answers_and_says_what_rich_is_for(self, ask_shell):
        answer = ask_shell("doctor", "--all", before="sys.modules['rich'] = None")
        assert answer.code == 0
        assert "rich is not installed" in answer.out
        assert "progress bar" in answer.out
        assert "\n  rich  pip install" in ask_shell("doctor", before="sys.modules['rich'] = None").out

    def test_python_is_held_against_the_range_of_the_package(self, monkeypatch):
        monkeypatch.setattr(sys, "version_info", (3, 99, 0))
        monkeypatch.setattr(machine_facts, "_own_metadata", lambda: {"requires-python": [">=3.10,<3.14"]})
        fact = machine_facts.python()
        assert (fact.status, fact.what) == ("note", "Python 3.99.0")


@pytest.mark.parametrize("text", ["import os; os._exit(0)", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"])
def test_a_plugin_that_ends_the_process_is_found_out_in_a_child(ask, tmp_path, monkeypatch, text):
    info = tmp_path / "deadly-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: deadly\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kernelhub.backends]\ndeadly = deadly_kernels\n")
    (tmp_path / "deadly_kernels.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KERNELHUB_PLUGINS", "all")
    fact = about(ask("doctor", "--probe-plugins", "--json"), "plugin deadly (deadly 1.0")
    assert fact["status"] == "note"
    assert "importing it ended it" in fact["meaning"]


class TestLinks:
    """Two GPUs, as the probe of their pairs found them."""

    @pytest.fixture
    def pairs(self, monkeypatch):
        def found(*changes, failure=""):
            good = Pair(0, 1, nvlink=True, works=True, atomics=True)
            made = tuple(dataclasses.replace(good, **change) for change in changes)
            monkeypatch.setattr(link_facts, "gpu_uuids", lambda: ("GPU-0", "GPU-1"))
            monkeypatch.setattr(link_facts, "probe_peers", lambda gpus: PeerFacts(made, failure))

        return found

    def test_pairs_that_are_alike_are_one_line(self, ask, pairs):
        pairs({}, {"source": 1, "target": 0})
        assert about(ask("doctor", "--json"), "every pair of GPUs: NVLink")["status"] == "ok"

    def test_a_pair_that_loses_writes_is_named(self, ask, pairs):
        pairs({}, {"source": 1, "target": 0, "works": False, "nvlink": False, "why": "written values did not arrive"})
        fact = about(ask("doctor", "--json"), "1 to 0: not connected")
        assert fact["status"] == "note"
        assert "written values did not arrive" in fact["meaning"]
        assert about(ask("doctor", "--json"), "0 to 1: NVLink")["status"] == "ok"

    def test_a_probe_that_fails_and_settings_of_nccl_are_notes(self, ask, pairs, monkeypatch):
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
        pairs(failure="the probe of peer access did not end within 60 s")
        answer = ask("doctor", "--json")
        assert "did not end" in about(answer, "peer access between GPUs")["meaning"]
        assert about(answer, "NCCL_P2P_DISABLE=1")["remedy"] == "unset NCCL_P2P_DISABLE"

    def test_little_shared_memory_is_a_note(self, tmp_path):
        assert link_facts.shared_memory(tmp_path).status == "ok"
        assert link_facts.shared_memory(tmp_path / "missing").status == "note"
