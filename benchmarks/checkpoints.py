"""Random checkpoints with the shapes of published models: speed depends on a model's shape, not on its training.

    python -P benchmarks/checkpoints.py --dir DIR [NAME ...]

transformers writes each once, in bfloat16. The embedded model's tokenizer lies beside it, because a tokenizer must
exist; prompts are ids. A separate process makes checkpoints: it needs transformers and torch, and frees the memory of
both when it ends.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENIZER_DIR = Path(__file__).resolve().parents[1] / "engine" / "tiny" / "model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
DONE = "made-by-benchmarks"
"""A file that marks a checkpoint as complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder's sizes, named as in checkpoints. The embedding is tied to the output head."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 8192

    @property
    def num_layer_params(self) -> int:
        """Weights of the linear layers of one decoder layer."""
        qkvo = self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        return qkvo + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_body_params(self) -> int:
        """Weights that multiply every token: all linear layers but the head."""
        return self.num_hidden_layers * self.num_layer_params

    @property
    def num_head_params(self) -> int:
        """Weights that multiply only sampled tokens."""
        return self.vocab_size * self.hidden_size

    @property
    def kv_elements(self) -> int:
        """Numbers in the KV cache for each token of context."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def config(self) -> dict[str, Any]:
        names = (name for name in self.__slots__ if name != "model_type")
        return {**{name: getattr(self, name) for name in names}, "tie_word_embeddings": True}


SHAPES = {
    "1b": Shape(
        model_type="llama", vocab_size=32_000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64,
    ),
    "0.6b": Shape(
        model_type="qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    ),
    "135m": Shape(
        model_type="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    ),
    "12m": Shape(
        model_type="llama", vocab_size=3072, hidden_size=640, intermediate_size=1792, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    ),
    "1layer": Shape(
        model_type="llama", vocab_size=3072, hidden_size=256, intermediate_size=512, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, head_dim=64, max_position_embeddings=2048,
    ),
    "smoke": Shape(
        model_type="llama", vocab_size=3072, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
    ),
}  # fmt: skip
"""`12m` computes prompts so fast that a few seconds hold many long ones. `1layer` costs next to nothing, so a
measurement shows everything around the model. `smoke` is not for measurements: it shows in seconds that a program runs.
"""


def ensure(directory: Path, name: str) -> Path:
    """The checkpoint `name` under `directory`, made if it is not there. Raises `CalledProcessError`."""
    path = directory / name
    if not (path / DONE).exists():
        # Without -P this folder is on the path, and transformers takes our `kernels` for a package of that name.
        subprocess.run([sys.executable, "-P", str(Path(__file__).resolve()), "--dir", str(directory), name], check=True)
    return path


def make(directory: Path, name: str) -> None:
    """Write the checkpoint, and its marker last: an interrupted one is made again."""
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    shape, path = SHAPES[name], directory / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    config = AutoConfig.for_model(shape.model_type, **shape.config())
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    for file in TOKENIZER_FILES:
        shutil.copy(TOKENIZER_DIR / file, path / file)
    (path / DONE).touch()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("names", nargs="*", choices=tuple(SHAPES), metavar="NAME", help=", ".join(SHAPES))
    asked = parser.parse_args(arguments)
    for name in asked.names or ("1b", "0.6b"):
        if not (asked.dir / name / DONE).exists():
            make(asked.dir, name)
        print(asked.dir / name, file=sys.stderr)


if __name__ == "__main__":
    main()
