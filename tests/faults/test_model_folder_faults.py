"""The folder that the reference engine loads its model from, on a disk without room."""

from __future__ import annotations

import pytest
from state_node import RealDisk

from hisparsed.engine.reference.tokenizer import model_config, write_model_folder


def config(max_model_len: int) -> dict[str, object]:
    return model_config(
        layers=2, index_groups=1, index_topk=16, max_model_len=max_model_len, seed=0
    )


def test_an_engine_that_ran_starts_again_on_a_full_disk(real_disk: RealDisk) -> None:
    folder = write_model_folder(real_disk.folder / "model", config(512))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with real_disk.full():
        write_model_folder(folder, config(512))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_model_that_has_no_room_is_told_by_its_file_and_leaves_nothing(
    real_disk: RealDisk,
) -> None:
    folder = write_model_folder(real_disk.folder / "model", config(512))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with real_disk.full(), pytest.raises(OSError, match=r"No space left.*config\.json"):
        write_model_folder(folder, config(1024))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
