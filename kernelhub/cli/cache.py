"""``kernelhub cache``: the caches of this machine, their entries, which of them can be removed, and their paths."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kernelhub.cli.console import Console, Table
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError
from kernelhub.runtime.caches import inventory, known, root, variables
from kernelhub.runtime.caches.inventory import BROKEN, Cache, CacheItem

_ACTIONS = {
    "list": "every cache with its path, size, entries, and what could be removed",
    "check": "verify every entry of kernelhub's own caches, and find broken ones in the libraries'",
    "clear": "remove entries; of the named caches, by default of kernelhub's own",
    "path": "where kernelhub keeps its files, and why not elsewhere",
    "env": "the variables that put the libraries' caches below kernelhub's, for a shell to evaluate",
}
_HELP = "; ".join(f"{name}: {what}" for name, what in _ACTIONS.items()) + " (default: list)"
_SHOWN = 20  # items that are listed one by one


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's options."""
    names = ("kernelhub", *(item.name for item in known.KNOWN))
    parser.add_argument("action", nargs="?", default="list", choices=tuple(_ACTIONS), help=_HELP)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these caches: {', '.join(names)}")
    parser.add_argument("--stale", action="store_true", help="clear only what is stale, broken or left over")
    parser.add_argument("--yes", action="store_true", help="clear without asking")
    parser.add_argument("--offline", action="store_true", help="env: also forbid FlashInfer's downloads")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, and nothing else")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run one action; 1 if `check` finds a broken entry, `clear` leaves an entry, or no path is writable."""
    if arguments.action == "path":
        return _path(arguments, console)
    if arguments.action == "env":
        return _env(arguments, console)
    action = {"list": _list, "check": _check, "clear": _clear}[arguments.action]
    return action(arguments, console)


def _list(arguments: argparse.Namespace, console: Console) -> int:
    found = _caches(arguments.names)
    if arguments.json:
        console.json({"caches": [_to_dict(cache) for cache in found]})
        return 0
    columns = ("cache", "path", "moved by", "installed", "size", "entries", "to remove")
    console.table(Table(columns, [_row(cache) for cache in found]))
    useless = sum(item.num_bytes for cache in found for item in cache.useless())
    if useless:
        names = " ".join(dict.fromkeys(cache.name for cache in found if cache.useless()))
        console.line(f"{_size(useless)} can be removed: kernelhub cache clear --stale {names}")
    return 0


def _check(arguments: argparse.Namespace, console: Console) -> int:
    found = _caches(arguments.names, thorough=True)
    bad = [(cache, item) for cache in found for item in cache.items if item.state == BROKEN]
    if arguments.json:
        console.json(
            {
                "ok": not bad,
                "checked": {cache.name: len(cache.items) for cache in found},
                "broken": [{"cache": cache.name, **_item_dict(item)} for cache, item in bad],
            }
        )
    else:
        rows = [(cache.name, item.code, str(item.path), item.reason) for cache, item in bad]
        if rows:
            console.table(Table(("cache", "code", "entry", "problem"), rows))
            names = " ".join(dict.fromkeys(cache.name for cache, _ in bad))
            console.line(f"{len(bad)} broken; to remove them: kernelhub cache clear --stale {names}")
        else:
            total = sum(len(cache.items) for cache in found)
            console.line(f"{total} entries, none of them broken; those of kernelhub verified byte by byte")
    return 1 if bad else 0


def _clear(arguments: argparse.Namespace, console: Console) -> int:
    found = _caches(arguments.names or ["kernelhub"])
    unread = [cache for cache in found if cache.problem]
    chosen = [(cache, item) for cache in found for item in (cache.useless() if arguments.stale else cache.items)]
    if chosen and not arguments.yes:
        _ask(chosen, arguments.json)
    left = [(cache, item, why) for cache, item in chosen if (why := inventory.remove(cache, item))]
    kept = {item.path for _, item, _ in left}
    removed = [(cache, item) for cache, item in chosen if item.path not in kept]
    num_bytes = sum(item.num_bytes for _, item in removed)
    if arguments.json:
        document: dict[str, Any] = {"removed": [str(item.path) for _, item in removed], "bytes": num_bytes}
        document["left"] = [{"path": str(item.path), "reason": why} for _, item, why in left]
        document["left"] += [{"path": str(cache.path), "reason": cache.problem} for cache in unread]
        console.json(document)
    else:
        console.line(f"removed {len(removed)} entries, {_size(num_bytes)}")
        for _, item, why in left:
            console.line(f"left {item.path}: {why}")
        for cache in unread:
            console.line(f"left {cache.path}: {cache.problem}")
    return 1 if left or unread else 0


def _ask(chosen: Sequence[tuple[Cache, CacheItem]], as_json: bool) -> None:
    """Return if the user agrees; raise if not, or if input is not a terminal."""
    what = f"{len(chosen)} entries, {_size(sum(item.num_bytes for _, item in chosen))}"
    folders = ", ".join(dict.fromkeys(str(cache.path) for cache, _ in chosen))
    if as_json or not sys.stdin.isatty():
        raise ConfigurationError(f"{what} in {folders} would be removed; add --yes to do it")
    print(f"Remove {what} in {folders}?", file=sys.stderr)
    for _, item in chosen[:_SHOWN]:
        print(f"  {item.path}  {item.state}", file=sys.stderr)
    if len(chosen) > _SHOWN:
        print(f"  and {len(chosen) - _SHOWN} more", file=sys.stderr)
    print("[y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigurationError("nothing was removed")


def _path(arguments: argparse.Namespace, console: Console) -> int:
    best = root.best(executable=True)
    judged = [(place, root.judged(place, executable=True)) for place in root.places()]
    if arguments.json:
        places = [
            {"path": str(place.path), "origin": place.origin, "ok": finding.ok, "code": finding.code}
            | {"reason": finding.reason, "remedy": finding.remedy}
            for place, finding in judged
        ]
        console.json({"path": best.value, "places": places})
    elif best.ok:
        console.line(str(best.value))
        for place, finding in judged:
            if str(place.path) == best.value:
                break
            print(f"not {place.path} ({place.origin}): {finding.reason}; {finding.remedy}", file=sys.stderr)
    else:
        print(f"kernelhub: {best.code}: {best.reason}; {best.remedy}", file=sys.stderr)
    return 0 if best.ok else 1


def _env(arguments: argparse.Namespace, console: Console) -> int:
    """Print the variables for a shell to set, and write the note in each folder."""
    result = variables.set_cache_variables(offline=arguments.offline, environ=dict(os.environ))
    if arguments.json:
        console.json(result.to_dict())
    elif result.finding.ok:
        for item in result.variables:
            if item.became == variables.KEPT:
                print(f"# {item.name} is kept: {item.value}", file=console.stream)
            else:
                print(f"export {item.name}={shlex.quote(item.value)}", file=console.stream)
    else:
        print(f"kernelhub: {result.finding.code}: {result.finding.reason}; {result.finding.remedy}", file=sys.stderr)
    return 0 if result.finding.ok else 1


def _caches(names: Sequence[str], *, thorough: bool = False) -> list[Cache]:
    """The named caches, or all."""
    all_names = ("kernelhub", *(item.name for item in known.KNOWN))
    for name in names:
        if name not in all_names:
            raise ConfigurationError(f"{name!r} is not a cache{did_you_mean(name, all_names)}: {', '.join(all_names)}")
    wanted = names or all_names
    found = inventory.caches(thorough=thorough) if "kernelhub" in wanted else []
    others = (item.read() for item in known.KNOWN if item.name in wanted)
    return [*found, *(cache for cache in others if cache is not None)]


def _row(cache: Cache) -> tuple[str, ...]:
    counts = Counter(item.state for item in cache.items)
    states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    useless = cache.useless()
    remove = (
        f"{len(useless)} ({_size(sum(item.num_bytes for item in useless))}): {useless[0].reason}" if useless else ""
    )
    there = str(cache.path) if os.path.exists(cache.path) else f"{cache.path} (not there)"
    size = _size(cache.num_bytes) if cache.items else ""
    return cache.name, there, cache.variable, cache.installed or "", size, states, cache.problem or remove


def _to_dict(cache: Cache) -> dict[str, Any]:
    counts = Counter(item.state for item in cache.items)
    return {
        "name": cache.name,
        "path": str(cache.path),
        "exists": os.path.exists(cache.path),
        "variable": cache.variable,
        "installed": cache.installed,
        "bytes": cache.num_bytes,
        "entries": len(cache.items),
        "states": dict(counts),
        "remove": [_item_dict(item) for item in cache.useless()],
        "problem": cache.problem,
    }


def _item_dict(item: CacheItem) -> dict[str, Any]:
    return {**asdict(item), "path": str(item.path)}


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
