"""The parts of a memory plan beside weights and KV: rotary tables, slots, and the tensors that a step needs.

Pure arithmetic, as in `planner`, which puts these parts into its plans.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from inferd.engine.api.memory.formula import NOTHING, Formula, sum_of, term
from inferd.engine.api.memory.precision import DTYPE_BYTES, Precision
from inferd.engine.api.memory.states import state_bytes
from inferd.engine.arch.description import Arch
from inferd.engine.arch.draft_heads import num_joined, num_read
from inferd.engine.arch.registry import weights
from inferd.engine.arch.sharding import Rank

_BASE_BYTES = 286 * 2**20
"""Anonymous memory of the processes with a vocabulary of a few tokens: engine 140 MiB with torch imported, server 80,
two processes that render chat templates 16 each, and one that checks grammars 18. The process that forks engines has 16
that it does not share with one (measured: torch 2.13 for CPUs, Python 3.11, 2 cores of an AMD EPYC Zen 3,
2026-11-29)."""
_NO_FOLDER_BYTES = 12 * 2**20
"""Less of it in the server of a GGUF file, whose tokenizer needs no import of transformers. Measured around this import
in the server's process (2 cores of an AMD EPYC Zen 4, transformers 5.23, 2026-11-30)."""
_MODELLING_BYTES = 126 * 2**20
"""More of it in an engine that computes a model by transformers' code (measured as above with OPT and Cohere 2)."""
_TOKEN_BYTES = 1340
"""Memory of a token of the vocabulary in all processes, after the first request with a grammar. It has three parts: the
server's tokenizer, and the vocabulary for grammars in the engine and in the process that checks them. Qwen 2.5 needs
1,120 bytes and Gemma 3 some 1,440, which differ in the merges of their tokens. Both plans are within 3.4% of their
servers (2 cores of an AMD EPYC Zen 5, 2026-11-30)."""
_GPU_BASE_BYTES = 256 * 2**20
"""Allowance for the memory that CUDA and its libraries take on a GPU for themselves. Nobody has measured it."""
STANDBY_BYTES = 146 * 2**20
"""Anonymous memory of a standby, which has its libraries imported and waits (measured as above)."""

PROCESSES = "processes"
"""Name of the part of a plan that the processes take before they load a model."""

_FP32_BYTES = 4
_MLP_COPIES = 4
"""Number of fp32 tensors of [tokens, intermediate] beside the projections' results. The plain kernel makes so many. The
C++ kernels make none, but the allocator keeps about as much of their steps."""
_LOGITS_COPIES = 13
"""Number of fp32 tensors of [rows, vocabulary] that sampling holds at once: the most is top-p over a flat distribution.
Logprobs add half as much (measured: 128 rows of 32,000, 2 cores of an AMD EPYC Zen 4, 2026-11-21)."""

ATTENTION_TILE = 256
"""Number of keys in a tile, over which attention makes a partial sum."""
PARTIALS_BYTES = 256 * 2**20
"""Most bytes of partial sums on a GPU. The kernels obey the same bound (`tests/cpu/test_memory.py`)."""
PARTIAL_ROWS_PER_THREAD = 171
"""Number of rows with partial sums on a CPU: 8 / 3 pieces of work for each thread, of 64 rows each."""

MAX_RANKS, EXCHANGE_HEADER_BYTES, EXCHANGE_BYTES = 128, 2**14, 2 * 2**20
"""Most ranks on a CPU, and the memory through which they give their outputs to each other: once, and for each rank
(`kernels/ops/gather`, which a test compares)."""

GPU_EXCHANGE_BYTES = 2**20
"""Most bytes of a sum that GPUs add up in one shot (`kernels/ops/gather/group`, which a test compares)."""

GPU_ROW_BUCKETS = (1, 2, 4, 8, *range(16, 257, 16), *range(320, 513, 64))
"""Numbers of rows that a GPU's decode steps are recorded for. Each costs a capture and holds memory. A step between two
of them computes padding rows."""

GPU_TOKEN_BUCKETS = (*range(64, 513, 64), *range(640, 1025, 128))
"""Numbers of tokens that a GPU's steps with prompts are recorded for. Longer steps keep it busy for longer than the
host needs to launch them."""
RULE_WORDS, RULE_PREFIX = 256, 16
"""Number of bad words of a slot, and of ids before the last one of each (`kernels/ops/logit_rules` has the same)."""
LORA_PANEL = 64
"""Outputs of an adapter's module that lie side by side. The kernels have the same (`tests/cpu/test_lora.py`)."""
CUT_BYTES = 5
"""Bytes of a sorted score, by which a GPU finds top-k and top-p (`kernels/ops/top_k_top_p`, which a test compares)."""

HEAD_STATES = 16
"""Number of newest positions of a slot whose states a draft head keeps: those that a row with the most drafts draws
behind (`engine/speculation`, which a test compares)."""
SPECULATIVE_DRAWS = 32
"""Tokens that a step may draw if it verifies guesses, however few requests run."""


def most_draws(num_seqs: int, *, speculates: bool) -> int:
    """Most tokens that a step of at most `num_seqs` requests draws."""
    return max(num_seqs, SPECULATIVE_DRAWS) if speculates else num_seqs


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model beside the served one."""

    arch: Arch
    precision: Precision


@dataclass(frozen=True, slots=True)
class AdapterSpace:
    """Memory for LoRA adapters."""

    num: int
    rank: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The largest load that the engine must hold at once."""

    num_seqs: int
    """Number of slots: requests that run together."""
    max_model_len: int
    """Most tokens of one sequence, prompt and output."""
    step_tokens: int
    """Most tokens of one step."""
    block_size: int
    device: Literal["cpu", "cuda"] = "cpu"
    num_threads: int = 1
    """Number of threads of each rank on a CPU."""
    has_standby: bool = False
    """Whether a standby process waits beside the engine."""
    num_ranks: int = 1
    """Number of processes that share the model."""
    speculates: bool = False
    """Whether steps verify guessed tokens."""
    draft: Draft | None = None
    num_checkpoints: int = 0
    """Copies of recurrent states at the ends of prefixes."""
    adapters: AdapterSpace | None = None
    is_gguf: bool = False
    """Whether the model is a GGUF file."""
    kv_host_bytes: int = 0
    """Bytes of the host's memory for KV beside a GPU's."""
    head_bytes: int = 0
    """Bytes of what follows the pooling of embeddings."""

    @property
    def num_draws(self) -> int:
        """Most tokens that a step draws."""
        return most_draws(self.num_seqs, speculates=self.speculates)


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One line of the memory plan."""

    name: str
    formula: Formula

    @property
    def num_bytes(self) -> int:
        return self.formula.value


def working_lines(arch: Arch, precision: Precision, work: Workload) -> tuple[PlanLine, ...]:
    """The parts beside weights and KV. Rotary tables, slots and rules are exact, partial sums are an upper bound, and
    the rest is estimated. A CPU's rules take memory only in slots whose requests ask for them."""
    parts = (
        PlanLine("rotary", _rotary(arch, work)),
        PlanLine("slots", _slots(arch, work)),
        PlanLine("states", term(work.num_seqs, "slots") * state_bytes(arch, precision)),
        PlanLine("checkpoints", term(work.num_checkpoints) * state_bytes(arch, precision)),
        PlanLine("inputs of drafts", _drafted(arch, precision, work)),
        PlanLine("sampling rules", _rules(arch, work)),
        PlanLine("activations", _activations(arch, precision, work)),
        PlanLine("partial sums", _partials(arch, work)),
        PlanLine("logits", _logits(arch, work)),
        PlanLine("recorded steps", _recorded(arch, precision, work)),
        PlanLine("drafting", _drafting(work)),
        PlanLine("adapters", _adapters(arch, work)),
        PlanLine("heads of embeddings", term(work.head_bytes, "B")),
        PlanLine("exchange", _exchange(work)),
        PlanLine("standby", _standby(work)),
        PlanLine(PROCESSES, _processes(arch, work)),
    )
    return tuple(part for part in parts if part.num_bytes)


def _drafted(arch: Arch, precision: Precision, work: Workload) -> Formula:
    """Outputs of its input projection that each recurrent layer keeps of a step's drafts."""
    if arch.recurrent is None or not work.speculates:
        return NOTHING
    width = term(sum(arch.recurrent.in_sizes)) * precision.dtype_bytes
    return term(work.num_draws, "tokens") * term(len(arch.recurrent_layers), "layers") * width


def _drafting(work: Workload) -> Formula:
    """A draft model's rotary tables, and on a GPU its recorded passes. Its other tensors are smaller than those of the
    served model, which exist when they do not. A draft head has token ids, the states of each slot's newest positions,
    and hidden states of a step as they are read and side by side."""
    if work.draft is None:
        return NOTHING
    arch, precision = work.draft.arch, work.draft.precision
    parts = _rotary(arch, work) + _recorded(arch, precision, replace(work, step_tokens=0))
    head = arch.draft_head
    if head is None:
        return parts
    if head.maps_tokens:
        parts += term(head.num_tokens, "tokens") * term(8, "B")
    kept = term(work.num_seqs, "slots") * term(HEAD_STATES, "states") * term(arch.hidden_size)
    read = term(work.step_tokens, "tokens") * term(2 * num_read(head) + 1, "states") * term(head.state_size)
    return parts + (kept + read) * precision.dtype_bytes


def _adapters(arch: Arch, work: Workload) -> Formula:
    """A and B of every linear module in the layers, with the outputs of a module in panels. On a CPU only
    adapters that are loaded take memory."""
    if work.adapters is None:
        return NOTHING
    sizes = Counter(
        sum(module.in_size + -(-module.out_size // LORA_PANEL) * LORA_PANEL for module in modules)
        for modules in weights(arch).modules().values()
    )
    numbers = sum_of(term(count, "matrices") * term(size) for size, count in sorted(sizes.items()))
    space = term(work.adapters.num, "adapters") * term(work.adapters.rank).named("rank")
    return space * numbers * term(DTYPE_BYTES[work.adapters.dtype], "B")


def _processes(arch: Arch, work: Workload) -> Formula:
    """The processes without a model's weights. With a GPU the plan is about GPU memory."""
    if work.device == "cuda":
        return term(_GPU_BASE_BYTES, "B")
    more_bytes = 0 if arch.is_native else _MODELLING_BYTES
    return host_processes(arch.vocab_size, is_gguf=work.is_gguf, more_bytes=more_bytes)


def host_processes(vocab_size: int, *, is_gguf: bool, more_bytes: int = 0) -> Formula:
    """The host's memory of the processes without a model's weights, with `more_bytes` beside the usual."""
    base = _BASE_BYTES + more_bytes - (_NO_FOLDER_BYTES if is_gguf else 0)
    return term(base, "B") + term(vocab_size, "tokens") * term(_TOKEN_BYTES, "B")


def _standby(work: Workload) -> Formula:
    """A standby holds its libraries only. With a GPU the plan is about GPU memory, of which a standby holds none."""
    if not work.has_standby or work.device == "cuda":
        return NOTHING
    return term(STANDBY_BYTES, "B")


def _exchange(work: Workload) -> Formula:
    """A rank's own part of the memory that ranks share."""
    if work.num_ranks == 1:
        return NOTHING
    return term(EXCHANGE_BYTES if work.device == "cpu" else GPU_EXCHANGE_BYTES, "B")


def _rotary(arch: Arch, work: Workload) -> Formula:
    """A table for each rope, and one more for queries that grow with their position."""
    length = work.max_model_len
    tables = {rope for rope in arch.ropes if rope is not None}
    grown = [rope for rope in tables if rope.query_growth and rope.query_growth.original_max_positions < length]
    widths = sorted(rope.rotary_dim for rope in (*tables, *grown))
    return term(length, "positions") * sum_of(term(width) for width in widths) * term(_FP32_BYTES, "B")


def _slots(arch: Arch, work: Workload) -> Formula:
    """Token ids as int64 and block ids as int32, in a row for each running request."""
    ids = term(work.max_model_len + 1, "ids") * term(8, "B")
    num_blocks = -(-work.max_model_len // work.block_size)
    tables = term(len(arch.cache_groups), "tables") * term(num_blocks, "blocks") * term(4, "B")
    return term(work.num_seqs, "slots") * (ids + tables)


def _rules(arch: Arch, work: Workload) -> Formula:
    """A bias and a mark of each token, bad words, the newest ids, and 20 bytes of numbers."""
    tokens = term(arch.vocab_size) * (term(_FP32_BYTES, "B") + term(4, "B"))
    words = term(RULE_WORDS, "words") * term(RULE_PREFIX + 1, "ids") * term(4, "B")
    return term(work.num_seqs, "slots") * (tokens + words + term(RULE_PREFIX, "ids") * term(4, "B") + term(20, "B"))


def _activations(arch: Arch, precision: Precision, work: Workload) -> Formula:
    """Input, residual and sum of a layer, and the tensors of the MLP, or of a recurrent layer. Attention needs less
    than the MLP. A rank has part of the MLP's tensors, and gathers the whole of the last."""
    dtype_bytes = precision.dtype_bytes
    per_token = term(3) * term(arch.hidden_size) * dtype_bytes
    inputs = term(arch.num_layers) * term(arch.layer_input_size) * dtype_bytes
    needs = [_mlp(arch.intermediate_size, arch, precision, work)]
    if arch.experts is not None:
        per_expert = _mlp(arch.experts.intermediate_size, arch, precision, work) + term(arch.hidden_size) * dtype_bytes
        needs = needs if any(arch.has_mlp(layer) for layer in range(arch.num_layers)) else []
        of_experts = term(arch.experts.num_chosen, "experts") * per_expert
        if arch.experts.shared_size:
            of_experts += _mlp(arch.experts.shared_size, arch, precision, work) + term(arch.hidden_size) * dtype_bytes
        if arch.experts.beside_mlp:
            of_experts += term(2) * term(arch.hidden_size) * dtype_bytes
        needs.append(of_experts)
    if arch.recurrent is not None:
        needs.append(term(_recurrent_size(arch)) * dtype_bytes)
    if arch.layer_input_size:
        # Two more than the sum, while it is computed.
        per_token, needs = per_token + inputs, [*needs, term(2) * inputs]
    return term(work.step_tokens, "tokens") * (per_token + max(needs, key=lambda formula: formula.value))


def _recurrent_size(arch: Arch) -> int:
    """Numbers of a token in a recurrent layer: those of its projection, of the convolution, and of the recurrence. The
    last are in fp32, which is as much as two, and then gated."""
    if arch.recurrent is None:
        return 0
    num_heads, _, columns = arch.recurrent.state_shape
    return sum(arch.recurrent.in_sizes) + arch.recurrent.conv_size + 3 * num_heads * columns


def _mlp(size: int, arch: Arch, precision: Precision, work: Workload) -> Formula:
    """The tensors of a token in an MLP, or an expert, of this intermediate size."""
    own = Rank(0, work.num_ranks).width(size)
    projected = term(2 if arch.has_gate else 1) * precision.dtype_bytes
    held = term(own) * (projected + term(_MLP_COPIES) * term(_FP32_BYTES, "B"))
    return held + term(size) * precision.dtype_bytes if work.num_ranks > 1 else held


def _partials(arch: Arch, work: Workload) -> Formula:
    """Attention's partial sums, which exist if several threads or GPU blocks share the tiles of a row. A GPU has them
    twice: for recorded steps and for others. A CPU has them for the rows that its threads share."""
    num_tiles = -(-work.max_model_len // ATTENTION_TILE)
    if num_tiles == 1:
        return NOTHING
    if work.device == "cuda":
        return term(2, "kinds of steps") * term(PARTIALS_BYTES, "B")
    if work.num_threads == 1:
        return NOTHING
    num_heads = Rank(0, work.num_ranks).width(arch.num_heads)
    num_rows = min(PARTIAL_ROWS_PER_THREAD * work.num_threads, work.step_tokens * num_heads)
    head_dim = max(arch.heads(layer).head_dim for layer in arch.attention_layers)
    width = term(-(-head_dim // 16) * 16) + term(2)
    return term(num_rows, "rows") * term(num_tiles, "tiles") * width * term(_FP32_BYTES, "B")


def _recorded(arch: Arch, precision: Precision, work: Workload) -> Formula:
    """Memory of a GPU's recorded steps. They share tensors between layers of decode steps and of steps with prompts,
    logits as the head gives them and as they are kept, and sorted scores. Each step with prompts keeps its hidden
    states, once more if rows may have adapters."""
    if work.device == "cpu":
        return NOTHING
    num_rows = next((rows for rows in GPU_ROW_BUCKETS if rows >= work.num_draws), GPU_ROW_BUCKETS[-1])
    width = term(3) * term(arch.hidden_size) + term(max(arch.qkv_size, _recurrent_size(arch)))
    factor = term(3 if arch.has_gate else 2)
    if arch.experts is None:
        width += factor * term(arch.intermediate_size)
    else:
        per_expert = factor * term(arch.experts.intermediate_size) + term(arch.hidden_size)
        width += term(arch.experts.num_chosen, "experts") * per_expert
        if arch.experts.shared_size:
            width += factor * term(arch.experts.shared_size) + term(arch.hidden_size)
    logits = term(2) * term(arch.vocab_size) * term(_FP32_BYTES, "B")
    cut = term(arch.vocab_size) * term(CUT_BYTES, "B")
    num_tokens = next((tokens for tokens in GPU_TOKEN_BUCKETS if tokens >= work.step_tokens), GPU_TOKEN_BUCKETS[-1])
    prompts = term(num_tokens, "tokens") * (width * precision.dtype_bytes)
    num_kept = sum(tokens for tokens in GPU_TOKEN_BUCKETS if tokens <= num_tokens) * (2 if work.adapters else 1)
    head = None if work.draft is None else work.draft.arch.draft_head
    num_states = 1 if head is None else 1 + num_joined(head)
    prompts += (
        term(num_kept, "kept tokens") * term(num_states, "states") * term(arch.hidden_size) * precision.dtype_bytes
    )
    return term(num_rows, "rows") * (width * precision.dtype_bytes + logits + cut) + prompts


def _logits(arch: Arch, work: Workload) -> Formula:
    num_rows = min(work.num_draws, work.step_tokens)
    copies = term(_LOGITS_COPIES, "copies") * term(_FP32_BYTES, "B")
    return term(num_rows, "rows") * term(arch.vocab_size) * copies
