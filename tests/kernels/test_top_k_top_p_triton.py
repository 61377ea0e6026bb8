"""The Triton kernel is exact because its weights and images equal those of the definition."""

from __future__ import annotations

import pytest
import torch

from inferd.kernels.ops.top_k_top_p import Cuts, reference
from inferd.kernels.ops.top_k_top_p.weights import weights
from tests.kernels import interpreter

triton = pytest.importorskip("triton")
tl = triton.language

from inferd.kernels.ops.top_k_top_p import triton as kernels  # noqa: E402

NEVER = float("-inf")


@triton.jit
def _of(scores, images, back, weighed, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    values = tl.load(scores + place)
    image = kernels.image_of(values)
    tl.store(images + place, image)
    tl.store(back + place, kernels.score_of(image))
    tl.store(weighed + place, kernels.weights_of(values))


def test_images_order_like_scores_and_weights_are_the_definitions() -> None:
    scores = torch.cat([-torch.rand(30_000) * 33, torch.tensor([0.0, -0.0, NEVER, -1e-45, -32.0, -50.0, 1e-3, 7.0])])
    scores = torch.cat([scores, -(torch.rand(2**15 - len(scores)) * 1e-4)])
    images, back = torch.zeros(2**15, dtype=torch.int32), torch.full((2**15,), float("nan"))
    weighed = torch.full((2**15,), -1)
    _of[(1,)](scores, images, back, weighed, BLOCK=2**15, **kernels.UNFUSED)
    assert torch.equal(weighed, weights(scores))
    assert torch.equal(back, scores)
    order = scores.argsort()
    steps = images[order].diff()
    assert bool((steps >= 0).all())
    assert torch.equal(steps == 0, scores[order].diff() == 0)


def test_at_its_full_size() -> None:
    """Two whole chunks of 1024 and a part of a third agree with the reference."""
    interpreter.repair()
    scores = torch.randn(1, 2300) * 2
    scores -= scores.amax(dim=-1, keepdim=True)
    fractions = torch.tensor([[0.9], [NEVER]], dtype=torch.float64)
    asked = Cuts(torch.tensor([300]), fractions[0], fractions[1])
    found, expected = scores.clone(), scores.clone()
    kernels.top_k_top_p(found, *asked, None)
    reference.top_k_top_p(expected, *asked, None)
    assert torch.equal(found, expected)
    assert 0 < int((found > NEVER).sum()) < scores.numel()
