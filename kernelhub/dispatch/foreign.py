"""What variables of other projects say about kernels: sources of settings, named here and imported with the settings.

A source is a function of the environment that returns a `Layer`. Its overrides have the source ``"engine"`` and are
weaker than everything said to kernelhub itself (see `dispatch.policy`), and an error of another project's user, such as
a value that means nothing, is a warning and never an error here. Sources are asked where settings are read: at the
first decision and by `kernelhub.reload()`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import cast

from kernelhub.dispatch.policy import Layer

Source = Callable[[Mapping[str, str]], Layer]

SOURCES = ("kernelhub.compat.env:said",)


def read_foreign(environ: Mapping[str, str] | None = None) -> Layer:
    """Everything the sources say, as one layer; of two that set the same flag the first decides."""
    environ = os.environ if environ is None else environ
    layers = [_source(name)(environ) for name in SOURCES]
    return Layer(
        requests=tuple(override for layer in layers for override in layer.requests),
        prefers=tuple(override for layer in layers for override in layer.prefers),
        disables=tuple(override for layer in layers for override in layer.disables),
        batch_invariant=next((layer.batch_invariant for layer in layers if layer.batch_invariant is not None), None),
    )


def _source(name: str) -> Source:
    module, _, attribute = name.partition(":")
    return cast(Source, getattr(importlib.import_module(module), attribute))
