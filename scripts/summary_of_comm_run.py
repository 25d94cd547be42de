"""Prints a log of `verify_comm_on_gpus.sh` in short lines: what was wrong in each scene, and what a process was at."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NO_SCENE = ("kernels", "parts", "connection", "seconds", "at", "at_s", "exchanged")


def lines_of(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith('{"'):
            yield from _of_answer(json.loads(line))
        elif "SUMMARY" in line or not line.startswith("===="):
            yield line


def _of_answer(answer: dict[str, Any]) -> Iterator[str]:
    label = f"{answer['format']}: " if "format" in answer else ""
    for rank, found in enumerate(answer["ranks"]):
        if found is None:
            yield f"{label}rank {rank}: nothing"
            continue
        scenes = {name: value for name, value in found.items() if name not in _NO_SCENE}
        scenes = {
            name: value.get("wrong", value) if isinstance(value, dict) else value for name, value in scenes.items()
        }
        wrong = {name: value for name, value in scenes.items() if value}
        exchanged = f", exchanged {len(found['exchanged'])}" if "exchanged" in found else ""
        right = f"{len(scenes) - len(wrong)} right: {', '.join(name for name in scenes if name not in wrong)}"
        yield f"{label}rank {rank}, exit {answer['ended'][rank]}, at {found.get('at', 'end')}{exchanged}: {right}"
        for name, value in wrong.items():
            yield f"{label}rank {rank} WRONG {name}: {value}"


if __name__ == "__main__":
    for place in sys.argv[1:]:
        print(*lines_of(Path(place).read_text()), sep="\n")
