"""Shared by the checks of agent programs: a task with a plan for the model, and how its result is judged.

It imports only the standard library, because checks of Python frameworks run in their own environments.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

MODEL = "scripted"
HOME = Path(os.environ["HOME"])
RUN_S = float(os.environ.get("RUN_S", "120"))
"""Seconds that a program may run."""
TASK = os.environ.get("TASK", "")
"""The task in plain words, for a model that follows no plan."""
BROKEN = "return a - b"
MENDED = "return a + b"
TESTED = "2 tests passed"
MCP_SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
"""Command of a server of the Model Context Protocol with the tool `count_words`."""


class Project:
    """A folder of files: `calc.py` with a fault, `test_calc.py`, which finds it, and the picture `red.png`."""

    def __init__(self, name: str = "project") -> None:
        self.folder = HOME / name
        self.folder.mkdir()
        self.calc = self.folder / "calc.py"
        self.calc.write_text(f'def add(a, b):\n    """The sum of two numbers."""\n    {BROKEN}\n')
        tests = "from calc import add\n\nassert add(2, 2) == 4\nassert add(2, -2) == 0\n"
        (self.folder / "test_calc.py").write_text(f'{tests}print("{TESTED}")\n')
        (self.folder / "red.png").write_bytes(picture())
        subprocess.run(["git", "init", "--quiet"], cwd=self.folder, check=True)

    def enter(self) -> None:
        """Make it the folder of this process."""
        os.chdir(self.folder)

    def check_mended(self) -> None:
        """Raises if the fault is still there."""
        assert MENDED in self.calc.read_text(), self.calc.read_text()
        done = subprocess.run([sys.executable, "test_calc.py"], cwd=self.folder, capture_output=True, text=True)
        assert TESTED in done.stdout, done.stderr

    def run(self, command: list[str], *, stdin: str = "", **variables: str) -> str:
        """Run a program in this folder, and return its output. Raises if it fails."""
        done = subprocess.run(
            command, cwd=self.folder, env={**os.environ, **variables}, input=stdin, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=RUN_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout[-6000:]}"
        return done.stdout


def plan(*steps: Any, mark: str = "") -> str:
    """Steps for the model, to be put into a message of the user. `scripted_model` describes them. Any other model gets
    `TASK` in their place."""
    if TASK:
        return TASK
    written = json.dumps({"mark": mark, "steps": steps} if mark else steps)
    return f"<plan>{written.replace('<', chr(92) + 'u003c')}</plan>"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A call of a tool."""
    return {"name": name, "arguments": arguments}


def when(seen: str, then: Any) -> dict[str, Any]:
    """A step that the model takes if it has just been told `seen`; a text or a list of calls."""
    return {"seen": seen, "text": then} if isinstance(then, str) else {"seen": seen, "calls": then}


def mending(read: dict[str, Any], edit: dict[str, Any], test: dict[str, Any]) -> str:
    """The usual plan, made of three calls. The answer is "It is mended." if their results reached the model."""
    return plan([read], when(BROKEN, [edit]), [test], when(TESTED, "It is mended."))


def picture() -> bytes:
    """A red square in PNG."""
    rows = (b"\0" + b"\xff\0\0" * 8) * 8

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    packed = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + packed


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: The file's path.
    """
    return Path(path).read_text()


def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file.

    Args:
        path: The file's path.
        old: The text to replace.
        new: The text to put there.
    """
    file = Path(path)
    file.write_text(file.read_text().replace(old, new))
    return f"{path} was written."


def run_tests() -> str:
    """Run the tests of the folder."""
    done = subprocess.run([sys.executable, "test_calc.py"], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


MEND = mending(
    call("read_file", path="calc.py"),
    call("edit_file", path="calc.py", old=BROKEN, new=MENDED),
    call("run_tests"),
)
"""A task for an agent that is given the three functions above, in the project's folder."""
