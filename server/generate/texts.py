"""Texts and pairs of texts -> token ids that a model judges. Long ones are refused, or cut before their last tokens.

Reads on threads, in turns, as `prompts` does. Knows nothing of scores.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import msgspec

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Submit
from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.server.auth.quotas import UNLIMITED, Account
from inferd.server.errors import messages as errors
from inferd.server.generate import work
from inferd.server.generate.prompts import PromptReader
from inferd.server.schema.scores import JudgingFields, ScoringFields
from inferd.server.text.model import ServedModel
from inferd.server.text.pair_template import OpenPrompt, PairTemplate
from inferd.server.text.pairs import JoinedPair, PairFrame
from inferd.server.text.split_points import PART
from inferd.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts that are judged together."""

    first: str
    second: str


WAY_TO_CUT = "set 'truncate_prompt_tokens' to -1"
"""The way to have a text cut that is too long, as `with_way_to_cut` takes it."""

Item = str | Pair | tuple[int, ...]
"""A text, a pair, or token ids."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How long an item may be."""

    most: int
    """Most tokens, those that the tokenizer adds included."""
    is_cut: bool = False
    """Whether a longer item is cut; otherwise it is refused."""
    most_second: int | None = None
    """Most tokens of the second text of a pair, which is cut; None: no bound."""
    way: str = WAY_TO_CUT
    """The way to have a longer item cut, as `with_way_to_cut` takes it."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a model has its texts and pairs written before they are tokenized."""

    lowercases: bool = False
    prompt: str = ""
    """Text before each first text of a pair."""
    template: PairTemplate | None = None
    """Template of pairs; None: they are plain pairs."""
    instruction: str | None = None
    """The template's instruction; None: its own."""

    @classmethod
    def of(cls, model: ServedModel, instruction: str | None = None) -> Self:
        """The form in which `model` judges. `instruction`: the request's own. Raises `RequestError` for one that the
        model's prompt has no place for."""
        judges, asked, template = model.judges, instruction, None
        if model.pair_templates is not None:
            instruction = instruction or judges.prompt or None
            template = model.pair_templates.of(instruction)
        if asked is not None and template is None:
            way_out = "This model's prompt has no place for it: write it into the query."
            raise errors.unsupported_parameter("instruction", way_out)
        prompt = judges.prompt if template is None else ""
        return cls(judges.lowercases, prompt, template, instruction)

    def single(self, text: str) -> str:
        """A text, or the second one of a pair."""
        return text.lower() if self.lowercases else text

    def first(self, text: str) -> str:
        """The first text of a pair."""
        return self.single(self.prompt + text)


PLAIN = Form()
"""Texts and pairs as the request has them."""


def cut_of(body: JudgingFields, *mosts: int | None) -> Cut:
    """`mosts`: what bounds every input of the model; None: no bound."""
    asked, second = body.truncate_prompt_tokens, None
    if isinstance(body, ScoringFields):
        second = body.max_tokens_per_doc
    most = min(each for each in (*mosts, asked if asked != -1 else None) if each is not None)
    is_cut = asked is not None or bool(body.truncate) or second is not None
    field, value = body.cut_option
    return Cut(most, is_cut, second, f"set '{field}' to {value}")


@dataclass(frozen=True, slots=True)
class Input:
    """An item as the engine gets it."""

    token_ids: tuple[int, ...]
    name: str
    """Its field of the request, for error messages."""
    num_first: int = 0
    """Tokens of the first type; 0: all are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Valid inputs of one request, in the form of `ManyInputs`."""

    inputs: tuple[Input, ...]
    params: SamplingParams
    scheduling: SchedulingParams
    account: Account = UNLIMITED
    engine_id: str = field(default_factory=lambda: f"judge-{secrets.token_hex(8)}")

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.inputs)

    def name_of(self, index: int) -> str:
        return self.inputs[index].name

    def submits(self) -> Iterator[Submit]:
        """One submit for each input, in order."""
        params, pooling = self.params, self.params.pooling
        for i, each in enumerate(self.inputs):
            if pooling is not None and each.num_first:
                typed = msgspec.structs.replace(pooling, num_first=each.num_first)
                params = msgspec.structs.replace(self.params, pooling=typed)
            yield Submit(
                request_id=f"{self.engine_id}-{i}",
                prompt_ids=each.token_ids,
                params=params if each.num_first else self.params,
                scheduling=self.scheduling,
            )


class TextReader:
    """Reads items for one model."""

    def __init__(self, prompts: PromptReader, model: ServedModel) -> None:
        self._prompts, self._model = prompts, model

    async def read(
        self,
        items: Sequence[Item],
        names: Sequence[str],
        cut: Cut,
        form: Form = PLAIN,
        *,
        add_special: bool = True,
        first_name: str = "query",
    ) -> tuple[Input, ...]:
        """The inputs in order. `names`: of the items, as errors call them, and `first_name` of what is wrong with a
        pair's first text alone. Raises `RequestError`."""
        frame = self._model.tokenizer.pair_frame() if form.template is None else None
        if form.template is None and frame is None and any(isinstance(item, Pair) for item in items):
            message = "This model's tokenizer has no form for pairs of texts. Serve a model that was trained on pairs."
            raise RequestError("not_implemented", message)
        pairs = _PairReader(self._prompts, self._model.tokenizer, cut, frame, form, first_name)

        def reading() -> Generator[int, None, tuple[Input, ...]]:
            inputs: list[Input] = []
            num_read = num_ids = 0
            for item, name in zip(items, names, strict=True):
                num_read += _size(item)
                if num_read > PART:
                    yield _size(item)
                    num_read = 0
                if isinstance(item, Pair):
                    joined = yield from pairs.read(item, name)
                else:
                    written = form.single(item) if isinstance(item, str) else item
                    joined = yield from self._single(written, name, cut, add_special=add_special)
                inputs.append(_fitted(joined, name, cut))
                num_ids += len(inputs[-1].token_ids)
                work.check_input_ids(name.partition("[")[0], len(inputs), num_ids)
            return tuple(inputs)

        try:
            return await self._prompts.in_turns(reading(), max(map(_size, items), default=0))
        except errors.ContextTooLongError as error:
            # One that is cut is still too long if its other parts alone are.
            raise errors.with_way_to_cut(error, "" if cut.is_cut else cut.way) from error

    def _single(
        self, item: str | tuple[int, ...], name: str, cut: Cut, *, add_special: bool
    ) -> Generator[int, None, JoinedPair]:
        """A text or token ids, as a pair without a first text."""
        if not isinstance(item, str):
            self._prompts.check_ids(item, name)
            return JoinedPair((), (), (), item, ())
        frame = self._model.tokenizer.frame
        if add_special and frame is None:
            return JoinedPair((), (), (), (yield from self._prompts.part(item, name, add_special=True)), ())
        before, behind = frame if add_special and frame is not None else ((), ())
        if not cut.is_cut:
            self._prompts.check_least(name, *self._model.tokenizer.size_of(item))
        return JoinedPair(before, (), (), (yield from self._prompts.part(item, name)), behind)


class _PairReader:
    """Reads the pairs of one request. Mostly one query has all documents, so a first text is read once for all pairs
    in a row that have it."""

    def __init__(
        self,
        prompts: PromptReader,
        tokenizer: Tokenizer,
        cut: Cut,
        frame: PairFrame | None,
        form: Form,
        first_name: str,
    ) -> None:
        """The `frame` joins the pairs if the form has no template."""
        self._prompts, self._tokenizer, self._cut, self._frame = prompts, tokenizer, cut, frame
        self._form, self._first_name = form, first_name
        self._text: str | None = None
        self._first: tuple[int, ...] = ()
        self._open: OpenPrompt | None = None

    def read(self, pair: Pair, name: str) -> Generator[int, None, JoinedPair]:
        if pair.first != self._text:
            yield from self._begin(pair.first)
        second = self._form.single(pair.second)
        self._check_least(second, name)
        if self._open is not None:
            reading = self._open.join(second, self._prompts.most_tokens)
            return (yield from self._prompts.bounded(reading, name))
        assert self._frame is not None
        return self._frame.join(self._first, (yield from self._prompts.part(second, name)))

    def _begin(self, text: str) -> Generator[int, None, None]:
        form, written = self._form, self._form.first(text)
        self._check_least(written, self._first_name)
        if form.template is None:
            self._first = yield from self._prompts.part(written, self._first_name)
        else:
            opening = form.template.open(written, form.instruction, self._prompts.most_tokens)
            self._open = yield from self._prompts.bounded(opening, self._first_name)
        self._text = text

    def _check_least(self, text: str, name: str) -> None:
        """Raises `RequestError` for a text whose bytes alone show that it is too long."""
        if not self._cut.is_cut:
            self._prompts.check_least(name, *self._tokenizer.size_of(text))


def _fitted(joined: JoinedPair, name: str, cut: Cut) -> Input:
    """The input. Raises `RequestError` for one that is too long, or has no tokens."""
    if cut.most_second is not None:
        joined = joined.with_second_cut(cut.most_second)
    if len(joined) > cut.most and cut.is_cut:
        joined = joined.cut(cut.most)
    if len(joined) > cut.most:
        raise errors.context_too_long(name, cut.most, len(joined), None)
    if not len(joined):
        raise RequestError("invalid_value", f"Invalid '{name}': it has no tokens. Expected at least one.", name)
    return Input(joined.token_ids, name, joined.num_first)


def _size(item: Item) -> int:
    return max(len(item.first), len(item.second)) if isinstance(item, Pair) else len(item)
