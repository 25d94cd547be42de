"""With ``--json`` the document is all there is on standard output, whatever libraries print there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kernelhub.cli.console import alone_on_stdout

_TALKATIVE = """
import ctypes, os, sys
import kernelhub.cli.main, kernelhub.cli.env

def run(arguments, console):
    print("of Python")
    ctypes.CDLL(None).printf(b"of C\\n")
    os.system("echo of a child")
    console.json({"answer": 42})
    return 0

kernelhub.cli.env.run = run
code = kernelhub.cli.main.main(["env", *sys.argv[1:]])
print("afterwards")
sys.exit(code)
"""


def asked(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _TALKATIVE, *words], capture_output=True, text=True, timeout=120)


def test_what_libraries_print_goes_to_standard_error() -> None:
    answer = asked("--json")
    assert answer.returncode == 0, answer.stderr
    document, after = answer.stdout.removesuffix("afterwards\n"), answer.stdout.endswith("afterwards\n")
    assert json.loads(document) == {"answer": 42}
    assert after, "standard output is what it was once the command is done"
    assert all(told in answer.stderr for told in ("of Python", "of C", "of a child"))


def test_text_for_people_is_not_diverted() -> None:
    assert "of Python" in asked().stdout


def test_a_stream_in_memory_is_kept_too(capsys) -> None:
    with alone_on_stdout() as stream:
        print("{}", file=stream)
        print("noise")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("{}\n", "noise\n")


def test_an_error_gives_standard_output_back(capfd) -> None:
    with pytest.raises(KeyError), alone_on_stdout():
        raise KeyError
    print("here", flush=True)
    assert capfd.readouterr().out == "here\n"
