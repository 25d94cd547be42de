"""A file of the items that are ready on this kind of machine, so that an interrupted warm-up continues."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from kernelhub.dispatch.hub import HUB
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.document import difference
from kernelhub.probes.toolchain import driver
from kernelhub.runtime.caches.fingerprint import fingerprint
from kernelhub.runtime.caches.store import Store

_NAME = "done"


class CompletedItems:
    """The items in the compilers' caches on disk, for one device, driver and set of libraries.

    The file only saves work: if a cache has lost an item, the item's first call compiles it again.
    """

    def __init__(self, device: DeviceFacts) -> None:
        from kernelhub import __version__

        _ = HUB.settings
        packages = {item.backend.package for item in HUB.registry.backends.values() if item.backend is not None}
        library = str(driver().value) if device.vendor == "nvidia" else "none"
        made_for = fingerprint(
            device.arch,
            libraries=sorted(packages - {""}),
            device=device.name,
            driver=library,
            kernelhub=__version__,
        )
        self._store = Store("warmup", made_for)

    def done(self) -> dict[str, tuple[str, str]]:
        """The kernel of each completed item by key, and how the item was prepared."""
        kept = _kept(self._store.read(_NAME))
        return {key: (entry["kernel"], entry["how"]) for key, entry in kept.items()}

    def note(self, key: str, kernel: str, how: str, seconds: float) -> None:
        """Add a completed item; it is on disk before this returns."""
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        entry: dict[str, Any] = {"kernel": kernel, "how": how, "seconds": round(seconds, 3), "date": date}
        self._store.update(_NAME, lambda document: {**_kept(document), key: entry})


def _kept(document: Any) -> dict[str, dict[str, str]]:
    """The entries of a file; none if the file is invalid, since it only saves work."""
    return {} if difference(document, {str: {"kernel": str, "how": str}}) else document
