"""Lets mkdocstrings show the examples of docstrings, which stand under ``Example:``, as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(r"^Example:$", re.MULTILINE)


class ExamplesAreCode(griffe.Extension):
    """Names the section as Google's style does; under another name it would be read as prose."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub("Examples:", obj.docstring.value)
