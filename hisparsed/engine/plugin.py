"""vLLM general plugin: one control method for the engine core, which ends with its daemon.

vLLM loads general plugins into every process of every vLLM on the machine, so ``register``
does nothing unless hisparsed launched the process. vLLM stops its engine core when told to; a
daemon that was killed can no longer tell it, so the process also watches its parent. The engine
core leads a process group, which its workers are born into: Ctrl-C and supervisors that signal the
daemon's group reach the daemon alone, which drains first.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from multiprocessing.connection import wait
from typing import Any

from hisparsed.engine.garbage import collect_as_usual

LAUNCHED_ENV = "HISPARSED_ENGINE"
"""Set by hisparsed for the processes it starts."""
DAEMON_GROUP_ENV = "HISPARSED_DAEMON_GROUP"
"""The daemon's process group, for the same processes."""
CONTROL_METHOD = "hisparsed_control"
_HOT_WORKERS = "hisparsed_hot_workers"
ACTIONS = ("report", "apply", "requests", "canary-begin", "canary-end")


def control(engine_core: Any, action: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Serve one control call on the engine thread, between steps.

    ``action`` is one of ``ACTIONS``; raises ``ValueError`` on others and on bad payloads, which
    reaches the caller while the engine lives on.
    """
    from hisparsed.engine.messages import CanaryCall, command_from_wire, report_to_wire
    from hisparsed.engine.worker_report import WorkerReport

    scheduler, executor = engine_core.scheduler, engine_core.model_executor
    release_host = getattr(executor, "release_host", None)
    hot = _hot_workers(engine_core)
    if action == "report":
        counts = getattr(hot, "hot_report", None)
        workers = counts() if counts is not None else WorkerReport(counted=False)
        return report_to_wire(scheduler.hisparsed_report(workers, release_host))
    if action == "apply":
        command = command_from_wire(payload)
        resize_hot = getattr(hot, "resize_hot", None)
        result = scheduler.hisparsed.apply(command, resize_hot, release_host)
    elif action == "requests":
        rows = getattr(hot, "hot_rows", dict)
        result = scheduler.hisparsed_requests(rows())
    elif action == "canary-begin":
        scheduler.hisparsed.canary.begin(CanaryCall.model_validate(payload))
        return {}
    elif action == "canary-end":
        result = scheduler.hisparsed.canary.end(str(payload["request_id"]))
    else:
        raise ValueError(f"control action {action!r} is unknown; use one of {', '.join(ACTIONS)}")
    answer: dict[str, Any] = result.model_dump()
    return answer


def _hot_workers(engine_core: Any) -> Any:
    """What answers for hot buffers: an executor of ours, or the workers of vLLM's own."""
    options = engine_core.scheduler.vllm_config.additional_config.get("hisparsed", {})
    if options.get("kernels") != "hisparsed":
        return engine_core.model_executor
    kept = getattr(engine_core, _HOT_WORKERS, None)
    if kept is None:
        from hisparsed.engine.cuda.hot import CudaHot

        kept = CudaHot(engine_core.model_executor)
        setattr(engine_core, _HOT_WORKERS, kept)
    return kept


def register() -> None:
    """Entry point of group ``vllm.general_plugins``; safe to call many times."""
    if os.environ.get(LAUNCHED_ENV) != "1":
        return
    from vllm.v1.engine.core import EngineCore

    if multiprocessing.parent_process() is not None:
        collect_as_usual()
    end_with_parent()
    leave_group_of_daemon()
    setattr(EngineCore, CONTROL_METHOD, control)


def leave_group_of_daemon() -> None:
    """From now on what is sent to the daemon's process group does not reach this process.

    Does nothing in the daemon, and in workers that are in their engine core's group.
    """
    spawned = multiprocessing.parent_process() is not None
    if spawned and os.environ.get(DAEMON_GROUP_ENV) == str(os.getpgrp()):
        os.setpgid(0, 0)


EXIT_PARENT_GONE = 71
_THREAD_NAME = "hisparsed-parent-watch"


def end_with_parent() -> None:
    """From now on this process ends at once when its parent has; safe to call again.

    Does nothing in a process that multiprocessing did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None or any(one.name == _THREAD_NAME for one in threading.enumerate()):
        return
    threading.Thread(
        target=_wait_and_end, args=(parent.sentinel,), name=_THREAD_NAME, daemon=True
    ).start()


def _wait_and_end(sentinel: int) -> None:
    wait([sentinel])
    with contextlib.suppress(OSError):
        os.write(2, b"hisparsed: the daemon is gone; its engine process ends.\n")
    # Not sys.exit: from a thread that ends only the thread, and there is nobody left to answer.
    os._exit(EXIT_PARENT_GONE)
