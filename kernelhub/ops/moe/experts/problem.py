"""Facets and constraints of `fused_moe`."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import bucket, facet, feature, weight_layout
from kernelhub.probes.device import DeviceFacts

FLOATS = ("float32", "float16", "bfloat16")
FP8 = "float8_e4m3fn"

PLAIN, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, FP8_BLOCK_UE8M0, MXFP4, NVFP4, MXINT4 = FORMATS = (
    "plain",
    "fp8_tensor",
    "fp8_channel",
    "fp8_block",
    "fp8_block_ue8m0",
    "mxfp4",
    "nvfp4",
    "mxint4",
)
FP8_FORMATS = (FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, FP8_BLOCK_UE8M0)
BLOCK_FORMATS = (FP8_BLOCK, FP8_BLOCK_UE8M0)
FP4_FORMATS = (MXFP4, NVFP4)
FOUR_BIT_FORMATS = (*FP4_FORMATS, MXINT4)  # two codes a byte, with a scale for a group of columns

# Formats of activations that lose more than is allowed otherwise, and the weights that they multiply: nothing is
# rounded so unless the caller opts in. `kernelhub.ops.moe.experts.activations` states what each rounds.
FP8_BLOCK_GATE_UP, MXFP8 = "fp8_block_gate_up", "mxfp8"
ASKED_FORMATS = {
    FP8_BLOCK: BLOCK_FORMATS,
    FP8_BLOCK_GATE_UP: BLOCK_FORMATS,
    MXFP8: (FP8_BLOCK_UE8M0, MXFP4),
    NVFP4: (NVFP4,),
}

SILU, GELU, GELU_TANH, SWIGLU_OAI, SWIGLU_CLAMPED, SWIGLU_STEP = ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "swiglu_oai",
    "swiglu_clamped",
    "swiglu_step",
)

# Tokens of a call, which order lines distinguish: those of decode, or of prefill.
FEW, MANY = "few", "many"
MOST_FEW = 511


@dataclass(frozen=True)
class ExpertsProblem:
    """One configuration of `fused_moe`."""

    device: DeviceFacts = facet("where the tensors are")
    dtype: str = facet("dtype of the tokens and of the result", values=FLOATS, default="bfloat16")
    weights: str = facet(
        "format of the weights: plain (the dtype of the tokens), fp8_tensor, fp8_channel, fp8_block, "
        "fp8_block_ue8m0, mxfp4, nvfp4, mxint4",
        values=FORMATS,
        default=PLAIN,
    )
    activation_dtype: str = facet(
        "dtype that weights are multiplied by, or an opt-in format: fp8_block, fp8_block_gate_up, mxfp8, nvfp4",
        values=(*FLOATS, FP8, *ASKED_FORMATS),
        default="bfloat16",
    )
    num_experts: int = facet("experts whose weights are here", default=128)
    top_k: int = facet("experts that a token goes to", default=8)
    hidden_size: int = facet("width of a token", default=2048)
    intermediate_size: int = facet("width of an expert", default=768)
    rows: str = bucket(f"rows of x: few (up to {MOST_FEW}), many", values=(FEW, MANY), default=FEW)
    weight_layout: str = weight_layout()
    activation: str = feature("activation that combines gate and up", SILU, ACTIVATIONS[1:])
    w13_bias: bool = feature("a bias of gate and up", False)
    w2_bias: bool = feature("a bias of the down projection", False)
    static_scales: bool = feature("activations have static scales", False)
    apply_router_weight_on_input: bool = feature("the router's weight comes before the activation", False)
    expert_map: bool = feature("ids are global; a map says which experts are here", False)
    residual: bool = feature("a residual is added to the result", False)

    @property
    def fp8_activations(self) -> bool:
        """Whether activations are float8 with float32 scales."""
        return self.activation_dtype in (FP8, FP8_BLOCK, FP8_BLOCK_GATE_UP)

    @property
    def activation_groups(self) -> bool:
        """Whether they have a scale for each 1 x 128, not for each row."""
        return self.fp8_activations and self.weights in BLOCK_FORMATS


def asked_formats_fit(problem: ExpertsProblem) -> str | None:
    """Constraint of all kernels with opt-in formats: the op must have the format for such weights."""
    fitting = ASKED_FORMATS.get(problem.activation_dtype)
    if fitting is not None and problem.weights not in fitting:
        return f"activation_dtype is {problem.activation_dtype}, which multiplies {' and '.join(fitting)} alone"
    if problem.activation_dtype == NVFP4 and not problem.static_scales:
        return "activation_dtype is nvfp4, which requires the second scales a1_scale and a2_scale"
    return None


def regime(problem: ExpertsProblem) -> str:
    """Order lines distinguish few tokens from many."""
    return problem.rows


FUSED_MOE = OpRecord(
    name="fused_moe",
    summary="run tokens through their experts and sum the weighted outputs",
    problem=ExpertsProblem,
    regimes=(FEW, MANY),
    regime=regime,
)
