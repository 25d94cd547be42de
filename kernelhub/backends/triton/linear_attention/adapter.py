"""From a call of `linear_attention` to its Triton launch."""

from __future__ import annotations

import abc
from collections.abc import Hashable
from typing import Any, NamedTuple

import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.linear_attention.linear import chunk_kernel, recurrent_kernel
from kernelhub.ops.linear_attention.adapter import LinearAdapter, States
from kernelhub.ops.linear_attention.problem import LinearProblem

if triton.knobs.runtime.interpret:
    interpreter.repair()


class _Tiles(NamedTuple):
    """Tokens at a time, columns of the state that a program carries, and how it runs."""

    chunk: int
    block_v: int
    num_warps: int
    num_stages: int


def _chunk_tiles(problem: LinearProblem) -> _Tiles:
    """In bfloat16, where products are asynchronous, as many columns as tokens, whatever the width of v.

    With 64 tokens by 32 or 16 columns, or 128 by 32, Triton 3.6 makes wrong results on an H200, and now and then an
    illegal access, where q is not loaded by asynchronous copies: widths that are no multiple of 8, tokens next to each
    other, or one stage. There q goes to both of its products (scores and state, whose wgmma are then of different
    widths) from registers. The state stays right, and so is all with products of equal width, or of 32 tokens.

    MiniMax-Text-01's 1 x 4096, 8 x 2048 and 1 x 32768 tokens take 0.18, 0.48 and 1.34 ms on an H200 with 64 x 64, 4
    warps and 1 stage; 0.20, 0.49, 1.52 with 2 stages, 0.21, 0.81, 1.59 with 8 warps; 0.26, 0.71, 2.01 with 32 x 64;
    0.38, 1.48, 3.01 with 32 x 32. These tiles spill 72 to 96 bytes there, and hundreds where
    products are mma.sync, which keep tiles of 32 columns.

    Tiles of 64 x 64 in TF32 spill a kilobyte on sm_90, whose warpgroups take no fewer rows; 32 rows go another way.
    """
    columns = max(16, triton.next_power_of_2(problem.value_dim))
    if problem.dtype == "float32":  # multiplied without tensor cores, by operands in registers
        return _Tiles(16, min(16, columns), 8, 1)
    if problem.dtype == "float16":
        return _Tiles(32, min(32, columns), 8, 2)
    if problem.device.capability[0] in (9, 10):
        return _Tiles(64, 64, 4, 1)
    return _Tiles(64, min(32, columns), 8, 2)


def _recurrent_tiles(problem: LinearProblem) -> _Tiles:
    """A state's tile of 128 x 32 is 32 registers per thread of 4 warps."""
    width = triton.next_power_of_2(problem.head_dim)
    columns = triton.next_power_of_2(problem.value_dim)
    return _Tiles(1, min(32 if width <= 128 else 16, columns), 4, 1)


class TritonLinear(LinearAdapter):
    """Shared by both kernels. A subclass selects the kernel and its static arguments."""

    def __init__(self, problem: LinearProblem) -> None:
        super().__init__(problem)
        self._launchers: dict[tuple[bool, bool], Launcher] = {}
        self._repeated = Repeated()
        self._tiles = self.tiles()
        self._programs = -(-problem.value_dim // self._tiles.block_v) * problem.num_heads

    @abc.abstractmethod
    def tiles(self) -> _Tiles:
        """Sizes for the problem."""

    @abc.abstractmethod
    def launcher(self, static: dict[str, Any]) -> Launcher:
        """The kernel with the static arguments of both and its own."""

    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        states: States,
        out: Tensor,
    ) -> None:
        given = (q, k, v, decay, scale, cu_seqlens, states, out)
        self._repeated.run(*_identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*_identified(*given))

    def _launch_anew(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        states: States,
        out: Tensor,
    ) -> None:
        cu_seqlens, before_at, after_at = (
            tensor if tensor is None else tensor.contiguous()
            for tensor in (cu_seqlens, states.before_at, states.after_at)
        )
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        batches, strides = zip(*(_strides(tensor) for tensor in (q, k, v, out)), strict=True)
        inner = tuple(stride for one in strides for stride in one)
        pools = tuple(
            stride
            for pool in (states.before, states.after)
            for stride in ((0, 0, 0, 0) if pool is None else pool.stride())
        )
        pointers = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
        for pool in (states.before, states.after):
            pointers |= 0 if pool is None else pool.data_ptr()
        variant = (out.get_device(), batches, inner, pools, decay.stride(0))
        with on_device_of(out):
            self._launcher(before_at is not None, after_at is not None)(
                self._programs * sequences,
                None if pointers & 15 else variant,
                q,
                k,
                v,
                decay,
                cu_seqlens,
                states.before,
                before_at,
                states.after,
                after_at,
                out,
                q.shape[-3],
                0 if states.before is None else states.before.shape[0],
                0 if states.after is None else states.after.shape[0],
                float(scale),
                *(stride for batch, one in zip(batches, strides, strict=True) for stride in (batch, *one)),
                decay.stride(0),
                *pools,
            )

    def _launcher(self, has_before_at: bool, has_after_at: bool) -> Launcher:
        made = self._launchers.get((has_before_at, has_after_at))
        if made is None:
            problem = self.problem
            made = self._launchers[has_before_at, has_after_at] = self.launcher(
                {
                    "HEADS": problem.num_heads,
                    "D": problem.head_dim,
                    "D_PAD": max(16, triton.next_power_of_2(problem.head_dim)),
                    "DV": problem.value_dim,
                    "BLOCK_V": self._tiles.block_v,
                    "RAGGED": problem.ragged,
                    "HAS_BEFORE": problem.state,
                    "HAS_BEFORE_AT": problem.state and has_before_at,
                    "HAS_AFTER": problem.out_state,
                    "HAS_AFTER_AT": has_after_at,
                }
            )
        return made


class Chunked(TritonLinear):
    """Prefill: chunk after chunk."""

    def tiles(self) -> _Tiles:
        return _chunk_tiles(self.problem)

    def launcher(self, static: dict[str, Any]) -> Launcher:
        more = {
            "CHUNK": self._tiles.chunk,
            "WIDE": self.problem.dtype == "float16",
            "PRECISION": "tf32" if self.problem.dtype == "float16" else "ieee",
        }
        return Launcher(chunk_kernel, {**static, **more}, self._tiles.num_warps, self._tiles.num_stages)


class Recurrent(TritonLinear):
    """Decode: token after token."""

    def tiles(self) -> _Tiles:
        return _recurrent_tiles(self.problem)

    def launcher(self, static: dict[str, Any]) -> Launcher:
        return Launcher(recurrent_kernel, static, self._tiles.num_warps, self._tiles.num_stages)


def _identified(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    states: States,
    out: Tensor,
) -> tuple[Hashable, tuple[Tensor, ...]]:
    """The key and the tensors of a call that may be repeated; one tensor may be in two places, and then is so again."""
    places = (q, k, v, decay, out, cu_seqlens, *states)
    tensors = tuple({id(tensor): tensor for tensor in places if tensor is not None}.values())
    same = tuple(
        next(at for at, one in enumerate(tensors) if one is tensor) if tensor is not None else None for tensor in places
    )
    return (q.shape, scale, same), tensors


def _strides(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """Of the batch, 0 where sequences are ragged, and of (token, head, width)."""
    *batch, token, head, width = tensor.stride()
    return (batch[0] if batch else 0), (token, head, width)
