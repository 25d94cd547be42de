"""Every kernel of `grouped_gemm` that can run here, on the experts of real models, against the machine's roofs.

    python benchmarks/grouped_gemm.py [--quick] [--out FILE]

Tokens are sent to experts at random, each to as many as the model sends it to; both products of a layer's experts are
timed as published, and those of fp8 models in bfloat16 too. A case's time at the roof is the larger of the bytes that
must move (weights of experts with a token, rows, result) over the bytes read per second, and of its operations over
those of a bfloat16 product, or twice as many where the operands are fp8. Results of all kernels are compared first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from attention import roofs

import kernelhub
from kernelhub.cli.measure import time_calls
from kernelhub.ops.gemm.grouped.inputs import MODELS, ExpertModel
from kernelhub.probes.device import facts

_WIDEST_DISAGREEMENT = 2.0**-6  # of the largest element: two roundings to bfloat16, and fp8 sums in few bits


def arguments(model: ExpertModel, weights: tuple[int, int], tokens: int, form: str, device: Any) -> dict[str, Any]:
    """Operands of one product, made where they are used."""
    n, k = weights
    experts = model.num_experts
    ids = torch.rand(tokens, experts, device=device).topk(model.top_k, 1).indices
    rows = tokens * model.top_k
    counts = torch.bincount(ids.reshape(-1), minlength=experts)
    made: dict[str, Any] = {"offsets": counts.cumsum(0).int()}
    if form == "block":
        blocks = -(-k // 128)
        made["a"] = torch.randn(rows, k, device=device).to(torch.float8_e4m3fn)
        made["b"] = torch.randint(0, 0x78, (experts, n, k), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        made["a_scale"] = 0.5 + torch.rand(rows, blocks, device=device)
        made["b_scale"] = 0.5 + torch.rand(experts, -(-n // 128), blocks, device=device)
        return made
    made["a"] = torch.randn(rows, k, device=device).to(torch.bfloat16)
    if form == "mxfp4":
        made["b"] = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=device)
        made["b_scale"] = torch.randint(120, 128, (experts, n, -(-k // 32)), dtype=torch.uint8, device=device)
    else:
        made["b"] = torch.empty(experts, n, k, dtype=torch.bfloat16, device=device).normal_()
    return made


def cases(quick: bool, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Decode of a few sequences and of many, and a chunk of prefill."""
    models = [MODELS["qwen3-30b-a3b"]] if quick or device.type == "cpu" else list(MODELS.values())
    for model in models:
        for form in dict.fromkeys((model.format, "bfloat16")):
            for tokens in (1, 16) if device.type == "cpu" else (1, 16, 128, 4096):
                for name, weights in (("w13", model.w13), ("w2", model.w2)):
                    label = f"{model.name} {name}, {tokens} tokens, {form}"
                    yield label, arguments(model, weights, tokens, form, device)


def measure(label: str, made: dict[str, Any], device: torch.device, budget_s: float, roof: Any) -> dict[str, Any]:
    """Milliseconds of every kernel that accepts the case, and at the roof."""
    function = kernelhub.grouped_gemm
    verdict = function.explain(**made)
    able = [decision.kernel for decision in verdict.decisions if decision.accepted]
    chosen = function(**made)
    for name in able[1:]:
        apart = float((function(**made, backend=name).float() - chosen.float()).abs().max())
        assert apart <= _WIDEST_DISAGREEMENT * float(chosen.float().abs().max()), f"{label}: {name} is {apart} apart"
    timings = time_calls([_call(made, name) for name in able], device, budget_s)
    a, b = made["a"], made["b"]
    used = int((made["offsets"].diff(prepend=made["offsets"].new_zeros(1)) > 0).sum())
    scales = sum(made[name].nbytes * used // b.shape[0] for name in ("b_scale",) if name in made)
    moved = a.nbytes + b.nbytes * used // b.shape[0] + scales + chosen.nbytes
    operations = 2 * a.shape[0] * a.shape[1] * b.shape[1] / (2 if a.element_size() == 1 else 1)
    return {
        "case": label,
        "op": "grouped_gemm",
        "chosen": verdict.selected,
        "kernels_ms": {name: 1e3 * timing.median_s for name, timing in zip(able, timings, strict=True)},
        "torch_ms": {},
        "roof_ms": 1e3 * max(moved / roof["bytes_per_s"], operations / roof["operations_per_s"]),
    }


def _call(made: dict[str, Any], name: str) -> Any:
    return lambda: kernelhub.grouped_gemm(**made, backend=name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one model, shorter measurements")
    parser.add_argument("--out", type=Path, help="also write JSON to this file")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    budget_s = 0.2 if options.quick else 0.7
    rows = []
    with torch.no_grad():
        roof = roofs(device, budget_s)
        for label, made in cases(options.quick, device):
            rows.append(measure(label, made, device, budget_s, roof))
            row = rows[-1]
            times = ", ".join(
                f"{'*' * (name == row['chosen'])}{name} {ms:.3g}" for name, ms in row["kernels_ms"].items()
            )
            print(f"{label}: {times} ms; roof {row['roof_ms']:.3g} ms", flush=True)
    if options.out:
        result = {
            "device": str(facts(device)),
            "threads": torch.get_num_threads() if device.type == "cpu" else None,
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "roofs": roof,
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
