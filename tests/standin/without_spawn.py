"""`hisparsed` without the line by which vLLM spawns its processes instead of forking them."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from hisparsed.engine import environment

_set = environment.set_process_start


def set_process_start(environ: MutableMapping[str, str]) -> None:
    _set(environ)
    del environ[environment.METHOD_ENV]


if __name__ == "__main__":
    os.environ.pop(environment.METHOD_ENV, None)
    environment.set_process_start = set_process_start
    from hisparsed.cli.app import main

    sys.exit(main())
