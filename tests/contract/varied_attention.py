"""The cases of the attention ops varied, for kernels that take few of them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.checks import Subject
from kernelhub.ops.case import Arguments, Case, Make
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.testing import KernelCase
from tests.contract.attention import Contract, of_one_width

FILLER = 3.0  # what stands in unused ends; a kernel that sees it is off by as much


def varied(
    op: str,
    *,
    model: AttentionModel | None = None,
    inputs: Arguments | None = None,
    features: Arguments | None = None,
    change: Callable[[Arguments], Arguments] | None = None,
) -> Any:
    """The op's cases: of one model, with other defaults of inputs, with features in every call, or changed at last."""
    base: Any = type(CASES[op])

    class Varied(base):
        models = base.models if model is None else (model,)

        def make(self, given: Arguments, more: Arguments | None = None, *how: Any, **named: Any) -> Make:
            made: Make = super().make((inputs or {}) | given, (more or {}) | (features or {}), *how, **named)
            return made if change is None else lambda device: change(made(device))

    return Varied()


class VariedContract(Contract):
    """Mixed in before the contract of an op, for a kernel whose `table` is not the op's."""

    @classmethod
    def takes(cls, case: Case) -> bool:
        return cls._subject().claims(case.make(torch.device(cls.device))).holds

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        taken = [case for case in cls.table.cases() if cls.takes(case)]
        return of_one_width(
            [KernelCase(cls.op, cls.kernel, case.label, (case.feature,), cls.device, 0) for case in taken]
        )

    def test_there_are_cases(self) -> None:
        assert len(self.accepted_cases()) >= 3

    def test_case(self, case: KernelCase) -> None:
        found = self._subject().check(next(item for item in self.table.cases() if item.label == case.label))
        assert not isinstance(found, str), f"{case}: {found}"
        assert found.code == "ok", f"{case}: {found.code}: {found.figures}"

    @classmethod
    def _subject(cls) -> Subject:
        function = HUB.function(cls.op)
        kernel = next(item for item in HUB.registry.candidates(cls.op).kernels if item.name == cls.kernel)
        return Subject(function, kernel, cls.table, torch.device(cls.device))


def with_finite_ends(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with a number in the unused ends of pages; pages that belong to no sequence keep their NaN."""
    page_size = arguments["k_cache"].shape[1 if arguments["kv_layout"] == "NHD" else 2]
    table, lengths = arguments["block_table"], arguments["seq_lens"].tolist()
    used = torch.cat([table[:0, 0], *(row[: -(-n // page_size)] for row, n in zip(table, lengths, strict=True))]).long()
    filled = dict(arguments)
    for name in ("k_cache", "v_cache"):
        cache = arguments[name].clone()
        cache[used] = cache[used].float().nan_to_num(nan=FILLER).to(cache.dtype)
        filled[name] = cache
    return filled
