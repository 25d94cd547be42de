"""`explain`: the selection for a call or for facets, on this machine, another device, or a simulated machine.

It builds the problem; `dispatch.hub` selects, as for a call.
"""

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
    """Return the selection that a call would get, with the reason against every other kernel.

    No kernel runs and no adapter is imported. The result is the object that the call itself uses.

    Args:
        op: an op (``kernelhub.attention``) or its name (``"attention"``).
        args: positional arguments of the call. If no argument is or contains a tensor, `kwargs` are facets of the
            op's problem (``head_dim_qk=128, softcap=True``), and the other facets have their defaults.
        device: name (``"B200"``), architecture (``"sm_137"``), torch device or `DeviceFacts`. The device need not be
            in this machine. Default: the device of the arguments, else the first GPU, else the CPU.
        backend: as in the call.
        machine: facts of another machine, e.g. a `SimulatedMachine`; by default this machine.
        packing: as in ``prepare``: checkpoint weights will be packed with the plan's ``pack`` before the kernel runs,
            so that kernels that require packed weights are candidates.
        kwargs: keyword arguments of the call, or facets.

    Returns:
        A `Selection`. Its `selected` is None if no kernel supports the problem; `explain` does not raise then.

    Raises:
        InvalidArgument: the call breaks the op's contract.
        ConfigurationError: unknown op, device, facet or backend; or `packing` for an op without packed weights.

    Example:
        >>> import kernelhub
        >>> selection = kernelhub.explain("attention", device="CPU", head_dim_qk=64, head_dim_vo=64)
        >>> selection.selected, len(selection.decisions) == len(kernelhub.attention.kernels())
        ('torch.packed', True)
    """
    record = HUB.record(op) if isinstance(op, str) else contract_of(op)
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


def contract_of(op: Any) -> Any:
    """The contract of an op, given as the public function; ConfigurationError if it is no op."""
    found = getattr(getattr(op, "op", None), "contract", None)
    if found is None:
        raise ConfigurationError(f"{op!r} is not an op; give one, such as kernelhub.attention, or its name")
    return found


def _holds_tensor(value: object) -> bool:
    """Whether a value is a tensor or a list with one, and so an argument of a call and not a facet."""
    torch = sys.modules.get("torch")
    if torch is None:  # without torch no value is a tensor
        return False
    return isinstance(value, torch.Tensor) or (
        isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value)
    )


def device_facts(device: DeviceLike) -> DeviceFacts:
    """Facts of a device in any of the forms that `explain` accepts; ``"cpu"`` and ``"cuda"`` are those of this machine.

    Raises:
        ConfigurationError: the name is unknown, or this machine has no such GPU.
    """
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
    if not isinstance(device, torch.device):
        raise ConfigurationError(f"device is {device!r}; give a name such as 'H200' or 'cuda:1', or a torch.device")
    if device.type == "cuda":
        index, count = device.index or 0, torch.cuda.device_count()
        if index >= count:
            raise ConfigurationError(
                f"device: this machine has no {device} ({count} GPUs); to simulate a device, name it, e.g. 'H200'"
            )
        device = torch.device("cuda", index)
    return facts(device)


def problem_from(contract: OpRecord[Any], device: DeviceFacts, values: dict[str, Any]) -> Any:
    """The problem with these facets and the defaults of the others.

    Raises:
        ConfigurationError: a facet is unknown, its value is not supported, or facets contradict each other.
    """
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
    """torch's name of a dtype; `name` may be a short form such as ``"fp8"`` or ``"bf16"``."""
    return _DTYPES.get(name, name)


def _facet_value(op: str, facet: Any, value: Any) -> Any:
    """The value in its normal form.

    Raises:
        ConfigurationError: the facet does not allow the value.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        value = str(value).removeprefix("torch.")
    if facet.name.endswith("dtype"):
        value = dtype_named(value)
    wrong = facet.wrong_with(value)
    if wrong:
        names = [name for name in (facet.neutral, *facet.values) if isinstance(name, str)]
        raise ConfigurationError(f"{op}: {facet.name} is {value!r}{did_you_mean(value, names)}; {wrong}")
    return value
