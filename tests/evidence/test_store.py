"""Results on disk: replaced whole, keyed by everything that they depend on, and never believed without."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.evidence import quarantine, standing, store
from kernelhub.evidence.results import Check, Result
from kernelhub.probes.device import facts
from tests.evidence import liars

CPU = facts(torch.device("cpu"))


def kernel(op: str = "attention", name: str = "torch.packed") -> Kernel:
    _ = HUB.settings
    return next(item for item in HUB.registry.candidates(op).kernels if item.name == name)


def bad(op: str = "attention", name: str = "torch.packed") -> Result:
    return Result(
        op, name, (Check("plain", "wrong_numbers", "q_dtype=float32", 30.0, "off by 3 where 0.1 is allowed"),)
    )


def operands():
    return torch.randn(3, 1, 4, 2, 64)


def chosen() -> str:
    return kernelhub.attention.explain(*operands()).selected


@pytest.fixture
def kept(cache) -> Path:
    """A bad result of a kernel of ours that would be chosen."""
    assert chosen() == "torch.packed"
    assert quarantine.keep(kernel(), CPU, bad(), "2026-11-20T12:00:00+00:00") == ""
    path = standing.path_of(kernel(), CPU)
    assert cache in path.parents
    kernelhub.reload()
    return path


def rewrite(path: Path, **changes) -> None:
    document = json.loads(path.read_text())
    for name, value in changes.items():
        (document["key"] if name in document["key"] else document)[name] = value
    path.write_text(json.dumps(document))
    kernelhub.reload()


class TestWhatHolds:
    def test_a_bad_result_is_heeded(self, kept) -> None:
        assert chosen() != "torch.packed"
        document = json.loads(kept.read_text())
        assert document["status"] == "wrong"
        assert document["checks"][0]["figures"] == "off by 3 where 0.1 is allowed"
        told = ("device", "architecture", "driver", "torch", "triton", "cuda", "kernelhub", "record and source")
        assert set(told) <= set(document["key"])

    @pytest.mark.parametrize(
        "field",
        ["device", "driver", "torch", "triton", "cuda", "kernelhub", "record and source", "kernel", "op", "format"],
    )
    def test_one_that_is_about_something_else_is_a_miss_and_says_so(self, kept, field, caplog) -> None:
        rewrite(kept, **{field: "other"})
        assert chosen() == "torch.packed"
        assert f"{field} was other, is " in caplog.text
        assert str(kept) in caplog.text

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "is not JSON"),
            ('{"op": "attention", "kern', "is not JSON"),
            ("[1, 2]", "holds a list"),
            ("\x00\xff\x00", "is not JSON"),
            ("{}", "is about a kernel that is not registered"),
            ('{"op": "attention", "kernel": "torch.packed"}', "has no key"),
        ],
    )
    def test_a_broken_one_is_a_miss_with_its_reason(self, kept, text, reason) -> None:
        kept.write_bytes(text.encode("latin-1"))
        kernelhub.reload()
        assert chosen() == "torch.packed"
        (miss,) = quarantine.all_kept(CPU).misses
        assert miss.path == kept
        assert reason in miss.reason

    @pytest.mark.parametrize(
        "checks", [None, [], [{"case": "x"}], [{"case": "x", "code": "odd", "problem": "", "ratio": 1}]]
    )
    def test_one_whose_checks_mean_nothing_quarantines_nothing(self, kept, checks) -> None:
        rewrite(kept, checks=checks)
        assert chosen() == "torch.packed"

    def test_it_is_read_once(self, kept) -> None:
        assert chosen() != "torch.packed"
        kept.unlink()
        kernelhub.attention.op._forget()
        assert chosen() != "torch.packed"
        kernelhub.reload()
        assert chosen() == "torch.packed"

    def test_a_change_of_the_adapters_source_is_another_kernel(self, tmp_path, monkeypatch) -> None:
        package = tmp_path / "changing_plugin"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "adapter.py").write_text("A = 1\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        record = kernel()
        plugin = Kernel(record.op, "x.y", "changing_plugin.adapter:A", "", record.band, record.constraints)
        before = standing.digest_of(plugin)
        assert standing.digest_of(plugin) == before
        (package / "adapter.py").write_text("A = 2\n")
        standing._digest_of_sources.cache_clear()
        assert standing.digest_of(plugin) != before


class TestWriting:
    def test_a_read_only_folder_keeps_it_for_the_process(self, tmp_path, monkeypatch) -> None:
        if os.geteuid() == 0:
            blocked = tmp_path / "a file"
            blocked.write_text("")  # root may write anywhere, but not below a file
        else:
            blocked = tmp_path / "locked"
            blocked.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
        monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(blocked))
        liars.attention(liars.Zeros)
        found = kernelhub.verify("attention", backend="liar", device="cpu", quick=True)
        assert not found.ok
        assert "cannot be written" in found.unwritten
        assert "KERNELHUB_CACHE_DIR" in found.unwritten
        assert chosen() != "liar.k"
        kernelhub.reload()
        assert chosen() != "liar.k"
        with liars.mended(liars.Zeros):
            assert kernelhub.verify("attention", backend="liar", device="cpu", quick=True).ok
        assert chosen() == "liar.k"

    def test_a_full_disk_leaves_the_old_document(self, kept) -> None:
        before = kept.read_text()
        code = (
            "import resource, signal, sys\n"
            "from pathlib import Path\n"
            "from kernelhub.evidence import store\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
            "print(store.write(Path(sys.argv[1]), {'x': 'y' * 10000}))\n"
        )
        answer = subprocess.run([sys.executable, "-c", code, str(kept)], capture_output=True, text=True, timeout=120)
        assert "cannot be written: File too large" in answer.stdout, answer.stderr
        assert kept.read_text() == before
        assert [path.name for path in kept.parent.iterdir()] == [kept.name], "nothing half-written is left"

    def test_a_process_killed_while_it_writes_leaves_whole_documents(self, tmp_path) -> None:
        path = tmp_path / "a" / "b.json"
        code = (
            "import sys\n"
            "from pathlib import Path\n"
            "from kernelhub.evidence import store\n"
            "print('go', flush=True)\n"
            "while True:\n"
            "    store.write(Path(sys.argv[1]), {'x': 'y' * 100000})\n"
        )
        for _ in range(3):
            writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
            assert writer.stdout.readline() == "go\n"
            for _ in range(50):
                found = store.read(path)
                assert found is None or len(found["x"]) == 100000
            writer.kill()
            writer.wait()
            found = store.read(path)
            assert found is None or len(found["x"]) == 100000

    def test_many_threads_write_one_document(self, tmp_path) -> None:
        path = tmp_path / "a" / "b.json"
        threads = [threading.Thread(target=store.write, args=(path, {"x": [n] * 1000})) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(store.read(path)["x"])) == 1
        assert [item.name for item in path.parent.iterdir()] == ["b.json"]


class TestWhereNothingIs:
    def test_no_folder_is_made_and_nothing_is_imported_at_import(self, cache) -> None:
        code = (
            "import sys, torch, kernelhub\n"
            "assert not [name for name in sys.modules if name.startswith('kernelhub.')]\n"
            "kernelhub.explain('attention', device='B200')\n"
            "assert 'kernelhub.evidence.quarantine' not in sys.modules\n"
            "kernelhub.attention(*torch.zeros(3, 1, 4, 2, 16))\n"
            "assert 'kernelhub.evidence.quarantine' in sys.modules\n"
            "assert 'kernelhub.evidence.cases' not in sys.modules\n"
        )
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert answer.returncode == 0, answer.stderr
        assert list(cache.iterdir()) == []

    def test_switched_off_it_is_not_even_looked_for(self, kept, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_EVIDENCE", "0")
        kernelhub.reload()
        assert chosen() == "torch.packed"
