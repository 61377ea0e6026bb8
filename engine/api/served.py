"""Rules for how a machine serves a model: the device, the dtype, and the formats of weights, K and V, each with a
reason.

It knows devices and precisions, but no sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from inferd.engine.api.encoder_model import EncoderFacts
from inferd.engine.api.errors import ConfigError
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.machine.gpu import Accelerator
from inferd.engine.api.memory.activations import MAX_RANKS
from inferd.engine.api.memory.planner import declares_activations, refusal, stored_quantization
from inferd.engine.api.memory.precision import DTYPE_BYTES, KV_FORMATS, SHORT_KV, KVPrecision, Precision, Quantization
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.description import Arch
from inferd.engine.arch.encoder import EncoderArch
from inferd.engine.arch.sharding import counts_of, refuses
from inferd.engine.arch.shown import shown
from inferd.kernels.device import FP8_MIN_SM

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DeviceKind = Literal["auto", "cpu", "cuda"]
Activations = Literal["own", "declared"]
KVCacheDtype = Literal["auto", "fp8", "int8", "float32", "bfloat16", "float16"]

_CPU_QUANTIZATION: tuple[Quantization, ...] = ("int8", "int4")
"""Formats offered on a CPU. It serves fp8 too, slowly."""
_GPU_QUANTIZATION: tuple[Quantization, ...] = ("fp8", "int8", "int4")
_FP8_CAPABILITY = divmod(FP8_MIN_SM, 10)
"""First compute capability with 8-bit floats: in tensor cores and in instructions that convert them."""


def served_device(
    asked: DeviceKind, quantization: Quantization, machine: Machine, arch: Arch
) -> tuple[Literal["cpu", "cuda"], str]:
    """(device that the model runs on, why)."""
    gpu = machine.accelerator
    if asked == "cuda" and gpu is None:
        raise ConfigError(f"device cuda was asked for, but {machine.no_accelerator}; give --device cpu, or auto")
    if asked == "cpu" or gpu is None:
        return "cpu", f"there is no GPU: {machine.no_accelerator}"
    unserved = way_out = hint = ""
    if quantization == "fp8" and (reason := _lacks_fp8("fp8 needs", gpu)) is not None:
        unserved = reason
        if stored_quantization(arch) == "fp8":
            way_out = "serve a checkpoint that is not in fp8, or give --device cpu"
            hint = "; a checkpoint that is not in fp8 runs on it"
        else:
            way_out, hint = "give --quantization int8 or int4, or --device cpu", "; int8 and int4 run on it"
    if arch.layer_heads:
        unserved, way_out = "layers with heads of different sizes are computed on processors alone", "give --device cpu"
        hint = ""
    if not unserved:
        return "cuda", gpu.name
    if asked == "auto":
        return "cpu", unserved + hint
    raise ConfigError(f"{unserved}; {way_out}")


def check_modelled(arch: Arch, device: str, *, deterministic: bool) -> None:
    """Raises a `ConfigError` if transformers' code would have to give the same bits on a GPU."""
    if not arch.is_native and device == "cuda" and deterministic:
        raise ConfigError(
            f"deterministic results were asked for, but {arch.architecture} is computed by transformers' own code, "
            "whose operations on a GPU choose their order by the other rows; give --no-deterministic, or --device cpu"
        )


def check_ranks(num_ranks: int, arch: Arch) -> None:
    """Raises a `ConfigError` that names the numbers of ranks that could share this model."""
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ConfigError(f"tensor_parallel_size must be at least 1 and at most {MAX_RANKS}, but got {num_ranks}")
    if num_ranks > 1 and not arch.is_native:
        raise ConfigError(
            f"{num_ranks} ranks cannot share {arch.architecture}, because transformers' own code computes it; give "
            "--tensor-parallel-size 1"
        )
    reason = refuses(arch, num_ranks)
    if reason is not None:
        known = ", ".join(str(count) for count in counts_of(arch))
        raise ConfigError(
            f"this model cannot be shared by {num_ranks} ranks: {reason}; give --tensor-parallel-size as one of {known}"
            ", with a core or a GPU for each"
        )


def check_rank_places(num_ranks: int, device: str, num_threads: int | None, machine: Machine) -> None:
    """Raises a `ConfigError` if there is no core, or no GPU, for each rank."""
    if num_ranks == 1:
        return
    if device == "cuda":
        assert machine.accelerator is not None
        num_gpus = 1 + len(machine.accelerator.others_free_bytes)
        if num_ranks > num_gpus:
            raise ConfigError(
                f"tensor_parallel_size must be at most {num_gpus} here, because each rank needs a GPU of its own and "
                f"CUDA_VISIBLE_DEVICES allows {num_gpus} x {machine.accelerator.name}, but got {num_ranks}; give a "
                "smaller --tensor-parallel-size, or --device cpu"
            )
        return
    cores = machine.num_cpus if num_threads is None else min(num_threads, machine.num_cpus)
    if num_ranks > cores:
        what = ("core" if cores == machine.num_cpus else "thread") + ("s" if cores > 1 else "")
        raise ConfigError(
            f"tensor_parallel_size must be at most {cores} here, because each rank needs a thread and a core of its "
            f"own and there {_be(cores)} {cores} {what}, but got {num_ranks}; give a smaller --tensor-parallel-size"
        )


def check_replica_places(num_replicas: int, num_ranks: int, device: str, machine: Machine) -> None:
    """Raises a `ConfigError` if there is no core, or no GPU, for each rank of each replica."""
    if num_replicas == 1:
        return
    if device == "cuda":
        assert machine.accelerator is not None
        what, count = "GPU", 1 + len(machine.accelerator.others_free_bytes)
    else:
        what, count = "core", machine.num_cpus
    if num_replicas * num_ranks > count:
        ranks = f" {num_ranks}" if num_ranks > 1 else " a"
        raise ConfigError(
            f"replicas must be at most {count // num_ranks} here, because each needs{ranks} "
            f"{what}{'s' if num_ranks > 1 else ''} of its own and there {_be(count)} {count}, but got {num_replicas}; "
            "give a smaller --replicas"
        )


def _be(count: int) -> str:
    return "is" if count == 1 else "are"


def deterministic_on(asked: bool | None, device: str) -> tuple[bool, str]:
    """(whether tokens depend on the request alone, why)."""
    if device == "cpu":
        return True, "on a CPU results are always deterministic"
    if asked is None:
        return False, "it was not asked for, and on a GPU it costs speed: how much has not been measured"
    return asked, "what was asked for"


def served_activations(asked: Literal["auto"] | Activations, device: str, arch: Arch) -> tuple[Activations, str]:
    """(how activations are quantized, why)."""
    if asked != "declared":
        return "own", "nearer to float32 than what a checkpoint declares"
    if device == "cuda":
        return "own", "GPUs do not quantize the activations of integers"
    if not declares_activations(arch):
        return "own", "the checkpoint declares no activations of 8 bits with one scale a token"
    return "declared", "what was asked for"


def served_kv_cache(asked: KVCacheDtype, dtype: str, machine: Machine) -> tuple[str, str]:
    """(format of K and V, why)."""
    if asked in KV_FORMATS:
        reason = kv_refusal(asked, machine)
        if reason is not None:
            raise ConfigError(f"{reason}; give --kv-cache-dtype {SHORT_KV} or auto, or --device cpu")
        return asked, "what was asked for"
    if asked not in ("auto", dtype):
        raise ConfigError(
            f"kv_cache_dtype must be one of auto, {', '.join(KV_FORMATS)} and the dtype, {dtype}, but got {asked}"
        )
    return dtype, "the dtype"


def kv_refusal(kv_cache: str, machine: Machine) -> str | None:
    """Why K and V cannot be stored in this format here, or None."""
    if kv_cache != "fp8" or machine.device == "cpu" or machine.accelerator is None:
        return None
    return _lacks_fp8("K and V in fp8 need", machine.accelerator)


def weights_refusal(quantization: str, machine: Machine) -> str | None:
    """Why weights cannot be stored in this format here, or None."""
    if quantization != "fp8" or machine.device == "cpu" or machine.accelerator is None:
        return None
    return _lacks_fp8("fp8 needs", machine.accelerator)


def _lacks_fp8(what: str, gpu: Accelerator) -> str | None:
    """Why a GPU computes nothing in 8-bit floats, or None. `what` begins the sentence."""
    if gpu.capability >= _FP8_CAPABILITY:
        return None
    have, need = (".".join(map(str, version)) for version in (gpu.capability, _FP8_CAPABILITY))
    return f"{what} compute capability {need} or higher, and {gpu.name} has {have}"


def served_dtype(dtype: str, machine: Machine) -> tuple[str, str]:
    """(dtype in which this machine computes a model of `dtype`, why). float32 holds every float16 and bfloat16
    exactly."""
    if machine.device == "cuda":
        return dtype, "as asked"
    if dtype == "float16":
        return "float32", "there is no float16 matrix product on a CPU"
    if dtype == "bfloat16" and not machine.has_bf16_matmul:
        return "float32", "this processor has no bfloat16 matrix product"
    return dtype, "as asked"


def served_weights_dtype(dtype: str, facts: ModelFacts | EncoderFacts, machine: Machine) -> tuple[str, str]:
    """(dtype of the weights of a model that is computed in `dtype`, why)."""
    if not facts.arch.is_native:
        return dtype, "transformers' own code takes one dtype"
    if dtype == "float32" and machine.device == "cpu" and machine.widens_weights:
        return facts.matrix_dtype, "the checkpoint's: products widen it as they read it"
    return dtype, "the dtype"


def served_precisions(arch: Arch, asked: Precision, machine: Machine) -> tuple[Precision, ...]:
    """Precisions that could be served here in place of `asked`, the largest weights first: each dtype, then `asked`
    with K and V in 8 bits, then its dtype with quantized weights."""
    shorter: tuple[Precision, ...] = ()
    if asked.kv_cache == "auto":
        shorter = (replace(asked, kv_cache=SHORT_KV),)
    stored = stored_quantization(arch)
    if stored is not None:
        return (replace(asked, quantization=stored), *shorter)
    plain = [name for name in ("float32", "bfloat16") if served_dtype(name, machine)[0] == name]
    known = _CPU_QUANTIZATION if machine.device == "cpu" else _GPU_QUANTIZATION
    quantized = [kind for kind in known if weights_refusal(kind, machine) is None]
    kv: KVPrecision = asked.kv_cache
    return (
        *(
            Precision(dtype, kv_cache=kv, weights_dtype=asked.weights_dtype if dtype == asked.dtype else dtype)
            for dtype in plain
        ),
        *shorter,
        *(replace(asked, quantization=kind) for kind in quantized),
    )


def resolved_dtype(asked: str, facts: ModelFacts | EncoderFacts, machine: Machine) -> tuple[str, str, str]:
    """(dtype of weights and activations, why, requested dtype)."""
    dtype, why = auto_dtype(facts) if asked == "auto" else (asked, "what was asked for")
    served, reason = served_dtype(dtype, machine)
    return (dtype, why, dtype) if served == dtype else (served, f"{dtype} is {why}, but {reason}", dtype)


def auto_dtype(facts: ModelFacts | EncoderFacts) -> tuple[str, str]:
    """(dtype that "auto" asks for, why)."""
    if facts.is_embedded:
        return "float32", "the embedded model answers the same on every machine in float32"
    if facts.dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"the checkpoint's dtype is {shown(facts.dtype)}; give --dtype as one of {', '.join(DTYPE_BYTES)}"
        )
    return facts.dtype, "the checkpoint's"


def quantization_of(asked: Quantization, arch: Arch | EncoderArch) -> Quantization:
    """The requested quantization. If it is "none", matrices stay in the checkpoint's format."""
    return stored_quantization(arch) or asked if asked == "none" else asked


def draft_precision(served: Precision, asked: str, draft: ModelFacts, machine: Machine) -> Precision:
    """Precision of a draft model beside a model in the precision `served`: its dtype, its format of K and V, and the
    quantization that was `asked` for, if the draft model can be stored so."""
    quantization = stored_quantization(draft.arch) or "none"
    for kind in (*_CPU_QUANTIZATION, *_GPU_QUANTIZATION):
        if kind == asked and quantization == "none" and refusal(draft.arch, kind) is None:
            quantization = kind
    narrow, _ = served_weights_dtype(served.dtype, draft, machine)
    return Precision(served.dtype, quantization, served.kv_cache, narrow)


def check_quantization(quantization: Quantization, arch: Arch | EncoderArch) -> None:
    """Raises a `ConfigError` that names a matrix that cannot be stored so."""
    reason = refusal(arch, quantization_of(quantization, arch))
    if reason is not None:
        raise ConfigError(f"this model cannot be stored in {quantization}: {reason}; give another --quantization")
