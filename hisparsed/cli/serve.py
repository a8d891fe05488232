"""`hisparsed serve`: read the node's document, then run the node until it is told to stop.

Exit code 0 after a clean stop, 2 for wrong input, 70 when no engine could be kept running.
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
    allow_untested_vllm: Annotated[
        bool,
        typer.Option(
            "--allow-untested-vllm", help="Start with a vLLM that hisparsed was not tested with."
        ),
    ] = False,
) -> None:
    """Run the node."""
    from hisparsed.config.kind import detect_node_kind, nvidia_gpus
    from hisparsed.config.memory import machine_memory_bytes
    from hisparsed.config.node import load_node_config
    from hisparsed.control.doctor_watch import Doctor
    from hisparsed.daemon.logs import configure_logging
    from hisparsed.daemon.node import run_node
    from hisparsed.daemon.notify import service_manager
    from hisparsed.engine.compat.versions import OVERRIDE_ENV
    from hisparsed.operations.beside_node import AbsentDoctor, NodeDoctor

    if allow_untested_vllm:
        os.environ[OVERRIDE_ENV] = "1"
    # The state folder is for this user and the operators' group.
    os.umask(0o027)
    loaded = load_node_config(config, memory_bytes=machine_memory_bytes())
    configure_logging(loaded.value.log, terminal=sys.stderr.isatty())
    detected = detect_node_kind(loaded.value, nvidia_gpus)
    manager = service_manager(os.environ, pid=os.getpid(), clock=time.monotonic)
    doctor: Doctor
    try:
        doctor = NodeDoctor.before_start(loaded.value, config, detected.kind)
    except Exception as error:
        # What the doctor cannot look at is told, and keeps no node from starting.
        doctor = AbsentDoctor(error, at_unix_s=time.time())
    code = run_node(loaded.value, detected, document=config, manager=manager, doctor=doctor)
    # Everything is closed. Leaving now skips the interpreter's tear-down, in which extension
    # modules that vLLM loads print pages of leak reports over the end of the log.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
