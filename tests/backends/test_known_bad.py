"""Where a library is known to give wrong numbers its kernel is refused with the report, and beside that it is not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.dispatch.selection import Decision
from kernelhub.probes.finding import lacking
from tests.dispatch.backends import OF_TRUST

ROOT = Path(__file__).parents[2]

FLASHINFER = "https://github.com/flashinfer-ai/flashinfer"
QUANTISERS = f"{FLASHINFER}/blob/v0.6.18.post1/csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh"
GROUPS: dict[str, Any] = {"granularity": "group", "column": True}
_192 = {"head_dim_qk": 192, "head_dim_vo": 128}
PACKED_MXFP4: dict[str, Any] = {"weights": "mxfp4", "weight_layout": "experts.mxfp4.cutlass_sm90.v1"}
WINDOW: dict[str, Any] = {"window_left": True, "q_len": "many"}
OLD_DEEP_GEMM = {("deep_gemm names", "fp8_fp4_mqa_logits"): lacking("deep_gemm", "symbol_missing", "has it not", "")}


@dataclass(frozen=True)
class Call:
    """A problem on a machine that need not be here."""

    device: str
    packages: Mapping[str, str]
    facets: Mapping[str, Any] = field(default_factory=dict)
    findings: Mapping[Any, Any] = field(default_factory=dict)

    def decision(self, op: str, kernel: str) -> Decision:
        machine = SimulatedMachine({"triton": "3.7.1", **self.packages}, findings=self.findings)
        selection = kernelhub.explain(op, device=self.device, machine=machine, **self.facets)
        return next(decision for decision in selection.decisions if decision.kernel == kernel)


@dataclass(frozen=True)
class Known:
    """A defect: a call that meets it, and calls beside it."""

    op: str
    kernel: str
    issue: str
    bad: tuple[Call, ...]
    beside: tuple[Call, ...]

    def __str__(self) -> str:
        return f"{self.kernel} {self.op} {self.issue.rpartition('/')[2]}"


def flashinfer(version: str, device: str = "H200", **facets: Any) -> Call:
    return Call(device, {"flashinfer": version}, facets)


def with_cudnn(version: str, **facets: Any) -> Call:
    return Call("H200", {"flashinfer": version, "cudnn": "1.32.0"}, facets)


KNOWN = (
    Known(
        "paged_attention",
        "flashinfer.trtllm_gen",
        f"{FLASHINFER}/issues/4347",
        bad=(flashinfer("0.6.16.post1", "B200", page_size=256), flashinfer("0.6.18", "B300", page_size=1024)),
        beside=(flashinfer("0.6.16.post1", "B200", page_size=64),),
    ),
    Known(
        "paged_attention",
        "flashinfer.trtllm_context",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/18925",
        bad=(
            flashinfer("0.6.18", "B200", q_len="many", causal=True),
            flashinfer("0.7.2.post1", "B300", q_len="many", causal=True, sinks=True),
        ),
        beside=(),
    ),
    Known(
        "paged_attention",
        "cudnn.sdpa_paged",
        "https://github.com/NVIDIA/cudnn-frontend/pull/740",
        bad=tuple(
            Call("H200", {"cudnn": "1.32.0"}, {"causal": True, **facets})
            for facets in ({}, {"q_len": "many", "page_size": 256}, {"q_len": "any", "ragged": True, "lse": True})
        ),
        beside=(),
    ),
    Known(
        "paged_attention",
        "flashinfer.cudnn_prefill",
        "https://github.com/NVIDIA/cudnn-frontend/pull/740",
        bad=tuple(with_cudnn("0.7.2.post1", **facets) for facets in ({}, {"causal": True, "page_size": 64})),
        beside=(),
    ),
    *(
        Known(
            op,
            f"flashinfer.{kernel}",
            f"{FLASHINFER}/pull/4270",
            bad=tuple(with_cudnn(version) for version in ("0.6.1", "0.6.18.post1", "0.7.0.post1")),
            beside=beside,
        )
        for op, kernel, beside in (
            ("attention", "cudnn_ragged", (with_cudnn("0.7.1"), with_cudnn("0.7.2.post1", **_192))),
            ("paged_attention", "cudnn_decode", (with_cudnn("0.7.1"), with_cudnn("0.7.2.post1", page_size=64))),
            ("paged_attention", "cudnn_prefill", ()),
        )
    ),
    Known(
        "attention",
        "flashinfer.trtllm_ragged",
        f"{FLASHINFER}/issues/5252",
        bad=(flashinfer("0.6.18", "B300", **_192),),
        beside=(flashinfer("0.6.18", "B200", **_192),),
    ),
    Known(
        "mla_attention",
        "flashinfer.mla_trtllm",
        f"{FLASHINFER}/pull/4059",
        bad=(flashinfer("0.6.18", "B200", q_len="few", causal=True, num_heads=16),),
        beside=(
            flashinfer("0.6.18", "B200", q_len="few", causal=True, num_heads=64),
            flashinfer("0.6.12", "B300", num_heads=16),
        ),
    ),
    Known(
        "paged_attention",
        "flashinfer.fa2_prefill",
        f"{FLASHINFER}/issues/4972",
        bad=(
            flashinfer("0.6.18.post1", causal=False, **WINDOW),
            flashinfer("0.7.2.post1", "A100", causal=False, window_left=True, q_len="any", ragged=True),
            flashinfer("0.6.18.post1", "B200", causal=False, window_left=True, q_len="few"),
        ),
        beside=(
            flashinfer("0.6.18.post1", causal=True, **WINDOW),
            flashinfer("0.6.18.post1", causal=False, q_len="many"),
            flashinfer("0.6.18.post1", causal=False, window_left=True, q_len="one"),
        ),
    ),
    Known(
        "paged_attention",
        "flashinfer.fa2_sinks",
        f"{FLASHINFER}/issues/4972",
        bad=(flashinfer("0.6.18.post1", causal=False, sinks=True, head_dim_qk=64, **WINDOW),),
        beside=(flashinfer("0.6.18.post1", causal=True, sinks=True, head_dim_qk=64, **WINDOW),),
    ),
    Known(
        "attention",
        "flashinfer.fa2_ragged",
        f"{FLASHINFER}/issues/4972",
        bad=(flashinfer("0.6.18.post1", **WINDOW), flashinfer("0.6.1", "L40S", **WINDOW)),
        beside=(flashinfer("0.6.18.post1", causal=True, **WINDOW), flashinfer("0.6.18.post1")),
    ),
    Known(
        "paged_attention",
        "flashinfer.xqa",
        f"{FLASHINFER}/pull/4161",
        bad=(flashinfer("0.6.16.post4"), flashinfer("0.6.0", "RTX5090", window_left=True)),
        beside=(flashinfer("0.6.17"), flashinfer("0.7.2.post1", "B200", window_left=True)),
    ),
    Known(
        "paged_attention",
        "flashinfer.xqa",
        "https://github.com/sgl-project/sglang/pull/36806",
        bad=(flashinfer("0.6.18.post1", "sm_121"),),
        beside=(flashinfer("0.6.18.post1", "RTX5090"), flashinfer("0.6.18.post1", "H200")),
    ),
    *(
        Known(
            "mla_attention",
            kernel,
            f"{FLASHINFER}/issues/3130",
            bad=(flashinfer("0.6.10"), flashinfer("0.6.8.post1", q_len="many", causal=True)),
            beside=(flashinfer("0.6.11"), flashinfer("0.7.2.post1")),
        )
        for kernel in ("flashinfer.mla_fa2", "flashinfer.mla_fa3")
    ),
    Known(
        "fp8_gemm",
        "flashinfer.groupwise_cutlass",
        f"{FLASHINFER}/issues/4396",
        bad=(flashinfer("0.6.2", "B200", rows="few"), flashinfer("0.7.2.post1", "B300", rows="few")),
        beside=(flashinfer("0.6.1", "B200", rows="few"), flashinfer("0.7.2.post1", "B300", rows="many")),
    ),
    Known(
        "fused_moe",
        "flashinfer.cutlass_experts_mxfp4",
        f"{FLASHINFER}/issues/5438",
        bad=(flashinfer("0.6.10", **PACKED_MXFP4), flashinfer("0.6.15.post1", **PACKED_MXFP4)),
        beside=(flashinfer("0.6.9", **PACKED_MXFP4), flashinfer("0.6.18.post1", **PACKED_MXFP4)),
    ),
    Known(
        "quantize_nvfp4",
        "flashinfer.quantize_nvfp4",
        f"{FLASHINFER}/pull/3387",
        bad=(flashinfer("0.6.12", "B200", dtype="float16"), flashinfer("0.7.2.post1", "RTX5090", static=True)),
        beside=(),
    ),
    Known(
        "quantize_nvfp4",
        "flashinfer.quantize_nvfp4_kv",
        f"{FLASHINFER}/blob/v0.6.18.post1/csrc/fp4_kv_quantization.cu",
        bad=(flashinfer("0.6.12", "B200", dtype="float16"), flashinfer("0.7.2.post1", "RTX5090", static=True)),
        beside=(),
    ),
    *(
        Known(
            op,
            f"flashinfer.{op}",
            QUANTISERS,
            bad=(
                flashinfer("0.6.12", "B200", round_up=True, dtype="float16"),
                flashinfer("0.7.2.post1", "B300", round_up=True),
            ),
            beside=(),
        )
        for op in ("quantize_mxfp4", "quantize_mxfp8")
    ),
    *(
        Known(
            op,
            f"flashinfer.{op}",
            f"{FLASHINFER}/issues/2440",
            bad=(flashinfer("0.6.12", "B200", round_up=True), flashinfer("0.7.2.post1", "sm_121", round_up=True)),
            beside=(),
        )
        for op in ("quantize_mxfp4", "quantize_mxfp8")
    ),
    Known(
        "quantize_fp8",
        "flashinfer.quantize_fp8",
        f"{FLASHINFER}/pull/4019",
        bad=(flashinfer("0.6.18", "B200", **GROUPS), flashinfer("0.7.2.post1", "RTX5090", **GROUPS, ue8m0=True)),
        beside=(),
    ),
    *(
        Known(
            op,
            "deep_gemm.logits",
            "https://github.com/deepseek-ai/DeepGEMM/issues/392",
            bad=tuple(
                Call(device, {"deep_gemm": "2.2.0"}, {"k_scale": True}, OLD_DEEP_GEMM) for device in ("H200", "B200")
            ),
            beside=(Call("H200", {"deep_gemm": "2.5.0"}, {"k_scale": True}),),
        )
        for op in ("mqa_logits", "paged_mqa_logits")
    ),
    Known(
        "paged_attention",
        "flash_attn.fa4",
        "https://github.com/Dao-AILab/flash-attention/issues/2374",
        bad=(Call("B200", {"cutlass": "4.8.0"}, {"q_len": "many", "causal": True, "page_size": 64}),),
        beside=(Call("B200", {"cutlass": "4.8.0"}, {"q_len": "many", "causal": True, "page_size": 48}),),
    ),
    Known(
        "attention",
        "torch.sdpa",
        "https://github.com/pytorch/pytorch/issues/193893",
        bad=(Call("B200", {}, {"num_kv_heads": 4}), Call("B300", {}, {"num_kv_heads": 2, "causal": True})),
        beside=(
            Call("B200", {}, {"num_kv_heads": 8}),
            Call("H200", {}, {"num_kv_heads": 4}),
            Call("RTX5090", {}, {"num_kv_heads": 4}),
            Call("B200", {}, {"num_kv_heads": 4, "q_dtype": "float32", "kv_dtype": "float32"}),
        ),
    ),
    Known(
        "fp8_gemm",
        "torch.scaled_mm_rowwise",
        "https://github.com/pytorch/pytorch/issues/177651",
        bad=(Call("L40S", {"torch": "2.11.0"}, {"scaling": "row"}),),
        beside=(
            Call("L40S", {"torch": "2.12.0"}, {"scaling": "row"}),
            Call("H200", {"torch": "2.11.0"}, {"scaling": "row"}),
        ),
    ),
)


VLLM = {"vllm": "0.33.0"}
# Silent errors where a record ends before them: report, op, kernel, call, code of the limit.
LIMITS: dict[str, tuple[str, str, Call, str]] = {
    "vllm#52148": ("paged_attention", "flashinfer.fa2_prefill", flashinfer("0.6.18", sinks=True), "feature"),
    "vllm#49917": ("paged_attention", "flashinfer.fa2_prefill", flashinfer("0.6.18", "A100", head_dim_qk=512), "value"),
    "flashinfer#4299": ("attention", "flashinfer.fa2_ragged", flashinfer("0.6.18", head_dim_qk=72), "value"),
    "flashinfer#3578": (
        "paged_attention",
        "flashinfer.fa3_prefill",
        flashinfer("0.6.18", kv_dtype="float8_e4m3fn", kv_scale="value", causal=True, **WINDOW),
        "dtype",
    ),
    "flashinfer#1993": (
        "paged_attention",
        "flashinfer.trtllm_gen",
        flashinfer("0.6.0", "B200", head_dim_qk=256, page_size=16),
        "value",
    ),
    "flashinfer#3929": ("paged_attention", "flashinfer.trtllm_gen", flashinfer("0.6.16", "B200", q_len="few"), "value"),
    "flashinfer#3864": (
        "paged_attention",
        "flashinfer.trtllm_gen",
        flashinfer("0.6.14", "B200", kv_dtype="float8_e4m3fn", kv_scale="value", window_left=True),
        "dtype",
    ),
    "flashinfer#2348": (
        "paged_attention",
        "flashinfer.fa3_prefill",
        flashinfer("0.6.1", kv_dtype="float8_e4m3fn", kv_scale="value", q_len="many"),
        "dtype",
    ),
    "flashinfer#2577": (
        "fp4_gemm",
        "flashinfer.fp4_cudnn",
        flashinfer("0.6.12", "sm_121", a_format="nvfp4"),
        "capability",
    ),
    "flashinfer#3294": ("fused_moe", "flashinfer.cutlass_experts", flashinfer("0.6.18", "sm_121"), "capability"),
    "vllm#31609": (
        "fused_moe",
        "flashinfer.cutlass_experts_fp8",
        flashinfer(
            "0.6.18",
            "B200",
            weights="fp8_tensor",
            activation_dtype="float8_e4m3fn",
            static_scales=True,
            apply_router_weight_on_input=True,
        ),
        "feature",
    ),
    "flashinfer#3398": (
        "fp4_gemm",
        "flashinfer.fp4_cutlass",
        flashinfer("0.6.12", "RTX5090", a_format="nvfp4"),
        "capability",
    ),
    "flashinfer#4052": ("bmm_fp8", "flashinfer.bmm_cublas", flashinfer("0.6.18", "B200", b_scaling="batch"), "value"),
    "flashinfer#3068": (
        "fused_moe",
        "flashinfer.cutlass_experts_fp8",
        flashinfer("0.6.18", weights="fp8_tensor", activation_dtype="float8_e4m3fn", static_scales=True),
        "capability",
    ),
    "flashinfer#3334": ("fused_moe", "flashinfer.cutlass_experts", flashinfer("0.6.18", weights="mxfp4"), "value"),
    "flashinfer#2595": (
        "fused_moe",
        "flashinfer.cutlass_experts",
        flashinfer("0.6.18", weights="fp8_block", activation_dtype="float8_e4m3fn"),
        "value",
    ),
    "vllm#48898": (
        "fp4_gemm",
        "cutlass.vllm_fp4",
        Call("RTX5090", VLLM, {"a_format": "nvfp4", "k": 4096 + 32}),
        "divisibility",
    ),
    "vllm#47990": ("fp8_gemm", "cutlass.vllm_blockwise", Call("RTX5090", VLLM, {"n": 192}), "divisibility"),
    "vllm#23280": ("fp8_gemm", "cutlass.vllm_blockwise", Call("H200", {"vllm": "0.11.0"}), "package_version"),
    "DeepGEMM#112": ("fp8_gemm", "deep_gemm.fp8_blocks_ue8m0", Call("B200", {"deep_gemm": "2.5.0"}), "dtype"),
    "DeepGEMM#433": (
        "mqa_logits",
        "deep_gemm.logits",
        Call("RTX5090", {"deep_gemm": "2.6.1"}, {"k_scale": True, "head_dim": 64}),
        "capability",
    ),
    "sglang#27384": ("mla_attention", "flash_mla.sparse", Call("B300", {"flash_mla": "1.0.0"}), "capability"),
    "flash-attention#2367": (
        "paged_attention",
        "flash_attn.fa4",
        Call("B200", {"cutlass": "4.8.0"}, {"q_len": "many", **_192}),
        "mismatch",
    ),
}


@pytest.mark.parametrize("report", LIMITS)
def test_limits_of_records_keep_off_others(report: str) -> None:
    op, kernel, call, code = LIMITS[report]
    decision = call.decision(op, kernel)
    assert not decision.accepted
    assert code in {rejection.code for rejection in decision.rejections}, decision.rejections


@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_it_is_refused_there_with_the_report(known: Known) -> None:
    for call in known.bad:
        decision = call.decision(known.op, known.kernel)
        assert not decision.accepted, call
        assert any(item.code == "known_bad" and f"({known.issue})" in item.reason for item in decision.rejections), call


@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_beside_that_it_is_taken(known: Known) -> None:
    for call in known.beside:
        decision = call.decision(known.op, known.kernel)
        assert {rejection.code for rejection in decision.rejections} <= OF_TRUST, (call, decision.rejections)


# Defects beside others of the same kernel, which is called after the op but for its end: call, and a word of each.
TOLD: tuple[tuple[str, Call, set[str]], ...] = (
    ("quantize_nvfp4_kv", flashinfer("0.6.18", "B200"), {"reciprocals", "hide"}),
    ("quantize_nvfp4_kv", flashinfer("0.6.18", "B200", dtype="float16"), {"reciprocals"}),
    ("quantize_mxfp4", flashinfer("0.6.18", "B200", round_up=True), {"infinity", "2^-126"}),
    ("quantize_mxfp4", flashinfer("0.6.18", "B200", round_up=True, dtype="float16"), {"infinity"}),
    ("quantize_mxfp8", flashinfer("0.6.18", "B200", round_up=True), {"infinity", "NaN becomes 448", "2^-126"}),
    ("quantize_mxfp8", flashinfer("0.6.18", "B200", round_up=True, dtype="float16"), {"infinity", "NaN becomes 448"}),
    ("quantize_mxfp8", flashinfer("0.6.12", "B200", round_up=True, dtype="float16"), {"infinity"}),
    ("quantize_fp8", flashinfer("0.6.18", "B200", granularity="group"), {"infinity", "reciprocals"}),
    ("quantize_fp8", flashinfer("0.6.18", "B200", granularity="group", ue8m0=True), {"infinity", "2^-33"}),
    ("quantize_fp8", flashinfer("0.6.18", "B200", **GROUPS), {"infinity"}),
)


@pytest.mark.parametrize(("name", "call", "words"), TOLD)
def test_of_a_quantiser_what_holds_of_the_call_is_reported_and_no_more(name: str, call: Call, words: set[str]) -> None:
    rejections = call.decision(name.removesuffix("_kv"), f"flashinfer.{name}").rejections
    told = [item.reason for item in rejections if item.code == "known_bad"]
    assert len(told) == len(words)
    assert all(any(word in reason for reason in told) for word in words)


def test_every_entry_has_a_case() -> None:
    _ = HUB.settings
    entries = [entry for item in HUB.registry.backends.values() for entry in item.known_bad]
    assert len(entries) >= 10
    for entry in entries:
        assert entry.issue.startswith("https://github.com/")
        told = [known for known in KNOWN if known.issue == entry.issue and entry.op in ("*", known.op)]
        assert told, entry
        assert any(known.kernel.startswith(entry.kernel.rstrip("*")) for known in told), entry


def test_its_fix_is_a_remedy_of_the_refusal() -> None:
    (rejection,) = flashinfer("0.6.16.post4").decision("paged_attention", "flashinfer.xqa").rejections
    assert rejection.remedy == 'pip install "flashinfer-python>=0.6.17,<0.7.3"'


def test_what_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "known_bad.md").read_text()
    named = re.findall(r"`(tests/[a-z_/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 10
    for path, name in named:
        assert not name or re.search(rf"(def|class) {name}\b", (ROOT / path).read_text()), f"{path} has no {name}"
    assert {f"#{report.partition('#')[2]}" for report in LIMITS} <= set(re.findall(r"#\d+", page))
