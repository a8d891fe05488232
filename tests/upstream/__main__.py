"""Every reproduction in turn: ``python -m tests.upstream [--json]``. 1 where a fault shows."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module

from tests.upstream.known import FAULTS
from tests.upstream.outcome import only_errors


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    only_errors()
    from vllm import __version__

    found: dict[str, str | None] = {}
    for fault in FAULTS:
        found[fault.name] = import_module(f"tests.upstream.{fault.name}").reproduce()
        if not arguments.json:
            sys.stdout.write(f"{fault.name}: {found[fault.name] or 'does not show.'}\n")
            sys.stdout.flush()
    if arguments.json:
        sys.stdout.write(json.dumps({"version": __version__, "found": found}) + "\n")
    sys.exit(1 if any(found.values()) else 0)


if __name__ == "__main__":
    main()
