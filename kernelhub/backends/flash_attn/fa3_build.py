"""The parts of a build of FlashAttention-3, read from its files. A build may leave out any part.

Its `flash_attn_config` lists the parts that were left out. A part that it does not mention counts as left out.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.package import spec_of
from kernelhub.probes.reading import read_source

_CONFIG = "flash_attn_config"
_LIBRARY = "flash_attn_3"


def library(remedy: str) -> Finding:
    """Whether the compiled library is installed beside the Python interface."""
    spec = spec_of(_LIBRARY, remedy=remedy)
    if isinstance(spec, Finding):
        return spec
    if spec is None:
        reason = f"{_LIBRARY}, the compiled part of flash_attn_interface, is not installed"
        return lacking(_LIBRARY, "package_broken", reason, remedy)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.glob("_C*")) if file.is_file()]
    if not files:
        where = ", ".join(map(str, folders))
        return lacking(_LIBRARY, "package_broken", f"{_LIBRARY} has no compiled library in {where}", remedy)
    return found(_LIBRARY, str(files[0]), f"{_LIBRARY} at {files[0]}")


def compiled_with(part: str, remedy: str) -> Finding:
    """Whether this part was compiled. Parts have the names of the build: ``"SOFTCAP"``, ``"HDIM128"``, ..."""
    spec = spec_of(_CONFIG, subject=part, remedy=remedy)
    if isinstance(spec, Finding):
        return spec
    if spec is None or spec.origin is None:
        reason = f"without {_CONFIG} it is unknown what this FlashAttention-3 was compiled with"
        return lacking(part, "package_broken", reason, remedy)
    try:
        flags = _flags(read_source(Path(spec.origin)))
    except (OSError, SyntaxError, ValueError) as error:
        return lacking(part, "package_broken", f"{spec.origin} cannot be read: {error}", remedy)
    left_out = [flags[name] for name in _names(part) if name in flags]
    if left_out != [False]:
        reason = f"this FlashAttention-3 was compiled without {part}"
        return lacking(part, "not_compiled", reason, remedy)
    return found(part, None, f"FlashAttention-3 was compiled with {part}")


def _names(part: str) -> tuple[str, str]:
    """Both spellings of a flag: two of upstream's have one underscore more."""
    return f"FLASHATTENTION_DISABLE_{part}", f"FLASH_ATTENTION_DISABLE_{part}"


def _flags(text: str) -> dict[str, Any]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "CONFIG" for t in node.targets):
            config = ast.literal_eval(node.value)
            flags = config.get("build_flags") if isinstance(config, dict) else None
            if isinstance(flags, dict):
                return flags
    raise ValueError("it has no CONFIG with build_flags")
