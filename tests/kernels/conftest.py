"""One import path for the folder: the oracle and the harness are plain modules here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
