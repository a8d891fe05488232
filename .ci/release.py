"""Builds the release and tries it; `make release-check` calls it.

`release.py build DIST` writes an sdist and a wheel, the wheel from the unpacked sdist, and compares
what is in them with the tracked files. `release.py try DIST PYTHON` installs each of the two with
`--no-deps` over the locked environment of PYTHON, in turn, and serves a call from it, in an empty
folder. Ends with 1 and what is wrong.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Mapping
from configparser import ConfigParser
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START_S = 300
STOP_S = 60


class ReleaseError(Exception):
    """The release is wrong; the message says how."""


def expected_files(tracked: Iterable[str], folders: Mapping[str, str]) -> set[str]:
    """Paths in a wheel, from tracked files and `package-dir` of pyproject.toml."""
    found = set()
    for path in map(PurePosixPath, tracked):
        for package, folder in folders.items():
            if path.is_relative_to(folder):
                found.add(str(PurePosixPath(package.replace(".", "/")) / path.relative_to(folder)))
    return found


def compare(wheel_files: Iterable[str], expected: set[str]) -> list[str]:
    """Sentences on what is in the wheel and should not be, and the other way round."""
    packed = {name for name in wheel_files if ".dist-info/" not in name}
    compiled = {name for name in packed if name.endswith(".so")}
    wrong = [f"{name} is not in the wheel" for name in sorted(expected - packed)]
    wrong += [
        f"{name} is in the wheel, not tracked" for name in sorted(packed - expected - compiled)
    ]
    if not any(name.startswith("hisparsed/kernels/_cpp") for name in compiled):
        wrong.append("the wheel has no compiled kernels; is there a C++ compiler?")
    return wrong


def compare_entry_points(text: str, project: Mapping[str, Any]) -> list[str]:
    """`text` is a wheel's entry_points.txt; `project` is pyproject.toml's table of that name."""
    parser = ConfigParser(delimiters=("=",))
    parser.read_string(text)
    packed = {group: dict(parser[group]) for group in parser.sections()}
    asked = {"console_scripts": dict(project["scripts"]), **project["entry-points"]}
    return [] if packed == asked else [f"entry points are {packed}, pyproject.toml says {asked}"]


def git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.split("\0") if line]


def tracked_files() -> list[str]:
    """Tracked files that are there; links are skipped, because their targets are tracked too."""
    links = {
        line.partition("\t")[2] for line in git("ls-files", "-sz") if line.startswith("120000")
    }
    return [name for name in git("ls-files", "-z") if name not in links and (ROOT / name).exists()]


def call_backend(folder: Path, hook: str, dist: Path) -> Path:
    code = f"import setuptools.build_meta as b; print(b.{hook}({str(dist)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(f"{hook}: {done.stderr.strip()[-2000:]}")
    return dist / done.stdout.split()[-1]


def build(dist: Path) -> None:
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        tracked = tracked_files()
        for name in tracked:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
        sdist = call_backend(source, "build_sdist", dist.resolve())
        with tarfile.open(sdist) as packed:
            packed.extractall(scratch, filter="data")
        unpacked = Path(scratch) / sdist.name.removesuffix(".tar.gz")
        wheel = call_backend(unpacked, "build_wheel", dist.resolve())
    with zipfile.ZipFile(wheel) as packed_wheel:
        names = packed_wheel.namelist()
        (points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        text = packed_wheel.read(points).decode()
    folders = pyproject["tool"]["setuptools"]["package-dir"]
    wrong = compare(names, expected_files(tracked, folders))
    wrong += compare_entry_points(text, pyproject["project"])
    if wrong:
        raise ReleaseError("\n".join(wrong))
    print(f"release: {sdist.name} and {wheel.name}, {len(names)} files, as tracked")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ReleaseError(f"`hisparsed serve` ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                return
        except OSError:
            time.sleep(0.5)
    raise ReleaseError(f"`hisparsed serve` was not ready within {START_S} s")


def serve_once(bin_folder: Path, version: str) -> None:
    """Start a reference node in an empty folder, complete a chat, look at it, and stop it."""
    with tempfile.TemporaryDirectory(prefix="hsp-") as name:
        folder, port = Path(name), free_port()
        # No path of the checkout may be in the way of the installed package.
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment = clean | {"HISPARSED_SOCKET": f"{folder}/control.sock"}
        document = folder / "hisparsed.yaml"
        document.write_text(
            "node: reference\nhost_budget: 64MiB\nstate_dir: state\n"
            f"control_socket: control.sock\napi: {{host: 127.0.0.1, port: {port}}}\n"
            f"metrics: {{host: 127.0.0.1, port: {free_port()}}}\n"
        )
        code = "from hisparsed.config.node import shipped_config as s; print(s('policy.yaml'))"
        shipped = subprocess.run(
            [str(bin_folder / "python"), "-c", code],
            cwd=folder, env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        shutil.copy(shipped.stdout.strip(), folder / "policy.yaml")
        hisparsed = str(bin_folder / "hisparsed")
        log = (folder / "log").open("wb")
        process = subprocess.Popen(
            [hisparsed, "serve", "--config", str(document)],
            cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process)
            model = ask(f"{url}/v1/models")["data"][0]["id"]
            chat = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
            answer = ask(f"{url}/v1/chat/completions", chat | {"max_tokens": 4})
            if answer["usage"]["completion_tokens"] < 1:
                raise ReleaseError(f"no token in {answer}")
            shown = subprocess.run(
                [hisparsed, "status"], cwd=folder, env=environment,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if shown.returncode or f"hisparsed {version}" not in shown.stdout:
                raise ReleaseError(f"`hisparsed status`: {shown.stdout}{shown.stderr}")
            process.send_signal(signal.SIGTERM)
            code = process.wait(STOP_S)
            if code:
                raise ReleaseError(f"`hisparsed serve` ended with {code} after SIGTERM")
        except Exception:
            print((folder / "log").read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
            log.close()


def try_all(dist: Path, python: Path) -> None:
    for pattern in ("*.whl", "*.tar.gz"):
        (packed,) = dist.glob(pattern)
        version = packed.name.removesuffix(".tar.gz").split("-")[1]
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "-qq"]
        for step in (
            ["uninstall", "--yes", "hisparsed"],
            ["install", "--no-deps", "--no-build-isolation", str(packed)],
        ):
            subprocess.run([*pip, *step], check=True)
        began_s = time.monotonic()
        serve_once(python.parent, version)
        print(f"release: {packed.name} serves, {time.monotonic() - began_s:.0f} s")


def main() -> None:
    try:
        match sys.argv[1:]:
            case ["build", dist]:
                build(Path(dist))
            case ["try", dist, python]:
                try_all(Path(dist), Path(python).absolute())
            case _:
                raise SystemExit(__doc__)
    except (ReleaseError, subprocess.SubprocessError, urllib.error.URLError) as error:
        raise SystemExit(f"release: {error}") from None


if __name__ == "__main__":
    main()
