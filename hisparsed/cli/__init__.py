"""The `hisparsed` command. One module per command, imported only when that command runs.

Commands hold options, output and exit codes; the work is in other packages (engine, control,
replay).
"""

import os
import signal


def _end(*_: object) -> None:
    raise SystemExit(0)


if os.getpid() == 1:
    # Process 1 gets no signal that it has no handler for: one that is sent while a command is
    # imported would be lost.
    for _number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(_number, _end)
