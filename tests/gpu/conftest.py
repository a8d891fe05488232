"""One import path for the suite, its steps and the miniature worker of tests/engine/cuda."""

import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HISPARSED_ENGINE"] = "1"
HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "engine" / "cuda", HERE.parent / "engine"):
    sys.path.insert(0, str(folder))
