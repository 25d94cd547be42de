"""Collectives over memory of all ranks."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from kernelhub.backends.shared.slot_memory import MOST_PROGRAMS, MOST_RANKS
from kernelhub.backends.triton.comm import parts
from kernelhub.backends.triton.comm.adapter import (
    ClusteredRmsNorm,
    OneShot,
    OneShotRmsNorm,
    PolledRmsNorm,
    TwoShot,
    TwoShotRmsNorm,
)
from kernelhub.backends.triton.comm.experts.adapter import PushRows, PushSums
from kernelhub.backends.triton.comm.experts.exact import PushRowsExact, PushSumsExact
from kernelhub.backends.triton.comm.quantised import OneShotRmsNormQuant, TwoShotRmsNormQuant
from kernelhub.ops.comm.experts.adapter import Outgoing
from kernelhub.ops.comm.experts.problem import BLOCK, FORMATS, FP8, CombineProblem, DispatchProblem
from kernelhub.ops.comm.experts.received import Handle, Header
from kernelhub.ops.comm.problem import (
    ATOMICS,
    MESSAGE_BYTES,
    NVLINK,
    AllGatherProblem,
    AllReduceProblem,
    AllReduceRmsNormProblem,
    ReduceScatterProblem,
)
from kernelhub.ops.fused_quant.formats import GIVEN, Results
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case, is_for

_GROUP: Any = SimpleNamespace(group_name="ranks that are not here")


def _workspace(world_size: int) -> Any:
    return SimpleNamespace(
        rank=1,
        world_size=world_size,
        shared=lambda *more: None,
        zeros=lambda count: torch.empty(count, dtype=torch.int32, device="cuda"),
        capacity=1 << 20,
        device=torch.device("cuda", 0),
        slots=(*[1 << 40] * world_size, *[0] * (MOST_RANKS - world_size)),
        counters=torch.empty(MOST_PROGRAMS, dtype=torch.int32, device="cuda"),
        turn_slots=(*[1 << 40] * world_size, *[0] * (MOST_RANKS - world_size)),
        turn_counters=torch.empty(MOST_PROGRAMS, dtype=torch.int32, device="cuda"),
        missing=torch.empty(MOST_RANKS, dtype=torch.int8, device="cuda"),
        late=list,
        owner=None,
        follow_last_call=lambda: None,
    )


def _launch(adapter: Any, message: str, world_size: int, dtype: str, device: DeviceFacts) -> None:
    facts = {"device": device, "link": NVLINK, "peers": ATOMICS, "message": message}
    made = adapter(AllReduceProblem(**facts, dtype=dtype, world_size=world_size))
    made.attach(_GROUP.group_name, _workspace(world_size))
    of = getattr(torch, dtype)
    count = min(MESSAGE_BYTES[message] // 4, made.longest // of.itemsize)  # one launch
    x = torch.empty(count, dtype=of, device="cuda")
    made.launch(x, x, _GROUP, 60.0)


def _launch_norm(adapter: Any, hidden_size: int, world_size: int, dtype: str, device: DeviceFacts) -> None:
    facts = {"device": device, "link": NVLINK, "peers": ATOMICS, "message": "256KB", "weight_dtype": dtype}
    problem = AllReduceRmsNormProblem(**facts, dtype=dtype, world_size=world_size, hidden_size=hidden_size)
    if not is_for("all_reduce_rms_norm", adapter, problem):
        return
    made = adapter(problem)
    made.attach(_GROUP.group_name, _workspace(world_size))
    x, residual, out, residual_out = (
        torch.empty(8, hidden_size, dtype=getattr(torch, dtype), device="cuda") for _ in range(4)
    )
    weight = torch.empty(hidden_size, dtype=getattr(torch, dtype), device="cuda")
    made.launch(x, residual, weight, 1e-6, out, residual_out, _GROUP, 60.0)


def _launch_quantised(
    adapter: Any, form: str, hidden_size: int, world_size: int, dtype: str, device: DeviceFacts
) -> None:
    facts = {"device": device, "link": NVLINK, "peers": ATOMICS, "message": "256KB", "weight_dtype": dtype}
    problem = AllReduceRmsNormProblem(**facts, dtype=dtype, world_size=world_size, hidden_size=hidden_size, format=form)
    made = adapter(problem)
    made.attach(_GROUP.group_name, _workspace(world_size))
    x, residual, added = (torch.empty(8, hidden_size, dtype=getattr(torch, dtype), device="cuda") for _ in range(3))
    weight, given = torch.empty(hidden_size, dtype=x.dtype, device="cuda"), torch.empty(1, device="cuda")
    out, scale = Results("all_reduce_rms_norm", problem, 0).completed(x, (8, hidden_size), None, None)
    made.launch(x, residual, weight, 1e-6, out, added, _GROUP, 60.0, given if form in GIVEN else None, scale)


def _launch_parts(gathers: bool, message: str, world_size: int, dtype: str, device: DeviceFacts) -> None:
    facts: dict[str, Any] = {"device": device, "link": NVLINK, "peers": ATOMICS, "message": message}
    adapter, problem = (parts.AllGather, AllGatherProblem) if gathers else (parts.ReduceScatter, ReduceScatterProblem)
    made: Any = adapter(problem(**facts, dtype=dtype, world_size=world_size))
    of = getattr(torch, dtype)
    columns = MESSAGE_BYTES[message] // (of.itemsize * world_size)
    part, whole = (torch.empty(rows, columns, dtype=of, device="cuda") for rows in (1, world_size))
    x, out = (part, whole) if gathers else (whole, part)
    with mock.patch.object(parts, "workspace_for", return_value=_workspace(world_size)):
        made.connect(x, _GROUP, 60.0)
    made.launch(x, out, _GROUP, 60.0)


def _dispatch(
    dtype: str, top_k: int, world_size: int, format: str, device: DeviceFacts, adapter: Any = PushRows
) -> None:
    facts: dict[str, Any] = {"device": device, "link": NVLINK, "peers": ATOMICS, "format": format, "top_k": top_k}
    problem = DispatchProblem(**facts, dtype=dtype, world_size=world_size, scales=dtype == FP8)
    made = adapter(problem)
    made.attach(_GROUP.group_name, _workspace(world_size))
    x = torch.empty(64, problem.hidden_size, dtype=getattr(torch, dtype), device="cuda")
    scales = torch.empty(64, problem.hidden_size // BLOCK, device="cuda") if problem.scales else None
    ids = torch.empty(64, top_k, dtype=torch.int32, device="cuda")
    outgoing = Outgoing(x, scales, ids, torch.empty(64, top_k, device="cuda"), 128)
    with _lengths(world_size):
        made.launch(outgoing, _GROUP, 60.0)


def _combine(
    dtype: str, top_k: int, world_size: int, format: str, device: DeviceFacts, adapter: Any = PushSums
) -> None:
    facts: dict[str, Any] = {"device": device, "link": NVLINK, "peers": ATOMICS, "format": format, "top_k": top_k}
    problem = CombineProblem(**facts, dtype=dtype, world_size=world_size)
    made = adapter(problem)
    made.attach(_GROUP.group_name, _workspace(world_size))
    received = world_size * 128
    y = torch.empty(received, problem.hidden_size, dtype=getattr(torch, dtype), device="cuda")
    ids, slots = (torch.empty(rows, top_k, dtype=torch.int32, device="cuda") for rows in (64, received))
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    state = torch.empty(0, dtype=torch.int32, device="cuda")
    handle = Handle(none, ids, slots, torch.empty(received, top_k, device="cuda"), none, none, state)
    header = Header(FORMATS.index(format), 2, world_size, problem.num_experts, 64, 128, received)
    with _lengths(world_size):
        made.launch(y, handle, header, torch.empty(64, problem.hidden_size, dtype=y.dtype, device="cuda"), _GROUP, 60.0)


def _lengths(world_size: int) -> Any:
    """While it lasts, what a call without a capacity reads are numbers of tokens, which fake tensors do not have."""
    return mock.patch.object(FakeTensor, "tolist", return_value=[128] * world_size)


CASES = [
    *(
        Case(f"{name} of {ranks} ranks, {dtype}, {format}", functools.partial(launch, dtype, top_k, ranks, format))
        for name, launch, dtype, top_k, ranks, format in (
            ("dispatch", _dispatch, "bfloat16", 8, 2, FORMATS[0]),
            ("dispatch", _dispatch, FP8, 8, 8, FORMATS[0]),
            ("dispatch", _dispatch, FP8, 8, 8, FORMATS[1]),
            ("dispatch", _dispatch, "bfloat16", 32, 2, FORMATS[2]),
            ("combine", _combine, "bfloat16", 8, 2, FORMATS[0]),
            ("combine", _combine, "bfloat16", 8, 8, FORMATS[1]),
        )
    ),
    *(
        Case(
            f"exact {name} of {ranks} ranks, {dtype}, {format}",
            functools.partial(launch, dtype, 8, ranks, format, adapter=adapter),
        )
        for name, launch, adapter, dtype, ranks, format in (
            ("dispatch", _dispatch, PushRowsExact, "bfloat16", 2, FORMATS[0]),
            ("dispatch", _dispatch, PushRowsExact, FP8, 8, FORMATS[0]),
            ("combine", _combine, PushSumsExact, "bfloat16", 2, FORMATS[0]),
            ("combine", _combine, PushSumsExact, "bfloat16", 8, FORMATS[2]),
        )
    ),
    *(
        Case(
            f"{name} of {ranks} ranks, {message}, {dtype}",
            functools.partial(_launch_parts, gathers, message, ranks, dtype),
        )
        for name, gathers in (("all-gather", True), ("reduce-scatter", False))
        for ranks, message, dtype in ((2, "32KB", "bfloat16"), (8, "8MB", "float32"))
    ),
    *(
        Case(
            f"{name} sum of {ranks} ranks to {message}, {dtype}",
            functools.partial(_launch, adapter, message, ranks, dtype),
        )
        for name, adapter in (("one-shot", OneShot), ("two-shot", TwoShot))
        for ranks, message, dtype in ((2, "32KB", "bfloat16"), (8, "8MB", "float32"))
    ),
    *(
        Case(
            f"sum of {ranks} ranks and norm, {width} wide{steps}",
            functools.partial(_launch_norm, adapter, width, ranks, "bfloat16"),
        )
        for ranks, width, adapter, steps in (
            (2, 4096, OneShotRmsNorm, ""),
            (4, 4096, OneShotRmsNorm, ""),
            (4, 7168, OneShotRmsNorm, ""),
            (8, 8192, OneShotRmsNorm, ""),
            (2, 4096, PolledRmsNorm, ", polled"),
            (2, 7168, PolledRmsNorm, ", polled"),
            *((2, width, ClusteredRmsNorm, ", in clusters") for width in (4096, 7168, 8192)),
            (4, 4096, TwoShotRmsNorm, ", in two steps"),
            (8, 8192, TwoShotRmsNorm, ", in two steps"),
        )
    ),
    *(
        Case(
            f"sum of {ranks} ranks and norm in {form}, {width} wide{steps}",
            functools.partial(_launch_quantised, adapter, form, width, ranks, dtype),
        )
        for ranks, width, dtype, form, adapter, steps in (
            (2, 4096, "bfloat16", "fp8_tensor", OneShotRmsNormQuant, ""),
            (8, 8192, "bfloat16", "fp8_token", OneShotRmsNormQuant, ""),
            (2, 7168, "bfloat16", "fp8_group", OneShotRmsNormQuant, ""),
            (8, 8192, "bfloat16", "nvfp4", OneShotRmsNormQuant, ""),
            (2, 4096, "float16", "mxfp8", OneShotRmsNormQuant, ""),
            (4, 7168, "bfloat16", "fp8_group", TwoShotRmsNormQuant, ", in two steps"),
            (8, 8192, "bfloat16", "nvfp4", TwoShotRmsNormQuant, ", in two steps"),
        )
    ),
]
