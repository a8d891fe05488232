"""Damaged documents: whatever is done to a good one, the answer is a model or a ConfigError."""

import random
from pathlib import Path

import pytest
from pydantic import BaseModel

from hisparsed.config.node import NodeConfig, shipped_config
from hisparsed.policy.document import load_document, parse_document
from hisparsed.policy.problems import ConfigError
from hisparsed.policy.schema import Policy
from tests.examples import examples
from tests.fuzz.mutate import MISTAKES, damaged

MUTATIONS = examples(60, 200)


@pytest.mark.parametrize(
    ("name", "model"), [("hisparsed.yaml", NodeConfig), ("policy.yaml", Policy)]
)
def test_damage_ends_in_a_model_or_a_config_error(name: str, model: type[BaseModel]) -> None:
    text = shipped_config(name).read_text("utf-8")
    rng = random.Random(20260101)
    refused = 0
    for _ in range(MUTATIONS):
        document = damaged(text, rng, MISTAKES)
        try:
            parse_document(document, name, model)
        except ConfigError as error:
            refused += 1
            assert error.problems
            lines = [problem.line for problem in error.problems]
            assert lines == sorted(lines)
            assert max(lines) <= document.count("\n") + 2
            assert str(error).count(name) >= len(lines)
            assert error.render()
    assert refused > MUTATIONS / 4


def test_random_bytes_end_in_a_config_error(tmp_path: Path) -> None:
    rng = random.Random(7)
    path = tmp_path / "noise.yaml"
    for size in range(1, 400, 7):
        path.write_bytes(rng.randbytes(size))
        with pytest.raises(ConfigError):
            load_document(path, NodeConfig)
