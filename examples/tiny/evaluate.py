"""Scores the embedded model on tasks that are held out of training: `python -m examples.tiny.evaluate`.

Two hundred prompts, greedy, through transformers, in fp32 from the saved bf16 weights. An answer counts only if it is
exact and the model stops by itself. Prints a table, and exits with 1 below the threshold. The tasks and their right
answers come from tasks.py.
"""

import argparse
import itertools
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny.mixture import Mixture
from examples.tiny.tasks import TASKS, Example, draw, is_held_out, sum_key
from inferd.engine.api.checkpoint import EMBEDDED_PATH

BAR = 0.90
NUM_PER_TASK = 50
SEED = 7
MAX_NEW_TOKENS = 96
NUM_CONVERSATIONS_CHECKED = 20_000

PROMPTS = (
    "Hello!",
    "What are you?",
    "What is a KV cache?",
    "What is 17 + 25?",
    "Sort: 9 3 7 1",
    "Count from 3 to 9",
    "Repeat: the blue whale sings",
    "Tell me a short story.",
)


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    is_finished: bool


class Model:
    """The checkpoint, run by transformers."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def answer(self, prompts: Sequence[str], max_new_tokens: int = MAX_NEW_TOKENS) -> list[Answer]:
        """Answers to all prompts at once: in transformers, a step of this model takes as long for one row as
        for fifty."""
        inputs = self._tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
        ids = self._model.generate(
            **inputs, do_sample=False, temperature=None, top_p=None, max_new_tokens=max_new_tokens
        )
        return [self._read(row) for row in ids[:, inputs["input_ids"].shape[1] :].tolist()]

    def _read(self, ids: list[int]) -> Answer:
        ends = self._model.generation_config.eos_token_id
        length = next((place for place, token_id in enumerate(ids) if token_id in ends), None)
        return Answer(self._tokenizer.decode(ids[:length], skip_special_tokens=True), length is not None)


def held_out_examples(seed: int = SEED) -> dict[str, list[Example]]:
    """The test set: `NUM_PER_TASK` different examples of each task. None can be drawn for training."""
    rng = random.Random(seed)
    examples: dict[str, list[Example]] = {}
    for name, task in TASKS.items():
        different: dict[tuple[str, ...], Example] = {}
        while len(different) < NUM_PER_TASK:
            example = draw(task, rng, held_out=True)
            different[example.key] = example
        examples[name] = list(different.values())
    return examples


def assert_never_trained(examples: dict[str, list[Example]]) -> None:
    """Assert that every test is held out by its hash and a long part of the training stream holds none of them."""
    assert all(example.is_held_out for tests in examples.values() for example in tests)
    tested = {(example.prompt, example.answer) for tests in examples.values() for example in tests}
    mixture = Mixture(1, held_out=False)
    for _ in range(NUM_CONVERSATIONS_CHECKED):
        contents = [message.content for message in mixture.draw().messages]
        assert tested.isdisjoint(itertools.pairwise(contents))
        pairs = re.findall(r"\b(\d\d?) ?(?:\+|plus|and) ?(\d\d?)\b", "\n".join(contents))
        assert not any(is_held_out(sum_key(int(a), int(b))) for a, b in pairs), pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED_PATH, help="the checkpoint (default: the embedded one)")
    parser.add_argument("--show", action="store_true", help="print every wrong answer")
    arguments = parser.parse_args()
    console = Console()
    examples = held_out_examples()
    assert_never_trained(examples)
    model = Model(arguments.model)

    table = Table("task", "exact", "of")
    num_exact = 0
    for name, tests in examples.items():
        answers = model.answer([test.prompt for test in tests])
        wrong = [(t, a) for t, a in zip(tests, answers, strict=True) if a != Answer(t.answer, is_finished=True)]
        num_exact += len(tests) - len(wrong)
        table.add_row(name, str(len(tests) - len(wrong)), str(len(tests)))
        for test, answer in wrong if arguments.show else ():
            console.print(f"{test.prompt!r}: {answer.text!r}, should be {test.answer!r}", markup=False)
    num_tests = sum(map(len, examples.values()))
    table.add_row("all", str(num_exact), str(num_tests))
    console.print(table)
    for prompt, answer in zip(PROMPTS, model.answer(PROMPTS, max_new_tokens=256), strict=True):
        console.print(f"> {prompt}\n{answer.text}{'' if answer.is_finished else ' [did not stop]'}\n", markup=False)
    sys.exit(num_exact < BAR * num_tests)


if __name__ == "__main__":
    main()
