"""Drafts of a draft head change no bit, and are those of EAGLE-3 in plain PyTorch: alone, in a batch, behind prefix
hits and after preemption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import AskedConfig
from inferd.engine.api.errors import ModelError
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.activations import HEAD_STATES
from inferd.engine.api.memory.planner import format_bytes
from inferd.engine.api.model import ModelFacts, of_mtp_layer
from inferd.engine.api.resolve import resolve
from inferd.engine.models.draft_head import EagleHead
from inferd.engine.sched.plan import Row
from inferd.engine.speculation.ports import MOST_DRAFTS
from inferd.engine.worker import build
from inferd.engine.worker.draft_heads import HeadDrafts
from tests.cpu import eagle
from tests.cpu.eagle import DEFAULT_READ, PlainGlmLayer, PlainHead, PlainMTPLayer
from tests.cpu.test_draft_model import Drafted, accepted, renamed
from tests.cpu.test_engine import prompt, request, run
from tests.cpu.test_speculation import OPTIONS

Made = list[tuple[tuple[int, ...], list[int]]]
"""(ids that were known, drafts behind them) of each row with drafts."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle.save_served(tmp_path_factory.mktemp("served"))


def watch(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The drafts that are made from now on."""
    made: Made = []
    draft = HeadDrafts.draft

    def watched(self: HeadDrafts, rows: Sequence[Row]) -> None:
        draft(self, rows)
        for row in rows:
            ids, first = self._slots.token_ids[row.slot].tolist(), row.start + 1
            made.append((tuple(ids[:first]), ids[first : first + row.num_to_draft]))

    monkeypatch.setattr(HeadDrafts, "draft", watched)
    return made


def share_right(made: Made, oracle: PlainHead | PlainMTPLayer | PlainGlmLayer) -> float:
    """Share of rows whose drafts are the oracle's: of some rows, because it computes everything anew for each draft."""
    some = made[:: max(1, len(made) // 8)]
    right = [oracle.drafts(ids, len(drafts)) == drafts for ids, drafts in some]
    return sum(right) / len(right)


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize(("save", "read"), [(eagle.original, DEFAULT_READ), (eagle.speculators, (0, 4, 6))],
                         ids=["original", "speculators"])  # fmt: skip
def test_drafts_are_those_of_plain_pytorch(
    save: Callable[[Path], Path],
    read: tuple[int, ...],
    served: Path,
    tmp_path: Path,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts come in one chunk and in several, and rows follow accepted and rejected drafts."""
    head = save(tmp_path)
    engine, oracle = Drafted(served, head, dtype="float32"), PlainHead.load(head, served, read)
    asked = [request(f"r{i}", prompt(i, length), max_tokens=9) for i, length in enumerate((1, 17, 32, 90))]
    made = watch(monkeypatch)
    plain, drafted = run(engine.core(drafts=False), *asked), run(engine.core(drafts=True), *asked)
    assert drafted == plain
    assert len(made) >= 12 and max(len(drafts) for _, drafts in made) > 5
    assert share_right(made, oracle) == 1.0
    assert kernels != "cpp" or len(engine.runner._graphs.recorded_rows) > 2, "decodes are recorded as without a head"
    # Behind a prefix hit, with the same token after the block.
    made.clear()
    core = engine.core(drafts=True)
    run(core, asked[3])
    made.clear()
    run(core, renamed(asked[3], "again"))
    assert core.stats().prefix_hit_tokens >= 80
    assert share_right(made, oracle) == 1.0


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("fault", ["a layer too late", "the last layers first", "the token before", "no step followed"])
def test_a_head_with_a_fault_is_seen(fault: str, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers stay right, and the drafts are not those of plain PyTorch."""
    head = eagle.speculators(tmp_path)
    read = {"a layer too late": (1, 4, 6), "the last layers first": (6, 4, 0)}.get(fault, (0, 4, 6))
    monkeypatch.setattr(build, "layers_read_by", lambda head, num_layers: read)
    engine, oracle = Drafted(served, head, dtype="float32"), PlainHead.load(head, served, (0, 4, 6))
    if fault == "the token before":
        forward = EagleHead.forward
        monkeypatch.setattr(EagleHead, "forward", lambda self, ids, *rest: forward(self, ids.roll(1), *rest))
    elif fault == "no step followed":
        monkeypatch.setattr(HeadDrafts, "after_draw", lambda self, step, accepted: None)
    asked = [request(f"r{i}", prompt(i, 20 + i), max_tokens=8) for i in range(2)]
    plain, made = run(engine.core(drafts=False), *asked), watch(monkeypatch)
    assert run(engine.core(drafts=True), *asked) == plain
    assert share_right(made, oracle) < 0.5


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
                                      {"dtype": "bfloat16", "quantization": "int8"}], ids=str)  # fmt: skip
def test_drafts_change_no_bit(settings: dict[str, str], served: Path, tmp_path: Path) -> None:
    engine = Drafted(served, eagle.original(tmp_path), **settings)
    shared = prompt(99, 90)
    asked = [
        request(f"r{i}", shared + prompt(i, 3 + 5 * i % 37) if i % 3 == 0 else prompt(i, 3 + i), **options)
        for i, options in enumerate(OPTIONS)
    ]
    plain, core = run(engine.core(drafts=False), *asked), engine.core(drafts=True)
    assert run(core, *asked) == plain
    assert accepted(core)[1] > 50
    again = {f"again {one.request_id}": plain[one.request_id] for one in asked}
    assert run(core, *(renamed(one, f"again {one.request_id}") for one in asked)) == again, "with prefix hits"
    assert core.stats().prefix_hit_tokens > 100
    tight = engine.core(drafts=True, num_blocks=20)
    assert run(tight, *asked) == plain
    assert tight.stats().num_preemptions > 0
    for one in asked[::6]:
        assert run(engine.core(drafts=True), one) == {one.request_id: plain[one.request_id]}


def test_a_head_that_knows_the_model_is_always_right(tmp_path: Path) -> None:
    """Every draft, in a batch, behind prefix hits and after preemption."""
    engine = Drafted(*eagle.save_counter(tmp_path), dtype="float32")
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, eagle.RIGHT_VOCAB, (length,), generator=generator).tolist())

    shared = ids(70)
    asked = [request(f"r{i}", shared + ids(1 + i), max_tokens=40, logprobs=None) for i in range(6)]
    plain = run(engine.core(drafts=False), *asked)
    for num_blocks in (0, 14):
        core = engine.core(drafts=True, num_blocks=num_blocks)
        assert run(core, *asked) == plain
        num_accepted, num_drafts = accepted(core)
        assert num_drafts == num_accepted > 150
        assert core.stats().prefix_hit_tokens >= 64
    assert core.stats().num_preemptions > 0


def test_memory_is_planned_with_the_head(served: Path, tmp_path: Path) -> None:
    head = eagle.original(tmp_path)
    engine = Drafted(served, head, dtype="float32")
    alone = AskedConfig(model_path=str(served), dtype="float32", kv_memory_bytes=16 * 2**20, max_num_seqs=40,
                         block_size=16, max_num_batched_tokens=64)  # fmt: skip
    settled, plan, _ = resolve(alone, ModelFacts.of(Checkpoint.read(served)), Machine.detect())
    # K and V of 16 tokens in 7 layers of 2 heads of 16, and in one layer of as many.
    assert settled.num_blocks == 16 * 2**20 // (7 * 2 * 2 * 16 * 16 * 4)
    assert engine.config.num_blocks == 16 * 2**20 // (8 * 2 * 2 * 16 * 16 * 4)
    tensors = Checkpoint.read(head).tensors
    num_bytes = sum(info.num_bytes for name, info in tensors.items() if name not in ("d2t", "t2d"))
    assert engine.planned.weights_bytes == plan.weights_bytes + num_bytes
    assert engine.ready.kv_bytes == engine.planned.kv_bytes
    assert engine.ready.speculative == "draft head small"
    drafting = next(part for part in engine.planned.working if part.name == "drafting").num_bytes
    kept = engine.runner._drafter._states.nbytes  # type: ignore[union-attr]
    assert HEAD_STATES == 1 + MOST_DRAFTS and kept == 40 * 16 * 64 * 4
    assert drafting == 512 * 16 * 4 + 200 * 8 + kept + 64 * 7 * 64 * 4, "a rotary table, ids, states, and what is read"


@pytest.mark.parametrize("last", [320, -1, None], ids=["too large", "negative", "twice"])
def test_tokens_that_the_served_model_lacks_are_refused(last: int | None, served: Path, tmp_path: Path) -> None:
    head = eagle.original(tmp_path)
    tensors = eagle.load_file(head / "model.safetensors")
    tensors["d2t"][199] = tensors["d2t"][198] - 1 if last is None else last - 199
    eagle.save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelError, match="d2t must name 200 different tokens of the 320 of the served model, but it"):
        Drafted(served, head, dtype="float32")


@pytest.mark.parametrize(
    ("save", "oracle_of"),
    [(eagle.save_mimo, PlainMTPLayer.load), (eagle.save_glm, PlainGlmLayer.load)],
    ids=["mimo", "glm 4.5"],
)
def test_drafts_of_an_mtp_layer_are_those_of_plain_pytorch(
    save: Callable[[Path], Path],
    oracle_of: Callable[[Path], PlainMTPLayer | PlainGlmLayer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers are those without the layer, which the served model's own loader passes over."""
    path = save(tmp_path)
    engine, oracle = Drafted(path, path, dtype="float32", is_mtp=True), oracle_of(path)
    asked = [request(f"r{i}", prompt(i, length), max_tokens=9) for i, length in enumerate((1, 40, 90))]
    made, core = watch(monkeypatch), engine.core(drafts=True)
    plain = run(engine.core(drafts=False), *asked)
    assert run(core, *asked) == plain
    again = {f"again {name}": answer for name, answer in plain.items()}
    assert run(core, *(renamed(one, f"again {one.request_id}") for one in asked)) == again
    assert core.stats().prefix_hit_tokens > 100
    assert len(made) > 10 and share_right(made, oracle) == 1.0
    first = int(oracle.served(torch.tensor([asked[1].prompt_ids])).logits[0, -1].argmax())
    assert plain["r1"].token_ids[0] == first, "the served model is transformers'"
    assert engine.ready.speculative == "MTP layer"
    found = Checkpoint.read(path)
    num_bytes = sum(info.num_bytes for info in of_mtp_layer(found).tensors.values())
    scope = f"{found.config['architectures'][0]} without its MTP layer ({format_bytes(num_bytes)})"
    assert ModelFacts.of(found).scope == scope
