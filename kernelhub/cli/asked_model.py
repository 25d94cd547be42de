"""The facets that a model asks of an op: ``--model`` of commands about one op.

It takes what `problems_of` takes, as all commands do: a name, a config.json, or the folder of a checkpoint. Of ops that
no such model asks by itself there are the models that the op's own inputs know.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelhub.cli.facets import defaults
from kernelhub.dispatch.contract import OpRecord
from kernelhub.errors import ConfigurationError
from kernelhub.ops.attention.problem import ONE
from kernelhub.ops.models.problems import PHASES, Need, problems_of
from kernelhub.ops.models.published import CONFIGS

MODELS = f"a config.json, a checkpoint's folder, or one of {', '.join(CONFIGS)}"


def add_model_name(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, and ``--phase`` for models that ask several problems of one op."""
    parser.add_argument("--model", metavar="NAME", help=f"fill the facets from a model: {MODELS}")
    parser.add_argument("--phase", choices=PHASES, help="with --model, of which phase (default: that of a plain call)")


def facets_of_model(
    model: str, record: OpRecord[Any], written: Mapping[str, Any], phase: str | None
) -> tuple[dict[str, Any], str]:
    """The facets of a model, except where the user wrote others, and a sentence on which of its problems this is.

    Raises:
        ConfigurationError: there is no such model, or it asks nothing of the op.
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


def _distance(facets: Mapping[str, Any], written: Mapping[str, Any], usual: Mapping[str, Any]) -> tuple[int, int, int]:
    """How far a problem is from what was written, then from a plain call; of equal ones that with most features."""
    against = sum(facets.get(name, usual.get(name)) != value for name, value in written.items())
    length = written.get("q_len", usual.get("q_len"))
    apart = (facets.get("q_len") == ONE) != (length == ONE)
    return against, apart, -sum(value is True for value in facets.values())


def _of_inputs(
    model: str, record: OpRecord[Any], written: Mapping[str, Any], asked: Sequence[Need] = ()
) -> dict[str, Any]:
    """The facets that the op's own inputs know of a model."""
    from kernelhub.cli.models import family_of  # needs torch

    family = family_of(record)
    if family is not None and model in family.models:
        return family.with_model(model, record, written)
    if asked:
        names = ", ".join(dict.fromkeys(need.op for need in asked))
        raise ConfigurationError(f"--model: {model} asks nothing of {record.name}; it asks {names}")
    problems_of(model)  # raises, naming the nearest
    raise ConfigurationError(f"--model: {model} asks nothing of {record.name}")
