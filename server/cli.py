"""The `inferd` command. It runs a subcommand of `commands/app`, and says in one line why one cannot go on.

It imports nothing before it has decided what Ctrl-C does: the subcommands' libraries take half a second.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line. A `StartError` becomes one line on stderr and its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # An exception could come up inside of any import. The chat and the server handle Ctrl-C once they run.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _open_standard_streams()
    from inferd.engine.api.errors import CapacityError, StartError, shortage  # noqa: PLC0415

    try:
        from inferd.server.commands.app import app  # noqa: PLC0415

        app()
    except StartError as error:
        _end(str(error), error.exit_code)
    except Exception as error:
        reason = shortage(error)
        if reason is None:
            raise
        _end(str(CapacityError(f"the command cannot go on: {reason}")), CapacityError.exit_code)


def _end(message: str, exit_code: int) -> None:
    print(f"inferd: {message}", file=sys.stderr)
    sys.exit(exit_code)


def _open_standard_streams() -> None:
    """Open those of descriptors 0, 1 and 2 that are closed. Otherwise the engine's shared memory would get such a
    number, and the engine would find its input or its log there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


if __name__ == "__main__":
    main()
