"""Arguments of vLLM's OpenAI application that an operator may set, and the files they name.

`frontend_args` of the node document, by vLLM's Python names. Checks the syntax of chat templates
with Jinja, as vLLM renders them. Filters and variables are not checked: they belong to the
renderer and differ between versions. Arguments that vLLM does not have are found at start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser


def syntax_fault(template: str) -> tuple[int, str] | None:
    """The line of ``template`` with a syntax error, and the reason; ``None`` without one."""
    # Takes a twentieth of a second, and most documents name no template.
    from jinja2 import TemplateSyntaxError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block that templates put around the model's text."""

        tags = {"generation"}  # noqa: RUF012 (as the base class has it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    try:
        environment.parse(template)
    except TemplateSyntaxError as error:
        return error.lineno, error.message or "it is not Jinja"
    return None


_LISTEN: Final = "set api.host or api.port"
_TLS: Final = "the daemon speaks plain HTTP; end TLS in a proxy in front of it"
_LIMITS: Final = "set api.limits; the daemon reads HTTP itself"
_LOGS: Final = "set log.level and log.format"
_PRIVATE: Final = "the daemon's log keeps no prompts and no answers; remove it"
_ONE_ENGINE: Final = "one daemon runs one engine; remove it"
_ENGINE: Final = "it is an argument of the engine; write it under engine_args"
OWNED_FRONTEND_ARGS: Final = {
    "host": _LISTEN,
    "port": _LISTEN,
    "uds": _LISTEN,
    "grpc_port": "the daemon serves HTTP only; remove it",
    "api_key": "set api.api_key_file",
    **dict.fromkeys(
        (
            "ssl_keyfile",
            "ssl_certfile",
            "ssl_ca_certs",
            "ssl_cert_reqs",
            "ssl_ciphers",
            "enable_ssl_refresh",
        ),
        _TLS,
    ),
    "root_path": "let the proxy remove its prefix; the daemon serves a fixed list of paths",
    "middleware": "clients pass the daemon's own admission; put a proxy in front of it",
    "h11_max_incomplete_event_size": _LIMITS,
    "h11_max_header_count": _LIMITS,
    "uvicorn_log_level": _LOGS,
    "disable_uvicorn_access_log": _LOGS,
    "disable_access_log_for_endpoints": _LOGS,
    "log_config_file": _LOGS,
    "log_error_stack": _PRIVATE,
    "enable_log_outputs": _PRIVATE,
    "enable_log_deltas": _PRIVATE,
    "max_log_len": _PRIVATE,
    "tokens_only": "the node serves the OpenAI API; remove it",
    "enable_tokenizer_info_endpoint": "the daemon does not serve that path; remove it",
    **dict.fromkeys(
        (
            "data_parallel_supervisor_port",
            "dp_supervisor_probe_interval_s",
            "dp_supervisor_probe_timeout_s",
            "dp_supervisor_probe_failure_threshold",
        ),
        _ONE_ENGINE,
    ),
    **dict.fromkeys(("served_model_name", "reasoning_parser", "reasoning_parser_plugin"), _ENGINE),
}
"""Arguments of the application that the daemon sets or has in another place, each with the
alternative."""

_TEMPLATE: Final = "chat_template"
_FILES: Final = (_TEMPLATE, "tool_parser_plugin")
_TEMPLATE_SIGNS: Final = frozenset("{}\n")
"""vLLM takes text with any of these for the template itself, not for a path."""


def in_folder(arguments: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """``arguments`` with the files that they name absolute; relative ones start at ``folder``."""
    return {**arguments, **{name: str(folder / file) for name, file in _files(arguments)}}


def file_problems(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Names whose file or template cannot be read, each with what is wrong and the
    expected value."""
    for name, file in _files(arguments):
        try:
            text = Path(file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            hint = "name a file that the daemon may read"
            if name == _TEMPLATE:
                hint += ", or write the template itself"
            yield name, f"{file} cannot be read: {why}", hint
            continue
        if name == _TEMPLATE:
            yield from _template_problems(text, file)
    inline = arguments.get(_TEMPLATE)
    if isinstance(inline, str) and _TEMPLATE_SIGNS & set(inline):
        yield from _template_problems(inline, "the template")


def _template_problems(template: str, place: str) -> Iterator[tuple[str, str, str]]:
    fault = syntax_fault(template)
    if fault is not None:
        line, why = fault
        hint = "correct the template; until then every chat would fail"
        yield _TEMPLATE, f"{place}:{line}: not a Jinja template: {why}", hint


def _files(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _FILES:
        value = arguments.get(name)
        if not isinstance(value, str) or not value or _TEMPLATE_SIGNS & set(value):
            continue
        # A plugin may also be a module that is installed.
        if name == _TEMPLATE or "/" in value or value.endswith(".py"):
            yield name, value
