"""`kernelhub.testing`: the cases of an op as tests of one kernel, here and in a package of somebody else's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernelhub
import kernelhub.testing
from kernelhub.backends.torch.merge.merge import Merge
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.errors import ConfigurationError, KernelUnavailable
from kernelhub.evidence.cases import CASES
from kernelhub.testing import WrongResult
from tests.dispatch.backends import register

OP = "merge_attention_states"

PLUGIN = """
import types
import pytest
import kernelhub, kernelhub.testing
from kernelhub.dispatch.constraint import anything, dtype_in
from kernelhub.dispatch.kernel import Backend, Band, Kernel

def record(name, dtype):
    return Kernel(
        op="merge_attention_states", name=name, target="kernelhub.backends.torch.merge.merge:Merge", summary="theirs",
        band=Band.PLUGIN, features=frozenset({"batched", "lse"}),
        constraints=(anything("device", "num_heads", "head_dim", "parts"), dtype_in("dtype", dtype)),
    )

kernelhub.register_backend(types.SimpleNamespace(
    __name__="mine", BACKEND=Backend("mine", "theirs"), KERNELS=(record("mine.merge", "bfloat16"),)
))

class TestMine(kernelhub.testing.OpContract):
    op, kernel, device = "merge_attention_states", "mine.merge", "cpu"

class TestQuick(kernelhub.testing.OpContract):
    op, kernel, device, quick = "merge_attention_states", "mine.merge", "cpu", True

class TestVendor(kernelhub.testing.OpContract):
    op, kernel, device = "merge_attention_states", "flashinfer.merge", "cpu"
"""


class OneRowLess(Merge):
    """Leaves out one head of one token."""

    def launch(self, outs, lses, out, lse, out_scale=None) -> None:  # type: ignore[no-untyped-def]
        super().launch(outs, lses, out, lse, out_scale)
        if out.numel():
            out[..., 0, 1, :] = 3.0


@pytest.fixture
def liar() -> None:
    mine = Kernel(
        op=OP,
        name="mine.merge",
        target=f"{__name__}:OneRowLess",
        summary="leaves out a row",
        band=Band.PLUGIN,
        constraints=(anything("device", "dtype", "num_heads", "head_dim", "parts"),),
        features=frozenset({"batched", "lse", "out_scale=value", "out_scale=tensor"}),
    )
    register("mine", mine)


def test_every_case_of_a_right_kernel_passes() -> None:
    found = kernelhub.testing.cases(OP, kernel="torch.merge", device="cpu")
    assert [case.label for case in found] == [case.label for case in CASES[OP].cases()]
    assert len({case.problem for case in found}) > 5
    for case in found:
        case.check()
    assert kernelhub.verify(OP, backend="torch.merge", device="cpu", case="9 parts").ok


def test_a_failure_names_the_element_and_the_command(liar) -> None:
    case = next(
        case for case in kernelhub.testing.cases(OP, kernel="mine.merge", device="cpu") if case.label == "9 parts"
    )
    with pytest.raises(WrongResult) as error:
        case.check()
    assert error.value.code == "wrong_numbers"
    text = str(error.value)
    assert "mine.merge failed merge_attention_states, 9 parts: wrong_numbers: off by " in text
    assert "; out[0, 1, " in text
    assert "is 3, expected " in text
    command = "kernelhub verify merge_attention_states --backend mine.merge --device cpu --case '9 parts'"
    assert text.endswith(f"run this case again: {command}")
    codes = {decision.code for decision in kernelhub.explain(OP, device="cpu", backend="mine").decisions}
    assert "quarantined" not in codes, "a test leaves no record"


def test_one_case_is_verified_alone(liar) -> None:
    found = kernelhub.verify(OP, backend="mine", device="cpu", case="9 parts")
    assert [(check.case, check.code) for check in found.results[0].checks] == [("9 parts", "wrong_numbers")]
    with pytest.raises(ConfigurationError, match=r"no case '9 part' \(did you mean 9 parts\?\); its \d+ cases are"):
        kernelhub.verify(OP, device="cpu", case="9 part")
    with pytest.raises(ConfigurationError, match="give op"):
        kernelhub.verify(device="cpu", case="9 parts")


def test_what_is_misspelt_or_cannot_run_says_so() -> None:
    with pytest.raises(ConfigurationError, match="did you mean merge_attention_states"):
        kernelhub.testing.cases("merge_attention_state", kernel="torch.merge")
    with pytest.raises(ConfigurationError, match=r"has no kernel 'torch.merg' \(did you mean torch.merge\?\)"):
        kernelhub.testing.cases(OP, kernel="torch.merg")
    if not torch.cuda.is_available():
        with pytest.raises(KernelUnavailable, match=r"flashinfer\.merge supports no case .* on cpu: "):
            kernelhub.testing.cases(OP, kernel="flashinfer.merge")


def test_a_package_of_somebody_else_s_runs_the_cases_with_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-rs", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    bfloat16 = len(kernelhub.testing.cases(OP, kernel="torch.merge", device="cpu"))
    assert done.returncode == 0, done.stdout
    assert "flashinfer.merge supports no case of merge_attention_states on cpu" in done.stdout
    passed, skipped = (int(word) for word in done.stdout.splitlines()[-1].split() if word.isdigit())
    assert skipped == 1
    assert 15 < passed < 2 * bfloat16
