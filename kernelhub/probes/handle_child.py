"""The child process of `handles`: its children pass file descriptors to each other, and it prints JSON.

    python handle_child.py FOLDER

It needs neither torch nor a GPU. It is run as a file, and imports nothing of kernelhub.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

_WAIT_S = 2.0
_WORD = b"here"
_GETFD = 438  # pidfd_getfd, of every architecture
_LONGEST = 107  # bytes of the name of a Unix socket


def sent(folder: str) -> tuple[str, str]:
    """The code of what failed and its reason, as descriptors went through a socket; both empty if none did."""
    name = str(Path(folder) / f"probe_fd-{os.getpid()}")  # as long as torch's, which ends with a process's number
    if len(os.fsencode(name)) > _LONGEST:
        return "socket_path", f"{name} is longer than the {_LONGEST} bytes of a Unix socket's name"
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.settimeout(_WAIT_S)
    try:
        receiver.bind(name)
    except OSError as error:
        return "socket_folder", f"no Unix socket can be made in {folder}: {error.strerror}"
    try:
        child = _forked(lambda: _send(name))
        _, found, _, _ = socket.recv_fds(receiver, 1, 1)
        os.waitpid(child, 0)
        word = os.read(found[0], len(_WORD)) if found else b""
        if word != _WORD:
            return "descriptor_refused", "the descriptor that came is not the one that was sent"
        return "", ""
    except OSError as error:
        return "descriptor_refused", f"a descriptor that was sent did not come: {error.strerror or error}"
    finally:
        receiver.close()
        os.unlink(name)


def _send(name: str) -> int:
    read, write = os.pipe()
    os.write(write, _WORD)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(name)
        socket.send_fds(sender, [b"1"], [read])
    return 0


def taken() -> str:
    """Why a process cannot take a descriptor of its sibling; empty if it can."""
    read, write = os.pipe()
    hold_read, hold_write = os.pipe()
    os.write(write, _WORD)
    holder = _forked(lambda: len(os.read(hold_read, 1)))
    try:
        taker = _forked(lambda: _take(holder, read))
        status = os.waitstatus_to_exitcode(os.waitpid(taker, 0)[1])
        return os.strerror(status) if status > 0 else ""
    finally:
        os.write(hold_write, b"1")
        os.waitpid(holder, 0)


def _take(process: int, descriptor: int) -> int:
    """The number of the error; 0 for none."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        of_process = os.pidfd_open(process)
    except OSError as error:
        return error.errno or 1
    found = library.syscall(ctypes.c_long(_GETFD), of_process, descriptor, 0)
    return ctypes.get_errno() if found < 0 else 0


def _forked(act: Callable[[], int]) -> int:
    """The number of a child that ends with what `act` returns."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        status = act()
    finally:
        os._exit(status)


if __name__ == "__main__":
    try:
        code, why = sent(sys.argv[1])
        answer = {"code": code, "why": why, "taking": taken()}
    except OSError as failure:
        answer = {"code": "descriptor_refused", "why": f"{failure}", "taking": f"{failure}"}
    print(json.dumps(answer))
