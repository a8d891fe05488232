"""Client libraries against a reference node: ``python -m tests.clients BUILD [NAME ...]``.

Each is installed in an environment of its own below ``BUILD``, at the versions of ``pins.toml``,
and runs its script with the node's address. Ends with 1 where one of them failed; what cannot be
installed is said and left out.
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

SCRIPT_S = 180


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
    """The last line of what went wrong; ``None`` where nothing did."""
    done = subprocess.run(
        [str(python), str(script), url],
        capture_output=True,
        text=True,
        check=False,
        timeout=SCRIPT_S,
    )
    if not done.returncode:
        return None
    return (done.stderr.strip().splitlines() or ["it says nothing"])[-1]


def main() -> int:
    build = Path(sys.argv[1])
    pins: dict[str, Any] = tomllib.loads((HERE / "pins.toml").read_text("utf-8"))
    asked = {name: pins[name] for name in sys.argv[2:] or pins}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        node = ServeProcess(NodeFiles(Path(folder)))
        try:
            node.wait_until_ready()
            for name, client in asked.items():
                python = install(build / name, client["install"])
                problem = "not installed" if python is None else None
                if python is not None:
                    problem = run(python, HERE / client["script"], node.url)
                    failed += problem is not None
                sys.stdout.write(f"{name:14} {problem or 'ok'}\n")
                sys.stdout.flush()
        finally:
            node.kill()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
