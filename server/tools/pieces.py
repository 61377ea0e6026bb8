"""What a reader finds in an answer's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is shown as the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of which the name is known. Its arguments follow, until the next call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call that began last, as JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call that began last is complete."""


Piece = Content | Reasoning | CallBegun | CallArguments | CallEnded


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with neighbours of one kind as one."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, (Content, Reasoning, CallArguments)) and type(last) is type(piece):
            assert isinstance(last, (Content, Reasoning, CallArguments))
            found[-1] = type(piece)(last.text + piece.text)
        else:
            found.append(piece)
    return found
