"""The CUDA or ROCm version that torch is built for, on this machine or a simulated one."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import NamedTuple

_CUDA = "13.0"  # of the wheels on the package index since torch 2.11
_ROCM = "7.0"
_NEWEST = "2.13.0"


class TorchBuild(NamedTuple):
    """A build of torch.

    Attributes:
        version: as ``torch.__version__``, e.g. ``"2.11.0+cu130"``.
        cuda: CUDA toolkit that it is built for, e.g. ``"13.0"``; None for a build without CUDA.
        hip: ROCm version that it is built for; None for a build without ROCm.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None

    def __str__(self) -> str:
        built = f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "no CUDA"
        return f"torch {self.version} is built for {built}"

    def runs_on(self, vendor: str) -> bool:
        """Whether it can use devices of this vendor."""
        return {"nvidia": self.cuda is not None, "amd": self.hip is not None}.get(vendor, True)

    def assumed_for(self, vendor: str) -> TorchBuild:
        """The same release as it would be installed beside devices of this vendor."""
        if self.runs_on(vendor):
            return self
        release = self.version.partition("+")[0]
        return TorchBuild(release, hip=_ROCM) if vendor == "amd" else TorchBuild(release, cuda=_CUDA)


def torch_build() -> TorchBuild:
    """The build of this process; read from its files if torch is not imported, since an import takes over a second."""
    if "torch" not in sys.modules:
        build = _read()
        if build is not None:
            return build
    import torch

    return TorchBuild(str(torch.__version__), torch.version.cuda, torch.version.hip)


def _read() -> TorchBuild | None:
    """The build in ``torch/version.py`` of the installed torch; None if it cannot be read."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        tree = ast.parse((Path(spec.origin).parent / "version.py").read_text())
    except (ImportError, OSError, ValueError, SyntaxError):
        return None
    said: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            said.update({target.id: node.value.value for target in targets if isinstance(target, ast.Name)})
    version, cuda, hip = (said.get(name) for name in ("__version__", "cuda", "hip"))
    if not isinstance(version, str) or not {"cuda", "hip"} <= said.keys():
        return None
    return TorchBuild(version, cuda if isinstance(cuda, str) else None, hip if isinstance(hip, str) else None)


def torch_build_of(version: str | None) -> TorchBuild:
    """The build of a version: ``"2.13.0+cu130"``, ``"2.8.0+cpu"``; without a local part, the package index's build."""
    release, _, local = (version or _NEWEST).partition("+")
    cuda = re.fullmatch(r"cu(\d+)(\d)", local)
    if cuda:
        return TorchBuild(f"{release}+{local}", cuda=f"{cuda[1]}.{cuda[2]}")
    if local.startswith("rocm"):
        return TorchBuild(f"{release}+{local}", hip=local.removeprefix("rocm"))
    return TorchBuild(f"{release}+{local}" if local else release, cuda=None if local == "cpu" else _CUDA)
