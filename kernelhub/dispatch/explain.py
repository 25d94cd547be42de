"""`explain`: the selection for a call or a configuration, for this machine or one that is not here."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import WEIGHT_LAYOUT
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError
from kernelhub.probes import here
from kernelhub.probes.device import DeviceFacts, facts, simulated

if TYPE_CHECKING:
    import torch

    from kernelhub.dispatch.op import Backend, OpFunction

DeviceLike: TypeAlias = "str | torch.device | DeviceFacts | None"

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
        args: the call's arguments; the selection is for that call. Without any tensor, `kwargs` are facets of the
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
        >>> selection = kernelhub.explain("attention", device="CPU", head_dim_qk=64, head_dim_vo=64)
        >>> selection.selected, len(selection.decisions) == len(kernelhub.attention.kernels())
        ('torch.packed', True)
    """
    record = HUB.record(op) if isinstance(op, str) else op.op.contract
    if packing and WEIGHT_LAYOUT not in record.schema.facets:
        raise ConfigurationError(f"packing: {record.name} takes no packed weights; leave packing out")
    if args or any(_holds_tensor(value) for value in kwargs.values()):
        function = HUB.function(op) if isinstance(op, str) else op
        parsed = function.op.parse(backend, args, kwargs)
        problem = function.op.contract.problem_of(parsed.key, parsed.device)
        if device is not None:
            problem = dataclasses.replace(problem, device=device_facts(device))
    else:
        problem = problem_from(record, device_facts(device), kwargs)
    return HUB.select_as_called(record.name, problem, backend, machine, packing=packing)


def _holds_tensor(value: object) -> bool:
    """A tensor, or some in a list: an argument of a call, not a facet."""
    torch = sys.modules.get("torch")
    if torch is None:  # then there is no tensor
        return False
    return isinstance(value, torch.Tensor) or (
        isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value)
    )


def device_facts(device: DeviceLike) -> DeviceFacts:
    """Facts of a device in any of the forms that `explain` takes; ``"cpu"`` and ``"cuda"`` are those here."""
    if isinstance(device, DeviceFacts):
        return device
    if isinstance(device, str) and not device.startswith(("cuda", "cpu")):
        try:
            return simulated(device)
        except ValueError as error:
            raise ConfigurationError(f"device: {error}") from None
    if device is None:
        found = here.gpus()
        return found[0] if found else here.cpu()
    if device == "cpu":
        return here.cpu()
    if (
        isinstance(device, str)
        and "torch" not in sys.modules
        and (plain := re.fullmatch(r"cuda(?::(\d{1,3}))?", device))
    ):
        found, index = here.gpus(), int(plain[1] or 0)
        if index < len(found):
            return found[index]
    import torch

    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ConfigurationError(f"device: {error}") from None
    if device.type == "cuda":
        index, count = device.index or 0, torch.cuda.device_count()
        if index >= count:
            raise ConfigurationError(
                f"device: there is no {device} here ({count} GPUs); name one to simulate, e.g. 'H200'"
            )
        device = torch.device("cuda", index)
    return facts(device)


def problem_from(contract: OpRecord[Any], device: DeviceFacts, values: dict[str, Any]) -> Any:
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
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        value = str(value).removeprefix("torch.")
    if facet.name.endswith("dtype"):
        value = dtype_named(value)
    wrong = facet.wrong_with(value)
    if wrong:
        raise ConfigurationError(f"{op}: {facet.name} is {value!r}; {wrong}")
    return value
