"""``kernelhub tune``: what it prints, its exit codes, tables carried, what `doctor` and `explain` say afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kernelhub
from kernelhub.evidence import quarantine
from kernelhub.probes import distributions
from tests.evidence import liars

ROUTING = ("tune", "--model", "gpt-oss-120b", "--tp", "8", "--op", "route_experts", "--device", "cpu")
QUICK = (*ROUTING, "--backend", "torch", "--tokens", "2,3", "--samples", "5")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "kept"))
    quarantine.say.cache_clear()
    return tmp_path / "kept"


def test_a_row_for_each_size_a_summary_and_progress(ask):
    answer = ask(*QUICK)
    assert answer.code == 0
    rows = [line.split() for line in answer.out.splitlines() if line.startswith("route_experts")]
    assert [row[2] for row in rows] == ["2", "3"]
    assert {row[3] for row in rows} == {"torch.routing"}
    assert "1 problem classes, 2 sizes measured on" in answer.out
    assert "regret of the selections 0.0 % on average and 0.0 % at most" in answer.out
    assert "tuning 0/1, 0 s: route_experts (router)" in answer.err


def test_explain_doctor_and_the_caches_show_it(ask, cache):
    ask(*QUICK)
    facets = ("--num-experts", "128", "--top-k", "4", "--num-groups", "1", "--topk-groups", "1")
    selection = ask(
        "explain", "route_experts", "--device", "cpu", *facets, "--scoring", "softmax_after_topk", "--dtype", "float32"
    )
    assert "decided by  tuned, measured 20" in selection.out
    assert "1 problem classes tuned on" in ask("doctor").out
    listed = ask("cache", "list", "kernelhub", "--json").json["caches"]
    (ours,) = [item for item in listed if item["path"] == str(cache)]
    assert ours["states"] == {"current": 1}


def test_doctor_reports_what_was_tuned_on_the_cpu_beside_a_gpu(ask, request):
    ask(*QUICK)
    request.getfixturevalue("an_h200")
    assert "1 problem classes tuned on" in ask("doctor").out


def test_torch_is_of_the_version_that_it_says_itself(ask, cache, monkeypatch):
    """Wheels of torch may say 2.11.0 where torch says 2.11.0+cu130."""
    real = distributions.version_of
    monkeypatch.setattr(distributions, "version_of", lambda name: "2.0.0" if name == "torch" else real(name))
    ask(*QUICK)
    listed = ask("cache", "list", "kernelhub", "--json").json["caches"]
    (ours,) = [item for item in listed if item["path"] == str(cache)]
    assert ours["states"] == {"current": 1}


def test_a_damaged_table_is_reported_by_doctor_and_by_the_cache(ask, cache, tmp_path, monkeypatch):
    ask(*QUICK, "--export", str(tmp_path / "table.json"))
    (tmp_path / "table.json").write_text((tmp_path / "table.json").read_text().replace('"us": ', '"us": 1'))
    monkeypatch.setenv("KERNELHUB_TUNED", str(tmp_path / "table.json"))
    (document,) = cache.glob("tuned/*/*/*.json")
    document.write_text(document.read_text()[:100])
    kernelhub.reload()
    doctor = ask("doctor")
    assert "table.json was changed after it was written, or is damaged" in doctor.out
    assert "kernelhub tune --model NAME" in doctor.out
    checked = ask("cache", "check", "kernelhub", "--json")
    assert checked.code == 1
    assert str(document) in [item["path"] for item in checked.json["broken"]]


def test_json_holds_every_figure(ask):
    answer = ask(*QUICK, "--json")
    assert answer.json["ok"] is True
    (entry,) = answer.json["entries"]
    times = entry["sizes"][0]["times"]["torch.routing"]
    assert times["us"] > 0
    assert times["samples"] == 5
    assert [row["tokens"] for row in answer.json["regret"]] == [2, 3]


def test_a_table_is_carried(ask, cache, tmp_path):
    table = tmp_path / "table.json"
    ask(*QUICK, "--export", str(table))
    assert json.loads(table.read_text())["format"] == "kernelhub tuned, version 1"
    (document,) = cache.glob("tuned/*/*/*.json")
    document.unlink()
    answer = ask("tune", "--import", str(table), "--device", "cpu")
    assert answer.code == 0
    assert "1 problem classes are stored" in answer.out
    again = tmp_path / "again.json"
    assert ask("tune", "--export", str(again), "--device", "cpu").code == 0
    assert again.read_text() == table.read_text()


def test_a_wrong_kernel_gives_1_and_is_named(ask):
    liars.attention(liars.Zeros)
    answer = ask(
        *("tune", "--model", "llama-3.1-8b", "--tp", "8", "--op", "attention", "--device", "cpu"),
        *("--backend", "liar,torch.packed", "--tokens", "4", "--samples", "5"),
    )
    assert answer.code == 1
    assert "attention liar.k is wrong: it gave nothing but zeros" in answer.out
    assert "its time is not used" in answer.out


def test_without_results_it_gives_1(ask, tmp_path):
    assert ask(*ROUTING, "--backend", "flashinfer", "--tokens", "2").code == 1
    assert ask("tune", "--export", str(tmp_path / "x.json"), "--device", "cpu").code == 1


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_measured(ask, tmp_path):
    for path in (tmp_path, tmp_path / "absent" / "x.json"):
        answer = ask(*QUICK, "--export", str(path))
        assert (answer.code, answer.out) == (2, "")
        assert f"--export {path}: " in answer.err
        assert "tuning" not in answer.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tune",), "--model: name a model or a config.json"),
        (("tune", "--model", "lama-3.1-8b"), "did you mean llama-3.1-8b"),
        (("tune", "--model", "gpt-oss-120b", "--op", "fp8_gemm"), "gpt-oss-120b does not use fp8_gemm"),
        ((*ROUTING, "--tokens", "0"), "is not a list of token counts"),
        ((*ROUTING, "--budget-s", "-1"), "is not a positive number of seconds"),
        ((*ROUTING, "--samples", "0"), "samples is 0"),
        ((*ROUTING, "--device", "tpu"), "device"),
        (("tune", "--import", "/nonexistent.json"), "cannot be read: No such file"),
        ((*ROUTING, "--import", "x"), "--import measures and writes nothing else"),
        ((*QUICK, "--export", "/nonexistent/x.json"), "name a file that can be written"),
    ],
)
def test_a_wrong_question_gives_2_and_says_what_is_right(ask, words, message):
    answer = ask(*words)
    assert answer.code == 2
    assert message in answer.err
