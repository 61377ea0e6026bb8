"""The pieces that the parser finds in an answer's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call whose name is known. Its arguments follow until the next call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Further text of the arguments of the current call, as JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The current call is complete."""


Piece = Content | Reasoning | CallBegun | CallArguments | CallEnded


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces, with neighbours of one kind joined."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, (Content, Reasoning, CallArguments)) and type(last) is type(piece):
            assert isinstance(last, (Content, Reasoning, CallArguments))
            found[-1] = type(piece)(last.text + piece.text)
        else:
            found.append(piece)
    return found


def first_calls(pieces: Sequence[Piece], most: int | None) -> list[Piece]:
    """The pieces up to the end of call number `most`; None: all."""
    ends = [i for i, piece in enumerate(pieces, start=1) if isinstance(piece, CallEnded)]
    return list(pieces if most is None or len(ends) <= most else pieces[: ends[most - 1]])
