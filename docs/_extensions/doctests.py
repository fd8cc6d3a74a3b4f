"""Shows the doctests of docstrings as code.

A doctest that stands in the text without a heading is Markdown to mkdocstrings: a quotation within quotations, with links where there are
brackets. This fences it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\n).+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fence every doctest in every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _DOCTEST.sub(lambda doctest: f"```pycon\n{doctest.group()}\n```", obj.docstring.value)
