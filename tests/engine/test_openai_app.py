"""The arguments of vLLM's application, checked before an engine is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hisparsed.config.node import NodeConfig, load_node_config, shipped_config
from hisparsed.engine.openai_app import frontend_arguments
from hisparsed.errors import UserError


def arguments(given: dict[str, Any], engine_args: dict[str, Any] | None = None) -> Any:
    return frontend_arguments(
        NodeConfig(host_budget=2**30, frontend_args=given, engine_args=engine_args or {}), "cuda"
    )


def refusal(given: dict[str, Any], engine_args: dict[str, Any] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        arguments(given, engine_args)
    return str(caught.value)


def test_without_any_vllms_defaults_count_but_for_hits_logs_and_other_sites() -> None:
    found = arguments({})
    assert found.enable_prompt_tokens_details
    assert found.disable_uvicorn_access_log
    assert found.allowed_origins == []
    assert found.tool_call_parser is None
    assert found.response_role == "assistant"


def test_the_reference_node_has_a_tool_parser_where_the_operator_names_none() -> None:
    def parser(**given: Any) -> tuple[Any, ...]:
        found = frontend_arguments(NodeConfig(host_budget=2**30, frontend_args=given), "reference")
        return found.tool_call_parser, found.enable_auto_tool_choice, found.tool_strict_level

    assert parser() == ("hermes", True, "parameter")
    assert parser(tool_strict_level="auto") == ("hermes", True, "auto")
    off = parser(tool_call_parser=None, enable_auto_tool_choice=False)
    assert off == (None, False, "parameter")


def test_what_the_operator_says_counts() -> None:
    given = {
        "tool_call_parser": "glm47",
        "enable_auto_tool_choice": True,
        "response_role": "model",
        "return_tokens_as_token_ids": True,
        "enable_prompt_tokens_details": False,
        "allowed_origins": ["https://chat.example"],
        "default_chat_template_kwargs": {"enable_thinking": False},
    }
    found = arguments(given)
    assert {name: getattr(found, name) for name in given} == given


def test_lora_modules_are_written_as_mappings() -> None:
    (module,) = arguments({"lora_modules": [{"name": "sql", "path": "/l"}]}).lora_modules
    assert (module.name, module.path) == ("sql", "/l")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"tool_cal_parser": "glm47"},
            "frontend_args.tool_cal_parser: this vLLM's OpenAI application has no such argument; "
            "did you mean tool_call_parser",
        ),
        ({"zzz": 1}, "frontend_args.zzz: this vLLM's OpenAI application has no such argument"),
        (
            {"max_num_seqs": 3},
            "frontend_args.max_num_seqs: is an argument of the engine; write it in engine_args",
        ),
        (
            {"tool_call_parser": "glm7"},
            "frontend_args.tool_call_parser: 'glm7' is no parser of this vLLM; did you mean glm47",
        ),
        (
            {"enable_auto_tool_choice": True},
            "frontend_args.enable_auto_tool_choice: needs a parser; set "
            "frontend_args.tool_call_parser",
        ),
        (
            {"lora_modules": 3},
            "frontend_args.lora_modules: 3 cannot be: Input should be a valid list",
        ),
        (
            {"chat_template": "missing.jinja"},
            "frontend_args: vLLM refuses them: The supplied chat template string (missing.jinja)",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_place_and_value(given: dict[str, Any], says: str) -> None:
    assert refusal(given).startswith(says)


def test_an_argument_of_the_application_among_the_engines_is_told_its_place() -> None:
    assert refusal({}, {"tool_call_parser": "glm47"}) == (
        "engine_args.tool_call_parser: is an argument of the OpenAI application; write it in "
        "frontend_args"
    )


def test_a_reasoning_parser_that_is_none_is_refused() -> None:
    assert refusal({}, {"reasoning_parser": "glm5"}).startswith(
        "engine_args.reasoning_parser: 'glm5' is no parser of this vLLM; did you mean glm"
    )


def test_a_parser_of_a_plugin_is_one(tmp_path: Path) -> None:
    plugin = tmp_path / "own_parsers.py"
    plugin.write_text(
        "from vllm.tool_parsers import ToolParser, ToolParserManager\n"
        "@ToolParserManager.register_module('own-of-a-test')\n"
        "class Own(ToolParser): ...\n",
        "utf-8",
    )
    given = {"tool_call_parser": "own-of-a-test", "enable_auto_tool_choice": True}
    assert "is no parser" in refusal(given)
    found = arguments({**given, "tool_parser_plugin": str(plugin)})
    assert found.tool_call_parser == "own-of-a-test"


def test_a_plugin_that_does_not_load_is_named(tmp_path: Path) -> None:
    plugin = tmp_path / "broken_parsers.py"
    plugin.write_text("import no.such.module", "utf-8")
    said = refusal({"tool_call_parser": "mine", "tool_parser_plugin": str(plugin)})
    assert f"and {plugin} registers none (the lines above say why)" in said


def test_the_glm_profiles_parsers_are_vllms() -> None:
    profile = shipped_config("profiles/8xh200-glm-5.3.yaml")
    found = frontend_arguments(load_node_config(profile, memory_bytes=2**50).value, "cuda")
    assert (found.tool_call_parser, found.enable_auto_tool_choice) == ("glm47", True)
