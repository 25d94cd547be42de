"""What measured times make of an order: pure functions, for any times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.dispatch.configuration import REACH, look_up
from kernelhub.evidence.tuning.decide import (
    ALONE,
    FASTER,
    FIRST,
    MARGIN,
    TIE,
    Time,
    beats,
    decide,
    decide_for_all,
    regret,
    slowdown,
)

NAMES = ["a.k", "b.k", "c.k", "d.k"]
us = st.floats(0.5, 1e6, allow_nan=False)
times = st.builds(lambda us, share: Time(us, us * share), us, st.floats(0, 0.5))
measured = st.dictionaries(st.sampled_from(NAMES), times, min_size=1)
orders = st.permutations(NAMES)


@given(orders, measured)
def test_the_orders_first_keeps_its_place_unless_another_is_clearly_faster(order, found):
    choice = decide(order, found)
    incumbent = next(name for name in order if name in found)
    if choice.ranking[0] == incumbent:
        assert choice.word in (FIRST, TIE, ALONE)
        fastest = min(found, key=lambda name: found[name].us)
        assert not beats(found[fastest], found[incumbent])
    else:
        assert choice.word == FASTER
        assert beats(found[choice.ranking[0]], found[incumbent])
        assert found[choice.ranking[0]].us < (1 - MARGIN) * found[incumbent].us


@given(orders, measured)
def test_every_kernel_is_ranked_once_and_the_rest_by_time(order, found):
    ranking = decide(order, found).ranking
    assert sorted(ranking) == sorted(found)
    rest = [found[name].us for name in ranking[1:]]
    assert rest == sorted(rest)


@given(orders, measured)
def test_nothing_is_much_faster_than_the_selection(order, found):
    """A kernel that is clearly faster than the selected one is itself selected, or the two are not distinguishable."""
    chosen = decide(order, found).ranking[0]
    assert not any(beats(time, found[chosen]) for name, time in found.items() if name != chosen)


@given(orders, measured, st.floats(0.01, 100))
def test_units_do_not_matter(order, found, factor):
    scaled = {name: Time(time.us * factor, time.noise_us * factor) for name, time in found.items()}
    plain, other = decide(order, found), decide(order, scaled)
    gains = [abs(a.us - b.us) for a in found.values() for b in found.values() if a is not b]
    if all(gain > 1e-6 for gain in gains):  # rounding decides between times that are all but equal
        edges = [
            abs((b.us - a.us) - edge) / b.us
            for a in found.values()
            for b in found.values()
            for edge in (MARGIN * b.us, math.hypot(a.noise_us, b.noise_us))
        ]
        if all(edge > 1e-9 for edge in edges):
            assert plain == other


@given(orders, measured)
def test_one_size_is_decided_as_that_size(order, found):
    assert decide_for_all(order, [found])[0] == decide(order, found)[0] or len(found) > 1
    assert decide_for_all(order, [found]).ranking[0] == decide(order, found).ranking[0]


@given(orders, st.lists(measured, min_size=1, max_size=4))
def test_one_kernel_for_all_sizes_was_measured_at_as_many_as_any(order, sizes):
    choice = decide_for_all(order, sizes)
    counts = {name: sum(name in size for size in sizes) for size in sizes for name in size}
    assert counts[choice.ranking[0]] == max(counts.values())
    assert set(choice.ranking) == set(counts)


@given(st.lists(st.fixed_dictionaries({name: us.map(Time) for name in NAMES[:3]}), min_size=1, max_size=5))
def test_without_noise_or_margin_the_least_total_regret_is_chosen(sizes):
    chosen = decide_for_all(NAMES, sizes, margin=0.0).ranking[0]
    totals = {name: sum(regret(name, size).percent for size in sizes) for name in NAMES[:3]}
    assert totals[chosen] <= min(totals.values()) * (1 + 1e-9) + 1e-9


@given(measured)
def test_regret_is_nought_for_the_fastest_and_never_less(found):
    regrets = {name: regret(name, found) for name in found}
    assert min(item.us for item in regrets.values()) == 0
    assert all(item.us >= 0 and item.percent >= 0 for item in regrets.values())
    assert regret("x.k", found) is None


@given(us, us)
def test_regret_in_percent_is_of_the_fastest(one, other):
    found = {"a.k": Time(one), "b.k": Time(other)}
    slow = "a.k" if one >= other else "b.k"
    best = min(one, other)
    assert regret(slow, found).percent == pytest.approx(100 * (max(one, other) - best) / best)


class TestExamples:
    def test_three_percent_is_a_tie(self):
        assert decide(["a.k", "b.k"], {"a.k": Time(100.0), "b.k": Time(97.5)}) == (("a.k", "b.k"), TIE)

    def test_five_percent_is_not(self):
        assert decide(["a.k", "b.k"], {"a.k": Time(100.0), "b.k": Time(95.0)}) == (("b.k", "a.k"), FASTER)

    def test_five_percent_within_the_noise_is_a_tie(self):
        found = {"a.k": Time(100.0, 6.0), "b.k": Time(95.0, 1.0)}
        assert decide(["a.k", "b.k"], found).word == TIE

    def test_of_two_that_are_as_fast_the_order_decides(self):
        found = {"a.k": Time(100.0), "b.k": Time(50.0), "c.k": Time(50.5)}
        assert decide(["a.k", "c.k", "b.k"], found).ranking == ("c.k", "b.k", "a.k")

    def test_a_kernel_that_the_order_does_not_rank_comes_behind(self):
        assert decide(["b.k"], {"a.k": Time(10.0), "b.k": Time(10.0)}).ranking[0] == "b.k"

    def test_the_largest_size_does_not_decide_alone(self):
        sizes = [{"a.k": Time(1.0), "b.k": Time(2.0)}, {"a.k": Time(1050.0), "b.k": Time(1000.0)}]
        assert decide_for_all(["b.k", "a.k"], sizes).ranking[0] == "a.k"
        assert slowdown("b.k", sizes).us == pytest.approx(1.5)

    def test_one_that_ran_out_of_memory_at_a_size_is_not_chosen_for_all(self):
        sizes = [{"a.k": Time(1.0), "b.k": Time(9.0)}, {"b.k": Time(9.0)}]
        assert decide_for_all(["a.k", "b.k"], sizes) == (("b.k", "a.k"), ALONE)


class TestLookup:
    """Exact, nearest or default."""

    table = st.dictionaries(st.integers(1, 10_000), st.just({"n": 1}), min_size=1)

    @given(table, st.integers(1, 100_000))
    def test_it_says_how_well_it_fits(self, table, tokens):
        found = look_up(table, tokens)
        if tokens in table:
            assert (found.source, found.num_tokens) == ("exact", tokens)
        elif found.source == "nearest":
            ratio = max(found.num_tokens, tokens) / min(found.num_tokens, tokens)
            assert ratio <= REACH
            assert ratio == min(max(other, tokens) / min(other, tokens) for other in table)
        else:
            assert found == (None, "default", 0)
            assert all(max(other, tokens) / min(other, tokens) > REACH for other in table)

    def test_nothing_was_measured(self):
        assert look_up({}, 5).source == "default"
        assert look_up({5: {}}, 0).source == "default"
