"""Whether a library takes a call is told from its source, which is never imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kernelhub.dispatch.constraint import Takes
from kernelhub.dispatch.machine import Machine, SimulatedMachine
from kernelhub.ops.attention.problem import AttentionProblem
from kernelhub.probes.device import simulated
from kernelhub.probes.signature import Call, takes

FILES = {
    "__init__.py": """
        from .api import run as run, Wrapper
        from .api import old_run as renamed  # kept for a while
        from .nothing_of_it import *
        from .starred import *
        from fakelib_c.moved import (
            here,  # noqa
            there as elsewhere,
        )
        raise SystemExit("imported")
    """,
    "api.py": """
        def _decorated(function): return function
        def run(q, k, v, scale: float = 1.0, *, causal: bool = False, window: tuple[int, int] = (-1, -1)):
            return q
        def old_run(q, *more, **options): ...
        alias = run
        class Other:
            def plan(self): ...
        class Wrapper(Other):
            @_decorated
            def plan(
                self,
                indptr: "Tensor",  # [B + 1]: where each begins
                indices: "Tensor",
                page_size: int,
                mode: str = "a:b",
                *,
                dtype=None,
                device,
            ) -> None:
                def plan(nothing): ...
            @staticmethod
            async def stop(cls): ...
        class After:
            def begin(self): ...
        from typing import overload
        @overload
        def twice(a): ...
        def twice(a, b): ...
    """,
    "moved.py": "def here(a): ...\ndef there(b): ...\n",
    "starred.py": "def shown(a, *, b=1): ...\n",
    "nothing_of_it.py": "",
    "loop.py": "from .pool import f\n",
    "pool.py": "from .loop import f\n",
    "broken.py": "def f(a, b\n",
    "compiled.abi3.so": "",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "fakelib_c"
    folder.mkdir()
    for name, text in FILES.items():
        lines = text.splitlines()
        margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        (folder / name).write_text("\n".join(line[margin:] for line in lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


RUN = ("q", "k", "v")
PLAN = ("indptr", "indices", "page_size")


@pytest.mark.parametrize(
    "call",
    [
        Call("fakelib_c.api:run", RUN, ("scale", "causal", "window")),
        Call("fakelib_c:run", RUN),
        Call("fakelib_c.api:alias", RUN, ("causal",)),
        Call("fakelib_c:renamed", ("q", "anything"), ("anything_else",)),
        Call("fakelib_c:here", ("a",)),
        Call("fakelib_c:shown", ("a",), ("b",)),
        Call("fakelib_c:elsewhere", ("b",)),
        Call("fakelib_c.api:Wrapper.plan", PLAN, ("dtype", "device")),
        Call("fakelib_c:Wrapper.plan", (), (*PLAN, "mode", "device")),
        Call("fakelib_c.api:After.begin"),
        Call("fakelib_c.api:twice", ("a", "b")),
    ],
    ids=lambda call: f"{call.target} {len(call.positional)} {len(call.keywords)}",
)
def test_a_call_that_fits_is_taken(library: Path, call: Call) -> None:
    assert takes(call).ok, takes(call)
    assert takes(call, root=library).ok
    assert "fakelib_c" not in sys.modules


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        pytest.param(
            Call("fakelib_c.api:run", ("q", "v", "k")),
            "signature_changed",
            "has k as argument 2, where v was",
            marks=pytest.mark.fault("signature_changed"),
        ),
        pytest.param(
            Call("fakelib_c.api:run", RUN, ("softcap",)),
            "signature_changed",
            "has no parameter softcap",
            marks=pytest.mark.fault("signature_changed"),
        ),
        pytest.param(
            Call("fakelib_c.api:run", ("q",)),
            "signature_changed",
            "requires k, v, which the adapter does not pass",
            marks=pytest.mark.fault("signature_changed"),
        ),
        (Call("fakelib_c.api:run", (*RUN, "scale", "causal")), "signature_changed", "takes 4 arguments by position"),
        (Call("fakelib_c.api:Wrapper.plan", PLAN), "signature_changed", "requires device"),
        (Call("fakelib_c.api:twice", ("a",)), "signature_changed", "requires b"),
        (Call("fakelib_c.api:Wrapper.begin"), "symbol_missing", "Wrapper without begin"),
        pytest.param(
            Call("fakelib_c.api:absent"),
            "symbol_missing",
            "does not define absent",
            marks=pytest.mark.fault("symbol_missing"),
        ),
        (Call("fakelib_c:absent"), "symbol_missing", "does not define absent"),
        (Call("fakelib_c.absent:run"), "symbol_unknown", "no Python source"),
        (Call("fakelib_c.compiled:run"), "symbol_unknown", "no Python source"),
        (Call("fakelib_c.loop:f"), "symbol_unknown", "too many modules"),
        (Call("fakelib_c.broken:f", ("a",)), "package_broken", "cannot be read"),
        (Call("no_such_package:f"), "package_missing", "not installed"),
    ],
    ids=lambda value: value.target if isinstance(value, Call) else "",
)
def test_a_call_that_does_not_says_what_is_wrong(library: Path, call: Call, code: str, words: str) -> None:
    finding = takes(call, remedy="upgrade")
    assert (finding.ok, finding.code, finding.remedy) == (False, code, "upgrade")
    assert words in finding.reason
    assert "fakelib_c" not in sys.modules


def test_a_record_is_rejected_for_a_call_that_its_library_would_not_take(library: Path) -> None:
    problem = AttentionProblem(device=simulated("H200"))
    wrong = Takes(Call("fakelib_c.api:run", RUN, ("softcap",)), remedy='pip install "fakelib>=2"')
    machine = Machine()
    rejection = wrong.reject(problem, machine)
    assert rejection is not None
    assert rejection.code == "signature_changed"
    assert rejection.remedy == 'pip install "fakelib>=2"'
    (library / "api.py").write_text("def run(q, k, v, *, softcap): ...")
    assert wrong.reject(problem, machine) == rejection, "asked once"
    machine.forget()
    assert wrong.reject(problem, machine) is None
    assert wrong.reject(problem, SimulatedMachine({})) is None, "a machine that is not here is taken to fit"


def test_torch_s_own_source_can_be_read() -> None:
    assert takes(Call("torch.nn.functional:silu", ("input",), ("inplace",))).ok
    assert takes(Call("torch.optim:SGD.step", (), ("closure",))).ok
    assert takes(Call("torch.nn.functional:silu", ("x",))).code == "signature_changed"
