"""The interfaces of vLLM's releases, as kernelhub's plugin and hooks read them, recorded from released wheels.

    python -m tests.compat.vllm_releases FOLDER...

records the releases in these folders, each named after its release and with the wheel's Python files in it, such as
``0.33.0/vllm/...``; releases that are recorded already stay. `written` makes sources of what is recorded, so that the
plugin's own check reads them, with no wheel at hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kernelhub.compat.vllm import hooks, interface
from kernelhub.probes.signature import MOST_HOPS, Header, Sources, _header, _Unknown
from kernelhub.probes.source import defines

RECORD = Path(__file__).with_suffix(".json")


def calls() -> list[str]:
    """The functions whose parameters the plugin and the hooks compare."""
    given = (
        *interface.CALLS,
        *interface._COMBINATIONS,
        *(call for each, _ in hooks.INTERFACES.values() for call in each),
    )
    return sorted({call.target for call in given})


def names() -> list[str]:
    """The names that must exist, or that tell releases apart."""
    forms = (f"{interface._INTERFACE}:AttentionBackend.{interface._FORM}", f"{interface._TRITON}.{interface._FORM}")
    given = (*interface._NAMES, *forms, f"{interface._TRITON}.get_kv_cache_stride_order")
    return sorted({*given, *(name for _, each in hooks.INTERFACES.values() for name in each)})


def read(root: Path) -> dict[str, str | None]:
    """The interface of the vLLM in `root`: parameters of functions, and None for other names, as far as it has them."""
    found: dict[str, str | None] = {}
    for target in calls():
        module, _, name = target.partition(":")
        try:
            found[target] = _parameters(_header(Sources(), root, module.split(".")[1:], name.split("."), MOST_HOPS))
        except _Unknown:
            continue
    return found | {name: None for name in names() if name not in found and defines(name, root=root).ok}


def _parameters(header: Header) -> str:
    plain = [name if name in header.required else f"{name}=None" for name in header.positional]
    named = [name if name in header.required else f"{name}=None" for name in header.keyword_only]
    star = ["*args"] if header.takes_more else ["*"] if named else []
    return ", ".join([*plain, *star, *named, *(["**kwargs"] if header.takes_any_keyword else [])])


def recorded() -> dict[str, dict[str, str | None]]:
    """The interfaces by release, the oldest first."""
    said: dict[str, Any] = json.loads(RECORD.read_text())
    return {
        release: {name: form["is"] for name, forms in said["names"].items() for form in forms if release in form["in"]}
        for release in said["releases"]
    }


def record(interfaces: dict[str, dict[str, str | None]]) -> None:
    """Write the interfaces: of each name its forms, and the releases that have them."""
    releases = sorted(interfaces, key=lambda release: [int(part) for part in release.split(".")])
    forms: dict[str, dict[str | None, list[str]]] = {}
    for release in releases:
        for name, form in interfaces[release].items():
            forms.setdefault(name, {}).setdefault(form, []).append(release)
    lines = [
        f"  {json.dumps(name)}: [\n    "
        + ",\n    ".join(json.dumps({"is": form, "in": there}) for form, there in forms[name].items())
        + "\n  ]"
        for name in sorted(forms)
    ]
    named = ",\n".join(lines)
    RECORD.write_text(f'{{\n"releases": {json.dumps(releases)},\n"names": {{\n{named}\n}}\n}}\n')


def written(given: dict[str, str | None], folder: Path) -> Path:
    """The sources of a vLLM that has this interface and nothing else; its folder."""
    modules: dict[str, dict[str, dict[str, str | None]]] = {}
    for target, form in given.items():
        module, _, name = target.partition(":")
        owner, _, member = name.rpartition(".")
        modules.setdefault(module, {}).setdefault(owner, {})[member] = form
    for module, owners in modules.items():
        lines = [_definition(name, form, "") for name, form in owners.pop("", {}).items() if name not in owners]
        for owner, members in owners.items():
            lines += [f"class {owner}:", *(_definition(name, form, "    ") for name, form in members.items())]
        path = folder.joinpath(*module.split("."), "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return folder / "vllm"


def _definition(name: str, form: str | None, inside: str) -> str:
    indent, first = ("    ", "self, ") if inside else ("", "")
    return f"{indent}{name} = None" if form is None else f"{indent}def {name}({first}{form}): ..."


if __name__ == "__main__":
    known = recorded() if RECORD.exists() else {}
    record(known | {folder.name: read(folder / "vllm") for folder in map(Path, sys.argv[1:])})
