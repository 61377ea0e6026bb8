"""R19: what cannot start says so in one line with the value, the rule and the way out, within seconds, before any
engine exists; what can start though something is missing says what.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from inferd.engine.api.checkpoint import EMBEDDED_PATH
from tests.e2e.conftest import INFERD, Daemon

MAX_CPU_S = 5.0
"""Of processor time, which is what a start takes on an idle machine."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a start ended."""

    code: int
    lines: list[str]
    """Of standard error."""
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """A start that must fail."""

    name: str
    code: int
    words: tuple[str, ...]
    arguments: Callable[[Path], list[str]]
    """Given a folder of the case's own."""
    environment: Callable[[Path], dict[str, str]] = lambda _: {}
    num_lines: int = 1
    before: Callable[[], None] | None = None
    """Run in the process that is to become the server."""


def flags(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda _: list(arguments)


def model(damage: Callable[[Path], object]) -> Callable[[Path], list[str]]:
    """A copy of the embedded model with something wrong."""

    def make(home: Path) -> list[str]:
        copy = Path(shutil.copytree(EMBEDDED_PATH, home / "model"))
        damage(copy)
        return [str(copy)]

    return make


def config(**changes: object) -> Callable[[Path], list[str]]:
    def damage(copy: Path) -> None:
        file = copy / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return model(damage)


def weights(change: Callable[[bytes], bytes]) -> Callable[[Path], list[str]]:
    def damage(copy: Path) -> None:
        file = copy / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return model(damage)


def yaml(text: str) -> Callable[[Path], list[str]]:
    def make(home: Path) -> list[str]:
        (home / "inferd.yaml").write_text(text)
        return ["--config", str(home / "inferd.yaml")]

    return make


def without_tokenizer(copy: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (copy / file).unlink()


def no_json(copy: Path) -> None:
    (copy / "config.json").write_text("{")


def offline(home: Path) -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}


def set_to(name: str, value: str = "1") -> Callable[[Path], dict[str, str]]:
    return lambda _: {name: value}


def no_bytes() -> None:
    """No file can grow: what a full disk says at the first byte, a process with this limit is told as well."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def long_name(home: Path) -> dict[str, str]:
    """A place whose name is too long for that of a socket, 107 bytes."""
    folder = home / ("x" * 120)
    folder.mkdir()
    return {"TMPDIR": str(folder)}


WIDER = {"intermediate_size": 520}
OTHER = {"architectures": ["MambaForCausalLM"]}
CASES = (
    Case("no such model", 3, ("nowhere",), flags("./nowhere")),
    Case("not in the cache", 3, ("HF_HUB_OFFLINE",), flags("a/b"), offline),
    Case("no weights", 3, ("no safetensors",), model(lambda copy: (copy / "model.safetensors").unlink())),
    Case("truncated weights", 3, ("truncated",), weights(lambda data: data[:-100])),
    Case("weights cut in their header", 3, ("truncated",), weights(lambda data: data[:100])),
    Case("corrupt header", 3, ("not valid JSON",), weights(lambda data: data[:8] + b"}" + data[9:])),
    Case("corrupt length", 3, ("no safetensors file",), weights(lambda data: b"\xff" * 8 + data[8:])),
    Case("config against weights", 3, ("640", "520"), config(**WIDER)),
    Case("unknown architecture", 3, ("MambaForCausalLM", "LlamaForCausalLM"), config(**OTHER)),
    Case("config of another kind", 3, ("hidden_size",), config(hidden_size="wide")),
    Case("config that is no JSON", 3, ("config.json is not JSON",), model(no_json)),
    Case("no tokenizer", 3, ("tokenizer",), model(without_tokenizer)),
    Case("corrupt tokenizer", 3, ("tokenizer",), model(lambda copy: (copy / "tokenizer.json").write_text("{}"))),
    Case("too long a context", 2, ("at most",), flags("--max-model-len", "99999999")),
    Case("too little memory", 4, ("would fit",), flags("--max-model-len", "1024", "--kv-memory", "1MiB")),
    Case("no key", 2, ("--api-key",), flags("--host", "0.0.0.0")),
    Case("an unknown word", 2, ("float32, bfloat16, float16",), flags("--dtype", "int3")),
    Case("a port that is none", 2, ("65535",), flags("--port", "70000")),
    Case("an unknown flag", 2, ("--prot", "--port"), flags("--prot", "80"), num_lines=5),
    Case("a bad variable", 2, ("env INFERD_MAX_NUM_SEQS", "'many'"), flags(), set_to("INFERD_MAX_NUM_SEQS", "many")),
    Case("a key that is no setting", 2, ("line 1", "did you mean port?"), yaml("prot: 80")),
    Case("a file that is no YAML", 2, ("line 1",), yaml("port: [")),
    Case("an unknown variable", 3, ("mean INFERD_PORT?", "nowhere"), flags("./nowhere"), set_to("INFERD_PROT"), 2),
    Case("no space", 1, ("TMPDIR",), flags("--log-level", "error"), before=no_bytes),
    Case("too long a name for sockets", 1, ("TMPDIR", "short"), flags("--log-level", "error"), long_name),
)  # fmt: skip


@pytest.fixture(scope="module")
def refusals(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Refusal]]]:
    """Of all cases that are run, two at a time."""
    specs = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    cases = [spec.params["case"] for spec in specs if isinstance(spec.params.get("case"), Case)]
    with ThreadPoolExecutor(2) as pool:
        yield {case.name: pool.submit(refused, case, tmp_path_factory.mktemp("start")) for case in cases}


def refused(case: Case, home: Path) -> Refusal:
    arguments = case.arguments(home)
    port = [] if "--port" in arguments else ["--port", "0"]
    process = subprocess.Popen(
        [INFERD, "serve", *arguments, *port],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **case.environment(home)},
        preexec_fn=case.before,
    )
    # What hangs is killed: the code then tells.
    killer = threading.Timer(120, process.kill)
    killer.daemon = True
    killer.start()
    assert process.stdout is not None and process.stderr is not None
    out, error = process.stdout.read(), process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    killer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    assert out == b""
    return Refusal(process.returncode, error.decode().strip().splitlines(), used.ru_utime + used.ru_stime)


@pytest.mark.sampled(keep=12)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_r19_what_cannot_start_says_why(case: Case, refusals: dict[str, Future[Refusal]]) -> None:
    """One line means that no phase had begun, and so no engine: each says when it ends."""
    refusal = refusals[case.name].result()
    text = "\n".join(refusal.lines)
    assert refusal.code == case.code, text
    assert len(refusal.lines) == case.num_lines, text
    assert all(words in text for words in case.words), text
    assert refusal.cpu_s < MAX_CPU_S, f"{refusal.cpu_s:.1f} s"


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refusal = refused(Case("", 2, (), flags("--port", port)), tmp_path)
    assert refusal.code == 2
    assert len(refusal.lines) == 1 and f"127.0.0.1:{port}" in refusal.lines[0] and "--port" in refusal.lines[0]


def test_a_cache_that_cannot_be_written_is_said_and_costs_speed_alone(start: Callable[..., Daemon]) -> None:
    assert not Path("/proc/cache").exists()
    daemon = start(env={"XDG_CACHE_HOME": "/proc/cache"})
    warning = next(line for line in daemon.lines if "plain PyTorch kernels serve" in line)
    assert "/proc/cache/inferd/kernels" in warning
