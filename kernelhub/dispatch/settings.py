"""The KERNELHUB_* variables and the config file: typed, listed in one place, read once.

`VARIABLES` declares each variable; an unknown KERNELHUB_* variable is an error that suggests the nearest name. Values
are read at the first selection and by `kernelhub.reload()`, never per call.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelhub.dispatch.audits import ACTIONS, OFF
from kernelhub.dispatch.policy import Layer, Names, Override
from kernelhub.dispatch.standing import TRUSTS
from kernelhub.errors import ConfigurationError
from kernelhub.probes import document

if TYPE_CHECKING:
    from kernelhub.dispatch.lock_file import Lock

PREFIX = "KERNELHUB_"
_MOST_BYTES = 1 << 20  # of a config file


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: full name.
        parse: converts the text to the value; raises ValueError with the reason.
        default: value if the variable is unset.
        grammar: the syntax of values.
        doc: its effect, in one sentence.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    grammar: str
    doc: str


def parse_bool(text: str) -> bool:
    """The value of 1, true, yes, on or 0, false, no, off, empty; case and surrounding spaces are ignored."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"{text!r} is neither true (1, true, yes, on) nor false (0, false, no, off)")


def parse_overrides(text: str) -> tuple[tuple[str, Names], ...]:
    """``[op=]name[,name][;...]`` as (op or ``"*"``, names) pairs."""
    pairs = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        ops, equals, words = part.rpartition("=")
        names = tuple(filter(None, (word.strip() for word in words.split(","))))
        if not names or (equals and not ops.strip()):
            raise ValueError(f"{part!r} is not [op=]name[,name]")
        pairs.append((ops.strip() or "*", names))
    return tuple(pairs)


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r} is not a positive number of seconds")
    return seconds


def _parse_log(text: str) -> Names:
    words = tuple(filter(None, (word.strip().lower() for word in text.split(","))))
    for word in words:
        if word not in ("selection", "fallback"):
            raise ValueError(f"{word!r} is not one of selection, fallback")
    return words


def _parse_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{text!r} is not a share from 0 to 1")
    return share


def _parse_bytes(text: str) -> int:
    try:
        num_bytes = int(text)
    except ValueError:
        num_bytes = 0
    if num_bytes <= 0:
        raise ValueError(f"{text!r} is not a positive number of bytes")
    return num_bytes


def _one_of(words: Sequence[str]) -> Callable[[str], str]:
    """A parser of one of some words; case and surrounding spaces are ignored."""

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"{text!r} is neither {' nor '.join(words)}{did_you_mean(word, words)}")
        return word

    return parse


def _some_of(words: Sequence[str]) -> Callable[[str], Names]:
    """A parser of several of some words, separated by commas; case is ignored."""

    def parse(text: str) -> Names:
        given = tuple(dict.fromkeys(word.lower() for word in _parse_names(text)))
        for word in given:
            if word not in words:
                raise ValueError(f"{word!r} is none of {', '.join(words)}{did_you_mean(word, words)}")
        return given

    return parse


def _parse_path(text: str) -> Path:
    """A path; what starts no shell, such as a service's unit, leaves ``~`` in it."""
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ValueError(f"{text!r} is not in the home folder of a known user")
    return Path(expanded)


def _parse_names(text: str, between: str = ",") -> Names:
    return tuple(filter(None, (word.strip() for word in text.split(between))))


VLLM_HOOKS = "fp8_linear", "nvfp4_linear", "mxfp4_linear", "experts"
_OVERRIDES = "[op=]name[,name][;...], a name being a backend, a kernel or a glob"

VARIABLES = {
    variable.name: variable
    for variable in (
        Variable(
            "KERNELHUB_FORCE",
            parse_overrides,
            (),
            _OVERRIDES,
            "Run these kernels, even if the code requests others, or fail.",
        ),
        Variable("KERNELHUB_PREFER", parse_overrides, (), _OVERRIDES, "Rank these first where they are supported."),
        Variable("KERNELHUB_DISABLE", parse_overrides, (), _OVERRIDES, "Never run these."),
        Variable(
            "KERNELHUB_CONFIG",
            _parse_path,
            None,
            "path of a TOML file",
            "Read prefer, disable and flags from a file.",
        ),
        Variable(
            "KERNELHUB_CACHE_DIR",
            _parse_path,
            None,
            "path of a folder",
            "Store compiled kernels in this folder, not in ~/.cache.",
        ),
        Variable(
            "KERNELHUB_CACHE_SHARED",
            parse_bool,
            False,
            "0 or 1",
            "Read KERNELHUB_CACHE_DIR although another user owns it, trust its owner, and write nothing there.",
        ),
        Variable(
            "KERNELHUB_EVIDENCE",
            parse_bool,
            True,
            "0 or 1",
            "Use the results of `kernelhub verify` and `kernelhub tune` on this machine; 0 ignores both.",
        ),
        Variable(
            "KERNELHUB_TUNED",
            lambda text: _parse_names(text, os.pathsep),
            (),
            f"paths of files or folders, separated by {os.pathsep}",
            "Read these tables of `kernelhub tune --export` too, after the measurements of this machine.",
        ),
        Variable(
            "KERNELHUB_AUDIT",
            _parse_share,
            OFF.share,
            "a share from 0 to 1",
            "Recompute this share of real calls with another implementation and compare; see docs/audit.md.",
        ),
        Variable(
            "KERNELHUB_AUDIT_BYTES",
            _parse_bytes,
            OFF.num_bytes,
            "bytes",
            "Maximum memory for the copies and the recomputing of an audit; a call that needs more is skipped.",
        ),
        Variable(
            "KERNELHUB_AUDIT_ACTION",
            _one_of(ACTIONS),
            OFF.action,
            "record or quarantine",
            "Quarantine a kernel that an audit finds wrong for the next process (record), or immediately (quarantine).",
        ),
        Variable(
            "KERNELHUB_DETERMINISTIC", parse_bool, None, "0 or 1", "Only kernels that give equal bits in each run."
        ),
        Variable(
            "KERNELHUB_BATCH_INVARIANT",
            parse_bool,
            None,
            "0 or 1",
            "Only kernels whose rows do not depend on the rest of the batch.",
        ),
        Variable(
            "KERNELHUB_TRUST",
            _one_of(TRUSTS),
            None,
            "here, vendor or measured",
            "Select kernels verified on this device family or machine; also vendor-stated ones; or only measured ones.",
        ),
        Variable("KERNELHUB_STRICT", parse_bool, None, "0 or 1", "Raise instead of a fallback to another kernel."),
        Variable(
            "KERNELHUB_PLUGINS",
            _parse_names,
            ("all",),
            "all, none, or names",
            "Load these third-party backends.",
        ),
        Variable(
            "KERNELHUB_LOG",
            _parse_log,
            (),
            "selection,fallback",
            "Print these events to stderr as they happen.",
        ),
        Variable(
            "KERNELHUB_LOAD_TIMEOUT_S",
            _parse_seconds,
            120.0,
            "seconds",
            "Longest wait for a backend's import.",
        ),
        Variable(
            "KERNELHUB_COMPILE_TIMEOUT_S",
            _parse_seconds,
            300.0,
            "seconds",
            "Longest run of a compiler that kernelhub starts; then it is killed, and the next kernel is selected.",
        ),
        Variable(
            "KERNELHUB_COMM_TIMEOUT_S",
            _parse_seconds,
            60.0,
            "seconds",
            "Longest wait for other ranks: of a collective's `prepare`, and of a collective on CPUs.",
        ),
        Variable(
            "KERNELHUB_VERIFY_TIMEOUT_S",
            _parse_seconds,
            600.0,
            "seconds",
            "Longest call of a kernel by `verify`, including compiling.",
        ),
        Variable(
            "KERNELHUB_IGNORE_VLLM_ENV",
            parse_bool,
            False,
            "0 or 1",
            "Ignore vLLM's variables, such as VLLM_ATTENTION_BACKEND.",
        ),
        Variable(
            "KERNELHUB_CHECK",
            parse_bool,
            False,
            "0 or 1",
            "Check lengths, offsets, page and token numbers on a GPU too (each call then waits for the GPU), "
            "and all arguments of each run of a step, and compare each collective with the other ranks.",
        ),
        Variable(
            "KERNELHUB_DIRECT_LAUNCH",
            parse_bool,
            True,
            "0 or 1",
            "Launch compiled Triton kernels by kernelhub's own launcher; 0 leaves it to Triton's.",
        ),
        Variable(
            "KERNELHUB_LAUNCH_GRAPHS",
            parse_bool,
            True,
            "0 or 1",
            "Launch eager calls that come again as CUDA graphs of their kernels; 0 launches kernel by kernel.",
        ),
        Variable(
            "KERNELHUB_COLLECTIVE_GRAPHS",
            parse_bool,
            True,
            "0 or 1",
            "Launch eager collectives over NVLink so, too, if KERNELHUB_LAUNCH_GRAPHS is on; "
            "0 launches them kernel by kernel.",
        ),
        Variable(
            "KERNELHUB_ENGINE_WARMUP",
            parse_bool,
            True,
            "0 or 1",
            "Warm up and verify kernels when an engine with kernelhub's plugin starts.",
        ),
        Variable(
            "KERNELHUB_ENGINE_SEAL",
            _one_of(("log", "raise", "off")),
            "log",
            "log, raise or off",
            "Seal after an engine's warm-up; a step that is not warmed up is logged as an error and runs, or raises.",
        ),
        Variable(
            "KERNELHUB_VLLM_HOOKS",
            _some_of(VLLM_HOOKS),
            (),
            f"any of {', '.join(VLLM_HOOKS)}, separated by commas",
            "Let vLLM's linear layers and experts call kernelhub; see docs/engines.md.",
        ),
        Variable(
            "KERNELHUB_VLLM_WRITE_KV_CACHE",
            parse_bool,
            True,
            "0 or 1",
            "0: kernelhub's backend of vLLM lets vLLM's kernel write the KV cache, not write_kv_cache.",
        ),
        Variable(
            "KERNELHUB_LOCK", _parse_path, None, "path of a lock file", "Run the kernels of this lock file, or fail."
        ),
        Variable(
            "KERNELHUB_LOCK_MISSING",
            _one_of(("auto", "error")),
            "auto",
            "auto or error",
            "Select a kernel for a problem that is not in the lock file (auto), or raise (error).",
        ),
    )
}


@dataclass(frozen=True)
class Setting:
    """A variable with its value and where the value came from (``"environment"`` or ``"default"``)."""

    variable: Variable
    value: Any
    source: str
    text: str | None


@dataclass(frozen=True)
class Settings:
    """The parsed and checked environment and config file.

    Attributes:
        values: the KERNELHUB_* variables, by name.
        force: layer of KERNELHUB_FORCE.
        environment: layer of the other KERNELHUB_* variables.
        file: layer of the config file.
        foreign: layer of other projects' variables; its names may be unknown here.
        lock: the lock file; None if there is none.
    """

    values: Mapping[str, Setting]
    force: Layer
    environment: Layer
    file: Layer
    foreign: Layer = Layer()
    lock: Lock | None = None

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Parse the environment, and the config file and lock file that it names.

    Raises:
        ConfigurationError: a variable is unknown, a value is invalid, or a file cannot be read.
    """
    environ = os.environ if environ is None else environ
    for name in environ:
        if name.startswith(PREFIX) and name not in VARIABLES:
            raise ConfigurationError(f"unknown variable {name}{_meant(name)}; see `kernelhub env`")
    values = {name: _setting(variable, environ.get(name)) for name, variable in VARIABLES.items()}

    def overrides(name: str, source: str) -> tuple[Override, ...]:
        setting = values[name]
        return tuple(Override(ops, names, source, f"{name}={setting.text}") for ops, names in setting.value)

    path, lock = values["KERNELHUB_CONFIG"].value, values["KERNELHUB_LOCK"].value
    return Settings(
        values,
        force=Layer(requests=overrides("KERNELHUB_FORCE", "force")),
        environment=Layer(
            prefers=overrides("KERNELHUB_PREFER", "environment"),
            disables=overrides("KERNELHUB_DISABLE", "environment"),
            deterministic=values["KERNELHUB_DETERMINISTIC"].value,
            batch_invariant=values["KERNELHUB_BATCH_INVARIANT"].value,
            strict=values["KERNELHUB_STRICT"].value,
            trust=values["KERNELHUB_TRUST"].value,
        ),
        file=Layer() if path is None else read_file(path),
        lock=None if lock is None else _lock_of(lock),
    )


# Words for what KERNELHUB_FORCE, KERNELHUB_PREFER and KERNELHUB_DISABLE name.
_NAMED = re.compile(r"_?(BACKEND|KERNEL|PROVIDER|IMPLEMENTATION|IMPL)S?$")


def _meant(name: str) -> str:
    """What an unknown variable was meant to be: a known one, or those that choose backends.

    The prefix is left out, since it would make any two names alike.
    """
    word = name.removeprefix(PREFIX)
    known = {one.removeprefix(PREFIX): one for one in VARIABLES}
    start, is_named = _NAMED.subn("", word)
    close = difflib.get_close_matches(start if is_named else word, known, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {known[close[0]]}?)"
    if not is_named:
        return ""
    return (
        " (did you mean KERNELHUB_PREFER=[op=]NAME, or KERNELHUB_FORCE=[op=]NAME, which fails if it is not supported?)"
    )


def _lock_of(path: Path) -> Lock:
    from kernelhub.dispatch.lock_file import read_lock

    try:
        return read_lock(path)
    except ConfigurationError as error:
        raise ConfigurationError(f"KERNELHUB_LOCK: {error}") from None


def _setting(variable: Variable, text: str | None) -> Setting:
    """The value of a text; an empty one, as compose files and units set, is the same as none."""
    if text is None or not text.strip():
        return Setting(variable, variable.default, "default", None)
    try:
        return Setting(variable, variable.parse(text), "environment", text)
    except ValueError as error:
        raise ConfigurationError(f"{variable.name}: {error}; write {variable.grammar}") from None


_FILE_KEYS = ("prefer", "disable", "deterministic", "batch_invariant", "strict", "trust")


def read_file(path: Path) -> Layer:
    """The layer of a config file: ``prefer`` and ``disable`` (names, or a table of op to names), flags and ``trust``.

    Raises:
        ConfigurationError: the file cannot be read, or a key or value is invalid.
    """
    try:
        written = _parse_toml(path)
    except OSError as error:
        raise ConfigurationError(
            f"KERNELHUB_CONFIG={path}: {error.strerror or error}; name a TOML file that can be read, or unset it"
        ) from None
    except ValueError as error:
        raise ConfigurationError(f"KERNELHUB_CONFIG={path}: not TOML: {error}") from None
    for key in written:
        if key == "force":
            raise ConfigurationError(f"{path}: a file cannot force; use prefer, or KERNELHUB_FORCE")
        if key not in _FILE_KEYS:
            meant = did_you_mean(key, _FILE_KEYS)
            raise ConfigurationError(f"{path}: unknown key {key!r}{meant}; the keys are {', '.join(_FILE_KEYS)}")
    return Layer(
        prefers=_file_overrides(path, "prefer", written.get("prefer", [])),
        disables=_file_overrides(path, "disable", written.get("disable", [])),
        deterministic=_file_flag(path, "deterministic", written),
        batch_invariant=_file_flag(path, "batch_invariant", written),
        strict=_file_flag(path, "strict", written),
        trust=_file_trust(path, written),
    )


def _file_flag(path: Path, key: str, written: Mapping[str, Any]) -> bool | None:
    value = written.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError(f"{path}: {key} must be true or false, not {value!r}")
    return value


def _file_trust(path: Path, written: Mapping[str, Any]) -> str | None:
    value = written.get("trust")
    if value is not None and value not in TRUSTS:
        raise ConfigurationError(f"{path}: trust must be one of {', '.join(TRUSTS)}, not {value!r}")
    return value


def _file_overrides(path: Path, key: str, value: object) -> tuple[Override, ...]:
    table = value if isinstance(value, dict) else {"*": value}
    result = []
    for ops, names in table.items():
        words = [names] if isinstance(names, str) else names
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ConfigurationError(f"{path}: {key} for {ops} must be a name or a list of names, not {names!r}")
        if words:
            result.append(Override(ops, tuple(words), "file", f"{key} in {path}"))
    return tuple(result)


def _parse_toml(path: Path) -> dict[str, Any]:
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        parser = importlib.import_module(name)
    except ModuleNotFoundError:
        raise ConfigurationError("a config file needs a TOML parser on Python 3.10: pip install tomli") from None
    try:
        written: dict[str, Any] = parser.loads(document.text(path, _MOST_BYTES))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return written


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
