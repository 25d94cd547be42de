"""`csrc/cuda/sm_90/fp8_gemm.cu` with its adapter, on a CPU: barriers, copies and products are those of
`warpgroup_emulated.h`, everything else is the kernel's own. Planted faults must be found."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.cuda import library as of_kernels
from kernelhub.backends.cuda.gemm import fp8
from kernelhub.backends.cuda.gemm.fp8 import HIGH, IN_PARTS, LOW, MIDDLE, Form, form_for
from kernelhub.backends.cuda.nvrtc import SOURCES
from kernelhub.backends.shared.operands import up_to
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem
from kernelhub.ops.gemm.fp8.reference import fp8_gemm_reference
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.probes.device import simulated
from tests.cuda.emulated import COMPILER, HERE, EmulatedLibrary, folder, planted
from tests.gpu.products_sanitized import FOR_FEW_ROWS, forms, name_of

pytestmark = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")

_SMS = 6  # so that a block has several tiles
_ENTRY = """
struct Given {
  TensorMap a, b, scale, out_map;
  const float* b_scale;
  const bf16* bias;
  i64 m, n, steps, together, stride_bn, stride_bk, stride_bias;
  bf16* out;
  i64 stride_om;
};
extern "C" const char* launch(const Given& p, i64 clusters, i64 cluster, i64 threads, i64 shared_bytes, i64 seed) {
  static std::string said;
  body = [&p] {
    fp8_gemm(p.a, p.b, p.scale, p.out_map, p.b_scale, p.bias, p.m, p.n, p.steps, p.together, p.stride_bn, p.stride_bk,
             p.stride_bias, p.out, p.stride_om);
  };
  said = launched(clusters, cluster, threads, shared_bytes, seed);
  return said.c_str();
}
"""
_MEMORY = "extern __shared__ __align__(1024) char memory[];"


@functools.cache
def built(constants: tuple[tuple[str, int], ...], fault: tuple[str, str] | None) -> Any:
    """The source, with a fault in place of what is right."""
    source = (SOURCES / "sm_90" / "fp8_gemm.cu").read_text()
    if fault is not None:
        if source.count(fault[0]) != 1:
            raise ValueError(f"{fault[0]} is not there once")
        source = source.replace(*fault)
    assert _MEMORY in source
    source = source.replace(_MEMORY, "char* memory = emulated_memory();")
    places = re.search(r"INLINE u32 place_in_tile.*\n", (SOURCES / "warpgroup.h").read_text())
    assert places is not None
    where = folder() / hashlib.sha256(repr((constants, fault)).encode()).hexdigest()[:16]
    where.mkdir(exist_ok=True)
    emulated = (HERE / "warpgroup_emulated.h").read_text().replace("\nTEST_PLACES\n", "\n" + places[0])
    (where / "warpgroup.h").write_text(emulated)
    for name in ("formats.h", "cluster.h"):
        (where / name).write_text((SOURCES / name).read_text())
    (where / "fp8_gemm.cpp").write_text(source + _ENTRY)
    defined = [f"-D{name}={value}" for name, value in constants]
    flags = ("-O1", "-fno-finite-math-only", "-std=c++17", "-w", "-fPIC", "-shared")
    command = [COMPILER.value, *flags, *defined, "-include", HERE / "emulation.h", f"-I{where}", f"-I{HERE}"]
    made = where / "fp8_gemm.so"
    answer = subprocess.run([*map(str, command), str(where / "fp8_gemm.cpp"), "-o", str(made)], capture_output=True)
    if answer.returncode:
        raise ValueError(answer.stderr.decode()[-3000:])
    library = ctypes.CDLL(str(made))
    library.launch.restype = ctypes.c_char_p
    library.launch.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 5]
    return library


class Emulated:
    """In place of `MappedKernel`."""

    fault: tuple[str, str] | None = None
    seed = 0

    def __init__(
        self, constants: Any, name: str, kinds: str, threads: int, shared_bytes: int, boxes: Any, cluster: int
    ) -> None:
        self.library = built(tuple(sorted(constants.items())), self.fault)
        self.kinds, self.threads, self.shared_bytes, self.boxes = kinds, threads, shared_bytes, boxes
        self.cluster = cluster

    def __call__(self, clusters: int, *values: Any) -> None:
        numbers: list[int] = []
        boxes = iter(self.boxes)
        assert len(values) == len(self.kinds)
        for kind, value in zip(self.kinds, values, strict=True):
            if kind == "T":
                box = next(boxes)
                item, swizzle = value.base.element_size(), box.swizzle
                assert box.item == item
                assert value.strides[1] == 1
                assert not value.base.data_ptr() % 16
                assert not value.strides[0] * item % 16
                assert max(box.shape) <= 256
                assert box.shape[1] * item == 128 or not swizzle
                numbers += [value.base.data_ptr(), *value.shape, value.strides[0] * item, item, *box.shape, swizzle]
            else:
                numbers.append(value.data_ptr() if isinstance(value, torch.Tensor) else value)
        given = (ctypes.c_int64 * len(numbers))(*numbers)
        said = self.library.launch(
            ctypes.addressof(given), clusters, self.cluster, self.threads, self.shared_bytes, Emulated.seed
        )
        assert not said, said.decode()


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "MappedKernel", Emulated)
    monkeypatch.setattr(fp8, "library", SimpleNamespace(library=library_of))


def library_of(source: str, constants: Any, *_: Any, **__: Any) -> Any:
    """What turns scales is run as other CUDA kernels are; of the product `Emulated` makes its own library."""
    return EmulatedLibrary(source, constants) if source == "turn_scales.cu" else constants


def problem_of(n: int, k: int, bias: bool) -> Fp8GemmProblem:
    device = dataclasses.replace(simulated("H200"), num_sms=_SMS)
    return Fp8GemmProblem(device=device, n=n, k=k, bias=bias)


def run(form: Form | None, tokens: int, n: int, k: int, seeds: range, bias: bool = False) -> None:
    """Calls of a form, each the reference's and of the same bits."""
    arguments = fp8_gemm_inputs(tokens=tokens, n=n, k=k, bias=bias)
    operands = {name: arguments.get(name) for name in ("a", "b", "a_scale", "b_scale", "bias")}
    made = type("Formed", (fp8.Fp8Gemm,), {"form": form})(problem_of(n, k, bias))
    before = None
    for seed in seeds:
        Emulated.seed = seed
        around = torch.full((tokens + 256, up_to(n, 8) + 16), 7.0, dtype=torch.bfloat16)  # a tile beyond, none less
        out = around[1 : tokens + 1, 8 : n + 8]
        made._launch_anew(*operands.values(), out)
        agreement = compare(out, fp8_gemm_reference, arguments, matrix_instructions=False)
        assert agreement.ok, str(agreement)
        assert before is None or torch.equal(out, before)
        before = out.clone()
        out.fill_(7.0)
        assert (around == 7.0).all()


SEVERAL = (600, 392, 400)  # several tiles for each block, which end within them; four steps
TEN_STEPS = (140, 197, 1168)  # ten steps, the last of 16 columns
FEW_STEPS = (65, 136, 144)  # two: of four parts two have none


@pytest.mark.parametrize(("place", "form"), list(enumerate(forms())), ids=str)
def test_each_form_gives_the_reference(place: int, form: Form) -> None:
    """Every other one with a bias."""
    bias = place % 2 == 0
    if form.parts > 1:
        run(dataclasses.replace(form, stages=2), *TEN_STEPS, range(2), bias)  # places are loaded again
    else:
        run(form, *SEVERAL, range(2), bias)
    run(form, *FEW_STEPS, range(2, 4), bias)


def test_what_tma_cannot_take_is_copied() -> None:
    arguments = fp8_gemm_inputs(tokens=33, n=130, k=272, bias=True)
    made = fp8.Fp8Gemm(problem_of(130, 272, True))
    a = torch.zeros(33, 300, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, 8:280]
    a.view(torch.uint8).copy_(arguments["a"].view(torch.uint8))
    b = arguments["b"].view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn)
    b_scale = arguments["b_scale"].t().contiguous().t()
    bias = arguments["bias"].repeat_interleave(2)[::2]
    out = torch.full((33, 260), 7.0, dtype=torch.bfloat16)
    made._launch_anew(a, b, arguments["a_scale"].t().contiguous().t(), b_scale, bias, out[:, ::2])
    agreement = compare(out[:, ::2], fp8_gemm_reference, arguments, matrix_instructions=False)
    assert agreement.ok, str(agreement)
    assert (out[:, 1::2] == 7.0).all()


@pytest.mark.parametrize("n", [130, 131, 133, 135, 136])
def test_nothing_beside_the_result_is_written(n: int) -> None:
    """TMA stores whole pieces of 16 bytes, of which the last may be partly outside of the result."""
    arguments = fp8_gemm_inputs(tokens=33, n=n, k=272)
    operands = [arguments.get(name) for name in ("a", "b", "a_scale", "b_scale", "bias")]
    around = torch.full((35, 160), 7.0, dtype=torch.bfloat16)
    out = around[1:-1, 8 : n + 8]
    fp8.Fp8Gemm(problem_of(n, 272, False))._launch_anew(*operands, out)
    agreement = compare(out, fp8_gemm_reference, arguments, matrix_instructions=False)
    assert agreement.ok, str(agreement)
    out.fill_(7.0)
    assert (around == 7.0).all()


SCALES = {
    "side by side in a row": lambda scale: scale,
    "with gaps": lambda scale: scale.repeat_interleave(3, 0).repeat_interleave(2, 1)[::3, ::2],
    "equal for all rows": lambda scale: scale[:1].expand(len(scale), -1),
    "down the columns, at a multiple of 4 bytes": lambda scale: (
        scale.new_empty(1 + scale.numel())[1:].view(scale.shape[::-1]).t().copy_(scale)
    ),
}


@pytest.mark.parametrize("k", [100 * 16, 8 * 128, 16])
@pytest.mark.parametrize("tokens", [1, 33, 130])
@pytest.mark.parametrize("scales", SCALES)
def test_scales_of_rows_are_turned(scales: str, tokens: int, k: int) -> None:
    arguments = fp8_gemm_inputs(tokens=tokens, n=8, k=k)
    given = SCALES[scales](arguments["a_scale"])
    made = fp8.Fp8Gemm(problem_of(8, k, False))._down_rows(given)
    assert torch.equal(made, given)
    assert made.stride(0) == 1
    assert not made.stride(1) % 4


def test_a_product_has_turned_scales() -> None:
    arguments = fp8_gemm_inputs(tokens=33, n=136, k=272)
    arguments["a_scale"] = SCALES["equal for all rows"](arguments["a_scale"])
    out = torch.empty(33, 136, dtype=torch.bfloat16)
    operands = [arguments.get(name) for name in ("a", "b", "a_scale", "b_scale", "bias")]
    fp8.Fp8Gemm(problem_of(136, 272, False))._launch_anew(*operands, out)
    agreement = compare(out, fp8_gemm_reference, arguments, matrix_instructions=False)
    assert agreement.ok, str(agreement)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("p.t_column + row]", "p.rows + row]"),
        ("blockIdx.x * blockDim.x", "blockIdx.x * 64"),
        ("first = part * EACH", "first = part * EACH + 1"),
        ("p.s_row +", "p.columns +"),
    ],
)
def test_planted_faults_in_turned_scales_are_found(
    right: str, wrong: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strided = torch.empty_strided
    planted(tmp_path, monkeypatch, "turn_scales.cu", right, wrong)
    monkeypatch.setattr(fp8, "library", SimpleNamespace(library=of_kernels.library))
    monkeypatch.setattr(torch, "empty_strided", lambda *size, **made: strided(*size, **made).fill_(torch.nan))
    found = []
    for change in SCALES.values():
        given = change(fp8_gemm_inputs(tokens=130, n=8, k=1600)["a_scale"])
        made = fp8.Fp8Gemm(problem_of(8, 1600, False))._down_rows(given)
        found.append(not torch.equal(made, given))
    assert any(found)


PARTS = dataclasses.replace(FOR_FEW_ROWS["64x64 p2"], parts=4, stages=2)
BOTH = dataclasses.replace(PARTS, parts=2, sharing=2)
SHARING = dataclasses.replace(HIGH, sharing=2, early=False)
FAULTS: dict[str, tuple[str, str, Form]] = {
    "loads do not wait": ("at.phase ^ 1", "at.phase", HIGH),
    "loads wait for the round before": ("stage = 0, phase ^= 1", "stage = 0", LOW),
    "scales are not expected": ("STAGE_BYTES + SCALES_BYTES);", "STAGE_BYTES);", MIDDLE),
    "warps of one block release": ("4 * GROUPS * SHARING", "4 * GROUPS", SHARING),
    "only this block is told": ("lane < SHARING", "lane < 1", MIDDLE),
    "both blocks load one half": ("a + role.beside * (ROWS * STEP)", "a", MIDDLE),
    "a stage is released before its products": (
        "      products_wait<0>(made);\n      if (wave == WAVES - 1) release(base, stage, part);",
        "      if (wave == WAVES - 1) release(base, stage, part);\n      products_wait<0>(made);",
        SHARING,
    ),
    "the next step is not waited for": (
        "if (step + 1 < steps) barrier_wait(bar_of(base, FULL + at.stage), at.phase);\n      }\n      products_wait",
        "}\n      products_wait",
        HIGH,
    ),
    "results are replaced while they are stored": ("if (thread == 0) tma_stores_read();", "", HIGH),
    "a block ends before the other": ("  if (SHARING > 1) sync_cluster();", "  if (false) sync_cluster();", SHARING),
    "tiles are left out": (
        "first; unit < all.units; unit += apart) {\n    Tile tile = tile_of(all, unit, role.beside);\n    const float",
        "first + apart; unit < all.units; unit += apart) {\n    Tile tile = tile_of(all, unit, role.beside);\n    "
        "const float",
        LOW,
    ),
    "the last group of rows is as tall as others": ("min(all.high - first, all.together)", "all.together", LOW),
    "scales of b of the step before": ("if (left > 1) next += stride, left--;", "", HIGH),
    "the second wave has the first one's scales": ("SCALES_BYTES + wave * 256;", "SCALES_BYTES;", HIGH),
    "steps that parts do not share evenly are left out": ("steps * part / PARTS", "steps / PARTS * part", PARTS),
    "parts have the scales of the first one's columns": (" + begin * p.stride_bk", "", PARTS),
    "parts send to one place": ("role.part - (role.part > to)", "0", PARTS),
    "the first columns are sent to all parts": ("&sums[wave][to * SHARE + i]", "&sums[wave][i]", PARTS),
    "sums are sent to a neighbour's tile": ("rank_of(role.beside, to)", "rank_of(0, to)", BOTH),
    "sums are added before they are there": ("barrier_wait_for_cluster(bar_of(base, ARRIVED), 0);", "", PARTS),
    "one part's sums are waited for": ("ARRIVED), (PARTS - 1) * SENT", "ARRIVED), SENT", PARTS),
    "sums may be sent before their barrier is begun": (
        "if (ALONE) wait_for_cluster();  // until",
        "// until",
        PARTS,
    ),
    "a part adds the first one's columns": ("sums[wave][part * SHARE + i];", "sums[wave][i];", PARTS),
    "one part is not added": ("place < PARTS - 1", "place < PARTS - 2", PARTS),
    "parts store the first one's columns": (" + role.part * (2 * SHARE)", "", PARTS),
    "rows beyond the result are stored": ("of >= p.m || ", "", PARTS),
    "columns beyond the result are stored": (" || at >= p.n", "", PARTS),
    "two columns are stored where one is left": ("if (at + 1 < p.n) *(u32*)", "if (true) *(u32*)", PARTS),
    "a goes to the first part's blocks": (" << rank_of(0, role.part)", "", BOTH),
    "places are released in the first part's blocks": ("rank_of(lane, part)", "lane", BOTH),
    "blocks of parts that share a end too early": (
        "  if (SHARING > 1) sync_cluster();",
        "  if (false) sync_cluster();",
        BOTH,
    ),
    "a part without steps waits for one": ("EARLY && (PARTS == 1 || steps > 0)", "EARLY", FOR_FEW_ROWS["64x128 p4"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, form = FAULTS[fault]
    monkeypatch.setattr(Emulated, "fault", (right, wrong))
    size = SEVERAL if form.parts == 1 else FEW_STEPS if form.stages == 3 else TEN_STEPS
    with pytest.raises(AssertionError):
        run(dataclasses.replace(form, together=2), *size, range(12))


@pytest.mark.parametrize("rows", [1, 64, 128, 129, 256, 1000, 1024, 2048, 4096, 8192, 65536])
@pytest.mark.parametrize("n", [8, 128, 576, 2112, 7168, 24576])
@pytest.mark.parametrize("k", [1536, 7168])
def test_a_form_fits_and_covers_the_result(rows: int, n: int, k: int) -> None:
    form = form_for(rows, n, k, 132)
    assert form.shared_bytes <= 232_448
    assert form.units(rows, n) * form.sharing * form.rows * form.columns >= rows * n


@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (576, 7168), (4096, 7168), (7168, 18432), (7168, 2048)])
def test_warm_up_by_64_rows_makes_each_form(n: int, k: int) -> None:
    for rows in range(1, 1025):
        assert form_for(rows, n, k, 132) == form_for(up_to(rows, 64), n, k, 132)


@pytest.mark.parametrize("form", IN_PARTS, ids=FOR_FEW_ROWS)
def test_blocks_of_forms_in_parts_fit_on_a_multiprocessor(form: Form) -> None:
    assert form.resident * (form.shared_bytes + 1024) <= 233_472
    assert form.cluster <= 8
    for m, n in ((1, 8), (128, 2112), (300, 7168)):
        assert form.units(m, n) * form.sharing * form.rows * form.columns >= m * n
        assert form.clusters(m, n, 132) == form.units(m, n)


# Of a run on an H200 (benchmarks/results/cuda_gemm_h200.json): of these three forms those that took the least time.
FASTEST = {
    (8192, 7168, 18432): HIGH,
    (4096, 7168, 18432): HIGH,
    (4096, 7168, 2304): HIGH,
    (1024, 24576, 1536): HIGH,
    (1024, 7168, 18432): HIGH,
    (512, 7168, 18432): HIGH,
    (512, 24576, 1536): HIGH,
    (512, 7168, 2304): HIGH,
    (4096, 24576, 1536): MIDDLE,
    (4096, 6144, 16384): MIDDLE,
    (4096, 18432, 7168): MIDDLE,
    (4096, 2112, 7168): MIDDLE,
    (4096, 576, 7168): MIDDLE,
    (2048, 7168, 18432): MIDDLE,
    (768, 7168, 18432): MIDDLE,
    (768, 24576, 1536): MIDDLE,
    (768, 7168, 2304): MIDDLE,
    (768, 2112, 7168): LOW,
    (256, 7168, 18432): LOW,
    (256, 24576, 1536): LOW,
    (256, 7168, 2304): LOW,
    (128, 24576, 1536): LOW,
}


@pytest.mark.parametrize(("size", "form"), FASTEST.items())
def test_the_form_is_that_which_was_the_fastest(size: tuple[int, int, int], form: Form) -> None:
    assert form_for(*size, 132) == form


FEW_ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "cuda_gemm_few_rows_h200.json"
# How much longer the chosen form may take than the fastest with parts, where that is more than 6 %.
LOST = {"65 x 2112 x 7168": 0.15, "65 x 7168 x 18432": 0.10, "32 x 4096 x 7168": 0.14}


def test_where_k_is_in_parts_the_chosen_form_is_close_to_the_fastest() -> None:
    chosen = {}
    for row in json.loads(FEW_ROWS.read_text())["rows"]:
        case, ms = row["case"], row["ms"]
        if case.endswith("cold"):
            continue
        m, n, k = map(int, case.split(" x "))
        form = form_for(m, n, k, 132)
        if form.parts > 1:
            fastest = min(us for name, us in ms.items() if name != "dg")
            chosen[case] = ms[name_of(form)] / fastest - 1
    assert len(chosen) >= 27
    assert {case for case, lost in chosen.items() if lost > LOST.get(case, 0.06)} == set()


@pytest.mark.parametrize(("rows", "k"), [(17, 2048), (64, 2048), (17, 4096), (64, 18432)])
def test_from_17_rows_on_it_is_faster_than_triton(rows: int, k: int) -> None:
    """In each case of one run with as many rows and so long a K, but one in which the two are level."""
    lost = {}
    for row in json.loads(FEW_ROWS.read_text())["beside"]["rows"]:
        m, n, columns = map(int, row["case"].split(" x "))
        if rows <= m <= 64 and columns >= k:
            ms = row["ms"]
            lost[row["case"]] = ms[name_of(form_for(m, n, columns, 132))] / ms["triton"] - 1
    assert lost
    assert {case for case, more in lost.items() if more > 0} <= {"32 x 4096 x 7168"}
    assert max(lost.values()) < 0.01


@pytest.mark.parametrize(
    ("rows", "k", "others", "selected"),
    [
        (16, 4096, {}, "triton.fp8_gemm"),
        (17, 1920, {}, "triton.fp8_gemm"),
        (17, 2048, {}, "cuda.fp8_gemm"),
        (64, 4096, {}, "cuda.fp8_gemm"),
        (64, 256, {}, "triton.fp8_gemm"),
        (65, 256, {}, "cuda.fp8_gemm"),
        (4096, 256, {}, "cuda.fp8_gemm"),
        (17, 2048, {"deep_gemm": "2.5.0"}, "deep_gemm.fp8_blocks"),
        (64, 3968, {"deep_gemm": "2.5.0"}, "deep_gemm.fp8_blocks"),
        (64, 4096, {"deep_gemm": "2.5.0"}, "cuda.fp8_gemm"),
        (4096, 256, {"deep_gemm": "2.5.0"}, "deep_gemm.fp8_blocks"),
    ],
)
def test_where_it_is_selected(rows: int, k: int, others: dict[str, str], selected: str) -> None:
    machine = SimulatedMachine({"triton": "3.6.0", "cuda": "13.0.3", "torch": "2.11.0", **others})
    made = fp8_gemm_inputs(tokens=rows, n=256, k=k)
    assert kernelhub.fp8_gemm.explain(**made, device="H200", machine=machine).selected == selected
