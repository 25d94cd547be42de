"""Which kernel is chosen for the attention of real models, on devices that are not here.

    python -m tests.golden.tables --write      # after a change that is meant to reroute something

Two files per op. In the first each block is one set of installed packages, each row one model and phase, each
column one device, and a cell names the selected kernel. The second gives the code of every kernel's decision.

``trust.txt`` is what each family of devices gets alone, with FlashInfer, and with every library, by trust.

``toolchains.txt`` is of libraries that compile or download their kernels: which of them is the first that can, asked
for by the library's name, on machines that lack a CUDA toolkit, modules built ahead, or binaries.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernelhub
from kernelhub.cli.models import family_of
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.ops import functions

CONTRACTS = {function.op.contract.name: function.op.contract for function in functions()}
HERE = Path(__file__).parent
DEVICES = (
    "CPU",
    "ZEN4",
    "XEON",
    "A100",
    "L40S",
    "H100",
    "H200",
    "B200",
    "B300",
    "RTX5090",
    "MI300X",
    "sm_75",
    "sm_137",
)
FP8 = "float8_e4m3fn"
FLASH_ATTENTION = {"flash_attn": "2.8.3", "flash_attn_interface": "3.0.0", "cutlass": "4.8.0"}
INSTALLED: tuple[dict[str, str], ...] = (
    {"triton": "3.7.1"},
    {"triton": "3.4.0"},
    {},
    {"triton": "3.7.1", "deep_gemm": "2.5.0"},
    {"triton": "3.7.1", **FLASH_ATTENTION},
    {"triton": "3.7.1", "flash_mla": "1.0.0"},
    {"triton": "3.7.1", "cudnn": "1.32.0"},
    {"triton": "3.7.1", "flashinfer": "0.6.18.post1"},
    {"triton": "3.7.1", "vllm": "0.33.0", "sgl_kernel": "0.3.21"},
)
# A library, what its machine lacks, and the ops of which it has kernels.
TOOLCHAINS: tuple[tuple[str, str, tuple[tuple[str, ...], ...], tuple[str, ...]], ...] = (
    (
        "flashinfer",
        "0.6.18.post1",
        ((), ("nvcc",), ("modules",), ("nvcc", "modules"), ("cubins",), ("nvcc", "modules", "cubins")),
        (
            "attention",
            "paged_attention",
            "mla_attention",
            "concat_mla_k",
            "merge_attention_states",
            "fp8_gemm",
            "bmm_fp8",
            "fp4_gemm",
            "grouped_gemm",
            "fused_moe",
            "all_reduce",
            "all_reduce_rms_norm",
            "moe_dispatch",
            "moe_combine",
            "dequantize_nvfp4",
            *("quantize_fp8", "quantize_nvfp4", "quantize_mxfp4", "quantize_mxfp8"),  # by unsafe=True alone
        ),
    ),
    ("deep_gemm", "2.5.0", ((), ("nvcc",)), ("fp8_gemm", "grouped_gemm", "mqa_logits", "paged_mqa_logits")),
)
MORE: dict[str, dict[str, dict[str, Any]]] = {
    "fp4_gemm": {"nvfp4 a, no bias": {"a_format": "nvfp4"}},
    "fp8_gemm": {"ue8m0": {"a_scale_dtype": "float8_e8m0fnu", "b_scale_dtype": "float8_e8m0fnu"}},
    "grouped_gemm": {
        "fp8 blocks": {"a_dtype": FP8, "b_dtype": FP8, "a_scale": "group", "b_scale": "block", "bias": False},
        "fp8 blocks, ue8m0": {
            "a_dtype": FP8,
            "b_dtype": FP8,
            "a_scale": "group_e8m0",
            "b_scale": "block_e8m0",
            "bias": False,
        },
    },
}
COMPILED_ON = ("A100", "L40S", "H100", "H200", "B200", "B300", "RTX5090")

PLAIN_GROUPS: dict[str, Any] = {
    "a_dtype": "bfloat16",
    "b_dtype": "bfloat16",
    "a_scale": None,
    "b_scale": None,
    "a_global_scale": False,
    "global_scale": False,
    "bias": False,
}

CONNECTED: dict[str, dict[str, Any]] = {
    "2 ranks, NVLink, 256KB": {"world_size": 2, "link": "nvlink", "message": "256KB"},
    "4 ranks, NVLink, more": {"world_size": 4, "link": "nvlink", "message": "more"},
    "8 ranks, NVLink, 8MB": {"world_size": 8, "link": "nvlink", "message": "8MB"},
    "8 ranks, NVLink, more": {"world_size": 8, "link": "nvlink", "message": "more"},
    "4 ranks, PCIe": {"world_size": 4, "link": "pcie", "peers": "access", "message": "256KB"},
    "2 MIG instances": {"world_size": 2, "link": "none"},
    "16 ranks, 2 machines": {"world_size": 16, "link": "network"},
}
PEERS: dict[str, dict[str, Any]] = {
    "8 ranks, NVLink": {"world_size": 8, "link": "nvlink"},
    "4 ranks, PCIe": {"world_size": 4, "link": "pcie", "peers": "access"},
}
PHASES: dict[str, dict[str, dict[str, Any]]] = {
    "attention": {
        "prefill": {"q_len": "many", "causal": True},
        "long prefill": {"q_len": "many", "causal": True, "length": "long"},
        "ragged prefill": {"q_len": "any", "ragged": True, "causal": True},
        "decode": {"q_len": "one"},
        "fp32 prefill": {"q_len": "many", "causal": True, "q_dtype": "float32", "kv_dtype": "float32"},
        "prefill with lse": {"q_len": "many", "causal": True, "lse": True},
    },
    "paged_attention": {
        "decode": {"q_len": "one"},
        "speculative decode": {"q_len": "few", "causal": True},
        "prefill": {"q_len": "many", "causal": True},
        "mixed": {"q_len": "any", "ragged": True, "causal": True},
        "fp8 decode": {"q_len": "one", "kv_dtype": "float8_e4m3fn", "kv_scale": "value"},
        "HND page 64": {"q_len": "one", "kv_layout": "HND", "page_size": 64},
    },
    "merge_attention_states": {
        "two": {},
        "many with lse": {"parts": "many", "lse": True},
        "batches": {"batched": True, "dtype": "float16"},
    },
    "grouped_gemm": {
        "as published": {},
        "bf16": PLAIN_GROUPS,
        "bf16 prefill": {**PLAIN_GROUPS, "rows": "many"},
        "masked": {"masked": True},
        "prefill": {"rows": "many"},
    },
    "fp8_gemm": {
        "as published": {},
        "as published, prefill": {"rows": "many"},
        "scaled by tensor": {"scaling": "tensor"},
        "scaled by row": {"scaling": "row"},
        "scaled by row, prefill": {"scaling": "row", "rows": "many"},
        "fp32, bias": {"out_dtype": "float32", "bias": True},
        "mx": {"scaling": "mx"},
    },
    "bmm_fp8": {"scaled as a whole": {}, "scaled each": {"a_scaling": "batch", "b_scaling": "batch"}},
    "all_reduce": {
        "alone": {},
        "4 ranks": {"world_size": 4},
        "4 ranks, another backend": {"world_size": 4, "group_backend": "other"},
        "4 ranks, NVLink, 32KB": {"world_size": 4, "link": "nvlink", "message": "32KB"},
        **CONNECTED,
    },
    "all_reduce_rms_norm": {
        "alone": {},
        "4 ranks": {"world_size": 4},
        "2 ranks, NVLink, fp8 by group": {"world_size": 2, "link": "nvlink", "message": "256KB", "format": "fp8_group"},
        **{
            f"4 ranks, NVLink, {message}, {form}": {
                "world_size": 4,
                "link": "nvlink",
                "message": message,
                "format": form,
            }
            for message, form in (("32KB", "nvfp4"), ("256KB", "nvfp4"), ("8MB", "fp8_group"), ("more", "mxfp8"))
        },
        "2 ranks, NVLink, 8 MB, nvfp4": {"world_size": 2, "link": "nvlink", "message": "8MB", "format": "nvfp4"},
        "4 ranks, NVLink, fp8 by group": {"world_size": 4, "link": "nvlink", "message": "256KB", "format": "fp8_group"},
        "4 ranks, fp8 by token": {"world_size": 4, "format": "fp8_token"},
        **CONNECTED,
    },
    "moe_dispatch": {
        "alone": {},
        "8 ranks": {"world_size": 8},
        "8 ranks, exact": {"world_size": 8, "capacity": "exact", "format": "contiguous"},
        "8 ranks, many, masked": {"world_size": 8, "capacity": "many", "format": "masked", "scales": True},
        "8 ranks, another backend": {"world_size": 8, "group_backend": "other"},
        **PEERS,
    },
    "moe_combine": {
        "alone": {},
        "8 ranks": {"world_size": 8},
        "8 ranks, exact": {"world_size": 8, "rows": "needed", "format": "contiguous"},
        "8 ranks, gathered": {"world_size": 8, "rows": "all"},
        "8 ranks, many, masked": {"world_size": 8, "capacity": "many", "format": "masked"},
        **PEERS,
    },
    "write_kv_cache": {
        "bf16": {},
        "fp8": {"kv_scale": "value"},
        "bf16, rope": {"rope": "neox", "q": True},
        "fp8, rope of 64 columns of keys": {"kv_scale": "value", "rope": "interleaved", "rotary_dim": 64},
        "e5m2, HND, scales by head": {"kv_dtype": "float8_e5m2", "kv_scale": "head", "kv_layout": "HND"},
    },
    "expert_parallel_moe": {
        "alone": {},
        "8 ranks": {"world_size": 8},
        "8 ranks, exact": {"world_size": 8, "capacity": "exact"},
        "8 ranks, fp8 blocks": {"world_size": 8, "weights": "fp8_block"},
        "8 ranks, fp8 blocks, opt-in": {"world_size": 8, "weights": "fp8_block", "activation_dtype": "fp8_block"},
        "8 ranks, mxfp4": {"world_size": 8, "weights": "mxfp4", "activation": "swiglu_oai", "w13_bias": True},
        "8 ranks, another backend": {"world_size": 8, "group_backend": "other"},
    },
    "reduce_scatter": {"alone": {}, "4 ranks": {"world_size": 4}},
    "all_gather": {"alone": {}, "4 ranks, rows": {"world_size": 4, "unequal": True}},
    "concat_mla_k": {"bf16": {}, "fp8": {"dtype": "float8_e4m3fn"}},
    "quantize_fp8": {
        "token": {},
        "group ue8m0": {"granularity": "group", "ue8m0": True, "column": True},
        "groups of 2048": {"granularity": "group", "group_size": 2048},
        "given": {"granularity": "tensor", "static": True},
    },
    "quantize_nvfp4": {"bf16": {}, "given": {"static": True, "dtype": "float16"}},
    "quantize_mxfp4": {"floor": {}, "up": {"round_up": True}},
    "quantize_mxfp8": {"floor": {}, "up": {"round_up": True}},
    "rms_norm_quant": {
        "fp8_group, residual": {"residual": True},
        "floats": {"format": "none"},
        "nvfp4": {"format": "nvfp4", "residual": True, "unit_offset": True},
        "fp8_token ue8m0": {"format": "fp8_token", "ue8m0": True, "column": True},
    },
    "silu_and_mul_quant": {
        "fp8_group": {},
        "mxfp8": {"format": "mxfp8"},
        "65536 wide": {"format": "fp8_token", "width": 65536},
    },
    "fp4_gemm": {
        "bf16 a": {},
        "bf16 a, packed": {"weight_layout": "fp4.tiles64x128.v1"},
        "packed by another": {"weight_layout": "other.v1"},
        "nvfp4 a": {"a_format": "nvfp4", "bias": True},
        "mxfp8 a, float32": {"a_format": "mxfp8", "b_format": "mxfp4", "out_dtype": "float32"},
    },
    "dequantize_fp8": {"token": {}, "block": {"granularity": "block", "scale_dtype": "float8_e8m0fnu"}},
    "dequantize_nvfp4": {"bf16": {}, "fp32": {"out_dtype": "float32"}},
    "dequantize_mxfp4": {"bf16": {}},
    "dequantize_mxfp8": {"bf16": {}},
    "mqa_logits": {
        "fp8": {"k_scale": True},
        "bf16": {"dtype": "bfloat16"},
        "fp32, 128 heads of 256": {"dtype": "float32", "num_heads": 128, "head_dim": 256},
    },
    "paged_mqa_logits": {"fp8": {"k_scale": True}, "bf16": {"dtype": "bfloat16"}, "pages of 1": {"page_size": 1}},
    "linear_attention": {
        "prefill": {"out_state": True},
        "ragged prefill": {"q_len": "any", "ragged": True, "state": True, "out_state": True, "state_indices": True},
        "decode": {"q_len": "one", "state": True, "out_state": True, "state_indices": True},
        "fp32 prefill": {"dtype": "float32"},
    },
    "topk_indices": {"rows": {}, "ranges": {"row_starts": True, "row_ends": True}, "many rows": {"rows": "many"}},
    "mla_attention": {
        "decode": {"q_len": "one"},
        "speculative decode": {"q_len": "few", "causal": True},
        "ragged": {"q_len": "any", "ragged": True, "causal": True},
        "sparse decode": {"q_len": "one", "sparse": True},
        "sparse ragged": {"q_len": "any", "ragged": True, "causal": True, "sparse": True},
        "fp8 decode": {"q_len": "one", "kv_dtype": "float8_e4m3fn", "kv_scale": "value"},
        "fp32 decode": {"q_len": "one", "q_dtype": "float32", "kv_dtype": "float32"},
    },
    "write_mla_cache": {"bf16": {}, "fp8": {"kv_dtype": "float8_e4m3fn", "kv_scale": "tensor"}},
    "route_experts": {"fp32": {}, "bf16": {"dtype": "bfloat16"}},
    "fused_moe": {
        "as published": {},
        "many tokens": {"rows": "many"},
        "on a rank": {"expert_map": True, "residual": True},
        "fp16": {"dtype": "float16"},
        "plain": {"weights": "plain", "activation_dtype": "bfloat16"},
        "packed for Blackwell": {"weight_layout": "experts.mxfp4.trtllm.v1"},
        "packed for Hopper": {"weight_layout": "experts.mxfp4.cutlass_sm90.v1"},
    },
}


FAMILIES = ("CPU", "ZEN4", "XEON", "A100", "L40S", "H200", "B200", "B300", "RTX5090", "MI300X")
LIBRARIES: dict[str, dict[str, str]] = {
    "nothing but Triton": {"triton": "3.7.1"},
    "FlashInfer": {"triton": "3.7.1", "flashinfer": "0.6.18.post1", "cudnn": "1.32.0"},
    "every library": {
        "triton": "3.7.1",
        **FLASH_ATTENTION,
        "deep_gemm": "2.5.0",
        "flash_mla": "1.0.0",
        "cudnn": "1.32.0",
        "flashinfer": "0.6.18.post1",
        "vllm": "0.33.0",
        "sgl_kernel": "0.3.21",
        "xformers": "0.0.35",
    },
}
TRUST: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("trust here", "here", ()),
    ("trust here, after warm-up *", "here", ("*",)),
    ("trust vendor", "vendor", ()),
    ("trust measured", "measured", ()),
)
_GQA = {"num_q_heads": 64, "num_kv_heads": 8, "head_dim_qk": 128, "head_dim_vo": 128}
_MLA = {"num_heads": 128}
# Problems that models of today ask most.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "ragged prefill": ("attention", {**_GQA, "q_len": "any", "ragged": True, "causal": True}),
    "paged decode": ("paged_attention", {**_GQA, "q_len": "one"}),
    "paged decode, fp8": ("paged_attention", {**_GQA, "q_len": "one", "kv_dtype": FP8, "kv_scale": "value"}),
    "paged mixed": ("paged_attention", {**_GQA, "q_len": "any", "ragged": True, "causal": True}),
    "paged decode, HND, sinks": (
        "paged_attention",
        {**_GQA, "head_dim_qk": 64, "head_dim_vo": 64, "q_len": "one", "kv_layout": "HND", "sinks": True},
    ),
    "latent decode": ("mla_attention", {**_MLA, "q_len": "one", "page_size": 64}),
    "latent decode, sparse": ("mla_attention", {**_MLA, "q_len": "one", "page_size": 64, "sparse": True}),
    "fp8 blocks, few rows": ("fp8_gemm", {"scaling": "block", "n": 7168, "k": 2048, "rows": "few"}),
    "fp8 blocks, many rows": ("fp8_gemm", {"scaling": "block", "n": 7168, "k": 2048, "rows": "many"}),
    "fp8 by row, many rows": ("fp8_gemm", {"scaling": "row", "n": 8192, "k": 8192, "rows": "many"}),
    "nvfp4": ("fp4_gemm", {"a_format": "nvfp4", "b_format": "nvfp4"}),
    "mxfp4, bf16 a": ("fp4_gemm", {"b_format": "mxfp4"}),
    "experts, fp8 blocks": ("fused_moe", {"weights": "fp8_block", "activation_dtype": "fp8_block"}),
    "experts, fp8 blocks, many": (
        "fused_moe",
        {"weights": "fp8_block", "activation_dtype": "fp8_block", "rows": "many"},
    ),
    "experts, mxfp4": ("fused_moe", {"weights": "mxfp4"}),
    "experts, nvfp4": ("fused_moe", {"weights": "nvfp4", "activation_dtype": "nvfp4", "static_scales": True}),
    "groups, fp8 blocks": ("grouped_gemm", MORE["grouped_gemm"]["fp8 blocks"]),
    "indexer": ("paged_mqa_logits", {"k_scale": True}),
    "merge": ("merge_attention_states", {}),
}


def table(op: str) -> str:
    """The whole text of one op's file."""
    return "\n".join(_lines(op)) + "\n"


def _lines(op: str) -> Iterator[str]:
    yield f"# {op}: chosen kernel by model, phase and device. Written by python -m tests.golden.tables --write"
    family = family_of(CONTRACTS[op])
    for installed in INSTALLED:
        packages = ", ".join(f"{name} {version}" for name, version in installed.items()) or "nothing but torch"
        yield ""
        yield f"## installed: {packages}"
        yield _row("", DEVICES)
        machine = SimulatedMachine(installed)
        for model in family.models if family else ():
            for phase, written in PHASES[op].items():
                facets = family.facets_of(model, CONTRACTS[op], written)
                chosen = [
                    kernelhub.explain(op, device=device, machine=machine, **facets).selected or "-"
                    for device in DEVICES
                ]
                yield _row(f"{model}, {phase}", chosen)


def reasons(op: str) -> str:
    """What is said of every kernel, for one plain problem per phase."""
    lines = [f"# {op}: code of every kernel's decision. Written by python -m tests.golden.tables --write"]
    for installed in INSTALLED[:2]:
        machine = SimulatedMachine(installed)
        for phase, facets in PHASES[op].items():
            lines += ["", f"## {phase}, triton {installed['triton']}"]
            for device in DEVICES:
                selection = kernelhub.explain(op, device=device, machine=machine, **facets)
                codes = "  ".join(f"{decision.kernel}:{decision.code}" for decision in selection.decisions)
                lines.append(f"{device:<9}{codes}")
    return "\n".join(lines) + "\n"


def toolchains() -> str:
    """The whole text of ``toolchains.txt``."""
    lines = [
        "# the first kernel of a library that can, by phase and device; -: none; phases without any are left out. "
        "Written by python -m tests.golden.tables --write"
    ]
    for library, version, sets, ops in TOOLCHAINS:
        phases = {
            f"{op}, {phase}": (op, facets) for op in ops for phase, facets in (PHASES[op] | MORE.get(op, {})).items()
        }
        taken: set[str] = set()
        for lacks in sets:
            without = f"without {', '.join(lacks)}" if lacks else "with everything"
            lines += ["", f"## {library} {version}, {without}", _row("", COMPILED_ON)]
            machine = SimulatedMachine(
                {"triton": "3.7.1", "cudnn": "1.32.0", "cuda": "13.0.2", library: version}, lacks=lacks
            )
            for label, (op, facets) in phases.items():
                names = [_first_of(library, op, device, machine, facets) for device in COMPILED_ON]
                if not lacks and set(names) != {"-"}:
                    taken.add(label)
                if label in taken:
                    lines.append(_row(label, names))
    return "\n".join(lines) + "\n"


def trusted() -> str:
    """The whole text of ``trust.txt``."""
    lines = [
        "# chosen kernel by device, libraries and trust; * where all kernels passed verification there. "
        "Written by python -m tests.golden.tables --write"
    ]
    for name, installed in LIBRARIES.items():
        for head, trust, verified in TRUST:
            lines += ["", f"## {name}, {head}", _row("", FAMILIES)]
            machine = SimulatedMachine(installed, verified=verified)
            with kernelhub.use(trust=trust):
                for label, (op, facets) in ASKED.items():
                    found = [kernelhub.explain(op, device=device, machine=machine, **facets) for device in FAMILIES]
                    lines.append(_row(label, [selection.selected or "-" for selection in found]))
    return "\n".join(lines) + "\n"


def _first_of(library: str, op: str, device: str, machine: SimulatedMachine, facets: dict[str, Any]) -> str:
    selection = kernelhub.explain(op, device=device, machine=machine, backend=library, **facets)
    return (selection.selected or "-").removeprefix(f"{library}.")


def _row(head: str, cells: Any) -> str:
    return (f"{head:<40}" + "".join(f"{cell:<16} " for cell in cells)).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the files; otherwise they are printed")
    options = parser.parse_args()
    if options.write:
        (HERE / "toolchains.txt").write_text(toolchains())
        (HERE / "trust.txt").write_text(trusted())
    else:
        print(toolchains())
    for op in PHASES:
        if options.write:
            (HERE / f"{op}.txt").write_text(table(op))
            (HERE / f"{op}.reasons.txt").write_text(reasons(op))
        else:
            print(table(op))


if __name__ == "__main__":
    main()
