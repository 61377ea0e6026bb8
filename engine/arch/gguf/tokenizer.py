"""Turns the metadata of a GGUF file into tokenizer.json, tokenizer_config.json and generation_config.json.

It knows byte-level BPE ("gpt2") and SentencePiece's BPE ("llama", and with merges "gemma4"). `encoder_tokenizer` knows
the kinds of encoders. It knows no tokenizer library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from inferd.engine.arch.gguf.encoder_tokenizer import around_texts, unigram, wordpiece, written
from inferd.engine.arch.gguf.encoders import ENCODERS
from inferd.engine.arch.gguf.header import GgufError, Value
from inferd.engine.arch.gguf.splitters import SPLITTERS, Splitter
from inferd.engine.arch.gguf.vocabulary import (
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Json,
    Merges,
    Vocabulary,
    is_line,
)
from inferd.engine.arch.shown import shown

_MAX_MERGED_CHARS = 2**24
"""Most characters of the tokens that merges make, each counted as often as it is made."""

_ENDS = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>",
     "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
     "<|tool_response>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>")
)  # fmt: skip
"""Tokens that end an answer. A file states one or two of those that its model uses, so llama.cpp knows them by name."""

_FIM_KEYS = {
    "prefix": ("fim_pre_token_id", "prefix_token_id"),
    "suffix": ("fim_suf_token_id", "suffix_token_id"),
    "middle": ("fim_mid_token_id", "middle_token_id"),
    "pad": ("fim_pad_token_id",),
    "repo": ("fim_rep_token_id",),
    "file": ("fim_sep_token_id",),
}
"""Part of a prompt for filling in the middle -> keys of its token."""

_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "repetition_penalty": "penalty_repeat"}  # fmt: skip

_RERANK, _PLACES = "rerank", ("{query}", "{document}")
"""Name of the prompt of a reranker among the chat templates, and its places for the texts."""


def tokenizer_of(values: Mapping[str, Value]) -> Json:
    """tokenizer.json of the model. Raises `GgufError` for a kind of tokenizer or a splitter that is not known."""
    vocabulary = Vocabulary(values)
    kinds: dict[str, Callable[[Vocabulary, str], Json]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
        "gemma4": _sentencepiece,
        "bert": wordpiece,
        "t5": unigram,
    }
    if vocabulary.kind not in kinds:
        raise GgufError(f"tokenizer.ggml.model must be one of {', '.join(kinds)}, but is {shown(vocabulary.kind)}")
    architecture = str(values.get("general.architecture", ""))
    made = kinds[vocabulary.kind](vocabulary, architecture)
    is_wrapped = architecture in ENCODERS and ENCODERS[architecture].has_cls
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": list(_added_tokens(vocabulary, architecture)),
        **made,
        "post_processor": (around_texts(vocabulary, architecture) if is_wrapped else _post_processor(vocabulary)),
    }  # fmt: skip


def tokenizer_config_of(values: Mapping[str, Value]) -> Json:
    """tokenizer_config.json: special tokens and the chat template. Raises `GgufError` for a template that is none."""
    vocabulary = Vocabulary(values)
    ids = {name: vocabulary.token_id(key, default) for name, key, default in _special(vocabulary)}
    return {
        **{name: vocabulary.tokens[token_id] for name, token_id in ids.items() if token_id is not None},
        "add_bos_token": _adds_bos(vocabulary),
        "add_eos_token": vocabulary.flag("add_eos_token", False),
        "fim_token_ids": _fim_ids(vocabulary),
        "chat_template": _chat_template(values),
        "rerank_template": _rerank_template(values),
    }


def _fim_ids(vocabulary: Vocabulary) -> Json:
    """The ids of the tokens for filling in the middle that the file states, by their part. Newer keys count first."""
    stated = {
        part: next((found for key in keys if (found := vocabulary.token_id(key)) is not None), None)
        for part, keys in _FIM_KEYS.items()
    }
    return {part: token_id for part, token_id in stated.items() if token_id is not None}


def generation_config_of(values: Mapping[str, Value]) -> Json:
    """generation_config.json: the ids that end an answer, and the recommended sampling."""
    vocabulary = Vocabulary(values)
    eos = vocabulary.token_id("eos_token_id", 2 if vocabulary.kind == "llama" else None)
    ids = [eos, vocabulary.token_id("eot_token_id"), vocabulary.token_id("eom_token_id")]
    ids += [
        index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if token in _ENDS and kind in (CONTROL, USER_DEFINED)
    ]
    sampling = {name: values.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    found: Json = {name: value for name, value in sampling.items() if value is not None}
    return {"eos_token_id": [token_id for token_id in dict.fromkeys(ids) if token_id is not None], **found}


def _special(vocabulary: Vocabulary) -> tuple[tuple[str, str, int | None], ...]:
    """(name in tokenizer_config.json, key of the id, id if the file does not state it)."""
    bos, eos, unknown = (1, 2, 0) if vocabulary.kind == "llama" else (None, None, None)
    return (
        ("bos_token", "bos_token_id", bos),
        ("eos_token", "eos_token_id", eos),
        ("unk_token", "unknown_token_id", unknown),
        ("pad_token", "padding_token_id", None),
    )


def _chat_template(values: Mapping[str, Value]) -> str | Json | None:
    """One template, or several by name. A text without any tag is the name of a template, as old files have it."""
    named = {"default": values.get("tokenizer.chat_template")}
    listed = values.get("tokenizer.chat_templates", [])
    names = [name for name in listed if name != _RERANK] if isinstance(listed, list) else []
    named |= {name: values.get(f"tokenizer.chat_template.{name}") for name in names}
    for name, text in named.items():
        key = "tokenizer.chat_template" + ("" if name == "default" else f".{name}")
        if text is not None and (not isinstance(text, str) or ("{{" not in text and "{%" not in text)):
            raise GgufError(f"{key} must be a Jinja template, but is {shown(text)}")
    found = {name: text for name, text in named.items() if text is not None}
    return found["default"] if list(found) == ["default"] else found or None  # type: ignore[return-value]


def _rerank_template(values: Mapping[str, Value]) -> str | None:
    """The prompt of a reranker, which is no Jinja template: {query} and {document} stand for the texts of a pair."""
    key = f"tokenizer.chat_template.{_RERANK}"
    text = values.get(key)
    if text is not None and (not isinstance(text, str) or any(text.count(place) != 1 for place in _PLACES)):
        raise GgufError(f"{key} must be a text with {' and '.join(_PLACES)}, each once, but is {shown(text)}")
    return text


def _byte_level(vocabulary: Vocabulary, _: str) -> Json:
    splitter = _splitter_of(vocabulary)
    merges = vocabulary.merges()
    if merges is None:
        raise GgufError("the metadata lacks tokenizer.ggml.merges")
    return {
        "normalizer": None if splitter.normalizer is None else {"type": splitter.normalizer},
        "pre_tokenizer": splitter.json(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(vocabulary.tokens, vocabulary.types, merges, ignore_merges=splitter.keeps_known_words),
    }


def _splitter_of(vocabulary: Vocabulary) -> Splitter:
    name = vocabulary.text("pre")
    if name in (None, "default"):
        raise GgufError(
            "the metadata lacks tokenizer.ggml.pre, which says how texts are cut into words: an old converter made the "
            "file; convert the model again, or fetch a newer file"
        )
    if name not in SPLITTERS:
        raise GgufError(f"tokenizer.ggml.pre {shown(name)} is not known; known are: {', '.join(SPLITTERS)}")
    return SPLITTERS[name]


def _sentencepiece(vocabulary: Vocabulary, architecture: str) -> Json:
    tokens, types, scores = vocabulary.tokens, list(vocabulary.types), vocabulary.scores
    has_prefix = vocabulary.flag("add_space_prefix", True)
    if architecture.startswith("gemma"):
        # The file writes tokens of several spaces as spaces. Its scores do not follow the order of merges; ids do.
        tokens = [token if token.strip(" ") else SPACE * len(token) for token in tokens]
        types = [NORMAL if kind == USER_DEFINED else kind for kind in types]
        scores = range(0, -len(tokens), -1)
    merges = vocabulary.merges()
    if merges is None:
        if not scores:
            raise GgufError("the metadata lacks tokenizer.ggml.scores, and has no merges")
        merges = _merges_of(tokens, types, scores)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps: list[Json] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if has_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.token_id("unknown_token_id", 0)
    prefix = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    model = _model(tokens, types, merges, unk_token=None if unknown is None else tokens[unknown])
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {**model, "fuse_unk": True, "byte_fallback": True},
    }


def _merges_of(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> Merges:
    """Every pair of tokens that makes a token, the one with the highest score first.

    SentencePiece merges whatever makes the token with the highest score, and writes no merges.
    """
    ids = {token: index for index, token in enumerate(tokens) if types[index] == NORMAL}
    found: list[tuple[float, int, int, int, int, str]] = []
    num_chars = 0
    for token, index in ids.items():
        num_before, size, order = len(found), len(token), -scores[index]
        for cut in range(size - 1, 0, -1):  # almost in the order of the result, so that it is sorted at once
            left = token[:cut]
            if left in ids and (right := token[cut:]) in ids:
                found.append((order, -cut, cut - size, ids[left], ids[right], f"{left} {right}"))
        num_chars += (len(found) - num_before) * size
        if num_chars > _MAX_MERGED_CHARS:
            raise GgufError(
                f"the merges of tokenizer.ggml.tokens must make at most {_MAX_MERGED_CHARS} characters, but those up "
                f"to token {index} make {num_chars}"
            )
    found.sort()
    lines = [line for *_, line in found]
    return lines if all(map(is_line, lines)) else [[tokens[left], tokens[right]] for *_, left, right, _ in found]


def _model(
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Merges,
    *,
    ignore_merges: bool = False,
    unk_token: str | None = None,
) -> Json:
    """`model` of tokenizer.json. Rows of the embedding without a token, which files call [PAD17], stay without."""
    vocab = {
        token: index
        for index, token in enumerate(tokens)
        if types[index] != UNUSED or token not in (f"[PAD{index}]", f"[EMPTY_{index}]")
    }
    return {
        "type": "BPE", "dropout": None, "unk_token": unk_token, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges,
        "vocab": vocab, "merges": merges,
    }  # fmt: skip


def _added_tokens(vocabulary: Vocabulary, architecture: str) -> Iterator[Json]:
    """Tokens that are found in a text before it is cut into words."""
    is_phi3 = architecture == "phi3" and vocabulary.kind == "llama"
    is_gemma = architecture.startswith("gemma")
    # Mask tokens of encoders swallow the blanks before them, but BERT's.
    masks = architecture in ENCODERS and vocabulary.kind != "bert"
    mask = vocabulary.token_id("mask_token_id") if masks else None
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind not in (CONTROL, UNKNOWN, USER_DEFINED) or (is_gemma and not token.strip(" ")):
            continue
        # No file says which tokens swallow the blanks behind them; Phi-3's do.
        rstrip = is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
        content = written(vocabulary, index, token) if vocabulary.kind == "bert" else token
        yield {
            "id": index, "content": content, "single_word": False, "lstrip": index == mask, "rstrip": rstrip,
            "normalized": False, "special": kind != USER_DEFINED,
        }  # fmt: skip


def _adds_bos(vocabulary: Vocabulary) -> bool:
    splitter = SPLITTERS.get(vocabulary.text("pre") or "")
    default = vocabulary.kind == "llama" or (splitter is not None and splitter.begins_with_bos)
    return vocabulary.flag("add_bos_token", default)


def _post_processor(vocabulary: Vocabulary) -> Json | None:
    """Adds BOS before a text and EOS behind it, if the file asks for them."""
    is_llama = vocabulary.kind == "llama"
    bos = vocabulary.token_id("bos_token_id", 1 if is_llama else None) if _adds_bos(vocabulary) else None
    ends = vocabulary.flag("add_eos_token", False)
    eos = vocabulary.token_id("eos_token_id", 2 if is_llama else None) if ends else None
    if bos is None and eos is None:
        return None

    def template(name: str, type_id: int) -> list[Json]:
        added = [
            None if token_id is None else {"SpecialToken": {"id": vocabulary.tokens[token_id], "type_id": type_id}}
            for token_id in (bos, eos)
        ]
        parts = (added[0], {"Sequence": {"id": name, "type_id": type_id}}, added[1])
        return [part for part in parts if part is not None]

    used = {vocabulary.tokens[token_id]: token_id for token_id in (bos, eos) if token_id is not None}
    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": [*template("A", 0), *template("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in used.items()},
    }
