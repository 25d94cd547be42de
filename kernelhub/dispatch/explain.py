"""`explain`: the verdict on a call or a configuration, for this machine or one that is not here."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.op import Backend, OpFunction
from kernelhub.dispatch.problem import WEIGHT_LAYOUT
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError
from kernelhub.probes.device import DeviceFacts, facts, simulated

DeviceLike = str | torch.device | DeviceFacts | None

_DTYPES = {
    "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16",
    "fp8": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn",
}  # fmt: skip


def explain(
    op: OpFunction[Any, Any, Any] | str,
    *args: Any,
    device: DeviceLike = None,
    backend: Backend = None,
    machine: Machine | None = None,
    packing: bool = False,
    **kwargs: Any,
) -> Selection[Any]:
    """What would run, who decides, and why every other kernel does not. Nothing runs and nothing is loaded.

    Args:
        op: an op, or its name.
        args: the call's arguments; the verdict is on that call. Without any tensor, `kwargs` are facets of the
            op's problem (``head_dim_qk=128, softcap=True``) and those not given keep their default.
        device: a device that need not be here, by name (``"B200"``), by architecture (``"sm_137"``) or by
            facts; by default that of the arguments, else the first GPU, else the CPU.
        backend: as in the call.
        machine: facts of another machine, e.g. a `SimulatedMachine`.
        packing: as of ``prepare``: weights as in a checkpoint will be packed with the plan's ``pack`` before the kernel
            runs, so that kernels which need that are ranked with the others.
        kwargs: the call's keyword arguments, or facets.

    Raises:
        InvalidArgument: the call breaks the op's contract.
        ConfigurationError: unknown op, device, facet or backend; or `packing` for an op without weights to pack.

    Example:
        >>> import kernelhub
        >>> verdict = kernelhub.explain("attention", device="CPU", head_dim_qk=64, head_dim_vo=64)
        >>> verdict.selected, len(verdict.decisions) == len(kernelhub.attention.kernels())
        ('torch.packed', True)
    """
    function = HUB.function(op) if isinstance(op, str) else op
    if packing and WEIGHT_LAYOUT not in function.op.contract.schema.facets:
        raise ConfigurationError(f"packing: {function.op.contract.name} takes no packed weights; leave packing out")
    if args or any(_holds_tensor(value) for value in kwargs.values()):
        asked = function.op.ask(backend, args, kwargs)
        problem = function.op.contract.problem_of(asked.key, asked.device)
        if device is not None:
            problem = dataclasses.replace(problem, device=device_facts(device))
    else:
        problem = problem_from(function.op.contract, device_facts(device), kwargs)
    return function.op.select(problem, backend, machine, packing=packing)


def _holds_tensor(value: object) -> bool:
    """A tensor, or some in a list: an argument of a call, not a facet."""
    return isinstance(value, torch.Tensor) or (
        isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value)
    )


def device_facts(device: DeviceLike) -> DeviceFacts:
    """Facts of a device in any of the forms that `explain` takes; ``"cpu"`` and ``"cuda"`` are those here."""
    if isinstance(device, DeviceFacts):
        return device
    if device is None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if isinstance(device, str):
        try:
            device = torch.device(device) if device.startswith(("cuda", "cpu")) else simulated(device)
        except (ValueError, RuntimeError) as error:
            raise ConfigurationError(f"device: {error}") from None
    if isinstance(device, DeviceFacts):
        return device
    if device.type == "cuda":
        index, count = device.index or 0, torch.cuda.device_count()
        if index >= count:
            raise ConfigurationError(
                f"device: there is no {device} here ({count} GPUs); name one to simulate, e.g. 'H200'"
            )
        device = torch.device("cuda", index)
    return facts(device)


def problem_from(contract: Contract[Any], device: DeviceFacts, values: dict[str, Any]) -> Any:
    """A problem written out by its facets."""
    facets = contract.schema.facets
    clean: dict[str, Any] = {}
    for name, value in values.items():
        if name not in facets or name == "device":
            known = [facet for facet in facets if facet != "device"]
            raise ConfigurationError(
                f"{contract.name} has no facet {name!r}{did_you_mean(name, known)}; it has {', '.join(known)}"
            )
        clean[name] = _facet_value(contract.name, facets[name], value)
    problem = contract.problem(device=device, **contract.complete(clean))
    wrong = contract.contradiction(problem)
    if wrong is not None:
        raise ConfigurationError(f"{contract.name}: {wrong}")
    return problem


def dtype_named(name: str) -> str:
    """torch's name of a dtype that may be given by a shorter one, such as ``"fp8"`` or ``"bf16"``."""
    return _DTYPES.get(name, name)


def _facet_value(op: str, facet: Any, value: Any) -> Any:
    """The value in its normal form, or an error that says what the facet takes."""
    if isinstance(value, torch.dtype):
        value = str(value).removeprefix("torch.")
    if facet.name.endswith("dtype"):
        value = dtype_named(value)
    wrong = facet.wrong_with(value)
    if wrong:
        raise ConfigurationError(f"{op}: {facet.name} is {value!r}; {wrong}")
    return value
