"""Hooks of vLLM's linear layers and experts, against a vLLM of the same interface whose own kernels are plain torch.

That the interface is the real one is checked on the unpacked releases that UNPACKED_VLLM names, as in
test_vllm_plugin.py.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.compat.start import Limits
from kernelhub.compat.vllm import hooks
from kernelhub.errors import ConfigurationError
from tests.compat import vllm_releases

LINEAR = """
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
_POSSIBLE_FP8_KERNELS: dict[str, list[type[FP8ScaledMMLinearKernel]]] = {"CPU": ["vLLM's own"]}
_POSSIBLE_FP8_BLOCK_KERNELS: dict[
    str, list[type[Fp8BlockScaledMMLinearKernel | FP8ScaledMMLinearKernel]]
] = {"CPU": ["vLLM's own"]}
_POSSIBLE_NVFP4_KERNELS: dict[str, list[type[NvFp4LinearKernel]]] = {"CPU": ["vLLM's own"]}
_POSSIBLE_MXFP4_KERNELS: dict[str, list[type[MxFp4LinearKernel]]] = {"CPU": ["vLLM's own"]}
"""
SCALED = """
from abc import ABC, abstractmethod
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
class FP8ScaledMMLinearKernel(ABC):
    def __init__(self, c, layer_param_names):
        assert self.can_implement(c)[0] and self.is_supported()[0]
        scale = c.activation_quant_key.scale
        self.quant_fp8 = QuantFP8(static=scale.static, group_shape=scale.group_shape)
        self.config, self.layer_param_names = c, layer_param_names
    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability=None): ...
    @classmethod
    @abstractmethod
    def can_implement(cls, c): ...
    def process_weights_after_loading(self, layer): pass
    def apply_weights(self, layer, x, bias=None):
        w, w_s, x_s, _ = (getattr(layer, name, None) for name in self.layer_param_names)
        x_2d = x.view(-1, x.shape[-1])
        q, scale = self.quant_fp8(x_2d, x_s)
        return self.apply_scaled_mm(A=q, B=w, out_dtype=self.config.out_dtype or x.dtype, As=scale, Bs=w_s, bias=bias,
                                    output_shape=[*x.shape[:-1], w.shape[1]])
    @abstractmethod
    def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape): ...
"""
BLOCK = """
from abc import ABC, abstractmethod
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
class Fp8BlockScaledMMLinearKernel(ABC):
    def __init__(self, config):
        self.config = config
        scale = config.activation_quant_key.scale
        self.quant_fp8 = QuantFP8(static=scale.static, group_shape=scale.group_shape)
    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability=None): ...
    @classmethod
    def can_implement(cls, config):
        return (False, "dynamic only") if config.activation_quant_key.scale.static else (True, None)
    def process_weights_after_loading(self, layer): pass
    def apply_weights(self, layer, x, bias=None):
        q, scale = self.quant_fp8(x.view(-1, x.shape[-1]), None)
        out = self.apply_block_scaled_mm(A=q, B=layer.weight, As=scale, Bs=layer.weight_scale_inv)
        out = out if bias is None else out + bias
        return out.to(self.config.out_dtype).view(*x.shape[:-1], layer.weight.shape[0])
    @abstractmethod
    def apply_block_scaled_mm(self, A, B, As, Bs): ...
"""
FLOAT4 = """
from abc import ABC, abstractmethod
class NAME(ABC):
    def __init__(self, config):
        assert self.can_implement(config)[0] and self.is_supported()[0]
        self.config = config
    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability=None): ...
    @classmethod
    @abstractmethod
    def can_implement(cls, config): ...
    @abstractmethod
    def process_weights_after_loading(self, layer): ...
    @abstractmethod
    def apply_weights(self, layer, x, bias=None): ...
"""
QUANTISER = """
import torch
class QuantFP8:
    def __init__(self, static, group_shape, num_token_padding=None, column_major_scales=False, use_ue8m0=None):
        self.static, self.group, self.column_major = static, group_shape, column_major_scales
    def __call__(self, x, scale=None, scale_ub=None):
        if not self.static:
            width = x.shape[1] if self.group.col == -1 else self.group.col
            parts = x.float().view(x.shape[0], -1, width).abs().amax(-1).clamp(min=1e-10) / 448
            scale = parts.amax().view(1, 1) if self.group.is_per_tensor() else parts
            if self.column_major:
                scale = scale.t().contiguous().t()
        factor = scale.repeat_interleave(x.shape[1] // scale.shape[-1], -1) if scale.ndim == 2 else scale
        return (x.float() / factor).clamp(-448, 448).to(torch.float8_e4m3fn), scale
"""
EXPERTS = """
class FusedMoEExperts:
    def __init__(self, moe_config, quant_config):
        self.moe_config, self.quant_config = moe_config, quant_config
    @property
    def expects_unquantized_inputs(self): return False
    @property
    def quant_dtype(self): return self.quant_config.quant_dtype
    @property
    def block_shape(self): return self.quant_config.block_shape
    @property
    def per_act_token_quant(self): return self.quant_config.per_act_token_quant
    @property
    def w1_scale(self): return self.quant_config.w1_scale
    @property
    def w2_scale(self): return self.quant_config.w2_scale
    @property
    def w1_bias(self): return self.quant_config.w1_bias
    @property
    def w2_bias(self): return self.quant_config.w2_bias
"""
TRITON = """
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
class TritonExperts(FusedMoEExperts):
    quantization_emulation = False
    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
              a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input):
        output.fill_(7.0)  # vLLM's own
class EmulatedExperts(TritonExperts): ...
"""
PLATFORMS = """
class current_platform:
    capability = 90
    @classmethod
    def has_device_capability(cls, wanted): return cls.capability >= wanted
"""
WORKER = """
class Worker:
    def compile_or_warm_up_model(self): return "times"
"""
FILES = {
    "model_executor/kernels/linear/__init__.py": LINEAR,
    "model_executor/kernels/linear/scaled_mm/ScaledMMLinearKernel.py": SCALED,
    "model_executor/kernels/linear/scaled_mm/BlockScaledMMLinearKernel.py": BLOCK,
    "model_executor/kernels/linear/nvfp4/base.py": FLOAT4.replace("NAME", "NvFp4LinearKernel"),
    "model_executor/kernels/linear/mxfp4/base.py": FLOAT4.replace("NAME", "MxFp4LinearKernel"),
    "model_executor/layers/quantization/input_quant_fp8.py": QUANTISER,
    "model_executor/layers/quantization/utils/quant_utils.py": 'kMxfp4Dynamic = "mxfp4, dynamic"\n',
    "model_executor/layers/fused_moe/modular_kernel.py": EXPERTS,
    "model_executor/layers/fused_moe/experts/triton_moe.py": TRITON,
    "platforms.py": PLATFORMS,
    "v1/worker/gpu_worker.py": WORKER,
}
UNPACKED = [folder for folder in os.environ.get("UNPACKED_VLLM", "").split(os.pathsep) if folder]


class Group(tuple):
    """vLLM's GroupShape."""

    row = property(lambda self: self[0])
    col = property(lambda self: self[1])

    def is_per_tensor(self) -> bool:
        return self == (-1, -1)

    def is_per_token(self) -> bool:
        return self == (1, -1)

    def is_per_channel(self) -> bool:
        return self == (-1, 1)


def key(group: tuple[int, int], static: bool = False) -> SimpleNamespace:
    return SimpleNamespace(scale=SimpleNamespace(group_shape=Group(group), static=static))


def config(activations: Any, weights: Any, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    return SimpleNamespace(
        activation_quant_key=activations,
        weight_quant_key=weights,
        weight_shape=(n, k),
        input_dtype=dtype,
        out_dtype=dtype,
    )


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a vLLM on the path, some of its text changed, and install hooks as its plugin does."""

    def installed(*names: str, old: str = "", new: str = "") -> None:
        for name, text in FILES.items():
            path = tmp_path / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.relative_to(tmp_path).parents:
                if folder.name and not (tmp_path / folder / "__init__.py").exists():
                    (tmp_path / folder / "__init__.py").touch()
            path.write_text(text.replace(old, new) if old else text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("KERNELHUB_VLLM_HOOKS", ",".join(names))
        kernelhub.reload()
        hooks.install()

    def forget() -> None:
        linear = sys.modules.pop("kernelhub.compat.vllm.linear", None)
        if linear is not None:
            linear.LIBRARY._destroy()
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.pop("kernelhub.compat.vllm.experts", None)
        start = sys.modules.get("kernelhub.compat.vllm.start")
        if start is not None:
            start.ENGINE.noted.__init__()

    forget()
    yield installed
    forget()
    kernelhub.unseal()


def kernels(name: str) -> list[Any]:
    return importlib.import_module("vllm.model_executor.kernels.linear").__dict__[f"_POSSIBLE_{name}_KERNELS"]["CPU"]


def fp8(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """float8 of parts of so many columns, and the scales."""
    parts = x.float().view(x.shape[0], -1, width)
    scale = parts.abs().amax(-1) / 448
    return (parts / scale[..., None]).view(x.shape).to(torch.float8_e4m3fn), scale


def close(got: Tensor, want: Tensor, tolerance: float = 0.02) -> None:
    assert (got.double() - want).abs().max() <= tolerance * want.abs().max()


class TestFp8Linear:
    @pytest.mark.parametrize("tokens", [0, 1, 5, 130])
    @pytest.mark.parametrize(
        ("activations", "channel", "bias"),
        [
            (key((1, -1)), False, True),
            (key((1, -1)), True, False),
            (key((-1, -1)), False, False),
            (key((-1, -1), static=True), False, True),
        ],
        ids=["per token", "per token and channel", "per tensor", "static"],
    )
    def test_a_scale_for_all_or_each_row(self, vllm, activations, channel, bias, tokens) -> None:
        vllm("fp8_linear")
        torch.manual_seed(0)
        n, k = 96, 160
        weight = torch.randn(n, k)
        if channel:
            quantised, scale = fp8(weight, k)
        else:
            scale = (weight.abs().max() / 448).view(1)
            quantised = (weight / scale).to(torch.float8_e4m3fn)
        weights = key((-1, 1) if channel else (-1, -1), static=True)
        kernel = kernels("FP8")[0](config(activations, weights, n, k), ["weight", "weight_scale", "input_scale", "ub"])
        layer = SimpleNamespace(weight=quantised.t(), weight_scale=scale)  # vLLM keeps [K, N], columns contiguous
        if activations.scale.static:
            layer.input_scale = torch.tensor([0.01])
        x = torch.randn(2, tokens, k, dtype=torch.bfloat16)
        if tokens == 0:
            x = x[:, :0]
            layer.input_scale = torch.tensor([0.01])
            kernel.quant_fp8.static = True
        shift = torch.randn(n, dtype=torch.bfloat16) if bias else None
        got = kernel.apply_weights(layer, x, shift)
        assert got.shape == (2, tokens, n)
        assert got.dtype == torch.bfloat16
        if tokens:
            q, a_scale = kernel.quant_fp8(x.view(-1, k), getattr(layer, "input_scale", None))
            want = (q.double() * a_scale.double()) @ (quantised.double() * scale.double()).t()
            close(got.view(-1, n), want + (0 if shift is None else shift.double()))

    @pytest.mark.parametrize(("n", "k"), [(256, 384), (320, 256)])
    def test_blocks(self, vllm, n, k) -> None:
        vllm("fp8_linear")
        torch.manual_seed(0)
        scale = torch.rand(-(-n // 128), k // 128) + 0.5
        quantised = torch.randn(n, k).to(torch.float8_e4m3fn)
        kernel = kernels("FP8_BLOCK")[0](config(key((1, 128)), key((128, 128), static=True), n, k))
        layer = SimpleNamespace(weight=quantised, weight_scale_inv=scale)
        x, shift = torch.randn(7, k, dtype=torch.bfloat16), torch.randn(n, dtype=torch.bfloat16)
        got = kernel.apply_weights(layer, x, shift)
        q, a_scale = kernel.quant_fp8(x)
        assert a_scale.stride() == (1, 7)  # as Hopper's tensor memory accelerator reads them
        full = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
        want = (q.double() * a_scale.double().repeat_interleave(128, 1)) @ (quantised.double() * full.double()).t()
        close(got, want + shift.double())

    def test_what_it_does_not_cover_is_left_to_vllm_with_a_reason(self, vllm) -> None:
        vllm("fp8_linear")
        scaled, block = kernels("FP8")[0], kernels("FP8_BLOCK")[0]
        fits, reason = scaled.can_implement(config(key((1, 64)), key((-1, -1)), 64, 64))
        assert not fits
        assert "a scale per tensor or token" in reason
        fits, reason = block.can_implement(config(key((1, 64)), key((64, 64)), 64, 64))
        assert not fits
        assert "1 x 128" in reason
        assert block.can_implement(config(key((1, 128), static=True), key((128, 128)), 128, 128)) == (
            False,
            "dynamic only",
        )
        os.environ["KERNELHUB_DISABLE"] = "*"
        try:
            kernelhub.reload()
            fits, reason = scaled.is_supported(90)
        finally:
            del os.environ["KERNELHUB_DISABLE"]
            kernelhub.reload()
        assert not fits
        assert "KERNELHUB_DISABLE" in reason

    def test_its_product_is_one_node_of_a_compiled_graph(self, vllm) -> None:
        vllm("fp8_linear")
        q, a_scale = fp8(torch.randn(5, 128), 128)
        w, b_scale = fp8(torch.randn(64, 128), 128)
        product = torch.ops.kernelhub_vllm.fp8_product
        given = q, w, a_scale, b_scale, None, torch.bfloat16
        torch.library.opcheck(product, given, test_utils="test_faketensor")
        seen: list[Any] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            seen.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
            return graph.forward

        def shifted(*given: Tensor) -> Tensor:
            return product(*given, None, torch.bfloat16) + 1

        compiled = torch.compile(shifted, backend=backend, fullgraph=True)
        got = compiled(q, w, a_scale, b_scale)
        assert seen[0][0] in (product, product.default)
        assert torch.equal(got, product(q, w, a_scale, b_scale, None, torch.bfloat16) + 1)


class TestFloat4Linear:
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("b_format", ["nvfp4", "mxfp4"])
    def test_weights_as_in_the_checkpoint(self, vllm, b_format, bias) -> None:
        vllm("nvfp4_linear", "mxfp4_linear")
        torch.manual_seed(0)
        kernel = kernels(b_format.upper())[0](SimpleNamespace(activation_quant_key=None))
        weight = torch.randn(96, 128)
        if b_format == "nvfp4":
            codes, scale, factor = kernelhub.quantize_nvfp4(weight)
            layer = SimpleNamespace(weight=codes, weight_scale=scale, weight_global_scale=factor.reshape(()))
            full = kernelhub.dequantize_nvfp4(codes, scale, factor, out_dtype=torch.float32)
        else:
            codes, scale = kernelhub.quantize_mxfp4(weight)
            layer = SimpleNamespace(weight=codes, weight_scale=scale.view(torch.uint8))
            full = kernelhub.dequantize_mxfp4(codes, scale, out_dtype=torch.float32)
        kernel.process_weights_after_loading(layer)
        x = torch.randn(2, 3, 128, dtype=torch.bfloat16)
        shift = torch.randn(96, dtype=torch.bfloat16) if bias else None
        got = kernel.apply_weights(layer, x, shift)
        want = x.double() @ full.double().t() + (0 if shift is None else shift.double())
        assert got.dtype == torch.bfloat16
        close(got, want)

    def test_mxfp4_checkpoints_of_compressed_tensors_are_covered(self, vllm) -> None:
        """vLLM asks for MXFP4 activations of each, and ignores that where it selects Marlin."""
        vllm("nvfp4_linear", "mxfp4_linear")
        asked = SimpleNamespace(activation_quant_key="mxfp4, dynamic")
        assert kernels("MXFP4")[0].can_implement(asked) == (True, None)
        assert not kernels("NVFP4")[0].can_implement(asked)[0]

    def test_quantised_activations_and_newer_devices_are_left_to_vllm(self, vllm) -> None:
        vllm("nvfp4_linear", "mxfp4_linear")
        kernel = kernels("MXFP4")[0]
        fits, reason = kernel.can_implement(SimpleNamespace(activation_quant_key="float8, dynamic"))
        assert not fits
        assert "float8, dynamic" in reason
        assert kernel.can_implement(SimpleNamespace()) == (True, None)  # releases without that key
        importlib.import_module("vllm.platforms").current_platform.capability = 100
        fits, reason = kernels("NVFP4")[0].is_supported(100)
        assert not fits
        assert "multiplies float4 by float4" in reason


def experts_of(**options: Any) -> Any:
    """vLLM's Triton experts of a layer."""
    module = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.triton_moe")
    cls = getattr(module, options.pop("cls", "TritonExperts"))
    moe = SimpleNamespace(activation=SimpleNamespace(value=options.pop("activation", "silu")), moe_parallel_config=None)
    given = dict.fromkeys(("quant_dtype", "block_shape", "w1_scale", "w2_scale", "w1_bias", "w2_bias"))
    return cls(moe, SimpleNamespace(**given | {"per_act_token_quant": False} | options))


def apply(experts: Any, x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, **options: Any) -> Tensor:
    output = torch.full_like(x, float("nan"))
    activation = experts.moe_config.activation
    given = {"expert_map": None, "apply_router_weight_on_input": False} | options
    names = dict.fromkeys(("a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta"))
    experts.apply(
        *(output, x, w1, w2, weights, ids, activation, -1, given["expert_map"]),
        *names.values(),
        given["apply_router_weight_on_input"],
    )
    return output


def routed(tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    values, ids = torch.rand(tokens, experts).topk(top_k)
    return values, ids


class TestExperts:
    @pytest.mark.parametrize("mapped", [False, True])
    @pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
    def test_without_quantisation(self, vllm, activation, mapped) -> None:
        vllm("experts")
        torch.manual_seed(0)
        x = torch.randn(9, 64, dtype=torch.bfloat16)
        w1, w2 = torch.randn(8, 64, 64, dtype=torch.bfloat16) / 8, torch.randn(8, 64, 32, dtype=torch.bfloat16) / 8
        weights, ids = routed(9, 8, 3)
        expert_map = None
        if mapped:
            expert_map = torch.full((8,), -1, dtype=torch.int32)
            expert_map[[1, 4, 6]] = torch.tensor([2, 0, 1], dtype=torch.int32)
            w1, w2 = w1[:3], w2[:3]
        got = apply(experts_of(activation=activation), x, w1, w2, weights, ids, expert_map=expert_map)
        named = {"activation": activation, "expert_map": expert_map}
        want = kernelhub.fused_moe.reference(x, w1, w2, weights, ids.int(), **named)
        close(got, want.double())

    @pytest.mark.parametrize("block", [False, True], ids=["per channel", "blocks"])
    def test_float8(self, vllm, block) -> None:
        vllm("experts")
        torch.manual_seed(0)
        x = torch.randn(9, 256, dtype=torch.bfloat16)
        w1, w2 = (torch.randn(4, *size).to(torch.float8_e4m3fn) for size in ((256, 256), (256, 128)))
        sizes = ((4, 2, 2), (4, 2, 1)) if block else ((4, 256, 1), (4, 256, 1))
        s1, s2 = (torch.rand(size) / 100 + 0.01 for size in sizes)
        options = {"quant_dtype": torch.float8_e4m3fn, "w1_scale": s1, "w2_scale": s2}
        experts = experts_of(**options, block_shape=[128, 128] if block else None, per_act_token_quant=not block)
        assert experts.expects_unquantized_inputs  # kernelhub quantises
        weights, ids = routed(9, 4, 2)
        got = apply(experts, x, w1, w2, weights, ids)
        want = kernelhub.fused_moe.reference(x, w1, w2, weights, ids.int(), w13_scale=s1, w2_scale=s2)
        close(got, want.double())

    def test_the_router_s_weights_on_the_input_are_vllm_s(self, vllm) -> None:
        vllm("experts")
        torch.manual_seed(0)
        x = torch.randn(5, 64, dtype=torch.bfloat16)
        w1, w2 = torch.randn(4, 64, 64, dtype=torch.bfloat16), torch.randn(4, 64, 32, dtype=torch.bfloat16)
        weights, ids = routed(5, 4, 1)
        got = apply(experts_of(), x, w1, w2, weights, ids, apply_router_weight_on_input=True)
        close(got, kernelhub.fused_moe.reference(x, w1, w2, torch.ones(5, 1), ids.int()).double())

    @pytest.mark.parametrize(
        "options",
        [
            {"cls": "EmulatedExperts"},
            {"activation": "relu2_no_mul"},
            {"activation": "swigluoai"},
            {"quant_dtype": torch.int8, "w1_scale": torch.ones(1), "w2_scale": torch.ones(1)},
            {"w1_scale": torch.ones(4), "w2_scale": torch.ones(4)},
            {
                "quant_dtype": torch.float8_e4m3fn,
                "block_shape": [64, 64],
                "w1_scale": torch.ones(1),
                "w2_scale": torch.ones(1),
            },
            {"quant_dtype": torch.float8_e4m3fn, "w1_scale": torch.ones(4), "w2_scale": torch.ones(4)},
        ],
        ids=["a subclass", "no gate", "interleaved", "int8", "weights alone", "blocks of 64", "a scale for all"],
    )
    def test_what_it_does_not_cover_runs_as_before(self, vllm, options) -> None:
        vllm("experts")
        experts = experts_of(**options)
        assert not experts.expects_unquantized_inputs
        x, weights, ids = torch.ones(2, 64), *routed(2, 4, 1)
        assert apply(experts, x, torch.ones(4, 64, 64), torch.ones(4, 64, 32), weights, ids).eq(7.0).all()

    def test_lora_clamps_and_batch_invariance_run_as_before(self, vllm, monkeypatch) -> None:
        vllm("experts")
        x, weights, ids = torch.ones(2, 64), *routed(2, 4, 1)
        given = x, torch.ones(4, 64, 64), torch.ones(4, 64, 32), weights, ids
        for name, value in (
            ("_lora_context", object()),
            ("post_gemm2_hook", print),
            ("gemm1_clamp_limit", 7.0),
            ("activation_config", SimpleNamespace(clamp_limit=7.0)),
        ):
            experts = experts_of()
            setattr(experts, name, value)
            assert apply(experts, *given).eq(7.0).all(), name
        assert not apply(experts_of(), *given).eq(7.0).all()
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        assert apply(experts_of(), *given).eq(7.0).all()


class TestInstallation:
    def test_nothing_changes_unless_a_hook_is_named(self, vllm) -> None:
        vllm()
        assert kernels("FP8") == kernels("FP8_BLOCK") == kernels("NVFP4") == kernels("MXFP4") == ["vLLM's own"]
        assert "kernelhub.compat.vllm.linear" not in sys.modules
        assert "kernelhub.compat.vllm.experts" not in sys.modules

    def test_a_hook_is_installed_once_before_vllm_s_own(self, vllm) -> None:
        vllm("fp8_linear")
        hooks.install()
        assert [getattr(kernel, "__name__", kernel) for kernel in kernels("FP8")] == [
            "KernelhubFP8ScaledMMLinearKernel",
            "vLLM's own",
        ]
        assert len(kernels("FP8_BLOCK")) == 2
        assert kernels("NVFP4") == ["vLLM's own"]

    def test_an_unknown_hook_is_refused_with_the_nearest_name(self, vllm) -> None:
        with pytest.raises(ConfigurationError, match="did you mean fp8_linear"):
            vllm("fp8_liner")

    @pytest.mark.parametrize(
        ("hook", "old", "new"),
        [
            ("fp8_linear", "A, B, out_dtype, As, Bs, bias", "A, B, out_type, As, Bs, bias"),
            ("fp8_linear", "_POSSIBLE_FP8_BLOCK_KERNELS", "_FP8_BLOCK_KERNELS"),
            ("nvfp4_linear", "_POSSIBLE_NVFP4_KERNELS", "_NVFP4_KERNELS"),
            ("experts", "topk_weights, topk_ids, activation", "topk_ids, topk_weights, activation"),
        ],
    )
    def test_another_interface_is_an_error_that_names_release_reason_and_remedy(
        self, vllm, tmp_path, hook, old, new
    ) -> None:
        folder = tmp_path / "vllm-0.99.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.1\n")
        told = (
            rf"the hook {hook} does not fit vLLM 0\.99\.1: vllm\.model_executor.*install one of these, or remove {hook}"
        )
        with pytest.raises(ConfigurationError, match=told):
            vllm(hook, old=old, new=new)
        assert "kernelhub.compat.vllm.linear" not in sys.modules

    @pytest.mark.parametrize("release", vllm_releases.recorded())
    def test_the_recorded_interface_of_each_release(self, tmp_path, release) -> None:
        """Parameters and names as the released wheels have them (`tests/compat/vllm_releases.py`)."""
        root = vllm_releases.written(vllm_releases.recorded()[release], tmp_path)
        number = tuple(int(part) for part in release.split(".")[:2])
        first = {hook: tuple(int(part) for part in text.split(".")) for hook, text in hooks.RELEASES.items()}
        fits = {hook for hook in hooks.INTERFACES if hooks.interface(hook, root).ok}
        assert fits == {hook for hook in first if first[hook] <= number}

    @pytest.mark.parametrize("root", [Path(folder) for folder in UNPACKED] or [None], ids=str)
    def test_interfaces_of_releases(self, root) -> None:
        if root is None:
            pytest.skip("UNPACKED_VLLM names no unpacked vLLM: 1 case")
        release = tuple(int(part) for part in root.parent.name.removeprefix("vllm-").split("."))
        fits = {hook for hook in hooks.INTERFACES if hooks.interface(hook, root).ok}
        expected = {"fp8_linear", "nvfp4_linear"} if release >= (0, 20) else fits
        expected |= {"experts"} if release >= (0, 21) else set()
        expected |= {"mxfp4_linear"} if release >= (0, 22) else set()
        assert fits == expected


class TestStart:
    """The first calls, in vLLM's profile run, are what its worker's start warms up."""

    def worker(self, tokens: int = 64) -> Any:
        worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker()
        worker.device = torch.device("cpu")
        worker.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=8),
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 6], static_forward_context={}),
            model_config=SimpleNamespace(max_model_len=128, dtype=torch.bfloat16),
            speculative_config=None,
        )
        return worker

    def test_later_steps_select_nothing(self, vllm, caplog) -> None:
        caplog.set_level("INFO")
        vllm("fp8_linear", "experts")
        x = torch.randn(64, 128, dtype=torch.bfloat16)
        weight, scale = fp8(torch.randn(96, 128), 128)
        made = config(key((1, -1)), key((-1, 1), static=True), 96, 128)
        kernel = kernels("FP8")[0](made, ["weight", "weight_scale", "input_scale", "ub"])
        layer = SimpleNamespace(weight=weight.t(), weight_scale=scale)
        w1, w2 = torch.randn(4, 64, 128, dtype=torch.bfloat16), torch.randn(4, 128, 32, dtype=torch.bfloat16)
        experts = experts_of()

        def step(tokens: int) -> None:
            kernel.apply_weights(layer, x[:tokens])
            apply(experts, x[:tokens], w1, w2, *routed(tokens, 4, 2))

        step(64)  # the profile run
        assert self.worker().compile_or_warm_up_model() == "times"
        assert kernelhub.report().sealed
        for tokens in (1, 2, 3, 6, 17, 33, 64):
            step(tokens)
        assert not kernelhub.report().after_seal
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        assert "kernelhub: warming up 2 kinds of layers" in caplog.text
        assert "1 layers like fp8_gemm 96 x 128: one token: " in caplog.text
        assert "fused_moe, 4 experts of 32" in caplog.text

    def test_a_product_that_is_not_ready_is_an_error_in_the_log_and_runs(self, vllm, caplog) -> None:
        vllm("fp8_linear")
        a, a_scale = fp8(torch.randn(3, 128), 128)
        first, scale = fp8(torch.randn(96, 128), 128)
        product = torch.ops.kernelhub_vllm.fp8_product
        product(a, first, a_scale, scale, None, torch.bfloat16)
        self.worker().compile_or_warm_up_model()
        other, scale = fp8(torch.randn(80, 128), 128)
        assert product(a, other, a_scale, scale, None, torch.bfloat16).shape == (3, 80)
        assert "this step waits, since the warm-up did not cover it" in caplog.text
        assert kernelhub.report().sealed

    def test_counts_of_rows(self) -> None:
        assert Limits(100, 8, 128, (1, 6, 200)).rows() == (1, 2, 4, 6, 8, 16, 32, 64, 100)
