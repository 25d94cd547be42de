"""What each command prints with ``--json`` is what its published schema says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelhub.cli import showcase
from kernelhub.cli.main import COMMANDS
from kernelhub.cli.schemas import SHAPES, schema_of
from tests.cli.small import SMALL

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: all cases")
SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
ASKED = (
    "backends",
    "backends --all",
    "backends --op attention",
    "backends --op fp8_gemm --matrix",
    "bench merge_attention_states --backend torch --tokens 1 --budget-s 0.02",
    "cache check",
    "cache clear --yes",
    "cache env",
    "cache list",
    "cache path",
    "doctor",
    "doctor --all",
    "env",
    "env --all",
    "explain attention --device H200",
    "explain attention --device H200 --all",
    "explain attention --backend flashinfer --device CPU",
    "explain fp8_gemm --device B200 --packing",
    "explain all_reduce_rms_norm --device CPU --format fp8_group --backend comm_pairs.sum_then_quant",
    "explain expert_parallel_moe --device H200 --world-size 4",
    "info triton.split_kv",
    "lock --model llama-3.1-8b --device H200 --out FOLDER/lock.json",
    "lock --check FOLDER/lock.json --device H200 --with triton=3.5.0",
    "replay",
    "verify merge_attention_states --backend torch --quick",
    "warmup --model llama-3.1-8b --device H200 --list",
)
SLOW = (
    "demo --quick",
    "tune --model gpt-oss-120b --tp 8 --op route_experts --device cpu --backend torch --tokens 2 --samples 5",
    "tune --export FOLDER/table.json",
    "warmup --model llama-3.1-8b --phase decode --tokens 1 --no-verify --device cpu",
)


def test_every_command_has_a_published_schema() -> None:
    assert set(SHAPES) == set(COMMANDS)
    for command in COMMANDS:
        jsonschema.Draft202012Validator.check_schema(schema_of(command))
        assert json.loads((SCHEMAS / f"{command}.json").read_text()) == schema_of(command), (
            "run scripts/generate_docs.py"
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("asked")


@pytest.mark.xdist_group("schemas")
class TestPrinted:
    @pytest.mark.parametrize("words", ASKED)
    def test_it_is_of_its_schema(self, words, ask, folder, monkeypatch) -> None:
        self.check(words, ask, folder, monkeypatch)

    @pytest.mark.parametrize("words", SLOW)
    def test_it_is_of_its_schema_where_much_runs(self, words, ask, folder, monkeypatch) -> None:
        self.check(words, ask, folder, monkeypatch)

    def check(self, words, ask, folder, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(folder / "cache"))
        monkeypatch.setitem(showcase.QUICK, "cpu", SMALL)
        asked = words.replace("FOLDER", str(folder)).split()
        answer = ask(*asked, "--json")
        assert answer.code in (0, 1), answer.err
        jsonschema.validate(answer.json, schema_of(asked[0]))
