"""What the kernels ask of the machine, and the calls they make of xformers' Python functions."""

from __future__ import annotations

from kernelhub.backends.xformers.beside import FlashAttnBeside
from kernelhub.dispatch.constraint import Constraint, OnDevice, Package, Takes
from kernelhub.probes.signature import Call

INSTALL = 'pip install "xformers>=0.0.33"'
_OPERANDS = ("query", "key", "value", "attn_bias", "p", "scale")
FORWARD = Call("xformers.ops.fmha:memory_efficient_attention_forward", _OPERANDS, ("op",))
FORWARD_WITH_LSE = Call("xformers.ops.fmha:memory_efficient_attention_forward_requires_grad", _OPERANDS, ("op",))
_BIAS = "xformers.ops.fmha.attn_bias"
FROM_SEQLENS = Call(f"{_BIAS}:BlockDiagonalMask.from_seqlens", ("q_seqlen", "kv_seqlen"), ("device",))
CAUSAL = Call(f"{_BIAS}:BlockDiagonalMask.make_causal_from_bottomright")
CALLS = (FORWARD, FORWARD_WITH_LSE, FROM_SEQLENS, CAUSAL)

# Versions that were read; later ones hand everything over to another package.
MACHINE: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((8, 0), (8, 6), (8, 9), (9, 0))),
    Package("xformers", ">=0.0.33,<0.0.36", install='pip install "xformers>=0.0.33,<0.0.36"'),
    FlashAttnBeside(),
    *(Takes(call, INSTALL) for call in CALLS),
)
