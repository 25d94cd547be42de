"""Records of the torch kernels of grouped products."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.backends.torch import standings
from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import Between, MultipleOf, OnDevice, OneOf, Package, Rejection, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.ops.gemm.grouped.problem import A_SCALES, B_SCALES, FLOATS, FP4, FP8


@dataclass(frozen=True)
class NewerTorchOnBlackwell:
    """torch 2.8 has the kernel for sm_90 only; from 2.9 on also for sm_10x."""

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        if problem.device.capability < (10, 0):
            return None
        wanted = Package("torch", ">=2.9")
        return machine.ask(("grouped products on sm_10x", wanted), lambda: machine.package(wanted)).rejection


KERNELS = (
    Kernel(
        op="grouped_gemm",
        name="torch.per_group",
        target="kernelhub.backends.torch.gemm.grouped.per_group:PerGroup",
        summary="one product per group, operands converted to float32 if torch has no product for their dtype",
        band=Band.REFERENCE,
        constraints=(
            ANYWHERE,
            dtype_in("a_dtype", *FLOATS, FP8, FP4),
            dtype_in("b_dtype", *FLOATS, FP8, FP4),
            dtype_in("out_dtype", *FLOATS),
            anything("num_groups", "n", "k", "rows"),
        ),
        features=frozenset(
            {"masked", "a_global_scale", "global_scale", "bias"}
            | {f"a_scale={value}" for value in A_SCALES}
            | {f"b_scale={value}" for value in B_SCALES}
        ),
        graph=GraphLevel.NONE,
        reads_lengths=True,
        standings=standings.EVERYWHERE,
    ),
    Kernel(
        op="grouped_gemm",
        name="torch.grouped_mm",
        target="kernelhub.backends.torch.gemm.grouped.grouped_mm:GroupedMm",
        summary="torch's grouped product, a CUTLASS kernel that reads offsets on the device",
        # Above our portable kernel: it has TMA and a schedule for each generation, which ours has not.
        band=Band.TUNED,
        constraints=(
            OnDevice("nvidia", at_least=(9, 0), below=(11, 0)),
            NewerTorchOnBlackwell(),
            dtype_in(
                "a_dtype", "bfloat16", why="for others torch synchronises with the device and multiplies group by group"
            ),
            dtype_in("b_dtype", "bfloat16"),
            dtype_in("out_dtype", "bfloat16"),
            Between("num_groups", 1, 1023, why="one thread block prepares all groups"),
            MultipleOf("n", 8, why="rows must begin at multiples of 16 bytes"),
            MultipleOf("k", 8, why="rows must begin at multiples of 16 bytes"),
            anything("rows"),
        ),
        graph=GraphLevel.FULL,
        source="torch.nn.functional.grouped_mm",
        standings=standings.TENSOR_MEMORY,
    ),
    Kernel(
        op="grouped_gemm",
        name="torch.scaled_grouped_mm",
        target="kernelhub.backends.torch.gemm.grouped.grouped_mm:ScaledGroupedMm",
        summary="torch's grouped product of float8, scaled per row and column",
        band=Band.TUNED,
        constraints=(
            OnDevice("nvidia", only=((9, 0),)),
            dtype_in("a_dtype", FP8),
            dtype_in("b_dtype", FP8),
            dtype_in("out_dtype", "bfloat16", why="the operator returns nothing else"),
            OneOf("a_scale", ("tensor", "token"), why="the operator requires a scale per row"),
            OneOf("b_scale", ("tensor", "channel"), why="the operator requires a scale per column"),
            Between("num_groups", 1, 1023, why="one thread block prepares all groups"),
            MultipleOf("n", 16, why="rows must begin at multiples of 16 bytes"),
            MultipleOf("k", 16, why="rows must begin at multiples of 16 bytes"),
            anything("rows"),
        ),
        features=frozenset({"a_scale=tensor", "a_scale=token", "b_scale=tensor", "b_scale=channel"}),
        graph=GraphLevel.FULL,
        source="torch._scaled_grouped_mm",
        standings=standings.ON_HOPPER,
    ),
)
