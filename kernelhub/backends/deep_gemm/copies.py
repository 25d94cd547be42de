"""The folders of DeepGEMM's copies and the signatures in their sources. Nothing of them is imported."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.package import spec_of
from kernelhub.probes.reading import read_source
from kernelhub.probes.signature import Call, Header, mismatch

INSTALL = 'pip install "kernelhub[deep-gemm]"'
REPLACE = f"pip uninstall deep-gemm, then {INSTALL}"

# Module and its top-level package, in order of preference.
PLACES = (("deep_gemm", "deep_gemm"), ("vllm.third_party.deep_gemm", "vllm"))
_COMPILED = ("_C*.so", "deep_gemm_cpp*.so")
_SOURCES = ("__init__.py", "_C.py", "_C.pyi", "utils/layout.py")


@dataclass(frozen=True)
class Copy:
    """One copy of the library.

    Attributes:
        module: the name that it is imported by.
        folder: its folder.
    """

    module: str
    folder: Path

    @property
    def compiled(self) -> tuple[Path, ...]:
        """Its extension modules; up to 2.1.1 they are beside the package."""
        places = [self.folder] if "." in self.module else [self.folder, self.folder.parent]
        return tuple(
            path
            for place, pattern in ((place, pattern) for place in places for pattern in _COMPILED)
            for path in sorted(place.glob(pattern))
            if place == self.folder or path.name.startswith("deep_gemm_cpp")
        )

    @property
    def registers_operators(self) -> bool:
        """Loading it claims torch's namespace deep_gemm, which can be done once in a process."""
        if not self.compiled or any("cpython-" in path.name for path in self.compiled):  # Python up to 1.0, or pybind
            return False
        return "tvm_ffi" not in read_source(self.folder / "__init__.py")

    @property
    def defect(self) -> str | None:
        """Why no kernel of it can run, according to its files."""
        if not (self.folder / "include" / "deep_gemm").is_dir():
            return (
                f"{self.folder} has no include/deep_gemm, so none of its kernels compiles; "
                "this is the case for deep-gemm 1.0.0 on PyPI"
            )
        if not self.compiled and not (self.folder / "jit" / "compiler.py").is_file():
            return f"{self.folder} has no compiled module"
        return None


def find() -> Copy | Finding:
    """The first complete copy, or the defect of the first copy."""
    broken: Finding | None = None
    for module, top in PLACES:
        spec = spec_of(top, subject=module, remedy=INSTALL)
        if isinstance(spec, Finding):
            broken = broken or spec
            continue
        for root in spec.submodule_search_locations or () if spec is not None else ():
            copy = Copy(module, Path(root, *module.split(".")[1:]))
            if not (copy.folder / "__init__.py").is_file():
                continue
            if copy.defect is None:
                return copy
            broken = broken or lacking(module, "package_broken", copy.defect, REPLACE if module == top else INSTALL)
    return broken or lacking("deep_gemm", "package_missing", "no copy of DeepGEMM is installed", INSTALL)


def whole() -> Finding:
    """Is there a copy with everything that its kernels are compiled from?"""
    copy = find()
    return copy if isinstance(copy, Finding) else found("deep_gemm", str(copy.folder), f"{copy.module}")


def offers(calls: tuple[Call, ...], copy: Copy | None = None) -> Finding:
    """Whether a copy has a function that accepts one of these calls.

    Functions of compiled modules without readable parameters pass here; `loaded` checks them again.

    Args:
        calls: one call, in the form of each version of the library.
        copy: the copy; by default the one that would be loaded.
    """
    copy_or_finding = copy or find()
    if isinstance(copy_or_finding, Finding):
        return copy_or_finding
    copy = copy_or_finding
    try:
        known = headers(copy)
    except (OSError, SyntaxError, ValueError) as error:
        return lacking(copy.module, "package_broken", f"the source of {copy.module} cannot be read: {error}", INSTALL)
    wrong = ""
    for call in calls:
        name = name_of(call)
        if name not in known:
            continue
        header = known[name]
        reason = None if header is None else mismatch(call, header)
        if reason is None:
            return found(name, None, f"{copy.module}.{name} supports the call")
        wrong = wrong or f"{copy.module}.{name} {reason}"
    if wrong:
        return lacking(copy.module, "signature_changed", wrong, INSTALL)
    names = " or ".join(dict.fromkeys(map(name_of, calls)))
    return lacking(copy.module, "symbol_missing", f"{copy.module} at {copy.folder} has no {names}", INSTALL)


def names(name: str) -> Finding:
    """Whether the copy that would be loaded defines this function, with any parameters."""
    copy = find()
    if isinstance(copy, Finding):
        return copy
    try:
        known = headers(copy)
    except (OSError, SyntaxError, ValueError) as error:
        return lacking(copy.module, "package_broken", f"the source of {copy.module} cannot be read: {error}", INSTALL)
    if name in known:
        return found(name, None, f"{copy.module} has {name}")
    return lacking(copy.module, "symbol_missing", f"{copy.module} at {copy.folder} has no {name}", INSTALL)


def name_of(call: Call) -> str:
    """The function that a call is of."""
    return call.target.partition(":")[2]


def headers(copy: Copy) -> dict[str, Header | None]:
    """The parameters of every function that a copy's sources name; None where they only name it."""
    defined: dict[str, Header] = {}
    aliases: dict[str, str] = {}
    for name in _SOURCES:
        path = copy.folder / name
        if not path.is_file():
            continue
        for node in ast.walk(ast.parse(read_source(path))):
            if isinstance(node, ast.FunctionDef):
                defined[node.name] = _header(node.args)
            elif isinstance(node, ast.ImportFrom):
                aliases.update({item.asname or item.name: item.name for item in node.names})
            elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute)):
                made = [target.id for target in node.targets if isinstance(target, ast.Name)]
                aliases.update(dict.fromkeys(made, _last(node.value)))
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(value, ast.Name):
                        aliases[key.value] = value.id
    return {**{alias: _resolved(alias, aliases, defined) for alias in aliases}, **defined}


def _resolved(name: str, aliases: dict[str, str], defined: dict[str, Header]) -> Header | None:
    seen: set[str] = set()
    while name not in defined and name in aliases and name not in seen:
        seen.add(name)
        name = aliases[name]
    return defined.get(name)


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _header(arguments: ast.arguments) -> Header:
    plain = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    named = [argument.arg for argument in arguments.kwonlyargs]
    required = set(plain[: len(plain) - len(arguments.defaults)])
    required |= {name for name, default in zip(named, arguments.kw_defaults, strict=True) if default is None}
    return Header(
        tuple(plain), tuple(named), frozenset(required), arguments.vararg is not None, arguments.kwarg is not None
    )


def header_of_text(signature: str) -> Header | None:
    """Parameters out of ``name(a: T, b: T = 1) -> T``, as pybind writes it; None if it does not read as Python."""
    try:
        (node,) = ast.parse(f"def {signature.strip()}: ...").body
    except (SyntaxError, ValueError):
        return None
    return _header(node.args) if isinstance(node, ast.FunctionDef) else None
