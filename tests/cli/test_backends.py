"""``kernelhub backends``: who provides kernels, and which of them can run here."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

import kernelhub
from kernelhub.cli.matrix import Furnished
from kernelhub.dispatch.hub import HUB
from kernelhub.probes.device import SIMULATED


def kernels(answer):
    return {(kernel["op"], kernel["name"]): kernel for kernel in answer.json["kernels"]}


class TestJson:
    def test_every_registered_kernel_is_listed_with_what_it_promises(self, ask):
        listed = kernels(ask("backends", "--json"))
        for op in (kernelhub.attention, kernelhub.paged_attention):
            assert {name for told, name in listed if told == op.__name__} == set(op.kernels())
            for record in HUB.registry.candidates(op.__name__).kernels:
                kernel = listed[op.__name__, record.name]
                assert kernel["summary"] == record.summary
                assert kernel["features"] == sorted(record.features)
                assert kernel["deterministic"] is record.deterministic
                assert kernel["batch_invariant"] is record.batch_invariant
                assert (kernel["band"], kernel["graph"]) == (record.band.name.lower(), record.graph.name.lower())

    def test_only_those_of_one_op_if_asked(self, ask):
        assert {op for op, _ in kernels(ask("backends", "--op", "attention", "--json"))} == {"attention"}

    def test_libraries_are_reported_with_their_version(self, ask):
        backends = {backend["name"]: backend for backend in ask("backends", "--json").json["backends"]}
        assert backends["torch"]["library"]["value"] == metadata.version("torch")
        assert backends["torch"]["built_in"] is True

    def test_a_broken_plugin_is_listed_with_the_reason(self, ask, broken_plugin):
        backends = {backend["name"]: backend for backend in ask("backends", "--json").json["backends"]}
        assert backends[broken_plugin]["built_in"] is False
        assert "libsunken.so" in backends[broken_plugin]["error"]


class TestUsableHere:
    @pytest.fixture(autouse=True)
    def no_interpreter(self, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    @pytest.mark.usefixtures("an_h200")
    def test_a_limit_of_the_problem_is_not_held_against_a_kernel(self, ask):
        listed = kernels(ask("backends", "--json"))
        assert listed["paged_attention", "torch.blocked"]["usable_here"] is True
        mixed = listed["paged_attention", "triton.mixed"]  # takes only ragged batches, which the default is not
        assert "value" not in [obstacle["code"] for obstacle in mixed["obstacles"]]

    @pytest.mark.usefixtures("an_h200", "no_triton")
    def test_a_missing_package_is_held_against_its_kernels_with_the_remedy(self, ask):
        for (_, name), kernel in kernels(ask("backends", "--json")).items():
            if name.startswith("triton."):
                assert kernel["usable_here"] is False
                assert "package_missing" in [obstacle["code"] for obstacle in kernel["obstacles"]]
                assert any("pip install" in obstacle["remedy"] for obstacle in kernel["obstacles"])

    @pytest.mark.usefixtures("an_h200")
    def test_a_kernel_for_another_device_is_not_usable(self, ask):
        packed = kernels(ask("backends", "--json"))["attention", "torch.packed"]
        assert [obstacle["code"] for obstacle in packed["obstacles"]] == ["vendor"]

    def test_a_disabled_kernel_is_not_usable(self, ask, monkeypatch):
        monkeypatch.setenv("KERNELHUB_DISABLE", "torch.sdpa")
        sdpa = kernels(ask("backends", "--json"))["attention", "torch.sdpa"]
        assert [obstacle["code"] for obstacle in sdpa["obstacles"]] == ["disabled"]


class TestMatrix:
    def test_every_record_is_a_row_with_a_word_for_every_device(self, ask):
        told = ask("backends", "--matrix", "--json").json["kernels"]
        assert {(row["op"], row["kernel"]) for row in told} == {
            (op, record.name) for op in HUB.registry.contracts for record in HUB.registry.candidates(op).kernels
        }
        for row in told:
            assert set(row["devices"]) == set(SIMULATED)
            assert set(row["devices"].values()) <= {"yes", "some", "-"}
            if not row["kernel"].startswith("unsupported."):
                assert "yes" in row["devices"].values() or "some" in row["devices"].values(), "a kernel for no device"

    @pytest.mark.usefixtures("no_triton")
    def test_it_does_not_depend_on_this_machine(self, ask, monkeypatch):
        monkeypatch.setenv("KERNELHUB_DISABLE", "triton")
        rows = {
            row["kernel"]: row
            for row in ask("backends", "--op", "paged_attention", "--matrix", "--json").json["kernels"]
        }
        assert rows["triton.split_kv"]["devices"]["H200"] == "yes"
        assert rows["triton.split_kv"]["devices"]["MI300X"] == "-"
        assert rows["torch.packed"]["devices"] == {
            name: "yes" if device.type == "cpu" else "-" for name, device in SIMULATED.items()
        }
        assert "triton >=3.6,<3.10" in rows["triton.split_kv"]["needs"]

    def test_a_device_is_yes_where_a_problem_on_it_is_taken(self, ask):
        for row in ask("backends", "--matrix", "--json").json["kernels"]:
            for name, word in row["devices"].items():
                selection = kernelhub.explain(row["op"], device=name, machine=Furnished())
                decision = next(item for item in selection.decisions if item.kernel == row["kernel"])
                if decision.accepted:
                    assert word != "-"
                if word == "-":
                    assert {rejection.code for rejection in decision.rejections} & {
                        "vendor",
                        "capability",
                        "interpreter_off",
                        "no_adapter",
                    }

    def test_it_says_how_a_kernel_stands_where_it_is_taken_and_on_what_evidence(self, ask):
        for row in ask("backends", "--matrix", "--json").json["kernels"]:
            taken = {name for name, mark in row["devices"].items() if mark != "-"}
            assert set(row["standings"]) == taken
            record = next(k for k in HUB.registry.candidates(row["op"]).kernels if k.name == row["kernel"])
            for name, told in row["standings"].items():
                standing = record.standing_on(SIMULATED[name].family)
                assert (told["word"], told["evidence"]) == (standing.word, standing.evidence)
        row = ask("backends", "--op", "mla_attention", "--matrix").row("flash_mla.sparse").split()
        assert row[1 + list(SIMULATED).index("H200")] == "verified"
        assert row[1 + list(SIMULATED).index("B200")] == "published"
        assert row[1 + list(SIMULATED).index("CPU")] == "-"

    def test_people_get_a_table_per_op(self, ask):
        answer = ask("backends", "--op", "bmm_fp8", "--matrix")
        assert answer.code == 0
        assert "features it lacks" in answer.out
        assert answer.row("triton.bmm_fp8")


class TestForPeople:
    def test_one_screen_has_a_row_for_each_backend_with_how_many_kernels_can_run(self, ask):
        answer = ask("backends")
        assert answer.code == 0
        assert len(answer.out.splitlines()) <= 24
        assert re.search(r"^torch +[1-9]\d* of \d+ +torch \d", answer.row("torch"))
        for registered in HUB.registry.backends.values():
            assert answer.row(registered.name).split()[2:4] == ["of", str(len(registered.kernels))]

    def test_of_an_op_each_kernel_is_named_with_the_first_reason(self, ask):
        answer = ask("backends", "--op", "attention")
        assert len(answer.out.splitlines()) <= 24
        assert answer.row("torch.sdpa").split()[1] == "supported"
        assert answer.row("cudnn.sdpa").split()[1] == "rejected"

    def test_all_lists_every_kernel_of_every_op(self, ask):
        answer = ask("backends", "--all")
        assert answer.row("torch").split()[1] == "ok"
        for op in HUB.registry.contracts:
            for record in HUB.registry.candidates(op).kernels:
                assert answer.row(record.name).split()[1] in ("supported", "rejected")

    def test_a_broken_plugin_is_a_row_with_the_reason(self, ask, broken_plugin):
        answer = ask("backends")
        assert answer.row(broken_plugin).split()[1] == "broken"
        assert "libsunken.so" in answer.row(broken_plugin)

    def test_a_misspelt_op_is_answered_with_the_nearest(self, ask):
        answer = ask("backends", "--op", "paged_atention")
        assert answer.code == 2
        assert "did you mean paged_attention?" in answer.err
