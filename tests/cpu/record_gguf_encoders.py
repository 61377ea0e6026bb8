"""Writes tests/cpu/gguf_encoders: tiny random encoders as llama.cpp's own converter writes them, and what transformers
computes from the folders that they were converted from.

`python -m tests.cpu.record_gguf_encoders LLAMA_CPP` takes a checkout of llama.cpp. It needs the packages `gguf`,
`sentencepiece` and `protobuf`. Only the converter's list of known splitters is replaced: no tiny tokenizer is on it.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from inferd.engine.arch.gguf.splitters import SPLITTERS

FOLDER = Path(__file__).parent / "gguf_encoders"
ROOT = Path(__file__).parents[2]
TEXTS = (
    "Hello world, it's 12345 o'clock!", "na\u00efve CAF\u00c9 cafe\u0301 \u2603", "a", "  two spaces\n\n\ttab\u00a0x ",
    "\u6211\u60f3\u5728 apple \uff21 \ufb01", "the server keeps the weights of the model ##s", "x" * 70,
    "a [MASK] b </s> c", "request" * 9,
)  # fmt: skip
PAIRS = (("the cache", "What the scheduler does"), ("a", "b c"))
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 90}
WIDE = {"intermediate_size": 64}
BPE = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
WORDPIECE = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def page() -> list[str]:
    return (ROOT / "docs" / "design.md").read_text().splitlines()[:400]


def write_tokenizer(folder: Path, made: Tokenizer, **names: str | AddedToken) -> None:
    """`names`: the special tokens."""
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)


def wordpiece(folder: Path, lowercases: bool = True) -> None:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercases)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(page(), trainers.WordPieceTrainer(vocab_size=170, special_tokens=WORDPIECE))
    cls, sep = (("[CLS]", 2), ("[SEP]", 3))
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [cls, sep])
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), WORDPIECE, strict=True))
    write_tokenizer(folder, made, **names)


def cased(folder: Path) -> None:
    wordpiece(folder, lowercases=False)


def byte_level(folder: Path, special: list[str], normalizer: Any, pair: str) -> None:
    made = Tokenizer(models.BPE())
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(page(), trainer)
    pad, unknown, first, last, mask = special
    made.add_special_tokens([AddedToken(mask, lstrip=True, special=True)])
    ids = [(token, made.token_to_id(token)) for token in (first, last)]
    made.post_processor = processors.TemplateProcessing(f"{first} $A {last}", f"{first} $A {pair} $B {last}", ids)
    names = {"pad_token": pad, "unk_token": unknown, "cls_token": first, "sep_token": last}
    mask_token = AddedToken(mask, lstrip=True, special=True)
    write_tokenizer(folder, made, bos_token=first, eos_token=last, mask_token=mask_token, **names)


def roberta_bpe(folder: Path) -> None:
    byte_level(folder, [BPE[1], BPE[3], BPE[0], BPE[2], BPE[4]], None, "</s> </s>")


def modern_bpe(folder: Path) -> None:
    byte_level(folder, WORDPIECE, normalizers.NFC(), "[SEP]")


def llama_bpe(folder: Path) -> None:
    """EuroBERT's kind: Llama 3's words, and a token before and behind each text."""
    made = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLITTERS["llama-bpe"].patterns[0]), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        page(), trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    first, last = special[:2]
    around = f"{first} $A {last} {first}:1 $B:1 {last}:1"
    made.post_processor = processors.TemplateProcessing(
        f"{first} $A {last}", around, [(token, made.token_to_id(token)) for token in (first, last)]
    )
    write_tokenizer(folder, made, bos_token=first, eos_token=last, pad_token=special[2])


def sentencepiece(folder: Path) -> None:
    """A Unigram model with a few rules of normalisation, as XLM-RoBERTa has it."""
    rules = folder / "rules.tsv"
    rules.write_text("FB01\t66 69\nFF21\t41\nA0\t20\n")
    importlib.import_module("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=iter(page()), model_prefix=str(folder / "sentencepiece.bpe"), vocab_size=160,
        model_type="unigram", normalization_rule_tsv=str(rules), character_coverage=0.99,
    )  # fmt: skip
    rules.unlink()
    tokenizer = transformers.XLMRobertaTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class GgufEncoderCase:
    name: str
    family: str
    """Beginning of the name of transformers' class."""
    tokenizer: Callable[[Path], None]
    config: dict[str, Any]
    end: str = "Model"
    splitter: str = "jina-v2-en"
    outtype: str = "f16"
    pooling: str = ""
    options: tuple[str, ...] = ()
    written: dict[str, Any] = field(default_factory=dict)
    """Further fields of config.json that the converter asks for."""

    def record(self, llama_cpp: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            self.tokenizer(folder)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            model = self._model(folder, len(tokenizer))
            file = FOLDER / f"{self.name}.gguf"
            convert(llama_cpp, folder, file, self.outtype, self.splitter, self.options)
            texts = [tokenizer(text)["input_ids"] for text in TEXTS]
            pairs = [tokenizer(*pair, return_token_type_ids=True) for pair in PAIRS]
            expected = {
                "texts": texts,
                "pairs": [pair["input_ids"] for pair in pairs],
                "types": [pair["token_type_ids"] for pair in pairs],
            }
            (FOLDER / f"{self.name}.json").write_text(json.dumps(expected))
            kind = "last_hidden_state" if self.end == "Model" else "logits"
            inputs = {str(number): own for number, own in enumerate(texts)}
            if self.end != "Model":
                inputs |= {f"pair {number}": pair["input_ids"] for number, pair in enumerate(pairs)}
            with torch.inference_mode():
                outputs = {name: model(input_ids=torch.tensor([own])) for name, own in inputs.items()}
            values = {name: getattr(output, kind)[0].contiguous() for name, output in outputs.items()}
            save_file(values, FOLDER / f"{self.name}.safetensors")

    def _model(self, folder: Path, vocab_size: int) -> Any:
        config = getattr(transformers, f"{self.family}Config")(**SIZES | {"vocab_size": vocab_size} | self.config)
        torch.manual_seed(1)
        model: Any = getattr(transformers, f"{self.family}{self.end}")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_factor = parameter.dim() == 1 and "norm" in name.lower() and name.endswith("weight")
                parameter.normal_(1.0 if is_factor else 0.0, 0.2)
                parameter.copy_(parameter.half())
        model.save_pretrained(folder)
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **self.written}))
        if self.pooling:
            modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
            (folder / "modules.json").write_text(json.dumps(modules))
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{self.pooling}": True}))
        return model.eval()


def convert(llama_cpp: Path, folder: Path, file: Path, outtype: str, splitter: str, options: tuple[str, ...]) -> None:
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    text_model = importlib.import_module("conversion.base").TextModel
    arguments = ["convert", str(folder), "--outtype", outtype, "--outfile", str(file), *options]
    named = mock.patch.object(text_model, "get_vocab_base_pre", return_value=splitter)
    with named, mock.patch.object(sys, "argv", arguments):
        runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")


LABELS = {"id2label": {"0": "no", "1": "yes", "2": "perhaps"}}
CASES = (
    GgufEncoderCase("bert", "Bert", wordpiece, WIDE | {"layer_norm_eps": 1e-6}, pooling="mean_tokens"),
    GgufEncoderCase("bert-cased-fused", "Bert", cased, WIDE, pooling="cls_token", options=("--fuse-qkv",)),
    GgufEncoderCase("bert-q8_0", "Bert", wordpiece, WIDE, outtype="q8_0"),
    GgufEncoderCase("bert-classifier", "Bert", wordpiece, WIDE | LABELS, "ForSequenceClassification"),
    GgufEncoderCase("roberta", "Roberta", roberta_bpe, WIDE | {"pad_token_id": 0}, splitter="roberta-bpe"),
    GgufEncoderCase(
        "xlm-roberta-classifier", "XLMRoberta", sentencepiece,
        WIDE | LABELS | {"pad_token_id": 1, "type_vocab_size": 1}, "ForSequenceClassification",
    ),
    GgufEncoderCase(
        "xlm-roberta-reranker", "XLMRoberta", sentencepiece,
        WIDE | {"id2label": {"0": "LABEL_0"}, "pad_token_id": 1, "type_vocab_size": 1}, "ForSequenceClassification",
    ),
    GgufEncoderCase(
        "distilbert-classifier", "DistilBert", wordpiece,
        {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2} | LABELS, "ForSequenceClassification",
    ),
    GgufEncoderCase(
        "modern-bert-classifier", "ModernBert", modern_bpe,
        WIDE | LABELS | {"local_attention": 16, "global_attn_every_n_layers": 2, "pad_token_id": 0, "bos_token_id": 2,
                         "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3, "classifier_pooling": "mean"},
        "ForSequenceClassification", splitter="modern-bert", written={"layer_norm_eps": 1e-5},
    ),
    GgufEncoderCase(
        "eurobert", "EuroBert", llama_bpe,
        WIDE | {"num_key_value_heads": 1, "rms_norm_eps": 1e-5, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1,
                "mask_token_id": 2, "classifier_pooling": "mean",
                "rope_parameters": {"rope_type": "default", "rope_theta": 2.5e5}},
        splitter="llama-bpe", pooling="mean_tokens",
    ),
    GgufEncoderCase(
        "nomic-bert", "NomicBert", wordpiece, WIDE, pooling="mean_tokens",
        written={"architectures": ["NomicBertModel"], "n_positions": 8192, "activation_function": "swiglu",
                 "causal": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
                 "prenorm": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
                 "rotary_emb_scale_base": None, "n_embd": 32, "n_inner": 64, "n_layer": 2, "n_head": 2,
                 "rotary_emb_base": 1000, "layer_norm_epsilon": 1e-12},
    ),
)  # fmt: skip

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        if not sys.argv[2:] or case.name in sys.argv[2:]:
            case.record(Path(sys.argv[1]))
