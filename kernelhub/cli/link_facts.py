"""Facts of `doctor` about connections between GPUs: what each pair was proved to do, and what limits collectives."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kernelhub.cli.fact import NOTE, OK, Fact
from kernelhub.probes.handles import Handles, probe_handles
from kernelhub.probes.peers import Pair, gpu_uuids, probe_peers

_SHARED_MEMORY = Path("/dev/shm")
_NEEDED_BYTES = 64 << 20  # NCCL takes about 10 MB for each connection through the host
_TURNS_OFF = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE")
_WITHOUT = "kernels over peer memory are not selected; collectives use NCCL"


def links() -> Iterator[Fact]:
    """Each pair of GPUs, and settings and limits of NCCL; nothing where there are fewer than two GPUs."""
    gpus = gpu_uuids()
    if len(gpus) < 2:
        return
    if any(uuid.startswith("MIG-") for uuid in gpus):
        yield Fact(NOTE, "MIG instances", _WITHOUT, "turn MIG off if GPUs are to work together")
        return
    found = probe_peers(gpus)
    if found.failure:
        yield Fact(NOTE, "peer access between GPUs", f"{found.failure}; {_WITHOUT}", "see `nvidia-smi topo -p2p r`")
    kinds: dict[tuple[str, str], list[Pair]] = {}
    for pair in found.pairs:
        kinds.setdefault(_kind(pair), []).append(pair)
    for (what, wrong), pairs in kinds.items():
        named = "every pair of GPUs" if len(kinds) == 1 else ", ".join(f"{p.source} to {p.target}" for p in pairs)
        if wrong:
            remedy = "see `nvidia-smi topo -p2p r`; in a virtual machine, turn the IOMMU's translation off"
            yield Fact(NOTE, f"{named}: {what}", f"{wrong}; {_WITHOUT}", remedy)
        else:
            yield Fact(OK, f"{named}: {what}", "writes, reads and atomics of one in the other's memory are right")
    for name in _TURNS_OFF:
        if os.environ.get(name):
            yield Fact(
                NOTE, f"{name}={os.environ[name]}", "it limits NCCL, and kernels over peer memory", f"unset {name}"
            )
    yield shared_memory(_SHARED_MEMORY)
    yield from handles(probe_handles())


def _kind(pair: Pair) -> tuple[str, str]:
    return ("NVLink" if pair.nvlink else "PCIe" if pair.works else "not connected", pair.why)


def handles(found: Handles) -> Iterator[Fact]:
    """Whether processes can pass handles of memory to each other."""
    sending, taking = found.sending, found.taking
    if sending.ok:
        yield Fact(OK, f"processes pass descriptors through {found.folder}", "torch passes handles of memory so")
    else:
        why = f"{sending.reason}; torch passes handles of memory so"
        yield Fact(NOTE, f"processes cannot pass descriptors ({sending.code})", f"{why}; {_WITHOUT}", sending.remedy)
    meaning = "torch needs it to share expandable segments between processes; kernels over peer memory do not"
    if taking.ok:
        yield Fact(OK, "processes may take descriptors of each other", meaning)
    else:
        what = f"processes cannot take descriptors of each other ({taking.code})"
        yield Fact(NOTE, what, f"{taking.reason}; {meaning}", taking.remedy)


def shared_memory(folder: Path) -> Fact:
    """Whether processes can share host memory, found out by allocating some."""
    remedy = "start the container with --shm-size 1g or --ipc host"
    meaning = "NCCL passes messages through it where GPUs have no peer access"
    try:
        descriptor, name = tempfile.mkstemp(dir=folder)
    except OSError as error:
        return Fact(NOTE, f"{folder} cannot be written", f"{error.strerror}; {meaning}", remedy)
    try:
        os.posix_fallocate(descriptor, 0, _NEEDED_BYTES)
    except OSError as error:
        return Fact(NOTE, f"{folder} holds less than {_NEEDED_BYTES >> 20} MB", f"{error.strerror}; {meaning}", remedy)
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(name)
    return Fact(OK, f"{folder} holds {_NEEDED_BYTES >> 20} MB or more", meaning)
