"""Documents that an attacker or a crash left: never a hang, never a crash, refused with a code, or a miss."""

from __future__ import annotations

import ast
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lock_file import Lock, Locked, check_lock, lock_text, read_lock
from kernelhub.dispatch.settings import read_file
from kernelhub.errors import ConfigurationError, KernelhubError
from kernelhub.evidence import quarantine, store, validity
from kernelhub.evidence.results import Check, Result
from kernelhub.evidence.store import Miss
from kernelhub.evidence.tuning import tables
from kernelhub.evidence.tuning.lookup import MeasuredTable
from kernelhub.ops.models.problems import problems_of
from kernelhub.ops.models.published import CONFIGS
from kernelhub.probes import document
from kernelhub.probes.device import facts
from kernelhub.probes.document import CODE, DocumentError
from kernelhub.runtime.caches import manifest, notices
from kernelhub.runtime.caches.lock import Holder, myself
from kernelhub.warming.lines import Line, line
from tests.evidence.tuned_entries import entry
from tests.fuzz.counting import Attacks
from tests.fuzz.hostile_documents import mutants, parts

CPU = facts(torch.device("cpu"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
MANY = int(os.environ.get("FUZZ_CASES", "150"))
LONGEST_S = 2.0  # of one document; they take milliseconds
FACETS = {"q_dtype": "float32", "kv_dtype": "float32", "head_dim_qk": 64, "head_dim_vo": 64}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(folder))
    notices.forget()
    yield folder
    notices.forget()
    store.forget_unwritten()
    quarantine.say.cache_clear()


@pytest.fixture
def counts(request):
    """What becomes of attacks, told in one line at the end."""
    counted = Attacks()
    yield counted
    counted.note(request.node, f"hostile documents, seed {SEED}")


def outcome(read: Callable[[], Any], *refusals: type[BaseException]) -> str:
    """What became of one document: accepted, or refused as it may be; anything else is a failure."""
    begun = time.monotonic()
    try:
        read()
        return "accepted"
    except refusals:
        return "refused"
    finally:
        assert time.monotonic() - begun < LONGEST_S


def wrong(op: str, kernel: str) -> Result:
    return Result(op, kernel, (Check("plain", "wrong_numbers", "q_dtype=float32", 30.0, "off by 3"),))


def a_kernel(name: str = "torch.packed"):
    _ = HUB.settings
    return next(item for item in HUB.registry.candidates("attention").kernels if item.name == name)


def a_lock() -> dict[str, Any]:
    facets = {"causal": True, "head_dim_qk": 32, "head_dim_vo": 32, "num_q_heads": 4, "num_kv_heads": 4}
    held = Locked("attention", facets, "torch.blocked", {"torch": "2.13"}, "order", ("decode",), ("layer",), {"a": "b"})
    return json.loads(
        lock_text(Lock(("cpu", "avx512", "x"), (held,), {"name": "llama-3.1-8b"}, "0.1.0", {"torch": "2"}))
    )


class TestOneParser:
    def test_gives_the_document_or_one_error(self, counts) -> None:
        schema = {"format": str, "decisions": [{"op": str, "problem": {str: document.SCALAR}}], "model?": dict}
        for raw in mutants(Random(SEED), a_lock(), 4 * MANY):
            counts[outcome(lambda raw=raw: document.parsed(raw, schema), DocumentError)] += 1

    @pytest.mark.parametrize(
        "raw",
        [
            pytest.param(b"1e999", id="1e999"),
            pytest.param(b"NaN", id="NaN"),
            pytest.param(b"[" * 99999, id="nested without end"),
            pytest.param(b"[" * 50 + b"]" * 50, id="nested"),
            pytest.param(b"\xff", id="no UTF-8"),
            pytest.param(b'"\\ud800"', id="half a character"),
            pytest.param(b"9" * 500, id="digits"),
            pytest.param(b" " * (17 << 20), id="17 MB"),
        ],
    )
    def test_refuses_with_one_code_what_breaks_readers(self, raw) -> None:
        with pytest.raises(DocumentError) as refused:
            document.parsed(raw)
        assert (refused.value.code, CODE) == ("document_refused", "document_refused")

    def test_reads_no_more_than_it_is_allowed(self, tmp_path) -> None:
        """180 MB were parsed for two minutes before anything was checked."""
        path = tmp_path / "huge.json"
        with path.open("wb") as file:
            file.truncate(180 << 20)
        begun = time.monotonic()
        for read in (document.read, read_lock, read_file, problems_of):
            with pytest.raises((DocumentError, ConfigurationError), match="more than"):
                read(path)
        assert isinstance(tables.read_table(path, CPU), Miss)
        assert time.monotonic() - begun < LONGEST_S


class TestEvidence:
    def test_a_bad_result_is_a_miss(self, cache, counts) -> None:
        assert quarantine.keep(a_kernel(), CPU, wrong("attention", "torch.packed"), "2026-11-20T12:00:00+00:00") == ""
        shelf = store.documents(validity.made_for(CPU))
        path = shelf.path(validity.name_of(a_kernel()))
        content = json.loads(path.read_text())
        for raw in mutants(Random(SEED), content, MANY):
            path.write_bytes(raw)
            kept = quarantine.all_kept(CPU)
            counts["refused" if kept.misses else "accepted"] += 1
        content = {key: value for key, value in content.items() if key != "sha256"}
        for one in parts(Random(SEED), content, MANY):  # by who knows how digests are made
            if not isinstance(one, dict):
                continue
            path.write_text(manifest.sealed({key: value for key, value in one.items() if key != "sha256"}))
            kept = quarantine.all_kept(CPU)
            counts["refused" if kept.misses else "accepted"] += 1

    def test_calls_go_on_beside_bad_results(self, cache, counts) -> None:
        shelf = store.documents(validity.made_for(CPU))
        good = {"op": "attention", "kernel": "torch.packed", "key": {"op": "attention"}, "date": "d", "left_out": 0}
        good["checks"] = [wrong("attention", "torch.packed").checks[0].to_dict()]
        for number, one in enumerate(parts(Random(SEED), good, 40)):
            assert shelf.write(f"attention.{number}", one) == ""
        folder = shelf.path("attention.0").parent
        for number, raw in enumerate(mutants(Random(SEED), good, 40)):
            (folder / f"raw{number}.json").write_bytes(raw)
        (folder / "1e999.json").write_text('{"revision": null}')
        os.mkfifo(folder / "pipe.json")
        (folder / "folder.json").mkdir()
        (folder / "link.json").symlink_to("/dev/zero")
        kernelhub.reload()
        q = torch.randn(3, 1, 4, 2, 64)
        assert kernelhub.attention(*q).isfinite().all()
        counts["refused"] += 84

    def test_forged_evidence_that_every_kernel_is_wrong_forbids_no_call(self, cache, caplog) -> None:
        """From a file that others could have written; one that only this user could write is believed."""
        q = torch.randn(3, 1, 4, 2, 64)
        usual = kernelhub.attention.explain(*q).selected
        for kernel in HUB.registry.candidates("attention").kernels:
            assert quarantine.keep(kernel, CPU, wrong("attention", kernel.name), "2026-11-20T12:00:00+00:00") == ""
        (cache / "evidence").chmod(0o777)
        kernelhub.reload()
        assert kernelhub.attention.explain(*q).selected == usual
        assert kernelhub.attention(*q).isfinite().all()
        assert "can be written by other users" in caplog.text


class TestTables:
    def test_a_bad_measurement_is_a_miss(self, cache, counts) -> None:
        good = entry("attention", FACETS, {"torch.packed": 10.0, "torch.blocked": 30.0})
        tables.keep(CPU, [good])
        kept = tables.store_of(CPU)
        content = kept.read("attention")
        for one in parts(Random(SEED), content, MANY):
            assert kept.write("attention", one) == ""
            table, misses = MeasuredTable(CPU), []
            found = list(table.entries(misses))
            for item in found:
                item.tuned()
            counts["accepted" if found else "refused"] += 1

    def test_a_bad_table_file_is_a_miss(self, tmp_path, counts) -> None:
        good = entry("attention", FACETS, {"torch.packed": 10.0})
        path = tmp_path / "table.json"
        content = json.loads(tables.table_text(CPU, [good]))
        for raw in mutants(Random(SEED), content, MANY):
            path.write_bytes(raw)
            read = tables.read_table(path, CPU)
            counts["refused" if isinstance(read, Miss) else "accepted"] += 1


class TestFilesThatAreNamed:
    def test_a_bad_lock_file_is_an_error_with_its_path(self, tmp_path, counts) -> None:
        path = tmp_path / "lock.json"
        _ = HUB.settings
        for raw in mutants(Random(SEED), a_lock(), 2 * MANY):
            path.write_bytes(raw)
            counts[outcome(lambda: check_lock(read_lock(path), HUB.registry.contracts), ConfigurationError)] += 1

    def test_a_bad_config_file_is_an_error_with_its_path(self, tmp_path, counts) -> None:
        path = tmp_path / "kernelhub.toml"
        for raw in mutants(Random(SEED), a_lock(), 40):
            path.write_bytes(raw)
            counts[outcome(lambda: read_file(path), ConfigurationError)] += 1
        path.write_text("prefer = " + "[" * 5000 + "]" * 5000)
        with pytest.raises(ConfigurationError, match=r"kernelhub\.toml"):
            read_file(path)

    @pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-120b"])
    def test_a_bad_config_json_of_a_model_is_an_error_with_its_path(self, tmp_path, counts, model) -> None:
        path = tmp_path / "config.json"
        for raw in mutants(Random(SEED), CONFIGS[model], MANY):
            path.write_bytes(raw)
            counts[outcome(lambda: problems_of(path), ConfigurationError)] += 1

    @pytest.mark.parametrize("variable", ["KERNELHUB_CONFIG", "KERNELHUB_LOCK", "KERNELHUB_TUNED"])
    def test_what_is_no_file_keeps_nobody_waiting(self, tmp_path, monkeypatch, variable, counts) -> None:
        os.mkfifo(tmp_path / "pipe.json")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(tmp_path / "s"))
        (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
        q = torch.randn(3, 1, 4, 2, 64)
        names = ["/dev/zero", "/dev/tty", "~nouser/x.json", str(tmp_path), f"{tmp_path}/{'n' * 300}", ""]
        for name in [*names, *(str(tmp_path / name) for name in ("pipe.json", "s", "gone.json"))]:
            monkeypatch.setenv(variable, name)
            counts[outcome(lambda: (kernelhub.reload(), kernelhub.attention(*q)), ConfigurationError)] += 1
        listening.close()


class TestLocks:
    def test_a_holder_is_a_process_of_ours_or_nobody(self, tmp_path, counts) -> None:
        path = tmp_path / "entry.lock"
        good = json.loads(myself("a" * 32).to_text())
        for raw in mutants(Random(SEED), good, MANY):
            path.write_bytes(raw)
            found = Holder.read(path)
            counts["refused" if found is None else "accepted"] += 1
            if found is not None:
                assert found.pid > 0
                assert str(found).isprintable()
                found.ended()
        for pid in (0, -1, -(2**40), 2**40, True, 1.0, "1", None):
            path.write_text(json.dumps(good | {"pid": pid}))
            assert Holder.read(path) is None
        for token in ("../../../home", "a/../../b", "", "A" * 32, "a" * 33, None, "a" * 31 + "\n"):
            path.write_text(json.dumps(good | {"token": token}))
            assert Holder.read(path) is None


GOOD_LINES = [
    "kernelhub.warm('attention', q='float32[1, 8, 4, 64]', causal=True, scale=-0.5, device='cpu')",
    "with kernelhub.use(backend=['triton', 'torch'], strict=True): kernelhub.warm('fp8_gemm', window=(4, -1), x=None)",
    "with kernelhub.use(disable='a'), kernelhub.use(attention='b'): kernelhub.warm('o', w={'layout': 'a'})",
    "kernelhub.warm('o', scale=float('inf'), low=float('-inf'), out_dtype=torch.bfloat16)",
]
# Each runs a command, binds a name or reads what a line has no business with, in a place where a value may stand.
HOSTILE_VALUES = [
    "(kernelhub := canary())", "[canary() for x in (1,)]", "{canary() for x in (1,)}", "{x: canary() for x in (1,)}",
    "(canary() for x in (1,))", "lambda: canary()", "(lambda: canary())()", "canary()", "float(canary())", "float('1')",
    "f'{canary()}'", "__import__('os').system('true')", "torch.load('x')", "torch.float32.__class__", "torch.nn",
    "torch.__dict__", "kernelhub.reload", "1 if canary() else 2", "canary() or 1", "not canary()", "'a' % canary()",
    "'a'.format(canary())", "(1).real", "[1][0]", "[1, *canary()]", "{**canary()}", "1 + canary()", "2 ** 9999999999",
    "'a' * 10 ** 12", "-'a'", "~1", "await canary()", "yield", "...", "b'a'", "1j", "name", "{1}", "{(1,): 2}", "-True",
    "torch.float32()", "torch.torch.float32", "(float)('inf', 1)", "float(x='inf')", "torch.os", "print(canary())",
]  # fmt: skip
HOSTILE_SHAPES = [
    "with kernelhub.use() as kernelhub: kernelhub.warm('o')",
    "with canary(): kernelhub.warm('o')",
    "with kernelhub.use(canary()): kernelhub.warm('o')",
    "kernelhub.warm('o'); canary()",
    "kernelhub.warm(*canary())",
    "kernelhub.warm(**canary())",
    "x = kernelhub.warm('o')",
    "kernelhub = kernelhub.warm('o')",
    "del kernelhub.warm(o)",
    "if kernelhub.warm('o'): canary()",
    "import kernelhub.warm(",
    "canary(kernelhub.warm('o'))",
    "kernelhub.warm('o')()",
    "kernelhub.warm('o').x",
    "kernelhub.warm('o', kernelhub.warm('o'))",
    "@canary\ndef f(): kernelhub.warm('o')",
    "for kernelhub.x in kernelhub.warm('o'): pass",
    "try: kernelhub.warm('o')\nfinally: canary()",
    "kernelhub.warm()",
    "async def f():\n async with kernelhub.use(): kernelhub.warm('o')",
    "kernelhub.warm(3)",
    "kernelhub.warm(" * 5000,
    "kernelhub.warm('" + "a" * 100000 + "')",
    "kernelhub.warm('o', x=" + "[" * 4000 + "]" * 4000 + ")",
    "kernelhub.warm('o', x=" + "-" * 50000 + "1)",
    "kernelhub.warm('o'\x00)",
    "with kernelhub.use(): (kernelhub.warm('o'), canary())",
    "(canary(), kernelhub.warm('o'))",
    "with kernelhub.use():\n kernelhub.warm('o')\n canary()",
    "with kernelhub.warm('o'): kernelhub.use()",
    "os.kernelhub.warm('o')",
]


class TestLines:
    @pytest.mark.parametrize("text", GOOD_LINES)
    def test_what_not_warmed_prints_is_read(self, text) -> None:
        read = line(text)
        assert isinstance(read, Line)
        call = ast.parse(text).body[0]
        call = (call.body[0] if isinstance(call, ast.With) else call).value
        names = {"torch": torch, "float": float, "kernelhub": None}
        said = {word.arg: eval(ast.unparse(word.value), names) for word in call.keywords}
        assert (read.op, read.arguments) == (call.args[0].value, said)

    def test_nothing_is_evaluated(self, monkeypatch, counts) -> None:
        import builtins

        ran = []
        monkeypatch.setattr(builtins, "canary", lambda *given: ran.append(1) or (), raising=False)
        places = ["kernelhub.warm({})", "kernelhub.warm('o', x={})", "kernelhub.warm('o', x=[{}])"]
        places += ["with kernelhub.use(backend={}): kernelhub.warm('o')", "kernelhub.warm('o', x={{'a': ({}, 1)}})"]
        texts = [place.format(value) for value in HOSTILE_VALUES for place in places] + HOSTILE_SHAPES
        for text in texts:
            assert outcome(lambda text=text: line(text), ConfigurationError) == "refused", text
            with pytest.raises(KernelhubError):
                kernelhub.warmup(text, device="cpu") if "kernelhub.warm(" in text else line(text)
        counts["refused"] += len(texts)
        assert ran == []
        assert kernelhub.warm.__module__ == "kernelhub.runtime.warm"
