"""Error texts for values that backends refuse: the same for all backends.

Shapes and dtypes are in ``checks``; these need the data, so each backend looks where it reads.
"""

from __future__ import annotations


def request_outside(row: int, request: int) -> ValueError:
    return ValueError(f"row {row}: request id {request} is not in state_of_request")


def state_outside(request: int, state: int, states: int) -> ValueError:
    return ValueError(
        f"request {request}: state row {state} does not exist, rows are 0 to {states - 1}"
    )


def state_twice(state: int, request: int) -> ValueError:
    return ValueError(
        "rows of one request must be consecutive and no two requests may share a state row; "
        f"state row {state} appears twice, once for request {request}"
    )


def hot_blocks_missing(
    state: int, request: int, capacity: int, needed: int, leased: int
) -> ValueError:
    return ValueError(
        f"state row {state}: capacity {capacity} needs {needed} hot blocks, the hot table of "
        f"request {request} names {leased}; lease blocks before growing, shrink before "
        "returning them"
    )


def capacity_outside(state: int, capacity: int, most: int) -> ValueError:
    return ValueError(f"state row {state}: capacity must be 0 to {most} rows, got {capacity}")


def swap_count_outside(row: int, count: int, width: int) -> ValueError:
    return ValueError(f"swap_counts of row {row} must be 0 to {width}, got {count}")


def swap_row_outside(host: int, physical: int, host_rows: int, slab_rows: int) -> IndexError:
    return IndexError(
        f"swap of host row {host} to physical row {physical} reaches outside the memory: host "
        f"rows are 0 to {host_rows - 1}, physical rows 0 to {slab_rows - 1}"
    )
