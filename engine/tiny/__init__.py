"""The embedded default model: what `inferd serve` serves when it is given no model.

Owns the path of the checkpoint and the name it is served under. Imports nothing: the training code stands in its own
files and is never needed to serve.
"""

from pathlib import Path

NAME = "inferd-tiny"
MODEL_DIR: Path = Path(__file__).parent / "model"
