"""Scores: what is made of logits, vectors and log probabilities is what torch makes of them."""

from __future__ import annotations

import asyncio
import struct
import time
from dataclasses import dataclass, field
from typing import Any, Self

import pytest
import torch

from inferd.engine.api.classifier_folder import Activation, TokenPair
from inferd.engine.api.wire.messages import Delta, Submit, WireLogprobs
from inferd.engine.api.wire.params import Pooling, SamplingParams, SchedulingParams
from inferd.server.auth.quotas import Unlimited
from inferd.server.dispatch.adapter_places import AdapterPlaces
from inferd.server.generate.score import ByTokens, activated, cosines, numbers
from inferd.server.generate.texts import Input, Inputs

DRAW = torch.Generator().manual_seed(3)
FUNCTIONS: dict[Activation, Any] = {
    "sigmoid": torch.sigmoid, "softmax": lambda x: torch.softmax(x, -1), "identity": lambda x: x,
}  # fmt: skip


def packed(values: torch.Tensor) -> bytes:
    return struct.pack(f"<{len(values)}f", *values.tolist())


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("scale", [1, 30, 2_000])
def test_activations_are_those_of_torch(activation: Activation, scale: float) -> None:
    logits = torch.randn(7, generator=DRAW) * scale
    ours = torch.tensor(activated(numbers(packed(logits)), activation), dtype=torch.float64)
    function = FUNCTIONS[activation]
    torch.testing.assert_close(ours, function(logits.double()), rtol=1e-12, atol=1e-300)
    if scale == 1:
        assert not torch.allclose(ours, function(logits.double() * 1.00001), rtol=1e-12, atol=1e-300)


def test_the_time_of_a_softmax_is_linear() -> None:
    """It takes 10 ms; a sum for each label would take 10 s."""
    logits = torch.randn(2**15, generator=DRAW).tolist()
    start = time.thread_time()
    activated(logits, "softmax")
    assert time.thread_time() - start < 1


@pytest.mark.parametrize("num_firsts", [1, 5])
def test_cosines_are_those_of_torch(num_firsts: int) -> None:
    vectors = torch.nn.functional.normalize(torch.randn(num_firsts + 5, 384, generator=DRAW), dim=-1)
    firsts, seconds = vectors[:num_firsts], vectors[num_firsts:]
    ours = torch.tensor(cosines(list(map(packed, vectors)), num_firsts))
    torch.testing.assert_close(ours, torch.cosine_similarity(firsts, seconds), rtol=0, atol=2e-7)
    assert cosines([packed(firsts[0] * 1.001)] * 2, 1) == (1.0,)


@dataclass
class Stream:
    """Draws the likeliest allowed token, and reports the likeliest of all."""

    submit: Submit
    logprobs: dict[int, float]
    num_top: int

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        params, likely = self.submit.params, sorted(self.logprobs, key=self.logprobs.__getitem__, reverse=True)
        drawn = next(token_id for token_id in likely if token_id in params.allowed_token_ids)
        top = tuple((token_id, self.logprobs[token_id]) for token_id in likely[: self.num_top])
        wire = WireLogprobs(drawn, self.logprobs[drawn], likely.index(drawn) + 1, top)
        return Delta(request_id=self.submit.request_id, token_ids=(drawn,), logprobs=(wire,), finish_reason="length")

    def abort(self, reason: str = "abort") -> None:
        pass


@dataclass
class Router:
    rows: dict[int, dict[int, float]]
    """First token of a prompt -> the log probabilities behind it."""
    num_top: int
    submits: list[Submit] = field(default_factory=list)
    adapters: AdapterPlaces = field(default_factory=AdapterPlaces)

    def submit(self, submit: Submit, *, is_admitted: bool = False) -> Stream:
        del is_admitted
        self.submits.append(submit)
        return Stream(submit, self.rows[submit.prompt_ids[0]], self.num_top)


class Paid(Unlimited):
    used = 0

    def take(self, num_tokens: int) -> None:
        self.used += num_tokens

    owe = take


YES, NO = 4, 9


@pytest.mark.parametrize(("num_top", "num_submits"), [(20, 6), (3, 9), (0, 12)])
def test_a_score_by_tokens_is_the_difference_of_two_logits(num_top: int, num_submits: int) -> None:
    """Also if the likeliest tokens of all are others: then the other one is drawn, too."""
    logits = torch.randn(6, 20, generator=DRAW)
    # In rows 3 to 5 neither is among the likeliest, in the others both are.
    for row in range(6):
        logits[row, [YES, NO]] = logits[row, [YES, NO]] - 50 if row > 2 else logits[row, [YES, NO]] + 50
    found = torch.log_softmax(logits.double(), -1)
    router = Router({row: dict(enumerate(found[row].tolist())) for row in range(6)}, num_top)
    account = Paid()
    inputs = Inputs(
        inputs=tuple(Input((row, 1), f"documents[{row}]") for row in range(6)),
        params=SamplingParams(max_tokens=1, seed=0, temperature=0.0, logprobs=20),
        scheduling=SchedulingParams(),
        account=account,
    )
    ours = asyncio.run(ByTokens(inputs, TokenPair(YES, NO), "sigmoid").scores(router, None))  # type: ignore[arg-type]
    two = logits[:, [YES, NO]].double()
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), torch.softmax(two, -1)[:, 0], rtol=1e-9, atol=0)
    assert len(router.submits) == num_submits == len({submit.request_id for submit in router.submits})
    assert account.used == 12, "a prompt is paid for once"


def test_inputs_carry_their_types() -> None:
    inputs = Inputs(
        inputs=(Input((1, 2, 3), "a", 2), Input((4,), "b"), Input((5, 6), "c", 1)),
        params=SamplingParams(max_tokens=0, seed=0, pooling=Pooling(gives="logits")),
        scheduling=SchedulingParams(priority=2),
    )
    submits = list(inputs.submits())
    assert [submit.params.pooling.num_first for submit in submits if submit.params.pooling] == [2, 0, 1]
    assert [submit.prompt_ids for submit in submits] == [(1, 2, 3), (4,), (5, 6)]
    assert {submit.scheduling.priority for submit in submits} == {2}
    assert (inputs.num_tokens, inputs.num_inputs, inputs.name_of(2)) == (6, 3, "c")
