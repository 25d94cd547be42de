"""JSON Schemas of the documents that commands print with ``--json``, for programs that read them.

A shape is written as the Python types of its parts: a dictionary with names has these keys (`key?` may be missing), one
with `str` has any keys, a list has items of its one shape, a tuple is one of several shapes, a set one of its words.
`scripts/generate_docs.py` writes docs/schemas/ from this module, and a test validates each command's output by it.
"""

from __future__ import annotations

from typing import Any

_ANY = object()
_TEXT_OR_NULL = (str, None)
_NUMBER_OR_NULL = (float, None)
_FACETS = {str: (str, bool, float, None)}
_REASON = {"code": str, "reason": str, "remedy": str}
_PART = {
    "op": str,
    "problem": _FACETS,
    "selected": _TEXT_OR_NULL,
    "source": str,
    "because": str,
    "assumed?": str,
    "steps?": [str],
    "overruled?": [str],
    "weights?": {"layout": str, "reads": [str], "packs_to": _TEXT_OR_NULL, "needs_packing": bool},
    "decisions": [{"kernel": str, "accepted": bool, **_REASON, "ahead?": bool, "also?": [_REASON]}],
}
_SELECTION = {**_PART, "parts?": [_PART]}
_RECORD = {
    "op": str,
    "kernel": str,
    "summary": str,
    "devices": {str: str},
    "standings": {str: {"word": str, "evidence": str, "figure": str}},
    "features": [str],
    "missing": [str],
    "limits": [str],
    "needs": [str],
    "layouts": [str],
    "graph": str,
    "deterministic": bool,
    "batch_invariant": bool,
}
_FINDING = {"subject": str, "ok": bool, "value": _TEXT_OR_NULL, **_REASON}
_BACKENDS = {
    "device": str,
    "backends": [
        {
            "name": str,
            "summary": str,
            "origin": str,
            "built_in": bool,
            "distribution": str,
            "code": str,
            "error": str,
            "package": str,
            "homepage": str,
            "library": (_FINDING, None),
            "kernels": [str],
        }
    ],
    "kernels": [
        {
            "op": str,
            "name": str,
            "summary": str,
            "usable_here": bool,
            "obstacles": [_REASON],
            "band": str,
            "features": [str],
            "graph": str,
            "deterministic": bool,
            "batch_invariant": bool,
            "reads_lengths": bool,
            "source": str,
        }
    ],
}
_DEMO = {
    "ok": bool,
    "results": [
        {
            "title": str,
            "what": str,
            **_SELECTION,
            "error": {
                "largest": _NUMBER_OR_NULL,
                "largest_allowed": float,
                "rms_ratio": _NUMBER_OR_NULL,
                "rms_ratio_allowed": float,
                "all_finite": bool,
                "ok": bool,
                "checked": str,
            },
            "tokens_per_s": float,
            "median_ms": float,
            "samples": int,
            "torch": {"what": str, "tokens_per_s": float, "ratio": float},
        }
    ],
}
_VERIFY = {
    "ok": bool,
    "device": str,
    "counts": {"right": int, "wrong": int, "not run": int},
    "lifted": [[str]],
    "unwritten": str,
    "results": [
        {
            "op": str,
            "kernel": str,
            "status": {"right", "wrong", "not run"},
            "code": str,
            "reason": str,
            "worst": _NUMBER_OR_NULL,
            "left_out": int,
            "why_not": str,
            "seconds": float,
            "checks": [
                {
                    "case": str,
                    "code": str,
                    "problem": str,
                    "ratio": _NUMBER_OR_NULL,
                    "figures?": str,
                    "tokens?": bool,
                }
            ],
        }
    ],
}
_REPLAY = {
    "op": str,
    "kernel": str,
    "kept_of": str,
    "class": str,
    "date": str,
    "device": str,
    "ok": bool,
    "code": str,
    "ratio": _NUMBER_OR_NULL,
    "figures": str,
    "kept": {"ratio": _NUMBER_OR_NULL, "figures": str},
    "differs": {str: [str]},
    "lifted": bool,
}
_WARMUP = {
    "ok": bool,
    "device": str,
    "counts": {str: int},
    "taken_over": int,
    "jobs": int,
    "waited_s": float,
    "waited_for": str,
    "verified": [[str]],
    "quarantined": [[str]],
    "unverified": [[str]],
    "seconds": float,
    "peak": {"host_bytes": int, "device_bytes": int, "children_bytes": int},
    "notes": [str],
    "earned": [{"op": str, "kernel": str, "label": str, "ok": bool, "seconds": float, "reason": str}],
    "stages": {str: float},
    "items": [{"op": str, "kernel": str, "label": str, "tokens": [int], "how": str, "seconds": float, "reason": str}],
}
_WANTED = {"items": [{"op": str, "kernel": str, "label": str, "tokens": [int], "because": str}]}
_TIME = {"us": float, "noise_us": float, "samples": int, "how": str, "configuration?": {str: _ANY}, "own_us?": float}
_REGRET = ({"us": float, "percent": float}, None)
_TUNE = {
    "ok": bool,
    "device": str,
    "seconds": float,
    "unwritten": str,
    "unheeded": str,
    "wrong": [{"op": str, "kernel": str, "why": str}],
    "left_out": [{"what": str, "why": str}],
    "entries": [
        {
            "op": str,
            "problem": _FACETS,
            "regime": str,
            "order": [str],
            "ranking": [str],
            "word": str,
            "date": str,
            "kernels": {str: {"versions": {str: str}, "record": str}},
            "sizes": [{"tokens": int, "label": str, "times": {str: _TIME}, "out": {str: str}}],
        }
    ],
    "regret": [
        {
            "op": str,
            "facets": _FACETS,
            "regime": str,
            "tokens": int,
            "label": str,
            "best": str,
            "best_us": float,
            "chosen": str,
            "chosen_regret": _REGRET,
            "order": str,
            "order_regret": _REGRET,
        }
    ],
}
_TABLE = {"file": str, "problem_classes": int}
_TIMES = {
    "op": str,
    "problem": _FACETS,
    "selected": _TEXT_OR_NULL,
    "kernels": [{"kernel": str, "us": {str: float}, "noise_us": {str: float}}],
}
_LOCKED = {
    "op": str,
    "problem": _FACETS,
    "kernel": str,
    "versions": {str: str},
    "decided_by": str,
    "phases": [str],
    "layers": [str],
    "runner_ups": {str: str},
    "refused": {str: str},
    "line": int,
}
_LOCK = {
    "file": str,
    "decisions": int,
    "without_kernel": [{"op": str, "layers": [str], "problem": _FACETS}],
}
_LOCK_CHECK = {
    "file": str,
    "same": bool,
    "differences": [
        {"kind": {"changed", "gone", "new", "versions"}, "was": (_LOCKED, None), "now": (_LOCKED, None), "why": str}
    ],
}
_ENV = {
    "variables": [
        {
            "name": str,
            "value": (str, bool, float, None, [str]),
            "source": str,
            "text": _TEXT_OR_NULL,
            "grammar": str,
            "meaning": str,
            "problem": str,
        }
    ],
    "engines": [
        {
            "name": str,
            "text": str,
            "owner": str,
            "says": str,
            "successor": str,
            "problem": str,
            "overrides": [{"op": str, "names": [str]}],
            "follows": str,
        }
    ],
    "config_file": ({"path": str, "says": [str]}, None),
}
_ITEM = {"path": str, "num_bytes": int, "state": str, "code": str, "reason": str}
_CACHES = {
    "caches": [
        {
            "name": str,
            "path": str,
            "exists": bool,
            "variable": str,
            "installed": _TEXT_OR_NULL,
            "bytes": int,
            "entries": int,
            "states": {str: int},
            "remove": [_ITEM],
            "problem": str,
        }
    ]
}
_BROKEN = {"ok": bool, "checked": {str: int}, "broken": [{"cache": str, **_ITEM}]}
_CLEARED = {"removed": [str], "bytes": int, "left": [{"path": str, "reason": str}]}
_PLACES = {
    "path": _TEXT_OR_NULL,
    "places": [{"path": str, "origin": str, "ok": bool, **_REASON}],
}
_VARIABLES = {
    "root": str,
    "writable": bool,
    "reason": str,
    "variables": [{"name": str, "value": str, "became": str, "meaning": str}],
}
_FACT = {
    "status": {"ok", "note", "problem", "absent"},
    "what": str,
    "meaning": str,
    "remedy": str,
    "part": str,
}

# The document of each command, by its options.
SHAPES: dict[str, dict[str, Any]] = {
    "demo": {"": _DEMO},
    "doctor": {"": {"ok": bool, "facts": [_FACT]}},
    "backends": {"": _BACKENDS, "--matrix": {"kernels": [_RECORD]}},
    "info": {"": {"kernels": [{**_RECORD, "orders": [str], "source": str}]}},
    "explain": {"": _SELECTION},
    "verify": {"": _VERIFY},
    "replay": {"": [str], "FILE": _REPLAY},
    "warmup": {"": _WARMUP, "--list": _WANTED},
    "tune": {"": _TUNE, "--export, --import": _TABLE},
    "bench": {"": _TIMES},
    "lock": {"": _LOCK, "--check": _LOCK_CHECK},
    "env": {"": _ENV},
    "cache": {"list": _CACHES, "check": _BROKEN, "clear": _CLEARED, "path": _PLACES, "env": _VARIABLES},
}


def schema_of(command: str) -> dict[str, Any]:
    """The JSON Schema of a command's ``--json`` output."""
    parts = [
        {"title": f"kernelhub {command} {asked}".strip(), **_schema(shape)} for asked, shape in SHAPES[command].items()
    ]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"kernelhub {command} --json"}
    return {**head, "anyOf": parts} if len(parts) > 1 else {**parts[0], **head}


def _schema(shape: Any) -> dict[str, Any]:
    if shape is _ANY:
        return {}
    if isinstance(shape, dict):
        names = {name: part for name, part in shape.items() if name is not str}
        return {
            "type": "object",
            "properties": {name.removesuffix("?"): _schema(part) for name, part in names.items()},
            "required": [name for name in names if not name.endswith("?")],
            "additionalProperties": _schema(shape[str]) if str in shape else False,
        }
    if isinstance(shape, list):
        return {"type": "array", "items": _schema(shape[0])}
    if isinstance(shape, tuple):
        return {"anyOf": [_schema(part) for part in shape]}
    if isinstance(shape, set):
        return {"enum": sorted(shape)}
    return {"type": {str: "string", bool: "boolean", int: "integer", float: "number", None: "null"}[shape]}
