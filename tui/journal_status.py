"""A recorded tick in the form of the API's documents, so that pages need not know the source.

Pure. What a snapshot does not hold (latencies, the daemon's own state) is left out.
"""

from __future__ import annotations

from hisparsed.tui.journal_reader import RecordedTick
from hisparsed.tui.wire import Document, dig, items, number, text


def status_document(tick: RecordedTick, first_s: float) -> Document:
    """The status as the daemon would have told it; ``first_s`` stands for its start."""
    snapshot, decision = tick.snapshot, tick.decision
    frozen = dig(snapshot, "frozen_levers") or []
    return {
        "at_unix_s": tick.at_unix_s,
        "node": {"kind": "", "model": "recorded journal", "version": "", "started_unix_s": first_s},
        "lifecycle": "serving",
        "recorded": True,
        "observed": _observed(snapshot),
        "levers": [_lever(one, frozen) for one in items(decision, "levers")],
        "policy": {
            "generation": dig(decision, "policy_generation"),
            "content_hash": tick.policy_hash,
            "mode": "",
            "overridden": {},
            "frozen": frozen,
            "last_error": None,
        },
        "loop": {"tick": dig(decision, "tick")},
    }


def _lever(one: Document, frozen: list[str]) -> Document:
    reason = text(one, "reason")
    mode = {"AdviseOnly": "advise", "Off": "off"}.get(reason or "", "act")
    return {
        **one,
        "mode": mode,
        "frozen": one.get("lever") in frozen,
        "pending_restart": reason == "PendingRestart",
    }


def _observed(snapshot: Document) -> Document:
    def of(path: str) -> float:
        return number(snapshot, path) or 0

    block, block_tokens = of("geometry.host_block_bytes"), of("geometry.block_tokens")
    chunk = of("geometry.offload_chunk_bytes") * of("geometry.offload_copies")
    chunk_tokens = of("geometry.offload_chunk_tokens")
    live = of("sessions.live_set_tokens")
    in_use_tokens = of("hisparse.in_use_blocks") * block_tokens
    # As the policy counts: what running requests hold is idle in neither pool.
    occupied = max(of("offload.in_use_chunks") * chunk_tokens, in_use_tokens)
    reaches = (
        max(0, of("hisparse.capacity_blocks") * block_tokens - in_use_tokens),
        max(0, of("offload.capacity_chunks") * chunk_tokens - occupied),
    )
    idle_live = max(0, live - in_use_tokens)
    return {
        "engine": {"report_age_s": dig(snapshot, "report_age_s")},
        "pools": {
            "budget_bytes": of("geometry.budget_blocks") * block,
            "host_block_bytes": block,
            "hisparse": {
                "target_bytes": of("hisparse.target_blocks") * block,
                "capacity_bytes": of("hisparse.capacity_blocks") * block,
                "in_use_bytes": of("hisparse.in_use_blocks") * block,
                "cached_bytes": of("hisparse.cached_blocks") * block,
                "reach_tokens": reaches[0],
            },
            "offload": {
                "target_bytes": of("offload.target_blocks") * block,
                "capacity_bytes": of("offload.lent_blocks") * block,
                "in_use_bytes": of("offload.in_use_chunks") * chunk,
                "cached_bytes": max(0, of("offload.stored_chunks") - of("offload.in_use_chunks"))
                * chunk,
                "reach_tokens": reaches[1],
            },
            "pending_bytes": of("pending_blocks") * block,
            "draining_bytes": of("draining_blocks") * block,
            "reserve_bytes": of("reserve.blocks") * block,
        },
        "sessions": {
            "live": dig(snapshot, "sessions.live_sessions"),
            "live_set_tokens": live,
            "coverage": min(reaches) / idle_live if idle_live else None,
        },
        "requests": dig(snapshot, "requests"),
        "hot": {
            **(dig(snapshot, "hot") or {}),
            "miss_curve": [
                {"multiplier": one.get("multiplier"), "misses": one.get("miss_fraction")}
                for one in items(snapshot, "hot.predicted")
            ],
        },
        "gpu": dig(snapshot, "gpu"),
        "admission": dig(snapshot, "admission"),
        "watermark": dig(snapshot, "watermark"),
        "serving": {
            "prompt_tokens_total": dig(snapshot, "tokens.prompt_total"),
            "generated_tokens_total": dig(snapshot, "tokens.generated_total"),
            "prefix_query_tokens_total": dig(snapshot, "prefix.query_tokens_total"),
            "prefix_hit_tokens_total": dig(snapshot, "prefix.hit_tokens_total"),
        },
    }


def flat_decisions(tick: RecordedTick) -> list[Document]:
    """As ``/v1/decisions`` has them."""
    bounded = {one.get("lever"): one.get("found") for one in items(tick.applied, "bounded")}
    return [
        {
            "sequence": tick.sequence,
            "at_unix_s": tick.at_unix_s,
            "tick": dig(tick.decision, "tick"),
            "policy_generation": dig(tick.decision, "policy_generation"),
            "policy_hash": tick.policy_hash,
            "lever": one.get("lever"),
            "code": one.get("reason"),
            "cause": one.get("cause"),
            "limited_by": one.get("limited_by"),
            "acts": tick.applied is not None and one.get("current") != one.get("wanted")
            and one.get("reason") == one.get("cause"),
            "notable": one.get("lever") in tick.notable,
            "current": one.get("current"),
            "wanted": one.get("wanted"),
            "in_force": bounded.get(one.get("lever")),
            "error": text(tick.applied, "error"),
            "figures": one.get("figures"),
            "sentence": one.get("sentence"),
        }
        for one in items(tick.decision, "levers")
    ]  # fmt: skip


def whole_tick(tick: RecordedTick, later: list[RecordedTick]) -> Document:
    """As ``/v1/decisions/{sequence}`` has it; ``later`` are ticks after it, oldest first."""
    number_of = dig(tick.decision, "tick")
    confirmation = next(
        (one.confirmed for one in later if dig(one.confirmed, "tick") == number_of), None
    )
    after = later[-1] if later else None
    return {
        "sequence": tick.sequence,
        "at_unix_s": tick.at_unix_s,
        "decision": tick.decision,
        "applied": tick.applied,
        "snapshot": tick.snapshot,
        "confirmation": confirmation,
        "after": None
        if after is None
        else {"at_unix_s": after.at_unix_s, "snapshot": after.snapshot},
    }
