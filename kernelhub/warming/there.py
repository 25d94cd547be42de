"""The device of a warm-up, and the items of a warm-up on a simulated device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernelhub.dispatch.explain import device_facts
from kernelhub.dispatch.machine import Machine
from kernelhub.errors import ConfigurationError
from kernelhub.ops.models.problems import PHASES
from kernelhub.probes.device import DeviceFacts, facts
from kernelhub.warming.forms import checked
from kernelhub.warming.wanted import What, items_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Listed:
    """One item of a warm-up.

    Attributes:
        op, label, tokens: as of `Outcome`.
        kernel: the kernel that would be selected; empty if none can run it.
        because: the reason.
    """

    op: str
    kernel: str
    label: str
    tokens: tuple[int, ...]
    because: str

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "tokens": list(self.tokens)}


def device_here(device: str | torch.device | None) -> torch.device:
    """The device of this machine for a name: torch's, or that of a product of this machine.

    Raises:
        ConfigurationError: this machine does not have the device.
    """
    import torch  # here, since `list_wanted` needs none

    if device is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    wanted = device_facts(device)
    if isinstance(device, torch.device) or not wanted.simulated:
        made = torch.device(device)
        return torch.device("cuda", made.index or 0) if made.type == "cuda" else made
    if wanted.type == "cpu":
        return torch.device("cpu")
    here = [facts(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    for index, found in enumerate(here):
        if found.arch == wanted.arch and (found.name == wanted.name or wanted.name.startswith("an sm_")):
            return torch.device("cuda", index)
    devices = ", ".join(str(found) for found in here) or "no GPU"
    raise ConfigurationError(
        f"device: this machine has {devices}, not {device}. Run the warm-up on a machine with it; `kernelhub warmup "
        f"... --device {device} --list` lists what it would prepare there"
    )


def list_wanted(
    what: What,
    *,
    token_counts: Sequence[int] | None = None,
    device: str | torch.device | DeviceFacts | None = None,
    machine: Machine | None = None,
    phases: Sequence[str] = PHASES,
    packing: bool = False,
    **setting: Any,
) -> list[Listed]:
    """The items that `kernelhub.warmup` would prepare, on any device; nothing runs.

    Args:
        what, token_counts, phases, packing, setting: as of `kernelhub.warmup`.
        device: as of `explain`; may be simulated.
        machine: facts of another machine, e.g. a `SimulatedMachine`.
    """
    where = device_facts(device)
    on_gpu, said = where.type != "cpu", {"phases": phases, **setting}
    items = items_of(what, checked(token_counts, on_gpu), said, on_gpu=on_gpu, packing=packing)
    found = []
    for item in items:
        if item.need is None:
            found.append(Listed(item.op, "", item.label, (), "runs as a function"))
            continue
        selection = item.selection(where, machine)
        found.append(Listed(item.op, selection.selected or "", item.label, item.tokens, selection.because))
    return found
