"""Options that several commands share: which model, on which machine, and the values of flags.

In each command, ``--model`` takes what `problems_of` takes: a name, a config.json, or the folder of a checkpoint.
"""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from kernelhub.cli.facets import defaults
from kernelhub.cli.models import family_of
from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.fingerprint import packages_of
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.machine import ABSENT, SimulatedMachine
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError
from kernelhub.ops.attention.problem import ONE
from kernelhub.ops.models.description import FORMATS
from kernelhub.ops.models.problems import PHASES, Need, problems_of
from kernelhub.ops.models.published import CONFIGS, unknown
from kernelhub.probes.device import SIMULATED

MODELS = f"a config.json, a checkpoint's folder, or one of {', '.join(CONFIGS)}"
# Arguments of `kernelhub.problems_of` with their defaults.
USUAL: dict[str, Any] = {
    "tp": 1,
    "ep": 1,
    "dtype": "bfloat16",
    "kv_dtype": None,
    "page_size": None,
    "quantization": None,
}


def add_model(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """The option ``--model``, and the options of how it is served."""
    parser.add_argument("--model", metavar="NAME", required=required, help=MODELS)
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share every layer (default: 1)")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="ranks that share the experts (default: 1)")
    parser.add_argument("--dtype", default=USUAL["dtype"], help="dtype of activations (default: bfloat16)")
    parser.add_argument("--kv-dtype", metavar="DTYPE", help="dtype of the KV cache (default: that of activations)")
    parser.add_argument("--page-size", type=int, metavar="N", help="tokens per page (default: 16; 64 for latents)")
    parser.add_argument("--quantization", choices=FORMATS, help="format of weights (default: that of config.json)")


def add_packing(parser: argparse.ArgumentParser) -> None:
    """The option ``--packing``."""
    parser.add_argument(
        "--packing",
        action="store_true",
        help="assume that weights will be packed, so that kernels for packed weights are ranked too",
    )


def served(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of these options, by the names of `problems_of`."""
    return {name: getattr(arguments, name) for name in USUAL}


def add_model_name(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, and ``--phase`` for models with several problems of one op."""
    parser.add_argument("--model", metavar="NAME", help=f"fill the facets from a model: {MODELS}")
    parser.add_argument("--phase", choices=PHASES, help="with --model, the phase (default: that of a plain call)")


def facets_of_model(
    model: str, record: OpRecord[Any], written: Mapping[str, Any], phase: str | None
) -> tuple[dict[str, Any], str]:
    """The facets of a model, except those that the user gave, and a sentence on which of its problems this is.

    Raises:
        ConfigurationError: no model has this name, or it does not use the op.
    """
    if model not in CONFIGS and not Path(model).exists():
        return _of_inputs(model, record, written), ""
    asked = problems_of(model, phases=PHASES if phase is None else (phase,))
    needs = [need for need in asked if need.op == record.name]
    if not needs:
        return _of_inputs(model, record, written, asked), ""
    usual = defaults(record)
    need = min(needs, key=lambda need: _distance(dict(need.facets), written, usual))
    said = f"{model}, {' and '.join(need.phases)}, {', '.join(need.layers)}"
    if len(needs) > 1:
        said += f"; one of {len(needs)} problems of this op, the others by --phase and facets"
    return {**dict(need.facets), **written}, said


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, ``--with`` and ``--without``."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        help=f"a device, simulated if absent: {', '.join(SIMULATED)}, a full name, or an architecture such as "
        "sm_90 or gfx942 (default: the first GPU here, else the CPU)",
    )
    parser.add_argument(
        "--with",
        dest="packages",
        metavar="PACKAGE=VERSION",
        type=_package,
        action="append",
        help="describe a machine with exactly these packages; may be repeated",
    )
    parser.add_argument(
        "--without",
        choices=tuple(ABSENT),
        action="append",
        default=[],
        help="what the machine of --with lacks: a CUDA toolkit, a C++ compiler, modules or binaries of libraries; "
        "may be repeated",
    )


def machine_of(arguments: argparse.Namespace) -> SimulatedMachine | None:
    """The machine that the options describe; None for this one."""
    if arguments.packages is not None:
        _check_packages(name for name, _ in arguments.packages)
        return SimulatedMachine(dict(arguments.packages), lacks=arguments.without)
    if arguments.without:
        raise ConfigurationError(
            "--without describes the machine of --with: name its packages, e.g. --with triton=3.7.1"
        )
    return None


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them, for argparse."""
    words = tuple(filter(None, (name.strip() for name in text.split(","))))
    if not words:
        raise argparse.ArgumentTypeError(f"{text!r} is empty; give backends or kernels, e.g. triton,torch.sdpa")
    return words


def counts(text: str) -> tuple[int, ...]:
    """Positive numbers with commas between them, for argparse."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token counts; give e.g. 1,64,8192")
    return tuple(int(word) for word in words)


def seconds(text: str) -> float:
    """A positive number of seconds, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return number


def check_writable(flag: str, path: Path) -> None:
    """Refuse a file that cannot be written, before anything takes time."""
    number = 0
    if path.is_dir():
        number = errno.EISDIR
    elif not path.parent.is_dir():
        number = errno.ENOENT
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        number = errno.EACCES
    if number:
        raise ConfigurationError(f"{flag} {path}: {os.strerror(number)}; name a file that can be written")


def _distance(facets: Mapping[str, Any], written: Mapping[str, Any], usual: Mapping[str, Any]) -> tuple[int, int, int]:
    """Distance of a problem from the given facets, then from a plain call; among equals, more features come first."""
    against = sum(facets.get(name, usual.get(name)) != value for name, value in written.items())
    length = written.get("q_len", usual.get("q_len"))
    apart = (facets.get("q_len") == ONE) != (length == ONE)
    return against, apart, -sum(value is True for value in facets.values())


def _of_inputs(
    model: str, record: OpRecord[Any], written: Mapping[str, Any], asked: Sequence[Need] = ()
) -> dict[str, Any]:
    """The facets of a model from the op's own inputs."""
    family = family_of(record)
    if family is not None and model in family.models:
        return family.facets_of(model, record, written)
    if asked:
        names = ", ".join(dict.fromkeys(need.op for need in asked))
        raise ConfigurationError(f"--model: {model} does not use {record.name}; it uses {names}")
    raise unknown(model, family.models if family else ())


def _check_packages(names: Iterable[str]) -> None:
    """Refuse a package that no kernel requires."""
    _ = HUB.settings
    kernels = [kernel for item in HUB.registry.backends.values() for kernel in item.kernels]
    known = sorted({"torch", *(package.name for kernel in kernels for package in packages_of(kernel.constraints))})
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"--with {name}: no kernel requires a package {name!r}{did_you_mean(name, known)}; kernels require "
                f"{', '.join(known)}"
            )


def _package(text: str) -> tuple[str, str]:
    name, equals, version = text.partition("=")
    try:
        Version(version)
    except InvalidVersion:
        equals = ""
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not PACKAGE=VERSION, e.g. triton=3.7.1")
    return name, version
