"""Audits of calls with packed weights ask the reference with the checkpoint's weights that they were made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.marlin.fp4 import MarlinFp4
from kernelhub.backends.marlin.fp8 import MarlinFp8
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.evidence.audit import findings
from kernelhub.evidence.audit.replay import replay
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.weights import Matrix
from kernelhub.ops.packed import PackedWeight
from tests.backends.marlin_fake import on_the_cpu
from tests.dispatch.backends import register
from tests.ops.test_packed_experts import SIZES, Experts, Mirrored, mirrored, packed, record
from tests.warming.test_packing import Spoilt


@pytest.fixture(autouse=True)
def told_anew() -> Iterator[None]:
    findings.forget_reported()
    yield
    kernelhub.configure()


def the_audit() -> Any:
    (found,) = [item for item in kernelhub.report().audits if item.checked or item.skipped]
    return found


def experts(target: str) -> dict[str, Any]:
    module, _, name = target.partition(":")
    made = record()
    register("mirror", dataclasses.replace(made, target=f"{module}:{name}") if name else made)
    return packed(moe_inputs(**SIZES))


def test_experts_with_packed_weights_are_compared() -> None:
    arguments = experts("")
    kernelhub.configure(audit=1.0)
    for _ in range(3):
        kernelhub.fused_moe(**arguments)
    assert (the_audit().checked, the_audit().wrong, the_audit().skipped) == (3, 0, {})


def test_a_wrong_one_is_found_and_its_case_packs_again_in_a_replay(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "cache"))
    arguments = experts(f"{Spoilt.__module__}:Spoilt")
    kernelhub.configure(audit=1.0)
    kernelhub.fused_moe(**arguments)
    assert (the_audit().checked, the_audit().wrong) == (1, 1)
    (path,) = (tmp_path / "cache").rglob("*.case")
    again = replay(path)
    assert (again.kernel, again.ok, again.code) == ("mirror.k", False, "wrong_numbers")
    assert replay(path, backend="torch.experts").ok


def test_a_weight_of_which_the_checkpoint_is_not_known_is_counted_and_shown() -> None:
    arguments = experts("")
    for name in ("w13", "w2"):
        known: PackedWeight = arguments[name]
        tensors = {part: None if tensor is None else tensor.clone() for part, tensor in known.tensors.items()}
        arguments[name] = dataclasses.replace(known, tensors=tensors)
    kernelhub.configure(audit=1.0)
    kernelhub.fused_moe(**arguments)
    assert (the_audit().checked, the_audit().skipped) == (0, {"packed": 1})
    assert "skipped 1 (packed)" in str(kernelhub.report())
    (told,) = kernelhub.health().not_compared
    assert told == "1 calls: its weight is packed for the kernel, and the original weight is not available"


class Arranging(Mirrored):
    """Reads a checkpoint, and lays its weights out anew before a launch."""

    def arrange(self, w13: Matrix, w2: Matrix) -> tuple[Matrix, Matrix]:
        return w13._replace(weight=mirrored(w13.weight)), w2._replace(weight=mirrored(w2.weight))

    def launch(self, x: Any, w13: Matrix, w2: Matrix, *rest: Any) -> None:
        plain = (matrix._replace(weight=mirrored(matrix.weight)) for matrix in (w13, w2))
        Experts.launch(self, x, *plain, *rest)


def test_weights_that_a_kernel_lays_out_anew_are_compared_by_what_they_were() -> None:
    made = dataclasses.replace(record(), target=f"{__name__}:Arranging", layouts=(CHECKPOINT,), packs_to="")
    register("mirror", made)
    arguments = moe_inputs(**SIZES)
    layer = {name: arguments[name] for name in ("w13", "w2")}
    kernelhub.configure(audit=1.0)
    kernelhub.fused_moe(**arguments, backend="mirror")
    plan = kernelhub.fused_moe.prepare(**arguments, backend="mirror")
    step = (arguments["x"], arguments["topk_weights"], arguments["topk_ids"])
    plan.run(*step)
    assert (the_audit().checked, the_audit().wrong, the_audit().skipped) == (2, 0, {})
    del layer
    for name in ("w13", "w2"):
        del arguments[name]
    plan.run(*step)
    assert the_audit().checked + sum(the_audit().skipped.values()) == 3


@pytest.mark.parametrize("op", ["fp4_gemm", "fp8_gemm"])
def test_products_with_packed_weights_are_compared(op, monkeypatch) -> None:
    with on_the_cpu():
        arguments = product(op)
        plan = getattr(kernelhub, op).prepare(**arguments, backend="fake", packing=True)
        weight = {name: arguments.pop(name) for name in ("b", "b_scale", "b_global_scale") if name in arguments}
        made = plan.pack(**weight)
        kernelhub.configure(audit=1.0)
        kernelhub.reload()
        getattr(kernelhub, op)(**arguments, b=made)
        assert (the_audit().checked, the_audit().wrong, the_audit().skipped) == (1, 0, {})

        adapter = MarlinFp4 if op == "fp4_gemm" else MarlinFp8
        name = "launch" if op == "fp4_gemm" else "launch_weights"
        really = getattr(adapter, name)

        def wrong(self: Any, *given: Any) -> None:
            really(self, *given)
            given[-1].mul_(1.5)

        monkeypatch.setattr(adapter, name, wrong)
        kernelhub.reload()
        getattr(kernelhub, op)(**arguments, b=made)
        assert the_audit().wrong == 1


def product(op: str) -> dict[str, Any]:
    a = torch.randn(4, 128, dtype=torch.bfloat16)
    if op == "fp4_gemm":
        b, scale, factor = kernelhub.quantize_nvfp4(torch.randn(64, 128))
        return {"a": a, "b": b, "b_scale": scale, "b_global_scale": factor}
    b = torch.randn(64, 128).to(torch.float8_e4m3fn)
    return {"a": a, "a_scale": None, "b": b, "b_scale": torch.full((64, 1), 0.25)}
