"""Conversations as token ids: packed whole into sequences of one length, with the ids that the model must learn.

This module decides which tokens are targets: the assistant's words, up to the end mark. It knows nothing about the
model.
"""

import random

import torch
from tokenizers import Tokenizer

from examples.tiny.conversation import TEXT_END, Conversation, render
from examples.tiny.mixture import USUAL, Diet, Mixture
from examples.tiny.tokenizer import id_of

DOCUMENT_SHARE = 0.03
# Sequence lengths and their shares. Short sequences hold one or two conversations from their first token on, as in
# serving. Long ones teach the model to skip over distant text.
LENGTHS, LENGTH_SHARES = (128, 512, 1024, 2048), (75, 18, 5, 2)

# (input ids [B, T], target ids [B, T], with -100 at positions that are not learned)
Batch = tuple[torch.Tensor, torch.Tensor]


class Batches:
    """An endless sequence of batches of `num_tokens` tokens."""

    def __init__(self, mixture: Mixture, tokenizer: Tokenizer, num_tokens: int, seed: int) -> None:
        self._mixture, self._tokenizer, self._num_tokens = mixture, tokenizer, num_tokens
        self._rng = random.Random(seed)
        self._text_end = id_of(tokenizer, TEXT_END)

    def draw(self, diet: Diet = USUAL) -> Batch:
        length = self._rng.choices(LENGTHS, LENGTH_SHARES)[0]
        rows = [self._sequence(length + 1, diet) for _ in range(self._num_tokens // length)]
        ids = torch.tensor([row_ids for row_ids, _ in rows])
        targets = torch.tensor([row_targets for _, row_targets in rows])
        return ids[:, :-1].contiguous(), targets[:, 1:].contiguous()

    def _sequence(self, length: int, diet: Diet) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        targets: list[int] = []
        while len(ids) < length:
            is_document = self._rng.random() < DOCUMENT_SHARE
            more_ids, more_targets = self._document() if is_document else self._conversation(diet)
            ids += more_ids
            targets += more_targets
        return ids[:length], targets[:length]

    def _document(self) -> tuple[list[int], list[int]]:
        ids = [*self._encode(self._mixture.draw_document()), self._text_end]
        return ids, [-100, *ids[1:]]

    def _conversation(self, diet: Diet) -> tuple[list[int], list[int]]:
        return encode_conversation(self._mixture.draw(diet), self._tokenizer)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def encode_conversation(conversation: Conversation, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(ids of the chat template and a text end, targets). A target is -100 outside of the assistant's words."""
    ids: list[int] = []
    targets: list[int] = []
    for header, body in render(conversation):
        message = tokenizer.encode(f"{header}{body}\n", add_special_tokens=False).ids
        num_header = len(tokenizer.encode(header, add_special_tokens=False).ids)
        is_own = header.endswith("assistant\n")
        ids += message
        targets += [-100] * num_header + message[num_header:-1] + [-100] if is_own else [-100] * len(message)
    return [*ids, id_of(tokenizer, TEXT_END)], [*targets, -100]
