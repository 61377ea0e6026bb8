"""Prompts are read in turns on threads, no further than needed, and not for a caller that has left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.generate.prompts import MANY_IDS, PromptReader
from inferd.server.text.model import ServedModel
from inferd.server.text.template import Conversation
from inferd.server.text.text_threads import TextThreads
from inferd.server.text.tokenizer import Tokenizer

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
WORDS = "the old river " * 20_000


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel.load(MODEL_PATH, ("m",), max_model_len=64, vocab_size=3_072)


@pytest.fixture
def threads() -> Iterator[TextThreads]:
    threads = TextThreads()
    yield threads
    threads.close()


class Endless:
    """A text whose parts never end. The second is held until `goes_on` is set."""

    def __init__(self) -> None:
        self.num_parts = 0
        self.is_reading, self.goes_on = threading.Event(), threading.Event()

    def encode_in_parts(self, *_: object) -> Generator[int, None, tuple[int, ...]]:
        while True:
            self.num_parts += 1
            if self.num_parts == 2:
                self.is_reading.set()
                self.goes_on.wait(30)
            yield 1


def test_nothing_more_is_read_for_a_caller_that_has_left(model: ServedModel, threads: TextThreads) -> None:
    endless = Endless()
    prompts = PromptReader(replace(model, tokenizer=cast("Tokenizer", endless)), threads)

    async def leave() -> None:
        task = asyncio.create_task(prompts.encode("x", add_special=False))
        await asyncio.to_thread(endless.is_reading.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        endless.goes_on.set()
        await asyncio.to_thread(threads._short.shutdown)

    asyncio.run(leave())
    assert endless.num_parts == 2


def test_a_short_text_does_not_wait_for_the_rest_of_long_ones(model: ServedModel) -> None:
    """As many long texts as there are threads are being read all the time."""
    endless = Endless()
    endless.goes_on.set()
    threads = TextThreads()
    long = PromptReader(replace(model, tokenizer=cast("Tokenizer", endless)), threads)

    async def ask() -> None:
        tasks = [asyncio.create_task(long.encode("x", add_special=False)) for _ in range(16)]
        assert await PromptReader(model, threads).encode("hello", add_special=False)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()

    asyncio.run(ask())
    threads.close()


def test_what_is_kept_of_a_long_prompt_is_the_end_of_the_whole(model: ServedModel, threads: TextThreads) -> None:
    prompts = PromptReader(model, threads)
    whole = model.tokenizer.encode(WORDS, True)
    assert len(whole) > 16 * model.max_model_len

    async def encode(kept: int | None) -> tuple[int, ...]:
        ((ids, text),) = await prompts.encode_all([WORDS], add_special=True, kept=kept)
        assert text == WORDS
        return ids

    assert asyncio.run(encode(None)) == whole
    assert asyncio.run(encode(20)) == whole[-21:], "one more says that it was cut"
    rendered, text = asyncio.run(
        prompts.render(Conversation([{"role": "user", "content": WORDS}]), add_special=False, kept=20)
    )
    assert text is not None
    assert rendered == model.tokenizer.encode(text, False)[-21:]


def test_a_refusal_names_the_limit_that_it_broke(model: ServedModel, threads: TextThreads) -> None:
    prompts, digits = PromptReader(model, threads), "7" * (MANY_IDS + 2)

    def refusal(work: object) -> tuple[str, str]:
        with pytest.raises(RequestError) as caught:
            asyncio.run(work)  # type: ignore[arg-type]
        return caught.value.code, caught.value.message

    code, message = refusal(prompts.encode_all([digits], add_special=False))
    assert (code, "64 tokens" in message) == ("context_length_exceeded", True)
    code, message = refusal(prompts.encode(digits, add_special=False))
    assert (code, f"at most {MANY_IDS} tokens" in message) == ("string_above_max_length", True)
    code, message = refusal(prompts.encode("no place" + "e" * 200_000, add_special=False))
    assert (code, "131072 characters" in message) == ("string_above_max_length", True)
