"""`frontend_args` of the node's document: what is refused, and the files that it names."""

from pathlib import Path

import pytest

from hisparsed.config.frontend import OWNED_FRONTEND_ARGS
from hisparsed.config.node import NodeConfig, load_node_config, shipped_config
from hisparsed.policy.problems import ConfigError, Problem, key_text

TEMPLATE = "{{ messages[0]['content'] }}"


def load(folder: Path, *lines: str) -> NodeConfig:
    path = folder / "node.yaml"
    path.write_text("\n".join(["host_budget: 1GiB", "frontend_args:", *lines]), "utf-8")
    return load_node_config(path, memory_bytes=2**40).value


def problem(folder: Path, *lines: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load(folder, *lines)
    (only,) = caught.value.problems
    return only


def test_arguments_pass_as_they_are(tmp_path: Path) -> None:
    config = load(tmp_path, "  tool_call_parser: glm47", "  enable_auto_tool_choice: true")
    assert config.frontend_args == {"tool_call_parser": "glm47", "enable_auto_tool_choice": True}


@pytest.mark.parametrize("name", OWNED_FRONTEND_ARGS)
def test_what_the_daemon_sets_is_refused_with_what_to_do_instead(tmp_path: Path, name: str) -> None:
    found = problem(tmp_path, f"  {name}: 1")
    assert (found.line, key_text(found.key)) == (3, f"frontend_args.{name}")
    assert found.hint == OWNED_FRONTEND_ARGS[name]


def test_a_name_of_the_command_line_is_told_in_python(tmp_path: Path) -> None:
    assert problem(tmp_path, "  --tool-call-parser: glm47").hint == "write tool_call_parser"


def test_its_files_start_at_the_document(tmp_path: Path) -> None:
    (tmp_path / "glm.jinja").write_text(TEMPLATE, "utf-8")
    (tmp_path / "parser.py").write_text("", "utf-8")
    config = load(tmp_path, "  chat_template: glm.jinja", "  tool_parser_plugin: parser.py")
    assert config.frontend_args == {
        "chat_template": str(tmp_path / "glm.jinja"),
        "tool_parser_plugin": str(tmp_path / "parser.py"),
    }


def test_a_template_is_no_file(tmp_path: Path) -> None:
    config = load(tmp_path, f'  chat_template: "{TEMPLATE}"')
    assert config.frontend_args == {"chat_template": TEMPLATE}


def test_an_installed_plugin_is_no_file(tmp_path: Path) -> None:
    config = load(tmp_path, "  tool_parser_plugin: ours.parsers")
    assert config.frontend_args == {"tool_parser_plugin": "ours.parsers"}


@pytest.mark.parametrize("name", ["chat_template", "tool_parser_plugin"])
def test_a_file_that_is_missing_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    found = problem(tmp_path, f"  {name}: sub/missing.py")
    assert found.line == 3
    assert found.message == f"{tmp_path}/sub/missing.py cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("template", "line", "why"),
    [
        ("{% for m in messages %}\n{{ m.content }}\n", 2, "Unexpected end of template."),
        ("{{ messages }}\n{{ a b }}", 2, "expected token 'end of print statement', got 'b'"),
        ("\n\n{% endfor %}", 3, "Encountered unknown tag 'endfor'."),
        ("{% if a %}{% elsif b %}{% endif %}", 1, "Encountered unknown tag 'elsif'."),
        ("{{ 'a", 1, "unexpected char"),
    ],
)
def test_a_template_that_is_none_is_told_with_file_and_line(
    tmp_path: Path, template: str, line: int, why: str
) -> None:
    (tmp_path / "glm.jinja").write_text(template, "utf-8")
    found = problem(tmp_path, "  tool_call_parser: glm47", "  chat_template: glm.jinja")
    assert found.line == 4
    assert key_text(found.key) == "frontend_args.chat_template"
    assert f"{tmp_path}/glm.jinja:{line}: not a Jinja template: " in found.message
    assert why in found.message
    assert found.hint is not None
    assert "correct the template" in found.hint


def test_a_template_in_the_document_is_looked_at_too(tmp_path: Path) -> None:
    found = problem(tmp_path, "  chat_template: |", "    {{ messages }}", "    {% if %}")
    assert found.line == 3
    assert found.message.startswith("the template:2: not a Jinja template: ")


def test_what_templates_of_models_use_is_known(tmp_path: Path) -> None:
    (tmp_path / "glm.jinja").write_text(
        "{%- for m in messages -%}{% if loop.index > 9 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson | of_another_version }}{% endgeneration %}"
        "{%- endfor -%}{{ raise_exception('no') }}{{ strftime_now('%Y') }}",
        "utf-8",
    )
    load(tmp_path, "  chat_template: glm.jinja")


def test_the_glm_profile_reads_tool_calls_and_thinking() -> None:
    profile = shipped_config("profiles/8xh200-glm-5.3.yaml")
    config = load_node_config(profile, memory_bytes=2**50).value
    assert config.frontend_args == {"tool_call_parser": "glm47", "enable_auto_tool_choice": True}
    assert config.engine_args == {"reasoning_parser": "glm47"}
