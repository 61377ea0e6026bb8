"""Opens a GGUF file, or the parts of a split one, and gives what the files of a checkpoint directory would hold."""

from __future__ import annotations

import contextlib
import mmap
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from inferd.engine.api.errors import ModelError
from inferd.engine.api.kept_content import kept_content
from inferd.engine.api.pinned_files import files_in, is_file, source_of
from inferd.engine.arch.description import ArchError
from inferd.engine.arch.gguf import encoder_tokenizer, splitters, tokenizer, vocabulary
from inferd.engine.arch.gguf.config import VISION, config_of, family_of
from inferd.engine.arch.gguf.encoders import encoder_config_of, encoder_of, encoder_tensors
from inferd.engine.arch.gguf.header import MAX_HEADER_BYTES, GgufError, GgufTensor, Header, Values, parse_header
from inferd.engine.arch.gguf.metadata import FACTOR_TENSORS, Metadata, num_layers
from inferd.engine.arch.gguf.tensors import OriginalNames, PlacedTensor, Sizes
from inferd.engine.arch.registry import describe, tensor_names
from inferd.engine.arch.shown import shown

SUFFIX = ".gguf"

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 1000
_NAMES_SHOWN = 8
_MAX_FACTORS = 2**12

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The content of one file, or of all parts of a split one, without the weights."""

    path: Path
    metadata: Values
    config: Json
    tensors: Mapping[str, PlacedTensor]
    """Tensors by the names of the original checkpoint."""

    @property
    def pooling_type(self) -> object:
        """How the states of a text become one vector, as the file states it; None if it does not."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.pooling_type")

    def texts(self) -> GgufTexts:
        """The files of the original checkpoint that are made from the vocabulary. They are kept from start to start
        (`kept_content`), so that later starts decode no token. Raises `ModelError`."""
        used = {key: self.metadata.written(key) for key in self.metadata if key.startswith(_TEXT_KEYS)}
        made_from = (b"texts", msgspec.msgpack.encode(used))
        made_by = tuple(module.__name__ for module in (tokenizer, encoder_tokenizer, splitters, vocabulary))
        kept = kept_content(made_from, made_by, lambda: msgspec.msgpack.encode(self._made_texts()))
        return msgspec.msgpack.decode(kept, type=GgufTexts)

    def _made_texts(self) -> GgufTexts:
        try:
            return GgufTexts(
                tokenizer=msgspec.json.encode(tokenizer.tokenizer_of(self.metadata)),
                tokenizer_config=tokenizer.tokenizer_config_of(self.metadata),
                generation_config=tokenizer.generation_config_of(self.metadata),
            )
        except GgufError as error:
            raise ModelError(f"{self.path}: {error}") from error


class GgufTexts(msgspec.Struct, frozen=True):
    """tokenizer.json as JSON, and the content of two other files."""

    tokenizer: bytes
    tokenizer_config: Json
    generation_config: Json


_TEXT_KEYS = ("tokenizer.", "general.architecture", "general.sampling.")
"""Beginnings of the keys that these files are made from."""


def is_gguf(path: Path) -> bool:
    """Whether this path is a GGUF file by its name. A checkpoint with another name is a directory."""
    return path.suffix == SUFFIX and not path.is_dir()


def read_gguf(path: Path) -> GgufFile:
    """Read the headers. Raises `ModelError` with the file, the rule and the value that breaks it."""
    files = parts_of(path)
    headers = [_header(file) for file in files]
    _check_parts(files, headers)
    found: dict[str, tuple[GgufTensor, Path]] = {}
    for file, header in zip(files, headers, strict=True):
        for tensor in header.tensors:
            if tensor.name in found:
                raise ModelError(f"tensor {tensor.name} is in both {found[tensor.name][1].name} and {file.name}")
            found[tensor.name] = tensor, file
    factors = {name: _values(*found[name]) for name in FACTOR_TENSORS if name in found}
    try:
        of = Metadata(headers[0].metadata, {name: tensor for name, (tensor, _) in found.items()}, factors)
        encoder = encoder_of(of)
        config = config_of(of) if encoder is None else encoder_config_of(of, encoder)
        _check_vocabulary(headers[0].metadata, config)
        named = _by_original_names(of, config, found) if encoder is None else encoder_tensors(config, encoder, found)
        return GgufFile(path, headers[0].metadata, config, named)
    except (ArchError, GgufError) as error:
        raise ModelError(f"{path}: {error}") from error


def _check_vocabulary(metadata: Values, config: Json) -> None:
    """Refuse more tokens than the embedding has rows, before anything is made of them."""
    num_tokens, rows = metadata.num_items("tokenizer.ggml.tokens"), config["vocab_size"]
    if num_tokens > rows:
        raise GgufError(
            f"tokenizer.ggml.tokens must have at most {rows} items, one for each row of the embedding, but has "
            f"{num_tokens}"
        )


def parts_of(path: Path) -> list[Path]:
    """All files of the model that `path` is the first part of. Raises `ModelError` if one is missing."""
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    number, count = int(part[2]), int(part[3])
    if not 1 <= number <= count <= _MAX_PARTS:
        raise ModelError(
            f"{path}: by its name it is part {number} of {count}, but parts are numbered from 1, and there are at most "
            f"{_MAX_PARTS}: give the first part by the name that it was made with"
        )
    names = [f"{part[1]}-{number:05d}-of-{part[3]}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not is_file(path.parent / name)]
    if number != 1:
        raise ModelError(
            f"{path} is part {number} of {count} of one model: give its first part, {path.parent / names[0]}"
            + (f"; missing beside it: {', '.join(missing[:_NAMES_SHOWN])}" if missing else "")
        )
    if missing:
        raise ModelError(
            f"{path} is part 1 of {count} of one model, and {len(missing)} of the others are missing: "
            f"{', '.join(missing[:_NAMES_SHOWN])}; put all parts into {path.parent}"
        )
    return [path.parent / name for name in names]


def vision_files(path: Path, hidden_size: object) -> dict[str, int]:
    """Bytes of each file beside `path`, by its name, that holds the parts of the same model that see or hear. A file
    that cannot be read is none."""
    found: dict[str, int] = {}
    for file in files_in(path.parent, SUFFIX):
        if "mmproj" not in file.name.lower() or file == path:
            continue
        with contextlib.suppress(ModelError):
            metadata = _header(file).metadata
            sizes = {metadata.get(f"{VISION}.{part}.projection_dim") for part in ("vision", "audio")}
            if metadata.get("general.architecture") == VISION and hidden_size in sizes:
                found[file.name] = file.stat().st_size
    return found


def _check_parts(files: list[Path], headers: list[Header]) -> None:
    """Raises `ModelError` if the headers contradict the names of the parts."""
    for index, (file, header) in enumerate(zip(files, headers, strict=True)):
        stated = (header.metadata.get("split.no", 0), header.metadata.get("split.count", 1) or 1)
        if stated != (index, len(files)):
            own = stated[0] + 1 if type(stated[0]) is int else stated[0]
            raise ModelError(
                f"{file}: by its metadata it is part {shown(own)} of {shown(stated[1])}; by its name it is part "
                f"{index + 1} of {len(files)}. All parts must have the names that they were made with, and the first "
                "is the one to give"
            )


def _header(file: Path) -> Header:
    try:
        source = source_of(file)
        about = source.stat()
        if not stat.S_ISREG(about.st_mode):
            raise ModelError(f"{file} must be a regular file")
        if not about.st_size:
            raise ModelError(f"{file} is empty")
        with source.open("rb") as stream:
            num_bytes = min(about.st_size, MAX_HEADER_BYTES)
            with mmap.mmap(stream.fileno(), num_bytes, access=mmap.ACCESS_READ) as data:
                return parse_header(data, about.st_size)
    except FileNotFoundError as error:
        raise ModelError(f"no file {file}") from error
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except GgufError as error:
        raise ModelError(f"{file}: {error}") from error


def _values(tensor: GgufTensor, file: Path) -> tuple[float, ...]:
    """The values of a short tensor in F32."""
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
        rule = f"must be one row of at most {_MAX_FACTORS} values in F32"
        raise ModelError(f"{file}: {tensor.name} {rule}, but is {tensor.type.name} {list(tensor.shape)}")
    try:
        with source_of(file).open("rb") as stream:
            stream.seek(tensor.begin)
            return struct.unpack(f"<{tensor.shape[0]}f", stream.read(tensor.num_bytes))
    except (OSError, struct.error) as error:
        raise ModelError(f"cannot read {tensor.name} of {file}: {error}") from error


def _by_original_names(
    of: Metadata, config: Json, found: Mapping[str, tuple[GgufTensor, Path]]
) -> dict[str, PlacedTensor]:
    names = tensor_names(config["architectures"][0], splits_matrices=config.get("splits_matrices", False))
    heads = [config[name] for name in ("num_attention_heads", "num_key_value_heads")]
    if not all(type(count) is int and count > 0 for count in heads):
        raise GgufError(f"{of.architecture}.attention.head_count and head_count_kv must be above 0, but are {heads}")
    family = family_of(of)
    recurrent = describe(config).recurrent if family.tiles_value_heads else None
    original = OriginalNames(family, names, Sizes(num_layers(of), heads[0], heads[1], recurrent))
    tensors: dict[str, PlacedTensor] = {}
    for name, (tensor, file) in found.items():
        named = original.of(tensor)
        if named is not None:
            if named[0] in tensors:
                raise GgufError(f"{name} and {tensors[named[0]].tensor.name} are both {named[0]}")
            tensors[named[0]] = PlacedTensor(named[1], file, named[2])
    return tensors
