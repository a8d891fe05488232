"""Turns block ids into prompts: the same id always gives the same tokens, whichever call holds it.

Tokens are pseudo-random in a range every vocabulary has. Recorded content stands throughout: the
next recorded input already contains the recorded response, so responses of the replayed endpoint
are never spliced in, and a replay sends the same prompts whatever comes back.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import shake_128

from hisparsed.errors import UserError
from hisparsed.replay.model import block_ids
from hisparsed.replay.scale import Scale, ScaledCall

_HASH_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token ids from `low` to below `high`; the default is printable ASCII."""

    low: int = 32
    high: int = 127

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high - 1:
            raise UserError(
                f"token range: {self.low}:{self.high} is not right; need LOW:HIGH with LOW 0 or "
                "more and at least two ids below HIGH"
            )

    @property
    def is_ascii_text(self) -> bool:
        """Whether each id is also the code of a printable character."""
        return self.low >= 32 and self.high <= 127


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Builds prompts of one scaled trace. `seed` changes every token and no prefix relation."""

    scale: Scale
    seed: int
    tokens: TokenRange

    def token_ids(self, call: ScaledCall) -> list[int]:
        """The prompt of `call`, exactly `call.input_tokens` ids."""
        ids: list[int] = []
        for position, block in enumerate(block_ids(call.blocks), start=1):
            ids.extend(self._block(block, self.scale.block_start(position) - len(ids)))
        ids.extend(self._block(call.tail_block, call.input_tokens - len(ids)))
        return ids

    def text(self, call: ScaledCall) -> str:
        """The prompt as printable characters, one for each token id.

        Raises UserError when the token range is not printable ASCII.
        """
        if not self.tokens.is_ascii_text:
            raise UserError(
                f"token range: {self.tokens.low}:{self.tokens.high} has ids that are no printable "
                "characters; text prompts need a range within 32:127"
            )
        return bytes(self.token_ids(call)).decode("ascii")

    def _block(self, block: int, count: int) -> Iterator[int]:
        # An extendable hash: a shorter block is a prefix of a longer one with the same id.
        raw = shake_128(f"{self.seed} {block}".encode()).digest(count * _HASH_BYTES_PER_TOKEN)
        width = self.tokens.high - self.tokens.low
        for at in range(0, len(raw), _HASH_BYTES_PER_TOKEN):
            word = int.from_bytes(raw[at : at + _HASH_BYTES_PER_TOKEN], "little")
            yield self.tokens.low + word % width
