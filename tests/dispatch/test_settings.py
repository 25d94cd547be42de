"""Variables and the config file: typed, told apart by source, and never ignored in silence."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import kernelhub
from kernelhub.dispatch.settings import VARIABLES, parse_bool, parse_overrides, read_file, read_settings
from kernelhub.errors import ConfigurationError
from tests.dispatch.backends import qkv


class TestValues:
    @pytest.mark.parametrize("text", ["1", "true", "TRUE", " yes ", "on"])
    def test_true(self, text: str) -> None:
        assert parse_bool(text) is True

    @pytest.mark.parametrize("text", ["0", "false", "No", " off ", "", " 0 "])
    def test_false(self, text: str) -> None:
        assert parse_bool(text) is False

    @pytest.mark.parametrize("text", ["2", "None", "enable", "tru"])
    def test_neither_is_an_error(self, text: str) -> None:
        with pytest.raises(ValueError, match="neither true"):
            parse_bool(text)

    @pytest.mark.parametrize(
        ("text", "pairs"),
        [
            ("triton", (("*", ("triton",)),)),
            ("triton, torch", (("*", ("triton", "torch")),)),
            ("attention=triton;paged_*=torch,triton", (("attention", ("triton",)), ("paged_*", ("torch", "triton")))),
            (" ; ", ()),
            ("", ()),
        ],
    )
    def test_overrides(self, text: str, pairs: object) -> None:
        assert parse_overrides(text) == pairs

    @pytest.mark.parametrize("text", ["attention=", "=triton", "attention=,;"])
    def test_half_a_override_is_an_error(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"is not \[op=\]name"):
            parse_overrides(text)


BOTH_OF_THEM = "KERNELHUB_PREFER=[op=]NAME, or KERNELHUB_FORCE=[op=]NAME, which fails if it is not supported"


class TestEnvironment:
    @pytest.mark.fault("wrong_variable")
    def test_an_unknown_variable_is_an_error_with_the_nearest_name(self) -> None:
        with pytest.raises(
            ConfigurationError, match=r"unknown variable KERNELHUB_DISABLED.*did you mean KERNELHUB_DISABLE"
        ):
            read_settings({"KERNELHUB_DISABLED": "x"})

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("KERNELHUB_BACKEND", BOTH_OF_THEM),
            ("KERNELHUB_KERNELS", BOTH_OF_THEM),
            ("KERNELHUB_PAGED_ATTENTION_BACKEND", BOTH_OF_THEM),
            ("KERNELHUB_FORCE_BACKEND", "KERNELHUB_FORCE"),
            ("KERNELHUB_PREFERRED_BACKEND", "KERNELHUB_PREFER"),
            ("KERNELHUB_DISABLED_KERNELS", "KERNELHUB_DISABLE"),
            ("KERNELHUB_CACHE", "KERNELHUB_CACHE_DIR"),
        ],
    )
    @pytest.mark.fault("wrong_variable")
    def test_a_variable_that_names_backends_is_answered_with_those_that_choose_them(
        self, name: str, meant: str
    ) -> None:
        with pytest.raises(ConfigurationError, match="unknown variable") as caught:
            read_settings({name: "triton"})
        assert str(caught.value).startswith(f"unknown variable {name} (did you mean {meant}?); see ")

    @pytest.mark.fault("wrong_variable")
    def test_a_variable_that_is_like_none_is_answered_with_no_name(self) -> None:
        with pytest.raises(ConfigurationError, match=r"^unknown variable KERNELHUB_XYZ; see `kernelhub env`$"):
            read_settings({"KERNELHUB_XYZ": "1"})

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("KERNELHUB_STRICT", "maybe"),
            ("KERNELHUB_LOAD_TIMEOUT_S", "soon"),
            ("KERNELHUB_LOAD_TIMEOUT_S", "-1"),
            ("KERNELHUB_LOAD_TIMEOUT_S", "inf"),
            ("KERNELHUB_LOG", "everything"),
            ("KERNELHUB_FORCE", "="),
        ],
    )
    @pytest.mark.fault("wrong_variable")
    def test_a_bad_value_names_the_variable_and_its_grammar(self, name: str, text: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            read_settings({name: text})
        assert name in str(caught.value)
        assert VARIABLES[name].grammar in str(caught.value)

    def test_values_know_where_they_come_from(self) -> None:
        settings = read_settings({"KERNELHUB_STRICT": "0"})
        assert (settings["KERNELHUB_STRICT"], settings.values["KERNELHUB_STRICT"].source) == (False, "environment")
        assert settings.values["KERNELHUB_FORCE"].source == "default"

    def test_an_explicit_false_is_not_the_same_as_silence(self) -> None:
        assert read_settings({"KERNELHUB_STRICT": "0"}).environment.strict is False
        assert read_settings({}).environment.strict is None

    @pytest.mark.parametrize("text", ["", " ", "\t\n"])
    @pytest.mark.fault("wrong_variable")
    def test_an_empty_variable_is_the_same_as_none(self, text: str) -> None:
        silent, blank = read_settings({}), read_settings(dict.fromkeys(VARIABLES, text))
        assert blank.values == silent.values
        assert (blank.lock, blank.environment.strict) == (None, None)

    @pytest.mark.parametrize("name", ["KERNELHUB_CONFIG", "KERNELHUB_LOCK"])
    @pytest.mark.fault("wrong_variable")
    def test_a_file_that_cannot_be_read_is_named_with_its_variable(
        self, name: str, tmp_path: Path, monkeypatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        for text, path in ((str(tmp_path / "absent"), tmp_path / "absent"), ("~/other", tmp_path / "other")):
            with pytest.raises(ConfigurationError, match=f"^{name}.*{path}: No such file"):
                read_settings({name: text})
        with pytest.raises(ConfigurationError, match=f"{name}: '~nobody-here/x' is not in the home folder of a known"):
            read_settings({name: "~nobody-here/x"})

    def test_every_variable_is_documented(self) -> None:
        for variable in VARIABLES.values():
            assert variable.doc.endswith(".")
            assert variable.grammar

    @pytest.mark.parametrize("name", ["KERNELHUB_FORCE", "KERNELHUB_PREFER", "KERNELHUB_DISABLE"])
    def test_a_word_that_means_no_kernel_is_an_error_at_the_first_call(self, name: str, monkeypatch) -> None:
        monkeypatch.setenv(name, "tritn")
        with pytest.raises(ConfigurationError, match=f"{name}=tritn: 'tritn' is not a backend.*did you mean triton"):
            kernelhub.reload()

    def test_the_environment_is_read_once_and_again_on_reload(self, monkeypatch) -> None:
        operands = qkv()
        assert kernelhub.explain(kernelhub.attention, *operands).selected == "cpp.split_kv"
        monkeypatch.setenv("KERNELHUB_PREFER", "torch.blocked")
        assert kernelhub.explain(kernelhub.attention, *operands).selected == "cpp.split_kv"
        kernelhub.reload()
        selection = kernelhub.explain(kernelhub.attention, *operands)
        assert (selection.selected, selection.source) == ("torch.blocked", "environment")
        assert "KERNELHUB_PREFER=torch.blocked" in selection.because

    def test_no_variable_is_read_on_a_cached_call(self, monkeypatch) -> None:
        class Watched(dict[str, str]):
            reads = 0

            def __getitem__(self, name: str) -> str:
                Watched.reads += 1
                return super().__getitem__(name)

            def get(self, name: str, default: object = None) -> object:
                Watched.reads += 1
                return super().get(name, default)

        operands = qkv()
        kernelhub.attention(*operands)
        with monkeypatch.context() as patch:
            patch.setattr("os.environ", Watched(os.environ))
            kernelhub.attention(*operands)
        assert Watched.reads == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib: the config file's 9 cases")
class TestFile:
    def write(self, tmp_path: Path, text: str) -> Path:
        path = tmp_path / "kernelhub.toml"
        path.write_text(text)
        return path

    def test_it_prefers_disables_and_sets_flags(self, tmp_path: Path, monkeypatch) -> None:
        path = self.write(
            tmp_path,
            'disable = "torch.packed"\ndeterministic = false\n[prefer]\nattention = ["torch.blocked", "torch"]\n',
        )
        monkeypatch.setenv("KERNELHUB_CONFIG", str(path))
        kernelhub.reload()
        selection = kernelhub.explain(kernelhub.attention, *qkv())
        assert (selection.selected, selection.source) == ("torch.blocked", "file")
        assert str(path) in selection.because

    def test_the_environment_is_stronger(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_CONFIG", str(self.write(tmp_path, 'prefer = "torch.blocked"')))
        monkeypatch.setenv("KERNELHUB_PREFER", "torch.sdpa")
        kernelhub.reload()
        assert kernelhub.explain(kernelhub.attention, *qkv()).selected == "torch.sdpa"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("prefr = 'torch'", "unknown key 'prefr'.*did you mean prefer"),
            ("[log]", "unknown key 'log'; the keys are prefer, disable, deterministic, batch_invariant, strict, trust"),
            ("force = 'torch'", "a file cannot force"),
            ("strict = 'yes'", "strict must be true or false"),
            ("prefer = 3", "must be a name or a list of names"),
            ("prefer = [", "not TOML"),
        ],
    )
    def test_what_it_cannot_mean_is_an_error(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            read_file(self.write(tmp_path, text))

    def test_a_missing_file_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="No such file"):
            read_file(tmp_path / "absent.toml")
