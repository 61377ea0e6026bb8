"""LoRA adapters as files: a directory in PEFT's format, checked against the served model before anything is loaded.

It reads adapter_config.json and the header of adapter_model.safetensors. A wrong adapter is refused here, with the name
of what does not fit. Imports no torch; `engine/lora` reads the weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inferd.engine.api.checkpoint import TensorInfo, read_header, read_json
from inferd.engine.api.errors import ConfigError, ModelError
from inferd.engine.api.files import open_regular
from inferd.engine.api.held_files import HeldFiles
from inferd.engine.api.memory.activations import AdapterSpace
from inferd.engine.api.memory.precision import Precision
from inferd.engine.api.pinned_files import exists, is_file
from inferd.engine.arch.description import Arch
from inferd.engine.arch.registry import weights
from inferd.engine.arch.shown import shown
from inferd.engine.arch.stored import FLOATS
from inferd.engine.arch.wrappers import text_name

MAX_RANK, MAX_ADAPTERS = 64, 256
AUTO_RANK = 16
"""Space for adapters of this rank, unless one that is given at the start has a larger one."""
AUTO_ADAPTERS = 8
"""Number of adapters that there is space for, unless more are given at the start."""

MAX_CONFIG_BYTES, MAX_HEADER_BYTES = 256 * 1024, 512 * 1024
"""Sizes of JSON that are read while requests run: parsing it holds the interpreter's lock. PEFT writes a few KiB of
configuration, and a header of 0.3 MiB if it adapts every matrix of a model with 126 layers."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NUM_FILES = 2
_PREFIX, _BODY = "base_model.model.", "model."
"""PEFT writes the first before a module's name. An adapter of a model without a head leaves the second out."""
_WEIGHT = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_PATTERN = re.compile(r"\^?[\w.]+")
_UNSUPPORTED = (
    "use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "modules_to_save", "trainable_token_indices",
    "layer_replication", "target_parameters", "alora_invocation_tokens", "arrow_config", "use_bdlora", "kasa_config",
    "monteclora_config",
)  # fmt: skip
"""Options that change what an adapter computes, and are not computed here."""
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` with which PEFT leaves the model's own weights as they are. It replaces them with the
others, such as "pissa", each time it loads the adapter."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The update of one module: scale * B A is added to its weight."""

    matrix: str
    """Our matrix that holds the module: `layers.0.attention.qkv`."""
    part: int
    """Number of the matrix's modules before this one."""
    rank: int
    scale: float
    a: str
    """Name of A in the file."""
    b: str


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that fits the model."""

    path: Path
    digest: str
    """Hash of its two files."""
    updates: tuple[LowRank, ...]
    held: HeldFiles = field(default_factory=lambda: HeldFiles(()), compare=False, repr=False)
    """The files, if the server holds them open."""

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(update.rank for update in self.updates)


def read_adapter(path: Path, arch: Arch, max_rank: int = MAX_RANK) -> AdapterFiles:
    """Check an adapter against the model. Raises a `ModelError` that says which part of it cannot be served."""
    try:
        return _read(path, arch, max_rank)
    except OSError as error:
        raise ModelError(f"the adapter in {path} cannot be read: {error.strerror}") from error


def hold_adapter(path: Path, arch: Arch, max_rank: int = MAX_RANK) -> AdapterFiles:
    """`read_adapter`, for the server: later engines read the same files, even if others have their names by then."""
    held = HeldFiles([path / CONFIG, path / WEIGHTS])
    files = read_adapter(path, arch, max_rank)
    # All of the weights is hashed each time they are read.
    held.pin({path / WEIGHTS: [(0, 0)]})
    return replace(files, held=held)


def _read(path: Path, arch: Arch, max_rank: int) -> AdapterFiles:
    if not str(path).isprintable():
        raise ModelError(f"the directory of an adapter must have a printable path, but got {shown(str(path))}")
    if not exists(path / CONFIG) and not path.is_dir():
        raise ModelError(f"{path} is no directory: an adapter is a directory with {CONFIG} and {WEIGHTS}")
    config, file = read_json(path / CONFIG, MAX_CONFIG_BYTES), path / WEIGHTS
    _check_config(path, config)
    if not is_file(file):
        raise ModelError(
            f"{path} holds no {WEIGHTS}; an adapter in another format must be saved as safetensors, because pickled "
            "weights can carry code"
        )
    updates = tuple(_updates(path, config, {info.name: info for info in read_header(file, MAX_HEADER_BYTES)}, arch))
    if not updates:
        raise ModelError(f"{file} holds no weights of LoRA")
    widest = max(updates, key=lambda update: update.rank)
    if widest.rank > max_rank:
        raise ModelError(
            f"{file}: the rank must be at most {max_rank}, but {widest.a} has {widest.rank}"
            + (f"; start the server with --max-lora-rank {widest.rank}" if widest.rank <= MAX_RANK else "")
        )
    return AdapterFiles(path, digest_of(path), updates)


def digest_of(path: Path) -> str:
    """Hash of the contents of an adapter's two files."""
    both = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with open_regular(path / name) as file:
            both.update(hashlib.file_digest(file, "sha256").digest())
    return both.hexdigest()[:32]


def space_for(num_asked: int | None, rank_asked: int | None, given: tuple[AdapterFiles, ...]) -> tuple[int, int]:
    """(number of adapters, largest rank) to have space for, with the adapters `given` at the start. Raises
    `ConfigError`."""
    num = (max(AUTO_ADAPTERS, len(given)) if given else 0) if num_asked is None else num_asked
    if num < len(given):
        raise ConfigError(f"max_loras must be at least {len(given)}, the adapters given by --lora, but got {num}")
    return num, rank_asked or max([AUTO_RANK, *(files.rank for files in given)])


def adapter_space(num: int, rank: int, device: str, precision: Precision) -> AdapterSpace | None:
    """Memory to plan for adapters of a model in `precision`; None if there are none."""
    return AdapterSpace(num, rank, lora_dtype(device, precision)) if num else None


def lora_dtype(device: str, precision: Precision) -> str:
    """Dtype of the weights of adapters: 16 bits, unless the model's own weights have more."""
    if device == "cuda" or precision.dtype == "bfloat16":
        return precision.dtype
    has_few_bits = precision.weights_dtype == "bfloat16" or precision.quantization != "none"
    return "bfloat16" if has_few_bits else "float32"


def check_adapters(arch: Arch, num_ranks: int) -> None:
    """Raises a `ConfigError` if this model, shared by so many ranks, cannot have adapters."""
    if not arch.is_native:
        raise ConfigError(
            f"adapters are served for native families alone, and {arch.architecture} is computed by transformers; "
            "merge the adapter into the weights, or give --max-loras 0"
        )
    if num_ranks > 1:
        raise ConfigError(
            f"adapters are served by one process, but tensor_parallel_size is {num_ranks}; give "
            "--tensor-parallel-size 1, or --max-loras 0"
        )


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path / CONFIG}: peft_type must be 'LORA', but is {shown(config.get('peft_type'))}")
    if config.get("bias", "none") != "none":
        raise ModelError(
            f"{path / CONFIG}: bias must be 'none', but is {shown(config['bias'])}; merge the adapter instead"
        )
    for name in _UNSUPPORTED:
        if config.get(name):
            raise ModelError(
                f"{path / CONFIG}: {name} is not supported, but is {shown(config[name])}; merge the adapter into "
                "the weights"
            )
    if config.get("init_lora_weights") not in _BEGINNINGS:
        raise ModelError(
            f"{path / CONFIG}: init_lora_weights is {shown(config['init_lora_weights'])}, with which PEFT changes the "
            "model's own weights; save the adapter with path_initial_model_for_weight_conversion, or merge it"
        )


def _updates(path: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], arch: Arch) -> list[LowRank]:
    """The updates of all modules that the file holds weights of."""
    places = {
        module.name: (matrix, part, module)
        for matrix, modules in weights(arch).modules().items()
        for part, module in enumerate(modules)
    }
    names: dict[str, dict[str, str]] = {}
    for name in sorted(tensors):
        match = _WEIGHT.fullmatch(name)
        if match is None:
            raise ModelError(f"{path / WEIGHTS}: {name} is no A or B of a linear module, and nothing else is supported")
        names.setdefault(match["module"], {})[match["factor"]] = name
    found, seen, settings = [], dict[str, str](), _Patterns(path, config)
    for theirs, pair in names.items():
        module = _BODY + text_name(theirs.removeprefix(_PREFIX)).removeprefix(_BODY)
        if module not in places:
            raise ModelError(f"{path / WEIGHTS}: {theirs} is no linear module of the layers of {_base(arch, config)}")
        if len(pair) < 2:
            raise ModelError(f"{path / WEIGHTS}: {theirs} must have lora_A and lora_B, but has only {min(pair)}")
        if module in seen:
            raise ModelError(f"{path / WEIGHTS}: {theirs} and {seen[module]} are the same module; keep one of them")
        seen[module] = theirs
        matrix, part, shape = places[module]
        rank = _rank(path, arch, config, tensors[pair["A"]], tensors[pair["B"]], (shape.out_size, shape.in_size))
        found.append(LowRank(matrix, part, rank, _scale(path, settings, module, rank), pair["A"], pair["B"]))
    return found


def _base(arch: Arch, config: Mapping[str, Any]) -> str:
    base = shown(config.get("base_model_name_or_path"))
    return f"the served model ({arch.architecture}), and the adapter's base is {base}"


def _rank(
    path: Path, arch: Arch, config: Mapping[str, Any], a: TensorInfo, b: TensorInfo, shape: tuple[int, int]
) -> int:
    """The rank of A and B of a module of `shape`. Raises `ModelError` if they do not fit it."""
    out_size, in_size = shape
    rank = a.shape[0] if a.shape else 0
    for tensor, wanted in ((a, (rank, in_size)), (b, (out_size, rank))):
        if tensor.dtype not in FLOATS:
            raise ModelError(f"{path / WEIGHTS}: {tensor.name} is stored as {tensor.dtype}, not as one of {FLOATS}")
        if tensor.shape != wanted or not rank:
            raise ModelError(
                f"{path / WEIGHTS}: {tensor.name} must be {list(wanted)}, but is {list(tensor.shape)}: it does not fit "
                f"{_base(arch, config)}"
            )
    return rank


def _scale(path: Path, settings: _Patterns, module: str, rank: int) -> float:
    """The factor of B A: alpha / rank, or alpha / sqrt(rank) with rank-stabilized LoRA."""
    alpha, stated = settings.alpha(module), settings.rank(module)
    if stated != rank:
        raise ModelError(f"{path}: {module} has rank {rank} in {WEIGHTS}, but {shown(stated)} in {CONFIG}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e6:
        raise ModelError(f"{path / CONFIG}: lora_alpha must be a number below 1,000,000, but is {shown(alpha)}")
    return alpha / (rank**0.5 if settings.is_stabilized else rank)


class _Patterns:
    """The values that a configuration gives to modules by the ends of their names, or to all others."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """Raises `ModelError`."""
        self._alphas, self._ranks = (_ends(path, config, field) for field in ("alpha_pattern", "rank_pattern"))
        self._alpha, self._rank = config.get("lora_alpha", 8), config.get("r", 8)
        self.is_stabilized = bool(config.get("use_rslora"))

    def alpha(self, module: str) -> Any:
        return _of_module(self._alphas, module, self._alpha)

    def rank(self, module: str) -> Any:
        return _of_module(self._ranks, module, self._rank)


def _ends(path: Path, config: Mapping[str, Any], field: str) -> dict[str, tuple[int, Any]]:
    """End of a module's name -> (position in the file, value)."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict):
        raise ModelError(f"{path / CONFIG}: {field} must be an object, but is {shown(patterns)}")
    found: dict[str, tuple[int, Any]] = {}
    for number, (name, value) in enumerate(patterns.items()):
        if not _PATTERN.fullmatch(name):
            raise ModelError(f"{path / CONFIG}: {field} must have names of modules, but has the pattern {shown(name)}")
        found.setdefault(name.removeprefix("^"), (number, value))
    return found


def _of_module(ends: Mapping[str, tuple[int, Any]], module: str, default: Any) -> Any:
    """The value of the first pattern that the module's name ends with, or the default."""
    parts = module.split(".")
    matches = [ends[end] for i in range(len(parts)) if (end := ".".join(parts[i:])) in ends]
    return min(matches, key=lambda match: match[0])[1] if matches else default
