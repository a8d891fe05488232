"""The `hisparsed` command. One module per command, imported only when that command runs.

What a command does lives elsewhere (engine, control, replay); here are options, output and exit
codes.
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
