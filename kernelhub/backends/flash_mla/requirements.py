"""What every kernel needs on the machine: a copy of FlashMLA whose functions support our calls.

Several distributions bring the import name ``flash_mla``, and their versions cannot be compared, so their functions are
distinguished by their parameters, read from the source:

* tensors: `get_mla_metadata` takes the lengths and gives two tensors (upstream until January 2026);
* stateful: it gives an object that the first call of a step fills (upstream since, tokenspeed-flashmla);
* legacy: the same with `use_legacy`, which reaches the kernels that upstream dropped in September 2026 (sgl-flash-mla).

Upstream since then has neither dense decode nor sm_90 nor rows of 576: its mark is `enable_batch_invariant` without
`use_legacy`, and it is rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernelhub.dispatch.constraint import Package, Rejection
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.signature import Call, takes

TENSORS, STATEFUL, LEGACY = "tensors", "stateful", "legacy"
INSTALL = 'pip install "kernelhub[flash-mla]"'

_MODULE = "flash_mla.flash_mla_interface"
_STEP = ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata")
_REST = ("softmax_scale", "causal")
_ROWS = ("q", "kv", "indices", "sm_scale", "d_v")

DECODE_LEGACY = Call(f"{_MODULE}:flash_mla_with_kvcache", _STEP, (*_REST, "is_fp8_kvcache", "use_legacy"))
DECODE_STATEFUL = Call(f"{_MODULE}:flash_mla_with_kvcache", _STEP, (*_REST, "is_fp8_kvcache"))
DECODE_TENSORS = Call(f"{_MODULE}:flash_mla_with_kvcache", (*_STEP, "num_splits"), _REST)
METADATA_STATEFUL = Call(f"{_MODULE}:get_mla_metadata")
METADATA_TENSORS = (
    Call(f"{_MODULE}:get_mla_metadata", ("cache_seqlens", "num_heads_per_head_k", "num_heads_k")),
    Call(f"{_MODULE}:get_mla_metadata", ("cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k")),
)
SPARSE_LEGACY = Call(f"{_MODULE}:flash_mla_sparse_fwd", _ROWS, ("attn_sink", "topk_length", "use_legacy"))
# Without attn_sink it is older than January 2026, and its LSE has base 2.
SPARSE_STATEFUL = Call(f"{_MODULE}:flash_mla_sparse_fwd", _ROWS, ("attn_sink", "topk_length"))
_DROPPED = Call(f"{_MODULE}:flash_mla_with_kvcache", _STEP, (*_REST, "enable_batch_invariant"))

CALLS: dict[str, dict[str, tuple[tuple[Call, ...], ...]]] = {
    "dense": {
        LEGACY: ((DECODE_LEGACY,), (METADATA_STATEFUL,)),
        STATEFUL: ((DECODE_STATEFUL,), (METADATA_STATEFUL,)),
        TENSORS: ((DECODE_TENSORS,), METADATA_TENSORS),
    },
    "sparse": {LEGACY: ((SPARSE_LEGACY,),), STATEFUL: ((SPARSE_STATEFUL,),)},
}


def generation(kernel: str, root: Path | None = None) -> Finding:
    """Which generation of functions is installed, as the value of the finding.

    Args:
        kernel: ``"dense"`` or ``"sparse"``.
        root: folder of the package, where it is not the one that an import would find.
    """
    wanted = CALLS[kernel]
    legacy = _takes_all(wanted[LEGACY], root)
    if legacy.ok:
        return found("flash_mla", LEGACY, "flash_mla takes use_legacy")
    if takes(_DROPPED, root=root).ok:
        reason = "this flash_mla is of September 2026 or later, which has neither dense decode nor rows of 576 elements"
        return lacking("flash_mla", "package_version", reason, INSTALL)
    first: Finding | None = None
    for name in (STATEFUL, TENSORS):
        if name in wanted:
            finding = _takes_all(wanted[name], root)
            if finding.ok:
                return found("flash_mla", name, f"flash_mla has the {name} functions")
            first = first or finding
    assert first is not None
    return lacking("flash_mla", first.code, first.reason, INSTALL)


def _takes_all(wanted: tuple[tuple[Call, ...], ...], root: Path | None) -> Finding:
    """The library accepts every call, in one of its spellings."""
    finding = found("flash_mla", None, "nothing asked")
    for spellings in wanted:
        answers = [takes(call, root=root, remedy=INSTALL) for call in spellings]
        finding = next((answer for answer in answers if answer.ok), answers[0])
        if not finding.ok:
            return finding
    return finding


@dataclass(frozen=True)
class Offers:
    """A copy whose functions take the calls of one of our kernels."""

    kernel: str

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return machine.ask(self, lambda: generation(self.kernel)).rejection


PACKAGES = (
    Package("flash_mla", distribution="sgl-flash-mla", install=INSTALL),
    Package("triton", ">=3.6,<3.10"),  # for the device code around the calls
)
