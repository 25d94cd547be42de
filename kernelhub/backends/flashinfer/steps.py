"""A step of attention as FlashInfer's wrappers take it: where queries and keys are, operands, plans and how they run.

A wrapper holds the plan of one step: its tables on the device, a copy of them in pinned memory, and scratch. So a
step has a wrapper to itself until it is forgotten. Then another step takes it, on the same stream, where what the
first one launched has its place before; and only once the copy from pinned memory is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from kernelhub.backends.shared.operands import aligned
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.graph_memory import captures, in_tree
from kernelhub.ops.host import refuse_in_graph
from kernelhub.runtime.counters import capture_of


class Pages(NamedTuple):
    """The keys of a paged step in compressed rows.

    Attributes:
        offsets: int32 [num_seqs + 1] on the host, where the pages of each sequence begin in `indices`.
        indices: int32 [offsets[-1]] on the device, the pages of all sequences one after the other.
        last: int32 [num_seqs] on the host, tokens in each sequence's last page.
    """

    offsets: Tensor
    indices: Tensor
    last: Tensor


def pages_of(step: PagedStep, page_size: int) -> Pages:
    """Compress the block table. The host's lengths determine all sizes, so nothing waits for the device."""
    lengths = step.lengths()
    counts = [-(-length // page_size) for length in lengths]
    offsets = int32([0, *accumulate(counts)])
    last = int32(
        [length - (count - 1) * page_size if count else 0 for length, count in zip(lengths, counts, strict=True)]
    )
    table, total = step.block_table, sum(counts)
    device = table.device
    if total == 0:
        return Pages(offsets, torch.zeros(1, dtype=torch.int32, device=device), last)
    on_device = offsets.to(device, non_blocking=True)
    rows = torch.arange(step.num_seqs, dtype=torch.int32, device=device)
    row = rows.repeat_interleave(on_device.diff(), output_size=total)
    column = torch.arange(total, dtype=torch.int32, device=device) - on_device[row]
    return Pages(offsets, table[row, column].contiguous(), last)


def first_page(device: torch.device) -> Pages:
    """One sequence of one token in page 0."""
    return Pages(int32([0, 1]), torch.zeros(1, dtype=torch.int32, device=device), int32([1]))


def query_offsets(step: PagedStep, tokens: int) -> list[int]:
    """Where the queries of each sequence begin, and end; `tokens` are those of each, unless they are ragged."""
    if step.cu_seqlens_q is not None:
        return step.q_offsets()
    return [tokens * place for place in range(step.num_seqs + 1)]


def unseeing(q_offsets: Sequence[int], kv_lens: Sequence[int], causal: bool, device: torch.device) -> Tensor | None:
    """Rows of q that see no key, as indices on the device; None if every row sees one.

    Kernels leave there whatever they did of masked scores, and the op promises zeros.
    """
    blind: list[int] = []
    for start, end, length in zip(q_offsets, q_offsets[1:], kv_lens, strict=False):
        hidden = end - start if length == 0 else max(0, end - start - length) if causal else 0
        blind.extend(range(start, start + hidden))
    if not blind:
        return None
    return torch.tensor(blind, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


class Seeing(NamedTuple):
    """The queries that see a key, for kernels that give wrong results if other queries are among them.

    Attributes:
        rows: int64 on the device, which rows of q they are; None for all of them.
        sequences: the sequences that have any; None for all of them.
        q_lens: how many of them each of those sequences has.
        kv_lens: and how many keys.
    """

    rows: Tensor | None
    sequences: list[int] | None
    q_lens: list[int]
    kv_lens: list[int]


def seeing(q_offsets: Sequence[int], kv_lens: Sequence[int], causal: bool, device: torch.device) -> Seeing:
    """The rows of q that see a key: those at the end of each sequence, if causal."""
    counts = [
        min(end - start, length) if causal or not length else end - start
        for start, end, length in zip(q_offsets, q_offsets[1:], kv_lens, strict=False)
    ]
    rows: Tensor | None = None
    if sum(counts) < q_offsets[-1]:
        seen = [row for end, count in zip(q_offsets[1:], counts, strict=True) for row in range(end - count, end)]
        rows = torch.tensor(seen, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    sequences = [i for i, count in enumerate(counts) if count]
    return Seeing(
        rows,
        sequences if len(sequences) < len(counts) else None,
        [counts[i] for i in sequences],
        [kv_lens[i] for i in sequences],
    )


def int32(values: Sequence[int]) -> Tensor:
    """A tensor on the host, as plans are made from."""
    return torch.tensor(values, dtype=torch.int32, device="cpu")


LN2 = math.log(2.0)
_EXPONENTS = (-6, 1)  # of factors from 2 ** -7 to 2: those of real models, as they are


def alike(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Both aligned and with the same strides, since kernels read one by the strides of the other.

    A cache that is neither is copied as a whole, which costs more than the attention.
    """
    k, v = aligned(k), aligned(v)
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    return k, v


def split_scale(scale: float) -> tuple[float, float]:
    """A factor of scores as one that kernels are right with, and a power of two for q that makes up for it.

    Masked scores are -5e4 before they are multiplied by the factor: with one that is negative, zero or tiny they would
    be seen. Multiplying q by a power of two rounds nothing.
    """
    if scale == 0.0:
        return 1.0, 0.0
    mantissa, exponent = math.frexp(scale)
    if mantissa > 0 and _EXPONENTS[0] <= exponent <= _EXPONENTS[1]:
        return scale, 1.0
    return abs(mantissa) / 8, math.copysign(math.ldexp(8.0, exponent), mantissa)


def write_lse(base2: Tensor, lse: Tensor) -> None:
    """An LSE to base 2 of [T, H] as the natural one of [H, T] or [num_seqs, H, tokens]."""
    if lse.ndim == 3:
        num_seqs, heads, tokens = lse.shape
        base2 = base2.view(num_seqs, tokens, heads).transpose(1, 2)
    else:
        base2 = base2.t()
        lse = lse[:, : base2.shape[1]]
    torch.mul(base2, LN2, out=lse)


RECOMMENDED_BYTES = 128 << 20  # what the library recommends for the scratch of split keys
TABLES_BYTES = 8 << 20  # of a wrapper on the device, and as many in pinned memory
_MOST_BYTES = 2 << 30
_MOST_WRAPPERS = 16  # of an adapter on a stream

SEMAPHORE_BYTES = 8 << 20  # at the beginning of scratch: zero between launches


class _Scratch:
    """What the kernels of a family share on a stream, or in the graphs that are captured there.

    Attributes:
        memory: the last is the largest; captured graphs have the addresses of those before it.
        capture: the one that zeroed the semaphores last, as a part of its graph.
    """

    def __init__(self) -> None:
        self.memory: list[Tensor] = []
        self.capture = 0


_scratch: dict[tuple[str, int, int, bool], _Scratch] = {}


def stream_of(device: torch.device) -> int:
    """The stream that work is put on now."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def workspace(family: str, device: torch.device, stream: int, num_bytes: int = RECOMMENDED_BYTES) -> Tensor:
    """Scratch of a family of kernels on a stream, zero at first, since some keep semaphores in it.

    Kernels on a stream run one after the other, so all of them may share it. Those of graphs have their own, and each
    graph zeroes the semaphores: the graph in which the memory was made may never run.
    """
    index = -1 if device.index is None else device.index
    if device.type == "cuda" and in_tree(index):
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    captured = device.type == "cuda" and captures()
    have = _scratch.setdefault((family, index, stream, captured), _Scratch())
    larger = not have.memory or have.memory[-1].numel() < num_bytes
    if larger:
        have.memory.append(torch.zeros(num_bytes, dtype=torch.uint8, device=device))
    if captured:
        capture = capture_of(stream)
        if not larger and (capture != have.capture or not capture):
            have.memory[-1][:SEMAPHORE_BYTES].zero_()
        have.capture = capture
    return have.memory[-1]


class _Wrapper:
    """A wrapper of the library, and when its last plan has reached the device."""

    def __init__(self, made: Any, num_bytes: int, device: torch.device) -> None:
        self.made = made
        self.num_bytes = num_bytes
        self.copied = torch.cuda.Event() if device.type == "cuda" else None


class Lease:
    """A planned wrapper that one step uses; it is released with the step."""

    __slots__ = ("_idle", "_wrapper", "run")

    def __init__(self, wrapper: _Wrapper, idle: list[_Wrapper]) -> None:
        self._wrapper = wrapper
        self._idle = idle
        self.run: Callable[..., Any] = wrapper.made.run

    def __del__(self) -> None:
        self._idle.append(self._wrapper)


class _Wrappers:
    """Those of an adapter on a stream: how many there are, and which of them no step uses."""

    def __init__(self) -> None:
        self.count = 0
        self.idle: list[_Wrapper] = []


class Pool:
    """The wrappers of one adapter.

    Args:
        make: a wrapper of the library, given scratch.
    """

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self._make = make
        self._wrappers: dict[tuple[torch.device, int], _Wrappers] = {}
        self._num_bytes = RECOMMENDED_BYTES

    def plan(self, device: torch.device, stream: int, fill: Callable[[Any], None]) -> Lease:
        """A wrapper that `fill` has planned on the stream that is current.

        Scratch that is too small, which the library says when it plans, is made larger.
        """
        pooled = device.type == "cuda" and in_tree(device.index)
        known = _Wrappers() if pooled else self._wrappers.setdefault((device, stream), _Wrappers())
        while True:
            wrapper = self._take(device, stream, known)
            try:
                fill(wrapper.made)
            except Exception as error:
                if "workspace buffer size" not in str(error) or wrapper.num_bytes >= _MOST_BYTES:
                    known.idle.append(wrapper)
                    raise
                self._num_bytes = max(self._num_bytes, 2 * wrapper.num_bytes)
                known.count -= 1
                continue
            if wrapper.copied is not None:
                wrapper.copied.record(torch.cuda.current_stream(device))
            return Lease(wrapper, known.idle)

    def _take(self, device: torch.device, stream: int, known: _Wrappers) -> _Wrapper:
        """One whose last plan was copied; a new one; or, where there are very many, the oldest once it is copied."""
        for place, wrapper in enumerate(known.idle):
            if wrapper.copied is None or wrapper.copied.query():
                return known.idle.pop(place)
        if known.idle and known.count >= _MOST_WRAPPERS:
            oldest = known.idle.pop(0)
            assert oldest.copied is not None
            oldest.copied.synchronize()
            return oldest
        known.count += 1
        num_bytes = self._num_bytes
        return _Wrapper(self._make(workspace("wrappers", device, stream, num_bytes)), num_bytes, device)


_MOST_PLANS = 8  # of a step: layers that differ in their windows, or calls that differ in their sizes


class Wanted(NamedTuple):
    """The contents of a plan besides the step's lengths. FlashInfer needs them to plan; an op gives them at launch.

    Attributes:
        shape: sizes that no step has; else empty.
        stream: where the kernel is launched.
        sm_scale: factor of the scores, that of an fp8 key included.
        window_left: keys before its own position that a query sees, -1 for no limit.
        softcap: bound of the scores, 0.0 for none.
    """

    shape: tuple[int, ...]
    stream: int
    sm_scale: float
    window_left: int = -1
    softcap: float = 0.0


class PlannedStep(NamedTuple):
    """A plan of one step, ready to run.

    Attributes:
        lease: the wrapper that holds it.
        num_rows: rows of q that belong to a sequence.
        blind: rows that see no key, or None.
    """

    lease: Lease
    num_rows: int
    blind: Tensor | None


LengthsT = TypeVar("LengthsT")


class StepPlans(Generic[LengthsT]):
    """The plans of one adapter: made when a step's first layer launches, and from then on when a step begins.

    Args:
        make: a wrapper of the library, given scratch.
        fill: plan with a wrapper for lengths.
        lengths_of: step, sizes that it does not have, device -> lengths for `fill`, rows of q that belong to a
            sequence, rows that see no key.
    """

    def __init__(
        self,
        make: Callable[[Tensor], Any],
        fill: Callable[[Any, LengthsT, Wanted], None],
        lengths_of: Callable[[Any, tuple[int, ...], torch.device], tuple[LengthsT, int, Tensor | None]],
    ) -> None:
        self._pool = Pool(make)
        self._fill = fill
        self._lengths_of = lengths_of
        self._usual: Wanted | None = None

    def load(self, one_token: Callable[[torch.device], LengthsT], wanted: Wanted) -> None:
        """Plan for one token, so that the library loads or compiles its module, or reports why it cannot."""
        device = torch.device("cuda", torch.cuda.current_device())
        lengths = one_token(device)
        self._pool.plan(device, stream_of(device), lambda wrapper: self._fill(wrapper, lengths, wanted))

    def begin(self, step: Any, device: torch.device) -> None:
        """Plan for a step as it was planned for the last one, if it will be launched on this stream as that was."""
        usual = self._usual
        if usual is not None and step.num_seqs and usual.stream == stream_of(device):
            self.of(step, usual, device)

    def of(self, step: Any, wanted: Wanted, device: torch.device) -> PlannedStep:
        """The plan of a step; a new one if it has none for these values.

        Raises:
            KernelUnavailable: it is to be made while a CUDA graph is captured, whose replays would have this plan.
        """
        plans: dict[Wanted, PlannedStep] | None = step.state
        if plans is None:
            plans = step.state = {}
        plan = plans.get(wanted)
        if plan is None:
            refuse_in_graph(
                device, "FlashInfer plans on the host for the lengths of a step, and replays of a graph do not plan"
            )
            lengths, num_rows, blind = self._lengths_of(step, wanted.shape, device)
            lease = self._pool.plan(device, wanted.stream, lambda wrapper: self._fill(wrapper, lengths, wanted))
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plan = plans[wanted] = PlannedStep(lease, num_rows, blind)
            self._usual = wanted
        return plan


def wanted_for(
    shape: tuple[int, ...], scale: float, device: torch.device, window_left: int = -1, softcap: float = 0.0
) -> tuple[Wanted, float]:
    """The contents of a plan for these values, and the factor of q."""
    sm_scale, factor = split_scale(scale)
    return Wanted(shape, stream_of(device), sm_scale, window_left, softcap), factor


def attend(
    run: Callable[..., Any],
    plan: PlannedStep,
    q: Tensor,
    factor: float,
    out: Tensor,
    lse: Tensor | None,
    v_scale: float | None = None,
) -> None:
    """Run a plan into `out` and `lse`, minding what the library does not: blind rows, bases, factors, strides.

    Args:
        run: takes q of [T, H, D], aligned, and `out` and `return_lse` by name.
        plan: the plan.
        q: [T, H, D] or [num_seqs, tokens, H, D].
        factor: what q is multiplied by first.
        out: as q, of its own width.
        lse: [H, T] or [num_seqs, H, tokens], or None.
        v_scale: what the result is multiplied by.
    """
    rows = plan.num_rows
    if rows == 0:
        return
    into = out
    if q.ndim == 4:
        q = q.flatten(0, 1)
    elif rows != q.shape[0]:
        q, into = q[:rows], out[:rows]
    if factor != 1.0:
        q = q * factor
    direct = into.is_contiguous() and not into.data_ptr() & 15
    made = into if direct else into.new_empty(into.shape)
    flat = made.view(-1, *made.shape[-2:])
    if lse is None:
        run(aligned(q), out=flat)
    else:
        _, base2 = run(aligned(q), out=flat, return_lse=True)
        if plan.blind is not None:
            base2.index_fill_(0, plan.blind, -torch.inf)
        write_lse(base2, lse)
    if v_scale is not None:
        flat.mul_(v_scale)
    if plan.blind is not None:
        flat.index_fill_(0, plan.blind, 0.0)
    if not direct:
        into.copy_(made)
