"""The base of the types of answers.

An answer is a plain dict while the server runs, so its type costs no time. mypy checks the code that makes an answer,
/openapi.json shows the types, and `tests/api/test_answers` compares real answers of every route with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

TokenIds = Sequence[int]


@with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))
class Answer(TypedDict):
    """Base of the objects in answers. An object has no keys besides those of its type."""
