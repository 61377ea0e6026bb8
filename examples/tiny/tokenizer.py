"""The tokenizer: byte-level BPE over our own text, with single digits. Every UTF-8 text is reproduced exactly.

This module owns the vocabulary and its three JSON files. It knows nothing about the model.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.tiny.conversation import CALL, CALL_END, CHAT_TEMPLATE, END, RESPONSE_TEMPLATE, START, TEXT_END

VOCAB_SIZE = 3072
MAX_POSITIONS = 2048


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=True, normalized=False) for text in (TEXT_END, START, END)]
    added += [AddedToken(text, special=False, normalized=False) for text in (CALL, CALL_END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The trainer marks all tokens that it gets as special. This restores the tool marks, which are not.
    tokenizer.add_tokens(added[3:])
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert isinstance(token_id, int), f"{token!r} is not in the vocabulary"
    return token_id


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokens = json.loads(tokenizer.to_str())
    for token in tokens["added_tokens"]:
        token["special"] = token["content"] not in (CALL, CALL_END)
    _write(folder / "tokenizer.json", tokens)
    decoder = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"}
        for token in tokens["added_tokens"]
    }
    config = {
        "add_bos_token": False,
        "added_tokens_decoder": decoder,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "extra_special_tokens": [START],
        "model_max_length": MAX_POSITIONS,
        "pad_token": TEXT_END,
        "response_template": RESPONSE_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    _write(folder / "tokenizer_config.json", config)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
