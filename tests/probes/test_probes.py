"""Probes answer yes or no with a reason and a remedy; they never raise, import or write."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch

from kernelhub.dispatch.constraint import Package
from kernelhub.dispatch.machine import Machine, SimulatedMachine
from kernelhub.errors import ConfigurationError
from kernelhub.probes import cache, device, toolchain
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.finding import Finding, found
from kernelhub.probes.package import fits, package


@pytest.fixture
def site(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def installed(site: Path, name: str, version: str | None, text: str = "raise SystemExit('imported')\n") -> None:
    """A package whose import would end the process."""
    (site / name).mkdir()
    (site / name / "__init__.py").write_text(text)
    if version is not None:
        info = site / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


class TestPackage:
    @pytest.mark.parametrize(
        ("version", "wanted", "ok"),
        [
            ("0.6.10", ">=0.6.2", True),
            ("0.6.1", ">=0.6.2", False),
            ("0.6.16.post3", ">=0.6.16", True),
            ("0.6.7rc1", ">=0.6.7", False),
            ("0.6.7rc1", ">=0.6.6", True),
            ("0.6.7+cu130", ">=0.6.7,<0.7", True),
            ("3.10.0", ">=3.6,<3.10", False),
        ],
    )
    def test_versions_are_compared_as_versions(self, site: Path, version: str, wanted: str, ok: bool) -> None:
        installed(site, "fakelib_v", version)
        finding = package("fakelib_v", wanted)
        assert finding.ok is ok
        assert finding.value == version
        assert finding.code == ("found" if ok else "package_version")
        assert "fakelib_v" not in sys.modules

    def test_a_missing_package_has_its_install_command_as_remedy(self) -> None:
        finding = package("no_such_package", ">=2", distribution="no-such-package")
        assert (finding.ok, finding.code) == (False, "package_missing")
        assert finding.remedy == 'pip install "no-such-package>=2"'

    @pytest.mark.parametrize("version", [None, "", "0.0.0+unknown", "not a version"])
    def test_a_version_that_cannot_be_told_is_not_taken_for_good(self, site: Path, version: str | None) -> None:
        installed(site, "fakelib_u", version)
        finding = package("fakelib_u", ">=1")
        assert (finding.ok, finding.code) == (False, "package_version")
        assert package("fakelib_u").ok

    @pytest.mark.fault("package_without_code")
    def test_an_empty_folder_of_the_name_is_not_a_package(self, site: Path) -> None:
        (site / "fakelib_n").mkdir()
        assert package("fakelib_n").code == "package_broken"

    def test_a_module_without_a_spec_is_broken_not_fatal(self, monkeypatch) -> None:
        module = type(sys)("fakelib_s")
        module.__spec__ = None
        monkeypatch.setitem(sys.modules, "fakelib_s", module)
        assert package("fakelib_s").code == "package_broken"

    def test_submodules_are_refused_since_finding_one_imports_its_parent(self) -> None:
        with pytest.raises(ValueError, match="top-level"):
            package("torch.nn")

    def test_specifiers(self) -> None:
        assert fits("3.7.1", ">=3.6,<3.10")
        assert fits("1.0", "")


class TestCache:
    def test_a_folder_that_can_be_made_is_writable_and_is_not_made(self, tmp_path: Path) -> None:
        folder = tmp_path / "a" / "b"
        assert cache.writable(folder, "X_CACHE").ok
        assert not folder.exists()

    def test_a_file_in_the_way_is_a_reason_with_the_variable(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        finding = cache.writable(tmp_path / "file" / "b", "X_CACHE")
        assert finding.code == "cache_unwritable"
        assert "X_CACHE" in finding.remedy

    def test_triton_s_variables_move_its_folder(self, monkeypatch) -> None:
        monkeypatch.setenv("TRITON_HOME", "/one")
        assert cache.triton_cache_folder() == Path("/one/.triton/cache")
        monkeypatch.setenv("TRITON_CACHE_DIR", "/two")
        assert cache.triton_cache_folder() == Path("/two")


class TestDevice:
    @pytest.mark.parametrize(
        ("name", "family", "arch"),
        [
            ("H200", "hopper", "sm_90"),
            ("b200", "blackwell", "sm_100"),
            ("B300", "blackwell", "sm_103"),
            ("GB200", "blackwell", "sm_100"),
            ("NVIDIA GB300", "blackwell", "sm_103"),
            ("GH200", "hopper", "sm_90"),
            ("RTX 5090", "blackwell_rtx", "sm_120"),
            ("rtx-5090", "blackwell_rtx", "sm_120"),
            ("A100", "ampere", "sm_80"),
            ("L40S", "ada", "sm_89"),
            ("MI300X", "cdna3", "gfx942"),
            ("CPU", "cpu", "cpu"),
            ("Zen4", "cpu", "avx512_bf16"),
            ("XEON", "cpu", "amx"),
            ("sm_86", "ampere", "sm_86"),
            ("sm_137", "unknown", "sm_137"),
            ("sm_90a", "hopper", "sm_90"),
        ],
    )
    def test_devices_are_simulated_by_name_or_architecture(self, name: str, family: str, arch: str) -> None:
        facts = device.simulated(name)
        assert (facts.family, facts.arch, facts.simulated) == (family, arch, True)

    @pytest.mark.parametrize(
        ("capability", "flags", "arch"),
        [
            ("avx2", {"avx512_bf16", "avx512vbmi", "amx_bf16"}, "avx2"),  # as ATEN_CPU_CAPABILITY says
            ("avx512", {"avx512f"}, "avx512"),
            ("avx512", {"avx512_bf16"}, "avx512"),  # Cooper Lake, whose library of the wheel is that of AVX-512
            ("avx512", {"avx512_bf16", "avx512vbmi"}, "avx512_bf16"),
            ("avx512", {"avx512_bf16", "avx512vbmi", "amx_bf16"}, "amx"),
        ],
    )
    def test_a_cpu_is_named_by_what_multiplies_bfloat16(
        self, monkeypatch, capability: str, flags: set[str], arch: str
    ) -> None:
        monkeypatch.setattr(device, "cpu_flags", lambda: frozenset(flags))
        assert device.with_bfloat16(capability) == arch

    def test_an_unknown_name_lists_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"unknown device 'H2000' \(did you mean H200\?\); known: A100.*sm_90"):
            device.simulated("H2000")

    def test_facts_may_be_written_out(self) -> None:
        future = DeviceFacts("a future GPU", "cuda", "nvidia", "sm_200", (20, 0), 300, 1 << 20, simulated=True)
        assert future.family == "unknown"

    def test_facts_that_were_kept_by_hash_are_sent_to_other_processes_without_it(self) -> None:
        one, other = (DeviceFacts("a GPU", "cuda", "nvidia", "sm_90", (9, 0)) for _ in range(2))
        assert {one: "kept"}[other] == "kept"
        sent = DeviceFacts("a GPU", "cuda", "nvidia", "sm_90", (9, 0))
        assert pickle.dumps(one) == pickle.dumps(sent)
        assert pickle.loads(pickle.dumps(one)) == sent

    def test_the_cpu_s_facts_are_its_own(self) -> None:
        facts = device.facts(torch.device("cpu"))
        assert (facts.type, facts.family, facts.simulated) == ("cpu", "cpu", False)
        assert facts.num_sms >= 1

    @pytest.mark.gpu
    def test_a_gpu_s_facts_are_those_of_its_datasheet(self) -> None:
        facts = device.facts(torch.device("cuda", 0))
        assert facts.num_sms > 0
        assert facts.shared_memory_bytes >= 64 << 10
        listed = [known for known in device.SIMULATED.values() if known.capability == facts.capability]
        assert all(known.shared_memory_bytes == facts.shared_memory_bytes for known in listed)


class TestToolkit:
    def test_a_toolkit_that_is_not_where_cuda_home_says_is_a_reason(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        assert toolchain.nvcc().code == "toolkit_missing"

    @pytest.mark.parametrize("script", ["exit 1", "echo garbage", "echo release 13.0; exit 3"])
    @pytest.mark.fault("nvcc_broken")
    def test_a_compiler_that_does_not_answer_is_broken(self, tmp_path: Path, script: str, monkeypatch) -> None:
        (tmp_path / "bin").mkdir()
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\n{script}\n")
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        assert toolchain.nvcc().code == "toolkit_broken"

    def test_its_version_is_read(self, tmp_path: Path, monkeypatch) -> None:
        (tmp_path / "bin").mkdir()
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        assert toolchain.nvcc().value == "13.0"

    def test_the_driver_is_found_or_its_absence_explained(self) -> None:
        assert toolchain.driver().reason


class TestMachine:
    def test_a_probe_is_asked_once_until_it_is_forgotten(self, site: Path) -> None:
        machine, wanted = Machine(), Package("fakelib_m")
        assert not machine.package(wanted).ok
        installed(site, "fakelib_m", "1.0")
        import importlib

        importlib.invalidate_caches()
        assert not machine.package(wanted).ok
        machine.forget()
        assert machine.package(wanted).ok

    def test_a_simulated_machine_has_exactly_what_it_is_given(self) -> None:
        machine = SimulatedMachine({"triton": "3.7.1"}, variables={"X": "1"})
        assert machine.package(Package("triton", ">=3.6")).ok
        assert machine.package(Package("torch")).code == "package_missing"
        assert (machine.variable("X"), machine.variable("HOME")) == ("1", "")

    def test_it_may_lack_what_libraries_compile_with_or_bring(self) -> None:
        machine = SimulatedMachine({}, lacks={"nvcc", "cubins"})
        assert machine.ask("compiler of one", _found, "nvcc").code == "toolkit_missing"
        assert machine.ask("compiler of another", _found, "nvcc").remedy
        assert machine.ask("binaries", _found, "cubins").code == "cubins_missing"
        assert machine.ask("modules", _found, "modules").ok
        assert machine.ask("anything else", _found).ok

    def test_a_word_that_means_nothing_is_an_error(self) -> None:
        with pytest.raises(ConfigurationError, match=r"'gcc' is not one of nvcc, c\+\+, modules, cubins"):
            SimulatedMachine({}, lacks=["gcc"])


def _found() -> Finding:
    return found("x", None, "it is here")
