"""`all_reduce_rms_norm`: the sum over the ranks of a process group, plus a residual, and its RMSNorm, or its codes."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.op import Backend, DryRun, Op
from kernelhub.dispatch.plan import publish
from kernelhub.errors import InvalidArgument, KernelhubError
from kernelhub.ops.arguments import check_wants_no_gradient, dense, describe, dtype_name, refuse
from kernelhub.ops.call_plan import Fixed
from kernelhub.ops.comm.adapter import AllReduceRmsNormAdapter
from kernelhub.ops.comm.all_reduce import same_place
from kernelhub.ops.comm.comparing import comparing
from kernelhub.ops.comm.group import resolved
from kernelhub.ops.comm.keys import from_keys
from kernelhub.ops.comm.known import GroupCalls, group_type, plain_like, plain_operand, plain_place
from kernelhub.ops.comm.preparing import TIMEOUT, CollectivePlan, prepare
from kernelhub.ops.comm.problem import ALL_REDUCE_RMS_NORM, AllReduceRmsNormProblem
from kernelhub.ops.comm.quantised_norm import FORM, bind_quantised, check_results, normed
from kernelhub.ops.comm.reference import all_reduce_rms_norm_reference
from kernelhub.ops.comm.refusing import failed_launch, inform
from kernelhub.ops.comm.sums import check_summed
from kernelhub.ops.comm.topology import connection
from kernelhub.ops.formats import E8M0
from kernelhub.ops.fused_quant.formats import LAYOUTS, Results, check_format, fresh
from kernelhub.ops.fused_quant.problem import NONE
from kernelhub.ops.operands import check_destination, check_flag, check_number, check_operand
from kernelhub.ops.operators import Traced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "all_reduce_rms_norm"


def check_operands(x: Any, residual: Any, weight: Any, eps: Any, group: Any) -> ProcessGroup:
    """Everything that the contract says of what a call reads, but scales; returns the group."""
    check_summed(NAME, x)
    if not x.ndim or not x.shape[-1]:
        refuse(NAME, "x", f"has shape {list(x.shape)}", "give [..., hidden_size] with at least one element in a row")
    check_operand(NAME, "residual", residual)
    if residual.shape != x.shape or residual.dtype is not x.dtype:
        refuse(NAME, "residual", f"is {describe(residual)}", f"x is {describe(x)}")
    check_operand(NAME, "weight", weight)
    dtypes = dict.fromkeys((x.dtype, torch.float32))
    if weight.shape != x.shape[-1:] or weight.dtype not in dtypes:
        wanted = f"give [{x.shape[-1]}] in {' or '.join(map(dtype_name, dtypes))}"
        refuse(NAME, "weight", f"is {describe(weight)}", wanted)
    for parameter, tensor in (("residual", residual), ("weight", weight)):
        check_wants_no_gradient(NAME, parameter, tensor)
        if tensor.device != x.device:
            refuse(NAME, parameter, f"is on {tensor.device}", f"move it to {x.device}")
    check_number(
        NAME, "eps", eps, "give a finite float of at least 0", lambda value: math.isfinite(value) and value >= 0
    )
    return resolved(NAME, group)


def check(
    x: Any,
    residual: Any,
    weight: Any,
    eps: Any,
    group: Any,
    out: Any,
    residual_out: Any,
    scale: Any,
    global_scale: Any,
    out_scale: Any,
) -> ProcessGroup:
    """Everything that the contract says of a call whose result is not quantised; returns the group."""
    pg = check_operands(x, residual, weight, eps, group)
    check_format(NAME, x, x.shape[-1], None, scale, global_scale, False, torch.float32, "row")
    check_places(x, residual, weight, out, residual_out, out_scale)
    return pg


def check_places(x: Tensor, residual: Tensor, weight: Tensor, out: Any, residual_out: Any, out_scale: Any) -> None:
    """The destinations of such a call, whose operands were checked."""
    if out_scale is not None:
        refuse(NAME, "out_scale", "is given for format None", "leave it out")
    for parameter, place, other in (("out", out, residual_out), ("residual_out", residual_out, out)):
        if place is not None:
            beside = {"x": x, "residual": residual}
            operands = {name: tensor for name, tensor in beside.items() if not same_place(tensor, place)}
            if other is not None:
                operands["residual_out" if parameter == "out" else "out"] = other
            check_destination(NAME, parameter, place, x.shape, x.dtype, x.device, {**operands, "weight": weight})


def bind(
    adapter: Any,
    problem: AllReduceRmsNormProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destinations, the launch. A rank without rows launches, too."""
    if problem.format != NONE:
        return bind_quantised(NAME, check_operands, adapter, problem, device, tick, elsewhere)
    launch, timeout_s, groups = adapter.launch, HUB.settings[TIMEOUT], group_type()
    dtype, weight_dtype = getattr(torch, problem.dtype), getattr(torch, problem.weight_dtype)
    world_size, hidden_size = problem.world_size, problem.hidden_size
    known, compare = GroupCalls(adapter), comparing(NAME, adapter, timeout_s)

    def is_place(residual_out: Any, out: Any, *operands: Tensor) -> bool:
        return residual_out is not out and plain_place(residual_out, operands[0].shape, dtype, device, operands)

    def run(
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        group: ProcessGroup | str,
        out: Tensor | None,
        residual_out: Tensor | None,
        scale: Tensor | None,
        global_scale: Tensor | None,
        out_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        usual = type(group) is groups and type(eps) is float and scale is global_scale is out_scale is None
        key: Any = None
        read: tuple[Any, ...] = ()
        again, made, added = 0, out, residual_out
        if usual and not getattr(x, "is_nested", True):  # a result may be in the place of x or of the residual
            in_x, in_residual = out is x, out is residual
            added_in_x, added_in_residual = residual_out is x, residual_out is residual
            key = (x.shape, eps, in_x, in_residual, added_in_x, added_in_residual, out is None, residual_out is None)
            read = None if in_x or added_in_x else x, None if in_residual or added_in_residual else residual
            calls = known.of(group)
            ready = calls.results.get(key)
            if ready is not None:
                made, added = ready.take()
                if calls.launches(key, (weight, *read, made, added)) == 2:
                    tick()
                    return made, added
                made, added = out, residual_out
            if key in calls and (not (out is None or residual_out is None) or dense(x, dtype, device)):
                made = x.new_empty(key[0]) if out is None else out
                added = x.new_empty(key[0]) if residual_out is None else residual_out
                again = known.again(calls, key, (weight, *read, made, added))
                if again == 2:
                    tick()
                    assert made is not None
                    assert added is not None
                    if out is residual_out is None:
                        known.make_ready(calls, key, made, added)
                    return made, added
        if again:
            pg: Any = group
        elif (
            usual
            and plain_operand(x, dtype, device)
            and x.ndim
            and x.shape[-1] == hidden_size
            and plain_like(residual, x.shape, dtype, device)
            and plain_like(weight, (hidden_size,), weight_dtype, device)
            and 0.0 <= eps < math.inf
            and out is not weight
            and residual_out is not weight
            and (residual_out is None or is_place(residual_out, out, x, residual, weight))
            and (out is None or plain_place(out, x.shape, dtype, device, (x, residual, weight, residual_out)))
        ):
            pg = group
        else:
            key = None
            pg = check(x, residual, weight, eps, group, out, residual_out, scale, global_scale, out_scale)
            if x.get_device() != device:
                other = elsewhere(x.get_device())
                result: tuple[Tensor, Tensor] = other(
                    x, residual, weight, eps, pg, out, residual_out, scale, global_scale, out_scale
                )
                return result
            if x.dtype is not dtype or x.shape[-1] != hidden_size:
                refuse(NAME, "x", f"is {describe(x)}", f"the plan is for {problem.dtype} [..., {hidden_size}]")
            if weight.dtype is not weight_dtype:
                refuse(NAME, "weight", f"is {describe(weight)}", f"the plan is for {problem.weight_dtype}")
        if pg.size() != world_size:
            refuse(NAME, "group", f"has {pg.size()} ranks", f"the plan is for {world_size}")
        made = x.new_empty(x.shape) if made is None else made
        added = x.new_empty(x.shape) if added is None else added
        given = (weight, *read, made, added)
        if key is not None and not again:
            calls.learn(key, given, 2, 2 * (out is residual_out is None))
        launched = (x, residual, weight, float(eps), made, added, pg, timeout_s)
        if compare is not None:
            compare(pg, normed(x, weight, eps, problem))
        tick()
        try:
            launch(*launched)
        except Exception as error:
            failed_launch(launch, error)
            raise
        if again:
            known.attach(calls, key, given, *launched)
        return made, added

    return run


_op: Op[AllReduceRmsNormProblem] = Op(
    Contract.of(
        ALL_REDUCE_RMS_NORM,
        problem_of=from_keys(AllReduceRmsNormProblem, "hidden_size", "weight_dtype", *FORM),
        adapter=AllReduceRmsNormAdapter,
        bind=bind,
        reference=all_reduce_rms_norm_reference,
        example="kernelhub.ops.comm.inputs:all_reduce_rms_norm_inputs",
    )
)
_get = _op.table.get
_contexts_used = HUB.contexts_used
_contexts = HUB.contexts.get


class AllReduceRmsNormPlan(CollectivePlan):
    """Kernels selected for a group.

    ``run(x, residual, weight, eps, out=None, residual_out=None, scale=None, global_scale=None, out_scale=None)`` is a
    whole call. `x` has the plan's dtype and hidden size, and any number of rows, which is equal on all ranks.
    A run switches between kernels by the bytes of `x`.
    """

    __slots__ = ()
    call = "x, residual, weight, eps, group, out, residual_out, scale, global_scale, out_scale"
    fixed: ClassVar[Fixed] = {
        "format": lambda problem: None if problem.format == NONE else problem.format,
        "ue8m0": attrgetter("ue8m0"),
        "scale_dtype": lambda problem: getattr(torch, problem.scale_dtype),
        "scale_layout": lambda problem: "column" if problem.column else "row",
    }


def _prepare(*args: Any, backend: Backend = None, **kwargs: Any) -> AllReduceRmsNormPlan:
    """Select once for arguments like these, compare the selection with those of the other ranks, and connect to them.

    All ranks of the group call it, in the same order. Arguments as of `all_reduce_rms_norm`.

    Raises:
        RanksDisagree: a rank gives another shape, dtype or format, selects another kernel, fails, or is missing after
            KERNELHUB_COMM_TIMEOUT_S.
    """

    def state(parsed: Any) -> dict[str, Any]:
        x, _, weight, eps, *_ = parsed.arguments
        return normed(x, weight, eps, _op.contract.problem_of(parsed.key, parsed.device))

    return prepare(_op, AllReduceRmsNormPlan, backend, args, kwargs, state)


_prepare.__annotations__["return"] = AllReduceRmsNormPlan


def _memory(
    x: Tensor, format: str | None, scale_dtype: torch.dtype, scale_layout: str, **others: Any
) -> dict[str, Tensor]:
    made = fresh(x, x.shape, format or NONE, scale_dtype, scale_layout == "column")
    return made | {"residual_out": x.new_empty(x.shape)}


@publish(
    _op,
    _prepare,
    traced=Traced(
        _memory,
        ("out", "out_scale", "residual_out"),
        {"out_scale": "format"},
        given_back={"out_scale": "scale"},
        in_place=("x", "residual"),
    ),
)
def all_reduce_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: torch.distributed.ProcessGroup | str,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    format: str | None = None,
    scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    ue8m0: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    scale_layout: str = "row",
    out_scale: Tensor | None = None,
    backend: Backend = None,
) -> Any:
    """Sum a tensor over the ranks of a process group, add a residual, and normalise: the end of a row-parallel layer.

    With ``r = sum of x over the ranks + residual``, the results are ``r`` and
    ``r / sqrt(mean(r**2) + eps) * weight``, with the mean over a row. Every rank of the group calls it, with the same
    shape and dtype, and with the same `residual`, `weight` and `eps`, so that all ranks get the same results.

    `all_reduce_rms_norm.prepare` compares shapes, dtypes, `eps` and kernel of all ranks, and names a rank that differs
    or is missing. A direct call and `plan.run` compare x, `eps` and `format` on a CPU, all of these with
    KERNELHUB_CHECK=1, and nothing on a GPU without it.

    With `format` the first result is quantised: it is that of ``rms_norm_quant(r, weight, eps, format=...)``, with r
    rounded to the dtype of `x`.

    Args:
        x: ``[..., hidden_size]``, also without rows, in float32, float16 or bfloat16: what this rank adds to the sum.
        residual: of the shape and dtype of `x`.
        weight: ``[hidden_size]``, in the dtype of `x` or float32.
        eps: added to the mean of squares; at least 0.
        group: a process group of torch.distributed that this process is in, or its registered `group_name`.
        out: destination of the normalised rows. Without `format` it may be `x` or `residual`; it must not overlap them
            otherwise.
        residual_out: destination of ``r``. It may be `x` or `residual`, and must not overlap them otherwise, nor `out`.
        format: form of the normalised rows, as of `rms_norm_quant`: None, the dtype of `x`; ``"fp8_tensor"``,
            ``"fp8_token"``, ``"fp8_group"``, ``"mxfp8"`` or ``"nvfp4"``.
        scale: for ``"fp8_tensor"`` the static scale, float32 of one element, equal on all ranks.
        global_scale: for ``"nvfp4"`` the static global scale, float32 of one element, equal on all ranks.
        ue8m0: round the scales of ``"fp8_token"`` and ``"fp8_group"`` up to powers of two.
        scale_dtype: of those scales: float32, or float8_e8m0fnu, which represents powers of two only.
        scale_layout: of those scales: ``"row"``, or ``"column"`` as of `quantize_fp8`.
        out_scale: destination of the scales.
        backend: a backend or kernel, or several in order of preference. NoKernel if none supports the call.

    Returns:
        The normalised rows; with `format` their scales, as of `rms_norm_quant`; and ``r`` in the shape and dtype of
        `x`.

    Raises:
        InvalidArgument: an argument breaks this contract. The message names the parameter.
        NoKernel: no kernel supports the call. The message gives the reason of each.
        RanksDisagree: on a CPU, or with KERNELHUB_CHECK=1, a rank calls something else, or is refused; on every
            rank, before data is sent.
        RuntimeError: on a CPU, a rank is dead, or did not join within KERNELHUB_COMM_TIMEOUT_S; the message names it.
            The group cannot be used any more.

    Source:
        Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467, after the sum of a tensor-parallel
        layer as in Megatron-LM, https://arxiv.org/abs/1909.08053.

    Example:
        >>> import torch, kernelhub
        >>> from kernelhub.ops.comm.inputs import alone
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> zeros, ones = torch.zeros(1, 2), torch.ones(2)
        >>> out, residual = kernelhub.all_reduce_rms_norm(x, zeros, ones, 0.0, alone(x.device))
        >>> torch.equal(residual, x), out.square().mean().item()
        (True, 1.0)
    """
    if type(x) is not Tensor and isinstance(x, Tensor) and not isinstance(backend, DryRun):
        return _op.traced(**locals())
    if _op.again is not None:
        again: Any | None = _op.again(
            x,
            residual,
            weight,
            eps,
            group,
            out,
            residual_out,
            format,
            scale,
            global_scale,
            ue8m0,
            scale_dtype,
            scale_layout,
            out_scale,
            backend,
        )
        if again is not None:
            return again
    try:
        try:
            if type(ue8m0) is not bool:
                ue8m0 = check_flag(NAME, "ue8m0", ue8m0)
            if scale_layout not in LAYOUTS:
                raise ValueError(scale_layout)
            pg = resolved(NAME, group)
            kind, *place = connection(NAME, pg, x, x.nbytes)
            form = (
                NONE if format is None else format,
                scale_dtype,
                ue8m0 or scale_dtype is E8M0,
                scale_layout == "column",
            )
            key = (x.dtype, pg.size(), kind, x.shape[-1], weight.dtype, *form, *place)
            hash(key)
        except (AttributeError, TypeError, ValueError, LookupError, RuntimeError, InvalidArgument):
            _check(x, residual, weight, eps, group, format, scale, global_scale, ue8m0, scale_dtype, scale_layout)
            raise
        run = _get(key) if backend is None and not (_contexts_used and _contexts()) else _op.override(key, backend)
        if run is None:
            _check(x, residual, weight, eps, group, format, scale, global_scale, ue8m0, scale_dtype, scale_layout)
            if format is None:
                check_places(x, residual, weight, out, residual_out, out_scale)
            elif isinstance(backend, DryRun):
                results = Results(NAME, _op.contract.problem_of(key, x.get_device()), x.get_device())
                check_results(NAME, results, (x, residual, weight, scale, global_scale), out, out_scale, residual_out)
            run = _op.decide(key, x.get_device(), backend)
        return run(x, residual, weight, eps, pg, out, residual_out, scale, global_scale, out_scale)
    except KernelhubError as error:
        inform(NAME, error, x, group, backend)
        raise


def _check(
    x: Any,
    residual: Any,
    weight: Any,
    eps: Any,
    group: Any,
    format: Any,
    scale: Any,
    global_scale: Any,
    ue8m0: Any,
    scale_dtype: Any,
    scale_layout: Any,
) -> None:
    """Everything that the contract says of a call but its destinations."""
    check_operands(x, residual, weight, eps, group)
    check_format(NAME, x, x.shape[-1], format, scale, global_scale, ue8m0, scale_dtype, scale_layout)
