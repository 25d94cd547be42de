"""What a type checker of a user's sees of the package, installed in either way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import generate_stub  # noqa: E402

# A line, and what a type checker says of it: the type of an expression, or the words of an error.
EXPECTED = {
    "kernelhub.attention(t, t, t)": "Tensor",
    "kernelhub.attention(t, t, t, return_lse=True)": "tuple[Tensor, Tensor]",
    "kernelhub.attention(t, t, t, return_lse=some)": "Tensor | tuple[Tensor, Tensor]",
    "kernelhub.paged_attention(t, t, t, t, t, return_lse=True)": "tuple[Tensor, Tensor]",
    "kernelhub.mla_attention(t, t, t, t, scale=1.0)": "Tensor",
    "kernelhub.merge_attention_states([t], [t], out_lse=t)": "tuple[Tensor, Tensor]",
    "kernelhub.attention.prepare(t, t, t).run(t, t, t)": "Tensor",
    "kernelhub.attention.prepare(t, t, t, return_lse=True).begin().run(t, t, t)": "tuple[Tensor, Tensor]",
    "kernelhub.paged_attention.prepare(t, t, t, t, t).begin(t, t).run(t, t, t)": "Tensor",
    "kernelhub.fp8_gemm(t, t, t, t)": "Tensor",
    "kernelhub.attention.explain(t, t, t)": "Selection[Any]",
    "kernelhub.attention.prepare(t, t, t)": "kernelhub._AttentionPlan[Tensor]",
    "kernelhub.fp8_gemm.prepare(t, t)": "kernelhub.ops.gemm.fp8.op.Fp8GemmPlan",
    "kernelhub.attention.kernels()": "tuple[str, ...]",
    "kernelhub.fp8_gemm.kernels()": "tuple[str, ...]",
    "kernelhub.attention.reference": "def (*args: Any, **kwargs: Any) -> Any",
    "kernelhub.attention.kernals()": '"_Attention" has no attribute "kernals"',
    "kernelhub.attentoin": 'Module has no attribute "attentoin"',
    "kernelhub.attention(t, t, t, cusal=True)": 'Unexpected keyword argument "cusal"',
    "kernelhub.fp8_gemm(t, t, bais=t)": 'Unexpected keyword argument "bais"',
}


def test_the_stub_is_made_from_the_signatures() -> None:
    assert generate_stub.STUB.read_text() == generate_stub.text(), "run scripts/generate_stub.py"


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> Path:
    """Where the type checker keeps what it saw of torch, which is the same beside either installation."""
    return tmp_path_factory.mktemp("known")


@pytest.mark.xdist_group("types")
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_a_type_checker_sees_each_result_and_flags_misspelt_names(kind, tmp_path, known: Path) -> None:
    site = _installed(kind, tmp_path)
    for folder in ("kernelhub", "user"):
        for kept in known.glob(f"*/{folder}*"):
            shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
    user = tmp_path / "user.py"
    lines = [f"reveal_type({line})" for line in EXPECTED]
    user.write_text("\n".join(["import torch", "import kernelhub", "def use(t: torch.Tensor, some: bool) -> None:"]))
    user.write_text(user.read_text() + "".join(f"\n    {line}" for line in lines) + "\n")
    python = site.parents[2] / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context"]
    # Beside the tree it would read the tree, and not what is installed.
    told = (
        subprocess.run(
            [*command, "--python-executable", str(python), "--no-sqlite-cache", "--cache-dir", str(known), str(user)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": ""},
        )
        .stdout.replace("torch._tensor.", "")
        .replace("kernelhub.dispatch.selection.", "")
    )
    by_line: dict[int, str] = {}
    for line in told.splitlines():
        number, _, words = line.removeprefix(f"{user.name}:").partition(": ")
        if number.isdecimal():
            by_line[int(number)] = by_line.get(int(number), "") + words + "\n"
    for number, (line, expected) in enumerate(EXPECTED.items(), 4):
        wrong = " attribute " in expected or expected.startswith("Unexpected")
        shown = f"error: {expected}" if wrong else f'type is "{expected}"'
        assert shown in by_line[number], f"{line}: {told}"


def _installed(kind: str, folder: Path) -> Path:
    """The site-packages of a new environment into which the package is installed beside what is here."""
    tree, built = folder / "tree", folder / "built"
    tree.mkdir()
    built.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "kernelhub", tree / "kernelhub", ignore=shutil.ignore_patterns("__pycache__"))
    build = f"from setuptools import build_meta; build_meta.build_{kind}({str(built)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "here.pth").write_text("\n".join(here))
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    return site
