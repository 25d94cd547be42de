"""Kernels with deliberate faults: copies of their modules in which a text was replaced."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def planted(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """A copy of the module with one text replaced by another."""
    source = Path(str(module.__file__)).read_text()
    assert old in source, old
    name = f"planted_{abs(hash((module.__name__, old, new)))}"
    file = folder / f"{name}.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
