"""Every op as data: what its problems are, without its function, so that nothing here needs torch."""

from __future__ import annotations

import importlib
from typing import Any

from kernelhub import homes
from kernelhub.dispatch.contract import OpRecord


def _record(name: str, home: str) -> OpRecord[Any]:
    problem = importlib.import_module(f"{home.rpartition('.')[0]}.problem")
    record: OpRecord[Any] = getattr(problem, name.upper())
    return record


OPS: tuple[OpRecord[Any], ...] = tuple(_record(name, home) for name, home in homes.OPS.items())
