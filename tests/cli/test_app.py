"""The `hisparsed` command: quick and light to start, clean when something is wrong."""

import subprocess
import sys
from types import ModuleType

import pytest

from hisparsed.cli import app as cli
from hisparsed.errors import EngineStartError, UserError
from hisparsed.policy.problems import ConfigError, Problem


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hisparsed", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


ENGINE = {"torch", "transformers", "vllm"}


@pytest.mark.parametrize(
    ("calls", "heavy"),
    [
        ([["--help"]], {*ENGINE, "pydantic", "textual", "yaml"}),
        ([["--version"]], {*ENGINE, "pydantic", "textual", "yaml"}),
        ([[name, "--help"] for name in cli.COMMANDS], ENGINE),
    ],
    ids=["help", "version", "help of every command"],
)
def test_help_imports_no_engine(calls: list[list[str]], heavy: set[str]) -> None:
    code = (
        "import sys\n"
        "from hisparsed.cli.app import main\n"
        f"for sys.argv[1:] in {calls}:\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        assert not end.code, end.code\n"
        f"    assert not {heavy} & sys.modules.keys(), sys.argv\n"
        "print('all of them')\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "all of them"


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.returncode == 0
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in result.stdout
        assert command.help in result.stdout


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_can_be_loaded(name: str) -> None:
    assert cli.load_command(name).name == name


def test_unknown_command_suggests() -> None:
    result = run("stats")
    assert result.returncode == 2
    assert "Did you mean 'status'?" in result.stderr


def install(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make `hisparsed broken` a command that raises ``error``."""

    def broken() -> None:
        """Fail."""
        raise error

    module = ModuleType("broken_command")
    module.__dict__["broken"] = broken
    monkeypatch.setitem(sys.modules, "broken_command", module)
    monkeypatch.setitem(
        cli.COMMANDS, "broken", cli.LazyCommand("broken_command", "broken", "Fail.")
    )
    monkeypatch.setattr(sys, "argv", ["hisparsed", "broken"])


def test_user_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, UserError("port 8000 is taken; choose another"))
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "hisparsed: port 8000 is taken; choose another\n"


def test_an_engine_that_does_not_start_may_another_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The service manager does not try again after 2."""
    install(monkeypatch, EngineStartError("EngineCore was killed by SIGKILL"))
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 70
    assert "did not start: EngineCore was killed by SIGKILL" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_stop_before_the_documents_are_read_is_a_clean_stop(number: str) -> None:
    """As process 1 of a container a signal without a handler would be lost."""
    told = (
        "import os, signal\n"
        "import hisparsed.config.machine as machine\n"
        f"machine.machine_memory_bytes = lambda: os.kill(os.getpid(), signal.{number})\n"
        "from hisparsed.cli.app import main\n"
        "main()\n"
    )
    words = [sys.executable, "-c", told, "serve", "--config", "nowhere.yaml"]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_config_error_shows_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = Problem("node.yaml", 1, 7, ("node",), '"gpu"', '"gpu" is not one of auto, cuda')
    install(monkeypatch, ConfigError((problem,), "node: gpu\n"))
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        'hisparsed: node.yaml:1: node: "gpu" is not one of auto, cuda\n'
        "  1 | node: gpu\n"
        "    |       ^\n"
    )


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main()
