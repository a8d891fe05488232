"""vLLM in this process: no engine-core child, our plugin active, one import for the folder."""

import os
import sys
from pathlib import Path

import pytest

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HISPARSED_ENGINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all the engines of one module: what they load is written once."""
    return tmp_path_factory.mktemp("engine")
