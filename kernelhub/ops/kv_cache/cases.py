"""Cases of `write_kv_cache`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, joined, same_bits
from kernelhub.ops.formats import E4M3, E5M2
from kernelhub.ops.kv_cache.inputs import write_kv_cache_inputs
from kernelhub.ops.kv_cache.problem import HND, NHD

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECIAL = (0.0, -0.0, 1e-40, 2.0**-17, 1.5 * 2.0**-16, 448.0, 464.0, 57344.0, 61440.0, -3e38, torch.inf, torch.nan)


class KvCacheCases(OpCases):
    """Tokens that are written and skipped, to the bit."""

    op = "write_kv_cache"
    exact = True
    written = ("k_cache", "v_cache", "q")
    formats = ("dtype", "kv_dtype")
    read = (*formats, "kv_scale", "kv_layout", "rope", "q")

    def concerns(self, of_case: Any, served: Any) -> bool:
        """Whether a case writes the dtype that is served, with no rope or layout that is not.

        Of float8 every case counts that writes it, from any dtype and with any scales: special values have but one.
        """
        kept = of_case.kv_dtype == of_case.dtype == served.dtype
        quantised = of_case.kv_dtype == served.kv_dtype != served.dtype
        optional = of_case.kv_layout in (NHD, served.kv_layout) and of_case.rope in (None, served.rope)
        return (kept or quantised) and optional and of_case.q <= served.q

    def cases(self) -> Iterator[Case]:
        for dtype in DTYPES:
            yield Case(label=str(dtype)[6:], make=_writes(dtype=dtype), quick=True, repeats=True)
            for kv_dtype in (E4M3, E5M2):
                name = str(kv_dtype)[13:17]
                fp8: Arguments = {"dtype": dtype, "kv_dtype": kv_dtype}
                for label, scale in (("0.0171", 0.0171), ("tiny", 2.0**-60)):
                    yield Case(
                        label=f"{str(dtype)[6:]} to {name}, scale {label}",
                        make=_writes(scale, **fp8),
                        without=_writes(1.0, **fp8),
                        feature="kv_scale",
                        quick=label != "tiny",
                    )
        for kind in ("tensor", "head"):
            yield Case(
                label=f"scales as {kind}",
                make=_writes(0.3, kind, kv_dtype=E4M3),
                without=_writes(1.0, kind, kv_dtype=E4M3),
                feature=f"kv_scale={kind}",
                quick=True,
            )
        yield Case(label="HND", make=_writes(kv_layout=HND), quick=True)
        yield Case(label="HND, e5m2, scales as head", make=_writes(0.3, "head", kv_layout=HND, kv_dtype=E5M2))
        for kv_dtype in (E4M3, E5M2):
            yield Case(label=f"special values to {str(kv_dtype)[13:17]}", make=_special(kv_dtype), quick=True)
        for qk, vo in ((64, 64), (192, 128), (96, 40), (7, 3), (1, 1)):
            yield Case(label=f"widths {qk} and {vo}", make=_writes(head_dim_qk=qk, head_dim_vo=vo))
        for heads in (1, 3):
            yield Case(label=f"{heads} heads", make=_writes(num_kv_heads=heads))
        for size in (1, 3, 64, 256):
            yield Case(label=f"pages of {size}", make=_writes(page_size=size))
        for skipped in (0, 1):
            yield Case(
                label=("nothing is skipped", "all are skipped")[skipped], make=_writes(skipped=skipped), quick=True
            )
        yield Case(label="the only one is skipped", make=_writes(tokens=1, skipped=1, kv_dtype=E4M3))
        for tokens in (0, 1, 2, 3, 31, 33):
            yield Case(
                label=f"{tokens} tokens", make=_writes(tokens=tokens), tokens=True, quick=tokens in (0, 1, 2, 33)
            )

        for rope in ("neox", "interleaved"):
            yield Case(
                label=f"rope {rope}",
                make=_writes(rope=rope),
                without=_writes(rope="neox" if rope != "neox" else "interleaved"),
                feature=f"rope={rope}",
                quick=True,
                repeats=True,
            )
            for kv_dtype in (E4M3, E5M2):
                inputs: Arguments = {"rope": rope, "rotary_dim": 12, "head_dim_qk": 40, "head_dim_vo": 24}
                yield Case(
                    label=f"rope {rope} of 12 of 40 columns to {str(kv_dtype)[13:17]}, scales as head",
                    make=_writes(0.3, "head", kv_dtype=kv_dtype, **inputs),
                )
            for tokens in (0, 1, 33):
                yield Case(label=f"rope {rope} of {tokens} tokens", make=_writes(tokens=tokens, rope=rope), tokens=True)
            yield Case(label=f"rope {rope} of keys alone", make=_writes(rope=rope, rotates_q=False, kv_layout=HND))
            yield Case(label=f"rope {rope} of 2 of 3 columns", make=_writes(rope=rope, head_dim_qk=3, rotary_dim=2))
            yield Case(
                label=f"rope {rope} of 192 and 128 in float32",
                make=_writes(rope=rope, head_dim_qk=192, head_dim_vo=128, dtype=torch.float32),
            )
        yield Case(
            label="rope of float16, 5 heads of q",
            make=_writes(rope="neox", dtype=torch.float16, num_q_heads=5),
            quick=True,
        )
        yield Case(label="rope of padding without positions", make=_padded, quick=True)

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {}

    def results(self, returned: Any, destinations: Mapping[str, Tensor], arguments: Arguments) -> dict[str, Tensor]:
        return {name: arguments[name] for name in self._written(arguments)}

    def expect(self, arguments: Arguments) -> Any:
        return dict(zip(self._written(arguments), self.reference(**arguments), strict=True))

    def _written(self, arguments: Arguments) -> tuple[str, ...]:
        return self.written if "q" in arguments else self.written[:2]

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        figures = []
        for name in self._written(arguments):
            ratio, text = same_bits(results[name], expected[name])
            figures.append((ratio, f"{name}: {text}" if text else ""))
        return Judgement(*joined(*figures), expected)


def _writes(scale: float | None = None, kind: str = "value", **inputs: Any) -> Make:
    def made(device: torch.device) -> Arguments:
        arguments = write_kv_cache_inputs(**{"tokens": 18, "num_kv_heads": 2, "num_q_heads": 2} | inputs, device=device)
        if scale is not None:
            heads = arguments["k"].shape[1]
            for name, size in (("k_scale", scale), ("v_scale", scale * 1.7)):
                each = torch.full((heads if kind == "head" else 1,), size, dtype=torch.float32, device="cpu")
                each *= torch.arange(1, len(each) + 1, dtype=torch.float32, device="cpu")
                arguments[name] = size if kind == "value" else each.to(device)
        return arguments

    return made


def _padded(device: torch.device) -> Arguments:
    """Tokens of padding have any position; those with a row of the cache are rotated, others stay."""
    arguments = _writes(rope="neox", skipped=2)(device)
    positions = arguments["positions"].cpu()
    positions[1::2] = torch.tensor([-1, 1 << 40, 97, 3, -(1 << 62), 96, 0, 98, -97], dtype=torch.int64, device="cpu")
    return arguments | {"positions": positions.to(device)}


def _special(kv_dtype: torch.dtype) -> Make:
    """Halves between codes, saturating ones, infinity, NaN."""

    def made(device: torch.device) -> Arguments:
        halves = [(m + 0.5) / 8 * 2.0**e for m in range(8, 16) for e in (-9, -6, 0, 7)]
        values = torch.tensor([*SPECIAL, *halves], dtype=torch.float64, device="cpu").float()
        inputs: Arguments = {"dtype": torch.float32, "kv_dtype": kv_dtype, "tokens": 2, "skipped": 0}
        arguments = write_kv_cache_inputs(
            **inputs, num_kv_heads=1, num_q_heads=1, head_dim_qk=len(values), device=device
        )
        rows = torch.stack([values, -values])[:, None].to(device)
        return arguments | {"k": rows, "v": rows.flip(0), "k_scale": 1.0, "v_scale": 1.0}

    return made
