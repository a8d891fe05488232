"""Adapters for differences between vLLM versions, 0.30 to 0.33.

Each detects the version from the objects that it gets. Imports no vLLM; ``residency`` has the code
that needs its names at import time.

- ``ActiveLimit``: a limit on admission alone since 0.31. Before, the only limit is asserted against
  running calls too, so a lower one takes effect as they end.
- ``waiting_queues``, ``holders``: calls that wait and hold blocks have their own queue since
  0.31. Before, every call that a pass had to skip shared one queue.
- ``admission_cap``: a public name since 0.31.
- ``detached_blocks``: host blocks of finished calls are held until they are copied, since 0.31.
- ``pending_writes``: rows of draft layers wait for the next step since 0.31.
- ``resident_by_state``: 0.31 has a resident table of the batch, later versions one of state rows.
- ``fail_put_off_loads``: since 0.33 a load may begin when the step before its pass has ended.
- ``forget_failed_blocks``: since 0.31 a failed load that is named by its blocks ends an engine with
  several cache groups, and NIXL names its blocks next to its call.
- ``left_to_decode``: 0.30 has no drafts that a prefill node would compute differently.
- ``unlock_manager``: since 0.33 the offloading manager has a lock.
- ``schemas_of_tools``: since 0.31 arguments of a tool that is not strict are free text.
- ``load_arguments``: the OpenAI application's arguments are in another module since 0.33.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from typing import Any


class ActiveLimit:
    """The limit of ``scheduler``, vLLM's, which begins at the configured one."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._admits_alone = hasattr(scheduler, "max_num_active_reqs")
        name = "max_num_active_reqs" if self._admits_alone else "max_num_running_reqs"
        self.configured = int(getattr(scheduler, name))
        self._most = self.configured

    @property
    def most(self) -> int:
        """Calls that may run at once; more may still be running from before."""
        return int(self._scheduler.max_num_active_reqs) if self._admits_alone else self._most

    def set(self, most: int) -> None:
        self._most = most
        if self._admits_alone:
            self._scheduler.max_num_active_reqs = most

    def before_pass(self) -> None:
        """Call before each scheduling pass."""
        if not self._admits_alone:
            running = len(self._scheduler.running)
            self._scheduler.max_num_running_reqs = max(self._most, running)


def waiting_queues(scheduler: Any) -> tuple[Any, Any]:
    """Calls that hold nothing yet, and the queue with those that do."""
    return scheduler.waiting, _second_queue(scheduler)


def holders(scheduler: Any) -> list[Any]:
    """Calls that wait and hold blocks, those that wait for a load included, oldest first."""
    if hasattr(scheduler, "kv_holding_waiting"):
        return list(scheduler.kv_holding_waiting)
    manager = scheduler.kv_cache_manager
    return [
        request
        for request in scheduler.skipped_waiting
        if any(manager.get_block_ids(request.request_id))
    ]


def remove_holder(scheduler: Any, request: Any) -> None:
    """Take one of ``holders`` out of its queue."""
    _second_queue(scheduler).remove_requests([request])


def _second_queue(scheduler: Any) -> Any:
    if hasattr(scheduler, "kv_holding_waiting"):
        return scheduler.kv_holding_waiting
    return scheduler.skipped_waiting


def fail_put_off_loads(scheduler: Any) -> None:
    """Fail the loads that have not begun, as if the workers had reported it: their calls are
    computed.

    For a reset of the chunks that they would load.
    """
    put_off: dict[str, Any] = getattr(scheduler, "deferred_loads", {})
    for request_id in put_off:
        scheduler.requests[request_id].num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request_id)
        scheduler.finished_recving_kv_req_ids.add(request_id)
    put_off.clear()


def forget_failed_blocks(model_output: Any, *, calls_follow: bool) -> None:
    """Leave failed loads to be known by their calls, where workers say which calls failed.

    ``calls_follow``: workers report the calls later too. vLLM passes blocks on when the first rank
    names them, and the call when the last rank has failed.
    """
    workers = getattr(model_output, "kv_connector_output", None)
    if workers is not None and (calls_follow or getattr(workers, "failed_recving", None)):
        workers.invalid_block_ids = set()


def left_to_decode(vllm_config: Any) -> int:
    """Tokens at a prompt's end that a prefill node leaves to the decode node, for its drafts."""
    return max(0, int(getattr(vllm_config, "num_prefill_lookahead_tokens", 0)) - 1)


def unlock_manager(offloading_scheduler: Any) -> None:
    """After a load that began outside a pass: 0.33 leaves its manager locked then, and logs an
    error each time."""
    unlock: Callable[[], None] = getattr(offloading_scheduler, "_release_step", _nothing)
    unlock()


def admission_cap(manager: Any) -> int:
    """The most blocks per request, of a resident ``manager`` of vLLM."""
    if hasattr(manager, "max_admission_blocks_per_request"):
        return int(manager.max_admission_blocks_per_request)
    return int(manager._max_admission_blocks_per_request)


def detached_blocks(publication: Any) -> list[Any]:
    """The blocks that only a pending ``publication`` of HiSparse's coordinator holds."""
    if publication is None:
        return []
    return list(getattr(publication, "detached_blocks", None) or ())


def pending_writes(hisparse_worker: Any) -> Callable[[], None]:
    """Submits waiting work to HiSparse's stream, as the next step would first; may be called
    often."""
    enqueue: Callable[[], None] = getattr(hisparse_worker, "_finish_previous_step", _nothing)
    return enqueue


def _nothing() -> None:
    return None


def resident_by_state(cache_handle: Any) -> bool:
    """Whether rows of the handle's resident block table are state rows, not batch rows."""
    return getattr(cache_handle, "residency", None) is not None


_NEW = "vllm.entrypoints.common.cli_args"
_OLD = "vllm.entrypoints.launchers.cli_args"
_STRICT_LEVEL = "tool_strict_level"


def make_arg_parser(parser: Any) -> Any:
    """``parser`` with the application's options. Imports for seconds the first time."""
    return load_arguments().make_arg_parser(parser)


def schemas_of_tools(frontend_class: Any) -> dict[str, str]:
    """Application arguments that hold the arguments of every tool to its schema."""
    known = any(one.name == _STRICT_LEVEL for one in fields(frontend_class))
    return {_STRICT_LEVEL: "parameter"} if known else {}


def load_arguments() -> Any:
    """The module that has them."""
    return import_module(_OLD if find_spec(_OLD) is not None else _NEW)
