"""The checkpoint's tokenizer, and tokenizers that are refused."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from inferd.engine.api.errors import ModelError
from inferd.server.schema.embeddings import Side
from inferd.server.text.model import GenerationDefaults, ServedModel
from inferd.server.text.pretrained import load_pretrained
from inferd.server.text.split_points import PART
from inferd.server.text.tokenizer import NoSplitPointError, Tokenizer, TooManyTokensError

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the embedded model's small files, to be damaged."""
    for name in FILES:
        shutil.copy(MODEL_PATH / name, tmp_path / name)
    return tmp_path


def load(path: Path) -> ServedModel:
    return ServedModel.load(path, ("m",), max_model_len=128, vocab_size=3_072)


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_ids_are_those_of_transformers() -> None:
    theirs = TokenizersBackend.from_pretrained(MODEL_PATH)
    ours = load(MODEL_PATH).tokenizer
    for text in ("Hello, world", " 12 + 30 = ", "<|im_start|>user\nhi<|im_end|>", "\u65e5\u672c \U0001f600", ""):
        assert list(ours.encode(text, True)) == theirs.encode(text)
        assert ours.decode(ours.encode(text, False), skip_special=True) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True
        )


def test_a_tokenizer_that_truncates_does_not(checkpoint: Path) -> None:
    path = checkpoint / "tokenizer.json"
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    change(path, truncation=truncation)
    text = "one two three four five six seven eight"
    assert len(Backend.from_file(str(path)).encode(text).ids) == 4, "the file does truncate"
    assert load(checkpoint).tokenizer.encode(text, False) == load(MODEL_PATH).tokenizer.encode(text, False)


def test_defaults_and_ends_come_from_the_checkpoint(checkpoint: Path) -> None:
    recommended = {"temperature": 0.25, "top_k": 7, "max_new_tokens": 9, "min_p": None, "eos_token_id": [1, 5]}
    (checkpoint / "generation_config.json").write_text(json.dumps(recommended))
    model = load(checkpoint)
    assert model.defaults == GenerationDefaults(temperature=0.25, top_k=7, max_new_tokens=9)
    end = model.tokenizer.eos_token_id
    assert end is not None
    assert model.eos_token_ids == tuple(dict.fromkeys((1, 5, end)))


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        ("generation_config.json", {"temperature": -1}, "temperature must be from 0 to 2"),
        ("generation_config.json", {"top_k": 2.5}, "top_k"),
        ("generation_config.json", {"eos_token_id": 3_072}, "eos_token_id must be from 0 to 3071"),
        ("tokenizer_config.json", {"chat_template": "{% if %}"}, "chat template does not parse: line 1"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(
    checkpoint: Path, file: str, values: dict[str, object], words: str
) -> None:
    change(checkpoint / file, **values)
    with pytest.raises(ModelError, match=words):
        load(checkpoint)


def test_a_broken_or_missing_tokenizer_is_refused(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text('{"model": 3')
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_pretrained(checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_pretrained(checkpoint)


def test_a_broken_generation_config_is_refused(checkpoint: Path) -> None:
    for content, words in (("[1]", "must hold an object"), ("{", "is not JSON")):
        (checkpoint / "generation_config.json").write_text(content)
        with pytest.raises(ModelError, match=words):
            load(checkpoint)


@pytest.mark.sampled(keep=3, among="slow starts")
def test_the_http_side_never_loads_torch() -> None:
    """Imports the application, loads a tokenizer, renders a template and encodes it, in a process of its own."""
    program = f"""
import sys
from pathlib import Path
import inferd.server.endpoints.app
from inferd.server.text.model import ServedModel
from inferd.server.text.template import Conversation
model = ServedModel.load(Path({str(MODEL_PATH)!r}), ("m",), max_model_len=128, vocab_size=3072)
text = model.template.render(Conversation(({{"role": "user", "content": "hi"}},)))
assert model.tokenizer.encode(text, False)
print(sorted({{"torch", "triton"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_table_holds_the_bytes_of_every_token() -> None:
    tokenizer: Tokenizer = load(MODEL_PATH).tokenizer
    assert tokenizer.bytes.join(tokenizer.encode("h\u00e9llo", False), skip_special=False) == "h\u00e9llo".encode()
    assert tokenizer.token(10**6) is None
    assert tokenizer.bytes.of(10**6) == b""


@pytest.mark.parametrize("seed", range(5))
def test_a_text_has_at_least_as_many_tokens_as_its_bytes_say(seed: int) -> None:
    tokenizer = load(MODEL_PATH).tokenizer
    rng = random.Random(seed)
    pieces = ("the ", "river", "  ", "\n", "\u00e9", "\U0001f642", "\u4e2d", "x" * 40, " " * 100, "<|im_start|>", "7")
    for _ in range(50):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(60)))
        num_bytes, least = tokenizer.size_of(text)
        assert num_bytes == len(text.encode())
        assert least <= len(tokenizer.encode(text, False))
        assert (least > 0) == bool(text), "the embedded model's tokenizer has a bound"


@pytest.mark.parametrize(
    "other",
    [
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
    ],
)
def test_where_text_is_rewritten_or_dropped_bytes_say_nothing(other: dict[str, Any]) -> None:
    state = json.loads((MODEL_PATH / "tokenizer.json").read_text())
    changed = Tokenizer(Backend.from_str(json.dumps({**state, **other})), {}, None)
    assert changed.size_of("hello") == (5, 0)


def test_more_tokens_than_are_wanted_are_counted_and_not_listed() -> None:
    tokenizer = load(MODEL_PATH).tokenizer
    ids = tokenizer.encode("one two three", False)
    assert tokenizer.encode("one two three", False, len(ids)) == ids
    with pytest.raises(TooManyTokensError) as caught:
        tokenizer.encode("one two three", False, len(ids) - 1)
    assert caught.value.num_tokens == len(ids)


def in_parts(
    tokenizer: Tokenizer, text: str, kept: int | None = None, most: int = 2**20, side: Side | None = None
) -> tuple[tuple[int, ...], int]:
    """(ids, number of characters that were read for them in parts)."""
    work, num_chars = tokenizer.encode_in_parts(text, True, most, kept, side), 0
    while True:
        try:
            num_chars += next(work)
        except StopIteration as end:
            return end.value, num_chars


def with_frame(checkpoint: Path) -> Tokenizer:
    """The embedded model's tokenizer, with one token added before each text and two behind."""
    return Tokenizer(framed_backend(checkpoint), {}, None)


def framed_backend(checkpoint: Path) -> Backend:
    state = json.loads((checkpoint / "tokenizer.json").read_text())
    start, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("<|im_start|>", "<|im_end|>"))
    names = {token["content"]: token["id"] for token in state["added_tokens"]}
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}, end, end],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            name: {"id": name, "ids": [names[name]], "tokens": [name]} for name in ("<|im_start|>", "<|im_end|>")
        },
    }
    return Backend.from_str(json.dumps(state))


def with_bos(checkpoint: Path) -> Tokenizer:
    """The embedded model's tokenizer, with one token added before each text."""
    state = json.loads((checkpoint / "tokenizer.json").read_text())
    name = "<|im_start|>"
    number = next(token["id"] for token in state["added_tokens"] if token["content"] == name)
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }
    return Tokenizer(Backend.from_str(json.dumps(state)), {}, None)


def test_a_text_that_begins_with_the_added_token_is_known(checkpoint: Path) -> None:
    tokenizer = with_bos(checkpoint)
    assert tokenizer.has_own_bos("<|im_start|>hi") and not tokenizer.has_own_bos("hi<|im_start|>")
    assert tokenizer.encode("<|im_start|>hi", False) == tokenizer.encode("hi", True)
    for other in (load(checkpoint).tokenizer, with_frame(checkpoint)):
        assert not other.has_own_bos("<|im_start|>hi"), "none is added before texts alone"


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("unit", ["hello there ", "1234567890", "x1 ", "\u4eca\u5929\uff0c"])
def test_the_last_ids_of_a_long_text_are_those_of_the_whole(checkpoint: Path, unit: str) -> None:
    for tokenizer in (load(checkpoint).tokenizer, with_frame(checkpoint)):
        text = unit * (100_000 // len(unit))
        whole = tokenizer.encode(text, True)
        assert in_parts(tokenizer, text) == (whole, len(text))
        for kept in (1, 2, 3, 100, 20_000, len(whole) - 1, len(whole), len(whole) + 1):
            ids, num_chars = in_parts(tokenizer, text, kept)
            assert ids == whole[-kept:]
            assert num_chars <= kept * len(text) / len(whole) + 3 * PART, "and no more is read"


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("num_chars", [0, 40, 100_000])
def test_a_side_of_a_text_is_cut_as_the_library_cuts_it(checkpoint: Path, side: Side, num_chars: int) -> None:
    """The tokens that are added stay, and no more of a long text is read than is needed."""
    oracle, tokenizer = framed_backend(checkpoint), with_frame(checkpoint)
    text = "hello there " * (num_chars // 12)
    whole = tokenizer.encode(text, True)
    for kept in (4, 5, 10, 20_000, len(whole) - 1, len(whole), len(whole) + 1):
        if kept <= tokenizer.num_added:
            continue
        oracle.enable_truncation(kept, direction=side)
        expected = tuple(oracle.encode(text).ids)
        ids, num_read = in_parts(tokenizer, text, kept, side=side)
        assert ids == tokenizer.cut(whole, kept, side) == expected
        assert num_read <= kept * len(text) / len(whole) + 3 * PART
        assert in_parts(tokenizer, text, kept)[0] == whole[-kept:]
        assert kept >= len(whole) or in_parts(tokenizer, text, kept)[0] != expected, "the last ids are another rule"


def test_ids_of_a_client_are_cut_without_the_tokens_that_are_added(checkpoint: Path) -> None:
    tokenizer = with_frame(checkpoint)
    start, *_, end = tokenizer.encode("a", True)
    assert tokenizer.cut((1, 2, 3, 4, 5), 4, "right") == (1, 2, 3, 4)
    assert tokenizer.cut((1, 2, 3, 4, 5), 4, "left") == (2, 3, 4, 5)
    assert tokenizer.cut((start, 2, 3, 4, 5, end, end), 5, "right") == (start, 2, 3, end, end), "as a text's ids"
    assert tokenizer.cut((start, 2, 3, 4, 5, end, end), 3, "right") == (start, 2, 3), "too few for them"


def test_a_long_text_is_read_no_further_than_the_tokens_that_are_wanted() -> None:
    tokenizer = load(MODEL_PATH).tokenizer
    read: list[int] = []
    with pytest.raises(TooManyTokensError) as caught:
        read.extend(tokenizer.encode_in_parts("9" * 2**20, False, 1_000))
    assert sum(read) <= 2 * PART
    assert caught.value.num_tokens > 1_000


def test_a_long_text_without_a_place_to_cut_is_refused_where_it_is_read(checkpoint: Path) -> None:
    tokenizer = load(MODEL_PATH).tokenizer
    text = "a" * 2**20 + " the end" * 10_000
    with pytest.raises(NoSplitPointError) as caught:
        in_parts(tokenizer, text)
    assert caught.value.start == 0
    assert caught.value.num_chars >= 2**20
    assert in_parts(tokenizer, text, 100)[0] == tokenizer.encode(" the end" * 100, True)[-100:]
    change(checkpoint / "tokenizer.json", normalizer={"type": "Lowercase"})
    unknown = load(checkpoint).tokenizer
    text = "the end " * 20_000
    assert in_parts(unknown, text) == (unknown.encode(text, True), len(text)), "it is read at once"
    with pytest.raises(NoSplitPointError):
        in_parts(unknown, text * 7)


def test_a_tokenizer_that_reads_nothing_is_refused(checkpoint: Path) -> None:
    state = json.loads((checkpoint / "tokenizer.json").read_text())
    state["model"] = {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "c"}
    with pytest.raises(ModelError, match="does not read the text 'a'"):
        Tokenizer(Backend.from_str(json.dumps(state)), {}, None)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("1000000000000000019884624838656", 10**30 + 19884624838656),  # transformers' word for "no limit"
        ("-1e400", None),
        ("NaN", None),
        ("[Infinity, 0.1]", [None, 0.1]),
        ('"\\ud800"', "\ud800"),
        ('{"\\udfff": 18446744073709551616}', {"\udfff": 2**64}),
        ("1" * 4_000, int("1" * 4_000)),
    ],
)
def test_whatever_a_tokenizer_config_holds_is_told(checkpoint: Path, value: str, told: object) -> None:
    file = checkpoint / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config)[:-1] + f', "inferd_test": {value}}}')
    info = json.loads(load(checkpoint).tokenizer_info, parse_constant=pytest.fail)
    assert info["inferd_test"] == told
    assert info["chat_template"] == config["chat_template"]


def test_a_tokenizer_config_without_end_is_refused_or_told(checkpoint: Path) -> None:
    file = checkpoint / "tokenizer_config.json"
    text = file.read_text().rstrip()[:-1]
    for depth in (100, 450, 900, 100_000):
        file.write_text(f'{text}, "inferd_test": {"[" * depth}{"]" * depth}}}')
        try:
            assert json.loads(load(checkpoint).tokenizer_info)["inferd_test"] is not None
        except ModelError:
            assert depth > 100


SPECIAL = (
    "<|im_start|>",
    "hi",
    "<|im_end|>",
    "  caf\u00e9",
    "<tool_call>",
    " \U0001f600" * 2,
    "\n",
    "\u65e5",
    "e\u0301",
)


@pytest.mark.sampled(keep=8)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_offsets_say_what_each_token_of_a_text_is(checkpoint: Path, seed: int, adds: bool) -> None:
    rng = random.Random(seed)
    for tokenizer in (load(checkpoint).tokenizer, with_frame(checkpoint)):
        text = "".join(rng.choices(SPECIAL, k=8))
        ids = tokenizer.encode(text, adds)
        num_added = (len(ids) - len(tokenizer.encode(text, False))) // 3
        offsets = tokenizer.offsets(text, ids)
        said = [text[a:b] for a, b in itertools.pairwise((*offsets, len(text)))]
        assert said[:num_added] == [""] * num_added
        assert said[len(said) - 2 * num_added :] == [""] * 2 * num_added
        assert "".join(said) == text
        for token_id, part in zip(ids, said, strict=True):
            own = tokenizer.bytes.of(token_id)
            # A part of a character is a continuation, or a beginning without its end.
            is_whole = own.decode("utf-8", "ignore").encode() == own
            assert not is_whole or part.encode() == own or (part == "" and token_id in tokenizer.special_ids.values())


@pytest.mark.parametrize(
    ("change", "text", "parts"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "The OLD", ["The", " OLD"]),
        (
            {"normalizer": {"type": "Prepend", "prepend": "xy"}},
            "<|im_end|>\U0001f600b",
            ["<|im_end|>", "\U0001f600", "b"],
        ),
    ],
)
def test_offsets_of_a_text_that_is_rewritten(
    checkpoint: Path, change: dict[str, Any], text: str, parts: list[str]
) -> None:
    json_file = checkpoint / "tokenizer.json"
    json_file.write_text(json.dumps(json.loads(json_file.read_text()) | change))
    tokenizer = with_frame(checkpoint)
    ids = tokenizer.encode(text, True)
    offsets = tokenizer.offsets(text, ids)
    said = [text[a:b] for a, b in itertools.pairwise((*offsets, len(text)))]
    assert (said[0], said[-2:]) == ("", ["", ""]), "what is added shows nothing"
    assert "".join(said) == text
    assert set(accumulate(map(len, parts[:-1]))) <= set(offsets)
