"""Checkpoints made to do harm. Each is the embedded model with one change that a stranger could have made.

A case edits a folder in place, and names the text of its refusal. This file knows no pytest and starts nothing.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.quality import checkpoint_formats, gguf_blocks, gguf_files
from inferd.engine.api.checkpoint import EMBEDDED_PATH
from tests.cpu import quantized_checkpoints
from tests.security.hostile_templates import HOSTILE

Edit = Callable[[Path], None]

HEADER_PREFIX_BYTES = 8
CANARY = "the-code-of-a-checkpoint-ran"
"""Name of the file that a payload leaves in its folder if it runs."""


@dataclass(frozen=True, slots=True)
class Case:
    edit: Edit
    words: str
    """Regular expression for a part of the refusal's line."""
    file: str = ""
    """The file in the folder that is served; empty for the folder."""


class Payload:
    """An object that leaves a file in its folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (os.system, (f"touch {self._folder / CANARY}",))


def copy_of_tiny(folder: Path) -> Path:
    """A copy of the embedded model in `folder`, weights included, so that no edit reaches the original."""
    return Path(shutil.copytree(EMBEDDED_PATH, folder, ignore=shutil.ignore_patterns("__pycache__")))


# -- weights -----------------------------------------------------------------------------------------------------------


def header_of_tiny() -> tuple[dict[str, Any], bytes]:
    raw = (EMBEDDED_PATH / "model.safetensors").read_bytes()
    end = HEADER_PREFIX_BYTES + int.from_bytes(raw[:HEADER_PREFIX_BYTES], "little")
    return json.loads(raw[HEADER_PREFIX_BYTES:end]), raw[end:]


def write_weights(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> None:
    file = path / "model.safetensors"
    file.unlink()
    stated = len(header) if length is None else length
    file.write_bytes(stated.to_bytes(HEADER_PREFIX_BYTES, "little") + header + data)


def pickled(name: str) -> Edit:
    def edit(path: Path) -> None:
        (path / "model.safetensors").unlink()
        with (path / name).open("wb") as stream:
            pickle.dump(Payload(path), stream)

    return edit


def pickle_called_safetensors(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").write_bytes(pickle.dumps(Payload(path)))


def zip_bomb(path: Path) -> None:
    """A file in torch's zip format that unpacks to a gigabyte."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("archive/data.pkl", "w") as entry:
        for _ in range(64):
            entry.write(bytes(2**24))
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").write_bytes(packed.getvalue())


def header_length(length: int) -> Edit:
    return lambda path: write_weights(path, b"{}", length=length)


def header_text(text: bytes) -> Edit:
    return lambda path: write_weights(path, text)


def changed_tensor(change: Callable[[dict[str, Any]], None]) -> Edit:
    """The whole file, with the entry of one tensor changed."""

    def edit(path: Path) -> None:
        header, data = header_of_tiny()
        change(header[max(name for name in header if name != "__metadata__")])
        write_weights(path, json.dumps(header).encode(), data)

    return edit


def same_place(path: Path) -> None:
    """Two tensors of one shape share their bytes. The file keeps its length."""
    header, data = header_of_tiny()
    norms = sorted(name for name, entry in header.items() if name != "__metadata__" and len(entry["shape"]) == 1)
    header[norms[0]]["data_offsets"] = header[norms[1]]["data_offsets"]
    write_weights(path, json.dumps(header).encode(), data)


def twice_in_the_header(path: Path) -> None:
    """One name with two entries. Two parsers may use different ones."""
    header, data = header_of_tiny()
    name = max(name for name in header if name != "__metadata__")
    first = json.dumps({name: {**header[name], "shape": [1]}})[1:-1]
    write_weights(path, f"{{{first},{json.dumps(header)[1:]}".encode(), data)


def behind_the_data(path: Path) -> None:
    header, data = header_of_tiny()
    write_weights(path, json.dumps(header).encode(), data + bytes(64))


def no_number(bits: int) -> Edit:
    """Replaces the last weight of the last tensor by other bits of bfloat16."""

    def edit(path: Path) -> None:
        header, data = header_of_tiny()
        write_weights(path, json.dumps(header).encode(), data[:-2] + bits.to_bytes(2, "little"))

    return edit


def index_of(weight_map: object) -> Edit:
    return lambda path: _write_json(path / "model.safetensors.index.json", {"weight_map": weight_map})


# -- config.json -------------------------------------------------------------------------------------------------------


def config(**changes: object) -> Edit:
    def edit(path: Path) -> None:
        file = path / "config.json"
        _write_json(file, {**json.loads(file.read_text()), **changes})

    return edit


def config_text(text: str) -> Edit:
    def edit(path: Path) -> None:
        (path / "config.json").write_text(text)

    return edit


def remote_code(path: Path) -> None:
    """All entries by which a checkpoint names its own code, for transformers to import."""
    code = f"import pathlib\npathlib.Path({str(path / CANARY)!r}).touch()\nclass Evil: pass\n"
    (path / "evil.py").write_text(code)
    auto = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    config(auto_map=auto, trust_remote_code=True, model_type="evil", architectures=["EvilForCausalLM"])(path)
    tokenizer_config(auto_map=auto, tokenizer_class="Evil", trust_remote_code=True)(path)


def remote_tokenizer(path: Path) -> None:
    """Like `remote_code`, on an architecture that is served."""
    remote_code(path)
    config(architectures=["LlamaForCausalLM"])(path)


# -- tokenizer and template --------------------------------------------------------------------------------------------


def tokenizer_config(**changes: object) -> Edit:
    def edit(path: Path) -> None:
        file = path / "tokenizer_config.json"
        _write_json(file, {**json.loads(file.read_text()), **changes})

    return edit


def tokenizer(change: Callable[[dict[str, Any]], None]) -> Edit:
    def edit(path: Path) -> None:
        file = path / "tokenizer.json"
        value = json.loads(file.read_text())
        change(value)
        _write_json(file, value)

    return edit


def tokenizer_text(text: str) -> Edit:
    def edit(path: Path) -> None:
        (path / "tokenizer.json").write_text(text)

    return edit


def device(name: str, target: str = "/dev/zero") -> Edit:
    """A file that never ends, as an unpacked archive may hold it."""

    def edit(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)

    return edit


def pipe(name: str) -> Edit:
    """A file that blocks its reader when it is opened."""

    def edit(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return edit


def sparse(name: str, num_bytes: int = 2**36) -> Edit:
    """A file that uses no disk space, but all of memory if it is read."""

    def edit(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        with (path / name).open("wb") as stream:
            stream.truncate(num_bytes)

    return edit


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))


def _huge_id(value: dict[str, Any]) -> None:
    value["model"]["vocab"]["<far>"] = 2**32 - 2


def _huge_added_id(value: dict[str, Any]) -> None:
    value["added_tokens"].append({**value["added_tokens"][0], "id": 2**32 - 2, "content": "<far>"})


def _regex_bomb(value: dict[str, Any]) -> None:
    split = {"type": "Split", "pattern": {"Regex": "((((a{1,999}){1,999}){1,999}){1,999})"}, "behavior": "Isolated"}
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{**split, "invert": False}]}


def _bad_merges(value: dict[str, Any]) -> None:
    value["model"]["merges"] = [["no such", "token"]]


def _precompiled(value: dict[str, Any]) -> None:
    value["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AA=="}


# -- GGUF files --------------------------------------------------------------------------------------------------------

GGUF = "model.gguf"


def _content() -> tuple[dict[str, Any], dict[str, gguf_blocks.Stored]]:
    return gguf_files.content_of(EMBEDDED_PATH, lambda _: gguf_blocks.as_q8_0)


def gguf_keys(**changes: object) -> Edit:
    """The embedded model as a GGUF file with other metadata: `general__name` is `general.name`."""

    def edit(path: Path) -> None:
        metadata, tensors = _content()
        changed = {**metadata, **{key.replace("__", "."): value for key, value in changes.items()}}
        gguf_files.write(path / GGUF, {key: value for key, value in changed.items() if value is not None}, tensors)

    return edit


def gguf_bytes(change: Callable[[bytes], bytes]) -> Edit:
    def edit(path: Path) -> None:
        gguf_keys()(path)
        (path / GGUF).write_bytes(change((path / GGUF).read_bytes()))

    return edit


def gguf_count(at: int, value: int) -> Edit:
    """Another number at byte `at` of the header: 4 is the version, 8 the number of tensors, 16 that of keys."""
    width = 4 if at == 4 else 8
    return gguf_bytes(lambda raw: raw[:at] + value.to_bytes(width, "little") + raw[at + width :])


def gguf_tensor(name: str, offset: int) -> Edit:
    """Another offset of one tensor."""

    def change(raw: bytes) -> bytes:
        at = raw.index(gguf_files.text(name)) + 8 + len(name)
        at += 4 + 8 * int.from_bytes(raw[at : at + 4], "little") + 4
        return raw[:at] + offset.to_bytes(8, "little") + raw[at + 8 :]

    return gguf_bytes(change)


def gguf_part(path: Path) -> None:
    gguf_keys()(path)
    (path / GGUF).rename(path / "m-00001-of-00003.gguf")


def gguf_part_of_none(path: Path) -> None:
    gguf_keys()(path)
    (path / GGUF).rename(path / "m-00001-of-00000.gguf")


def gguf_scale(path: Path) -> None:
    """The last block of Q8_0 gets NaN as its scale."""
    metadata, tensors = _content()
    name = next(name for name, stored in reversed(tensors.items()) if stored.type == gguf_blocks.Q8_0)
    stored = tensors[name]
    tensors[name] = stored._replace(data=stored.data[:-34] + b"\x00\x7e" + stored.data[-32:])
    gguf_files.write(path / GGUF, metadata, tensors)


# -- quantized weights -------------------------------------------------------------------------------------------------

_K = "model.layers.1.self_attn.k_proj"


def quantized(name: str, change: Callable[[dict[str, Tensor]], object] = lambda _: None, **fields: object) -> Edit:
    """A small quantized model in place of the embedded one, with other fields in its quantization_config."""

    def edit(path: Path) -> None:
        (path / "model.safetensors").unlink()
        chosen = next(one for one in checkpoint_formats.FORMATS if one.name == name)
        quantized_checkpoints.save(chosen, path)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
        config(quantization_config={**chosen.quantization, **fields})(path)

    return edit


def number(suffix: str, value: float) -> Callable[[dict[str, Tensor]], object]:
    """The first number of a tensor of one matrix."""
    return lambda tensors: tensors[f"{_K}.{suffix}"].view(-1)[:1].fill_(value)


def _halved(tensors: dict[str, Tensor]) -> None:
    tensors[f"{_K}.qweight"] = tensors[f"{_K}.qweight"][:8]


_ORDERED = "GPTQ, one order"


# -- all of them -------------------------------------------------------------------------------------------------------


def _last(**changes: object) -> Edit:
    """The last tensor's entry with these keys."""
    return changed_tensor(lambda entry: entry.update(changes))


_DIGITS = b'{"w": {"dtype": "F32", "shape": [1' + b"0" * 5_000 + b'], "data_offsets": [0, 4]}}'
_NO_NUMBER = b'{"w": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}'

REFUSED: dict[str, Case] = {
    "a pickle": Case(pickled("pytorch_model.bin"), "pytorch_model.bin is a pickle, which can carry code"),
    "a pickle of torch": Case(pickled("consolidated.pth"), "consolidated.pth is a pickle, which can carry code"),
    "a pickle under another name": Case(pickle_called_safetensors, "truncated or not a safetensors file"),
    "a zip bomb": Case(zip_bomb, "truncated or not a safetensors file"),
    "a header of 2^63 bytes": Case(header_length(2**63), "header of 9223372036854775808"),
    "a header of 2^64-1 bytes": Case(header_length(2**64 - 1), "header of 18446744073709551615"),
    "a header of 64 MiB": Case(header_length(2**26), "truncated or not a safetensors file"),
    "a header of nothing": Case(header_length(0), "is not valid JSON"),
    "a header of objects without end": Case(header_text(b'{"a":' * 200_000), "is not valid JSON"),
    "a header of lists without end": Case(header_text(b"[" * 1_000_000), "is not valid JSON"),
    "a size of 5,000 digits": Case(header_text(_DIGITS), "is not valid JSON"),
    "a size that is no number": Case(header_text(_NO_NUMBER), "is malformed"),
    "a name twice": Case(twice_in_the_header, "a name appears twice"),
    "a place before the data": Case(_last(data_offsets=[-4, 508]), "but its data_offsets span 512"),
    "a place beyond the data": Case(_last(data_offsets=[2**62, 2**62 + 512]), "is truncated"),
    "a place that ends before it begins": Case(_last(data_offsets=[512, 0]), "its data_offsets span -512"),
    "a place of two tensors": Case(same_place, "without overlap and without a hole"),
    "bytes of nobody": Case(behind_the_data, "64 bytes after its last tensor"),
    "negative sizes": Case(_last(shape=[-1, -256]), "but its data_offsets span 512"),
    "sizes whose product is 2^124": Case(_last(shape=[2**62, 2**62]), "but its data_offsets span 512"),
    "nothing of 2^62": Case(_last(shape=[0, 2**62], data_offsets=[0, 0]), "512 bytes after its last tensor"),
    "weights that are a device": Case(device("model.safetensors"), "holds no safetensors weights"),
    "weights of 64 GiB of zeros": Case(sparse("model.safetensors"), "is not valid JSON"),
    "shards outside": Case(index_of({"w": "../../../etc/passwd"}), "outside its directory"),
    "shards at the root": Case(index_of({"w": "/etc/passwd"}), "outside its directory"),
    "a shard that is the config": Case(index_of({"w": "config.json"}), "not a safetensors file"),
    "a shard's name of 5,000 letters": Case(index_of({"w": "a" * 5_000}), "a file that cannot exist"),
    "a shard's name with a zero in it": Case(index_of({"w": "a\0b"}), "1 are missing"),
    "a shard's name that is no text": Case(index_of({"w": "\ud800"}), "1 are missing"),
    "code of its own": Case(remote_code, "unknown architecture 'EvilForCausalLM'"),
    "a config without end": Case(config_text('{"a":' * 100_000), "is not JSON"),
    "a config that is a device": Case(device("config.json"), "must be a regular file"),
    "a config that is a pipe": Case(pipe("config.json"), "must be a regular file"),
    "a thousand million layers": Case(config(num_hidden_layers=10**9), "but there are 38 tensors"),
    "a vocabulary of 2^62": Case(config(vocab_size=2**62), "vocab_size must be at most"),
    "a width of 400 digits": Case(config(hidden_size=10**400), "hidden_size must be at most"),
    "an architecture of 100,000 letters": Case(config(architectures=["x" * 100_000]), "unknown architecture"),
    "a generation config that is a pipe": Case(pipe("generation_config.json"), "must be a regular file"),
    "a tokenizer of lists without end": Case(tokenizer_text("[" * 1_000_000), "cannot be loaded"),
    "a tokenizer of 64 GiB of zeros": Case(sparse("tokenizer.json"), "no file of a tokenizer is"),
    "a tokenizer config of 64 GiB of zeros": Case(sparse("tokenizer_config.json"), "no file of a tokenizer is"),
    "a template of 64 GiB of zeros": Case(sparse("chat_template.jinja"), "no file of a tokenizer is"),
    "a tokenizer that is a device": Case(device("tokenizer.json"), "holds no tokenizer"),
    "a tokenizer config that is a pipe": Case(pipe("tokenizer_config.json"), "must be a regular file"),
    "merges of no tokens": Case(tokenizer(_bad_merges), "cannot be loaded"),
    "a normalizer that panics": Case(tokenizer(_precompiled), "cannot be loaded"),
    "groups that do not divide the inputs": Case(quantized("GPTQ", group_size=384), "128 inputs are left over"),
    "groups of no inputs": Case(quantized("GPTQ", group_size=0), "group_size must be"),
    "groups of 2^40 inputs": Case(quantized("GPTQ", group_size=2**40), "group_size must be at most"),
    "packing of another size": Case(quantized("GPTQ", _halved), f"{_K}.qweight is \\[8, 64\\], by config"),
    "packing of another format": Case(quantized("GPTQ", quant_method="awq"), "qweight is .*, by config.json"),
    "bits of another format": Case(quantized("AWQ", bits=8), "bits must be 4, but it is 8"),
    "an order that is missing": Case(quantized(_ORDERED, lambda t: t.pop(f"{_K}.g_idx")), f"1 missing: {_K}.g_idx"),
    "expressions without end": Case(quantized("GPTQ", dynamic={"-:(.*)*x": {}}), "at most 3 wildcards"),
    "expressions of many ways": Case(quantized("GPTQ", dynamic={"-:" + "(a|a)" * 99: {}}), "at most 3 wildcards"),
    "too many expressions": Case(quantized("GPTQ", dynamic={f"{n}.*.*.*": {} for n in range(999)}), "list names"),
    "a template of numbers without end": Case(tokenizer_config(chat_template="{{ 9**9**9 }}"), "to a power in line 1"),
    "a template too deep": Case(tokenizer_config(chat_template="{{" + "(" * 100_000), "does not parse"),
    "a number of 10,000 digits": Case(tokenizer_config(chat_template="{{ 1" + "0" * 10_000 + " }}"), "does not parse"),
    "a template that is a number": Case(tokenizer_config(chat_template=5), "chat_template must be a text"),
    "a reading that is no object": Case(tokenizer_config(response_template="{% for %}"), "must be an object"),
    "a reading of no fields": Case(tokenizer_config(response_template={"fields": 7}), "fields must be an object"),
    "a GGUF of 2^62 tensors": Case(gguf_count(8, 2**62), "number of tensors must be at most 65536", GGUF),
    "a GGUF of too many tensors": Case(gguf_count(8, 65536), "model.gguf: .* (must|needs|has|lacks)", GGUF),
    "a GGUF of 2^62 keys": Case(gguf_count(16, 2**62), "number of metadata keys must be at most 4096", GGUF),
    "a GGUF of too few keys": Case(gguf_count(16, 1), "model.gguf: .* (must|needs|has|lacks)", GGUF),
    "a GGUF of another version": Case(gguf_count(4, 9), "the version must be one of 2, 3, but is 9", GGUF),
    "a GGUF offset past the end": Case(gguf_tensor("output_norm.weight", 2**62), "without overlap", GGUF),
    "GGUF tensors in one place": Case(gguf_tensor("output_norm.weight", 0), "without overlap", GGUF),
    "a GGUF that is cut off": Case(gguf_bytes(lambda raw: raw[:-1000]), "the file is truncated", GGUF),
    "a GGUF with bytes of nobody": Case(gguf_bytes(lambda raw: raw + bytes(999)), "belong to no tensor", GGUF),
    "a GGUF that is a device": Case(device(GGUF), "must be a regular file", GGUF),
    "a GGUF that is a pipe": Case(pipe(GGUF), "must be a regular file", GGUF),
    "a GGUF of 64 GiB of zeros": Case(sparse(GGUF), "begins with b'GGUF', but this one with", GGUF),
    "a GGUF of a thousand million layers": Case(gguf_keys(llama__block_count=10**9), "llama.block_count must be", GGUF),
    "a GGUF whose width is a list": Case(gguf_keys(llama__embedding_length=[7] * 2**17), "hidden_size must be", GGUF),
    "a GGUF of no heads": Case(gguf_keys(llama__attention__head_count=0), "attention.head_count", GGUF),
    "a GGUF of wrong sizes": Case(gguf_keys(llama__feed_forward_length=641), "the weights contradict", GGUF),
    "a GGUF of an unknown kind": Case(gguf_keys(general__architecture="x" * 10_000), "unknown architecture", GGUF),
    "a GGUF of a token of a megabyte": Case(
        gguf_keys(tokenizer__ggml__tokens=["x" * 2**20] + [str(n) for n in range(3071)]), "characters in a token", GGUF
    ),
    "a GGUF of too many tokens": Case(
        gguf_keys(tokenizer__ggml__tokens=[str(n) for n in range(4000)]), "must have at most 3072 items", GGUF
    ),
    "a GGUF of merges of no tokens": Case(gguf_keys(tokenizer__ggml__merges=["no such"]), "cannot be loaded", GGUF),
    "a GGUF without a splitter": Case(gguf_keys(tokenizer__ggml__pre="default"), "lacks tokenizer.ggml.pre", GGUF),
    "a GGUF whose template is a name": Case(gguf_keys(tokenizer__chat_template="chatml"), "Jinja template", GGUF),
    "a GGUF whose template does not parse": Case(gguf_keys(tokenizer__chat_template="{% if %}"), "not parse", GGUF),
    "a GGUF part without the others": Case(
        gguf_part,
        "is part 1 of 3 of one model, and 2 of the others are missing",
        "m-00001-of-00003.gguf",
    ),
    "a GGUF part of none": Case(
        gguf_part_of_none, "by its name it is part 1 of 0, but parts are numbered from 1", "m-00001-of-00000.gguf"
    ),
}
"""Checkpoints with which no server may start."""

UNREADABLE: dict[str, Case] = {
    "a scale of NaN": Case(quantized("GPTQ", number("scales", float("nan"))), f"{_K}.scales must hold finite numbers"),
    "a scale of 0": Case(quantized("W4A16", number("weight_scale", 0)), f"{_K}.weight_scale must hold finite numbers"),
    "a group beyond the last": Case(quantized(_ORDERED, number("g_idx", 4)), f"{_K}.g_idx must hold integers from 0"),
    "a zero point that sym excludes": Case(quantized("GPTQ", number("qzeros", 0)), f"{_K}.qzeros must hold 7 only"),
    "NaN": Case(no_number(0x7FC0), "must hold finite numbers, but 1 of its [0-9]+ values are NaN or infinite"),
    "a NaN of other bits": Case(no_number(0xFF81), "must hold finite numbers"),
    "infinity": Case(no_number(0x7F80), "must hold finite numbers"),
    "a NaN as the scale of a GGUF block": Case(gguf_scale, "must have finite scales, but 1 of", GGUF),
}
"""Checkpoints whose fault is found when their weights are read."""

SERVED: dict[str, Edit] = {
    "code of its own for the tokenizer": remote_tokenizer,
    "an id far beyond the vocabulary": tokenizer(_huge_id),
    "a special token far beyond the vocabulary": tokenizer(_huge_added_id),
    "an expression that nothing compiles": tokenizer(_regex_bomb),
    **{f"a template of {name}": tokenizer_config(chat_template=text) for name, text in HOSTILE.items()},
    "special tokens from a device": device("special_tokens_map.json"),
    "a template from a device": device("chat_template.jinja"),
}
"""Checkpoints that are served. The harmful part is ignored, or fails the request that would need it."""
