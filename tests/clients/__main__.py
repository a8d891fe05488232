"""Client libraries against a reference node: ``python -m tests.clients BUILD [NAME ...]``.

Each is installed in its own environment below ``BUILD``, at the versions of ``pins.toml``, and runs
its script with the node's address and its key. Ends with 1 where one of them failed; a library that
cannot be installed is reported and skipped.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "node"))

from serve_process import NodeFiles, ServeProcess  # noqa: E402 (its folder is no package)

SCRIPT_S = 300
KEY = "a key of the node"
ROOM = {
    # A token of the reference model is a byte, and agents send the schemas of their tools.
    "reference": {"gpu_blocks": 1200, "max_model_len": 8192},
    "host_budget": "48MiB",
}
_SHOWN_LINES = 12


def install(folder: Path, packages: list[str]) -> Path | None:
    """The environment's interpreter; ``None`` where the packages cannot be had."""
    python = folder / "bin" / "python"
    whole = folder / ".whole"
    if whole.exists() and whole.read_text("utf-8") == "\n".join(packages):
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", "install", *packages]
    if subprocess.run(command, check=False).returncode:
        return None
    whole.write_text("\n".join(packages), "utf-8")
    return python


def run(python: Path, script: Path, url: str) -> str | None:
    """The last lines of what went wrong; ``None`` where nothing did."""
    try:
        done = subprocess.run(
            [str(python), str(script), url, KEY],
            capture_output=True,
            text=True,
            check=False,
            timeout=SCRIPT_S,
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {SCRIPT_S} s"
    if not done.returncode:
        return None
    lines = done.stderr.strip().splitlines()[-_SHOWN_LINES:] or ["it says nothing"]
    return "\n    ".join([f"FAILED with {done.returncode}", *lines])


def served(folder: Path) -> ServeProcess:
    """A node that asks for a key, with room for the prompts of agents."""
    keys = folder / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{KEY}\n", "utf-8")
    files = NodeFiles(folder / "node", **ROOM)
    files.document["api"]["api_key_file"] = str(keys)
    files.write_config()
    return ServeProcess(files)


def main() -> int:
    build = Path(sys.argv[1]).absolute()
    pins: dict[str, Any] = tomllib.loads((HERE / "pins.toml").read_text("utf-8"))
    asked = {name: pins[name] for name in sys.argv[2:] or pins}
    pythons = {name: install(build / name, one["install"]) for name, one in asked.items()}
    failed = 0
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        node = served(Path(folder))
        try:
            node.wait_until_ready()
            for name, python in pythons.items():
                problem = "not installed"
                if python is not None:
                    problem = run(python, HERE / asked[name]["script"], node.url) or "ok"
                    failed += problem != "ok"
                sys.stdout.write(f"{name:14} {' '.join(asked[name]['install'])}: {problem}\n")
                sys.stdout.flush()
        finally:
            node.kill()
    installed = sum(python is not None for python in pythons.values())
    sys.stdout.write(f"{installed - failed} passed, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
