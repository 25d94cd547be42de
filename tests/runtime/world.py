"""Real processes in a real gloo group, each running one function; what each says, raises or does not live to say."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing as mp
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kernelhub.backends.cpp import build
from kernelhub.errors import RanksDisagree
from kernelhub.probes.toolchain import cxx_compiler


def run_world(
    size: int, act: Callable[[int, int], Any], folder: Path, limit_s: float = 90.0, *, store_here: bool = False
) -> list[Any]:
    """What `act(rank, size)` gave in each of `size` new processes; None of one that ended without giving anything.

    The group's store is held by rank 0, or by this process, as torchrun's agent holds it.
    """
    _compile()
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if store_here else None
    port = held.port if held is not None else _free_port()
    context = _context()
    surroundings = (dict(os.environ), os.getcwd(), store_here, str(folder))
    ranks = [context.Process(target=_live, args=(act, rank, size, port, *surroundings)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    until = time.monotonic() + limit_s
    try:
        while any(rank.is_alive() for rank in ranks) and time.monotonic() < until:
            if _heard(folder) >= _owed(ranks):
                break
            time.sleep(0.05)
    finally:
        for rank in ranks:  # those that stopped themselves too
            if rank.is_alive():
                rank.kill()
            rank.join()
    files = [folder / str(rank) for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


@functools.cache
def _context() -> Any:
    """A server that has imported torch and forks the ranks, so that not every rank imports it."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with pytest.MonkeyPatch.context() as patch:  # the folder of its socket outlives that of the tests
        patch.setattr("tempfile.tempdir", None)
        patch.delenv("TMPDIR", raising=False)
        ensure_running()
    return context


@functools.cache
def _compile() -> None:
    """Make what ranks call, since they wait for each other for less time than a compiler may take."""
    if cxx_compiler().ok:
        build.library("attention.cpp")


def attempt(work: Callable[[], Any]) -> dict[str, Any]:
    """What `work` gives or how ranks disagree, and how long that took in seconds."""
    begun = time.monotonic()
    try:
        answer: dict[str, Any] = {"value": work()}
    except RanksDisagree as error:
        answer = {"code": error.code, "message": str(error), "ranks": list(error.ranks)}
    return {**answer, "elapsed_s": time.monotonic() - begun}


def end_this_process(by: signal.Signals) -> None:
    """Be killed, or stopped for good, before the next statement runs."""
    os.kill(os.getpid(), by)
    while True:
        time.sleep(1)


@contextlib.contextmanager
def variables(**values: str) -> Iterator[None]:
    """Environment variables that hold inside a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _live(
    act: Callable[[int, int], Any],
    rank: int,
    size: int,
    port: int,
    environment: dict[str, str],
    place: str,
    store_there: bool,
    folder: str,
) -> None:
    os.environ.clear()  # the server that forks this process has those of its own start
    os.environ.update(environment)
    os.chdir(place)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0 and not store_there, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    dist.barrier()
    answer = json.dumps(act(rank, size))
    written = Path(folder) / f"{rank}.part"
    written.write_text(answer)
    written.rename(Path(folder) / str(rank))
    if rank == 0:  # it holds the store, which others may still need
        time.sleep(1)
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _heard(folder: Path) -> int:
    return sum(1 for file in folder.iterdir() if file.suffix != ".part")


def _owed(ranks: list[Any]) -> int:
    """Answers that can still come: of processes that live and are not stopped, and of those that ended well."""
    return sum(1 for rank in ranks if rank.exitcode == 0 or (rank.exitcode is None and not _stopped(rank.pid)))


def _stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
