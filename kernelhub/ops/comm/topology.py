"""How the GPUs of a group are connected: learned once per group, in `prepare`, and equal on all ranks.

Each rank states its machine, its GPU, and whether it can pass handles of memory to other processes
(`kernelhub.probes.handles`), through the store of the group. Rank 0 probes every ordered pair of GPUs in a child
process (`kernelhub.probes.peers`), and states the result, so that all ranks decide by the same facts.
"""

from __future__ import annotations

import os
import platform
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.ops.comm.group import backend_kind, meet
from kernelhub.ops.comm.problem import (
    ACCESS,
    ANY,
    ATOMICS,
    NETWORK,
    NO_ACCESS,
    NO_LINK,
    NVLINK,
    PCIE,
    UNKNOWN,
    bucket_of,
)
from kernelhub.probes.finding import Finding
from kernelhub.probes.handles import probe_handles
from kernelhub.probes.peers import PEERS_TIMEOUT_S, PeerFacts, probe_peers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Settings by which users of NCCL say that peer access does not work on their machine.
_VETOES = {"NCCL_P2P_DISABLE": ("1",), "NCCL_P2P_LEVEL": ("LOC", "0")}


@dataclass(frozen=True)
class GroupFacts:
    """What the ranks of a group agreed on.

    Attributes:
        link: the facet `link`.
        peers: the facet `peers`.
        why: how it was found, as a sentence.
        group_backend: the facet, which takes long to find out; "" where it is found out by each call.
    """

    link: str
    peers: str
    why: str
    group_backend: str = ""


UNCONNECTED = GroupFacts(UNKNOWN, UNKNOWN, "no plan was prepared in the group")
_ALONE = GroupFacts(NO_LINK, NO_ACCESS, "the group has one rank")
_ON_CPU = GroupFacts(NO_LINK, NO_ACCESS, "the tensors are on CPUs")
_known: dict[tuple[str, int], tuple[weakref.ref[Any], GroupFacts]] = {}


def known(group: ProcessGroup, device: int) -> GroupFacts:
    """The facts of a group on a device (-1 for the CPU); `UNCONNECTED` before `learn`."""
    if device < 0:
        return _ON_CPU
    if group.size() == 1:
        return _ALONE
    kept = _known.get((group.group_name, device))
    if kept is None or kept[0]() is not group:  # a later group may have the name of one that was destroyed
        return UNCONNECTED
    return kept[1]


def linked(op: str, group: ProcessGroup, x: Tensor) -> tuple[str, str, str]:
    """The facets `group_backend`, `link` and `peers` of a call.

    Raises:
        InvalidArgument: the group has no backend for the device of x.
    """
    facts = known(group, x.get_device())
    return facts.group_backend or backend_kind(op, group, x.device), facts.link, facts.peers


def connection(op: str, group: ProcessGroup, x: Tensor, num_bytes: int) -> tuple[str, str, str, str]:
    """The facets `group_backend`, `link`, `peers` and `message` of a call; raises as `linked`."""
    kind, link, peers = linked(op, group, x)
    return kind, link, peers, bucket_of(num_bytes) if link in (NVLINK, PCIE) else ANY


def learn(op: str, group: ProcessGroup, device: torch.device, timeout_s: float) -> GroupFacts:
    """The facts of a group, which its ranks find out together. Every rank calls it.

    Raises:
        RanksDisagree: as of `meet`.
    """
    if device.type != "cuda":
        return _ON_CPU
    place = device.index if device.index is not None else torch.cuda.current_device()
    facts = known(group, place)
    if facts is not UNCONNECTED:
        return facts
    facts = replace(_found(op, group, place, timeout_s), group_backend=backend_kind(op, group, device))
    for name in [name for name, (owner, _) in _known.items() if owner() is None]:
        del _known[name]
    _known[group.group_name, place] = (weakref.ref(group), facts)
    return facts


def _found(op: str, group: ProcessGroup, device: int, timeout_s: float) -> GroupFacts:
    said = meet(op, group, {"op": op, "step": "topology"}, timeout_s, own=_here(device))
    facts = _from_statements(said)
    if facts is not None:
        return facts
    found = None
    if group.rank() == 0:
        found = probe_peers([rank["gpu"] for rank in said]).plain()
    verdicts = meet(op, group, {"op": op, "step": "peers"}, timeout_s + PEERS_TIMEOUT_S, own=found)
    return facts_from(PeerFacts.from_plain(verdicts[0]))


def _here(device: int) -> dict[str, Any]:
    """What this rank states."""
    properties: Any = torch.cuda.get_device_properties(device)
    vetoes = [f"{name}={os.environ[name]}" for name, values in _VETOES.items() if os.environ.get(name) in values]
    handles = probe_handles()
    return {
        "machine": [platform.node(), *(_namespace(name) for name in ("mnt", "pid", "net"))],
        "gpu": f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else "",
        "mig": " MIG " in f" {properties.name} ",
        "vendor": "amd" if torch.version.hip else "nvidia",
        "vetoes": vetoes,
        "handles": {"folder": os.path.realpath(handles.folder), "failure": _failure(handles.sending)},
    }


def _failure(finding: Finding) -> str:
    return "" if finding.ok else f"{finding.reason}; {finding.remedy}"


def _namespace(name: str) -> str:
    """The namespace of this process: containers on one host share none of them."""
    try:
        return os.readlink(Path("/proc/self/ns") / name)
    except OSError:
        return ""


def _from_statements(said: list[dict[str, Any]]) -> GroupFacts | None:
    """The facts that follow from the ranks' statements; None where GPUs must be probed."""
    for rank, statement in enumerate(said):
        if statement["machine"] != said[0]["machine"]:
            return GroupFacts(NETWORK, NO_ACCESS, f"rank {rank} is in another machine or container than rank 0")
        if statement["vetoes"]:
            return GroupFacts(NO_LINK, NO_ACCESS, f"rank {rank} has {', '.join(statement['vetoes'])}")
        if statement["mig"]:
            return GroupFacts(NO_LINK, NO_ACCESS, f"the GPU of rank {rank} is a MIG instance")
        if statement["vendor"] != "nvidia" or not statement["gpu"]:
            return GroupFacts(UNKNOWN, UNKNOWN, f"the GPU of rank {rank} has no probe")
        handles, first = statement["handles"], said[0]["handles"]
        if handles["failure"]:
            why = f"rank {rank} cannot pass handles of memory to other processes: {handles['failure']}"
            return GroupFacts(NO_LINK, NO_ACCESS, why)
        if handles["folder"] != first["folder"]:
            why = f"ranks pass handles of memory through TMPDIR, which is {first['folder']} on rank 0"
            return GroupFacts(NO_LINK, NO_ACCESS, f"{why} and {handles['folder']} on rank {rank}")
    gpus = [statement["gpu"] for statement in said]
    if len(set(gpus)) < len(gpus):
        return GroupFacts(NO_LINK, NO_ACCESS, "two ranks share a GPU")
    return None


def facts_from(found: PeerFacts) -> GroupFacts:
    """The facts of a group whose ranks have these GPUs."""
    if found.failure:
        return GroupFacts(NO_LINK, NO_ACCESS, found.failure)
    weakest = min(found.pairs, key=lambda pair: (pair.works, pair.atomics, pair.nvlink))
    name = f"GPU {weakest.source} to GPU {weakest.target}"
    if not weakest.works:
        return GroupFacts(NO_LINK, NO_ACCESS, f"{name}: {weakest.why}")
    link = NVLINK if all(pair.nvlink for pair in found.pairs) else PCIE
    if not weakest.atomics:
        return GroupFacts(link, ACCESS, f"{name}: {weakest.why}")
    return GroupFacts(link, ATOMICS, f"writes, reads and atomics of all {len(found.pairs)} pairs gave the right values")
