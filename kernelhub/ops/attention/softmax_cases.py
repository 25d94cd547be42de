"""Shared by the cases of all softmax attention: comparison of results, and tokens of no sequence."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.case import Arguments, Judgement, Make, OpCases, turned


class AttendingCases(OpCases):
    """Cases of an op that returns ``out`` and, on request, ``lse``, and takes ``cu_seqlens_q`` for ragged queries."""

    @abc.abstractmethod
    def wanted(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        """The reference's result and LSE."""

    @abc.abstractmethod
    def largest_value(self, arguments: Arguments) -> float:
        """Largest magnitude of a value that is attended to, scaled."""

    def results(self, returned: Any, destinations: Mapping[str, Tensor], arguments: Arguments) -> dict[str, Tensor]:
        return dict(destinations) | ({"lse": returned[1]} if isinstance(returned, tuple) else {})

    def untouched(self, arguments: Arguments) -> dict[str, Tensor]:
        """Tokens past the last offset."""
        q, offsets = arguments["q"], arguments.get("cu_seqlens_q")
        return {} if offsets is None else {"out": torch.arange(q.shape[0], device=q.device) >= offsets[-1]}

    def later(self, arguments: Arguments) -> Arguments:
        """Other queries, and the sequences in the other order; caches stay, of which some pages hold no numbers."""
        turn = super().later({name: value for name, value in arguments.items() if not name.endswith("_cache")})
        if "topk_indices" in arguments:  # they are positions in their own sequences
            return arguments | turn
        for name in ("block_table", "seq_lens"):
            if name in arguments:
                turn[name] = turned(arguments[name])
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if name in arguments:
                turn[name] = arguments[name][-1] - turned(arguments[name])
        return arguments | turn

    def expect(self, arguments: Arguments) -> tuple[Tensor, Tensor, float]:
        return (*self.wanted(arguments), self.largest_value(arguments))

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want, want_lse, largest = expected
        out, past = results["out"], self.untouched(arguments)
        if past:
            out, want = out[~past["out"]], want[~past["out"]]
        agreement = compare_out(out, want, largest)
        shares = (
            agreement.largest / max(agreement.largest_allowed, 1e-300),
            agreement.rms_ratio / agreement.rms_ratio_allowed,
        )
        ratio, figures = max(shares) if agreement.all_finite else float("inf"), str(agreement)
        if "lse" in results:
            lse = results["lse"]
            if past:
                lse, want_lse = lse[..., ~past["out"]], want_lse[..., ~past["out"]]
            error, allowed = compare_lse(lse, want_lse), lse_tolerance(results["out"].dtype)
            if error > allowed and error / allowed > ratio:
                ratio, figures = error / allowed, f"the LSE is off by {error:.2g} where {allowed:.2g} is allowed"
        return Judgement(ratio, figures, {"out": want, "lse": want_lse})


def padded(make: Make) -> Make:
    """A ragged call with three more tokens, which belong to no sequence."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        q = arguments["q"]
        return arguments | {"q": torch.cat([q, torch.full_like(q[:3], torch.nan)])}

    return made
