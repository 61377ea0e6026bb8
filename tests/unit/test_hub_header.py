"""`inferd plan repo:quant` reads the header of a GGUF file of the hub, and not its weights."""

from __future__ import annotations

import gzip
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import DryRunFileInfo, constants

from benchmarks.quality.gguf_blocks import Stored, as_f32
from benchmarks.quality.gguf_files import content_of, write
from inferd.engine.api import hub_header
from inferd.engine.api.checkpoint import EMBEDDED_PATH
from inferd.engine.api.errors import ModelError
from inferd.engine.api.machine.cpu import Machine
from inferd.server.commands.plan import build
from inferd.server.commands.plan_report import PlanReport
from inferd.server.config.settings import Settings

COMMIT = "a" * 40
LLAMA3 = {
    "rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@dataclass
class Hub:
    """Sends parts of the files of a folder. Like the real one, it redirects to another address first."""

    folder: Path
    sends_parts: bool = True
    is_compressed: bool = False
    num_sent: int = 0
    url: str = ""
    is_cached: bool = False
    downloads: list[Any] = field(default_factory=list)

    def handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not self.path.startswith("/cdn/"):
                    assert f"/org/Model-GGUF/resolve/{COMMIT}/" in self.path
                    self.send_response(302)
                    self.send_header("Location", f"{hub.url}/cdn/{self.path.rpartition('/')[2]}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                data = (hub.folder / self.path.rpartition("/")[2]).read_bytes()
                if hub.sends_parts:
                    begin, end = self.headers["Range"].removeprefix("bytes=").split("-")
                    data = data[int(begin) : int(end) + 1]
                self.send_response(206 if hub.sends_parts else 200)
                if hub.is_compressed:
                    data = gzip.compress(b"").ljust(len(data), b"\0")
                    self.send_header("Content-Encoding", "gzip")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                hub.num_sent += len(data)
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def snapshot(self, repo_id: str, **options: Any) -> Any:
        assert repo_id == "org/Model-GGUF" and options["revision"] == "v1"
        if not options.get("dry_run"):
            self.downloads.append(options["allow_patterns"])
            return str(self.folder)
        return [
            DryRunFileInfo(COMMIT, file.stat().st_size, file.name, "", self.is_cached, not self.is_cached)
            for file in sorted(self.folder.glob("*.gguf"))
        ]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The embedded model in two parts, with factors of its rotary frequencies, which are read from a tensor."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(EMBEDDED_PATH, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": LLAMA3}))
    hub = Hub(tmp_path / "hub")
    hub.folder.mkdir()
    metadata, tensors = content_of(folder, lambda _: as_f32)
    in_parts: list[dict[str, Stored]] = [{}, {}]
    for i, name in enumerate(reversed(tensors)):  # the factors come last, behind all weights
        in_parts[i % 2][name] = tensors[name]
    for number, part in enumerate(in_parts):
        own = {"split.no": number, "split.count": 2, "split.tensors.count": len(tensors)}
        write(hub.folder / f"Model-F32-0000{number + 1}-of-00002.gguf", (metadata if number == 0 else {}) | own, part)
    monkeypatch.setattr("inferd.engine.api.hub.snapshot_download", hub.snapshot)
    monkeypatch.setattr(hub_header, "_FIRST_BYTES", 4096)
    with ThreadingHTTPServer(("127.0.0.1", 0), hub.handler()) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()


def planned(model: str) -> PlanReport:
    return build(Settings(model=model, revision="v1"), Machine(2, 2**36, 2**36, False), context=64)


def test_the_plan_is_that_of_the_whole_file(hub: Hub) -> None:
    files = sorted(hub.folder.glob("*.gguf"))
    expected = planned(str(files[0]))
    found = planned("org/Model-GGUF:F32")
    assert found == replace(expected, model=found.model, facts=replace(expected.facts, path=found.facts.path))
    num_bytes = sum(file.stat().st_size for file in files)
    assert hub.downloads == [] and 0 < hub.num_sent < num_bytes / 4


def test_a_cached_file_is_not_read_again(hub: Hub) -> None:
    hub.is_cached = True
    planned("org/Model-GGUF:F32")
    assert hub.num_sent == 0 and len(hub.downloads) == 1


def test_a_damaged_header_is_refused_by_its_name(hub: Hub) -> None:
    file = min(hub.folder.glob("*.gguf"))
    file.write_bytes(b"GGML" + file.read_bytes()[4:])
    with pytest.raises(ModelError, match=r"^Model-F32-00001-of-00002.gguf of org/Model-GGUF: a GGUF file begins with"):
        planned("org/Model-GGUF:F32")


@pytest.mark.parametrize(("begin", "content"), [(0, b"GGML"), (16, b"\xff" * 8)], ids=["magic", "count"])
def test_no_more_of_a_header_is_read_than_shows_its_damage(hub: Hub, begin: int, content: bytes) -> None:
    file = min(hub.folder.glob("*.gguf"))
    data = file.read_bytes()
    file.write_bytes(data[:begin] + content + data[begin + len(content) :])
    with pytest.raises(ModelError):
        planned("org/Model-GGUF:F32")
    assert hub.num_sent == 4096


def test_a_hub_that_compresses_is_refused(hub: Hub) -> None:
    """A small answer could become a large one, or none."""
    hub.is_compressed = True
    with pytest.raises(ModelError, match="must be sent as it is, but the hub sent it as gzip"):
        planned("org/Model-GGUF:F32")


def test_a_hub_that_sends_only_whole_files_is_refused(hub: Hub) -> None:
    hub.sends_parts = False
    with pytest.raises(ModelError, match="must be sent in parts, but the hub answered 200"):
        planned("org/Model-GGUF:F32")
