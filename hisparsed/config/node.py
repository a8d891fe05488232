"""The node document (`hisparsed.yaml`): what the daemon needs to start one node.

Reads the file and checks it against the machine. Starts nothing and opens no sockets. Settings that
can change while the node runs are in the policy document. ``shipped_config`` finds the documents
that come with the package.
"""

import ipaddress
import stat
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hisparsed.config.frontend import OWNED_FRONTEND_ARGS, file_problems, in_folder
from hisparsed.config.sections import (
    ApiLimits,
    CudaConfig,
    DisaggregationConfig,
    ReferenceConfig,
    SupervisionConfig,
)
from hisparsed.policy.document import Loaded, load_document
from hisparsed.policy.problems import Problem, refuse
from hisparsed.policy.units import ByteSize, Duration, format_bytes


def shipped_config(name: str) -> Path:
    """Path of a shipped file, such as "hisparsed.yaml"; raises ``FileNotFoundError``."""
    path = Path(str(files("hisparsed"))) / "etc" / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; the installation is incomplete")
    return path


_LISTEN: Final = "set api.host or api.port"
_CONNECTORS: Final = "the daemon sets up connectors itself; set host_budget or disaggregation"
OWNED_ENGINE_ARGS: Final = {
    "model": "set model, at the top level",
    "host": _LISTEN,
    "port": _LISTEN,
    "uds": _LISTEN,
    "api_key": "set api.api_key_file",
    "kv_transfer_config": _CONNECTORS,
    "kv_offloading_size": _CONNECTORS,
    "kv_offloading_backend": _CONNECTORS,
    "scheduler_cls": "the daemon's scheduler carries out admission",
    "scheduling_policy": "admission.order of the policy says which call starts first",
    "disable_hybrid_kv_cache_manager": "HiSparse needs the hybrid manager",
    "disable_log_stats": "the control loop reads the engine's statistics",
}
"""Engine arguments that the daemon sets, each with the alternative."""

Port = Annotated[int, Field(ge=1, le=65535, strict=True)]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``; a name that is not `localhost` is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ApiConfig(_Section):
    """Where the OpenAI API listens."""

    host: str = "127.0.0.1"
    port: Port = 8000
    api_key_file: Path | None = None
    """One key per line; clients must send one of them. Relative to this document."""
    limits: ApiLimits = ApiLimits()

    @model_validator(mode="after")
    def _not_open_to_all(self) -> Self:
        if self.api_key_file is None and not is_loopback(self.host):
            raise refuse(
                "open_api",
                f'"{self.host}" can be reached from other machines, and no API key is set',
                hint="set api.api_key_file, or listen on 127.0.0.1",
                key=("host",),
            )
        return self


class MetricsConfig(_Section):
    """Where Prometheus reads `/metrics`; the API's own address serves both."""

    host: str = "127.0.0.1"
    port: Port = 9400


class LogConfig(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json"] = "auto"
    """`auto` is text on a terminal and JSON elsewhere."""


class JournalConfig(_Section):
    """The size of the journal; the oldest ticks are deleted first."""

    max_ticks: int = Field(default=200_000, ge=1_000, le=10**9)
    """Two days at one tick per second."""
    max_size: ByteSize = Field(default=512 * 2**20, ge=8 * 2**20, le=2**50)


class NodeConfig(_Section):
    """One node. Paths are as written; ``load_node_config`` makes them absolute."""

    node: Literal["auto", "cuda", "reference", "simulated"] = "auto"
    model: str | None = Field(default=None, min_length=1)
    """Folder or name for vLLM; the reference node makes its own model."""
    cuda: CudaConfig = CudaConfig()
    reference: ReferenceConfig = ReferenceConfig()
    disaggregation: DisaggregationConfig | None = None
    """Prefill and decode on different nodes; without it this node does both."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Passed through to vLLM, named as its Python arguments."""
    frontend_args: dict[str, Any] = Field(default_factory=dict)
    """Passed through to vLLM's OpenAI application: parsers, chat template. Files in it are
    relative to this document."""
    host_budget: ByteSize = Field(
        ge=2**20, le=2**50, description="the host memory of both pools together, such as 384GiB"
    )
    api: ApiConfig = ApiConfig()
    metrics: MetricsConfig = MetricsConfig()
    control_socket: Path = Path("/run/hisparsed/control.sock")
    state_dir: Path = Path("/var/lib/hisparsed")
    policy: Path = Path("policy.yaml")
    drain_timeout: Duration = 120.0
    """Seconds that running requests have to end after SIGTERM."""
    supervision: SupervisionConfig = SupervisionConfig()
    """How an engine that dies or hangs is restarted."""
    journal: JournalConfig = JournalConfig()
    log: LogConfig = LogConfig()
    allow_untested_vllm: bool = Field(default=False, strict=True)
    """Start with a vLLM that hisparsed was not tested with."""
    bookkeeping: Literal["hisparsed", "vllm"] = "hisparsed"
    """The bookkeeping of HiSparse's pages in the engine core. The outcome is the same; vLLM's own
    takes
    several times the CPU time of a step."""

    @model_validator(mode="after")
    def _passed_args_are_vllms(self) -> Self:
        for key, given, owned in (
            ("engine_args", self.engine_args, OWNED_ENGINE_ARGS),
            ("frontend_args", self.frontend_args, OWNED_FRONTEND_ARGS),
        ):
            for name in given:
                plain = name.lstrip("-").replace("-", "_")
                if plain in owned:
                    raise refuse(
                        "owned_arg",
                        "cannot be set here",
                        hint=owned[plain],
                        key=(key, name),
                    )
                if plain != name:
                    raise refuse(
                        "arg_name",
                        "is written as on a command line",
                        hint=f"write {plain}",
                        key=(key, name),
                    )
        return self

    @model_validator(mode="after")
    def _prefixes_are_real(self) -> Self:
        own = self.disaggregation
        refused = own.refused_on(self.node) if own is not None else None
        if refused is not None:
            raise refuse(
                "disaggregated_kind",
                refused.message,
                hint=refused.hint,
                key=("disaggregation", *refused.key),
            )
        return self

    @model_validator(mode="after")
    def _cuda_has_a_model(self) -> Self:
        if self.node == "cuda" and self.model is None:
            raise refuse(
                "no_model",
                "a cuda node has no default model",
                hint="set model to a folder or a name that vLLM can load",
                key=("model",),
            )
        return self


def load_node_config(path: Path, *, memory_bytes: int) -> Loaded[NodeConfig]:
    """Read the node's document; relative paths in it start at its folder.

    ``memory_bytes`` is the memory that the node may use on this machine. Raises ``ConfigError``.
    """
    loaded = load_document(path, NodeConfig)
    config = loaded.value
    folder = path.absolute().parent
    key_file = config.api.api_key_file
    config = config.model_copy(
        update={
            "api": config.api.model_copy(
                update={"api_key_file": folder / key_file if key_file is not None else None}
            ),
            "frontend_args": in_folder(config.frontend_args, folder),
            "control_socket": folder / config.control_socket,
            "policy": folder / config.policy,
            "state_dir": folder / config.state_dir,
        }
    )
    resolved = replace(loaded, value=config)
    problems = [*_memory_problems(resolved, memory_bytes), *_key_problems(resolved)]
    problems += [
        resolved.problem(("frontend_args", name), message, hint)
        for name, message, hint in file_problems(resolved.value.frontend_args)
    ]
    if problems:
        raise resolved.error(*problems)
    return resolved


def _memory_problems(loaded: Loaded[NodeConfig], memory_bytes: int) -> list[Problem]:
    budget = loaded.value.host_budget
    if budget <= memory_bytes or loaded.value.node == "simulated":
        return []
    message = (
        f"{format_bytes(budget)} is more than the {format_bytes(memory_bytes)} of memory that "
        "this machine lets the node use"
    )
    hint = "leave room for the engine and the system; both pools together are pinned at start"
    return [loaded.problem(("host_budget",), message, hint)]


def _key_problems(loaded: Loaded[NodeConfig]) -> list[Problem]:
    key_file = loaded.value.api.api_key_file
    if key_file is None:
        return []
    try:
        mode = stat.S_IMODE(key_file.stat().st_mode)
        if mode & 0o007:
            message = f"{key_file} is open to every user of this machine (mode {mode:04o})"
            return [loaded.problem(("api", "api_key_file"), message, f"chmod 0640 {key_file}")]
        if read_api_keys(key_file):
            return []
        message = f"{key_file} holds no key"
    except (OSError, UnicodeDecodeError) as error:
        message = f"{key_file} cannot be read: {getattr(error, 'strerror', None) or error}"
    return [loaded.problem(("api", "api_key_file"), message, "write one key per line")]


def read_api_keys(path: Path) -> list[str]:
    """The keys in a key file, one per line; blank lines and lines that begin with ``#`` are
    skipped.

    Raises ``OSError``, and ``UnicodeDecodeError`` for what is not UTF-8.
    """
    lines = (line.strip() for line in path.read_text("utf-8-sig").splitlines())
    return [line for line in lines if line and not line.startswith("#")]
