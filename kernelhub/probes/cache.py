"""Whether a compiler, and whether other users, can write a cache folder. Reads owners and permissions only."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking


def triton_cache_folder() -> Path:
    """Where Triton keeps compiled kernels: TRITON_CACHE_DIR, else .triton/cache under TRITON_HOME or home."""
    explicit = os.environ.get("TRITON_CACHE_DIR")
    if explicit:
        return Path(explicit)
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(home) / ".triton" / "cache"


def writable(folder: Path, variable: str) -> Finding:
    """Whether `folder` can be written, or created and then written.

    Args:
        folder: the cache folder, which need not exist.
        variable: environment variable that moves it, named in the remedy.
    """
    remedy = f"set {variable} to a writable folder"
    try:
        os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except OSError as error:  # a name that is too long, circular links, a stale mount
        return lacking(str(folder), "cache_unwritable", f"{folder}: {error.strerror}", remedy)
    existing = folder
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    if not os.path.isdir(existing):
        return lacking(str(folder), "cache_unwritable", f"{existing} is not a folder", remedy)
    if not os.access(existing, os.W_OK | os.X_OK):
        return lacking(str(folder), "cache_unwritable", f"{existing} is not writable", remedy)
    return found(str(folder), str(folder), f"{folder} is writable")


def open_to_others(folder: Path) -> str:
    """Why other users could place code in a folder that a library of this process loads from; empty if they cannot."""
    try:
        info = os.stat(folder)
    except OSError:  # the folder does not exist, so it holds no code
        return ""
    if info.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to user {info.st_uid}, who can place code there"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can place code in {folder} (mode {stat.S_IMODE(info.st_mode):o})"
    return ""
