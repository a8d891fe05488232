"""`make crash`: kills at random moments of start, serve, restart and stop; nothing may be left.

Exit code 1 at the first that leaves something; the seed and the number of the kill repeat it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.crash.kills import Crashes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="c-") as folder:
        crashes = Crashes(Path(folder), random.Random(asked.seed))
        try:
            for number in range(asked.kills):
                said = crashes.kill()
                counts[said.rpartition(" into ")[2]] += 1
                sys.stdout.write(f"{number + 1:4} {said}\n")
                sys.stdout.flush()
        except AssertionError as error:
            sys.stdout.write(f"{error}\n")
            return 1
        finally:
            crashes.close()
    sys.stdout.write(f"{asked.kills} kills, nothing left: {dict(counts)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
