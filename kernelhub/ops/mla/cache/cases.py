"""Cases of `write_mla_cache`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, same_bits
from kernelhub.ops.formats import E4M3
from kernelhub.ops.mla.cache.inputs import write_mla_cache_inputs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class MlaCacheCases(OpCases):
    """Tokens that are written and skipped, to the bit."""

    op = "write_mla_cache"
    exact = True
    written = ("kv_cache",)

    def cases(self) -> Iterator[Case]:
        for dtype in DTYPES:
            yield Case(label=str(dtype)[6:], make=_writes(dtype=dtype), quick=True, repeats=True)
            fp8: Arguments = {"dtype": dtype, "kv_dtype": E4M3}
            for label, scale in (("0.0171", 0.0171), ("3.3", 3.3), ("tiny", 2.0**-60)):
                yield Case(
                    label=f"{str(dtype)[6:]} to fp8, scale {label}",
                    make=_writes(kv_scale=scale, **fp8),
                    without=_writes(kv_scale=1.0, **fp8),
                    feature="kv_scale",
                    quick=label != "3.3",
                )
            yield Case(label=f"{str(dtype)[6:]} to fp8", make=_writes(**fp8))
            yield Case(
                label=f"{str(dtype)[6:]} to fp8, scale as tensor", make=_writes(tensor=True, kv_scale=0.3, **fp8)
            )
        for scale in (0.0171, 0.3, 1.7):
            yield Case(label=f"half way between two codes, scale {scale}", make=_half_way(scale), quick=True)
        for latent, rope in ((256, 64), (128, 0), (100, 24), (7, 3), (1, 1)):
            yield Case(label=f"{latent} + {rope}", make=_writes(latent_dim=latent, rope_dim=rope))
        for size in (1, 3, 16, 256):
            yield Case(label=f"pages of {size}", make=_writes(page_size=size))
        for skipped in (0, 1):
            yield Case(
                label=("nothing is skipped", "all are skipped")[skipped], make=_writes(skipped=skipped), quick=True
            )
        yield Case(label="the only one is skipped", make=_writes(tokens=1, skipped=1, kv_dtype=E4M3))
        for tokens in (0, 1, 2, 3, 31, 32, 33, 65):
            yield Case(
                label=f"{tokens} tokens", make=_writes(tokens=tokens), tokens=True, quick=tokens in (0, 1, 2, 33)
            )

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {}

    def results(self, returned: Any, destinations: Mapping[str, Tensor], arguments: Arguments) -> dict[str, Tensor]:
        return {"kv_cache": arguments["kv_cache"]}

    def expect(self, arguments: Arguments) -> Any:
        return self.reference(**arguments)

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want = expected
        return Judgement(*same_bits(results["kv_cache"], want), {"kv_cache": want})


def _writes(*, kv_scale: float | None = None, tensor: bool = False, **inputs: Any) -> Make:
    def made(device: torch.device) -> Arguments:
        arguments = write_mla_cache_inputs(**{"tokens": 18} | inputs, device=device)
        if kv_scale is not None:
            arguments["kv_scale"] = torch.tensor([kv_scale], device=device, dtype=torch.float32) if tensor else kv_scale
        return arguments

    return made


def _half_way(kv_scale: float) -> Make:
    """Values half way between two codes after division; with the reciprocal some round to the wrong side."""

    def made(device: torch.device) -> Arguments:
        halves = torch.tensor(
            [(m + 0.5) / 8 * 2.0**e for m in range(8, 16) for e in range(-5, 8)], dtype=torch.float32, device="cpu"
        )
        values = (halves * torch.tensor(kv_scale, dtype=torch.float32, device="cpu")).to(device)
        inputs: Arguments = {"dtype": torch.float32, "kv_dtype": E4M3, "tokens": 1, "skipped": 0}
        arguments = write_mla_cache_inputs(**inputs, latent_dim=len(halves), device=device)
        return arguments | {"kv_c": values[None], "kv_scale": kv_scale}

    return made
