"""Tables on disk: what holds is heeded, and what is damaged, foreign, old or edited is a miss that is said."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kernelhub
from kernelhub.errors import ConfigurationError
from kernelhub.evidence.tuning import tables
from kernelhub.evidence.tuning.carried import export_stored, import_table
from kernelhub.evidence.tuning.lookup import MeasuredTable
from kernelhub.runtime.caches import manifest, notices, store
from tests.dispatch.backends import record, register
from tests.evidence.tuned_entries import CPU, entry, keep

FACETS = {"head_dim_qk": 16, "head_dim_vo": 16, "num_q_heads": 4, "num_kv_heads": 2}


def selection() -> Any:
    return kernelhub.explain("attention", device="cpu", **FACETS)


@pytest.fixture
def other() -> str:
    """A kernel that is not chosen without measurements."""
    accepted = [item.kernel for item in selection().decisions if item.accepted]
    assert len(accepted) > 1
    return accepted[1]


@pytest.fixture
def kept(cache: Path, other: str) -> Path:
    """A table by which that kernel is the fastest."""
    keep(entry("attention", FACETS, {selection().selected: 30.0, other: 10.0}))
    assert (selection().selected, selection().source) == (other, "tuned")
    (path,) = cache.glob("tuned/*/*/attention.json")
    yield path
    notices.forget()


def reread() -> Any:
    notices.forget()
    kernelhub.reload()
    return selection()


def rewrite(path: Path, change: Any) -> None:
    """Change the entry, and seal the document as kernelhub would."""
    content = json.loads(path.read_text())
    del content["sha256"]
    (plain,) = content["document"]["entries"].values()
    change(plain)
    path.write_text(manifest.sealed(content))


class TestWhatHolds:
    def test_it_is_heeded_with_its_figures(self, kept, other) -> None:
        now = reread()
        assert (now.selected, now.source) == (other, "tuned")
        assert now.because.startswith(f"measured 2026-11-21: {other} 10 us for 4 tokens, next ")
        assert "30 us (noise 0.1 us and 0.3 us)" in now.because

    def test_it_stands_below_the_kind_of_device_and_the_versions(self, kept) -> None:
        content = json.loads(kept.read_text())
        assert {"device", "architecture", "multiprocessors", "cuda"} < set(content["parts"])
        assert {"version torch", "version triton", "version kernelhub"} < set(content["parts"])
        assert content["parts"]["device"] == CPU.name

    def test_entries_of_other_problem_classes_stay(self, kept) -> None:
        keep(entry("attention", FACETS | {"causal": True}, {"torch.packed": 5.0, "torch.blocked": 6.0}))
        assert selection().source == "tuned"
        assert kernelhub.explain("attention", device="cpu", **FACETS, causal=True).source == "tuned"
        assert len(list(MeasuredTable(CPU).entries())) == 2

    def test_it_is_read_once(self, kept, other) -> None:
        kept.unlink()
        kernelhub.attention.op._forget()
        assert selection().selected == other
        assert reread().source != "tuned"

    def test_switched_off_it_is_not_looked_for(self, kept, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_EVIDENCE", "0")
        assert reread().source != "tuned"

    def test_a_kernel_that_is_gone_leaves_the_ranking_and_the_rest_holds(self, cache, other) -> None:
        handle = register("gone", record("gone.k"))
        usual = "torch.packed" if other != "torch.packed" else "torch.sdpa"
        keep(entry("attention", FACETS, {"gone.k": 5.0, other: 10.0, usual: 30.0}))
        assert selection().selected == "gone.k"
        handle.remove()
        assert (reread().selected, selection().source) == (other, "tuned")


class TestMisses:
    @pytest.mark.parametrize("text", ["", "{", "[1, 2]", "\x00\x01", '{"parts": {}}'])
    def test_a_damaged_file(self, kept, text, caplog) -> None:
        kept.write_text(text)
        assert reread().source != "tuned"
        assert str(kept) in caplog.text
        misses: list[Any] = []
        assert list(MeasuredTable(CPU).entries(misses)) == []
        assert [miss.path for miss in misses] == [kept], "doctor lists it"

    def test_an_edited_file(self, kept, caplog) -> None:
        kept.write_text(kept.read_text().replace('"us": 10.0', '"us": 1.0'))
        assert reread().source != "tuned"
        assert "was changed after it was written" in caplog.text

    def test_a_file_of_another_device_copied_here(self, kept, caplog) -> None:
        content = json.loads(kept.read_text())
        del content["sha256"]
        content["parts"]["device"] = "another processor"
        kept.write_text(manifest.sealed(content))
        assert reread().source != "tuned"
        assert "was made for device another processor, not" in caplog.text

    def test_a_table_of_other_versions_is_reported(self, kept, caplog, monkeypatch) -> None:
        monkeypatch.setattr(kernelhub, "__version__", "9.9.9")
        assert reread().source != "tuned"
        assert "was measured for version kernelhub 0.1.0, not 9.9.9" in caplog.text
        assert len([line for line in caplog.messages if "was measured for" in line]) == 1, "said once"

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda plain: plain["kernels"]["torch.packed"].update(record="other"), "another record of torch.packed"),
            (lambda plain: plain["kernels"]["torch.packed"]["versions"].update(torch="1.0"), "was measured with"),
            (lambda plain: plain["problem"].update(no_such_facet=1), "under another key"),
            (lambda plain: plain.pop("ranking"), "an invalid entry of"),
            (lambda plain: plain.update(ranking=["x.y"]), "is not of the kernels that were measured"),
            (lambda plain: plain.update(word="best"), "its word is 'best'"),
            (lambda plain: plain["sizes"][0]["times"]["torch.packed"].update(us=-1.0), "is not a time"),
            (lambda plain: plain["sizes"][0]["times"]["torch.packed"].update(us=0), "a time of zero or less"),
            (lambda plain: plain["sizes"][0]["times"]["torch.packed"].update(us="fast"), "is 'fast', not a number"),
            (lambda plain: plain.update(sizes=None), "an invalid entry of"),
            (lambda plain: plain.update(op="paged_attention"), "under another key"),
        ],
    )
    def test_an_entry_that_says_nothing_here(self, cache, change, reason, caplog) -> None:
        keep(entry("attention", FACETS, {"torch.packed": 10.0, "torch.blocked": 30.0}))
        assert selection().source == "tuned"
        (path,) = cache.glob("tuned/*/*/attention.json")
        rewrite(path, change)
        assert reread().source != "tuned"
        misses: list[Any] = []
        assert list(MeasuredTable(CPU).entries(misses)) == []
        assert reason in misses[0].reason
        assert reason in caplog.text

    def test_a_device_of_the_same_name_with_other_cores_is_another(self, kept) -> None:
        larger = dataclasses.replace(CPU, num_sms=CPU.num_sms + 1)
        assert tables.standing_of(larger).digest != tables.standing_of(CPU).digest
        assert list(MeasuredTable(larger).entries()) == []


class TestWriting:
    def test_a_read_only_folder_keeps_it_for_the_process(self, tmp_path, monkeypatch, other) -> None:
        blocked = tmp_path / "blocked"
        if os.geteuid() == 0:
            blocked.write_text("")  # root may write anywhere, but not below a file
        else:
            blocked.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
        for name in ("KERNELHUB_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "TMPDIR"):
            monkeypatch.setenv(name, str(blocked))
        keep(entry("attention", FACETS, {selection().selected: 30.0, other: 10.0}))
        assert (selection().selected, selection().source) == (other, "tuned")
        assert len(kernelhub.agree(what=selection(), device="cpu").tuned["entries"]) == 1, "other ranks hear of it too"
        kernelhub.reload()
        assert any(notice.code == "cache_memory" for notice in kernelhub.cache_notices())
        store._memory.clear()
        assert reread().source != "tuned"

    def test_two_processes_that_tune_lose_nothing_of_each_other(self, cache) -> None:
        code = (
            "import sys\n"
            "from tests.evidence.tuned_entries import entry, keep\n"
            "for width in range(int(sys.argv[1]), 200, 16):\n"
            "    facets = {'head_dim_qk': width, 'head_dim_vo': width}\n"
            "    keep(entry('attention', facets, {'torch.packed': 5.0, 'torch.blocked': 6.0}))\n"
        )
        writers = [subprocess.Popen([sys.executable, "-c", code, str(start)]) for start in (8, 16)]
        assert [writer.wait(120) for writer in writers] == [0, 0]
        assert len(list(MeasuredTable(CPU).entries())) == 24


class TestTableFiles:
    @pytest.fixture
    def file(self, kept, tmp_path) -> Path:
        path = tmp_path / "carried" / "table.json"
        path.parent.mkdir()
        assert export_stored(path, "cpu") == 1
        kept.unlink()
        assert reread().source != "tuned"
        return path

    def test_a_named_file_is_read(self, file, other, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_TUNED", str(file))
        assert (reread().selected, selection().source) == (other, "tuned")

    def test_a_named_folder_is_read(self, file, other, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_TUNED", f"/nonexistent/x.json{os.pathsep}{file.parent}")
        assert reread().selected == other

    def test_what_was_measured_here_is_stronger(self, file, other, monkeypatch) -> None:
        usual = selection().selected
        monkeypatch.setenv("KERNELHUB_TUNED", str(file))
        keep(entry("attention", FACETS, {usual: 10.0, other: 30.0}))
        assert (reread().selected, selection().source) == (usual, "tuned")

    def test_files_are_read_in_the_order_in_which_they_are_named(self, file, other, monkeypatch, tmp_path) -> None:
        usual = selection().selected
        second = tmp_path / "second.json"
        tables.export(second, CPU, [entry("attention", FACETS, {usual: 10.0, other: 30.0})])
        monkeypatch.setenv("KERNELHUB_TUNED", f"{second}{os.pathsep}{file}")
        assert reread().selected == usual
        monkeypatch.setenv("KERNELHUB_TUNED", f"{file}{os.pathsep}{second}")
        assert reread().selected == other

    def test_what_ships_is_read_last(self, file, other, monkeypatch) -> None:
        monkeypatch.setattr(tables, "shipped", lambda: [file])
        assert (reread().selected, selection().source) == (other, "tuned")

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda text: text[: len(text) // 2], "is not JSON"),
            (lambda text: text.replace('"us": 10.0', '"us": 1.0'), "was changed after it was written, or is damaged"),
            (lambda text: text.replace(CPU.name, "another"), "was measured for device another, not"),
            (lambda text: text.replace("version 1", "version 7"), "has the format 'kernelhub tuned, version 7'"),
            (lambda text: "[]", "has the format null"),
            (lambda text: '{"format": "kernelhub tuned, version 1"}', "is not as kernelhub writes it"),
        ],
    )
    def test_a_file_that_says_nothing_here_is_said_once(self, file, change, reason, monkeypatch, caplog) -> None:
        file.write_text(change(file.read_text()))
        monkeypatch.setenv("KERNELHUB_TUNED", str(file))
        assert reread().source != "tuned"
        assert reason in caplog.text
        selection()
        assert sum(reason in line for line in caplog.messages) == 1
        with pytest.raises(ConfigurationError, match="measure here with `kernelhub tune`"):
            import_table(file, "cpu")

    def test_importing_keeps_it_here(self, file, other) -> None:
        assert [item.op for item in import_table(file, "cpu")] == ["attention"]
        file.unlink()
        assert (reread().selected, selection().source) == (other, "tuned")

    def test_a_file_is_the_same_for_every_writer(self, file, tmp_path) -> None:
        import_table(file, "cpu")
        again = tmp_path / "again.json"
        export_stored(again, "cpu")
        assert again.read_text() == file.read_text()

    def test_a_place_that_cannot_be_written_is_reported(self, kept) -> None:
        with pytest.raises(ConfigurationError, match="name a file that can be written"):
            export_stored(Path("/nonexistent/folder/table.json"), "cpu")


def test_reading_for_a_device_that_is_not_here_touches_no_disk(cache) -> None:
    kernelhub.explain("attention", device="B200")
    assert list(cache.iterdir()) == []
