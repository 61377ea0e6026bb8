"""The facts of one of our tensors: the part of the model that it belongs to, how ranks share it, and whether it may be
quantized.

`matrices` lists those of an `Arch`. Nobody reads these facts from a tensor's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

Shape = tuple[int, ...]


class Component(StrEnum):
    """Parts of a model, in the words and in the order of the memory plan."""

    EMBEDDING = "embedding"
    PROJECTION = "projection"
    """The projection of the hidden states that a draft head reads, or of an encoder's embedding."""
    ATTENTION = "attention"
    RECURRENT = "recurrent layers"
    MLP = "MLP"
    LAYER_INPUTS = "layer inputs"
    ROUTERS = "routers"
    EXPERTS = "experts"
    NORMS = "norms"
    HEAD = "head"
    TOKEN_IDS = "token ids"
    """Whole numbers, which have no dtype of the model's."""

    @property
    def is_read_by_all(self) -> bool:
        """Whether every step reads the whole of it. A token reads one row of the embedding, and the experts that it
        chooses. Only steps with logits read the head."""
        return self not in (Component.EMBEDDING, Component.EXPERTS, Component.HEAD)


@dataclass(frozen=True, slots=True)
class Axis:
    """Rows of a tensor, or inputs of a matrix, and the equal units in which ranks share them."""

    size: int
    num_units: int = 0
    """Number of heads, or of single rows; 0: every rank has all."""
    repeats: bool = False
    """Whether several ranks have the same unit if there are more ranks than units."""

    @classmethod
    def of_rows(cls, size: int) -> Axis:
        """Rows of which ranks may have any number."""
        return cls(size, size)


@dataclass(frozen=True, slots=True)
class Weight:
    """One of our tensors, and what others must know of it."""

    own: str
    """Name behind that of the owner: `attention.qkv`."""
    component: Component
    rows: tuple[Axis, ...]
    """Rows, as blocks that follow one another: those of q, k and v."""
    inner: Shape = ()
    """Sizes of the other axes."""
    owner: str = ""
    """Beginning of the names of a layer or of an expert: `layers.0.`. Empty outside of layers."""
    leaf: str = "weight"
    """Last part of the name, which a bias does not share with its matrix."""

    @property
    def name(self) -> str:
        return self.owner + self.own

    @property
    def parameter(self) -> str:
        """Name of the tensor itself: `layers.0.attention.qkv.weight`."""
        return self.parameter_of(None)

    def name_of(self, part: int | None) -> str:
        """Name of one of the parts that have different layouts; None: there is one part."""
        return self.name if part is None else f"{self.name}.part{part}"

    def parameter_of(self, part: int | None) -> str:
        return f"{self.name_of(part)}.{self.leaf}" if self.leaf else self.name

    @property
    def bias(self) -> Weight:
        """The bias beside this weight."""
        return Weight(self.own, self.component, self.rows, (), self.owner, "bias")

    @property
    def kind(self) -> str:
        """Last part of the name: `qkv`."""
        return self.own.rpartition(".")[2]

    @property
    def num_rows(self) -> int:
        return sum(axis.size for axis in self.rows)

    @property
    def shape(self) -> Shape:
        return (self.num_rows, *self.inner)


@dataclass(frozen=True, slots=True)
class LinearWeight(Weight):
    """The matrix of a linear layer, [rows, inputs]."""

    has_bias: bool = False
    is_quantizable: bool = True
    """Whether it may be stored in fewer bits than the dtype has."""
    takes_adapters: bool = False
    """Whether LoRA adapters may update it."""
    split_inputs: Axis | None = None
    """The inputs, if ranks may share them in place of the rows; None: they share rows alone."""

    @classmethod
    def whole(cls, own: str, component: Component, shape: tuple[int, int], has_bias: bool = False) -> Self:
        """A matrix of this shape that every rank has, outside of layers."""
        return cls(own, component, (Axis(shape[0]),), shape[1:], has_bias=has_bias)

    @property
    def num_inputs(self) -> int:
        return self.inner[0]


def whole(own: str, component: Component, shape: Shape, owner: str = "", leaf: str = "weight") -> Weight:
    """A tensor of this shape that every rank has."""
    return Weight(own, component, (Axis(shape[0]),), shape[1:], owner, leaf)
