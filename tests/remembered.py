"""What is the same in all tests of a process is found out once, in collection too, not again after every test.

Each patch compares what its answer depends on, and asks again if that is another.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from _pytest.logging import catching_logs


class Remembered:
    """The patches, from the start of a session to its end."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._usual: tuple[list[Any], list[Any]] = ([], [])
        self._seen: tuple[Any, tuple[int, ...]] = (None, ())

    def begin(self) -> None:
        self.packages_are_where_they_are_now()
        self._check_records_once()
        self._look_for_plugins_once()
        self._look_for_packages_once()
        self._look_for_versions_once()
        self._read_metadata_once()
        self._look_for_backends_once()
        self._attach_to_the_root_logger_alone()
        from tests.accepted import make_calls_once

        make_calls_once(self._patch)

    def end(self) -> None:
        self._patch.undo()

    def packages_are_where_they_are_now(self) -> None:
        """A test that installs or breaks a package changes one of these, and nothing is remembered meanwhile."""
        self._usual = (list(sys.path), list(sys.meta_path))

    def measure_no_guards(self) -> None:
        """torch measures the guards of each function that it compiles, for its log, on emptied caches: 20 ms."""
        if guards := sys.modules.get("torch._dynamo.guards"):
            self._patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)

    def _places(self) -> tuple[Any, ...] | None:
        """When each folder of packages was last changed; None if they are not the usual ones.

        They are looked at once for all probes of a machine, since the hub keeps what those found until it forgets it.
        """
        if (sys.path, sys.meta_path) != self._usual:
            return None
        from kernelhub.dispatch.hub import HUB

        findings = HUB.machine._findings
        if self._seen[0] is not findings or not findings:
            self._seen = findings, tuple(os.stat(path).st_mtime_ns for path in sys.path if os.path.isdir(path))
        return self._seen[1]

    def _check_records_once(self) -> None:
        """Records are constants, and checking 400 takes 12 ms."""
        from kernelhub.dispatch import records as module_of_records
        from kernelhub.dispatch.kernel import Backend

        check = module_of_records.records_of
        seen: dict[tuple[str, bool], tuple[tuple[Any, ...], Any]] = {}

        def records_of(module: Any, contracts: Mapping[str, Any], *, builtin: bool) -> Any:
            if not builtin:  # a plugin of a test may raise when it is looked at
                return check(module, contracts, builtin=builtin)
            constants = [getattr(module, name, ()) for name in ("BACKEND", "KERNELS", "KNOWN_BAD")]
            if not all(type(constant) in (Backend, tuple) for constant in constants):
                return check(module, contracts, builtin=builtin)
            made_of = (*constants, *contracts.values())
            name = getattr(module, "__name__", "")
            before, records = seen.get((name, builtin), ((), None))
            if len(before) != len(made_of) or any(one is not other for one, other in zip(before, made_of, strict=True)):
                records = check(module, contracts, builtin=builtin)
                seen[name, builtin] = made_of, records
            return records

        self._patch.setattr(module_of_records, "records_of", records_of)

    def _look_for_plugins_once(self) -> None:
        """Reading all metadata takes 2 ms."""
        registry: Any = importlib.import_module("kernelhub.dispatch.registry")
        look = registry.entry_points
        seen: dict[tuple[Any, ...], Any] = {}

        def entry_points(group: str) -> Any:
            places = self._places()
            if places is None:
                return look(group)
            if (group, places) not in seen:
                seen[group, places] = look(group)
            entries, wrong = seen[group, places]
            return list(entries), list(wrong)

        self._patch.setattr(registry, "entry_points", entry_points)

    def _look_for_packages_once(self) -> None:
        """The probes of a first selection look for 25 packages, most of which are not here."""
        look = importlib.util.find_spec
        seen: dict[tuple[Any, ...], Any] = {}

        def find_spec(name: str, package: str | None = None) -> Any:
            places = None if name in sys.modules or "." in name else self._places()
            if places is None:
                return look(name, package)
            if (name, places) not in seen:
                seen[name, places] = look(name, package)
            return seen[name, places]

        self._patch.setattr(importlib.util, "find_spec", find_spec)

    def _look_for_versions_once(self) -> None:
        """The metadata of a distribution is looked for in every folder of packages, and read."""
        distributions: Any = importlib.import_module("kernelhub.probes.distributions")
        look = distributions.version_of
        seen: dict[tuple[Any, ...], Any] = {}

        def version_of(name: str) -> Any:
            places = self._places()
            if places is None:
                return look(name)
            if (name, places) not in seen:
                seen[name, places] = look(name)
            return seen[name, places]

        self._patch.setattr(distributions, "version_of", version_of)

    def _read_metadata_once(self) -> None:
        """`kernelhub doctor` reads 200 files of metadata of this environment, in which tests install nothing."""
        distributions: Any = importlib.import_module("kernelhub.probes.distributions")
        read, from_disk = distributions._content, distributions.read_bytes
        seen: dict[tuple[Any, ...], Any] = {}

        def content(found: Any, file: str, most_bytes: int, until: tuple[bytes, ...] = ()) -> Any:
            place = str(getattr(found, "_path", ""))
            if not place.startswith(sys.prefix + os.sep) or distributions.read_bytes is not from_disk:
                return read(found, file, most_bytes, until)
            key = place, file, most_bytes, until
            if key not in seen:
                seen[key] = read(found, file, most_bytes, until)
            return seen[key]

        self._patch.setattr(distributions, "_content", content)

    def _look_for_backends_once(self) -> None:
        """Which folders kernelhub/backends has."""
        backends: Any = importlib.import_module("kernelhub.backends")
        names = [module.__name__ for module in backends.builtin()]
        self._patch.setattr(backends, "builtin", lambda: [importlib.import_module(name) for name in names])

    def _attach_to_the_root_logger_alone(self) -> None:
        """As pytest 8 does. pytest 9.1 looks for others among all 1,500 loggers, six times in each test: 1.5 ms."""
        if "attached_loggers" not in getattr(catching_logs, "__slots__", ()):
            return

        def attach(self: Any) -> Any:
            root = logging.getLogger()
            root.addHandler(self.handler)
            self.attached_loggers.append(root)
            if self.level is not None:
                self.handler.setLevel(self.level)
                self.orig_level = root.level
                root.setLevel(min(root.level, self.level))
            return self.handler

        self._patch.setattr(catching_logs, "__enter__", attach)
