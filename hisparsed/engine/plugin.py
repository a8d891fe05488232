"""vLLM general plugin: one control method for the engine core, which ends with its daemon.

vLLM loads general plugins into every process of every vLLM on the machine, so ``register`` does
nothing unless hisparsed launched the process. vLLM stops its engine core on request; a killed
daemon can no longer request it, so the process also watches its parent. The engine core leads a
process group, in which its workers start. So Ctrl-C and supervisors that signal the daemon's group
reach the daemon alone, which drains first. Both hold from the moment at which the process reads
vLLM's configuration (``Guard``): plugins are loaded only after vLLM's handshake, which waits five
minutes for an answer of the daemon.
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

    ``action`` is one of ``ACTIONS``; raises ``ValueError`` for others and for wrong payloads, which
    reaches the caller while the engine continues.
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
    """The object that answers for hot buffers: an executor of hisparsed, or the workers of
    vLLM's."""
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

    spawned = multiprocessing.parent_process()
    if spawned is not None:
        collect_as_usual()
        _end_after(spawned.sentinel)
        _leave_group_of_daemon()
    setattr(EngineCore, CONTROL_METHOD, control)


class Guard:
    """To be set as an attribute of vLLM's configuration, which goes to each process of an engine.

    A process that reads it from another process ends with that process, and leaves the daemon's
    group.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return guarded_by, (os.getpid(),)


def guarded_by(pid: int) -> Guard:
    """The key of a ``Guard``; ``pid`` is the process that wrote it. A copy guards nothing."""
    if pid != os.getpid():
        _leave_group_of_daemon()
        end_with(pid)
    return Guard()


def end_with(pid: int) -> None:
    """From now on this process ends at once when ``pid`` has ended."""
    try:
        sentinel = os.pidfd_open(pid)
    except ProcessLookupError:
        _end()
    except OSError:
        return  # a kernel or container without it; the engine's plugin watches its parent later
    else:
        _end_after(sentinel)


def _leave_group_of_daemon() -> None:
    """From now on signals to the daemon's process group do not reach this process.

    Does nothing in workers, which are in their engine core's group. Not for the daemon itself.
    """
    if os.environ.get(DAEMON_GROUP_ENV) == str(os.getpgrp()):
        os.setpgid(0, 0)


EXIT_PARENT_GONE = 71
_THREAD_NAME = "hisparsed-parent-watch"


def _end_after(sentinel: int) -> None:
    """``end_with`` for a descriptor that becomes readable when another process ends; safe to call
    again."""
    if any(one.name == _THREAD_NAME for one in threading.enumerate()):
        return
    threading.Thread(target=_wait_and_end, args=(sentinel,), name=_THREAD_NAME, daemon=True).start()


def _wait_and_end(sentinel: int) -> None:
    wait([sentinel])
    _end()


def _end() -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"hisparsed: the daemon is gone; this process of it ends.\n")
    # Not sys.exit: in a thread it ends only the thread, and no caller is left to answer.
    os._exit(EXIT_PARENT_GONE)
