"""Draws docs/assets/answer.svg: a real start of smollm2, and its real answers to curl and to `inferd chat`.

    python docs/assets/answer.py

The programs wrote every line of the picture, except the prompts and the line that counts the events left out.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).with_name("answer.svg")
WIDTH = 120
URL = "http://127.0.0.1:8000"
INFERD = [sys.executable, "-m", "inferd"]
BODY = (
    '{"model": "smollm2", "stream": true, "temperature": 0, '
    '"messages": [{"role": "user", "content": "Name the capital of France."}]}'
)
CURL = ["curl", "-N", f"{URL}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", BODY]
CHAT = ["chat", "--temperature", "0", "Write one sentence about the sea."]
NUM_FIRST, NUM_LAST = 3, 2
"""Number of events shown at the beginning and at the end of the stream."""
# Rich's own format fetches a font from another host.
SVG_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def output_of(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


def draw(server: subprocess.Popen[str], console: Console) -> None:
    def show(line: str, style: str = "") -> None:
        console.print(Text(line, style=style))

    def show_event(event: str) -> None:
        for start in range(0, len(event), WIDTH):
            show(event[start : start + WIDTH], "dim")

    assert server.stdout is not None
    show("$ inferd serve smollm2", "bold green")
    for line in server.stdout:
        show(line.rstrip(), "bold" if line.startswith("READY") else "")
        if line.strip().startswith("curl"):
            break
    else:
        raise SystemExit("The server ended before it was ready.")
    show(f"\n$ {shlex.join(CURL)}", "bold green")
    events = output_of(CURL).strip().split("\n\n")
    for event in events[:NUM_FIRST]:
        show_event(event)
    show(f"... {len(events) - NUM_FIRST - NUM_LAST} more events")
    for event in events[-NUM_LAST:]:
        show_event(event)
    show(f"\n$ {shlex.join(['inferd', *CHAT])}", "bold green")
    show(output_of([*INFERD, *CHAT]).strip())


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    command = [*INFERD, "serve", "smollm2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            draw(server, console)
        finally:
            server.terminate()
    picture = console.export_svg(title="inferd", code_format=SVG_FORMAT, unique_id="answer")
    PICTURE.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
