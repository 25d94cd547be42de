"""Launches through the CUDA driver, here a mock: what it receives, and when Triton launches instead."""

from __future__ import annotations

import ctypes
import struct
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

import kernelhub
from kernelhub.backends.triton import direct
from kernelhub.backends.triton.launch import Launcher

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
FORMATS = {"a": "Q", "n": "i", "big": "q", "scale": "f", "wide": "d", "flag": "B", "b": "Q", "tiny": "b"}
SIZES = [struct.calcsize(form) for form in FORMATS.values()]
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
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.POINTER(direct._Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p),
)
PARAMETER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)),
)


class Mock:
    """A driver that has a function with `sizes` of parameters, and notes what is launched."""

    def __init__(self, sizes: list[int], status: int = 0) -> None:
        self.sizes, self.status, self.launches = sizes, status, []
        self.driver = direct.Driver(LAUNCH(self.launch), PARAMETER(self.parameter), lambda device: 77 + device)

    def launch(self, config: Any, function: int, parameters: Any, extra: Any) -> int:
        read = [
            struct.unpack("<" + form, ctypes.string_at(parameters[at], struct.calcsize("<" + form)))[0]
            for at, form in enumerate([*FORMATS.values(), "Q", "Q"])
        ]
        self.launches.append(({name: getattr(config[0], name) for name, _ in direct._Config._fields_}, function, read))
        return self.status

    def parameter(self, function: int, at: int, offset: Any, size: Any) -> int:
        if at >= len(self.sizes):
            return 1
        size[0] = self.sizes[at]
        return 0


def compiled(signature: dict[str, Any] | None = None, **metadata: Any) -> Any:
    return SimpleNamespace(
        src=SimpleNamespace(signature=signature or SIGNATURE), function=99, metadata=SimpleNamespace(**PLAIN | metadata)
    )


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)


@pytest.fixture
def mock() -> Mock:
    return Mock([*SIZES, 8, 8])


def arguments(n: int = 5) -> list[Any]:
    return [torch.ones(4), None, n, -(1 << 40), 0.5, 1e300, True, torch.ones(2), 1, -7]


def test_the_driver_receives_every_argument_in_its_type(mock) -> None:
    ready = direct.direct_launch(compiled(), GIVEN, mock.driver)
    given = arguments()
    assert ready(6, given)
    assert ready(7, [*given[:2], 8, *given[3:]])
    (config, function, read), (second, _, again) = mock.launches
    assert read == [given[0].data_ptr(), 5, -(1 << 40), 0.5, 1e300, 1, given[7].data_ptr(), -7, 0, 0]
    assert (again[1], second["grid_x"]) == (8, 7)
    assert function == 99
    assert config == {
        "grid_x": 6,
        "grid_y": 1,
        "grid_z": 1,
        "block_x": 256,
        "block_y": 1,
        "block_z": 1,
        "shared_bytes": 1234,
        "stream": 80,
        "attributes": None,
        "num_attributes": 0,
    }


def test_an_empty_grid_is_no_launch(mock) -> None:
    assert direct.direct_launch(compiled(), GIVEN, mock.driver)(0, arguments())
    assert not mock.launches


def test_fixed_launches_differ_in_their_tensors_only(mock) -> None:
    ready = direct.direct_launch(compiled(), GIVEN, mock.driver)
    first, second = ready.fixed(6, arguments(n=5)), ready.fixed(9, arguments(n=6))
    assert first.pointers == (0, 7)
    for again in (first, second, first):
        assert again(11, (1000, 2000))
    assert [(config["grid_x"], config["stream"], read[:2], read[6]) for config, _, read in mock.launches] == [
        (6, 11, [1000, 5], 2000),
        (9, 11, [1000, 6], 2000),
        (6, 11, [1000, 5], 2000),
    ]


@pytest.mark.parametrize(
    "wrong",
    [{2: 1 << 31}, {9: 300}, {4: 1e300}, {0: None}],
    ids=["int of more than 32 bits", "int of more than 8 bits", "float out of range", "no tensor"],
)
def test_a_value_that_does_not_fit_its_parameter_is_triton_s(mock, wrong) -> None:
    ready = direct.direct_launch(compiled(), GIVEN, mock.driver)
    given = arguments()
    for at, value in wrong.items():
        given[at] = value
    assert not ready(6, given)
    assert ready.fixed(6, given) is None
    assert not mock.launches
    assert ready(6, arguments()), "the lock is free again"


def test_an_error_of_the_driver_is_triton_s_to_report() -> None:
    mock = Mock([*SIZES, 8, 8], status=201)  # CUDA_ERROR_INVALID_CONTEXT
    ready = direct.direct_launch(compiled(), GIVEN, mock.driver)
    assert not ready(6, arguments())
    assert not ready.fixed(6, arguments())(0, (1, 2))
    assert len(mock.launches) == 2


@pytest.mark.parametrize(
    "metadata",
    [
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"instrumentation_mode": "gsan"},
        {"shared": 229 * 1024},
        {"target": SimpleNamespace(backend="hip")},
    ],
    ids=str,
)
def test_a_kernel_that_needs_more_than_parameters_is_triton_s(mock, metadata) -> None:
    assert direct.direct_launch(compiled(**metadata), GIVEN, mock.driver) is None


@pytest.mark.parametrize("kind", ["fp16", "nvTmaDesc", ("i32", "i32"), "tensordesc<bf16[64, 64]>"], ids=str)
def test_a_parameter_of_another_kind_is_triton_s(mock, kind) -> None:
    assert direct.direct_launch(compiled({**SIGNATURE, "n": kind}), GIVEN, mock.driver) is None


@pytest.mark.parametrize(
    "sizes",
    [[*SIZES, 8], [*SIZES, 8, 8, 8], [8, *SIZES[2:], 8, 8], [*SIZES[:1], 8, *SIZES[2:], 8, 8]],
    ids=["fewer", "more", "one missing", "another size"],
)
def test_a_function_with_other_parameters_is_triton_s(sizes) -> None:
    assert direct.direct_launch(compiled(), GIVEN, Mock(sizes).driver) is None


def test_one_variable_leaves_launches_to_triton(mock, monkeypatch) -> None:
    monkeypatch.setenv("KERNELHUB_DIRECT_LAUNCH", "0")
    kernelhub.reload()
    assert direct.direct_launch(compiled(), GIVEN, mock.driver) is None


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_a_profiler_are_called_by_triton(mock, name, monkeypatch) -> None:
    ready = direct.direct_launch(compiled(), GIVEN, mock.driver)
    assert not direct.hooked()
    hook = getattr(triton.knobs.runtime, name)
    call = print
    hook.add(call)
    try:
        assert direct.hooked()
        assert not ready(6, arguments())
    finally:
        hook.remove(call)
    monkeypatch.setattr(triton.knobs.runtime, name, call)
    assert not ready(6, arguments())
    assert not mock.launches


def test_threads_never_mix_their_arguments(mock) -> None:
    """A thread that comes while another packs is sent to Triton."""
    ready = direct.direct_launch(compiled(), GIVEN, mock.driver)
    fixed = ready.fixed(6, arguments())
    inside, go = threading.Event(), threading.Event()
    plain = mock.launch

    def slow(*given: Any) -> int:
        inside.set()
        assert go.wait(10)
        return plain(*given)

    callback = LAUNCH(slow)
    for one, call in ((ready, lambda: ready(6, arguments())), (fixed, lambda: fixed(0, (1, 2)))):
        if one is ready:
            one._driver = one._driver._replace(launch=callback)
        else:
            one._launch = callback
        inside.clear()
        go.clear()
        first = threading.Thread(target=call)
        first.start()
        assert inside.wait(10)
        assert not call()
        go.set()
        first.join()
    assert len(mock.launches) == 2


class Kernel:
    """A jitted kernel whose compiled variant notes the launches that Triton makes."""

    arg_names = tuple(SIGNATURE)

    def __init__(self) -> None:
        self.compiled, self.by_triton = 0, 0

    def __getitem__(self, grid: Any) -> Any:
        def first(*given: Any, **static: Any) -> Any:
            self.compiled += 1
            return self

        return first

    src, function, metadata = compiled().src, 99, compiled().metadata


class TestLauncher:
    @pytest.fixture
    def launcher(self, mock, monkeypatch) -> Any:
        kernel = Kernel()
        monkeypatch.setattr(direct, "cuda_driver", lambda: mock.driver)
        made = Launcher(kernel, {"BLOCK": 64, "WIDTH": 2}, 8)
        made.kernel = kernel
        return made

    def test_the_first_launch_is_triton_s_and_later_ones_the_driver_s(self, launcher, mock) -> None:
        for n in (5, 6, 7):
            launcher(4, "variant", *arguments(n=n))
        assert launcher.kernel.compiled == 1
        assert [read[1] for _, _, read in mock.launches] == [6, 7]

    def test_a_variant_that_is_not_known_is_always_triton_s(self, launcher, mock) -> None:
        for _ in range(3):
            launcher(4, None, *arguments())
        assert launcher.kernel.compiled == 3
        assert not mock.launches
        assert launcher.fixed(4, None, *arguments()) is None
