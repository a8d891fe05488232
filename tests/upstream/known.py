"""Which vLLM versions show which fault."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``name`` is the module's; ``fixed_in`` is the first version without it."""

    name: str
    since: str = "0.30"
    fixed_in: str | None = None

    def is_in(self, version: str) -> bool:
        found = _numbers(version)
        after = self.fixed_in is not None and found >= _numbers(self.fixed_in)
        return found >= _numbers(self.since) and not after


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


FAULTS = (
    # First, since it forks: later ones have started threads.
    Fault("forked_engine"),
    Fault("loaded_prefix_never_fits"),
    Fault("holders_block_each_other"),
    Fault("store_reads_reused_block"),
    Fault("indexer_copies"),
    Fault("deferred_load", since="0.33"),
    Fault("second_reset"),
    Fault("pages_by_block"),
    Fault("late_reply"),
    Fault("many_answers"),
    Fault("abort_looks_whole"),
    Fault("kv_events_address"),
    Fault("unguarded_paths"),
    Fault("request_body_logged"),
)
