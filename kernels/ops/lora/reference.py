"""Low-rank updates in plain PyTorch, row by row, so that other rows cannot change how torch sums."""

from __future__ import annotations

from torch import Tensor

from inferd.kernels.ops.lora.weights import LoraWeights


def add_lora(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor, adapters: Tensor) -> None:
    slots_of, panels = slots.tolist(), weights.panels.tolist()
    for row, slot in enumerate(slots_of):
        adapter = int(adapters[slot]) if slot >= 0 else -1
        if adapter < 0:
            continue
        ranks, scales = weights.ranks[adapter].tolist(), weights.scales[adapter].tolist()
        shrunk = [
            (weights.down[adapter, part, :rank].float() * x[row].float()).sum(1) * scale
            for part, (rank, scale) in enumerate(zip(ranks, scales, strict=True))
        ]
        for index, (first, count, part) in enumerate(panels):
            if not ranks[part]:
                continue
            up = weights.up[adapter, index, : ranks[part], :count].float()
            goal = y[row, first : first + count]
            goal.copy_((goal.float() + (up * shrunk[part][:, None]).sum(0)).to(y.dtype))
