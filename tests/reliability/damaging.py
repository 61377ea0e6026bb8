"""Writes damaged checkpoints: small valid ones of which one file was changed, by a seed.

`KINDS` has an entry for each kind of file: how to write it whole, and how to damage it. A further kind is one more
entry. This file knows no pytest, reads no checkpoint and starts nothing.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.quality import gguf_blocks, gguf_files
from inferd.engine.api.checkpoint import EMBEDDED_PATH
from tests.cpu.adapters import linear_modules, write_adapter
from tests.cpu.cases import CASES
from tests.cpu.record_gguf_encoders import FOLDER as ENCODERS
from tests.security.hostile_checkpoints import quantized

Damage = Callable[[random.Random, bytes], bytes]
"""(source of randomness, content of a file) -> damaged content."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of file of a checkpoint."""

    file: str
    """Path of the file in the checkpoint's folder."""
    damages: tuple[Damage, ...]
    write: Callable[[Path], object] = lambda folder: None
    """Adds the whole file to a folder with a small checkpoint, if it is not part of it."""
    choose: Damage = lambda rng, content: content
    """Makes the whole file of one case, if they differ."""
    given: str = ""
    """Path in the folder of what is served; empty: the folder."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Other settings of the start. {folder} in a text is the folder."""
    is_served: bool = True
    """Whether a start can load weights. Otherwise it is only planned."""


@dataclass(frozen=True, slots=True)
class Case:
    """A damaged checkpoint."""

    name: str
    """Kind, and names of the damages."""
    folder: Path
    settings: dict[str, Any]
    is_served: bool


def write_case(seed: str, base: Path, folder: Path, whole: str = "") -> Case:
    """The case of a seed in `folder`, which must not exist. `base` is a folder by `write_bases`. `whole`: a kind that
    stays whole; empty: any kind, damaged."""
    rng = random.Random(seed)
    name = whole or rng.choice(list(KINDS))
    kind = KINDS[name]
    # Links: only the damaged file is written.
    shutil.copytree(base / name, folder, copy_function=os.link)
    file = folder / kind.file
    content, done = kind.choose(rng, file.read_bytes()), list[str]()
    for _ in range(0 if whole else rng.choice((1, 1, 1, 2, 3))):
        damage = rng.choice(kind.damages)
        done.append(damage.__name__.strip("_"))
        content = damage(rng, content)
    file.unlink()
    file.write_bytes(content)
    settings = {key: _filled(value, folder) for key, value in kind.settings.items()}
    given = {"model": str(folder / kind.given), "kv_memory": "8MiB", "max_num_seqs": "2", **settings}
    return Case(f"{name}: {', '.join(done) or 'whole'}", folder, given, kind.is_served)


def _filled(value: Any, folder: Path) -> Any:
    return [_filled(item, folder) for item in value] if isinstance(value, list) else value.format(folder=folder)


def write_bases(base: Path) -> None:
    """A folder for each kind, with a whole checkpoint of it."""
    small = base / "small"
    write_small(small)
    for name, kind in KINDS.items():
        shutil.copytree(small, base / name)
        kind.write(base / name)


# -- whole checkpoints -------------------------------------------------------------------------------------------------

_SIZES = {256: 64, 640: 64, 128: 32}
"""Axes of the embedded model, and the axes that the small one keeps of them."""
_NUM_LAYERS = 2


def write_small(folder: Path) -> None:
    """A checkpoint of half a megabyte with the tokenizer of the embedded model, and the first of its weights."""
    shutil.copytree(EMBEDDED_PATH, folder, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    tensors = {
        name: tensor[tuple(slice(0, _SIZES.get(size, size)) for size in tensor.shape)].contiguous()
        for name, tensor in load_file(EMBEDDED_PATH / "model.safetensors").items()
        if not any(f".layers.{layer}." in name for layer in range(_NUM_LAYERS, 9))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": _NUM_LAYERS}
    _change_json(folder / "config.json", max_position_embeddings=256, **sizes)


def _change_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _write_gguf(folder: Path) -> None:
    gguf_files.convert(folder, folder / "model.gguf", lambda _: gguf_blocks.as_q8_0)


def _write_encoder_gguf(folder: Path) -> None:
    shutil.copy(ENCODERS / "bert-q8_0.gguf", folder / "model.gguf")


def _write_template(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    (folder / "chat_template.jinja").write_text(config.pop("chat_template"))
    file.write_text(json.dumps(config))


def _write_index(folder: Path) -> None:
    shards = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def _write_adapter(folder: Path) -> None:
    write_adapter(folder / "adapter", linear_modules(folder), seed=1, rank=2)


def _write_draft(folder: Path) -> None:
    write_small(folder / "draft")


def _of_a_family(rng: random.Random, _: bytes) -> bytes:
    return json.dumps(rng.choice(CASES).config_json()).encode()


# -- damage of bytes ---------------------------------------------------------------------------------------------------

_NUMBERS = (0, 1, 2, 3, 7, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)


def _truncated(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.choice((rng.randrange(64), rng.randrange(len(content) + 1), max(len(content) - 1, 0)))]


def _flipped(rng: random.Random, content: bytes) -> bytes:
    """A few other bits."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 3, 30)) if found else 0):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def _flipped_at_the_start(rng: random.Random, content: bytes) -> bytes:
    size = min(len(content), rng.choice((16, 256, 4096)))
    return _flipped(rng, content[:size]) + content[size:]


def _with_a_hole(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + content[at + rng.choice((1, 8, 1000)) :]


def _with_more(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.choice((rng.randbytes(8), bytes(4096), content[:1000])) + content[at:]


BYTES = (_truncated, _flipped, _flipped_at_the_start, _with_a_hole, _with_more)


# -- damage of JSON ----------------------------------------------------------------------------------------------------

_HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**40, 2**63, 2**64, 10**400, -0.5, 1.5, 1e308, 1e-320, float("nan"),
    float("inf"), "", "x", "x" * 100_000, "\ud800", "\0\x1b[2J\n", "{{ 1/0 }}", "../../etc/passwd", "1" * 5000, [],
    [[]], [None], [0] * 100_000, ["x"] * 3, {}, {"x": 1}, {"type": "Sequence"}, {str(key): 1 for key in range(10_000)},
)  # fmt: skip


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of each value inside. Of a long list or object, only some of its items."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys if len(keys) <= 64 else [*keys[:8], *keys[-8:]]:
        yield value, key
        yield from _places(value[key])


def _json(change: Callable[[random.Random, Any, Any], None]) -> Damage:
    """Damage of the values in a JSON file. A file that is no JSON any more stays as it is."""

    def damage(rng: random.Random, content: bytes) -> bytes:
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return content
        places = list(_places(value))
        if places:
            change(rng, *rng.choice(places))
        return json.dumps(value).encode()

    damage.__name__ = change.__name__
    return damage


def _another_value(rng: random.Random, owner: Any, key: Any) -> None:
    owner[key] = copy.deepcopy(rng.choice(_HOSTILE))


def _without_a_value(_: random.Random, owner: Any, key: Any) -> None:
    del owner[key]


def _repeated(rng: random.Random, owner: Any, key: Any) -> None:
    owner[key] = [owner[key]] * rng.choice((1, 2, 1000))


def _nested(rng: random.Random, owner: Any, key: Any) -> None:
    for _ in range(rng.choice((1, 3, 400))):
        owner[key] = rng.choice((lambda inner: [inner], lambda inner: {"x": inner}))(owner[key])


def _of_another_place(rng: random.Random, owner: Any, key: Any) -> None:
    """Another value of the same object or list."""
    owner[key] = copy.deepcopy(owner[rng.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))])


def _another_number(rng: random.Random, owner: Any, key: Any) -> None:
    if isinstance(owner[key], int | float):
        owner[key] = rng.choice((owner[key] + 1, -owner[key], owner[key] * 2, owner[key] * 10**6, owner[key] / 3))
    else:
        owner[key] = rng.choice(_NUMBERS)


def _another_name(rng: random.Random, owner: Any, key: Any) -> None:
    if isinstance(owner, dict):
        owner[rng.choice((f"{key}x", "", "\ud800", "x" * 10_000, "__metadata__"))] = owner.pop(key)


def _not_json(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    wrong = rng.choice(
        (b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"NaN", b"\xff", b"\\ud800", b",", b"}", b"\0")
    )
    return rng.choice((content[:at] + wrong + content[at:], wrong, b"\xef\xbb\xbf" + content, content + content))


def _twice_named(rng: random.Random, content: bytes) -> bytes:
    """The first name of an object once more, with a value of another kind."""
    if not content.startswith(b"{") or b":" not in content:
        return content
    return b"{" + content[1:].split(b":")[0] + b":" + rng.choice((b"null", b"[]", b"1e999")) + b"," + content[1:]


JSON = (
    *map(_json, (_another_value, _another_value, _without_a_value, _repeated, _nested, _of_another_place)),
    *map(_json, (_another_number, _another_name)), _not_json, _twice_named, _truncated, _flipped,
)  # fmt: skip


# -- damage of templates -----------------------------------------------------------------------------------------------

_JINJA = (
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}", "{{ messages[99].content }}",
    "{{ 'x' * 10**9 }}", "{{ 10**10**8 }}", "{% if %}", "{{", "{% endif %}", "{{ raise_exception('x' * 10000) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ [].__class__.__mro__ }}", "{% include 'x' %}", "{# ", "\0",
    "{% set x = messages | list %}{{ x | tojson }}", "(" * 500, "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "{% if 1 %}" * 300 + "{% endif %}" * 300, "{{ tools[0].x.y }}",
)  # fmt: skip


def _with_jinja(rng: random.Random, content: bytes) -> bytes:
    at = rng.choice((0, len(content), rng.randrange(len(content) + 1)))
    return content[:at] + rng.choice(_JINJA).encode() + content[at:]


# -- damage of safetensors files ---------------------------------------------------------------------------------------

_PREFIX_BYTES = 8
_DTYPES = ("F64", "F32", "F16", "BF16", "I8", "U8", "I64", "BOOL", "F8_E4M3", "F4", "x", "", None, 7)


def _header(damage: Damage, *, keeps_length: bool = False) -> Damage:
    """Damage of a safetensors file's header. The stated length is right, unless it stays as it was."""

    def damaged(rng: random.Random, content: bytes) -> bytes:
        prefix = content[:_PREFIX_BYTES]
        end = _PREFIX_BYTES + int.from_bytes(prefix, "little")
        header = damage(rng, content[_PREFIX_BYTES:end])
        stated = prefix if keeps_length else len(header).to_bytes(_PREFIX_BYTES, "little")
        return stated + header + content[end:]

    damaged.__name__ = f"{damage.__name__}_in_the_header"
    return damaged


def _another_length(rng: random.Random, content: bytes) -> bytes:
    length = int.from_bytes(content[:_PREFIX_BYTES], "little")
    stated = rng.choice((*_NUMBERS, length + 1, max(length - 1, 0), len(content), len(content) - _PREFIX_BYTES))
    return stated.to_bytes(_PREFIX_BYTES, "little", signed=False) + content[_PREFIX_BYTES:]


def _another_entry(rng: random.Random, owner: Any, key: Any) -> None:
    """Another dtype, shape or place of a tensor, often one that is consistent in itself."""
    entry = owner[key] if isinstance(owner[key], dict) else owner
    if not isinstance(entry, dict) or not isinstance(entry.get("data_offsets"), list):
        return
    offsets, shape = entry["data_offsets"], entry.get("shape")
    match rng.randrange(5):
        case 0:
            entry["dtype"] = rng.choice(_DTYPES)
        case 1:
            entry["shape"] = rng.choice(([], [0], [-1], [2**62, 2**62], list(reversed(shape or [])), [1] * 100, ["x"]))
        case 2:
            entry["data_offsets"] = [number + rng.choice((-2, 2, 2**31, 2**63)) for number in offsets]
        case 3:
            entry["data_offsets"] = rng.choice(
                ([], offsets[:1], offsets[::-1], [0, 0], [0.0, 1.5], ["0", "2"], offsets * 2)
            )
        case _:
            entry["dtype"] = {"BF16": "F16", "F32": "I32"}.get(entry.get("dtype"), "U16")


def _numbers_of_weights(rng: random.Random, content: bytes) -> bytes:
    """Other weights, among them NaN, infinity and the largest numbers, whatever their dtype is."""
    start = _PREFIX_BYTES + int.from_bytes(content[:_PREFIX_BYTES], "little")
    if start >= len(content):
        return content
    found = bytearray(content)
    for _ in range(rng.choice((1, 10))):
        at, wrong = (
            rng.randrange(start, len(content)),
            rng.choice((b"\xff\x7f", b"\x80\x7f", b"\xc0\x7f", b"\0\0\xc0\x7f")),
        )
        found[at : at + len(wrong)] = wrong
    return bytes(found[: len(content)])


SAFETENSORS = (
    *map(_header, (*JSON, _json(_another_entry), _json(_another_entry), _json(_another_entry))),
    _header(_flipped, keeps_length=True), _another_length, _numbers_of_weights, *BYTES,
)  # fmt: skip


# -- damage of GGUF files ----------------------------------------------------------------------------------------------

_GGUF_START = 24
"""Bytes of the magic, the version and the two counts."""
_ARRAY, _TYPES = 9, range(14)


def _anchors(content: bytes) -> list[int]:
    """The places of the names of metadata keys and tensors, with their lengths before them."""
    found, names = [], (b"general.", b"llama.", b"tokenizer.", b"blk.", b"token_embd.", b"output_norm.", b"rope_")
    for name in names:
        at = content.find(name)
        while at >= 0:
            found.append(max(at - 8, 0))
            at = content.find(name, at + 1)
    return found or [0]


def _behind_name(rng: random.Random, content: bytes) -> int:
    """The first byte behind a random name: the type of a value, or the number of axes."""
    at = rng.choice(_anchors(content))
    return at + 8 + min(int.from_bytes(content[at : at + 8], "little"), 256)


def _replaced(content: bytes, at: int, wrong: bytes) -> bytes:
    return content[:at] + wrong + content[at + len(wrong) :]


def _another_count(rng: random.Random, content: bytes) -> bytes:
    """Another magic, version, number of tensors or number of keys."""
    at, width = rng.choice(((0, 4), (4, 4), (8, 8), (16, 8)))
    number = rng.choice((*_NUMBERS, int.from_bytes(content[at : at + width], "little") + rng.choice((-1, 1))))
    return _replaced(content, at, (number % 2 ** (8 * width)).to_bytes(width, "little"))


def _another_type(rng: random.Random, content: bytes) -> bytes:
    return _replaced(content, _behind_name(rng, content), rng.choice(_TYPES).to_bytes(4, "little"))


def _another_number_in_an_entry(rng: random.Random, content: bytes) -> bytes:
    """Another value, length of an array, shape, type or offset: one of the numbers behind a name."""
    at, width = _behind_name(rng, content) + 4 * rng.randrange(9), rng.choice((4, 8))
    return _replaced(content, at, (rng.choice(_NUMBERS) % 2 ** (8 * width)).to_bytes(width, "little"))


def _another_item_type(rng: random.Random, content: bytes) -> bytes:
    at = _behind_name(rng, content)
    return _replaced(content, at, _ARRAY.to_bytes(4, "little") + rng.choice(_TYPES).to_bytes(4, "little"))


def _another_length_of_a_name(rng: random.Random, content: bytes) -> bytes:
    at = rng.choice(_anchors(content))
    return _replaced(content, at, rng.choice((*_NUMBERS, rng.randrange(64))).to_bytes(8, "little"))


def _another_letter(rng: random.Random, content: bytes) -> bytes:
    at = rng.choice(_anchors(content)) + 8 + rng.randrange(24)
    return _replaced(content, at, rng.choice((b"x", b"\0", b"\xff", b".")))


def _another_key(rng: random.Random, content: bytes) -> bytes:
    """A key that stands first, with a value of any type. If the file has it too, it appears twice."""
    keys = (
        "general.architecture", "general.alignment", "llama.block_count", "llama.embedding_length", "x" * 70_000,
        "llama.attention.head_count", "llama.rope.freq_base", "tokenizer.ggml.tokens", "tokenizer.ggml.merges",
        "tokenizer.chat_template", "split.count", "llama.rope.scaling.type", "llama.attention.key_length",
    )  # fmt: skip
    value = rng.choice((7, -1, 2**40, 1.5, True, "x", "x" * 200_000, [1] * 100_000, ["x"] * 50_000, [0.5] * 3, [True]))
    key = rng.choice(keys)
    entry = gguf_files.text(key) + gguf_files.value(value)
    count = (int.from_bytes(content[16:24], "little") + 1) % 2**64
    renamed = content.replace(gguf_files.text(key), gguf_files.text("y" * len(key)))
    kept = rng.choice((renamed, renamed, content))
    return kept[:16] + count.to_bytes(8, "little") + entry + kept[_GGUF_START:]


GGUF = (
    _another_count, _another_type, _another_number_in_an_entry, _another_number_in_an_entry, _another_item_type,
    _another_length_of_a_name, _another_letter, _another_key, _another_key, *BYTES,
)  # fmt: skip


# -- all of them -------------------------------------------------------------------------------------------------------

_WITH_ADAPTER = {"lora": ["a={folder}/adapter"]}
_WITH_DRAFT = {"speculative": "{folder}/draft"}

KINDS: dict[str, Kind] = {
    "GGUF": Kind("model.gguf", GGUF, _write_gguf, given="model.gguf"),
    "GGUF of an encoder": Kind("model.gguf", GGUF, _write_encoder_gguf, given="model.gguf", is_served=False),
    "config": Kind("config.json", JSON),
    "config of any family": Kind("config.json", JSON, choose=_of_a_family, given="config.json", is_served=False),
    "tokenizer": Kind("tokenizer.json", JSON),
    "tokenizer_config": Kind("tokenizer_config.json", JSON),
    "generation_config": Kind("generation_config.json", JSON),
    "chat template": Kind("chat_template.jinja", (_with_jinja, _with_jinja, *BYTES), _write_template),
    "safetensors": Kind("model.safetensors", SAFETENSORS),
    "quantized safetensors": Kind("model.safetensors", SAFETENSORS, quantized("GPTQ")),
    "quantization_config": Kind("config.json", JSON, quantized("AWQ")),
    "index": Kind("model.safetensors.index.json", JSON, _write_index),
    "adapter_config": Kind("adapter/adapter_config.json", JSON, _write_adapter, settings=_WITH_ADAPTER),
    "adapter": Kind("adapter/adapter_model.safetensors", SAFETENSORS, _write_adapter, settings=_WITH_ADAPTER),
    "tokenizer of a draft model": Kind("draft/tokenizer.json", JSON, _write_draft, settings=_WITH_DRAFT),
    "config of a draft model": Kind("draft/config.json", JSON, _write_draft, settings=_WITH_DRAFT),
}
