"""``kernelhub env``: every variable, its value and where that came from."""

from __future__ import annotations

import pytest

from kernelhub.dispatch.settings import VARIABLES


def variables(answer):
    return {variable["name"]: variable for variable in answer.json["variables"]}


class TestFine:
    def test_every_variable_is_listed_with_grammar_and_meaning(self, ask):
        answer = ask("env", "--json")
        assert answer.code == 0
        listed = variables(answer)
        assert list(listed) == list(VARIABLES)
        for name, variable in listed.items():
            assert variable["source"] == "default"
            assert variable["grammar"] == VARIABLES[name].grammar
            assert variable["meaning"] == VARIABLES[name].doc

    def test_a_variable_that_is_set_shows_its_value_and_source(self, ask, monkeypatch):
        monkeypatch.setenv("KERNELHUB_STRICT", "yes")
        strict = variables(ask("env", "--json"))["KERNELHUB_STRICT"]
        assert (strict["value"], strict["source"], strict["text"]) == (True, "environment", "yes")
        assert ask("env").row("KERNELHUB_STRICT").split()[1:3] == ["yes", "environment"]

    def test_a_default_is_shown_as_it_would_be_written(self, ask):
        answer = ask("env")
        assert answer.row("KERNELHUB_PLUGINS").split()[1:3] == ["all", "default"]
        assert answer.row("KERNELHUB_LOAD_TIMEOUT_S").split()[1:3] == ["120", "default"]
        assert answer.row("KERNELHUB_FORCE").split()[1:3] == ["unset", "default"]


class TestConfigFile:
    @pytest.fixture
    def config(self, tmp_path, monkeypatch):
        path = tmp_path / "kernelhub.toml"
        monkeypatch.setenv("KERNELHUB_CONFIG", str(path))
        return path

    def test_what_is_read_is_reported(self, ask, config):
        config.write_text('disable = ["triton"]\nstrict = true\n[prefer]\nattention = "torch.sdpa"\n')
        answer = ask("env", "--json")
        assert answer.code == 0
        says = ["prefer torch.sdpa for attention", "disable triton", "strict on"]
        assert answer.json["config_file"] == {"path": str(config), "says": says}
        assert f"config file: {config}: {'; '.join(says)}" in ask("env").out

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            (None, "No such file or directory"),
            ("strict = maybe", "not TOML"),
            ("stict = true", "unknown key 'stict' (did you mean strict?)"),
            ('disable = "tritn"', "'tritn' is not a backend or kernel (did you mean triton?)"),
        ],
        ids=["absent", "not TOML", "unknown key", "unknown backend"],
    )
    def test_a_file_that_cannot_hold_is_invalid_with_the_reason(self, ask, config, text, problem):
        if text is not None:
            config.write_text(text)
        answer = ask("env", "--json")
        assert answer.code == 2
        wrong = variables(answer)["KERNELHUB_CONFIG"]
        assert wrong["source"] == "invalid"
        assert problem in wrong["problem"]


class TestWrong:
    @pytest.mark.parametrize(
        ("name", "text", "problem"),
        [
            ("KERNELHUB_STRICT", "maybe", "'maybe' is neither true"),
            ("KERNELHUB_FORCE", "tritn", "did you mean triton?"),
            ("KERNELHUB_DISABLE", "atention=triton", "did you mean attention?"),
            ("KERNELHUB_PLUGINS", "sunken", "no installed plugin is named 'sunken'"),
            ("KERNELHUB_LOAD_TIMEOUT_S", "soon", "not a positive number of seconds"),
            ("KERNELHUB_FORSE", "triton", "did you mean KERNELHUB_FORCE?"),
        ],
    )
    def test_it_is_invalid_with_the_reason_and_the_rest_is_still_listed(self, ask, monkeypatch, name, text, problem):
        monkeypatch.setenv(name, text)
        monkeypatch.setenv("KERNELHUB_LOG", "selection")
        answer = ask("env", "--json")
        assert answer.code == 2
        listed = variables(answer)
        assert set(listed) == {*VARIABLES, name}
        assert (listed[name]["source"], listed[name]["value"]) == ("invalid", None)
        assert problem in listed[name]["problem"]
        assert [other for other in listed if listed[other]["problem"]] == [name]
        assert listed["KERNELHUB_LOG"]["source"] == "environment"

    def test_all_wrong_ones_are_reported_at_once(self, ask, monkeypatch):
        for name, text in (("KERNELHUB_STRICT", "maybe"), ("KERNELHUB_PLUGINS", "sunken"), ("KERNELHUB_X", "1")):
            monkeypatch.setenv(name, text)
        answer = ask("env")
        assert answer.code == 2
        assert answer.out.count("\nwrong: ") == 3
        for name in ("KERNELHUB_STRICT", "KERNELHUB_PLUGINS", "KERNELHUB_X"):
            assert answer.row(name).split()[2] == "invalid"


@pytest.mark.usefixtures("no_engine_variables")
class TestEngines:
    """Variables of vLLM, FlashInfer and DeepGEMM that are set, and what follows from each."""

    def test_each_is_reported_with_what_follows_and_how_it_is_written_now(self, ask, monkeypatch):
        monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON_ATTN")
        monkeypatch.setenv("VLLM_USE_DEEPGEMM", "0")
        monkeypatch.setenv("DG_JIT_CACHE_DIR", "/dev/null/cache")
        answer = ask("env", "--json")
        assert answer.code == 0  # another project's mistake keeps no call from running
        engines = {item["name"]: item for item in answer.json["engines"]}
        attention = engines["VLLM_ATTENTION_BACKEND"]
        assert attention["follows"] == "paged_attention runs on triton or fails; attention prefers it"
        assert attention["successor"] == "--attention-backend NAME"
        assert {"op": "paged_attention", "names": ["triton"]} in attention["overrides"]
        assert engines["VLLM_USE_DEEPGEMM"]["follows"].endswith("did you mean VLLM_USE_DEEP_GEMM?")
        assert engines["DG_JIT_CACHE_DIR"]["problem"]
        assert "TRITON_ATTN" in ask("env").row("VLLM_ATTENTION_BACKEND")

    def test_without_any_nothing_is_said_of_them(self, ask):
        assert ask("env", "--json").json["engines"] == []
        assert "effect" not in ask("env").out

    def test_what_is_switched_off_or_means_no_kernel_here_says_so(self, ask, monkeypatch):
        monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TOKENSPEED_MLA")
        (engine,) = ask("env", "--json").json["engines"]
        assert engine["follows"].startswith("ignored: ")
        assert engine["follows"].endswith("no kernel of tokenspeed is registered here for mla_attention")
        monkeypatch.setenv("KERNELHUB_IGNORE_VLLM_ENV", "1")
        (engine,) = ask("env", "--json").json["engines"]
        assert engine["follows"] == "ignored: KERNELHUB_IGNORE_VLLM_ENV is set"

    def test_doctor_notes_what_is_wrong_and_what_has_a_successor(self, ask, monkeypatch):
        monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON_ATTN")
        monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", "naive")
        facts = {fact["what"]: fact for fact in ask("doctor", "--json").json["facts"]}
        assert facts["VLLM_ATTENTION_BACKEND=TRITON_ATTN"]["status"] == "note"
        assert "--attention-backend NAME" in facts["VLLM_ATTENTION_BACKEND=TRITON_ATTN"]["meaning"]
        assert facts["VLLM_ALL2ALL_BACKEND=naive"]["remedy"] == "write --all2all-backend"
