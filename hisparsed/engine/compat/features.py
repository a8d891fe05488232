"""The features of hisparsed that each vLLM version supports, and the refusal of the others. Pure;
no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from packaging.version import Version

from hisparsed.config.machine import NodeKind
from hisparsed.config.node import NodeConfig
from hisparsed.engine.compat.versions import (
    OVERRIDE_HINT,
    WHY_TESTED,
    judge_version,
    overridden,
    supported_text,
)
from hisparsed.errors import UserError


@dataclass(frozen=True, slots=True)
class Feature:
    """``since``: the first vLLM that it runs on. ``key``: what asks for it in the document.

    ``asked`` returns whether a document does. ``note`` says why not before, or what differs.
    """

    name: str
    since: str
    note: str = ""
    key: str = ""
    asked: Callable[[NodeConfig], bool] | None = None


FEATURES = (
    Feature("pools, host ledger, offloading on lent blocks", "0.30"),
    Feature("hot leases of running requests", "0.30"),
    Feature(
        "admission order and limits",
        "0.30",
        "on 0.30 a lower limit takes effect as running calls end",
    ),
    Feature(
        "calls that wait for each other's blocks are restarted",
        "0.30",
        "0.31 has a queue for such calls; on 0.30 they are found by the blocks that they hold",
    ),
    Feature(
        "prefixes of calls that ended while their pages were copied",
        "0.31",
        "0.30 forgets such a prefix",
    ),
    Feature("residency of requests, canaries", "0.30"),
    Feature("reference and simulated nodes", "0.30"),
    Feature(
        "hisparsed's kernels (`cuda.kernels: hisparsed`)",
        "0.31",
        "0.30 resolves the rows of a request one after the other and marks no padding rows",
        key="cuda.kernels",
        asked=lambda config: config.cuda.kernels == "hisparsed",
    ),
    Feature(
        "prefixes handed from node to node",
        "0.32",
        "before, vLLM has only its own source of prefix hits, and asks no connector for the cache "
        "groups that it loads",
        key="disaggregation",
        asked=lambda config: config.disaggregation is not None,
    ),
)


def missing_features(config: NodeConfig, found: str) -> list[str]:
    """Features that ``config`` asks for and vLLM ``found`` does not support, in sentences."""
    if not judge_version(found).may_start:
        return []
    release = Version(found).release[:2]
    return [
        f"{feature.key}: {feature.name} needs vLLM {feature.since}, this is {found}; leave "
        f"{feature.key} out or install a newer one"
        for feature in FEATURES
        if feature.asked is not None
        and feature.asked(config)
        and release < Version(feature.since).release[:2]
    ]


def require_supported_vllm(
    config: NodeConfig, kind: NodeKind, found: str | None, environment: Mapping[str, str]
) -> None:
    """Refuse a vLLM that is missing, untested, or lacks what ``config`` asks for.

    ``found`` is its version. Raises ``UserError``; imports no vLLM.
    """
    if found is None:
        extra = "cuda" if kind == "cuda" else "cpu"
        raise UserError(
            f"vLLM is not installed; it runs the model: pip install 'hisparsed[{extra}]'"
        )
    verdict = judge_version(found)
    if not verdict.may_start and not overridden(config.allow_untested_vllm, environment):
        raise UserError(
            f"{verdict.sentence}; {WHY_TESTED}. Install one of {supported_text()}. {OVERRIDE_HINT}"
        )
    for sentence in missing_features(config, found):
        raise UserError(sentence)
