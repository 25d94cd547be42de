"""vLLM's variables as a policy: what each means, what is stronger, and that wrong ones are told and never obeyed."""

from __future__ import annotations

import difflib
import itertools
import logging
import re

import pytest
import torch

import kernelhub
from kernelhub.cli.matrix import Furnished
from kernelhub.cli.variables import read_variables
from kernelhub.compat.env import flag, translate
from kernelhub.compat.env.attention import _MLA, ATTENTION
from kernelhub.compat.env.experts import EXPERTS
from kernelhub.compat.env.gemm import GEMM
from kernelhub.compat.env.libraries import LIBRARIES
from kernelhub.compat.env.translation import LOOK_ALIKES, SUCCESSORS, VARIABLES
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError, NoKernel
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from tests.dispatch.backends import record, register
from tests.providers.wheels import wheel

PAGED = {"op": "paged_attention", "device": "H200"}
EVERYTHING = Furnished()  # every library installed


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, no_engine_variables: None):
    """Set variables as a shell would, and have kernelhub read them."""

    def set_them(**variables: str) -> None:
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        kernelhub.reload()

    return set_them


def only(environ: dict[str, str]):
    (found,) = translate(environ)
    return found


class TestMeaning:
    """Each value says one thing, about one op, and only where the engine meant it."""

    @pytest.mark.parametrize(
        ("name", "text", "kind", "op", "names"),
        [
            ("VLLM_ATTENTION_BACKEND", "FLASH_ATTN", "requests", "paged_attention", ("flash_attn",)),
            ("VLLM_ATTENTION_BACKEND", "flashinfer", "requests", "paged_attention", ("flashinfer",)),
            ("VLLM_ATTENTION_BACKEND", "FLASHINFER", "prefers", "attention", ("flashinfer",)),
            ("VLLM_ATTENTION_BACKEND", "TRITON_ATTN_VLLM_V1", "requests", "paged_attention", ("triton",)),
            ("VLLM_ATTENTION_BACKEND", "FLASHMLA", "requests", "mla_attention", ("flash_mla",)),
            ("VLLM_ATTENTION_BACKEND", "CUTLASS_MLA", "requests", "mla_attention", ("cutlass",)),
            ("VLLM_USE_DEEP_GEMM", "0", "disables", "*", ("deep_gemm",)),
            ("VLLM_USE_DEEP_GEMM", "1", "prefers", "fp8_gemm", ("deep_gemm",)),
            ("VLLM_USE_DEEP_GEMM_E8M0", "0", "disables", "fp8_gemm", ("deep_gemm.*e8m0*",)),
            ("VLLM_MOE_USE_DEEP_GEMM", "0", "disables", "fused_moe", ("deep_gemm",)),
            ("VLLM_USE_FLASHINFER_MOE_FP4", "1", "prefers", "fused_moe", ("flashinfer",)),
            ("VLLM_USE_FLASHINFER_MOE_FP8", "0", "disables", "fused_moe", ("flashinfer",)),
            ("VLLM_FLASHINFER_MOE_BACKEND", "latency", "disables", "fused_moe", ("flashinfer.*cutlass*",)),
            ("VLLM_FLASHINFER_MOE_BACKEND", "throughput", "disables", "fused_moe", ("flashinfer.*trtllm*",)),
            ("VLLM_NVFP4_GEMM_BACKEND", "flashinfer-cudnn", "requests", "fp4_gemm", ("flashinfer.*cudnn*",)),
            ("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "0", "disables", "fp8_gemm", ("flashinfer",)),
            ("VLLM_DISABLE_FLASHINFER_PREFILL", "1", "disables", "attention", ("flashinfer",)),
            ("VLLM_USE_CUDNN_PREFILL", "1", "prefers", "attention", ("cudnn", "flashinfer.*cudnn*")),
            (
                "VLLM_USE_TRTLLM_RAGGED_DEEPSEEK_PREFILL",
                "true",
                "prefers",
                "attention",
                ("flashinfer.*trtllm*", "flashinfer.*xqa*"),
            ),
            ("VLLM_FLASH_ATTN_VERSION", "3", "disables", "*", ("flash_attn.*fa2*", "flash_attn.*fa4*")),
            ("FORCE_NUM_KV_SPLITS", "4", "prefers", "mla_attention", ("*.split_kv_fixed*", "*.fixed*")),
            (
                "VLLM_DISABLED_KERNELS",
                "FlashInferCudnnNvFp4LinearKernel",
                "disables",
                "fp4_gemm",
                ("flashinfer.*cudnn*",),
            ),
        ],
    )
    def test_a_value_is_this_override(self, name, text, kind, op, names) -> None:
        found = only({name: text})
        assert not found.problem
        assert found.says
        assert (op, names) in [(override.ops, override.names) for override in getattr(found.meaning, kind)]

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("VLLM_ATTENTION_BACKEND", "CUSTOM"),
            ("VLLM_ATTENTION_BACKEND", "FLEX_ATTENTION"),
            ("VLLM_ATTENTION_BACKEND", "auto"),
            ("VLLM_USE_DEEP_GEMM_E8M0", "1"),
            ("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "1"),
            ("VLLM_DISABLE_FLASHINFER_PREFILL", "0"),
            ("VLLM_HAS_FLASHINFER_CUBIN", "1"),
            ("FLASHINFER_CUDA_ARCH_LIST", "9.0a"),
        ],
    )
    def test_what_chooses_no_kernel_here_says_so_and_overrides_nothing(self, name, text) -> None:
        found = only({name: text})
        assert (found.problem, found.meaning.overrides) == ("", ())
        assert found.says

    def test_every_override_has_its_place_and_how_to_take_it_back(self) -> None:
        for item in translate({"VLLM_USE_DEEP_GEMM": "0", "VLLM_ATTENTION_BACKEND": "FLASHINFER"}):
            for override in item.meaning.overrides:
                assert (override.source, override.origin) == ("engine", f"{item.name}={item.text}")
                assert override.undo == f"unset {item.name}, or set KERNELHUB_IGNORE_VLLM_ENV=1"

    def test_every_op_that_is_requested_exists_and_has_the_facets_that_limit_the_override(self) -> None:
        _ = HUB.settings
        texts = ["0", "1", "2", "latency", "throughput", "masked_gemm", "cutlass", "flashinfer-cudnn"]
        texts += ["TritonFp8BlockScaledMMKernel", "FLASHINFER", "FLASHMLA", "TORCH_SDPA"]
        overrides = [
            override
            for variable, text in itertools.product(VARIABLES, texts)
            for item in translate({variable: text})
            for override in item.meaning.overrides
        ]
        assert len(overrides) > 40
        for override in overrides:
            HUB.registry.check_op(override.ops, override.origin)
            for constraint in override.where:
                facets = HUB.registry.contracts[override.ops].schema.facets
                assert set(constraint.fields) <= set(facets)
                values = getattr(constraint, "values", ())
                allowed = facets[constraint.fields[0]].values
                assert not allowed or set(values) <= set(allowed)


class TestWhereItHolds:
    """An override about one format, phase or device leaves the others alone."""

    def test_only_prefill_of_latent_attention_is_kept_from_flashinfer(self, environment) -> None:
        environment(VLLM_DISABLE_FLASHINFER_PREFILL="1")
        codes = {}
        for width in (192, 128):
            facets = {"head_dim_qk": width, "head_dim_vo": 128, "q_len": "any", "ragged": True}
            selection = kernelhub.explain("attention", device="H200", machine=EVERYTHING, **facets)
            (decision,) = [item for item in selection.decisions if item.kernel == "flashinfer.fa2_ragged"]
            codes[width] = decision.code
            if decision.code == "disabled":
                assert decision.reason == "disabled by VLLM_DISABLE_FLASHINFER_PREFILL=1"
                remedy = "unset VLLM_DISABLE_FLASHINFER_PREFILL, or set KERNELHUB_IGNORE_VLLM_ENV=1"
                assert decision.remedy == remedy
        assert codes == {192: "disabled", 128: "supported"}

    def test_a_request_for_a_library_of_gpus_leaves_the_cpu_alone(self, environment) -> None:
        environment(VLLM_ATTENTION_BACKEND="FLASH_ATTN")
        selection = kernelhub.explain(**PAGED | {"machine": EVERYTHING})
        assert (selection.selected, selection.source) == ("flash_attn.fa3", "engine")
        cpu = kernelhub.explain("paged_attention", device="CPU")
        assert cpu.source != "engine"


class TestWhoIsStronger:
    def test_it_decides_where_nothing_else_was_said(self, environment) -> None:
        environment(VLLM_ATTENTION_BACKEND="TORCH_SDPA")
        selection = kernelhub.explain(**PAGED)
        assert selection.kernel is not None
        assert (selection.kernel.backend, selection.source, selection.explicit) == ("torch", "engine", True)
        assert selection.because == "VLLM_ATTENTION_BACKEND=TORCH_SDPA"

    @pytest.mark.parametrize("name", ["KERNELHUB_FORCE", "KERNELHUB_PREFER"])
    def test_kernelhub_s_variables_win(self, environment, name) -> None:
        environment(VLLM_ATTENTION_BACKEND="TORCH_SDPA", **{name: "triton"})
        selection = kernelhub.explain(**PAGED)
        assert selection.kernel is not None
        assert selection.kernel.backend == "triton"
        assert selection.source in ("force", "environment")

    def test_a_preference_for_another_op_does_not_weaken_it(self, environment) -> None:
        environment(VLLM_ATTENTION_BACKEND="TORCH_SDPA", KERNELHUB_PREFER="fp8_gemm=triton")
        assert kernelhub.explain(**PAGED).source == "engine"

    def test_the_config_file_wins(self, environment, tmp_path) -> None:
        pytest.importorskip("tomllib", reason="needs tomllib: 1 case")
        (tmp_path / "k.toml").write_text('prefer = "triton"')
        environment(VLLM_ATTENTION_BACKEND="TORCH_SDPA", KERNELHUB_CONFIG=str(tmp_path / "k.toml"))
        assert kernelhub.explain(**PAGED).source == "file"

    def test_code_wins(self, environment) -> None:
        environment(VLLM_ATTENTION_BACKEND="TORCH_SDPA")
        assert kernelhub.explain(**PAGED, backend="triton").source == "kwarg"
        with kernelhub.use(paged_attention="triton"):
            assert kernelhub.explain(**PAGED).source == "context"
        with kernelhub.use(prefer="triton"):
            assert kernelhub.explain(**PAGED).source == "context"
        kernelhub.configure(backend="triton")
        assert kernelhub.explain(**PAGED).source == "configure"

    def test_its_removal_holds_against_code_but_not_against_kernelhub_s_variables(self, environment) -> None:
        asked = {"op": "fp8_gemm", "device": "H200", "rows": "many", "machine": EVERYTHING}
        assert kernelhub.explain(**asked).selected == "deep_gemm.fp8_blocks"
        environment(VLLM_USE_DEEP_GEMM="0")
        assert kernelhub.explain(**asked).selected != "deep_gemm.fp8_blocks"
        with pytest.raises(NoKernel, match="disabled by VLLM_USE_DEEP_GEMM=0"):
            kernelhub.fp8_gemm(**fp8_gemm_inputs(tokens=1, n=128, k=128), backend="deep_gemm")
        environment(KERNELHUB_PREFER="deep_gemm.fp8_blocks")
        assert kernelhub.explain(**asked).selected == "deep_gemm.fp8_blocks"
        environment(KERNELHUB_DISABLE="deep_gemm")
        selection = kernelhub.explain(**asked)
        (decision,) = [item for item in selection.decisions if item.kernel == "deep_gemm.fp8_blocks"]
        assert decision.reason == "disabled by KERNELHUB_DISABLE=deep_gemm"

    def test_batch_invariance_is_a_filter_that_kernelhub_s_own_variable_overrules(self, environment) -> None:
        environment(VLLM_BATCH_INVARIANT="1")
        selection = kernelhub.explain(**PAGED)
        assert selection.kernel is not None
        assert selection.kernel.batch_invariant
        assert "batch_variant" in {decision.code for decision in selection.decisions}
        environment(KERNELHUB_BATCH_INVARIANT="0")
        assert "batch_variant" not in {decision.code for decision in kernelhub.explain(**PAGED).decisions}

    def test_one_variable_switches_it_all_off(self, environment) -> None:
        environment(VLLM_ATTENTION_BACKEND="TORCH_SDPA", VLLM_BATCH_INVARIANT="1", KERNELHUB_IGNORE_VLLM_ENV="1")
        selection = kernelhub.explain(**PAGED)
        assert selection.source == "order"
        assert "batch_variant" not in {decision.code for decision in selection.decisions}

    def test_a_request_that_cannot_run_is_an_error_that_says_how_to_take_it_back(self, environment) -> None:
        environment(VLLM_ATTENTION_BACKEND="TORCH_SDPA", KERNELHUB_DISABLE="torch")
        q, cache = torch.zeros(1, 2, 16), torch.zeros(2, 16, 1, 16)
        table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        with pytest.raises(NoKernel, match="or set KERNELHUB_IGNORE_VLLM_ENV=1"):
            kernelhub.paged_attention(q, cache, cache, table, lengths)

    @pytest.mark.parametrize("name", [name for name, names in _MLA.items() if names == ("flash_attn",)])
    def test_a_backend_without_kernels_of_the_op_keeps_no_call_from_running(self, environment, name) -> None:
        """vLLM's FlashAttention has latent attention; the backend of that name here has none."""
        environment(VLLM_ATTENTION_BACKEND=name)
        selection = kernelhub.explain("mla_attention", device="H200")
        assert (selection.selected, selection.source) == ("gluon.decode", "order")
        (item,) = read_variables().engines
        assert read_variables().became_of(item) == (
            "ignored: mla_attention runs on flash_attn or fails, and no kernel of flash_attn is registered here for "
            "mla_attention"
        )

    def test_a_backend_registered_later_answers_to_a_variable_read_before(self, environment) -> None:
        environment(VLLM_ATTENTION_BACKEND="TOKENSPEED_MLA")
        assert kernelhub.explain("mla_attention", device="B200").source == "order"
        handle = register("tokenspeed", record("tokenspeed.fake", op="mla_attention"))
        selection = kernelhub.explain("mla_attention", device="B200")
        assert (selection.selected, selection.source) == ("tokenspeed.fake", "engine")
        handle.remove()


class TestWrong:
    @pytest.mark.parametrize(
        ("name", "text", "problem"),
        [
            ("VLLM_ATTENTION_BACKEND", "FLASHINFR", "'FLASHINFR' is not one of"),
            ("VLLM_ATTENTION_BACKEND", "flashinfr", "did you mean FLASHINFER?"),
            ("VLLM_FLASHINFER_MOE_BACKEND", "Latncy", "did you mean latency?"),
            ("VLLM_USE_DEEP_GEMM", "maybe", "neither true"),
            ("VLLM_FLASH_ATTN_VERSION", "5", "write 2, 3 or 4"),
            ("FORCE_NUM_KV_SPLITS", "many", "not a positive number"),
            ("VLLM_ATTENTION_BACKENDS", "FLASHINFER", "did you mean VLLM_ATTENTION_BACKEND?"),
            ("VLLM_USE_DEEPGEMM", "1", "did you mean VLLM_USE_DEEP_GEMM?"),
            ("FORCE_NUM_KV_SPLIT", "4", "did you mean FORCE_NUM_KV_SPLITS?"),
            ("DG_JIT_CACHE_DIRS", "/tmp", "did you mean DG_JIT_CACHE_DIR?"),
            ("VLLM_ALL2ALL_BACKEND", "naive", "write --all2all-backend"),
            ("DG_CACHE_DIR", "/tmp", "write DG_JIT_CACHE_DIR"),
            ("FLASHINFER_DISABLE_JIT", "0", "as true"),
            ("FLASHINFER_CUBIN_DIR", "/nowhere/at/all", "there is no folder"),
            ("DG_JIT_CACHE_DIR", "/dev/null/cache", "not a writable folder"),
        ],
    )
    def test_it_is_reported_with_what_would_be_right_and_overrides_nothing(self, name, text, problem) -> None:
        found = only({name: text})
        assert problem in found.problem
        assert found.meaning.overrides == ()

    @pytest.mark.parametrize("text", ["", " "])
    def test_an_empty_one_is_the_same_as_none(self, text) -> None:
        assert translate(dict.fromkeys(VARIABLES, text)) == ()

    def test_it_is_a_warning_and_not_an_error(self, environment, caplog) -> None:
        with caplog.at_level(logging.WARNING, "kernelhub"):
            environment(VLLM_USE_DEEP_GEMM="perhaps", VLLM_ATTENTION_BACKEND="TOKENSPEED_MLA")
            kernelhub.reload()
        assert kernelhub.explain(**PAGED).source == "order"
        assert [message for message in caplog.messages if "VLLM_USE_DEEP_GEMM=perhaps is ignored" in message][1:] == []
        assert "VLLM_ATTENTION_BACKEND=TOKENSPEED_MLA is ignored" in caplog.text

    def test_names_that_only_look_alike_and_other_variables_are_left_alone(self) -> None:
        ordinary = dict.fromkeys([*LOOK_ALIKES, "VLLM_LOGGING_LEVEL", "VLLM_CACHE_ROOT", "PATH", "FLASHINFER_X"], "1")
        assert translate(ordinary) == ()
        for name in LOOK_ALIKES:
            assert difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8), f"{name} need not be listed"

    def test_a_removed_name_that_is_obeyed_names_its_successor(self) -> None:
        assert only({"VLLM_ATTENTION_BACKEND": "FLASHINFER"}).successor == "--attention-backend NAME"
        assert only({"VLLM_USE_DEEP_GEMM": "1"}).successor == ""

    def test_no_name_is_in_two_tables(self) -> None:
        assert len(VARIABLES) == len(ATTENTION) + len(GEMM) + len(EXPERTS) + len(LIBRARIES)
        assert not set(VARIABLES) & (set(SUCCESSORS) | LOOK_ALIKES)

    def test_kernelhub_s_own_misspelt_switch_is_still_an_error(self, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_IGNORE_VLM_ENV", "1")
        with pytest.raises(ConfigurationError, match=r"did you mean KERNELHUB_IGNORE_VLLM_ENV\?"):
            kernelhub.reload()
        assert did_you_mean("KERNELHUB_IGNORE_VLM_ENV", ["KERNELHUB_IGNORE_VLLM_ENV"])


class TestFlag:
    def test_it_is_read_with_the_settings(self, environment) -> None:
        environment()
        assert flag("VLLM_USE_DEEP_GEMM", True)
        environment(VLLM_USE_DEEP_GEMM="off")
        assert not flag("VLLM_USE_DEEP_GEMM", True)
        environment(VLLM_USE_DEEP_GEMM="perhaps")
        assert flag("VLLM_USE_DEEP_GEMM", True)
        environment(VLLM_USE_DEEP_GEMM="0", KERNELHUB_IGNORE_VLLM_ENV="1")
        assert flag("VLLM_USE_DEEP_GEMM", True)


@pytest.mark.parametrize("version", ["0.6.1", "0.6.18.post1", "0.7.2.post1"])
def test_nothing_that_flashinfer_reads_is_called_a_misspelt_name(version) -> None:
    read = re.compile(r'(?:environ\.get|getenv)\(\s*"(FLASHINFER_\w+)"')
    files = wheel("flashinfer-python", version).rglob("*.py")
    names = {name for file in files for name in read.findall(file.read_text())}
    assert len(names) > 20
    assert [item.name for item in translate(dict.fromkeys(names, "1")) if "nobody reads" in item.problem] == []
