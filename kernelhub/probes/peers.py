"""Which GPUs of this machine can read, write and update each other's memory, proved by doing it.

A driver that reports peer access may still lose writes (an IOMMU that translates them, a broken switch). So a child
process (`peer_child.py`) lets each GPU of each ordered pair write and read the other's memory and add to one counter
there at the same time as its owner, and compares the values. A child that hangs is ended after a time-out. The result
holds until the next boot, and is kept in a folder of this user.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelhub.probes.toolchain import run

PEERS_TIMEOUT_S = 60.0
_FORMAT = 1  # raised when `peer_child.py` tests something else


@dataclass(frozen=True)
class Pair:
    """What one GPU can do with the memory of another.

    Attributes:
        source: place of the GPU that accesses, in the list that was probed.
        target: place of the GPU whose memory it is.
        nvlink: whether NVLink connects them.
        works: whether writes and reads gave the right values.
        atomics: whether atomic additions of both GPUs at once gave the right sum.
        why: what failed; empty if nothing did.
    """

    source: int
    target: int
    nvlink: bool
    works: bool
    atomics: bool
    why: str = ""


@dataclass(frozen=True)
class PeerFacts:
    """The pairs of a list of GPUs.

    Attributes:
        pairs: every ordered pair.
        failure: why nothing could be probed; empty if it was.
    """

    pairs: tuple[Pair, ...] = ()
    failure: str = ""

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> PeerFacts:
        """What `plain` returned."""
        return cls(tuple(Pair(**pair) for pair in plain["pairs"]), plain["failure"])


def gpu_uuids() -> tuple[str, ...]:
    """UUIDs of the GPUs that this process can use, by index; empty where the driver cannot be asked."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count, device, raw = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    found = []
    for index in range(count.value):
        if library.cuDeviceGet(ctypes.byref(device), index) or library.cuDeviceGetUuid(raw, device):
            return ()
        name = ctypes.create_string_buffer(256)
        library.cuDeviceGetName(name, len(name), device)
        kind = "MIG" if b" MIG " in name.value else "GPU"
        found.append(f"{kind}-{uuid.UUID(bytes=bytes(raw))}")
    return tuple(found)


def probe_peers(gpus: Sequence[str], timeout_s: float = PEERS_TIMEOUT_S) -> PeerFacts:
    """What each of these GPUs can do with the memory of each other one.

    Args:
        gpus: their UUIDs (``"GPU-..."``), all of this machine. CUDA_VISIBLE_DEVICES of this process need not name them.
        timeout_s: longest run of the child process.
    """
    return _probed(tuple(gpus), timeout_s)


@functools.cache
def _probed(gpus: tuple[str, ...], timeout_s: float) -> PeerFacts:
    file = _file(gpus)
    kept = _read(file) if file else None
    if kept is not None:
        return kept
    facts = _run(gpus, timeout_s)
    if file and not facts.failure:
        _write(file, facts)
    return facts


def _run(gpus: Sequence[str], timeout_s: float) -> PeerFacts:
    child = str(Path(__file__).with_name("peer_child.py"))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        done = run([sys.executable, "-I", child, *gpus], timeout_s, environment)
    except subprocess.TimeoutExpired:
        return PeerFacts(failure=f"the probe of peer access did not end within {timeout_s:g} s")
    except OSError as error:
        return PeerFacts(failure=f"the probe of peer access cannot be run: {error}")
    try:
        return PeerFacts.from_plain(json.loads(done.stdout))
    except (ValueError, TypeError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return PeerFacts(failure=f"the probe of peer access ended with {done.returncode}: {last}")


def _file(gpus: Sequence[str]) -> Path | None:
    """Where the result of this boot is kept; None where a folder of this user's own cannot be had."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"kernelhub-{os.geteuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        info = os.lstat(folder)
    except OSError:
        return None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        return None
    key = hashlib.sha256(json.dumps([_FORMAT, boot, _driver(), list(gpus)]).encode()).hexdigest()[:24]
    return folder / f"peers-{key}.json"


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""


def _read(file: Path) -> PeerFacts | None:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor) as text:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return None
            return PeerFacts.from_plain(json.load(text))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(file: Path, facts: PeerFacts) -> None:
    """Keep a result; a process that cannot write probes again."""
    part = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as text:
            json.dump(facts.plain(), text)
        os.replace(part, file)
