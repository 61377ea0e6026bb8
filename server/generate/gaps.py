"""Reads the text around a gap in a file: text -> token ids that ask the model to fill the gap.

Only the side of a text that lies at the gap is read, so that a large file costs no more than the context holds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from inferd.server.errors import messages as errors
from inferd.server.generate.prompts import MANY_IDS, CheckSize, Encoded, PromptReader
from inferd.server.schema import completions
from inferd.server.text.fill_in import FillIn, shares_of
from inferd.server.text.model import ServedModel
from inferd.server.text.split_points import MAX_PART
from inferd.server.text.tokenizer import NoSplitPointError, TooManyTokensError

_CHARS_PER_TOKEN = 64
"""Characters that are read, of a text that is cut to the context, for each token that there is room for. So many have
more than one token, unless they are blanks."""
_MOST_CHARS = MAX_PART - 1
"""Most characters that are read of such a text. It needs no split point, also if another character is put before it."""
_MOST_CHARS_OF_FILES = 2**20
_UNBOUNDED = 2**62


@dataclass(frozen=True, slots=True)
class Gap:
    """A place in a file, whose text the model writes."""

    prefix: str
    suffix: str
    begun: str = ""
    """The beginning of the text in the gap."""
    files: tuple[tuple[str, str], ...] = ()
    """(name, text) of further files, or parts of them, the most relevant last."""


class GapReader:
    """Reads gaps for one model."""

    def __init__(self, model: ServedModel, prompts: PromptReader) -> None:
        self._model, self._prompts = model, prompts

    def _fill_in(self, param: str) -> FillIn:
        """Raises `RequestError` for a model that was not trained to fill in text."""
        found = self._model.fill_in
        if found is None:
            raise errors.cannot_fill_in(param)
        return found

    async def fill(
        self,
        prefixes: Sequence[completions.Prompt],
        suffix: str,
        *,
        add_special: bool,
        check_size: CheckSize,
        kept: int | None,
        check_total: Callable[[int, int], None],
    ) -> list[Encoded]:
        """For each prefix the ids that ask for the text between it and the suffix. Raises `RequestError`.

        `kept`: most ids of a prompt; then the prefix loses its beginning, and the suffix its end. The rest is as for
        `encode_all`.
        """
        fill_in = self._fill_in("suffix")
        room = None if kept is None else max(0, kept - fill_in.num_own)

        def work() -> Generator[int, None, list[Encoded]]:
            encoded: list[Encoded] = []
            num_ids = 0
            behind = yield from self._part(fill_in, "suffix", suffix, room, check_size, is_behind=True)
            for i, prefix in enumerate(prefixes):
                if isinstance(prefix, str):
                    before = yield from self._part(fill_in, "prompt", prefix, room, check_size)
                else:
                    self._prompts.check_ids(prefix, f"prompt[{i}]" if len(prefixes) > 1 else "prompt")
                    before = prefix
                num_before, num_behind = len(before), len(behind)
                if room is not None:
                    num_before, num_behind = shares_of(num_before, num_behind, room)
                kept_before, kept_behind = before[len(before) - num_before :], behind[:num_behind]
                encoded.append((fill_in.prompt(kept_before, kept_behind, add_special=add_special), None))
                num_ids += len(encoded[-1][0])
                check_total(i + 1, num_ids)
            return encoded

        return await self._prompts.in_turns(work(), max(len(suffix), *map(len, prefixes)))

    async def fill_gap(self, gap: Gap, room: int, *, add_special: bool) -> tuple[tuple[int, ...], bool]:
        """(the ids that ask for the text in a gap, whether they leave a part of its surroundings out).

        At most `room` ids. If they do not fit, the text before the gap loses its beginning, the text behind it its end,
        and the further files theirs before either. Raises `RequestError`.
        """
        fill_in = self._fill_in("input_prefix")
        room = max(0, room - fill_in.num_own)

        most_chars = min(_CHARS_PER_TOKEN * room, _MOST_CHARS)

        def work() -> Generator[int, None, tuple[tuple[int, ...], bool]]:
            prefix = yield from self._part(fill_in, "input_prefix", gap.prefix, room)
            begun = yield from self._part(fill_in, "prompt", gap.begun, room, continues=True)
            behind = yield from self._part(fill_in, "input_suffix", gap.suffix, room, is_behind=True)
            before = prefix + begun
            num_before, num_behind = shares_of(len(before), len(behind), room)
            num_files = room - num_before - num_behind
            files = _last_files(gap.files, min(_CHARS_PER_TOKEN * num_files, _MOST_CHARS_OF_FILES))
            further = yield from fill_in.read_files(files, _UNBOUNDED)
            is_cut = (
                files != gap.files
                or any(len(text) > most_chars for text in (gap.prefix, gap.begun, gap.suffix))
                or num_before + num_behind < len(before) + len(behind)
                or (bool(files) and num_files < len(further))
            )
            before, behind = before[len(before) - num_before :], behind[:num_behind]
            further = further[max(0, len(further) - num_files) :]
            return fill_in.prompt(before, behind, further, add_special=add_special), is_cut

        return await self._prompts.in_turns(work(), max(len(gap.prefix), len(gap.suffix)))

    def _part(
        self,
        fill_in: FillIn,
        param: str,
        text: str,
        room: int | None,
        check_size: CheckSize | None = None,
        *,
        is_behind: bool = False,
        continues: bool = False,
    ) -> Generator[int, None, tuple[int, ...]]:
        """The ids of a text before a gap or behind it, which continues other text or begins it. With `room`, only the
        side near the gap is read, and any text is taken."""
        limit = self._model.max_model_len
        most, kept = max(MANY_IDS, limit), None
        if room is not None:
            num_chars = min(_CHARS_PER_TOKEN * room, _MOST_CHARS)
            text = text[:num_chars] if is_behind else text[max(0, len(text) - num_chars) :]
            most, kept = _UNBOUNDED, None if is_behind else room
        if check_size is not None:
            check_size(*fill_in.tokenizer.size_of(text))
        if not text or kept == 0:
            return ()
        try:
            return (yield from fill_in.read(text, most, kept, continues=is_behind or continues))
        except TooManyTokensError as error:
            raise errors.context_too_long(param, limit, error.num_tokens, None) from None
        except NoSplitPointError as error:
            raise errors.no_place_to_cut(param, error.start, error.num_chars, error.limit) from None


def _last_files(files: tuple[tuple[str, str], ...], num_chars: int) -> tuple[tuple[str, str], ...]:
    """The last of the files, and of the first of these the last characters, about `num_chars` in all."""
    kept: list[tuple[str, str]] = []
    for name, text in reversed(files):
        if num_chars <= 0:
            break
        kept.append((name[-_MOST_CHARS:], text[max(0, len(text) - min(num_chars, _MOST_CHARS)) :]))
        num_chars -= len(name) + len(text)
    return tuple(reversed(kept))
