"""Shared by all tests: one thread per worker, Triton's interpreter where there is no GPU, a clean hub.

TRITON_INTERPRET is read when Triton is imported, so it is set here, before anything else is.
"""

from __future__ import annotations

import functools
import gc
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.remembered import Remembered

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
for name in [name for name in os.environ if name.startswith(("KERNELHUB_", "VLLM_", "FORCE_NUM_KV_SPLITS"))]:
    del os.environ[name]

torch.set_num_threads(1)

# Hooks that count the faults and attacks that tests make, and print the counts at the end.
pytest_plugins = ("tests.faults.counting", "tests.fuzz.counting", "tests.tiers", "tests.accepted", "tests.going_on")

DEVICE = "cuda" if HAS_GPU else "cpu"
_TEMPORARY = pytest.StashKey[str]()
_REMEMBERED = pytest.StashKey[Remembered]()
_CONTRACT = pytest.StashKey[Any]()  # the class of the last test, if that was a case of a contract


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Temporary files of a run, those of its processes too, lie in one folder, which goes when the run ends.

    So does the cache: what the user verified, quarantined and tuned on this machine decides no test.
    """
    if hasattr(config, "workerinput"):
        return
    from tests.accepted import keep_in

    folder = config.stash[_TEMPORARY] = tempfile.mkdtemp(prefix="kernelhub-tests-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "cache")
    config.option.basetemp = config.option.basetemp or os.path.join(folder, "pytest")
    memory = Path(os.environ.get("COMPILED_FOR_TESTS") or os.path.join(folder, "compiled")).absolute()
    memory.mkdir(exist_ok=True)
    _remember_what_is_compiled(Path(folder), memory)
    keep_in(memory)


def _remember_what_is_compiled(folder: Path, memory: Path) -> None:
    """Put a C++ compiler on PATH that compiles each source of csrc/cpu once in a run.

    Runs that are given one folder by COMPILED_FOR_TESTS, as those of `.ci/run`, compile it once together.
    """
    real = shutil.which("g++")
    if real is None:
        return
    tools = folder / "tools"
    tools.mkdir()
    text = Path(__file__).with_name("compiler.sh").read_text()
    script = tools / "g++"
    script.write_text(text.replace("@real@", shlex.quote(real)).replace("@memory@", shlex.quote(str(memory))))
    script.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(tools), os.environ["PATH"]])


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(_TEMPORARY, None):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_REMEMBERED] = remembered = Remembered()
    remembered.begin()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Importing the tests may have added folders of packages, and torch's compiler."""
    session.config.stash[_REMEMBERED].packages_are_where_they_are_now()
    session.config.stash[_REMEMBERED].measure_no_guards()


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[_REMEMBERED].end()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected stays until the run ends: the garbage collector does not go through it, then or in a test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of a parallel run: as ``--dist loadgroup``, faster."""
    from tests.scheduling import Scheduling

    return Scheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.faults.counting import note_faults
    from tests.tiers import mark_full

    note_faults(items)
    mark_full(items)
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here: this case runs on a GPU only"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A contract's cases are those that the kernel's record takes."""
    if hasattr(metafunc.cls, "pytest_generate_tests"):  # `kernelhub.testing.OpContract` does it itself
        return
    if "case" in metafunc.fixturenames and hasattr(metafunc.cls, "accepted_cases"):
        metafunc.parametrize("case", _cases_of(metafunc.cls), ids=str)


@functools.cache
def _cases_of(contract: Any) -> list[Any]:
    """Made once for each class, since a kernel's record is asked about every case."""
    cases: list[Any] = contract.accepted_cases()
    return cases


@pytest.fixture
def no_engine_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables of libraries that the machine sets, or that a watched library left in this process."""
    for name in [name for name in os.environ if name.startswith(("DG_", "FLASHINFER_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def clean_hub(request):
    """What collecting or a test configures, registers or enters reaches no other test; which kernels ran is noted.

    The note is a property ``ran`` of the test in a JUnit file, which `scripts/record_verification.py` counts. Cases of
    one contract configure nothing: the hub is not restored between two of them, since it probes the machine again for
    10 ms.
    """
    from kernelhub.dispatch.hub import HUB

    contract = request.cls if request.node.originalname == "test_case" else None
    stash = request.session.stash
    if contract is not None and stash.get(_CONTRACT, None) is contract:
        HUB.ledger.clear()
    else:
        HUB.restore()
    stash[_CONTRACT] = None
    yield
    ran = {f"{row.op} {row.kernel}" for row in HUB.report().rows if row.calls}
    request.node.user_properties += [("ran", name) for name in sorted(ran)]
    assert HUB.contexts.get() == (), "a test left a context open"
    if contract is None:
        HUB.restore()
    else:
        stash[_CONTRACT] = contract
