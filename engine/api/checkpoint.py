"""A checkpoint as files: its config.json, and the tensors that its safetensors headers list. Or one GGUF file, whose
header holds the same.

It reads no tensor data and imports no torch, so that a wrong checkpoint is refused in seconds, before an engine exists.
It reads no pickles, because a pickled checkpoint can carry code.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inferd.engine.api import smollm2
from inferd.engine.api.errors import ModelError
from inferd.engine.api.files import open_regular, read_regular
from inferd.engine.api.gguf import GgufFile, GgufTexts, is_gguf, parts_of, read_gguf, vision_files
from inferd.engine.api.pinned_files import exists, files_in, is_file
from inferd.engine.arch.description import Arch, ArchError
from inferd.engine.arch.encoder import EncoderArch
from inferd.engine.arch.encoder_registry import encoder_tensors_of, is_encoder
from inferd.engine.arch.gguf.tensors import PlacedTensor
from inferd.engine.arch.registry import is_body, tensor_names
from inferd.engine.arch.shown import shown
from inferd.engine.arch.stacked import Slice, router_name, slices
from inferd.engine.arch.stored import FLOATS
from inferd.engine.arch.tensors import EMBEDDING, HEAD, TensorNames, named_in_full
from inferd.engine.arch.wrappers import is_tied, text_config, text_tensors, wrapper_of

EMBEDDED_NAME = "tiny"
"""Name of the embedded model on the command line."""
EMBEDDED_PATH = Path(__file__).resolve().parents[1] / "tiny" / "model"

_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files beside config.json that may describe a quantization, and the `quant_method` that they leave out."""
CONFIG_FILES = ("config.json", *_QUANTIZATION_FILES)
INDEX_FILE = "model.safetensors.index.json"

_MAX_JSON_BYTES = 64 * 2**20
_HEADER_PREFIX_BYTES = 8
_MAX_RANK = 64
"""Most axes of a tensor; torch allows no more."""
_DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor, as the header of its file states it."""

    name: str
    """Name in the file."""
    dtype: str
    """Dtype in the header's spelling: "BF16", "F32", ..., or a type of blocks in a GGUF file: "Q4_0"."""
    shape: tuple[int, ...]
    file: Path
    num_bytes: int
    begin: int
    """First byte in the file, also if it is one of several parts of a tensor there."""
    gguf: PlacedTensor | None = None
    """Place and form in a GGUF file; None in a safetensors file."""
    part: Slice | None = None
    """The part of a tensor in a safetensors file that it is; None: all."""

    def sliced(self, part: Slice) -> TensorInfo:
        """One expert's tensor in a tensor of all experts."""
        shape = part.shape
        num_bytes = self.num_bytes * math.prod(shape) // math.prod(self.shape)
        if self.gguf is None:
            return replace(self, shape=shape, num_bytes=num_bytes, part=part)
        tensor = self.gguf.tensor
        row_bytes = self.num_bytes // (self.shape[0] * self.shape[1])
        begin = tensor.begin + row_bytes * (self.shape[1] * part.expert + part.first_row)
        placed = replace(self.gguf, tensor=replace(tensor, shape=shape, begin=begin))
        return replace(self, shape=shape, num_bytes=num_bytes, gguf=placed)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory with a `config.json` and the headers of its safetensors files, or a GGUF file."""

    path: Path
    config: dict[str, Any]
    """Content of config.json; of a wrapper, the config of its text part. A GGUF file's is made from its metadata."""
    tensors: dict[str, TensorInfo]
    """Tensors by the names of a generating model, even if an embedding model's files leave a prefix out. Those of an
    encoder have no prefix."""
    keeps_blocks: bool = False
    """Whether the matrices of a GGUF file are served from their blocks. Otherwise they are dequantized."""
    wrapper: str = ""
    """Architecture of the whole, if the checkpoint has other parts than text; otherwise empty."""
    left_out: dict[str, TensorInfo] = field(default_factory=dict)
    """Tensors of the other parts, which are not read, by their names in the files."""
    files_left_out: dict[str, int] = field(default_factory=dict)
    """Bytes of each file of other parts beside a GGUF file, by its name. They are not opened to serve."""
    gguf: GgufFile | None = field(default=None, compare=False, repr=False)
    """Content of the GGUF file, if it is one."""

    @classmethod
    def read(cls, path: Path, *, keeps_blocks: bool = False) -> Checkpoint:
        """Read config and headers. Raises a `ModelError` that names the file and its fault."""
        if is_gguf(path):
            return cls._of_gguf(path, keeps_blocks)
        config = read_config(path)
        tensors: dict[str, TensorInfo] = {}
        for file in _weight_files(path):
            for info in read_header(file):
                if info.name in tensors:
                    raise ModelError(f"tensor {info.name} is in both {tensors[info.name].file.name} and {file.name}")
                tensors[info.name] = info
        wrapper = wrapper_of(config)
        if wrapper is not None:
            return cls._of_wrapper(path, wrapper, config, tensors)
        _check_num_layers(path, config, len(tensors))
        if is_encoder(config):
            try:
                return cls(path, config, encoder_tensors_of(config, tensors))
            except ArchError as error:
                raise ModelError(f"{path}: {error}") from error
        return cls(path, config, named_in_full(tensors))

    @classmethod
    def _of_wrapper(
        cls, path: Path, wrapper: str, config: dict[str, Any], tensors: dict[str, TensorInfo]
    ) -> Checkpoint:
        try:
            text, others = text_tensors(tensors)
        except ArchError as error:
            raise ModelError(f"{path}: {error}") from error
        text_only = {**_text_config(path, config), "tie_word_embeddings": is_tied(config, text)}
        _check_num_layers(path, text_only, len(text))
        return cls(path, text_only, text, wrapper=wrapper, left_out=others)

    @classmethod
    def _of_gguf(cls, path: Path, keeps_blocks: bool) -> Checkpoint:
        file = read_gguf(path)
        tensors = {}
        for name, stored in file.tensors.items():
            tensor = stored.tensor
            kind = tensor.type.name
            tensors[name] = TensorInfo(
                tensor.name, kind, tensor.shape, stored.file, tensor.num_bytes, tensor.begin, stored
            )
        others = vision_files(path, file.config["hidden_size"])
        wrapper = file.config["architectures"][0] if others else ""
        return cls(path, file.config, tensors, keeps_blocks, wrapper, files_left_out=others, gguf=file)

    def tensors_of(self, arch: Arch | EncoderArch) -> dict[str, TensorInfo]:
        """The tensors that `arch` needs. A head that keeps the blocks of a tied embedding reads the embedding's. Each
        expert's matrix is a tensor, also if the files hold those of all experts together."""
        if isinstance(arch, EncoderArch) or not arch.is_native:
            return self.tensors
        shares_head = self.keeps_blocks and arch.has_head and not arch.tie_embeddings and HEAD not in self.tensors
        found = {**self.tensors, HEAD: self.tensors[EMBEDDING]} if shares_head else self.tensors
        if arch.experts is None:
            return found
        return _of_each_expert(found, tensor_names(arch.architecture, splits_matrices=arch.splits_matrices))

    @property
    def is_embedded(self) -> bool:
        return self.path == EMBEDDED_PATH

    @property
    def dtype(self) -> str:
        """The dtype that the config states ("bfloat16", "float16", "float32"). If it states none, the dtype of most
        bytes of the weights; quantized weights do not count."""
        stated = self.config.get("dtype", self.config.get("torch_dtype"))
        if isinstance(stated, str) and stated:
            return stated.removeprefix("torch.")
        bytes_by_dtype: dict[str, int] = {}
        for info in self.tensors.values():
            if info.dtype in FLOATS:
                bytes_by_dtype[info.dtype] = bytes_by_dtype.get(info.dtype, 0) + info.num_bytes
        most = max(bytes_by_dtype, key=lambda name: bytes_by_dtype[name], default="F32")
        return {"BF16": "bfloat16", "F16": "float16"}.get(most, "float32")

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())


def _of_each_expert(tensors: dict[str, TensorInfo], names: TensorNames) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        own = {part: info.sliced(place) for part, place in slices(name, info.shape, names)}
        found |= own or {name: info}
    is_stacked = found.keys() != tensors.keys()
    return {router_name(name, names): info for name, info in found.items()} if is_stacked else found


class Documents:
    """The JSON files of a checkpoint's folder, or what a GGUF file has in their place. A GGUF file is read once, and
    config.json, generation_config.json, tokenizer.json and tokenizer_config.json are made from its metadata."""

    def __init__(self, path: Path, gguf: GgufFile | None = None) -> None:
        """`gguf`: content of the GGUF file, if it was read already. Raises `ModelError`."""
        self._path = path
        self.gguf = read_gguf(path) if gguf is None and is_gguf(path) else gguf
        self._read: dict[str, dict[str, Any] | None] = {}
        self._texts: GgufTexts | None = None

    def __call__(self, name: str) -> dict[str, Any] | None:
        """The content of the file `name`; None if the checkpoint has no such file. Raises `ModelError`."""
        if name not in self._read:
            self._read[name] = self._content(name)
        return self._read[name]

    def _content(self, name: str) -> dict[str, Any] | None:
        path = self._path
        if self.gguf is None:
            found = read_json(path / name) if exists(path / name) else None
            return _text_config(path, found) if name == "config.json" and found is not None else found
        if name == "config.json":
            return self.gguf.config
        if name == "tokenizer_config.json":
            return self._made_texts(self.gguf).tokenizer_config
        if name == "generation_config.json":
            recommended = smollm2.SAMPLING if smollm2.is_this(path) else {}
            return {**recommended, **self._made_texts(self.gguf).generation_config}
        if name == "tokenizer.json":
            made: dict[str, Any] = json.loads(self._made_texts(self.gguf).tokenizer)
            return made
        return None

    def made_tokenizer(self) -> bytes | None:
        """tokenizer.json of a GGUF file as JSON; None for a folder, which has the file itself. Raises `ModelError`."""
        return None if self.gguf is None else self._made_texts(self.gguf).tokenizer

    def _made_texts(self, gguf: GgufFile) -> GgufTexts:
        if self._texts is None:
            self._texts = gguf.texts()
        return self._texts


def _text_config(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    try:
        return text_config(config)
    except ArchError as error:
        raise ModelError(f"{path}: {error}") from error


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights. Raises `ModelError` if there are none, or one is missing."""
    return parts_of(path) if is_gguf(path) else _weight_files(path)


def has_head(config: Mapping[str, Any]) -> bool:
    """Whether a model was stored with the head from which tokens are drawn, by its config.json."""
    return not is_body(config)


def draws_tokens(config: Mapping[str, Any]) -> bool:
    """Whether a model can generate, by its config.json: an encoder cannot, and no model that was stored without its
    head."""
    return has_head(config) and not is_encoder(config)


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a directory. If it says nothing of a quantization, a file of an older convention may. Raises
    `ModelError`."""
    config = read_json(path / "config.json")
    for name, method in _QUANTIZATION_FILES.items():
        if config.get("quantization_config") is None and exists(path / name):
            config["quantization_config"] = {"quant_method": method, **read_json(path / name)}
    return config


def read_json(file: Path, max_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in `file`. Raises `ModelError` if the file is missing, unreadable, too large or malformed."""
    try:
        value = json.loads(read_regular(file, max_bytes))
    except FileNotFoundError as error:
        found = sorted(found.name for found in file.parent.glob("*.gguf"))
        hint = f"; give one of its GGUF files: {', '.join(found[:8])}" if found else ""
        raise ModelError(f"{file.parent} holds no {file.name}: it is not a checkpoint directory{hint}") from error
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold an object, but holds a {type(value).__name__}")
    return value


def _check_num_layers(path: Path, config: dict[str, Any], num_tensors: int) -> None:
    """Refuse more layers than tensors: every layer has weights of its own. A description has an entry for each layer,
    so this check comes before it is built."""
    num_layers = config.get("num_hidden_layers")
    if type(num_layers) is int and num_layers > num_tensors:
        raise ModelError(f"{path}: config.json has num_hidden_layers {num_layers}, but there are {num_tensors} tensors")


def _weight_files(path: Path) -> list[Path]:
    """The files that the index names, else `model.safetensors`, else every safetensors file in the directory."""
    index = path / INDEX_FILE
    if exists(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index} has no weight_map from tensor names to file names")
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(f"{index} names a file outside its directory: {shown(outside[0])}")
        try:
            missing = [name for name in names if not is_file(path / name)]
        except OSError as error:
            raise ModelError(f"{index} names a file that cannot exist: {error.strerror}") from error
        if missing:
            raise ModelError(f"{index} names {len(names)} files, of which {len(missing)} are missing: {missing[0]}")
        return [path / name for name in names]
    single = path / "model.safetensors"
    files = [single] if is_file(single) else files_in(path, ".safetensors")
    if not files:
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
        hint = f" ({pickled[0]} is a pickle, which can carry code: convert it to safetensors)" if pickled else ""
        raise ModelError(f"{path} holds no safetensors weights{hint}")
    return files


def read_header(file: Path, max_bytes: int = _MAX_JSON_BYTES) -> list[TensorInfo]:
    """The tensors in a safetensors file, from its header alone, which has at most `max_bytes`. Raises `ModelError`
    unless they cover the rest of the file exactly once.

    Format: https://github.com/huggingface/safetensors#format.
    """
    content, data_bytes = _header_bytes(file, max_bytes)
    try:
        header = json.loads(content, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"the header of {file} is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"the header of {file} is not an object")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    data_begin = _HEADER_PREFIX_BYTES + len(content)
    infos = [_tensor(file, name, entry, data_begin, data_bytes) for name, entry in entries.items()]
    _check_offsets(file, sorted((*entry["data_offsets"], name) for name, entry in entries.items()), data_bytes)
    return infos


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ. If a name came twice, two readers could take different entries."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return made


def _check_offsets(file: Path, offsets: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Refuse tensors that overlap, and holes, which could hide anything. `offsets`: (begin, end, tensor) in order."""
    at = 0
    for begin, end, name in offsets:
        if begin != at:
            rule = "tensors must follow one another, without overlap and without a hole"
            raise ModelError(f"{file}: {name} begins at byte {begin} of the data, but byte {at} is next: {rule}")
        at = end
    if at != data_bytes:
        raise ModelError(f"{file} has {data_bytes - at} bytes after its last tensor, which belong to no tensor")


def _header_bytes(file: Path, max_bytes: int) -> tuple[bytes, int]:
    """(the header's JSON, number of bytes of data after it)."""
    try:
        with open_regular(file) as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            prefix = stream.read(_HEADER_PREFIX_BYTES)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < _HEADER_PREFIX_BYTES or header_bytes > file_bytes:
                raise ModelError(
                    f"{file} is truncated or not a safetensors file: {file_bytes} bytes, header of {header_bytes}"
                )
            if header_bytes > max_bytes:
                raise ModelError(f"{file} has a header of {header_bytes} bytes, but at most {max_bytes} are allowed")
            return stream.read(header_bytes), file_bytes - _HEADER_PREFIX_BYTES - header_bytes
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error


def _tensor(file: Path, name: str, entry: Any, data_begin: int, data_bytes: int) -> TensorInfo:
    try:
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(file, name) from error
    if len(shape) > _MAX_RANK or not all(_is_whole(number) for number in (*shape, begin, end)):
        raise _malformed(file, name)
    if dtype not in _DTYPE_BYTES:
        raise ModelError(f"{file}: {name} has dtype {dtype}; known are {', '.join(sorted(_DTYPE_BYTES))}")
    num_bytes = _DTYPE_BYTES[dtype] * math.prod(shape)
    if min(shape, default=1) < 0 or end - begin != num_bytes or begin < 0:
        raise ModelError(
            f"{file}: {name} is {dtype} {list(shape)}, {num_bytes} bytes, but its data_offsets span {end - begin}"
        )
    if end > data_bytes:
        raise ModelError(f"{file} is truncated: {name} ends at byte {end} of {data_bytes}")
    return TensorInfo(name, dtype, shape, file, num_bytes, data_begin + begin)


def _malformed(file: Path, name: str) -> ModelError:
    rule = f"it needs a dtype, a shape of at most {_MAX_RANK} whole numbers, and two whole numbers as data_offsets"
    return ModelError(f"{file}: the header's entry for {name} is malformed: {rule}")


def _is_whole(value: object) -> bool:
    """Whether `value` is a JSON integer within 64 bits; a bool or a float is none."""
    return type(value) is int and abs(value) < 2**63
