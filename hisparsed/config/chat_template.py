"""Whether a chat template is one: its syntax, as the library that renders it for vLLM reads it.

Looks at no names in it: filters and variables are the renderer's, and differ between versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser


def syntax_fault(template: str) -> tuple[int, str] | None:
    """The line where ``template`` cannot be read, and why; ``None`` where it can."""
    # Takes a twentieth of a second, and most documents name no template.
    from jinja2 import TemplateSyntaxError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block that templates put around what the model said."""

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
        return error.lineno, error.message or "it is no Jinja"
    return None
