"""The pipelined Gluon prefill in the emulator: its contracts, its order of tiles, interleavings, and planted faults."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.gluon.attention import pipelined_adapter, prefill_pipelined
from kernelhub.backends.gluon.attention.pipelined_adapter import PipelinedPrefill, heads_together
from kernelhub.backends.gluon.attention.prefill_pipelined import tile_in_order
from kernelhub.backends.gluon.language import gl, gluon
from kernelhub.evidence.cases import CASES
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.reference import attention_reference
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.testing import OpContract
from tests.gluon import emulated as emulation
from tests.gluon.emulate import EmulationError, run
from tests.gluon.emulated import Emulated, emulated, on_the_cpu
from tests.gluon.planted import planted

KERNEL = "emulated.prefill_pipelined_any"
OF_64 = AttentionModel("two heads of a group", 2, 1, 64, 64)
OF_192 = AttentionModel("keys of 192", 2, 2, 192, 128)


class TestPipelinedPrefill(Emulated, OpContract):
    op, kernel = "attention", KERNEL
    labels = (
        "sinks, causal, width 64",
        "ragged, causal, both windows, softcap",
        "scale below zero, width 64",
        "width 96 x 96",
    )


class TestPagedPipelinedPrefill(Emulated, OpContract):
    op, kernel = "paged_attention", KERNEL
    labels = ("mixed and padded, width 64", "width 96 x 96")


def call(seed: int, arguments: dict[str, Any]) -> bool:
    """Whether a call gives the reference, with LSE if that is asked for."""
    op = "paged_attention" if "k_cache" in arguments else "attention"
    out = {
        name: torch.full(shape, torch.nan, dtype=dtype)
        for name, (shape, dtype) in CASES[op].destinations(arguments).items()
    }
    with on_the_cpu(), emulated(seed):
        made = getattr(kernelhub, op)(**arguments, **out, backend=KERNEL)
    if arguments.get("return_lse"):
        out["lse"] = made[1]
    return bool(CASES[op].judge(out, arguments).ok)


def dense(seed: int, model: AttentionModel = OF_64, more: dict[str, Any] | None = None, **inputs: Any) -> bool:
    return call(seed, attention_inputs(model, **inputs) | (more or {}))


def paged(seed: int, model: AttentionModel = OF_64, more: dict[str, Any] | None = None, **inputs: Any) -> bool:
    return call(seed, paged_attention_inputs(model, **inputs) | (more or {}))


@pytest.fixture(autouse=True)
def here(clean_hub: Any) -> None:
    pass


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each program goes over several tiles."""
    monkeypatch.setattr(emulation, "_H200", dataclasses.replace(emulation._H200, num_sms=2))


def in_turns(monkeypatch: pytest.MonkeyPatch, **static: Any) -> None:
    init = PipelinedPrefill.__init__

    def changed(self: PipelinedPrefill, problem: Any) -> None:
        init(self, problem)
        self._static |= static

    monkeypatch.setattr(PipelinedPrefill, "__init__", changed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", [OF_64, OF_192], ids=["64", "192 for 128"])
def test_every_interleaving_gives_the_reference(model: AttentionModel, seed: int, few_programs: None) -> None:
    assert dense(seed, model, batch=2, q_tokens=300, kv_tokens=300)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model", [OF_64, OF_192], ids=["64", "192 for 128"])
def test_warpgroups_in_turns(
    model: AttentionModel, seed: int, few_programs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_turns(monkeypatch, IN_TURNS=True)
    assert dense(seed, model, batch=2, q_tokens=300, kv_tokens=420)
    assert dense(seed, model, {"window": 60}, q_lens=(20, 0, 140, 3), kv_lens=(5, 7, 400, 0))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("q_stages", [1, 2])
def test_queries_are_loaded_once_the_keys_before_are_released(
    q_stages: int, stages: int, few_programs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of one step, which are the hardest: the loader runs ahead by whole tiles."""
    in_turns(monkeypatch, STAGES=stages, Q_STAGES=q_stages)
    for seed in range(4):
        assert dense(seed, batch=3, q_tokens=200, kv_tokens=70)
        assert dense(seed, q_lens=(20, 0, 140, 300), kv_lens=(5, 7, 40, 300))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [(64, 64), (96, 96), (192, 128), (256, 256)], ids=str)
def test_features_beside_each_other(width: tuple[int, int], causal: bool, few_programs: None) -> None:
    model = AttentionModel("groups of two", 4, 2, *width)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    more = {"causal": causal, "sinks": sinks, "softcap": 2.0, "return_lse": True}
    lengths: dict[str, Any] = {"q_lens": (20, 0, 190, 3), "kv_lens": (5, 7, 300, 0)}
    assert dense(1, model, more | {"window": 127}, **lengths)
    assert dense(2, model, more | {"scale": -0.2}, **lengths)
    assert dense(3, model, {"causal": causal, "return_lse": True}, dtype=torch.float16, batch=2, q_tokens=257)
    assert paged(4, model, more | {"window": 40}, seq_lens=(300, 0, 130), q_lens=(140, 0, 5), page_size=16)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_pages_of_every_size(page_size: int, kv_layout: str) -> None:
    assert paged(0, page_size=page_size, kv_layout=kv_layout, seq_lens=(150, 0, 33), q_lens=(130, 0, 3))


def test_what_no_sequence_uses_is_not_read() -> None:
    arguments = paged_attention_inputs(OF_64, seq_lens=(70, 0), q_lens=(70, 0), page_size=64)
    table = arguments["block_table"]
    arguments["block_table"] = torch.cat([torch.where(table < 0, 1 << 30, table), table * 0 - 7], 1)
    assert call(0, arguments)


def test_operands_of_any_strides() -> None:
    arguments = attention_inputs(OF_64, batch=2, q_tokens=20)
    both = torch.stack([arguments["k"], arguments["v"]], -2).flatten(-2)  # side by side in a row
    queries = arguments["q"].transpose(1, 2).contiguous().transpose(1, 2)  # heads first
    assert call(0, arguments | {"q": queries, "k": both[..., :64], "v": both[..., 64:]})
    repeated = arguments["v"][:, :1].expand_as(arguments["v"])  # the same row for every token
    keys = arguments["k"].transpose(1, 3).contiguous().transpose(1, 3)
    assert call(0, arguments | {"k": keys, "v": repeated})


def test_heads_of_96_beside_nan() -> None:
    """A tile has 128 columns of values, 32 of which are the next head's or behind the last: nothing of them is seen."""
    arguments = attention_inputs(AttentionModel("two groups", 4, 2, 96, 96), batch=1, q_tokens=70, kv_tokens=150)
    for name in ("k", "v"):
        wide = torch.full((1, 150, 3, 96), torch.nan, dtype=torch.bfloat16)
        wide[:, :, :2] = arguments[name]
        arguments[name] = wide[:, :, :2]
    assert call(0, arguments)
    want = attention_reference(**arguments)
    arguments["v"][:, :, 1] = torch.nan
    arguments["k"][:, :, 1] = torch.inf
    with on_the_cpu(), emulated(0):
        out = kernelhub.attention(**arguments, backend=KERNEL)
    assert compare_out(out[:, :, :2], want[:, :, :2], 4.5).ok
    assert out[:, :, 2:].isnan().all()


def test_many_empty_tiles(few_programs: None) -> None:
    """Places of a ragged batch that have no rows, several of them in succession, first and last."""
    for lengths in ((0, 0, 0, 1), (1, 0, 0, 0), (0, 130, 0, 0, 0, 2, 0), (1,) * 9, (0, 0)):
        assert dense(0, q_lens=lengths, kv_lens=tuple(n + 60 for n in lengths))


def test_nan_past_the_end_is_not_multiplied(few_programs: None) -> None:
    """Of every tile but a program's first, too, whose last keys come beside the tile before."""
    arguments = paged_attention_inputs(OF_64, seq_lens=(200, 130), q_lens=(200, 130), page_size=64)
    for length, pages in zip((200, 130), arguments["block_table"], strict=True):
        for name in ("k_cache", "v_cache"):
            arguments[name][int(pages[length // 64]), length % 64 :] = torch.nan
    for seed in range(3):
        assert call(seed, arguments)


@gluon.jit
def _order_kernel(
    out, cu, num_seqs, q_tokens, total, together, HEADS: gl.constexpr, RAGGED: gl.constexpr
):  # fmt: skip
    for t in range(total + 3):
        head, sequence, block, _, _, _, _ = tile_in_order(
            t, cu, cu, cu, num_seqs, q_tokens, q_tokens, total, together, HEADS, RAGGED, 0
        )
        gl.store(out + t * 3, head)
        gl.store(out + t * 3 + 1, sequence)
        gl.store(out + t * 3 + 2, block)


def order(heads: int, together: int, lengths: tuple[int, ...], ragged: bool) -> list[tuple[int, ...]]:
    """(head, sequence, block) of the tiles that have rows."""
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    tokens = sum(lengths) if ragged else lengths[0]
    blocks = tokens // 128 + len(lengths) if ragged else -(-tokens // 128) * len(lengths)
    total = blocks * heads
    out = torch.full((total + 3, 3), -7, dtype=torch.int32)
    static = {"HEADS": heads, "RAGGED": ragged}
    run(_order_kernel, 1, [out, offsets, len(lengths), tokens, total, together], static)
    assert (out[total:, 2] < 0).all()
    return [tuple(tile) for tile in out.tolist() if tile[2] >= 0]


@pytest.mark.parametrize("together", [1, 2, 4, 12])
@pytest.mark.parametrize("lengths", [(300, 300, 300), (1, 1), (129, 0, 700, 5, 0)], ids=str)
def test_each_tile_comes_once(lengths: tuple[int, ...], together: int) -> None:
    for ragged in {len(set(lengths)) > 1, True}:
        taken = order(4, min(together, 4 * (1 if ragged else len(lengths))), lengths, ragged)
        every = {
            (head, at, block) for head in range(4) for at, n in enumerate(lengths) for block in range(-(-n // 128))
        }
        assert len(taken) == len(set(taken))
        assert set(taken) == every


def test_a_section_ends_before_the_next_begins_and_has_its_longest_blocks_first() -> None:
    taken = order(6, 2, (512, 512), ragged=False)
    assert taken[:16] == [(head, 0, block) for first in (0, 2) for block in (3, 2, 1, 0) for head in (first, first + 1)]
    assert taken[-1] == (5, 1, 0)
    taken = order(6, 4, (256, 200), ragged=True)
    assert taken[:8] == [(head, 0, block) for block in (1, 0) for head in range(4)]
    assert taken[16:18] == [(head, 0, 1) for head in (4, 5)]


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("programs", [1, 2, 7])
def test_tiles_are_all_taken_and_counters_left_zero(
    programs: int, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next tile of all, and where there are no counters; twice, of launches with other numbers of tiles."""
    monkeypatch.setattr(emulation, "_H200", dataclasses.replace(emulation._H200, num_sms=programs))
    counters = torch.zeros(2, dtype=torch.int32) if counted else None
    monkeypatch.setattr(pipelined_adapter, "counters_of", lambda *_: counters)
    assert dense(0, q_lens=(300, 0, 1, 140), kv_lens=(300, 9, 0, 200))
    assert dense(1, batch=3, q_tokens=200)
    if counters is not None:
        assert counters.tolist() == [0, 0]


def test_sections_are_whole_groups_that_fit_into_l2() -> None:
    token = (192 + 128) * 2
    assert heads_together(256, 1, 4096 * token) == 12
    assert heads_together(32, 4, 16384 * 512) == 16
    assert heads_together(32, 4, 1024 * 512) == 32
    assert heads_together(8, 8, 1 << 40) == 8
    assert heads_together(8, 4, 0) == 8
    for heads, group, size in itertools.product((8, 24, 128), (1, 4, 8), (1 << 12, 3 << 20, 1 << 30)):
        together = heads_together(heads, group, size)
        assert together % group == 0
        assert together <= heads
        assert together == group or together // group * size <= pipelined_adapter._IN_L2


def _before(statement: str, line: str) -> tuple[str, str]:
    """Text of the kernel from a statement on to a line after it, and the same with that line first."""
    text = Path(prefill_pipelined.__file__).read_text()
    begin = text.index(statement)
    old = text[begin : text.index(line, begin) + len(line)]
    return old, line + old.removesuffix(line)


FAULTS = {
    "keys are filled before they are released": ("mbarrier.wait(k_empty.index(s), phase)", "pass"),
    "values are filled before they are released": ("mbarrier.wait(v_empty.index(s), phase)", "pass"),
    "queries are filled before the keys of their last step are released": ("if AHEAD > 0:", "if AHEAD > 9:"),
    "no wait for a later tile's queries": (
        "mbarrier.wait(q_full.index(done % Q_STAGES * 2 + WHICH), (done // Q_STAGES) & 1)",
        "pass",
    ),
    "tiles are told in one place": ("done % (Q_STAGES + 1)", "0"),
    "no wait for keys": ("mbarrier.wait(k_full.index(s), (step // STAGES) & 1)\n    if", "if"),
    "no wait for a later tile's first keys": (
        "mbarrier.wait(k_full.index(s), (step // STAGES) & 1)\n            if",
        "if",
    ),
    "no wait for values": ("mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)\n    pending", "pending"),
    "no wait for a tile's last values": (
        "mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)\n            pending",
        "pending",
    ),
    "keys are released before the product": _before(
        "    started = products_with_keys(q, q1", "    mbarrier.arrive(k_empty.index(s), count=1)\n"
    ),
    "values are released before the product": _before(
        "    pending = warpgroup_mma(p, v_bufs", "    mbarrier.arrive(v_empty.index(before), count=1)\n"
    ),
    "sums are those of the next tile": ("gl.sum(last_sums, 1)", "gl.sum(sums, 1)"),
    "the maximum is that of the next tile": ("acc, last_m, gl", "acc, m, gl"),
    "results are not scaled": ("    acc = acc * gl.convert_layout(alpha,", "    0 * gl.convert_layout(alpha,"),
    "sums are not scaled": ("sums = sums * gl", "sums = sums + 0 * gl"),
    "NaN past a later tile's end is multiplied": (
        "clear_from(v_bufs.index(s), kv_len - n",
        "clear_from(v_bufs.index(s), n + BLOCK_N - n",
    ),
    "a later tile's first keys are masked as the tile's": (
        "            position = kv_len - number_told(tile, Q_LEN) + block",
        "            position = kv_len - q_len + block",
    ),
    "no tile is told to be the last": ("store(field * 0 - 1)", "load(field)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(
    fault: str, tmp_path: Path, few_programs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planted(prefill_pipelined, *FAULTS[fault], tmp_path)
    monkeypatch.setattr(PipelinedPrefill, "kernel", made.pipelined_kernel)
    model = OF_192 if "queries" in fault else OF_64
    arguments = paged_attention_inputs(
        model, seq_lens=(300, 1, 1, 1, 1, 200), q_lens=(300, 0, 0, 0, 0, 5), page_size=64
    )
    for name in ("k_cache", "v_cache"):
        for length, pages in zip((300, 200), arguments["block_table"][[0, 5]], strict=True):
            arguments[name][int(pages[length // 64]), length % 64 :] = torch.nan
    arguments |= {"causal": True, "return_lse": True}
    if "released before the product" in fault:  # only of many steps does it show
        model = OF_192 if "keys" in fault else OF_64
        arguments = attention_inputs(model, batch=1, q_tokens=130, kv_tokens=1000)

    def wrong(seed: int) -> bool:
        try:
            return not call(seed, arguments)
        except EmulationError:
            return True

    assert any(wrong(seed) for seed in range(25))
