"""Options of commands that answer for a machine that need not be here."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from packaging.version import InvalidVersion, Version

from kernelhub.dispatch.fingerprint import packages_of
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.machine import ABSENT, SimulatedMachine
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError
from kernelhub.probes.device import SIMULATED


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, ``--with`` and ``--without``."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        help=f"a device that need not be here: {', '.join(SIMULATED)}, a full name, or an architecture such as "
        "sm_90 or gfx942 (default: the first GPU here, else the CPU)",
    )
    parser.add_argument(
        "--with",
        dest="packages",
        metavar="PACKAGE=VERSION",
        type=_package,
        action="append",
        help="answer for a machine with exactly these packages; may be repeated",
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


def _check_packages(names: Iterable[str]) -> None:
    """Refuse a package that no kernel asks about."""
    _ = HUB.settings
    kernels = [kernel for item in HUB.registry.backends.values() for kernel in item.kernels]
    known = sorted({"torch", *(package.name for kernel in kernels for package in packages_of(kernel.constraints))})
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"--with {name}: no kernel asks for a package {name!r}{did_you_mean(name, known)}; they ask for "
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
