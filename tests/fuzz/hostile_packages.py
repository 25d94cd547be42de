"""Installed packages as nobody should make them: metadata and sources drawn at random from what was found to harm."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

HUGE_BYTES = 200 << 20  # as a sparse file
# Names that backends ask for, so that a hostile package is looked into, and others that nobody asks for.
KNOWN = (
    *("flashinfer", "deep_gemm", "flash_attn", "flash_attn_interface", "xformers", "vllm", "sgl_kernel", "cudnn"),
    *("flash_mla", "marlin_kernels"),
)
Attack = Callable[[Path, Random], None]


def _text(content: bytes) -> Attack:
    def write(path: Path, random: Random) -> None:
        path.write_bytes(content)

    return write


def _huge(content: bytes) -> Attack:
    def write(path: Path, random: Random) -> None:
        path.write_bytes(content)
        os.truncate(path, HUGE_BYTES)

    return write


def _noise(path: Path, random: Random) -> None:
    path.write_bytes(random.randbytes(random.randrange(1, 5000)))


def _pipe(path: Path, random: Random) -> None:
    os.mkfifo(path)


def _folder(path: Path, random: Random) -> None:
    path.mkdir()


def _loop(path: Path, random: Random) -> None:
    path.symlink_to(path.name)


def _device(path: Path, random: Random) -> None:
    path.symlink_to("/dev/zero")


def _absent(path: Path, random: Random) -> None:
    return None


def _long_lines(path: Path, random: Random) -> None:
    path.write_bytes(b"x" * (1 << 20))


_ANYTHING: tuple[Attack, ...] = (_noise, _pipe, _folder, _loop, _device, _absent, _long_lines)
METADATA: tuple[Attack, ...] = (
    *_ANYTHING,
    _text(b""),
    _text(b"Metadata-Version: 2.1\nVersion: 1.0\n"),
    _text(b"Metadata-Version: 2.1\nName:\nVersion:\n"),
    _text(b"Name: a\nName: b\nVersion: not a version\n"),
    _text("Name: caf\u00e9\nVersion: 1.0\n".encode("latin-1")),
    _text(b"\n\n\nName: late\n"),
    _text(b" indented\nName: x\nVersion: 1.0\n"),
    _text(b"Name: x\nVersion: " + b"9" * 100_000 + b"\n"),
    _huge(b"Name: big\nVersion: 1.0\n"),
    _huge(b"Name: big\nVersion: 1.0\n\n"),
)
TOP_LEVEL: tuple[Attack, ...] = (
    *_ANYTHING,
    _text("caf\u00e9\n".encode("latin-1")),
    _text(b"\x00\x00"),
    _text(b"torch\nkernelhub\n"),
    _huge(b"x\n"),
)
ENTRY_POINTS: tuple[Attack, ...] = (
    *_ANYTHING,
    _text(b"no section = x\n"),
    _text(b"[kernelhub.backends]\nno equals sign\n"),
    _text(b"[kernelhub.backends]\n= nothing\n"),
    _text(b"[kernelhub.backends]\nbad = not a module!:x\n"),
    _text(b"[kernelhub.backends]\nbad = ..\nworse = a..b\n"),
    _text(b"[kernelhub.backends\nx = y\n"),
    _text(b"[console_scripts]\nthis is malformed\n"),
    _text("[kernelhub.backends]\ncaf\u00e9 = caf\u00e9\n".encode("latin-1")),
    _huge(b"[kernelhub.backends]\nx = y\n"),
)
RECORD: tuple[Attack, ...] = (*_ANYTHING, _text(b'"unclosed,\n,,,,\n\xff\n'), _huge(b"a.py,,\n"))
SOURCE: tuple[Attack, ...] = (
    *_ANYTHING,
    _text(b""),
    _text(b"raise SystemExit('imported')\n"),
    _text("# -*- coding: latin-1 -*-\ncaf\u00e9 = 1\ndef run(): ...\n".encode("latin-1")),
    _text("caf\u00e9 = 1\n".encode("latin-1")),
    _text(b"\n" * (1 << 20)),
    _text(b"class Box:\n" + b"\n" * (1 << 20)),
    _text(b"from x import (\n" * 100_000),
    _text(b"from . import run\nfrom .. import run\nfrom ......... import *\n"),
    _text(b"from .inner import *\n" * 50_000),
    _text(b"from . import *\n" * 1000),
    _text(b"from ." + b"a" * 5000 + b" import run\n"),
    _text(b"def run(" + b"(" * 20_000 + b"\n"),
    _text(b"def run(a=" + b"-" * 20_000 + b"1):\n    ...\n"),
    _text(b"def run(\n" + b"    a: int,\n" * 400),
    _text(b"def run(a: int,\n" * 20_000),
    _text(b"run = other\nother = run\n"),
    _huge(b"def run(): ...\n"),
)


def make_site(site: Path, random: Random, count: int) -> list[str]:
    """Fill a folder with so many hostile packages.

    Returns:
        Their import names.
    """
    names = []
    for number in range(count):
        name = KNOWN[number] if number < len(KNOWN) else f"hostile_{number}"
        names.append(name)
        info = site / f"{random.choice((name, '~' + name[1:], name.upper()))}-1.0.dist-info"
        info.mkdir(parents=True)
        for file, attacks in (
            ("METADATA", METADATA), ("top_level.txt", TOP_LEVEL), ("entry_points.txt", ENTRY_POINTS),
            ("RECORD", RECORD),
        ):  # fmt: skip
            random.choice(attacks)(info / file, random)
        package = site / name
        package.mkdir()
        random.choice(SOURCE)(package / "__init__.py", random)
        inner = package / "inner"
        inner.mkdir()
        random.choice(SOURCE)(inner / "__init__.py", random)
    return names
