"""Hooks by which vLLM's linear layers and experts call kernelhub: KERNELHUB_VLLM_HOOKS names them, none by default.

- ``fp8_linear``, ``nvfp4_linear``, ``mxfp4_linear``: vLLM tries the classes of a list for each linear layer, in order
  (`vllm.model_executor.kernels.linear`). The hook puts a class of `kernelhub.compat.vllm.linear` at its head; where
  that one states a reason against it, vLLM goes on.
- ``experts``: vLLM has no registration for experts. The hook replaces a method of vLLM's Triton experts
  (`kernelhub.compat.vllm.experts`).

Each hook first compares vLLM's source with the interface that it was written for; if it differs, vLLM's start ends
with an error that says what differs.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from kernelhub.compat.vllm.refusal import LAST
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import ConfigurationError
from kernelhub.probes.distributions import version_of
from kernelhub.probes.finding import Finding, found
from kernelhub.probes.signature import Call, takes
from kernelhub.probes.source import defines

LINEAR = "vllm.model_executor.kernels.linear"
SCALED = f"{LINEAR}.scaled_mm.ScaledMMLinearKernel:FP8ScaledMMLinearKernel"
BLOCK = f"{LINEAR}.scaled_mm.BlockScaledMMLinearKernel:Fp8BlockScaledMMLinearKernel"
EXPERTS = "vllm.model_executor.layers.fused_moe.experts.triton_moe:TritonExperts"
_QUANTISER = "vllm.model_executor.layers.quantization.input_quant_fp8:QuantFP8.__init__"
_APPLY = (
    *("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts"),
    *("expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta"),
    "apply_router_weight_on_input",
)
_EXPERTS_BASE = "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExperts"


def _float4(module: str, kernel: str) -> tuple[Call, ...]:
    target = f"{LINEAR}.{module}.base:{kernel}"
    return (
        Call(f"{target}.apply_weights", positional=("layer", "x", "bias")),
        Call(f"{target}.process_weights_after_loading", positional=("layer",)),
        Call(f"{target}.can_implement", positional=("config",)),
        Call(f"{target}.is_supported", positional=("compute_capability",)),
    )


# Of each hook: calls that must fit, and names that must exist.
INTERFACES: dict[str, tuple[tuple[Call, ...], tuple[str, ...]]] = {
    "fp8_linear": (
        (
            Call(f"{SCALED}.apply_scaled_mm", keywords=("A", "B", "out_dtype", "As", "Bs", "bias", "output_shape")),
            Call(f"{SCALED}.__init__", positional=("c", "layer_param_names")),
            Call(f"{BLOCK}.apply_block_scaled_mm", positional=("A", "B", "As", "Bs")),
            Call(f"{BLOCK}.__init__", positional=("config",)),
            Call(_QUANTISER, positional=("static", "group_shape"), keywords=("column_major_scales",)),
        ),
        (f"{LINEAR}:_POSSIBLE_FP8_KERNELS", f"{LINEAR}:_POSSIBLE_FP8_BLOCK_KERNELS"),
    ),
    "nvfp4_linear": (_float4("nvfp4", "NvFp4LinearKernel"), (f"{LINEAR}:_POSSIBLE_NVFP4_KERNELS",)),
    "mxfp4_linear": (_float4("mxfp4", "MxFp4LinearKernel"), (f"{LINEAR}:_POSSIBLE_MXFP4_KERNELS",)),
    "experts": (
        (Call(f"{EXPERTS}.apply", positional=_APPLY),),
        tuple(
            f"{_EXPERTS_BASE}.{name}"
            for name in (
                *("expects_unquantized_inputs", "w1_scale", "w2_scale", "w1_bias", "w2_bias", "block_shape"),
                *("per_act_token_quant", "quant_dtype"),
            )
        ),
    ),
}

RELEASES = {"fp8_linear": "0.20", "nvfp4_linear": "0.20", "mxfp4_linear": "0.22", "experts": "0.21"}


def install() -> None:
    """Install the hooks that KERNELHUB_VLLM_HOOKS names.

    Raises:
        ConfigurationError: one of them does not fit the installed vLLM.
    """
    named = HUB.settings["KERNELHUB_VLLM_HOOKS"]
    for hook in named:
        fits = interface(hook)
        if not fits.ok:
            version = version_of("vllm") or "of unknown version"
            raise ConfigurationError(
                f"KERNELHUB_VLLM_HOOKS: the hook {hook} does not fit vLLM {version}: "
                f"{fits.reason}; it supports vLLM {RELEASES[hook]} to {LAST}: install one of these, or remove {hook}"
            )
    for hook in named:
        module = importlib.import_module(f"kernelhub.compat.vllm.{'experts' if hook == 'experts' else 'linear'}")
        module.install(hook)


def interface(hook: str, root: Path | None = None) -> Finding:
    """Whether vLLM's interface matches a hook, by the source of the installed vLLM or of the one in `root`."""
    calls, names = INTERFACES[hook]
    for finding in (
        *(defines(name, root=root) for name in names),
        *(takes(call, root=root) for call in calls),
    ):
        if not finding.ok:
            return finding
    return found("vLLM", None, f"its interface matches the hook {hook}")
