"""Puts the errors of `mutants.yaml` into copies of the tree, one each; the tests named must fail.

They must pass without an error first. Exit code 1 when a mutant survived, 2 when nothing is known.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.mutants.mutation import WITHOUT_ENGINE, Mutant, copy_with, failures, mutants, node_ids


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="one of them, by number or name")
    parser.add_argument("--jobs", type=int, default=1, help="copies at a time")
    parser.add_argument("--whole", action="store_true", help="try all tests that need no engine")
    asked = parser.parse_args()
    numbered = enumerate(mutants(), 1)
    chosen = [one for number, one in numbered if asked.only in (None, str(number), one.name)]
    if not chosen:
        parser.error(f"no mutant is called {asked.only}")
    with copy_with(None) as tree:
        wrong = failures(tree, *node_ids(test for one in chosen for test in one.killed_by))
        before = failures(tree, *WITHOUT_ENGINE) if asked.whole else None
    if wrong:
        parser.exit(2, f"fails without a mutant: {', '.join(sorted(wrong))}\n")
    pool = ThreadPoolExecutor(asked.jobs)
    killed = list(pool.map(lambda one: is_killed(one, before), chosen))
    sys.stdout.write(f"{sum(killed)} of {len(killed)} killed\n")
    return 0 if all(killed) else 1


def is_killed(mutant: Mutant, before: set[str] | None) -> bool:
    """By every test that is named for it. With ``before``, prints the others that fail now too."""
    with copy_with(mutant) as tree:
        failed = failures(tree, *node_ids(mutant.killed_by))
        others = set() if before is None else failures(tree, *WITHOUT_ENGINE) - before - failed
    killed = failed == set(mutant.killed_by)
    lines = [f"{'killed' if killed else 'SURVIVED':8}  {mutant.name}  ({mutant.function})"]
    lines += [f"    {'fails ' if one in failed else 'PASSES'}  {one}" for one in mutant.killed_by]
    lines += [f"    fails   {one}, not named" for one in sorted(others)]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    return killed


if __name__ == "__main__":
    sys.exit(main())
