"""The configuration that comes with the package: etc/ of the repository, or of the wheel."""

from importlib.resources import files
from pathlib import Path


def shipped_config(name: str) -> Path:
    """Path of a shipped file, such as "hisparsed.yaml"; raises ``FileNotFoundError``."""
    path = Path(str(files("hisparsed"))) / "etc" / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; the installation is incomplete")
    return path
