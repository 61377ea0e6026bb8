"""`inferd serve` with the engine of `faulty_engine.py`.

python tests/reliability/faulty_server.py --fault FAULT [--fault FAULT ...] [--step-ms MS] serve [flags]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from inferd.engine.api.process import engine_process
from inferd.server import cli

if __name__ == "__main__":
    start = sys.argv.index("serve")
    faults, sys.argv = sys.argv[1:start], ["inferd", *sys.argv[start:]]
    engine_process.ENGINE_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("faulty_engine.py")), *faults)
    cli.main()
