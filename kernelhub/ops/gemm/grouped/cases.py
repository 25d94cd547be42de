"""Cases of `grouped_gemm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, worst
from kernelhub.ops.gemm.grouped.inputs import PAIRS, grouped_gemm_inputs
from kernelhub.ops.gemm.grouped.tolerance import error_allowed
from kernelhub.ops.gemm.variants import omitting, scaled, zeroed

FLOATS = ("bfloat16", "float16", "float32")
QUANTISED = ("tensor", "channel", "block", "nvfp4", "mxfp4", *PAIRS)
FORMS: dict[str, Arguments] = {
    **{name: {"format": name} for name in (*FLOATS, *QUANTISED)},
    "block in e8m0": {"format": "block", "powers_of_two": True},
}
SHAPES = ((65, 160), (256, 256))  # ending within tiles, and of whole ones, which kernels for GPUs require
MANY_GROUPS = tuple(i * 7 % 5 if i % 3 == 0 else 0 for i in range(37))
SIZES = (
    *((0, 0, 0), (1,), (2,), (3,), (0, 7, 0, 0, 9, 0), (130, 0, 1, 120)),  # of every format
    *((15,), (16,), (17,), (0, 0, 5), (4, 0, 0), (33, 31), (63, 64, 65), (127, 128, 129), (300, 1, 120), MANY_GROUPS),
)
_ALL_SIZES = ("bfloat16", "block", "mxfp4", "nvfp4 x nvfp4")


class GroupedGemmCases(OpCases):
    """Every format, sorted and masked, with groups of all sizes."""

    op = "grouped_gemm"

    def cases(self) -> Iterator[Case]:
        for name, of_form in FORMS.items():
            for masked in (False, True):
                form: Arguments = of_form | {"masked": masked}
                label = name + ", masked" * masked
                for n, k in SHAPES:
                    shape = form | {"n": n, "k": k}
                    yield Case(
                        label=f"{label}, N {n}, K {k}",
                        make=_make(**shape),
                        quick=n == 256,
                        repeats=n == 256 or not masked,
                    )
                    yield Case(
                        label=f"{label}, N {n}, K {k}, bias",
                        make=_make(bias=True, **shape),
                        without=omitting(_make(bias=True, **shape), "bias"),
                        feature="bias",
                        quick=n == 256 and not masked,
                    )
                    for parameter in ("a_scale", "b_scale", "a_global_scale", "b_global_scale"):
                        if _has(form["format"], parameter):
                            yield Case(
                                label=f"{label}, N {n}, K {k}, {parameter} four times as large",
                                make=scaled(_make(**shape), parameter, 2),
                                without=_make(**shape),
                                feature=parameter,
                                quick=n == 256 and not masked,
                            )
                yield Case(label=f"{label}, N 192, K 512", make=_make(n=192, k=512, **form))
                whole = form | {"n": 128, "k": 128}
                if name in ("tensor", "channel", "block"):
                    yield Case(label=f"{label}, tiny scales", make=scaled(_make(**whole), "a_scale", -40), quick=True)
                    yield Case(label=f"{label}, scales of zero", make=zeroed(_make(**whole), "a_scale"))
                for sizes in SIZES if name in _ALL_SIZES else SIZES[:6]:
                    quick = name == "bfloat16" and sizes in ((0, 0, 0), (1,), (2,), (17,))
                    groups = "37 groups, most empty" if sizes is MANY_GROUPS else f"groups of {sizes}"
                    yield Case(label=f"{label}, {groups}", make=_make(sizes=sizes, **whole), tokens=True, quick=quick)
                for sizes in ((127, 129), (0, 0, 5)):
                    make = _make(sizes=sizes, spare=0, **whole)
                    yield Case(label=f"{label}, groups of {sizes}, no row to spare", make=make)
        for name in ("nvfp4", "mxfp4"):
            make = _make(format=name, a_dtype=torch.float16, n=128, k=128)
            yield Case(label=f"{name} with float16 rows", make=make)
        for name, dtype in (
            *(("bfloat16", torch.float32), ("float32", torch.bfloat16), ("channel", torch.float32)),
            *(("nvfp4", torch.float32), ("mxfp8 x mxfp8", torch.float32)),
            *((name, torch.float16) for name in ("block", "block in e8m0", *PAIRS)),
        ):
            for masked in (False, True) if dtype is torch.float16 else (False,):
                make = _make(**FORMS[name], masked=masked, n=128, k=128, out_dtype=dtype)
                yield Case(label=f"{name} to {str(dtype)[6:]}" + ", masked" * masked, make=make)
        for n in (1, 7, 8, 64, 120, 127, 128, 129, 136):
            yield Case(label=f"N {n}, K 64", make=_make(n=n, k=64), quick=n in (129, 120))
        for k in (1, 8, 56, 63, 65, 72, 136):
            yield Case(label=f"N 64, K {k}", make=_make(n=64, k=k))
        for n, k in ((1, 128), (127, 96), (129, 130)):
            yield Case(label=f"blocks of {n} x {k}", make=_make(format="block", n=n, k=k))
        yield Case(label="blocks of 257 x 132", make=_make(format="block", sizes=(5, 19), n=257, k=132))
        for name in ("nvfp4", "mxfp4", *PAIRS):
            for n, k in ((1, 2), (65, 62), (129, 130), (64, 288)):
                yield Case(label=f"{name}, N {n}, K {k}", make=_make(format=name, n=n, k=k))
        for k in (1, 33, 129):
            yield Case(label=f"mxfp8 x mxfp8, N 64, K {k}", make=_make(format="mxfp8 x mxfp8", n=64, k=k))
        yield Case(label="37 groups, most empty, N 32, K 48", make=_make(sizes=MANY_GROUPS, n=32, k=48))
        for label, sizes, names in (
            ("many", (150, 0, 250), ("block", "mxfp4", "float32", *PAIRS)),
            ("some", (50, 0, 70), ("channel", "nvfp4", "float16", *PAIRS)),
        ):
            for name in names:
                yield Case(label=f"{label} rows of {name}", make=_make(format=name, sizes=sizes, n=130, k=96))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        a = arguments["a"]
        usual = torch.bfloat16 if a.itemsize == 1 else a.dtype
        return {"out": ((*a.shape[:-1], arguments["b"].shape[1]), arguments.get("out_dtype") or usual)}

    def untouched(self, arguments: Arguments) -> dict[str, Tensor]:
        """Rows beyond those of the groups."""
        a, sizes = arguments["a"], arguments.get("group_sizes")
        places = torch.arange(a.shape[-2], device=a.device)
        if sizes is not None:
            return {"out": places >= sizes.unsqueeze(1)}
        return {"out": places >= arguments["offsets"][-1]}

    def expect(self, arguments: Arguments) -> Any:
        return self.reference(**arguments, dtype=torch.float64)

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want = expected
        out = results["out"]
        there = ~want.isnan()  # rows of no group are not to be written
        if not bool(there.any()):
            return Judgement(0.0, "", {"out": want})
        allowed = error_allowed(arguments, want, out.dtype, tensor_cores=out.is_cuda)
        return Judgement(*worst((out.double() - want).abs()[there], allowed[there]), {"out": want})


def _make(*, out_dtype: torch.dtype | None = None, **inputs: Any) -> Make:
    def made(device: torch.device) -> Arguments:
        arguments = grouped_gemm_inputs(**inputs, device=device)
        return arguments | ({} if out_dtype is None else {"out_dtype": out_dtype})

    return made


def _has(name: str, parameter: str) -> bool:
    """Whether a format has these scales."""
    if parameter == "a_global_scale":
        return name == "nvfp4 x nvfp4"
    if parameter == "b_global_scale":
        return name in ("nvfp4", "nvfp4 x nvfp4")
    return name in QUANTISED and (parameter == "b_scale" or name not in ("nvfp4", "mxfp4"))
