"""The shape of the reference model, and the folder that vLLM loads it from.

The reference model is a small sparse-MLA (DSA) transformer for the CPU node. It describes no
real checkpoint: only the ratios (index groups, indexer row to KV row) follow one.
``ReferenceGeometry`` is read from the folder's ``config.json`` through vLLM's ``hf_config``, so
that the scheduler, the API process and the executor agree on one source.

The tokenizer works on bytes: token ids 0..255 are the bytes of UTF-8, special tokens follow. It
is written as ordinary Hugging Face files, so vLLM's own endpoints work unchanged. Imports no
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hisparsed.atomic_file import write_atomically

ROW_BYTES = 128
"""Bytes of one sparse-MLA row: 128 int8 latents, one row per token and layer."""
INDEX_DIM = 64
INDEX_ROW_BYTES = INDEX_DIM + 4
"""Bytes of one indexer row: 64 int8 key values and one float32 scale."""


class HfConfig(Protocol):
    """The attributes that ``hisparsed.engine.reference.model_folder`` writes."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    index_topk: int
    index_n_groups: int
    index_n_heads: int
    max_position_embeddings: int
    reference_seed: int


@dataclass(frozen=True)
class ReferenceGeometry:
    """Sizes of the reference model; all counts, no bytes.

    ``layers`` is split evenly into ``index_groups``; the first layer of each group owns an
    indexer, the others reuse its top-k.
    """

    layers: int
    index_groups: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    index_topk: int
    index_heads: int
    max_model_len: int
    seed: int

    def __post_init__(self) -> None:
        if self.layers % self.index_groups:
            raise ValueError(
                f"{self.layers} layers do not divide into {self.index_groups} index groups"
            )
        if self.index_topk < 1:
            raise ValueError(f"index_topk must be at least 1, got {self.index_topk}")

    @property
    def layers_per_group(self) -> int:
        return self.layers // self.index_groups

    def group_layers(self, group: int) -> range:
        """Layer numbers of index group ``group``, leader first."""
        start = group * self.layers_per_group
        return range(start, start + self.layers_per_group)

    @classmethod
    def from_hf_config(cls, config: HfConfig) -> ReferenceGeometry:
        return cls(
            layers=config.num_hidden_layers,
            index_groups=config.index_n_groups,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            index_topk=config.index_topk,
            index_heads=config.index_n_heads,
            max_model_len=config.max_position_embeddings,
            seed=config.reference_seed,
        )


def kv_layer_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.mla"


def indexer_layer_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.indexer"


SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
VOCAB_SIZE = 264
"""256 bytes and the special tokens, padded to a multiple of 8."""
EOS_TOKEN_ID = 256 + SPECIAL_TOKENS.index("<|eos|>")
_FILE_MODE = 0o600

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, by byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


def _put(path: Path, text: str) -> None:
    """Does nothing if ``text`` is there already, so that an engine can start again on a full
    disk."""
    data = text.encode()
    if not path.is_file() or path.read_bytes() != data:
        write_atomically(path, data, mode=_FILE_MODE)


def write_model_folder(folder: Path, model_config: Mapping[str, object]) -> Path:
    """Write ``config.json`` and tokenizer files under ``folder``; returns it.

    Safe to call again: files are replaced whole, or left where they are right. Raises ``OSError``
    when one has to be written and cannot.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_config["max_position_embeddings"],
        "chat_template": _CHAT_TEMPLATE,
    }
    _put(folder / "tokenizer.json", tokenizer.to_str())
    _put(folder / "tokenizer_config.json", json.dumps(tokenizer_config, indent=1))
    _put(folder / "config.json", json.dumps(dict(model_config), indent=1))
    return folder


def model_config(
    *,
    layers: int,
    index_groups: int,
    index_topk: int,
    max_model_len: int,
    seed: int,
    hidden: int = 128,
    heads: int = 4,
    index_heads: int = 2,
) -> dict[str, object]:
    """``config.json`` of the reference model.

    The architecture is one that vLLM does not treat as MLA: for MLA models its CPU platform
    switches prefix caching and chunked prefill off. ``index_topk`` is what HiSparse asks for.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 2 * hidden,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 256,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
        "index_topk": index_topk,
        "index_n_groups": index_groups,
        "index_n_heads": index_heads,
        "reference_seed": seed,
    }
