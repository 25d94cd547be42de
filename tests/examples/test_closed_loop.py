"""benchmarks/closed_loop.py: steps by arithmetic, and what of the rows on file its clients explain."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def loop() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("closed_loop")
    sys.path.remove(str(BENCHMARKS))
    for name in ("closed_loop", "serving"):
        sys.modules.pop(name, None)


def test_one_prompt_takes_the_sum_of_its_steps(loop) -> None:
    times = loop.Times(step=4e-3, sequence=0.0, context=1e-6, prompt=1e-5)
    found = loop.simulate(loop.Load(clients=1, input=3000, output=3, rounds=1, budget=1000), times, 0.0, 0)
    assert found.ttft_p50 == pytest.approx(1 + 3 * (4 + 10), rel=0.03)  # the request, three steps of 1000 tokens
    assert found.tpot_p50 == pytest.approx(4 + 3, rel=0.03)
    assert found.gaps_with_prompts == 0


def test_delays_of_clients_decide_ttft_but_not_throughput(loop) -> None:
    """One kernel throughout: the queue of a round's prompts is as long as clients were late, in decode steps."""
    load, times = loop.Load(), loop.Times()
    early, late = (loop.simulate(load, times, delay, 0) for delay in (0.002, 0.06))
    assert late.ttft_p50 > 2 * early.ttft_p50
    assert late.itl_p99 < early.itl_p99 / 4
    assert late.tokens_per_s == pytest.approx(early.tokens_per_s, rel=0.01)
    kernel = loop.simulate(load, times._replace(context=1.1 * times.context), 0.002, 0)
    assert kernel.ttft_p50 == pytest.approx(early.ttft_p50, rel=0.05)
    assert kernel.tokens_per_s < 0.97 * early.tokens_per_s


def test_the_rows_on_file_have_the_same_trade(loop) -> None:
    """Runs of all backends: a longer TTFT p50 goes with a shorter ITL p99, and with no other throughput."""
    rows = [
        row
        for row in json.loads((BENCHMARKS / "results" / "serving_by_lengths_h200.json").read_text())["rows"]
        if (row["workload"], row["concurrency"]) == ("1k/1k", 128) and "ttft_ms_p50" in row
    ]
    first = [row["ttft_ms_p50"] for row in rows]
    assert rank_correlation(first, [row["itl_ms_p99"] for row in rows]) < -0.8
    assert abs(rank_correlation(first, [row["output_tokens_per_s"] for row in rows])) < 0.3
    load, times = loop.Load(), loop.Times()
    assert loop.simulate(load, times, 0.002, 0).ttft_p50 - 20 < min(first)
    assert max(first) < loop.simulate(load, times, 0.1, 1).ttft_p50 + 20


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's."""
    places = [[sorted(values).index(value) for value in values] for values in (one, other)]
    count = len(one)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(*places, strict=True)) / (count * (count**2 - 1))


def test_the_table_has_a_row_for_each_delay(loop, capsys) -> None:
    loop.main(["--clients", "2", "--input", "8", "--output", "4", "--delays", "1,5", "--seeds", "2"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["delay,", "ms", "ttft_p50"]
    assert [row.split()[0] for row in rows] == ["1", "5"]
    with pytest.raises(SystemExit):
        loop.main(["--clients", "0"])
    assert "give 1 or more" in capsys.readouterr().err
