"""Names that both sides of the engine use; imports nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hisparsed.config.node import NodeConfig
from hisparsed.config.sections import DisaggregationConfig, ReferenceConfig
from hisparsed.engine.scratch import scratch_block_count
from hisparsed.errors import UserError
from hisparsed.policy.units import format_bytes

if TYPE_CHECKING:
    from hisparsed.engine.port import HotPolicy
    from hisparsed.engine.reference.handoff.worker import HandoffOptions


SERVED_MODEL_NAME = "hisparsed-reference"
"""The model name of the reference node."""


_OWN_MODEL = "the reference node makes its own model; remove it"
REFERENCE_ARGS = {
    "max_model_len": "set reference.max_model_len",
    "block_size": "set reference.block_size",
    "num_gpu_blocks_override": "set reference.gpu_blocks",
    "max_num_seqs": "set reference.max_num_seqs",
    "max_num_batched_tokens": "set reference.max_num_batched_tokens",
    "speculative_config": "set reference.speculative_tokens",
    "served_model_name": _OWN_MODEL,
    "load_format": _OWN_MODEL,
    "dtype": _OWN_MODEL,
    "enable_prefix_caching": "the reference node needs it on; remove it",
    "enable_chunked_prefill": "the reference node needs it on; remove it",
    "distributed_executor_backend": "the reference node has its own executor; remove it",
    "enforce_eager": "the reference node captures no graphs; remove it",
    "additional_config": "the reference node uses it itself; remove it",
}
"""Engine arguments that the reference node sets, each with the alternative."""


def decode_query_len(config: NodeConfig) -> int:
    """Decode rows of a request in one step: its drafts and one more."""
    return 1 + config.reference.speculative_tokens


def served_names(config: NodeConfig) -> tuple[str, ...]:  # noqa: ARG001 (every body is asked)
    """The model names that clients ask for."""
    return (SERVED_MODEL_NAME,)


def asked_multiplier(config: NodeConfig, policy: HotPolicy) -> float:
    """Leases change size live, up to the policy's highest."""
    return policy.highest_multiplier(decode_query_len(config))


def require_startable(config: NodeConfig, *, max_multiplier: float) -> None:
    """Refuse sizes that can never start; raises ``UserError``."""
    from hisparsed.engine.reference.model_folder import ROW_BYTES

    reference = config.reference
    block_bytes = reference.layers * reference.block_size * ROW_BYTES
    least = (reference.max_model_len // reference.block_size + 3) * block_bytes
    if config.host_budget < least:
        raise UserError(
            f"host_budget: {format_bytes(config.host_budget)} cannot hold one request of "
            f"reference.max_model_len {reference.max_model_len}; give at least "
            f"{format_bytes(least)} or lower reference.max_model_len"
        )
    for name in config.engine_args:
        if name in REFERENCE_ARGS:
            raise UserError(f"engine_args.{name}: {REFERENCE_ARGS[name]}")
    blocks = slab_blocks_of_one_request(config.reference, max_multiplier)
    if reference.gpu_blocks < blocks:
        raise UserError(
            f"reference.gpu_blocks: {reference.gpu_blocks} cannot admit one request of "
            f"reference.max_model_len {reference.max_model_len}; give at least {blocks}, or lower "
            "max_model_len, max_num_batched_tokens or hot.max of the policy"
        )


def slab_blocks_of_one_request(reference: ReferenceConfig, max_multiplier: float) -> int:
    """Slab blocks that vLLM wants for one longest request, the scratch and the null block.

    Its indexer pages, the largest hot lease, and in every index group the pages of one step and
    of the step before: those still leave for the host when the next are written, and with room
    for one step only the request would preempt itself forever.
    """
    size = reference.block_size
    window = min(reference.max_num_batched_tokens, reference.max_model_len)
    query_len = 1 + reference.speculative_tokens
    lease = max_lease_rows(reference, max_multiplier)
    pages = -(-reference.max_model_len // size)
    a_group = min(2 * -(-window // size), pages) + -(-lease // size)
    scratch = scratch_block_count(
        query_len=query_len,
        topk=reference.index_topk,
        block_tokens=size,
        max_num_seqs=reference.max_num_seqs,
    )
    return pages + reference.index_groups * a_group + scratch + 1


def max_lease_rows(reference: ReferenceConfig, max_multiplier: float) -> int:
    """Hot rows of the largest lease; vLLM asks for room for the worst union of one step.

    ``max_multiplier`` is hot rows / top-k.
    """
    union = (1 + reference.speculative_tokens) * reference.index_topk
    return max(union, math.ceil(max_multiplier * reference.index_topk))


def llm_class() -> Any:
    """vLLM's engine front that refuses options that the reference model's sampler does not
    support."""
    from hisparsed.engine.reference.request_check import ReferenceLLM

    return ReferenceLLM


def _handoff_options(own: DisaggregationConfig | None) -> HandoffOptions | None:
    from hisparsed.engine.reference.handoff.worker import HandoffOptions

    if own is None:
        return None
    return HandoffOptions(
        produces=own.role == "prefill",
        consumes=own.role == "decode",
        host=own.host,
        port=own.port,
        lease_s=own.lease,
        timeout_s=own.timeout,
        peers=own.peers,
    )


def vllm_config(config: NodeConfig, *, max_multiplier: float) -> Any:
    """vLLM's configuration for the reference node; writes the model folder."""
    from hisparsed.engine.reference.model_folder import model_config, write_model_folder
    from hisparsed.engine.reference.vllm_config import ReferenceOptions, build_vllm_config

    reference = config.reference
    folder = write_model_folder(
        config.state_dir / "reference-model",
        model_config(
            layers=reference.layers,
            index_groups=reference.index_groups,
            index_topk=reference.index_topk,
            max_model_len=reference.max_model_len,
            seed=reference.seed,
        ),
    )
    options = ReferenceOptions(
        model_folder=folder,
        host_budget_bytes=config.host_budget,
        gpu_blocks=reference.gpu_blocks,
        max_lease_rows=max_lease_rows(reference, max_multiplier),
        max_model_len=reference.max_model_len,
        block_size=reference.block_size,
        max_num_seqs=reference.max_num_seqs,
        max_num_batched_tokens=reference.max_num_batched_tokens,
        ack_lag_steps=reference.ack_lag_steps,
        threads=reference.threads,
        served_model_name=SERVED_MODEL_NAME,
        engine_args=dict(config.engine_args),
        speculative_tokens=reference.speculative_tokens,
        eager_host_mirror=reference.eager_host_mirror,
        bookkeeping=config.bookkeeping,
        handoff=_handoff_options(config.disaggregation),
    )
    try:
        return build_vllm_config(options)
    except (ValueError, TypeError) as error:
        raise UserError(f"engine_args or reference: vLLM refuses them: {error}") from error
