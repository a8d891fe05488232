"""`hisparsed serve`: read the node's document, then run the node until it is told to stop.

Exit code 0 after a clean stop, 2 for wrong input, 70 when the engine died.
"""

import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer


def serve(
    config: Annotated[Path, typer.Option(help="The node's document (hisparsed.yaml).")],
) -> None:
    """Run the node."""
    from hisparsed.config.kind import detect_node_kind, nvidia_gpus
    from hisparsed.config.memory import machine_memory_bytes
    from hisparsed.config.node import load_node_config
    from hisparsed.daemon.logs import configure_logging
    from hisparsed.daemon.node import run_node
    from hisparsed.daemon.notify import service_manager

    loaded = load_node_config(config, memory_bytes=machine_memory_bytes())
    configure_logging(loaded.value.log, terminal=sys.stderr.isatty())
    detected = detect_node_kind(loaded.value, nvidia_gpus)
    manager = service_manager(os.environ, pid=os.getpid(), clock=time.monotonic)
    code = run_node(loaded.value, detected, document=config, manager=manager)
    # Everything is closed. Leaving now skips the interpreter's tear-down, in which extension
    # modules that vLLM loads print pages of leak reports over the end of the log.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
