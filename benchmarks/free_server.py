"""`inferd serve` with the engine of `free_engine.py`. Only this program knows of it; the product has no such option.

python benchmarks/free_server.py [--step-ms MS] [--stacks DIR] serve [flags of `inferd serve`]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.stacks import sample_into
from inferd.engine.api.process import engine_process
from inferd.server import cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", default="0")
    parser.add_argument("--stacks", type=Path, help="write sampled stacks of server and engine into this directory")
    asked, rest = parser.parse_known_args()
    engine = [sys.executable, "-P", str(Path(__file__).with_name("free_engine.py")), "--step-ms", asked.step_ms]
    if asked.stacks is not None:
        sample_into(asked.stacks / "server.stacks")
        engine += ["--stacks", str(asked.stacks / "engine.stacks")]
    engine_process.ENGINE_COMMAND = tuple(engine)
    sys.argv = ["inferd", *rest]
    cli.main()


if __name__ == "__main__":
    main()
