"""The tests import the runner's own module."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
