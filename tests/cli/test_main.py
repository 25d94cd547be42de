"""The command as a whole: help, version, errors, exit codes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import kernelhub
from kernelhub.cli.completion import parser_for
from kernelhub.cli.main import COMMANDS

# What has a command that measures for minutes end after one problem class.
SHORTLY = {"tune": ("--backend", "torch", "--tokens", "1", "--samples", "2", "--budget-s", "5")}


class TestHelp:
    def test_without_a_word_it_shows_every_command_with_an_example(self, ask):
        answer = ask()
        assert answer.code == 0
        for name, command in COMMANDS.items():
            assert re.search(rf"^  {name} ", answer.out, re.MULTILINE)
            assert f"$ {command.example}" in answer.out

    def test_help_by_either_flag_is_the_same(self, ask):
        assert ask("--help").out == ask("-h").out == ask().out

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_has_help_and_offers_json(self, ask, command):
        answer = ask(command, "--help")
        assert answer.code == 0
        assert "--json" in answer.out
        assert COMMANDS[command].summary in " ".join(answer.out.split())

    @pytest.mark.parametrize("command", [name for name in COMMANDS if name != "demo"])
    def test_every_example_runs(self, ask, command):
        words = COMMANDS[command].example.split()
        assert words[0] == "kernelhub"
        assert ask(*words[1:], *SHORTLY.get(command, ())).code == 0

    def test_version(self, ask):
        assert ask("--version").out == ask("-V").out == f"kernelhub {kernelhub.__version__}\n"

    def test_help_of_a_command_is_that_of_its_flag(self, ask):
        assert ask("help").out == ask("--help").out
        assert ask("help", "doctor").out == ask("doctor", "--help").out


class TestCompletion:
    def test_commands_options_ops_models_and_devices_are_known(self):
        commands = (
            parser_for({name: command.summary for name, command in COMMANDS.items()}, ["explain", "attention"])
            ._subparsers._group_actions[0]
            .choices
        )
        assert set(commands) == set(COMMANDS)
        actions = {action.dest: action for action in commands["explain"]._actions}
        assert "paged_attention" in actions["op"].choices
        assert "llama-3.1-8b" in actions["model"].choices
        assert {"H200", "cpu"} <= set(actions["device"].choices)
        assert "--head-dim-qk" in actions["facet_head_dim_qk"].option_strings

    def test_without_argcomplete_a_shell_gets_no_answer(self, ask, monkeypatch):
        monkeypatch.setenv("_ARGCOMPLETE", "1")
        monkeypatch.setitem(sys.modules, "argcomplete", None)
        assert ask("--help").out == ""


class TestImports:
    def test_help_and_version_load_neither_torch_nor_rich(self):
        code = (
            "import sys; from kernelhub.cli.main import main; main(['--help']); main(['--version']);"
            "print([name for name in ('torch', 'rich') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"

    @pytest.mark.parametrize(
        "words",
        [
            *((command, "--help") for command in COMMANDS),
            ("explain", "paged_attention", "--help"),
            ("explain", "paged_attention", "--device", "H200", "--model", "llama-3.1-8b"),
            ("explain", "fused_moe", "--device", "B200", "--model", "mixtral-8x7b", "--json"),
            ("lock", "--model", "deepseek-v3.2", "--tp", "8", "--device", "H200", "--out", "-"),
            ("backends", "--matrix", "--op", "attention"),
            ("env",),
            ("cache", "path"),
            ("replay",),
        ],
        ids=" ".join,
    )
    def test_what_runs_no_kernel_and_asks_no_device_does_not_load_torch(self, ask_shell, words):
        before = "import atexit, os; atexit.register(lambda: 'torch' in sys.modules and os._exit(77))"
        answer = ask_shell(*words, before=before)
        assert answer.code == 0, answer.err

    def test_the_library_does_not_load_the_command_line(self):
        code = (
            "import sys, kernelhub; kernelhub.attention.kernels();"
            "print([name for name in ('kernelhub.cli', 'rich') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"


class TestErrors:
    def test_a_misspelt_command_is_answered_with_the_nearest(self, ask):
        answer = ask("docter")
        assert (answer.code, answer.out) == (2, "")
        assert "'docter' is not a command (did you mean doctor?)" in answer.err

    def test_a_misspelt_flag_is_answered_with_the_nearest(self, ask):
        answer = ask("explain", "attention", "--head-dim-qq", "64")
        assert (answer.code, answer.out) == (2, "")
        assert "--head-dim-qq" in answer.err
        assert "did you mean --head-dim-qk?" in answer.err

    @pytest.mark.parametrize(
        ("words", "nearest"),
        [
            ("lock --model llama-3.1-8b --quantization fp8blok --out -", "fp8_block"),
            ("lock --model llama-3.1-8b --dtype bflot16 --out -", "bfloat16"),
            ("lock --model lama-3.1-8b --out -", "llama-3.1-8b"),
            ("warmup --model llama-3.1-8b --phase decod --list", "decode"),
            ("warmup --model llama-3.1-8b --device H20 --list", "H200"),
            ("tune --model gpt-oss-120b --op route_expert", "route_experts"),
            ("tune --model gpt-oss-120b --op route_experts --backend tirton", "triton"),
            ("tune --model gpt-oss-120b --op route_experts --device cup", "cpu"),
            ("verify atention", "attention"),
            ("verify attention --backend triton.prefil", "triton.prefill"),
            ("bench atention", "attention"),
            ("bench attention --backend triton.split_vk", "triton.split_kv"),
            ("bench attention --shape num_q_head=3", "num_q_heads"),
            ("bench attention --shape q_dtype=bflot16", "bfloat16"),
            ("bench attention --q-dtype bflot16", "bfloat16"),
            ("bench attention --device cdua", "cuda"),
            ("info tirton.split_kv", "triton.split_kv"),
            ("explain fused_moe --activation slu", "silu"),
            ("explain attention --with flashinfre=0.6", "flashinfer"),
            ("explain attention --without cubin --with triton=3.5.0", "cubins"),
            ("demo --device cdua", "cuda"),
            ("cache lst", "list"),
            ("cache list tirton", "triton"),
            ("cache list --stael", "--stale"),
            ("backends --op atention", "attention"),
        ],
    )
    def test_a_misspelt_name_of_a_known_list_is_answered_with_the_nearest(self, ask, words, nearest):
        answer = ask(*words.split())
        assert (answer.code, answer.out) == (2, "")
        assert f"(did you mean {nearest}?)" in answer.err

    def test_a_flag_is_not_guessed_from_its_beginning(self, ask):
        assert ask("explain", "attention", "--dev", "H200").code == 2

    @pytest.mark.parametrize(
        "words",
        [("explain",), ("explain", "attention", "--page-size", "x"), ("demo", "--device", "tpu"), ("env", "now")],
        ids=" ".join,
    )
    def test_wrong_usage_is_one_message_and_exit_2(self, ask, words):
        answer = ask(*words)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith("kernelhub: ")
        assert "--help" in answer.err or "did you mean" in answer.err

    @pytest.mark.parametrize("command", ["backends", "demo"])
    def test_a_misspelt_variable_is_one_message_and_exit_2(self, ask, monkeypatch, command):
        monkeypatch.setenv("KERNELHUB_FORSE", "torch")
        answer = ask(command, "--json")
        assert (answer.code, answer.out) == (2, "")
        assert "unknown variable KERNELHUB_FORSE (did you mean KERNELHUB_FORCE?)" in answer.err
        assert "Traceback" not in answer.err

    def test_a_reader_that_leaves_early_sees_no_error(self):
        command = f"{sys.executable} -m kernelhub backends --json | head -n 1"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("{\n", "")

    @pytest.mark.parametrize(
        "words", ["env --json", "env", "--version", "lock --model llama-3.1-8b --device H200 --out -"]
    )
    def test_an_output_on_a_full_disk_is_one_message_and_exit_2(self, words):
        done = _in_a_shell(f"{words} > /dev/full")
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "the output cannot be written: No space left on device" in done.stderr

    @pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
    @pytest.mark.parametrize("words", ["env --json", "backends"])
    def test_streams_that_a_service_has_closed_change_nothing_else(self, words, closed):
        done = _in_a_shell(f"{words} {closed}")
        assert (done.returncode, done.stderr) == (0, "")
        assert bool(done.stdout) is (">&-" not in closed.split())

    @pytest.mark.parametrize("package", ["torch", "packaging"])
    def test_a_required_package_that_is_missing_is_one_message_and_exit_2(self, ask_shell, package):
        answer = ask_shell("backends", before=f"sys.modules[{package!r}] = None")
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith(f"kernelhub: {package} cannot be imported: ")
        assert answer.err.count("\n") == 1
        assert f"install it for {sys.executable}" in answer.err

    def test_an_import_error_of_our_own_is_not_taken_for_that(self, ask_shell):
        answer = ask_shell("backends", before="sys.modules['kernelhub.cli.here'] = None")
        assert answer.code == 1
        assert "Traceback" in answer.err


def _in_a_shell(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} -m kernelhub {words}"], capture_output=True, text=True, timeout=120
    )


def test_as_a_module_it_is_the_same_command(ask_shell):
    answer = ask_shell("--version")
    assert (answer.code, answer.out) == (0, f"kernelhub {kernelhub.__version__}\n")
