"""Which body a node gets, by configuration and by what the GPU probe finds."""

import pytest

from hisparsed.config.kind import detect_node_kind
from hisparsed.config.node import NodeConfig
from hisparsed.errors import UserError

EIGHT = ["NVIDIA H200"] * 8


def config(node: str, model: str | None = None) -> NodeConfig:
    return NodeConfig.model_validate({"node": node, "model": model, "host_budget": "1GiB"})


def never() -> list[str]:
    raise AssertionError("the GPUs must not be asked for")


def test_auto_with_gpus_is_cuda() -> None:
    detected = detect_node_kind(config("auto", "glm"), lambda: EIGHT)
    assert detected.kind == "cuda"
    assert detected.banner == "CUDA node: glm on 8x NVIDIA H200."


def test_auto_without_gpus_is_reference_and_says_so() -> None:
    detected = detect_node_kind(config("auto", "glm"), list)
    assert detected.kind == "reference"
    assert detected.banner.startswith("Reference node: no NVIDIA GPU was found. A small model of")


def test_auto_with_gpus_needs_a_model() -> None:
    with pytest.raises(UserError, match="found 8x NVIDIA H200, but no model is configured"):
        detect_node_kind(config("auto"), lambda: EIGHT)


def test_cuda_needs_a_gpu() -> None:
    with pytest.raises(UserError, match="no NVIDIA GPU can be seen; check nvidia-smi"):
        detect_node_kind(config("cuda", "glm"), list)


@pytest.mark.parametrize("kind", ["reference", "simulated"])
def test_named_kinds_do_not_ask_for_gpus(kind: str) -> None:
    assert detect_node_kind(config(kind), never).kind == kind


def test_mixed_gpus_are_counted() -> None:
    detected = detect_node_kind(config("auto", "m"), lambda: ["A", "B", "A"])
    assert detected.banner == "CUDA node: m on 2x A, 1x B."
