"""The forms of `cuda.fp4_gemm`: which the rows decide, what they ask for, and how tiles are cut."""

from __future__ import annotations

from collections import Counter

import pytest

from kernelhub.backends.cuda.gemm.fp4 import FORMS, Fp4Gemm, cut, form_for, shared_bytes, stages_of
from kernelhub.ops.gemm.fp4.problem import Fp4GemmProblem
from kernelhub.probes.device import simulated


def test_rows_decide_the_form() -> None:
    rows = (1, 16, 17, 64, 65, 128, 129, 192, 193, 256, 300, 512, 700, 1024, 1100, 4096)
    assert [form_for(count) for count in rows] == [
        *(16, 16, 32, 64, 128, 128, 192, 192, 256, 256),
        *(192, 256, 256, 256, 256, 256),
    ]  # fmt: skip


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("form", FORMS)
def test_a_block_has_room_for_its_steps(form: int, group: int) -> None:
    assert 3 <= stages_of(form, group) <= 12
    assert shared_bytes(form, group) <= 232448


@pytest.mark.parametrize("k", [32, 2080, 8192])
@pytest.mark.parametrize("n", [1, 1000, 10240])
@pytest.mark.parametrize("rows", [1, 70, 300, 4096])
def test_every_step_of_every_tile_is_of_one_program(rows: int, n: int, k: int) -> None:
    """As the source walks: `each` steps of the tiles that are cut, then whole tiles."""
    form, sms, steps = form_for(rows), 132, -(-k // 64)
    of, tiles = cut(form, rows, n, k, sms), -(-rows // form) * -(-n // 128)
    seen: Counter[tuple[int, int]] = Counter()
    for program in range(of.programs):
        at = min(program * of.each, of.split * steps)
        seen.update(divmod(one, steps) for one in range(at, min(at + of.each, of.split * steps)))
        for tile in range(of.split + program, tiles, of.programs):
            seen.update((tile, step) for step in range(steps))
    assert seen == Counter((tile, step) for tile in range(tiles) for step in range(steps))
    assert of.programs <= sms


def test_workspace_has_room_for_two_parts_of_each_program() -> None:
    adapter = Fp4Gemm(Fp4GemmProblem(simulated("H200"), n=1000, k=4096))
    for rows in (1, 100, 300):
        of = cut(form_for(rows), rows, 1000, 4096, 132)
        assert of.split
        assert adapter.workspace_bytes(num_tokens=rows) >= 2 * of.programs * 128 * form_for(rows) * 4
