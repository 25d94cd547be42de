"""What only a GPU shows of seal: a refusal leaves a capture and its stream usable; an illegal access is final."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernelhub
from kernelhub.errors import NotWarmed

pytestmark = pytest.mark.gpu

# Loading from an address that is none is an illegal access.
ILLEGAL = """
import json, torch, triton, triton.language as tl
import kernelhub
from kernelhub.backends.triton.quant import adapter
from kernelhub.errors import DeviceLost

@triton.jit
def bad_kernel(place):
    tl.store((place + (1 << 50)).to(tl.pointer_type(tl.float32)), 1.0)

x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
kernelhub.quantize_fp8(x, "group", backend="triton")
launch = adapter.QuantizeFp8.launch

def broken(self, *arguments):
    bad_kernel[(1,)](x.data_ptr())
    torch.cuda.synchronize()

adapter.QuantizeFp8.launch = broken
kernelhub.quantize_fp8.op._forget()
answers = []
for _ in range(3):
    try:
        kernelhub.quantize_fp8(x, "group", backend="triton")
        answers.append("ran")
    except DeviceLost:
        answers.append("DeviceLost")
    except RuntimeError:
        answers.append("RuntimeError")
print(json.dumps({"answers": answers, "health": json.loads(kernelhub.health().to_json())}))
"""


def quantize(tokens: int, shift: int = 0) -> torch.Tensor:
    x = torch.ones(tokens * 256 + shift, device="cuda", dtype=torch.bfloat16)[shift:].view(tokens, 256)
    return kernelhub.quantize_fp8(x, "group", backend="triton")[0]


def test_a_refusal_under_capture_leaves_the_stream_usable() -> None:
    quantize(8)
    x = torch.ones(8, 256, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with kernelhub.seal(), torch.cuda.graph(graph):
        y = kernelhub.quantize_fp8(x, "group", backend="triton")[0]
        with pytest.raises(NotWarmed):
            kernelhub.quantize_fp8(x, "token", backend="triton")
    x.fill_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.isfinite(y.float()).all()
    line_of(lambda: quantize(8, shift=1))
    with kernelhub.seal():
        quantize(8, shift=1)


def line_of(call: object) -> None:
    """Refuse a call, then make it ready by its line."""
    with kernelhub.seal(), pytest.raises(NotWarmed) as refused:
        call()  # type: ignore[operator]
    exec(refused.value.line, {"kernelhub": kernelhub, "torch": torch})


def test_traffic_inside_what_was_warmed_does_no_work() -> None:
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128):
        quantize(tokens)
    with kernelhub.seal():
        for tokens in range(1, 129):
            quantize(tokens)
        assert kernelhub.report().after_seal == ()


def test_an_illegal_access_is_final(tmp_path: Path) -> None:
    script = tmp_path / "illegal.py"  # a file, since Triton reads the source of a kernel
    script.write_text(ILLEGAL)
    answer = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    told = json.loads(answer.stdout.splitlines()[-1]) if answer.stdout else answer.stderr
    assert told["answers"] == ["RuntimeError", "DeviceLost", "DeviceLost"], answer.stderr[-2000:]
    assert told["health"]["ok"] is False
    assert told["health"]["device"] == torch.cuda.current_device()
