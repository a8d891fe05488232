"""The node's document: defaults, and each error with its line, its key and the expected value."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from hisparsed.config.node import (
    OWNED_ENGINE_ARGS,
    NodeConfig,
    is_loopback,
    load_node_config,
    shipped_config,
)
from hisparsed.policy.document import Loaded
from hisparsed.policy.problems import ConfigError, Problem, key_text

MEMORY = 2**40


def load(folder: Path, text: str, memory_bytes: int = MEMORY) -> Loaded[NodeConfig]:
    path = folder / "node.yaml"
    path.write_text(text, "utf-8")
    return load_node_config(path, memory_bytes=memory_bytes)


def problems(folder: Path, text: str, memory_bytes: int = MEMORY) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, memory_bytes)
    return list(caught.value.problems)


def test_shipped_document_is_valid() -> None:
    loaded = load_node_config(shipped_config("hisparsed.yaml"), memory_bytes=MEMORY)
    assert loaded.value.node == "auto"
    assert loaded.value.host_budget == 64 * 2**20
    assert loaded.value.policy.name == "policy.yaml"


def test_shipped_document_states_the_defaults() -> None:
    loaded = load_node_config(shipped_config("hisparsed.yaml"), memory_bytes=MEMORY)
    assert loaded.value.reference == NodeConfig(host_budget=2**30).reference
    assert loaded.value.api == NodeConfig(host_budget=2**30).api
    assert loaded.value.metrics == NodeConfig(host_budget=2**30).metrics
    assert loaded.value.log == NodeConfig(host_budget=2**30).log
    assert loaded.value.drain_timeout == NodeConfig(host_budget=2**30).drain_timeout


def test_relative_paths_start_at_the_document(tmp_path: Path) -> None:
    write_keys(tmp_path, "secret\n")
    text = "host_budget: 1GiB\npolicy: sub/p.yaml\nstate_dir: /var/x\ncontrol_socket: c.sock\n"
    config = load(tmp_path, text + "api: {api_key_file: keys}\n").value
    assert config.policy == tmp_path / "sub/p.yaml"
    assert config.state_dir == Path("/var/x")
    assert config.control_socket == tmp_path / "c.sock"
    assert config.api.api_key_file == tmp_path / "keys"


def test_config_is_frozen(tmp_path: Path) -> None:
    config = load(tmp_path, "host_budget: 1GiB").value
    with pytest.raises(ValidationError, match="frozen"):
        config.host_budget = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("node: auto\n", 1, "host_budget: is missing; add host_budget: the host memory of both "
         "pools together, such as 384GiB"),
        ("host_budget: 384GiB\nhost_bugdet: 1GiB\n", 2, "host_bugdet: is not a known key; "
         "did you mean host_budget?"),
        ("host_budget: 4 GB/s\n", 1, 'host_budget: "4 GB/s" is not a size; write a number with a '
         "unit such as 4GiB"),
        ("host_budget: 0GiB\n", 1, 'host_budget: "0GiB" is too small; write 1MiB or more'),
        ("node: gpu\nhost_budget: 1GiB\n", 1, 'node: "gpu" is not one of auto, cuda, reference, '
         "simulated"),
        ("host_budget: 1GiB\nnode: cuda\n", 1, "model: a cuda node has no default model; set "
         "model to a folder or a name that vLLM can load"),
        ("host_budget: 1GiB\nmodel: ''\n", 2, 'model: "" has the wrong length; write at least 1 '
         "characters or items"),
        ("host_budget: 1GiB\napi:\n  port: 0\n", 3, "api.port: 0 is too small; write 1 or more"),
        ("host_budget: 1GiB\napi:\n  port: 70000\n", 3, "api.port: 70000 is too large; write "
         "65535 or less"),
        ("host_budget: 1GiB\napi:\n  port: '80'\n", 3, 'api.port: "80" is not a whole number; '
         "write digits only"),
        ("host_budget: 1GiB\nmetrics:\n  port: true\n", 3, "metrics.port: true is not a whole "
         "number; write digits only"),
        ("host_budget: 1GiB\napi:\n  host: 0.0.0.0\n", 3, 'api.host: "0.0.0.0" can be reached from '
         "other machines, and no API key is set; set api.api_key_file, or listen on 127.0.0.1"),
        ("host_budget: 1GiB\ndrain_timeout: 30\nlog:\n  level: warn\n", 4, 'log.level: "warn" is '
         "not one of debug, info, warning, error; did you mean warning?"),
        ("host_budget: 1GiB\ndrain_timeout: soon\n", 2, 'drain_timeout: "soon" is not a time; '
         "write a time such as 30s, 250ms, 5m or 1h30m"),
        ("host_budget: 1GiB\nengine_args:\n  port: 1\n", 3, "engine_args.port: cannot be set here; "
        "set api.host or api.port"),
        ("host_budget: 1GiB\nengine_args:\n  --kv-transfer-config: x\n", 3,
         "engine_args.--kv-transfer-config: cannot be set here; the daemon sets up "
         "connectors itself; set host_budget or disaggregation"),
        ("host_budget: 1GiB\nengine_args:\n  max-model-len: 9\n", 3, "engine_args.max-model-len: "
         "is written as on a command line; write max_model_len"),
        ("host_budget: 1GiB\nreference:\n  layers: 7\n", 2, "reference.index_groups: 2 groups do "
         "not divide 7 layers evenly; each index group shares one indexer among the same number "
         "of layers"),
        ("host_budget: 1GiB\nreference:\n  max_model_len: 100\n", 3, "reference.max_model_len: 100 "
         "tokens are not whole blocks of 16; write 96"),
        ("host_budget: 1GiB\nreference:\n  seed: -1\n", 3, "reference.seed: -1 is too small; "
         "write 0 or more"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path: Path, text: str, line: int, says: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert str(problem) == f"{tmp_path / 'node.yaml'}:{line}: {says}"


@pytest.mark.parametrize("name", sorted(OWNED_ENGINE_ARGS))
def test_owned_engine_args_are_refused(tmp_path: Path, name: str) -> None:
    (problem,) = problems(tmp_path, f"host_budget: 1GiB\nengine_args:\n  {name}: 1\n")
    assert (problem.line, key_text(problem.key)) == (3, f"engine_args.{name}")
    assert problem.hint == OWNED_ENGINE_ARGS[name]


def test_other_engine_args_pass_through(tmp_path: Path) -> None:
    arguments = {"tensor_parallel_size": 8, "quantization": "fp8", "compilation_config": {"x": [1]}}
    text = f"host_budget: 1GiB\nengine_args: {json.dumps(arguments)}\n"
    assert load(tmp_path, text).value.engine_args == arguments


def test_budget_above_memory_names_both(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "node: auto\nhost_budget: 384GiB\n", 256 * 2**30)
    assert (problem.line, problem.key) == (2, ("host_budget",))
    assert problem.message.startswith("384GiB is more than the 256GiB of memory that this machine")


def test_budget_edges(tmp_path: Path) -> None:
    assert load(tmp_path, "host_budget: 1GiB", 2**30).value.host_budget == 2**30
    (problem,) = problems(tmp_path, "host_budget: 1073741825", 2**30)
    assert problem.key == ("host_budget",)


def test_a_simulated_node_needs_no_memory(tmp_path: Path) -> None:
    config = load(tmp_path, "node: simulated\nhost_budget: 1536GiB", 2**30).value
    assert config.host_budget == 1536 * 2**30


def write_keys(folder: Path, text: str, mode: int = 0o640) -> None:
    (folder / "keys").write_text(text)
    (folder / "keys").chmod(mode)


@pytest.mark.parametrize("mode", [0o644, 0o602, 0o777])
def test_a_key_file_that_everybody_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    write_keys(tmp_path, "one\n", mode)
    (open_one,) = problems(tmp_path, "host_budget: 1GiB\napi: {api_key_file: keys}\n")
    assert f"open to every user of this machine (mode {mode:04o})" in open_one.message
    assert open_one.hint == f"chmod 0640 {tmp_path / 'keys'}"


def test_key_file_must_hold_a_key(tmp_path: Path) -> None:
    text = "host_budget: 1GiB\napi:\n  host: 0.0.0.0\n  api_key_file: keys\n"
    (missing,) = problems(tmp_path, text)
    assert (missing.line, missing.key) == (4, ("api", "api_key_file"))
    assert missing.message == f"{tmp_path / 'keys'} cannot be read: No such file or directory"
    write_keys(tmp_path, "\n \n")
    (empty,) = problems(tmp_path, text)
    assert empty.message == f"{tmp_path / 'keys'} holds no key"
    assert empty.hint == "write one key per line"
    write_keys(tmp_path, "\n one \ntwo\n")
    assert load(tmp_path, text).value.api.host == "0.0.0.0"  # noqa: S104 (the point of the test)


def test_all_problems_at_once(tmp_path: Path) -> None:
    text = "node: gpu\nhost_budget: lots\napi: {port: 0}\nlog: {level: loud}\n"
    assert [problem.line for problem in problems(tmp_path, text)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104 (the point of the test)
        ("::", False),
        ("10.0.0.1", False),
        ("node7", False),
        ("", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_the_journals_limits_can_be_set_within_reason(tmp_path: Path) -> None:
    path = tmp_path / "hisparsed.yaml"
    path.write_text("host_budget: 1GiB\njournal: {max_ticks: 5000, max_size: 64MiB}\n")
    journal = load_node_config(path, memory_bytes=MEMORY).value.journal
    assert (journal.max_ticks, journal.max_size) == (5000, 64 * 2**20)
    path.write_text("host_budget: 1GiB\njournal: {max_size: 1MiB}\n")
    with pytest.raises(ConfigError, match=r"journal\.max_size"):
        load_node_config(path, memory_bytes=MEMORY)


def test_limits_on_clients_are_bounded_themselves(tmp_path: Path) -> None:
    text = "host_budget: 1GiB\napi: {limits: {header_timeout: 3s}}\n"
    limits = load(tmp_path, text).value.api.limits
    assert (limits.header_timeout, limits.connections) == (3.0, 4_096)
    for wrong in ("connections: 3", "body_timeout: 0s", "idle: 4s"):
        assert problems(tmp_path, f"host_budget: 1GiB\napi: {{limits: {{{wrong}}}}}\n")
