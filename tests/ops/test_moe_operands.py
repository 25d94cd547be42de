"""What a mixture of experts asks of memory: refused by name on a first call, on a warm one, and by a plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.ops.moe.routing.inputs import routing_inputs

SIZES = {"num_experts": 4, "top_k": 2, "hidden_size": 128, "intermediate_size": 128}
FORMATS = ("plain", "fp8_tensor", "fp8_block", "nvfp4")
KERNELS = ("torch.experts", "triton.experts", "cpp.experts")
ROUTERS = ("torch.routing", "triton.routing", "cpp.routing")


def experts(weights: str = "plain", **more: Any) -> dict[str, Any]:
    arguments = moe_inputs(tokens=4, weights=weights, **SIZES) | {"activation_dtype": torch.bfloat16}
    return arguments | {"residual": torch.randn_like(arguments["x"])} | more


def router() -> dict[str, Any]:
    return routing_inputs("glm-5", tokens=4)


def negated(tensor: Tensor) -> Tensor:
    """The same numbers, held by memory that holds their opposites."""
    made = torch.complex(torch.zeros_like(tensor, dtype=torch.float32), -tensor.float()).conj().imag
    return made if tensor.dtype is torch.float32 else made.to(tensor.dtype)


def odd(tensor: Tensor) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = {"sparse": tensor.to_sparse(), "meta": tensor.to("meta")}
        if tensor.ndim == 2:
            made |= {
                "nested": torch.nested.nested_tensor([*tensor]),
                "jagged": torch.nested.nested_tensor([*tensor], layout=torch.jagged),
                "csr": tensor.to_sparse_csr(),
            }
        if tensor.dtype is torch.float32:
            made["negative bit"] = negated(tensor)
    return made


def refused(call: Callable[[], Any], parameter: str, words: str = "") -> None:
    with pytest.raises(InvalidArgument, match=words or parameter) as caught:
        call()
    assert caught.value.parameter == parameter


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_reads_experts_whose_memory_is_not_their_numbers(kernel: str) -> None:
    good = experts("nvfp4") if kernel == "cpp.experts" else experts(w13_bias=torch.randn(4, 256))
    kernelhub.fused_moe(**good, backend=kernel)
    for name, tensor in good.items():
        if isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.bfloat16, torch.int32):
            for made in odd(tensor).values():
                refused(lambda name=name, made=made: kernelhub.fused_moe(**good | {name: made}, backend=kernel), name)
                if not made.is_meta:  # whose shape suffices
                    refused(lambda name=name, made=made: kernelhub.fused_moe.prepare(**good | {name: made}), name)
        elif isinstance(tensor, Tensor):
            refused(lambda name=name: kernelhub.fused_moe(**good | {name: good[name].to("meta")}), name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kernel", ROUTERS)
def test_no_kernel_reads_logits_whose_memory_is_not_their_numbers(kernel: str) -> None:
    good = router()
    kernelhub.route_experts(**good, backend=kernel)
    for name in ("logits", "correction_bias"):
        for made in odd(good[name]).values():
            refused(lambda name=name, made=made: kernelhub.route_experts(**good | {name: made}, backend=kernel), name)


def test_a_plan_looks_at_tokens_each_time() -> None:
    good = experts()
    step = {name: good[name] for name in ("x", "topk_weights", "topk_ids", "residual")}
    plan = kernelhub.fused_moe.prepare(**good)
    want = plan.run(**step)
    for name, tensor in step.items():
        for made in odd(tensor).values():
            refused(lambda name=name, made=made: plan.run(**step | {name: made}), name)
    refused(lambda: plan.run(**step, out=good["w2"][0][:4]), "out", "overlaps w2")
    refused(lambda: plan.run(**step, out=step["x"][:1].expand(4, -1)), "out", "overlaps itself")
    assert torch.equal(plan.run(**step), want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_destination_of_experts_has_memory_of_its_own_or_is_x_or_residual(kernel: str) -> None:
    good = experts("fp8_block")
    buffer = torch.zeros(9, 128, dtype=torch.bfloat16)
    for name in ("x", "residual"):
        place = buffer[2:6].copy_(good[name])
        run = {**good, name: place}
        want = kernelhub.fused_moe(**run, backend=kernel)
        for bad in (buffer[1:5], buffer[3:7], buffer.flatten()[257 : 257 + 512].view(4, 128)):
            refused(lambda run=run, bad=bad: kernelhub.fused_moe(**run, out=bad, backend=kernel), "out", name)
        refused(lambda run=run: kernelhub.fused_moe(**run, out=buffer[:1].expand(4, -1), backend=kernel), "out")
        same = buffer[2:6]  # another tensor of the same memory
        assert torch.equal(kernelhub.fused_moe(**run, out=same, backend=kernel), want)
    for name in ("w2", "w13_scale", "topk_weights"):
        raw = torch.zeros(200_000, dtype=torch.bfloat16)
        moved = raw.view(torch.uint8)[: good[name].nbytes].view(good[name].dtype).view(good[name].shape)
        moved.copy_(good[name])
        refused(
            lambda name=name, moved=moved, raw=raw: kernelhub.fused_moe(
                **good | {name: moved}, out=raw[8:520].view(4, 128), backend=kernel
            ),
            "out",
            name,
        )
    wide = torch.zeros(4, 256, dtype=torch.bfloat16)  # halves of one buffer lie apart
    wide[:, :128] = good["x"]
    out = kernelhub.fused_moe(**good | {"x": wide[:, :128]}, out=wide[:, 128:], backend=kernel)
    assert torch.equal(out, kernelhub.fused_moe(**good, backend=kernel))


@pytest.mark.parametrize("kernel", ROUTERS)
def test_destinations_of_a_routing_have_memory_of_their_own(kernel: str) -> None:
    good = router()
    tokens, top_k = good["logits"].shape[0], good["top_k"]
    kernelhub.route_experts(**good, backend=kernel)
    both = torch.zeros(2 * tokens, top_k)
    over = {
        "out_weights": [both[:1].expand(tokens, -1), good["logits"].flatten()[:32].view(tokens, top_k)],
        "out_ids": [both.view(torch.int32)[:1].expand(tokens, -1), good["logits"].view(torch.int32)[:, :top_k]],
    }
    for name, given in over.items():
        for bad in given:
            refused(
                lambda name=name, bad=bad: kernelhub.route_experts(**good, **{name: bad}, backend=kernel),
                name,
                "overlaps",
            )
    same = {"out_weights": both[:tokens], "out_ids": both.view(torch.int32)[1 : tokens + 1]}
    refused(lambda: kernelhub.route_experts(**good, **same, backend=kernel), "out_ids", "overlaps out_weights")


BAD_FLAGS = ("yes", 1, None, 0.0)


def test_flags_and_counts_are_what_they_say() -> None:
    good, logits = experts(), router()
    kernelhub.fused_moe(**good)
    kernelhub.route_experts(**logits)
    for bad in BAD_FLAGS:
        refused(
            lambda bad=bad: kernelhub.fused_moe(**good, apply_router_weight_on_input=bad),
            "apply_router_weight_on_input",
            "True or False",
        )
        refused(
            lambda bad=bad: kernelhub.route_experts(**logits | {"renormalize": bad}), "renormalize", "True or False"
        )
    for bad in (True, 8.0, torch.tensor(8)):
        refused(lambda bad=bad: kernelhub.route_experts(**logits | {"top_k": bad}), "top_k")
    refused(lambda: kernelhub.fused_moe(**good, limit=-1.0), "limit", "0 or more")
    refused(lambda: kernelhub.fused_moe(**good, alpha=torch.tensor(1.0)), "alpha")


@pytest.mark.parametrize(
    ("op", "kernel"), [("fused_moe", name) for name in KERNELS] + [("route_experts", name) for name in ROUTERS]
)
def test_what_torch_transforms_is_refused_when_warm_too(op: str, kernel: str) -> None:
    function = getattr(kernelhub, op)
    arguments = experts("fp8_block") if op == "fused_moe" else router()
    name = "x" if op == "fused_moe" else "logits"
    rest = {key: value for key, value in arguments.items() if key != name}
    given = arguments[name]

    def call(tensor: Tensor) -> Any:
        return function(**rest, **{name: tensor}, backend=kernel)

    want = call(given)
    refused(lambda: torch.func.jvp(call, (given,), (torch.ones_like(given),)), name, "torch.func")
    refused(lambda: torch.vmap(call)(given.expand(2, *given.shape)), name, "torch.func")
    refused(lambda: torch.jit.trace(call, (given,)), name, "jit.trace")
    with forward_ad.dual_level():
        refused(lambda: call(forward_ad.make_dual(given, torch.ones_like(given))), name, "forward gradient")
        torch.testing.assert_close(call(given), want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_ids_and_maps_of_any_value_leave_ids_out(kernel: str) -> None:
    good = experts("fp8_block")
    wild = (-1, 4, 2**31 - 1, -(2**31), 1_000_000_007)
    for table in (None, torch.tensor([2, 9, -7, 0, 2**31 - 1, -(2**31), 1], dtype=torch.int32)):
        for value in wild:
            ids = good["topk_ids"].clone()
            ids[0, 0], ids[2] = value, value
            call = good | {"topk_ids": ids, "expert_map": table}
            out = kernelhub.fused_moe(**call, backend=kernel)
            assert compare(out, call).ok
            assert torch.equal(out[2], good["residual"][2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_padded_batch_gives_its_tokens_what_they_get_alone(kernel: str) -> None:
    good = experts("fp8_block")
    want = kernelhub.fused_moe(**good, backend=kernel)
    x = torch.cat([good["x"], torch.full((3, 128), torch.nan, dtype=torch.bfloat16)])
    x[5], x[6] = torch.inf, 3e38
    padded = {
        "x": x,
        "residual": torch.cat([good["residual"], x[4:]]),
        "topk_ids": torch.cat([good["topk_ids"], torch.tensor([[0, 1], [-1, -1], [7, 3]], dtype=torch.int32)]),
        "topk_weights": torch.cat([good["topk_weights"], torch.full((3, 2), torch.nan)]),
    }
    out = kernelhub.fused_moe(**good | padded, backend=kernel)
    torch.testing.assert_close(out[:4], want, rtol=2**-7, atol=1e-3)
    assert torch.equal(out[5], x[5])


def test_groups_of_experts_are_ints_whether_or_not_the_form_is_known() -> None:
    good = {"logits": torch.randn(4, 8), "top_k": 2}
    for grouped in ({}, {"num_groups": 1, "topk_groups": 1}, {"num_groups": 4, "topk_groups": 2}):
        for name in ("num_groups", "topk_groups"):
            for wrong in (True, 1.0, 2.0, 4.0, "2", torch.tensor(2)):
                kernelhub.route_experts(**good, **grouped)
                refused(lambda: kernelhub.route_experts(**good | grouped | {name: wrong}), name)  # noqa: B023


@pytest.mark.parametrize("kernel", ROUTERS)
def test_a_router_of_one_expert_refuses_the_negative_bit(kernel: str) -> None:
    good = {"logits": torch.full((1, 1), 2.0), "top_k": 1, "scoring": "sigmoid"}
    plan = kernelhub.route_experts.prepare(**good, backend=kernel)
    for _ in range(2):
        lazy = good | {"logits": negated(good["logits"])}
        refused(lambda lazy=lazy: kernelhub.route_experts(**lazy, backend=kernel), "logits", "negative bit")
        refused(lambda lazy=lazy: plan.run(lazy["logits"]), "logits", "negative bit")
        kernelhub.route_experts(**good, backend=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_number_with_the_negative_bit_is_refused_though_it_is_contiguous(kernel: str) -> None:
    sizes = {"num_experts": 1, "top_k": 1, "hidden_size": 128, "intermediate_size": 128}
    good = moe_inputs(tokens=1, weights="nvfp4", **sizes) | {"activation_dtype": torch.bfloat16}
    plan = kernelhub.fused_moe.prepare(**good, backend=kernel)
    step = {name: good[name] for name in ("x", "topk_weights", "topk_ids")}
    for name in ("topk_weights", "w13_global_scale", "w2_global_scale"):
        assert good[name].numel() == 1
        for _ in range(2):
            lazy = good | {name: negated(good[name])}
            refused(lambda lazy=lazy: kernelhub.fused_moe(**lazy, backend=kernel), name, "negative bit")
            kernelhub.fused_moe(**good, backend=kernel)
    refused(lambda: plan.run(**step | {"topk_weights": negated(good["topk_weights"])}), "topk_weights", "negative bit")
