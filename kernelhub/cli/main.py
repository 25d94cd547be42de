"""Entry of the command ``kernelhub``.

Exit codes: 0, success; 1, a negative result (no kernel can run, a result is wrong, `doctor` found a problem that makes
calls fail); 2, wrong usage or a wrong setting. An error is one message on stderr. Only the module of the given command
is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import importlib
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import kernelhub
from kernelhub.cli.console import alone_on_stdout, console_for
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError, KernelhubError, KernelUnavailable, NoKernel

_INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C
_REQUIRED = "torch", "packaging"
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # where the output goes to a file


@dataclass(frozen=True)
class Command:
    """A command: its summary, and an example of its use."""

    summary: str
    example: str


COMMANDS = {
    "demo": Command("run real attention here: each kernel, its error and its speed", "kernelhub demo --quick"),
    "doctor": Command("check this machine, and print what each finding means and what to do", "kernelhub doctor"),
    "backends": Command("list the backends, and how many of their kernels can run here", "kernelhub backends"),
    "info": Command("print what a kernel accepts, needs and lacks", "kernelhub info triton.split_kv"),
    "explain": Command(
        "print which kernel is selected, here or on any device, and why no other",
        "kernelhub explain paged_attention --device H200 --model llama-3.1-8b",
    ),
    "verify": Command(
        "check every kernel against its reference on this machine, and quarantine those that are wrong",
        "kernelhub verify merge_attention_states --backend torch --quick",
    ),
    "replay": Command(
        "list the calls that an audit in service found wrong, or run one again and print how wrong it is",
        "kernelhub replay",
    ),
    "warmup": Command(
        "compile and verify what serving a model needs, and keep it on disk for the next processes",
        "kernelhub warmup --model llama-3.1-8b --tp 8 --device H200 --list",
    ),
    "tune": Command(
        "measure which correct kernel is fastest for a model on this machine, and select it from then on",
        "kernelhub tune --model llama-3.1-70b --tp 8 --budget-s 600",
    ),
    "bench": Command(
        "time every supported kernel of one problem on this machine, and plot the times",
        "kernelhub bench merge_attention_states --tokens 1,64 --budget-s 0.2",
    ),
    "lock": Command(
        "write the selections for a model to a file, or show what would change since",
        "kernelhub lock --model llama-3.1-8b --device H200 --out -",
    ),
    "env": Command("list every KERNELHUB_* variable, its value and where that came from", "kernelhub env"),
    "cache": Command(
        "list, check and clear the caches of kernelhub and its libraries, and print their paths",
        "kernelhub cache list",
    ),
}

_EXIT_CODES = "exit codes: 0 success; 1 negative result: no kernel, a wrong result, a problem; 2 wrong usage or setting"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` defaults to that of the process."""
    if "_ARGCOMPLETE" in os.environ:  # a shell requests completions
        from kernelhub.cli.completion import complete

        return complete({name: command.summary for name, command in COMMANDS.items()})
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as leaving:  # argparse leaves this way after --help
        return leaving.code if isinstance(leaving.code, int) else 0
    except (NoKernel, KernelUnavailable) as error:
        return _fail(error, 1)
    except KernelhubError as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        _discard_output()
        return 0
    except ImportError as error:
        package = (error.name or "torch").partition(".")[0]  # a library that torch lacks has no name here
        loaded = sys.modules.get("torch") is not None and package not in _REQUIRED
        if loaded or package == "kernelhub":
            raise
        remedy = f"kernelhub requires it: install it for {sys.executable}"
        return _fail(ConfigurationError(f"{package} cannot be imported: {error}; {remedy}"), 2)
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _discard_output()
        message = f"the output cannot be written: {error.strerror}; free space, or send it to another place"
        return _fail(ConfigurationError(message), 2)


def _open_closed_streams() -> None:
    """Let streams that the caller closed, as `2>&-` does, lead to /dev/null.

    Otherwise Python has None in their place, and the next file that is opened takes the number of such a stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115  # until exit


def _discard_output() -> None:
    """Let stdout lead to /dev/null: Python flushes it once more at exit, which must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(f"kernelhub {kernelhub.__version__}")
        return 0
    if name not in COMMANDS:
        raise ConfigurationError(
            f"{name!r} is not a command{did_you_mean(name, COMMANDS)}; the commands are {', '.join(COMMANDS)}"
        )
    if name != "cache" and not _has_working_directory():
        raise ConfigurationError(
            "the working directory was removed, and torch cannot be loaded there; change to another"
        )
    command = importlib.import_module(f"kernelhub.cli.{name}")
    parser = _Parser(
        prog=f"kernelhub {name}",
        description=COMMANDS[name].summary,
        epilog=f"example: {COMMANDS[name].example}",
        formatter_class=functools.partial(argparse.HelpFormatter, width=None if sys.stdout.isatty() else sys.maxsize),
        allow_abbrev=False,
    )
    command.add_arguments(parser, rest)
    asked = parser.parse_intermixed_args(rest)
    with alone_on_stdout() if getattr(asked, "json", False) else contextlib.nullcontext(sys.stdout) as stream:
        code: int = command.run(asked, console_for(stream))
    return code


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


class _Parser(argparse.ArgumentParser):
    """Raises the library's own errors, and suggests the nearest flag or value for a misspelt one."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = list(map(str, action.choices))
            meant = did_you_mean(value, choices)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{meant}; choose from {', '.join(choices)}")

    def error(self, message: str) -> NoReturn:
        flags = [flag for action in self._actions for flag in action.option_strings]
        wrong = message.removeprefix("unrecognized arguments: ").split()[0]
        hint = did_you_mean(wrong, flags) if wrong.startswith("--") else ""
        raise ConfigurationError(f"{message}{hint}; see `{self.prog} --help`")


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        "usage: kernelhub COMMAND [options]",
        "",
        "Every LLM kernel behind one stable call: which kernel runs on this machine, and why.",
        "",
        "commands:",
    ]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<{width}}  {command.summary}", f"  {'':<{width}}  $ {command.example}"]
    lines += ["", "`kernelhub help COMMAND` lists its options; `kernelhub -V` prints the version.", _EXIT_CODES]
    if not sys.stdout.isatty():
        return "\n".join(lines)
    columns, hanging = shutil.get_terminal_size().columns, " " * (width + 4)
    return "\n".join(
        textwrap.fill(line, columns, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
        for line in lines
    )


def _fail(error: Exception, code: int) -> int:
    print(f"kernelhub: {error}", file=sys.stderr)
    return code
