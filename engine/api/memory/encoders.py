"""The memory plan of an encoder: weights, tables, and the tensors of its largest step. It keeps no keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from inferd.engine.api.memory.activations import PROCESSES, STANDBY_BYTES, PlanLine, host_processes
from inferd.engine.api.memory.formula import NOTHING, Formula, term
from inferd.engine.api.memory.planner import MemoryPlan, loading_line, weight_lines
from inferd.engine.api.memory.precision import Precision
from inferd.engine.arch.description import Arch
from inferd.engine.arch.encoder import EncoderArch

RECORDED_TOKENS = 128
"""Most tokens of a text whose run is recorded."""
_FP32_BYTES = 4
_INT64_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLoad:
    """The largest load that the engine of an encoder must hold at once."""

    step_tokens: int
    """Most tokens of a step of several texts."""
    max_model_len: int
    """Most tokens of one text, which a step may have alone."""
    has_standby: bool = False
    is_gguf: bool = False
    head_bytes: int = 0
    """Bytes of what follows the pooling."""

    @property
    def most_tokens(self) -> int:
        """Most tokens of any step."""
        return max(self.step_tokens, self.max_model_len)


def plan_encoder(arch: EncoderArch | Arch, precision: Precision, load: EncoderLoad) -> MemoryPlan:
    """The memory plan of an engine. Raises nothing: whether it fits is the caller's to see."""
    standby = term(STANDBY_BYTES, "B") if load.has_standby else NOTHING
    parts = (
        PlanLine("rotary", _rotary(arch, load)),
        PlanLine("distances", _distances(arch, load)),
        PlanLine("activations", _activations(arch, precision, load) + _pairs(arch, load)),
        PlanLine("recorded runs", _recorded(arch, precision, load)),
        PlanLine("heads of embeddings", term(load.head_bytes, "B")),
        PlanLine("standby", standby),
        PlanLine(PROCESSES, host_processes(arch.vocab_size, is_gguf=load.is_gguf)),
    )
    working = tuple(part for part in parts if part.num_bytes)
    return MemoryPlan(
        weight_lines(arch, precision), PlanLine("KV cache", NOTHING), working, loading_line(arch, precision)
    )


def _rotary(arch: EncoderArch | Arch, load: EncoderLoad) -> Formula:
    """A table for each rope."""
    tables = term(sum(rope.rotary_dim for rope in set(arch.ropes) if rope is not None))
    return term(load.max_model_len, "positions") * tables * term(_FP32_BYTES, "B")


def _distances(arch: EncoderArch | Arch, load: EncoderLoad) -> Formula:
    """A key and a query of each bucket of distances in each layer, which a first step makes; or ALiBi's number of each
    distance and head."""
    if isinstance(arch, Arch):
        return NOTHING
    if arch.has_alibi:
        both = term(2) * term(load.max_model_len, "distances")
        return term(arch.num_heads, "heads") * both * term(_FP32_BYTES, "B")
    if arch.disentangled is None:
        return NOTHING
    rows = term(arch.num_layers, "layers") * term(2) * term(arch.disentangled.num_rows, "distances")
    return rows * term(arch.attention_size) * term(_FP32_BYTES, "B")


def _pairs(arch: EncoderArch | Arch, load: EncoderLoad) -> Formula:
    """The numbers of pairs of tokens of some heads, while they are added, and those by distance before. Also the bucket
    of each pair, twice while it is made."""
    if isinstance(arch, Arch) or arch.disentangled is None:
        return NOTHING
    n = load.max_model_len
    heads = arch.disentangled.heads_at_once(arch.num_heads, n)
    each = term(3) * term(n, "tokens") + term(2) * term(arch.disentangled.num_rows, "distances")
    buckets = term(n, "tokens") * term(n, "tokens") * term(2) * term(_INT64_BYTES, "B")
    return term(heads, "heads") * term(n, "tokens") * each * term(_FP32_BYTES, "B") + buckets


def _activations(arch: EncoderArch | Arch, precision: Precision, load: EncoderLoad) -> Formula:
    """Input, sum and normed states of a layer, beside the larger of attention (q, k and v, turned and attended) and the
    MLP. Or the last states as pooling sums them: in fp32, in units and as whole numbers."""
    layer = _of_layer(arch, precision)
    pooled = term(arch.hidden_size) * (term(2) * term(_FP32_BYTES, "B") + term(_INT64_BYTES, "B"))
    return term(load.most_tokens, "tokens") * max(layer, pooled, key=lambda formula: formula.value)


def _recorded(arch: EncoderArch | Arch, precision: Precision, load: EncoderLoad) -> Formula:
    """The tensors of recorded runs, which keep them, in pieces of a power of two bytes."""
    if isinstance(arch, Arch):
        return NOTHING
    num_tokens = min(RECORDED_TOKENS, load.max_model_len)
    return term(num_tokens, "tokens") * term(2) * _of_layer(arch, precision)


def _of_layer(arch: EncoderArch | Arch, precision: Precision) -> Formula:
    """Bytes of a token within a layer."""
    stream = term(3) * term(arch.hidden_size)
    if isinstance(arch, EncoderArch):
        attention = term(6 if arch.ropes else 4) * term(arch.attention_size)
    else:
        pool = term(2) * term(arch.widest_heads.kv_size)
        attention = term(arch.qkv_size) + term(2) * term(arch.attention_size) + pool
    mlp = term(3 if arch.has_gate else 2) * term(_mlp_size(arch))
    widest = max(attention, mlp, key=lambda formula: formula.value)
    return (stream + widest) * precision.dtype_bytes


def _mlp_size(arch: EncoderArch | Arch) -> int:
    """Numbers of a token between the matrices of an MLP, or of the experts that it goes to, with their results."""
    if isinstance(arch, EncoderArch) or arch.experts is None:
        return arch.intermediate_size
    experts = arch.experts
    of_experts = experts.num_chosen * (experts.intermediate_size + arch.hidden_size) + experts.shared_size
    return max(of_experts, arch.intermediate_size)
