"""``kernelhub lock``: a file of decisions, and a diff of what would change."""

from __future__ import annotations

import json
import sys

import pytest

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lock_file import read_lock
from kernelhub.evidence import validity

MACHINE = ("--with", "torch=2.13.0", "--with", "triton=3.7.1")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "held.json"


@pytest.fixture
def write(ask, path):
    """Write a lock file of a model for an H200."""

    def run(*words, model="gpt-oss-120b"):
        answer = ask("lock", "--model", model, "--device", "H200", *MACHINE, "--out", str(path), "--force", *words)
        assert (answer.code, answer.err) == (0, "")
        return answer

    return run


class TestWrite:
    def test_every_problem_of_the_model_is_decided(self, write, path):
        answer = write("--tp", "8")
        lock = read_lock(path)
        assert f"{path}: {len(lock.decisions)} decisions for gpt-oss-120b on NVIDIA H200" in answer.out
        assert f"KERNELHUB_LOCK={path}" in answer.out
        assert {item.op for item in lock.decisions} == {"attention", "paged_attention", "route_experts", "fused_moe"}
        assert all(item.kernel and item.versions and item.decided_by for item in lock.decisions)
        decode = next(item for item in lock.decisions if item.op == "paged_attention" and item.phases == ("decode",))
        assert decode.problem["num_q_heads"] == 8
        assert decode.runner_ups
        assert decode.refused["flashinfer.fa3_prefill"].startswith("package_missing: ")
        assert (lock.device, lock.model) == (("nvidia", "sm_90", "NVIDIA H200"), {"name": "gpt-oss-120b", "tp": 8})

    def test_the_same_question_gives_the_same_file(self, write, path):
        write()
        first = path.read_text()
        write()
        assert path.read_text() == first

    def test_a_file_that_is_there_is_not_written_over_without_force(self, ask, path):
        path.write_text("mine")
        words = ("lock", "--model", "llama-3.1-8b", "--device", "H200", *MACHINE, "--out", str(path))
        answer = ask(*words)
        assert (answer.code, answer.out) == (2, "")
        assert f"{path} exists; --force overwrites it" in answer.err
        assert path.read_text() == "mine"
        assert ask(*words, "--force", "--json").json == {"file": str(path), "decisions": 4, "without_kernel": []}

    def test_it_can_go_to_stdout(self, ask):
        answer = ask("lock", "--model", "llama-3.1-8b", "--device", "H200", *MACHINE, "--out", "-")
        assert len(answer.json["decisions"]) == 4

    def test_a_config_json_is_a_model(self, write, path, tmp_path):
        config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
        (tmp_path / "config.json").write_text(json.dumps(config))
        write(model=str(tmp_path))
        assert read_lock(path).decisions[0].problem["head_dim_qk"] == 64

    def test_what_nothing_can_run_is_reported_and_not_held(self, ask, path, monkeypatch):
        monkeypatch.setenv("KERNELHUB_DISABLE", "paged_attention=torch")
        HUB.restore()
        answer = ask(
            "lock", "--model", "llama-3.1-8b", "--device", "H200", "--with", "torch=2.13.0", "--out", str(path)
        )
        assert answer.code == 1
        assert answer.out.count("no kernel can run paged_attention of attention") == 3
        assert [item.kernel for item in read_lock(path).decisions if item.op == "paged_attention"] == [""] * 3
        monkeypatch.setenv("KERNELHUB_LOCK", str(path))
        kernelhub.reload()
        selection = kernelhub.explain("paged_attention", device="H200", num_kv_heads=8, causal=False)
        assert selection.source != "lock"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ((), "--model: name a model or a config.json"),
            (("--model", "lama-3.1-8b"), "did you mean llama-3.1-8b"),
            (("--model", "llama-3.1-8b", "--tp", "3"), "num_attention_heads is 32, which 3 ranks cannot share evenly"),
            (("--model", "llama-3.1-8b", "--versions"), "belongs to --check"),
            (("--model", "llama-3.1-8b", "--out", "/nonexistent/x"), "--out /nonexistent/x: No such file"),
            (("--check", "/nonexistent/x"), "lock file /nonexistent/x: No such file"),
        ],
    )
    def test_wrong_usage_is_reported(self, ask, words, message):
        answer = ask("lock", *words)
        assert (answer.code, answer.out) == (2, "")
        assert message in answer.err


class TestCheck:
    def test_nothing_changes_on_the_same_machine(self, ask, write, path):
        write()
        answer = ask("lock", "--check", str(path), *MACHINE)
        assert answer.code == 0
        assert "11 decisions for gpt-oss-120b: 11 the same" in answer.out

    def test_a_change_is_a_diff_with_line_reason_and_exit_code(self, ask, write, path):
        write()
        text = path.read_text()
        assert text.count('"kernel": "triton.prefill"') == 1  # of the layers with a window
        path.write_text(text.replace('"kernel": "triton.prefill"', '"kernel": "torch.blocked"', 1))
        answer = ask("lock", "--check", str(path), *MACHINE)
        assert answer.code == 1
        line = next(n for n, row in enumerate(path.read_text().splitlines(), 1) if '"kernel": "torch.blocked"' in row)
        rows = answer.out.splitlines()
        assert "10 the same, 1 changed" in rows[0]
        assert rows[1].startswith(f"@@ {path}:{line} attention, prefill,")
        assert rows[3].startswith("- torch.blocked")
        assert rows[4].startswith("+ triton.prefill triton 3.7.1  (order: ")
        assert "torch.blocked could still run" in rows[5]

    def test_an_upgrade_is_asked_beforehand(self, ask, write, path):
        write()
        answer = ask("lock", "--check", str(path), "--with", "torch=2.13.0")
        assert answer.code == 1
        assert "is refused now: package_missing: triton is not installed" in answer.out

    def test_other_versions_alone_are_reported_and_count_only_if_asked(self, ask, write, path):
        write()
        newer = ("--with", "torch=2.13.0", "--with", "triton=3.7.2")
        told = ask("lock", "--check", str(path), *newer)
        assert told.code == 0
        assert "triton 3.7.1 -> 3.7.2" in told.out
        assert ask("lock", "--check", str(path), *newer, "--versions").code == 1

    def test_what_the_file_lacks_and_what_is_no_more_are_reported(self, ask, write, path):
        write()
        document = json.loads(path.read_text())
        del document["decisions"][0]
        document["decisions"][0]["problem"]["old_facet"] = 1
        path.write_text(json.dumps(document))
        answer = ask("lock", "--check", str(path), *MACHINE, "--json")
        assert answer.code == 1
        kinds = [item["kind"] for item in answer.json["differences"]]
        assert kinds == ["gone", "new", "new"]
        assert "has no facet 'old_facet'" in answer.json["differences"][0]["why"]

    def test_the_lock_in_force_does_not_decide_the_check_nor_keep_a_new_file_from_being_written(
        self, ask, write, path, monkeypatch
    ):
        write()
        path.write_text(path.read_text().replace('"kernel": "triton.prefill"', '"kernel": "torch.blocked"'))
        monkeypatch.setenv("KERNELHUB_LOCK", str(path))
        assert ask("lock", "--check", str(path), *MACHINE).code == 1
        path.write_text(path.read_text().replace('"causal"', '"casual"'))
        write()
        assert ask("lock", "--check", str(path), *MACHINE).code == 0

    def test_what_a_variable_changes_is_a_change(self, ask, write, path, monkeypatch):
        write()
        monkeypatch.setenv("KERNELHUB_PREFER", "torch")
        HUB.restore()
        answer = ask("lock", "--check", str(path), *MACHINE)
        assert answer.code == 1
        assert "(environment: preferred by KERNELHUB_PREFER=torch)" in answer.out

    def test_a_file_of_an_unknown_device_requires_it(self, ask, write, path):
        write()
        path.write_text(path.read_text().replace("NVIDIA H200", "NVIDIA H20"))
        answer = ask("lock", "--check", str(path))
        assert answer.code == 2
        assert "is for NVIDIA H20, sm_90, not for this machine" in answer.err


RECORDS = """
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.ops.moe.routing.problem import ROUTE_EXPERTS
schema = ROUTE_EXPERTS.schema
BACKEND = Backend("mine", "a router of a third party")
KERNELS = (
    Kernel(
        op="route_experts",
        name="mine.router",
        target="mine:Router",
        summary="routes",
        band=Band.PLUGIN,
        constraints=(anything(*schema.facets),),
        features=schema.features,
        standings=(verified("*", evidence="a test's own"),),
    ),
)
"""


def test_a_third_party_s_version_and_source_are_pinned(ask, write, path, tmp_path, monkeypatch):
    module = tmp_path / "mine.py"
    module.write_text(RECORDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    info = tmp_path / "mine_kernels-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-kernels\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[kernelhub.backends]\nmine = mine\n")
    write()
    (locked,) = [item for item in read_lock(path).decisions if item.kernel == "mine.router"]
    assert locked.versions["mine-kernels"] == "1.2"
    assert len(locked.versions["source of mine"]) == 16
    assert ask("lock", "--check", str(path), *MACHINE).code == 0
    module.write_text(RECORDS + "# another source\n")
    validity._digest_of_sources.cache_clear()
    answer = ask("lock", "--check", str(path), *MACHINE)
    assert answer.code == 1
    assert "source of mine differs from the one that the file was written with" in answer.out


def test_a_lock_in_force_is_seen_in_a_process_of_its_own(ask_shell, write, path):
    write()
    path.write_text(path.read_text().replace('"kernel": "triton.split_kv"', '"kernel": "torch.blocked"'))
    words = (
        "explain",
        "paged_attention",
        "--device",
        "H200",
        *MACHINE,
        "--no-causal",
        "--head-dim-qk",
        "64",
        "--sinks",
    )
    answer = ask_shell(*words, "--num-q-heads", "64", "--num-kv-heads", "8", env={"KERNELHUB_LOCK": str(path)})
    assert answer.code == 0
    assert answer.out.splitlines()[0].endswith(": torch.blocked")
    assert f"decided by  lock, {path}:" in answer.out


def test_env_lists_a_lock_file_that_cannot_be_read(ask, monkeypatch, path):
    monkeypatch.setenv("KERNELHUB_LOCK", str(path))
    answer = ask("env")
    assert answer.code == 2
    assert f"wrong: KERNELHUB_LOCK: lock file {path}: No such file" in answer.out
