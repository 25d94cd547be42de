"""The pure selector: who decides, in which order, and what is said of every kernel."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

import kernelhub
from kernelhub.dispatch.constraint import NOT_BUILT, Between, OnDevice, OneOf, Package, Rejection, Rule
from kernelhub.dispatch.kernel import Band, KnownBad
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.dispatch.order import Line
from kernelhub.dispatch.policy import Layer, Override, Policy, combine
from kernelhub.dispatch.problem import feature_name
from kernelhub.probes.device import DeviceFacts
from tests.dispatch.fakes import SCHEMA, choose, kernel, problem


def override(*names: str, source: str = "context", ops: str = "*") -> Override:
    return Override(ops, names, source, f"{source}:{','.join(names)}")


A, B, C = kernel("a.one"), kernel("b.one"), kernel("c.one", band=Band.TUNED)


class TestWhoDecides:
    def test_a_higher_band_wins_where_no_line_holds(self) -> None:
        assert choose(A, B, C).selected == "c.one"
        assert choose(A, B, C).source == "band"

    def test_equal_bands_are_ordered_by_name(self) -> None:
        assert choose(B, A).selected == "a.one"

    def test_a_line_comes_before_bands(self) -> None:
        selection = choose(A, B, lines=(Line("hopper", "prefill", ("b.one", "a.one"), "measured"),))
        assert (selection.selected, selection.source) == ("b.one", "order")
        assert "measured" in selection.because

    def test_an_unlisted_kernel_of_a_higher_band_comes_before_the_line(self) -> None:
        lines = (Line("hopper", "prefill", ("b.one", "a.one"), "measured"),)
        assert choose(A, B, C, lines=lines).selected == "c.one"
        assert choose(A, B, kernel("z.new"), lines=lines).selected == "b.one"

    def test_the_device_s_own_line_comes_before_the_line_for_any_gpu(self) -> None:
        lines = (Line("*", "prefill", ("a.one",), "any"), Line("hopper", "*", ("b.one",), "own"))
        assert choose(A, B, lines=lines).selected == "b.one"
        assert choose(A, B, lines=lines[:1]).selected == "a.one"

    def test_the_line_of_a_cpu_s_instructions_comes_before_the_line_of_any_cpu(self) -> None:
        lines = (Line("cpu", "prefill", ("a.one",), "any"), Line("cpu/avx2", "*", ("b.one",), "of its class"))
        for arch, selected in (("avx2", "b.one"), ("avx512", "a.one"), ("cpu", "a.one")):
            asked = problem(device=DeviceFacts("a CPU", "cpu", "cpu", arch))
            assert choose(A, B, lines=lines, asked=asked).selected == selected
        assert choose(B, A, lines=(lines[1],)).selected == "a.one"  # a GPU has no such line

    def test_what_is_not_built_is_selected_only_on_request(self) -> None:
        slow = kernel("d.slow", Rule((), lambda _: "for minutes", code=NOT_BUILT), band=Band.SPECIALISED)
        unasked = choose(A, slow)
        assert unasked.selected == "a.one"
        assert next(d for d in unasked.decisions if d.kernel == "d.slow").code == NOT_BUILT
        for names in (("d",), ("d.slow",), ("d", "a")):
            assert choose(A, slow, policy=Policy(requests=(override(*names),))).selected == "d.slow"
            assert choose(A, slow, policy=Policy(prefers=(override(*names),))).selected == "d.slow"
        assert choose(A, slow, policy=Policy(prefers=(override("a"),))).selected == "a.one"

    def test_preferences_rank_and_do_not_force(self) -> None:
        policy = Policy(prefers=(override("missing.x", "b"),))
        assert choose(A, B, C, policy=policy).selected == "b.one"
        narrow = kernel("b.one", Between("width", 1, 32))
        assert choose(A, narrow, C, policy=policy).selected == "c.one"

    def test_the_stronger_preference_ranks_first(self) -> None:
        policy = Policy(prefers=(override("b"), override("a")))
        assert choose(A, B, C, policy=policy).selected == "b.one"

    def test_a_request_runs_what_it_names_or_nothing(self) -> None:
        policy = Policy(requests=(override("b"),))
        assert choose(A, B, C, policy=policy).selected == "b.one"
        refusing = kernel("b.one", Between("width", 1, 32))
        selection = choose(A, refusing, C, policy=policy)
        assert selection.selected is None
        assert selection.explicit

    def test_a_request_of_several_takes_the_first_that_can(self) -> None:
        policy = Policy(requests=(override("b", "a"),))
        assert choose(A, kernel("b.one", Between("width", 1, 32)), C, policy=policy).selected == "a.one"

    def test_the_first_request_that_concerns_the_op_decides(self) -> None:
        policy = Policy(requests=(override("a", ops="other"), override("b"), override("c")))
        assert choose(A, B, C, policy=policy).selected == "b.one"

    def test_disable_removes_even_what_is_forced(self) -> None:
        policy = Policy(requests=(override("b", source="force"),), disables=(override("b.*"),))
        selection = choose(A, B, policy=policy)
        assert selection.selected is None
        assert {d.kernel: d.code for d in selection.decisions}["b.one"] == "disabled"

    @pytest.mark.parametrize(
        ("flag", "code"), [("deterministic", "nondeterministic"), ("batch_invariant", "batch_variant")]
    )
    def test_flags_filter_the_candidates(self, flag: str, code: str) -> None:
        keeps = kernel("a.one", **{flag: True})
        selection = choose(keeps, C, policy=Policy(**{flag: True}))
        assert selection.selected == "a.one"
        assert {d.kernel: d.code for d in selection.decisions}["c.one"] == code


class TestOrderOfSources:
    """disable > KERNELHUB_FORCE > backend= > use, innermost first > configure > preferences."""

    LAYERS = (
        Layer(requests=(override("force.x", source="force"),)),
        Layer(requests=(override("inner.x"),), prefers=(override("pi.x"),)),
        Layer(requests=(override("outer.x"),)),
        Layer(requests=(override("configured.x", source="configure"),), prefers=(override("pc.x"),)),
        Layer(prefers=(override("pe.x", source="environment"),)),
        Layer(prefers=(override("pf.x", source="file"),)),
    )
    KERNELS = tuple(
        kernel(f"{name}.x") for name in ("force", "kwarg", "inner", "outer", "configured", "pi", "pc", "pe", "pf")
    )

    def test_each_source_decides_once_all_stronger_ones_are_silent(self) -> None:
        layers = list(self.LAYERS)
        for index, expected in enumerate(("force.x", "inner.x", "outer.x", "configured.x")):
            policy = combine(tuple(layers[index:]))
            assert choose(*self.KERNELS, policy=policy).selected == expected
        assert (
            choose(*self.KERNELS, policy=combine(tuple(layers[:1])).requesting("toy", ("kwarg",))).selected == "force.x"
        )
        assert (
            choose(*self.KERNELS, policy=combine(tuple(layers[1:])).requesting("toy", ("kwarg",))).selected == "kwarg.x"
        )

    def test_preferences_follow_the_same_order(self) -> None:
        silent = [Layer(prefers=layer.prefers) for layer in self.LAYERS]
        for index, expected in ((0, "pi.x"), (2, "pc.x"), (4, "pe.x"), (5, "pf.x")):
            assert choose(*self.KERNELS, policy=combine(tuple(silent[index:]))).selected == expected

    def test_flags_are_taken_from_the_strongest_place_that_speaks(self) -> None:
        assert combine((Layer(), Layer(strict=False), Layer(strict=True))).strict is False


class TestReasons:
    def test_every_reason_is_collected_not_only_the_first(self) -> None:
        picky = kernel("a.one", Package("nosuch"), Between("width", 1, 32), features=())
        decision = choose(picky, asked=problem(softcap=True), machine=SimulatedMachine({})).decisions[0]
        assert [item.code for item in decision.rejections] == ["package_missing", "range", "feature"]

    def test_a_kernel_for_other_devices_is_not_asked_about_the_problem(self) -> None:
        foreign = kernel("a.one", OnDevice("amd"), Between("width", 1, 32), features=())
        decision = choose(foreign, asked=problem(softcap=True)).decisions[0]
        assert [item.code for item in decision.rejections] == ["vendor", "feature"]

    def test_the_same_reason_is_reported_once(self) -> None:
        twice = kernel("a.one", Package("nosuch"), Package("nosuch"), Between("width", 1, 32))
        decision = choose(twice, machine=SimulatedMachine({})).decisions[0]
        assert [item.code for item in decision.rejections] == ["package_missing", "range"]

    def test_one_constraint_that_raises_hides_no_other(self) -> None:
        broken = kernel("a.one", Rule(("width",), lambda problem: 1 / 0), Between("width", 1, 32))
        decision = choose(broken).decisions[0]
        assert [item.code for item in decision.rejections] == ["constraint_error", "range"]

    def test_a_missing_package_is_named_with_its_remedy(self) -> None:
        selection = choose(kernel("a.one", Package("nosuch", ">=2")), machine=SimulatedMachine({"nosuch": "1.0"}))
        assert selection.decisions[0].code == "package_version"
        assert "nosuch 1.0" in selection.decisions[0].reason
        assert selection.decisions[0].remedy == 'pip install "nosuch>=2"'

    @pytest.mark.fault("constraint_raises")
    def test_a_constraint_that_raises_rejects_its_kernel_and_no_other(self) -> None:
        def broken(_: object) -> str:
            raise RuntimeError("boom")

        selection = choose(kernel("a.one", Rule(("width",), broken)), B)
        assert selection.selected == "b.one"
        assert {d.kernel: d.code for d in selection.decisions}["a.one"] == "constraint_error"

    @pytest.mark.fault("known_bad")
    def test_a_known_bad_kernel_is_not_chosen_where_it_is_bad(self) -> None:
        bad = KnownBad("c.*", "toy", (OnDevice("nvidia", only=((9, 0),)),), "wrong sums", "https://example.org/1")
        selection = choose(A, C, known_bad=(bad,))
        assert selection.selected == "a.one"
        decision = next(d for d in selection.decisions if d.kernel == "c.one")
        assert decision.code == "known_bad"
        assert "https://example.org/1" in decision.reason

    def test_a_known_bad_kernel_runs_only_when_forced_unsafely(self) -> None:
        bad = KnownBad("c.*", "*", (), "wrong sums", "https://example.org/1")
        asked = Policy(requests=(override("c"),))
        assert choose(A, C, known_bad=(bad,), policy=asked).selected is None
        unsafe = Policy(requests=(override("c"),), unsafe=True)
        assert choose(A, C, known_bad=(bad,), policy=unsafe).selected == "c.one"

    def test_the_text_names_every_kernel_and_its_reason(self) -> None:
        text = str(choose(A, kernel("b.one", Between("width", 1, 32, why="registers")), C))
        for word in ("a.one", "b.one", "c.one", "outside 1 to 32 (registers)", "selected", "supported"):
            assert word in text


NAMES = ("a", "b", "c", "a.one", "b.two", "c.*", "*.one", "nothing")
overrides = st.builds(
    override,
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
    source=st.sampled_from(("force", "context", "environment")),
    ops=st.sampled_from(("*", "toy", "other")),
)
policies = st.builds(
    Policy,
    requests=st.lists(overrides, max_size=2).map(tuple),
    prefers=st.lists(overrides, max_size=3).map(tuple),
    disables=st.lists(overrides, max_size=2).map(tuple),
    deterministic=st.booleans(),
    batch_invariant=st.booleans(),
    unsafe=st.booleans(),
)
kernels = st.builds(
    lambda name, band, features, low, deterministic: kernel(
        name, Between("width", low, 256), band=band, features=tuple(features), deterministic=deterministic
    ),
    st.sampled_from([f"{b}.{v}" for b, v in itertools.product("abc", ("one", "two"))]),
    st.sampled_from(list(Band)),
    st.sets(st.sampled_from(sorted(SCHEMA.features))),
    st.sampled_from((1, 64, 65)),
    st.booleans(),
)
problems = st.builds(
    problem,
    width=st.sampled_from((32, 64, 128)),
    softcap=st.booleans(),
    sinks=st.booleans(),
    layout=st.sampled_from(("NHD", "HND")),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(kernels, min_size=1, max_size=6, unique_by=lambda k: k.name), policies, problems)
def test_a_selection_reports_the_whole_truth(candidates, policy, asked) -> None:
    """One decision per kernel, each with a reason; the winner was accepted and honours all that was asked."""
    selection = choose(*candidates, policy=policy, asked=asked)
    assert sorted(d.kernel for d in selection.decisions) == sorted(k.name for k in candidates)
    assert all(d.reason and d.code and "unknown" not in d.reason for d in selection.decisions)
    assert [d.kernel for d in selection.decisions if d.code == "selected"] == (
        [selection.selected] if selection.selected else []
    )
    if selection.kernel is None:
        assert not any(d.accepted for d in selection.decisions)
        return
    request = policy.request_for("toy")
    asked_for = request is not None and any(selection.kernel.matches(name) for name in request.names)
    assert request is None or asked_for, "an explicit choice was replaced"
    assert not any(w.concerns("toy") and any(selection.kernel.matches(n) for n in w.names) for w in policy.disables)
    if not (policy.unsafe and asked_for):
        used = [
            feature_name(n, getattr(asked, n))
            for n in ("softcap", "sinks", "layout")
            if getattr(asked, n) not in (False, "NHD")
        ]
        assert set(used) <= selection.kernel.features, "a feature was dropped"
        assert asked.width >= 64 or selection.kernel.constraints[0].low == 1
    assert choose(*candidates, policy=policy, asked=asked) == selection


def test_what_a_machine_keeps_changes_no_reason() -> None:
    """Whoever asked before, and under which policy: the reasons are those of a machine that was never asked."""
    late = Rule((), lambda _: "for minutes", code=NOT_BUILT)
    candidates = (
        A,
        kernel("d.elsewhere", OnDevice("amd")),
        kernel("d.slow", OnDevice("amd"), late, features=("sinks",)),
    )
    barred = {"d.elsewhere": (Rejection("refused_by_rank", "rank 1 has none"),)}
    policies = (
        Policy(),
        Policy(barred=barred),
        Policy(prefers=(override("d"),)),
        Policy(requests=(override("d.slow"),)),
        Policy(requests=(override("d.slow"),), unsafe=True),
        Policy(disables=(override("d"),)),
        Policy(deterministic=True),
        Policy(batch_invariant=True),
    )
    asked = [(policy, problem(sinks=sinks)) for policy in policies for sinks in (False, True)]
    for first, second in itertools.product(asked, repeat=2):
        machine = SimulatedMachine({})
        choose(*candidates, policy=first[0], asked=first[1], machine=machine)
        kept = choose(*candidates, policy=second[0], asked=second[1], machine=machine)
        assert kept == choose(*candidates, policy=second[0], asked=second[1], machine=SimulatedMachine({}))


def test_the_order_of_registration_changes_nothing() -> None:
    refusing = kernel("d.one", OneOf("width", (1,)))
    for order in itertools.permutations((A, B, C, refusing)):
        assert choose(*order) == choose(A, B, C, refusing)


class TestAMachineThatIsNotHere:
    """What is explained for a device that is not here says what it takes for granted, torch's build too."""

    @pytest.mark.parametrize("built", [None, "12.6", "13.0"])
    def test_torch_is_assumed_to_be_built_for_the_device(self, built: str | None, monkeypatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", built)
        selection = kernelhub.explain("fp8_gemm", device="H200", rows="many")
        codes = {decision.kernel: decision.code for decision in selection.decisions}
        old = Version(torch.__version__) < Version("2.11")  # too old for the kernel, whatever it is built for
        assert (codes["torch.scaled_mm_blockwise"] == "package_version") == (old or built == "12.6")
        assert f"is built for CUDA {built or '13.0'}" in selection.assumed
        assert f"assumed: {selection.assumed}" in str(selection)
        assert selection.to_dict()["assumed"] == selection.assumed
        assert ("(here: " in selection.assumed) == (built is None)

    @pytest.mark.parametrize(
        ("packages", "able"), [({}, True), ({"torch": "2.13.0+cu126"}, False), ({"torch": "2.8.0+cu129"}, False)]
    )
    def test_a_described_machine_reports_the_build_of_its_torch(self, packages: dict[str, str], able: bool) -> None:
        machine = kernelhub.SimulatedMachine({"triton": "3.7.1", **packages})
        selection = kernelhub.explain("fp8_gemm", device="H200", rows="many", machine=machine)
        codes = {decision.kernel: decision.code for decision in selection.decisions}
        assert (codes["torch.scaled_mm_blockwise"] != "package_version") is able
        assert "triton 3.7.1 installed beside it" in selection.assumed

    def test_nothing_is_assumed_of_this_machine(self) -> None:
        selection = kernelhub.explain("attention", device="cpu")
        assert selection.assumed == ""
        assert "assumed" not in selection.to_dict()
