"""R19: a server that cannot start says so in one line with the value, the rule and the way out. It does so within
seconds and before any engine exists. A server that starts although something is missing says what.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from inferd.engine.api.checkpoint import EMBEDDED_PATH
from tests import forking
from tests.e2e.conftest import INFERD, Daemon

MAX_CPU_S = 5
"""Maximum seconds of processor time, which a start takes on an idle machine. The kernel ends a longer one."""
WAIT_S = 120.0
"""Seconds after which a start that hangs is ended. Its exit code then shows it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The end of a start."""

    code: int
    lines: list[str]
    """Lines of standard error."""


@dataclass(frozen=True, slots=True)
class Case:
    """A start that must fail."""

    name: str
    code: int
    words: tuple[str, ...]
    arguments: Callable[[Path], list[str]]
    """Makes the arguments; it gets a folder for this case."""
    environment: Callable[[Path], dict[str, str]] = lambda _: {}
    num_lines: int = 1
    max_file_bytes: int = resource.RLIM_INFINITY
    """Maximum size of files. 0 gives the same error as a full disk."""
    is_read_early: bool = False
    """Whether libraries read the environment when they are imported."""


def flags(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda _: list(arguments)


def model(damage: Callable[[Path], object]) -> Callable[[Path], list[str]]:
    """Serves a damaged copy of the embedded model."""

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


def long_name(home: Path) -> dict[str, str]:
    """A directory whose path is too long for a socket, which may have 107 bytes."""
    folder = home / ("x" * 120)
    folder.mkdir()
    return {"TMPDIR": str(folder)}


WIDER = {"intermediate_size": 520}
OTHER = {"architectures": ["MambaForCausalLM"]}
CASES = (
    Case("no such model", 3, ("nowhere",), flags("./nowhere")),
    Case("not in the cache", 3, ("HF_HUB_OFFLINE",), flags("a/b"), offline, is_read_early=True),
    Case("no weights", 3, ("no safetensors",), model(lambda copy: (copy / "model.safetensors").unlink())),
    Case("truncated weights", 3, ("truncated",), weights(lambda data: data[:-100])),
    Case("weights cut in their header", 3, ("truncated",), weights(lambda data: data[:100])),
    Case("corrupt header", 3, ("not valid JSON",), weights(lambda data: data[:8] + b"}" + data[9:])),
    Case("corrupt length", 3, ("not a safetensors file",), weights(lambda data: b"\xff" * 8 + data[8:])),
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
    Case("no space", 1, ("TMPDIR",), flags("--log-level", "error"), max_file_bytes=0),
    Case("too long a name for sockets", 1, ("TMPDIR", "short"), flags("--log-level", "error"), long_name),
)  # fmt: skip


def refused(case: Case, home: Path) -> Refusal:
    """Runs the command itself, or a process that has imported the same libraries."""
    arguments, environment = case.arguments(home), case.environment(home)
    arguments += [] if "--port" in arguments else ["--port", "0"]
    run = commanded if case.is_read_early else forked
    code, out, error = run(arguments, environment, case.max_file_bytes)
    assert out == b""
    return Refusal(code, error.decode().strip().splitlines())


def commanded(arguments: list[str], environment: dict[str, str], max_file_bytes: int) -> tuple[int, bytes, bytes]:
    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

    command, env = [INFERD, "serve", *arguments], {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, env=env, preexec_fn=bound, timeout=WAIT_S, check=False)
    return done.returncode, done.stdout, done.stderr


def forked(arguments: list[str], environment: dict[str, str], max_file_bytes: int) -> tuple[int, bytes, bytes]:
    error, to_error = os.pipe()
    command = [str(INFERD), "serve", *arguments]
    process = forking.start(command, environment, stderr=to_error, max_cpu_s=MAX_CPU_S, max_file_bytes=max_file_bytes)
    os.close(to_error)
    try:
        code = process.wait(WAIT_S)
    finally:
        process.kill()
    with process.stdout, open(error, "rb") as errors:
        return code, process.stdout.read().encode(), errors.read()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_r19_what_cannot_start_says_why(case: Case, tmp_path: Path) -> None:
    """One line means that no phase had begun and no engine existed, because each phase logs its end."""
    refusal = refused(case, tmp_path)
    text = "\n".join(refusal.lines)
    assert refusal.code == case.code, text
    assert len(refusal.lines) == case.num_lines, text
    assert all(words in text for words in case.words), text


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refusal = refused(Case("", 2, (), flags("--port", port), is_read_early=True), tmp_path)
    assert refusal.code == 2
    assert len(refusal.lines) == 1 and f"127.0.0.1:{port}" in refusal.lines[0] and "--port" in refusal.lines[0]


# -- memory, /proc, and Ctrl-C -----------------------------------------------------------------------------------------

SHORT = ("imports the command line", 60), ("imports the engine's libraries", 300), ("computes", 1_000)


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize(("where", "num_mib"), SHORT, ids=[where for where, _ in SHORT])
def test_a_start_without_memory_is_one_line(where: str, num_mib: int) -> None:
    """The address space is limited. Whichever part does not fit, the log has one line besides finished phases."""

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (num_mib * 2**20, num_mib * 2**20))

    command = [INFERD, "serve", "tiny", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=bound, timeout=WAIT_S, check=False)
    told = [line for line in done.stderr.splitlines() if " info " not in line]
    assert (done.returncode, len(told)) == (4, 1), f"{where}: {done.stderr}"
    assert "memory" in told[0] and "ulimit" in told[0] and len(told[0]) <= 1_000


WITHOUT_PROC = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
"""Runs a command that finds an empty /proc. It needs the right to mount."""


def test_a_server_without_proc_starts_and_says_what_it_cannot_know(tmp_path: Path) -> None:
    if subprocess.run([*WITHOUT_PROC, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount")
    broken = shutil.copytree(EMBEDDED_PATH, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    command = [*WITHOUT_PROC, INFERD, "serve", str(broken), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    warning, refusal = done.stderr.splitlines()
    assert "/proc is not mounted" in warning and "--kv-memory" in warning
    assert done.returncode == 3 and "no safetensors" in refusal


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
number, num_left, has_begun = int(sys.argv.pop(1)), int(sys.argv.pop(1)), False
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        global num_left, has_begun
        has_begun = has_begun or name.startswith(("inferd.server.commands", "inferd.engine"))
        num_left -= has_begun
        if has_begun and not num_left:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Interrupt())
from inferd.server.cli import main
main()
"""
"""Runs the command line. The process sends itself a signal at the n-th import from the first that `cli` makes. So
each run stops at a certain place, however busy the machine is."""
COMMANDS = {
    "serve": ("serve", "tiny", "--port", "0"),
    "plan": ("plan", "tiny"),
    "chat": ("chat", "hello", "--base-url", "http://127.0.0.1:9"),
    "bench": ("bench", "serve", "--base-url", "http://127.0.0.1:9"),
    "doctor": ("doctor",),
}
MOMENTS = [
    *((name, num, signal.SIGINT) for name in COMMANDS for num in (1, 3, 10, 30, 100, 200, 300)),
    *(("serve", num, number) for num in range(350, 1150, 50) for number in (signal.SIGINT, signal.SIGTERM)),
]


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize(("name", "num_imports", "number"), MOMENTS)
def test_a_signal_during_the_imports_ends_a_command_without_a_word(
    name: str, num_imports: int, number: signal.Signals
) -> None:
    program = [sys.executable, "-P", "-c", INTERRUPTED, str(int(number)), str(num_imports)]
    done = subprocess.run([*program, *COMMANDS[name]], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr) == (-number, "")


def test_a_cache_that_cannot_be_written_is_said_and_costs_speed_alone(start: Callable[..., Daemon]) -> None:
    assert not Path("/proc/cache").exists()
    daemon = start(env={"XDG_CACHE_HOME": "/proc/cache"})
    warning = next(line for line in daemon.lines if "kernels in plain PyTorch are used" in line)
    assert "/proc/cache/inferd/kernels" in warning
    phase = next(line for line in daemon.lines if "plain PyTorch, several times slower" in line)
    assert "/proc/cache/inferd/kernels" in phase
