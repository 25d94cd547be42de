"""What selection may look at for `fused_moe`."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.problem import facet, feature, weight_layout
from kernelhub.probes.device import DeviceFacts

FLOATS = ("float32", "float16", "bfloat16")
FP8 = "float8_e4m3fn"

PLAIN, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, FP8_BLOCK_UE8M0, MXFP4, NVFP4 = FORMATS = (
    "plain",
    "fp8_tensor",
    "fp8_channel",
    "fp8_block",
    "fp8_block_ue8m0",
    "mxfp4",
    "nvfp4",
)
FP8_FORMATS = (FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, FP8_BLOCK_UE8M0)
BLOCK_FORMATS = (FP8_BLOCK, FP8_BLOCK_UE8M0)
FP4_FORMATS = (MXFP4, NVFP4)

SILU, GELU, GELU_TANH, SWIGLU_OAI = ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai")


@dataclass(frozen=True)
class ExpertsProblem:
    """One configuration of `fused_moe`."""

    device: DeviceFacts = facet("where the tensors are")
    dtype: str = facet("dtype of the tokens and of the result", values=FLOATS, default="bfloat16")
    weights: str = facet(
        "format of the weights: plain (the dtype of the tokens), fp8_tensor, fp8_channel, fp8_block, "
        "fp8_block_ue8m0, mxfp4, nvfp4",
        values=FORMATS,
        default=PLAIN,
    )
    activation_dtype: str = facet("dtype that weights are multiplied by", values=(*FLOATS, FP8), default="bfloat16")
    num_experts: int = facet("experts whose weights are here", default=128)
    top_k: int = facet("experts that a token goes to", default=8)
    hidden_size: int = facet("width of a token", default=2048)
    intermediate_size: int = facet("width of an expert", default=768)
    weight_layout: str = weight_layout()
    activation: str = feature("what joins gate and up", SILU, (GELU, GELU_TANH, SWIGLU_OAI))
    w13_bias: bool = feature("a bias of gate and up", False)
    w2_bias: bool = feature("a bias of the down projection", False)
    static_scales: bool = feature("fp8 activations have scales of their own, known beforehand", False)
    apply_router_weight_on_input: bool = feature("the router's weight comes before the activation", False)
    expert_map: bool = feature("ids are global; a map says which experts are here", False)
    residual: bool = feature("something that is added to the result", False)

    @property
    def fp8_activations(self) -> bool:
        """Whether activations are quantised."""
        return self.activation_dtype == FP8

    @property
    def activation_groups(self) -> bool:
        """Whether they have a scale for each 1 x 128, not for each row."""
        return self.fp8_activations and self.weights in BLOCK_FORMATS
