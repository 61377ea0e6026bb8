"""The fixed text and chats that quality is measured on, as token ids of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inferd.server.text.model import ServedModel
from inferd.server.text.template import Conversation

WINDOW = 512
"""Most tokens of a piece of the text. Each piece starts without context."""

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Material:
    """Token ids to measure on."""

    windows: Sequence[Sequence[int]]
    """The text, in pieces."""
    prompts: Sequence[Sequence[int]]
    """The chats' prompts; of a model without a chat template the questions alone."""
    end_ids: frozenset[int]
    """Ids that end an answer."""

    @classmethod
    def of(cls, model: Path, num_windows: int | None = None, num_chats: int | None = None) -> Material:
        served = ServedModel.load(model, ("model",), max_model_len=WINDOW, vocab_size=2**31)
        ids = served.tokenizer.encode((_FOLDER / "text.txt").read_text(encoding="utf-8"), add_special=False)
        windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
        chats = (_FOLDER / "chats.txt").read_text(encoding="utf-8").splitlines()
        prompts = [_prompt(served, chat) for chat in chats[:num_chats]]
        return cls(windows[:num_windows], prompts, frozenset(served.eos_token_ids))


def _prompt(model: ServedModel, question: str) -> tuple[int, ...]:
    if model.template is None:
        return model.tokenizer.encode(question, add_special=True)
    text = model.template.render(Conversation([{"role": "user", "content": question}]))
    return model.tokenizer.encode(text, add_special=False)
