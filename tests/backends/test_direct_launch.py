"""kernelhub's own launcher: what the CUDA driver, here a stub, receives, and when Triton launches instead.

Triton compiles in a child process, since this one interprets its kernels.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.shared import direct
from kernelhub.backends.shared.repeat import extent_bytes
from kernelhub.backends.triton.launch import Launcher
from kernelhub.runtime import launch

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the launcher and the stub are built with gcc")

SCENARIOS = Path(__file__).with_name("launching") / "check.py"
SIGNATURE = {
    "a": "*bf16",
    "absent": "constexpr",
    "n": "i32",
    "big": "i64",
    "scale": "fp32",
    "wide": "fp64",
    "flag": "u1",
    "b": "*i32",
    "one": "constexpr",
    "tiny": "i8",
    "BLOCK": "constexpr",
    "WIDTH": "constexpr",
}
FORMATS = "QiqfdBQb"
SIZES = [struct.calcsize("=" + form) for form in FORMATS]
GIVEN = len(SIGNATURE) - 2
PLAIN = {
    "num_warps": 8,
    "num_ctas": 1,
    "shared": 1234,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "target": SimpleNamespace(backend="cuda"),
}


@pytest.fixture(scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of Triton's for all children, which launch the same small kernels."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.mark.xdist_group("launching")  # one process of tests, so that one child compiles for the next
@pytest.mark.parametrize("as_graphs_after", [0, 1])
def test_what_the_driver_receives(as_graphs_after, triton_cache) -> None:
    """The scenarios of `launching.check`."""
    _passes("check", SEQUENCES_AS_GRAPHS=str(as_graphs_after), TRITON_CACHE_DIR=triton_cache)


@pytest.mark.xdist_group("launching")
@pytest.mark.parametrize("module", ["graphs", "whole", "fresh", "layers"])
def test_launches_on_a_stub(module, triton_cache) -> None:
    """The scenarios of `launching.graphs`, of whole calls, of results that calls make, of an engine's layers."""
    _passes(module, TRITON_CACHE_DIR=triton_cache)


def _passes(module: str, **variables: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-m", f"tests.backends.launching.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    text = SCENARIOS.with_stem(module).read_text()
    scenarios = set(re.findall(r"^def (\w+)\(stub: Stub\)", text, re.M)) - {
        "on_stub",
        "on_stub_by_function",
        "gluon_on_stub",
        "received",
        "quantising",
        "pointers",
        "modelling",
    }
    assert {line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("passed ")} == scenarios


@pytest.fixture(scope="module")
def native() -> launch.Native:
    """The launcher on a driver that is never entered."""
    module = launch.extension().module
    assert module is not None, launch.extension().reason
    return launch.native_of(module, launch.address(NEVER), 0)


@ctypes.CFUNCTYPE(ctypes.c_int)
def NEVER() -> int:
    raise AssertionError("nothing is launched here")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)


def compiled(signature: dict[str, Any] | None = None, **metadata: Any) -> Any:
    return SimpleNamespace(
        src=SimpleNamespace(signature=signature or SIGNATURE),
        function=99,
        name="a kernel",
        metadata=SimpleNamespace(**PLAIN | metadata),
    )


def made(native: launch.Native, kernel: Any, sizes: Any = (*SIZES, 8, 8)) -> Any:
    return direct.direct_launch(kernel, GIVEN, native, lambda function, most: list(sizes))


def arguments(n: int = 5) -> list[Any]:
    return [torch.ones(4), None, n, -(1 << 40), 0.5, 1e300, True, torch.ones(2), 1, -7]


def test_every_argument_is_packed_in_its_type(native) -> None:
    given = arguments()
    packed = made(native, compiled()).packed(*given)
    read = [struct.unpack_from("<" + form, raw)[0] for form, raw in zip(FORMATS, packed[:8], strict=True)]
    assert read == [given[0].data_ptr(), 5, -(1 << 40), 0.5, 1e300, 1, given[7].data_ptr(), -7]
    assert packed[8:] == (bytes(8), bytes(8)), "Triton's scratch pointers"


def test_a_driver_that_lacks_a_function_of_graphs_launches_one_by_one(caplog) -> None:
    assert launch.as_graphs(SimpleNamespace(cuGraphCreate=NEVER)) == {}
    assert "too old" in caplog.text


@pytest.mark.parametrize(
    "changed",
    [
        {"graphs": (1, 2)},
        {"graphs": (1,) * 12 + (0,)},
        {"graph_least": 0},
        {"capturing": 0},
    ],
    ids=str,
)
def test_graphs_need_all_their_functions(native, changed) -> None:
    given = {"graphs": (1,) * len(launch.GRAPH_FUNCTIONS), "graph_after": 1, "capturing": 1} | changed
    with pytest.raises(ValueError, match="graphs need 13 functions"):
        launch.native_of(native.module, launch.address(NEVER), 0, **given)


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [
        (2, 1 << 31, OverflowError),
        (9, 300, OverflowError),
        (6, 256, OverflowError),
        (6, -1, OverflowError),
        (3, 1 << 63, OverflowError),
        (2, 0.5, TypeError),
        (4, "1", TypeError),
        (0, None, TypeError),
        (1, torch.ones(1), TypeError),
    ],
)
def test_a_value_that_does_not_fit_its_parameter_is_refused(native, at, value, error) -> None:
    given = arguments()
    given[at] = value
    with pytest.raises(error):
        made(native, compiled()).launch(6, *given)


@pytest.mark.parametrize(
    "metadata",
    [
        {"num_ctas": 16},
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"instrumentation_mode": "gsan"},
        {"shared": 229 * 1024},
        {"target": SimpleNamespace(backend="hip")},
    ],
    ids=str,
)
def test_a_kernel_that_needs_more_than_parameters_is_triton_s(native, metadata) -> None:
    assert made(native, compiled(**metadata)) is None


@pytest.mark.parametrize("kind", ["fp16", "nvTmaDesc", ("i32", "i32"), "tensordesc<bf16[64, 64]>"], ids=str)
def test_a_parameter_of_another_kind_is_triton_s(native, kind) -> None:
    assert made(native, compiled({**SIGNATURE, "n": kind})) is None


@pytest.mark.parametrize(
    "sizes",
    [[*SIZES, 8], [*SIZES, 8, 8, 8], [8, *SIZES[2:], 8, 8], [*SIZES[:1], 8, *SIZES[2:], 8, 8]],
    ids=["fewer", "more", "one missing", "another size"],
)
def test_a_function_with_other_parameters_is_triton_s(native, sizes) -> None:
    assert made(native, compiled(), sizes) is None


def test_one_variable_leaves_launches_to_triton(native, monkeypatch) -> None:
    monkeypatch.setenv("KERNELHUB_DIRECT_LAUNCH", "0")
    kernelhub.reload()
    assert made(native, compiled()) is None


@pytest.mark.parametrize(("value", "after"), [("0", 0), ("1", launch.GRAPH_AFTER), (None, launch.GRAPH_AFTER)])
def test_one_variable_leaves_calls_without_graphs(native, monkeypatch, value, after) -> None:
    if value is not None:
        monkeypatch.setenv("KERNELHUB_LAUNCH_GRAPHS", value)
    kernelhub.reload()
    given: dict[str, Any] = {}
    names = ("cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuStreamIsCapturing", *launch.GRAPH_FUNCTIONS)
    driver = SimpleNamespace(**dict.fromkeys(names, ctypes.pythonapi.Py_IsInitialized))
    monkeypatch.setattr(launch, "cuda", lambda: driver)
    monkeypatch.setattr(launch, "native_of", lambda *of, **named: given.update(named) or native)
    monkeypatch.setattr(launch, "recognise_in_c", lambda native: None)
    assert launch.native.__wrapped__() is native
    assert (given["graph_after"], given["graph_least"], len(given["graphs"])) == (after, 1, len(launch.GRAPH_FUNCTIONS))
    assert given["graph_shared"] is True
    monkeypatch.setenv("KERNELHUB_COLLECTIVE_GRAPHS", "0")
    kernelhub.reload()
    launch.native.__wrapped__()
    assert given["graph_shared"] is False


def test_what_cannot_be_built_is_triton_s_with_a_reason(monkeypatch) -> None:
    monkeypatch.setattr(launch, "_SOURCE", launch._SOURCE.with_name("absent.c"))
    monkeypatch.setattr(launch, "prebuilt", lambda: False)
    found = launch.extension.__wrapped__()
    assert found.module is None
    assert "absent.c is not installed" in found.reason


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"steps": ()}, ValueError),
        ({"operands": 0}, ValueError),
        ({"operands": 65}, ValueError),
        ({"operands": 1}, ValueError),
        ({"aligned": (2,)}, ValueError),
        ({"places": ((0, 0), None, None, None, None, None, None, None)}, ValueError),
        ({"places": ()}, ValueError),
        ({"arguments": (1, 2)}, TypeError),
        ({"grid": -1}, ValueError),
    ],
    ids=str,
)
def test_a_sequence_refuses_what_does_not_belong_together(native, wrong, error) -> None:
    kernel = made(native, compiled())
    facts = {
        "grid": 3,
        "arguments": tuple(arguments()),
        "places": ((0, 0), *[None] * 6, (1, 16)),
        "operands": 2,
        "aligned": (0, 1),
    }
    facts = {**facts, **wrong}
    steps = facts.pop("steps", ((kernel, facts["grid"], facts["arguments"], facts["places"]),))
    with pytest.raises(error):
        native.module.Sequence(steps, facts["operands"], facts["aligned"])


def known_of(native: Any, holds: Any, operands: int = 1, places: Any = None, apart: Any = (), same: Any = ()) -> Any:
    return native.module.Known(native.driver, holds, operands, places or tuple(range(operands)), apart, same)


@pytest.mark.parametrize("wrong", ["none", "too many", "number", "no known", "absent", "no sequence"])
def test_forms_refuse_what_is_no_sequence(native, wrong) -> None:
    known, absent = known_of(native, print), known_of(native, print, 2, (1,))
    forms = {
        "none": (),
        "too many": ((known, None),) * 5,
        "number": (1,),
        "no known": ((print, None),),
        "absent": ((absent, None),),
        "no sequence": ((known, 1),),
    }
    with pytest.raises(ValueError if wrong in ("none", "too many") else TypeError):
        native.module.Forms(forms[wrong])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"operands": 0}, ValueError),
        ({"operands": 65}, ValueError),
        ({"places": (1, 0)}, ValueError),
        ({"places": (2,)}, ValueError),
        ({"places": (-1,)}, OverflowError),
        ({"apart": ((0, 2, -1, 1),)}, ValueError),
        ({"apart": ((0, 1),)}, TypeError),
        ({"apart": (1,)}, TypeError),
        ({"same": ((2, 0),)}, ValueError),
        ({"same": ((0, 1, -1, 1),)}, TypeError),
    ],
    ids=str,
)
def test_a_known_call_refuses_what_does_not_belong_together(native, wrong, error) -> None:
    with pytest.raises(error):
        known_of(native, print, **{"operands": 2, **wrong})


def test_a_known_call_launches_what_is_attached(native) -> None:
    """An order that does not fit is refused; a sequence that is closed launches nothing."""
    kernel, x, y = made(native, compiled()), torch.ones(4), torch.ones(2)
    step = kernel, 0, tuple(arguments()), ((0, 0), *[None] * 6, (1, 16))
    sequence = native.module.Sequence((step,), 2, (0,))
    known = known_of(native, lambda *tensors: True, 3, (0, 2))
    for order, error in (((0,), ValueError), ((0, 2), ValueError), ((0, -1), OverflowError), ([0, 1], TypeError)):
        with pytest.raises(error):
            known.attach(sequence, order)
    with pytest.raises(TypeError):
        known.attach(None, (0, 1))
    assert known.launch((x, None, y)) == 1, "nothing is attached"
    known.attach(sequence, (1, 0))
    assert known.launch((x, x, y)) == 0
    assert not sequence.closed()
    sequence.close()
    assert sequence.closed()
    assert known.launch((x, None, y)) == 1
    assert sequence.launch(x, y) is False
    with pytest.raises(TypeError):
        known.launch((x, None))


def test_a_known_call_takes_as_many_operands_as_it_was_learned_with(native) -> None:
    known = known_of(native, lambda *tensors: True, 2, (1,))
    assert known.holds((None, torch.ones(1)))
    assert not known.holds((torch.ones(1), torch.ones(1)))
    assert not known.holds((None, None))
    for given in ((torch.ones(1),), [None, torch.ones(1)], None):
        with pytest.raises(TypeError):
            known.holds(given)


def test_operands_of_no_form_are_launched_otherwise(native) -> None:
    """A check that raises is not silent."""
    checks = (lambda x: x.ndim == 3, lambda x: x.no_such_attribute)
    forms = native.module.Forms(tuple((known_of(native, check), None) for check in checks))
    assert forms.launch(torch.ones(1, 1, 1)) is False
    for other in (None, 1, "x", torch.nested.nested_tensor([torch.ones(2)])):
        assert forms.launch(other) is False
    with pytest.raises(AttributeError):
        forms.launch(torch.ones(1))


@pytest.mark.parametrize("usual", [launch._usual(), None], ids=["told by its class", "asked"])
def test_a_nested_tensor_is_of_no_form(usual) -> None:
    """torch's guards end the process if they meet one."""
    asked: list[Any] = []

    class Own(torch.Tensor):
        """As an engine might make of its weights."""

    def holds(*tensors: Any) -> bool:
        asked.extend(tensors)
        return True

    native = launch.native_of(launch.extension().module, launch.address(NEVER), 0, usual=usual)
    known = known_of(native, holds, 1, (0,))
    plain = torch.ones(2, 3)
    views = [plain.t(), plain[:, 1], plain.view(torch.int32), torch._neg_view(plain), plain.to("meta"), plain.clone()]
    for one in (plain, *views, torch.nn.Parameter(plain), Own()):
        asked.clear()
        assert known.holds((one,))
        assert asked[0] is one
    jagged = torch.nested.nested_tensor([plain[0], plain[1]], layout=torch.jagged)
    asked.clear()
    for one in (torch.nested.nested_tensor([plain[0]]), jagged, torch.nested.nested_tensor([plain]).transpose(1, 2)):
        assert not known.holds((one,))
    assert not asked


def test_torchs_own_class_is_found() -> None:
    """In the torch that is installed, so that calls are as fast as they can be."""
    found = launch._usual()
    assert found is not None
    assert found[0] is torch.Tensor


def test_looking_for_it_warns_of_nothing(monkeypatch) -> None:
    """torch 2.11 warns whenever a sparse tensor is made."""
    made = torch.sparse_coo_tensor

    def warned(*given: Any, **named: Any) -> torch.Tensor:
        warnings.warn("Sparse invariant checks are implicitly disabled.", UserWarning, stacklevel=2)
        return made(*given, **named)

    monkeypatch.setattr(torch, "sparse_coo_tensor", warned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch._usual() is not None


@pytest.mark.parametrize("usual", [1, (torch.Tensor,), (1, 16, 1), (torch.Tensor, "16", 1)])
def test_another_description_of_it_is_refused(usual) -> None:
    with pytest.raises(TypeError):
        launch.native_of(launch.extension().module, launch.address(NEVER), 0, usual=usual)


def test_a_sequence_has_temporaries_only_where_memory_can_be_had(native) -> None:
    kernel = made(native, compiled())
    assert not native.allocates, "a torch without CUDA"
    places = ((0, 0), *[None] * 6, (1, 0))
    with pytest.raises(ValueError, match="temporaries"):
        native.module.Sequence(((kernel, 3, tuple(arguments()), places),), 2, (0,), 256)


def test_the_extent_of_a_tensor_goes_to_the_end_of_its_last_element() -> None:
    base = torch.empty(10, 8, dtype=torch.int16)
    assert extent_bytes(base) == 160
    assert extent_bytes(base[2:4, ::2]) == 2 * (8 + 6 + 1)
    assert extent_bytes(base[:1].expand(5, 8)) == 16
    assert extent_bytes(base[:0]) == 0


class Kernel:
    """A jitted kernel that counts what Triton does for it."""

    arg_names = tuple(SIGNATURE)

    def __init__(self) -> None:
        self.compiled = 0

    def __getitem__(self, grid: Any) -> Any:
        def first(*given: Any, **static: Any) -> Any:
            self.compiled += 1
            return compiled()

        return first


def test_a_variant_that_is_not_known_is_always_triton_s() -> None:
    kernel = Kernel()
    launcher = Launcher(kernel, {"BLOCK": 64, "WIDTH": 2}, 8)
    for _ in range(3):
        launcher(4, None, *arguments())
    assert kernel.compiled == 3
    assert launcher.step(4, None, *arguments()) is None
