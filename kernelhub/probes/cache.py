"""Can a compiler write its cache? Answered from permissions, without writing."""

from __future__ import annotations

import os
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
    """Could `folder` be written, or made and then written?

    Args:
        folder: the cache folder, which need not exist.
        variable: environment variable that moves it, named in the remedy.
    """
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    remedy = f"set {variable} to a writable folder"
    if not existing.is_dir():
        return lacking(str(folder), "cache_unwritable", f"{existing} is not a folder", remedy)
    if not os.access(existing, os.W_OK | os.X_OK):
        return lacking(str(folder), "cache_unwritable", f"{existing} is not writable", remedy)
    return found(str(folder), str(folder), f"{folder} is writable")
