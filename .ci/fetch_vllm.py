"""Fetches the Python sources of vLLM's CUDA wheels; `make contract` calls it.

Keeps `FOLDER/<version>/vllm` and throws the wheels away. Versions that cannot be fetched are
reported and skipped: without a network the contract tests then skip, they do not fail.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hisparsed.engine.compat.versions import TESTED

COMPLETE = ".complete"
"""Written last, so that an interrupted fetch starts again."""
LONGEST_S = 900


def fetch(version: str, folder: Path) -> str | None:
    """Why the sources of `version` are not in `folder`; `None` when they are."""
    target = folder / version
    if (target / COMPLETE).exists():
        return None
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        command += ["download", "-qq", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
        command += ["--retries", "1", "--timeout", "20", "--dest", wheels, f"vllm=={version}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LONGEST_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"pip took more than {LONGEST_S} s"
        found = list(Path(wheels).glob("*.whl"))
        if done.returncode or not found:
            return (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        with zipfile.ZipFile(found[0]) as wheel:
            wheel.extractall(target, [name for name in wheel.namelist() if name.endswith(".py")])
    (target / COMPLETE).touch()
    return None


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for version in TESTED:
        problem = fetch(version, folder)
        state = "there" if problem is None else f"not fetched: {problem}"
        sys.stdout.write(f"vLLM {version}: {state}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
