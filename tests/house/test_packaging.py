"""The top-level folders as one package: from anywhere, and as transformers sees the root."""

import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import hisparsed

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def run(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_every_folder_has_its_link() -> None:
    folders = PROJECT["tool"]["setuptools"]["package-dir"]
    for package, folder in folders.items():
        link = ROOT / package.replace(".", "/")
        assert link.resolve() == ROOT / folder
        assert package == "hisparsed" or (link.is_symlink() and not link.readlink().is_absolute())


def test_packages_import_from_anywhere(tmp_path: Path) -> None:
    code = (
        "import hisparsed.policy.units as units, hisparsed.kernels.api as api\n"
        "print(units.__file__, api.__file__)"
    )
    elsewhere = run(code, tmp_path).split()
    assert run(code, ROOT).split() == elsewhere
    assert [Path(path).resolve() for path in elsewhere] == [
        ROOT / "policy/units.py",
        ROOT / "kernels/api.py",
    ]


def test_kernels_has_no_init() -> None:
    assert (ROOT / "kernels").is_dir()
    assert not (ROOT / "kernels/__init__.py").exists()


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    code = (
        "from importlib.util import find_spec\n"
        "from transformers.utils import is_kernels_available\n"
        "print(is_kernels_available(), find_spec('kernels').origin)"
    )
    assert run(code, ROOT) == "False None"  # without an origin it is no installed package


def test_version_and_entry_points() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="hisparsed")
    assert callable(plugin.load())
    (command,) = entry_points(group="console_scripts", name="hisparsed")
    assert command.dist is not None
    assert command.dist.version == hisparsed.__version__


def test_stat_logger_entry_point_is_what_vllm_asks_for() -> None:
    code = (
        "from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories as load\n"
        "print([f.__qualname__ for f in load() if f.__module__.startswith('hisparsed')])"
    )
    assert run(code, ROOT).splitlines()[-1] == "['HisparsedStatLogger']"


def test_locks_hold_exact_pins_only() -> None:
    for name in ("requirements-cpu.txt", "requirements-dev.txt", "requirements-cuda.txt"):
        lines = (ROOT / name).read_text("utf-8").splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert pins == sorted(
            pins, key=lambda pin: pin.partition("==")[0].lower().replace("_", "-")
        )
        assert all(pin.count("==") == 1 and " " not in pin for pin in pins)
    cpu = (ROOT / "requirements-cpu.txt").read_text("utf-8")
    assert not any(line.startswith(("nvidia-c", "torchvision")) for line in cpu.splitlines())
