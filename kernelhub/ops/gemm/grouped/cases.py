"""Cases of `grouped_gemm`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, worst
from kernelhub.ops.gemm.grouped.inputs import PAIRS, grouped_gemm_inputs
from kernelhub.ops.gemm.grouped.tolerance import error_allowed
from kernelhub.ops.gemm.variants import lacking, scaled, zeroed

FLOATS = ("bfloat16", "float16", "float32")
QUANTISED = ("tensor", "channel", "block", "nvfp4", "mxfp4", *PAIRS)
SIZES = ((0, 0, 0), (1,), (2,), (3,), (15,), (16,), (17,), (0, 0, 5), (0, 7, 0, 0, 9, 0), (63, 64, 65), (127, 128, 129))


class GroupedGemmCases(OpCases):
    """Every format, sorted and masked, with groups of all sizes."""

    op = "grouped_gemm"

    def cases(self) -> Iterator[Case]:
        for name in (*FLOATS, *QUANTISED):
            for masked in (False, True):
                form: Arguments = {"format": name, "masked": masked}
                label = name + ", masked" * masked
                for n, k in ((192, 256), (256, 512)):
                    shape = form | {"n": n, "k": k}
                    yield Case(label=f"{label}, N {n}, K {k}", make=_make(**shape), quick=n == 192, repeats=True)
                    yield Case(
                        label=f"{label}, N {n}, K {k}, bias",
                        make=_make(bias=True, **shape),
                        without=lacking(_make(bias=True, **shape), "bias"),
                        feature="bias",
                        quick=n == 192 and not masked,
                    )
                    for parameter in ("a_scale", "b_scale", "a_global_scale", "b_global_scale"):
                        if _has(name, parameter):
                            yield Case(
                                label=f"{label}, N {n}, K {k}, {parameter} four times as large",
                                make=scaled(_make(**shape), parameter, 2),
                                without=_make(**shape),
                                feature=parameter,
                                quick=n == 192 and not masked,
                            )
                if name in ("tensor", "channel", "block"):
                    yield Case(label=f"{label}, tiny scales", make=scaled(_make(**form), "a_scale", -40), quick=True)
                    yield Case(label=f"{label}, scales of zero", make=zeroed(_make(**form), "a_scale"))
                for sizes in SIZES if name in ("bfloat16", "block", "mxfp4", "nvfp4 x nvfp4") else SIZES[:4]:
                    make = _make(sizes=sizes, **form)
                    quick = name == "bfloat16" and sizes in ((0, 0, 0), (1,), (2,), (17,))
                    yield Case(label=f"{label}, groups of {sizes}", make=make, tokens=True, quick=quick)
        for masked in (False, True):
            form = {"format": "block", "powers_of_two": True, "masked": masked}
            yield Case(label="block in e8m0" + ", masked" * masked, make=_make(**form), quick=True)
        for name in ("nvfp4", "mxfp4"):
            yield Case(label=f"{name} with float16 rows", make=_make(format=name, a_dtype=torch.float16))
        for name, dtype in (("bfloat16", torch.float32), ("block", torch.float16), ("channel", torch.float32)):
            yield Case(label=f"{name} to {str(dtype)[6:]}", make=_make(format=name, out_dtype=dtype))
        for n, k in ((8, 64), (120, 64), (64, 56), (1, 64), (129, 65)):
            yield Case(label=f"N {n}, K {k}", make=_make(n=n, k=k), quick=n in (129, 120))
        yield Case(label="no row to spare", make=_make(spare=0))

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
