"""What a run shows of a change of traffic in its middle: how soon it was over. Pure."""

from __future__ import annotations

from hisparsed.simulate.measures import Measures, Sample
from hisparsed.simulate.summary import PolicyResult, finished_calls

RECOVERY_S = 300.0
"""What comes later than this after the change counts as recovered."""
NEAR = 0.01
"""Of the host budget: a split this close to its last one has arrived."""


def after_change(
    result: PolicyResult, measures: Measures, change_s: float, scale: float
) -> PolicyResult:
    """``result`` with the calls an hour, of the whole node, once ``RECOVERY_S`` are over, and
    the seconds until the split had arrived where it ended."""
    from_s = change_s + RECOVERY_S
    if from_s >= measures.until_s:
        return result
    late = sum((call.finished_s or 0.0) >= from_s for call in finished_calls(measures))
    hours = (measures.until_s - from_s) / 3600
    return result.model_copy(
        update={
            "recovered_calls_per_hour": late / hours / scale,
            "settled_s": _settled_s(measures, change_s),
        }
    )


def _settled_s(measures: Measures, change_s: float) -> float:
    after = [one for one in measures.samples if one.at_s >= change_s]
    last = _offload_share(after[-1])
    away = [one.at_s for one in after if abs(_offload_share(one) - last) > NEAR]
    return max(away) - change_s if away else 0.0


def _offload_share(one: Sample) -> float:
    return one.offload_blocks / max(1, one.offload_blocks + one.hisparse_blocks)
