"""Sampling of the reference node: vLLM's own sampler over every row of a step.

A row is one position that a token is wanted for: a request has one, and one more for each draft.
Rows are sampled as if each were its own request whose output ends with the drafts before it;
a request's tokens are those up to its first wrong draft. So drafts change how fast tokens come,
never which.

Random numbers are a function of seed (or request id) and position: a preempted and resumed
request samples the same tokens again. Greedy ties go to the lowest token id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.logits_processor.state import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from hisparsed.engine.reference.grammar import closing_bias
from hisparsed.engine.reference.model_folder import EOS_TOKEN_ID, VOCAB_SIZE
from hisparsed.engine.reference.requests import RequestState

_LOGIT_SCALE = 2.0**-12
"""Integer logits to natural units; a power of two keeps them exact."""
_NEVER = -1000.0
_GREEDY_BELOW = 1e-5
_CPU = torch.device("cpu")


def _printable_bias() -> torch.Tensor:
    """The head's bias for each token: bytes that are not printable ASCII are never sampled, unless
    a grammar or a client allows nothing else."""
    bias = torch.full((VOCAB_SIZE,), _NEVER)
    bias[32:127] = 0.0
    bias[ord("\n")] = 0.0
    bias[EOS_TOKEN_ID] = 0.0
    return bias


_BIAS = _printable_bias()


def natural_logits(logits: torch.Tensor) -> torch.Tensor:
    """Integer logits ``[N, VOCAB_SIZE]`` of the model as those that tokens are sampled from."""
    return logits * _LOGIT_SCALE + _BIAS


@dataclass(frozen=True)
class SampledRequest:
    """One request of the step: its next token is wanted, and those after each draft."""

    request_id: str
    state: RequestState
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Row:
    """One position to sample, ``ahead`` drafts beyond the certain tokens."""

    wanted: SampledRequest
    ahead: int

    @property
    def params(self) -> Any:
        return self.wanted.state.params

    @property
    def at(self) -> int:
        """Output tokens before it."""
        return self.wanted.state.generated + self.ahead

    def output(self) -> list[int]:
        state = self.wanted.state
        return [*state.tokens[state.prompt_len :], *self.wanted.drafts[: self.ahead]]


class StepSampler:
    """Stateless between steps."""

    def __init__(self) -> None:
        self._sampler = Sampler()

    def sample(
        self,
        logits: torch.Tensor,
        wanted: Sequence[SampledRequest],
        allowed: Mapping[str, torch.Tensor],
    ) -> tuple[dict[str, list[int]], dict[str, LogprobsLists]]:
        """New tokens by request, and log probabilities of those that asked for them.

        ``logits`` in natural units, one row a position in the order of ``wanted``. ``allowed``:
        bool ``[rows, VOCAB_SIZE]`` of requests under a grammar.
        """
        rows = [_Row(one, ahead) for one in wanted for ahead in range(1 + len(one.drafts))]
        logits = _under_grammar(logits, rows, allowed)
        # Compiling, which vLLM does for a GPU's speed, would need a C++ compiler and seconds here.
        with torch.compiler.set_stance("force_eager"):
            found = self._sampler(logits, _metadata(rows))
        chosen = found.sampled_token_ids[:, 0].tolist()
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, LogprobsLists] = {}
        start = 0
        for one in wanted:
            accepted = _up_to_first_wrong(chosen[start : start + 1 + len(one.drafts)], one.drafts)
            tokens[one.request_id] = accepted
            if one.state.params.logprobs is not None:
                end = start + len(accepted)
                logprobs[one.request_id] = _slice(found.logprobs_tensors, start, end)
            start += 1 + len(one.drafts)
        return tokens, logprobs

    def prompt_logprobs(
        self, logits: torch.Tensor, following: Sequence[int], count: int
    ) -> LogprobsTensors:
        """Log probabilities of the tokens that follow prompt positions, and the best ``count``.

        ``logits`` in natural units, one row a position; ``count`` -1 is the whole vocabulary.
        """
        with torch.compiler.set_stance("force_eager"):
            scores = self._sampler.compute_logprobs(logits)
            return self._sampler.gather_logprobs(
                scores, _most(count), torch.tensor(following, dtype=torch.int64)
            )


def _most(count: int) -> int:
    return VOCAB_SIZE if count == -1 else count


def _up_to_first_wrong(chosen: Sequence[int], drafts: Sequence[int]) -> list[int]:
    right = 0
    while right < len(drafts) and chosen[right] == drafts[right]:
        right += 1
    return list(chosen[: right + 1])


def _slice(tensors: LogprobsTensors, start: int, end: int) -> LogprobsLists:
    return LogprobsLists(
        tensors.logprob_token_ids[start:end].numpy(),
        tensors.logprobs[start:end].numpy(),
        tensors.selected_token_ranks[start:end].numpy(),
    )


def _under_grammar(
    logits: torch.Tensor, rows: Sequence[_Row], allowed: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    under = [at for at, row in enumerate(rows) if row.wanted.request_id in allowed]
    if not under:
        return logits
    masks = torch.stack([allowed[rows[at].wanted.request_id][rows[at].ahead] for at in under])
    begins = torch.tensor([rows[at].at == 0 for at in under])
    bias = closing_bias(masks, begins)
    logits[under] = (logits[under] + bias).masked_fill(~masks, float("-inf"))
    return logits


def _metadata(rows: Sequence[_Row]) -> SamplingMetadata:
    """The sampler input of ``rows``; only what some row asks for is filled in."""
    params = [row.params for row in rows]
    random = [one.temperature >= _GREEDY_BELOW for one in params]
    penalties = any(
        one.presence_penalty or one.frequency_penalty or one.repetition_penalty != 1.0
        for one in params
    )
    bad_words = {
        at: one.bad_words_token_ids for at, one in enumerate(params) if one.bad_words_token_ids
    }
    processors = _processors(rows)
    output = [row.output() for row in rows] if penalties or bad_words else []
    counts = [_most(one.logprobs) for one in params if one.logprobs is not None]
    return SamplingMetadata(
        temperature=_floats(one.temperature for one in params) if any(random) else None,
        all_greedy=not any(random),
        all_random=all(random),
        top_p=_floats(one.top_p for one in params)
        if any(one.top_p < 1 for one in params)
        else None,
        top_k=torch.tensor([one.top_k if one.top_k > 0 else VOCAB_SIZE for one in params])
        if any(0 < one.top_k < VOCAB_SIZE for one in params)
        else None,
        generators={at: _generator(row) for at, row in enumerate(rows) if random[at]},
        max_num_logprobs=max(counts, default=None),
        no_penalties=not penalties,
        prompt_token_ids=_prompts(rows) if penalties else None,
        frequency_penalties=_floats(one.frequency_penalty for one in params),
        presence_penalties=_floats(one.presence_penalty for one in params),
        repetition_penalties=_floats(one.repetition_penalty for one in params),
        output_token_ids=output,
        allowed_token_ids_mask=_forbidden(params),
        bad_words_token_ids=bad_words,
        logitsprocs=processors,
    )


def _floats(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float32)


def _generator(row: _Row) -> torch.Generator:
    seed = row.params.seed
    name = row.wanted.request_id if seed is None else str(seed)
    digest = blake2b(f"{name}:{row.at}".encode(), digest_size=8).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    return generator


def _prompts(rows: Sequence[_Row]) -> torch.Tensor:
    """Padded with ``VOCAB_SIZE``, as vLLM does."""
    states = [row.wanted.state for row in rows]
    prompts = torch.full((len(rows), max(one.prompt_len for one in states)), VOCAB_SIZE)
    for prompt, state in zip(prompts, states, strict=True):
        prompt[: state.prompt_len] = torch.tensor(state.tokens[: state.prompt_len])
    return prompts


def _forbidden(params: Sequence[Any]) -> torch.Tensor | None:
    """True where a client's ``allowed_token_ids`` leave a token out."""
    if not any(one.allowed_token_ids for one in params):
        return None
    mask = torch.zeros((len(params), VOCAB_SIZE), dtype=torch.bool)
    for row, one in zip(mask, params, strict=True):
        if one.allowed_token_ids:
            row.fill_(True)
            row[one.allowed_token_ids] = False
    return mask


def _processors(rows: Sequence[_Row]) -> LogitsProcessors:
    """vLLM's own for ``min_tokens``, ``logit_bias`` and ``min_p``, made for these rows."""
    if not any(
        row.params.min_p or row.params.logit_bias or row.at < row.params.min_tokens for row in rows
    ):
        return LogitsProcessors()
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(rows)))
    update = BatchUpdate(
        batch_size=len(rows),
        removed=(),
        added=[(at, row.params, None, row.output()) for at, row in enumerate(rows)],
        moved=(),
    )
    made = (
        MinTokensLogitsProcessor(config, _CPU, False),
        LogitBiasLogitsProcessor(config, _CPU, False),
        MinPLogitsProcessor(config, _CPU, False),
    )
    for processor in made:
        processor.update_state(update)
    return LogitsProcessors(made)
