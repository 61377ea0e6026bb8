"""Layers that keep a state of fixed size in place of keys and values, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Sizes of Gated DeltaNet layers, which keep a state of fixed size in place of keys and values: for each value head
    a matrix [key_dim, value_dim] in fp32, and the last inputs of a short convolution."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, and the sizes of the matrix of each."""
        return self.num_value_heads, self.key_dim, self.value_dim

    @property
    def out_size(self) -> int:
        """Inputs of the output projection."""
        return self.num_value_heads * self.value_dim

    @property
    def has_bias(self) -> bool:
        return False

    @property
    def has_conv_bias(self) -> bool:
        return False

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: q, k and v of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.out_size

    @property
    def in_sizes(self) -> tuple[int, int, int, int]:
        """Outputs of the input projection: q, k and v, the gate z, b and a."""
        return self.conv_size, self.out_size, self.num_value_heads, self.num_value_heads


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Sizes of Mamba-2 layers, which keep a state of fixed size in place of keys and values: for each head a matrix
    [state_size, head_dim] in fp32, and the last inputs of a short convolution."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    """Number of groups of heads that share B and C."""
    conv_width: int
    has_conv_bias: bool
    has_bias: bool
    """Whether the projections have biases."""

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, and the sizes of the matrix of each."""
        return self.num_heads, self.state_size, self.head_dim

    @property
    def out_size(self) -> int:
        """Inputs of the output projection."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: x of all heads, B and C of all groups."""
        return self.out_size + 2 * self.num_groups * self.state_size

    @property
    def in_sizes(self) -> tuple[int, int, int]:
        """Outputs of the input projection: the gate z, the channels of the convolution, and dt."""
        return self.out_size, self.conv_size, self.num_heads


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Sizes of gated short convolutions, whose state is their last inputs alone."""

    size: int
    """Number of channels: the hidden size."""
    conv_width: int
    has_bias: bool
    """Whether the convolution and the projections have biases."""

    @property
    def has_conv_bias(self) -> bool:
        return self.has_bias

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """There is no matrix."""
        return 0, 0, 0

    @property
    def out_size(self) -> int:
        """Inputs of the output projection."""
        return self.size

    @property
    def conv_size(self) -> int:
        return self.size

    @property
    def in_sizes(self) -> tuple[int, int, int]:
        """Outputs of the input projection: the gates before and behind the convolution, and its input."""
        return self.size, self.size, self.size


Recurrent = GatedDelta | Mamba2 | ShortConv
