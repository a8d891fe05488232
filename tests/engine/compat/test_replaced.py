"""vLLM's methods that are replaced are replaced only where they are the known ones."""

from __future__ import annotations

import pytest

from hisparsed.engine.compat import replaced
from hisparsed.engine.compat.replaced import KNOWN, REPLACED, module_text, replaced_digest


def test_the_installed_vllm_is_known() -> None:
    assert replaced_digest() in KNOWN
    assert replaced.pages_can_be_whole()


@pytest.mark.parametrize("module", REPLACED)
def test_one_changed_word_makes_it_another(module: str) -> None:
    def changed(name: str) -> str:
        text = module_text(name)
        return text.replace("self.", "this.") if name == module else text

    assert replaced_digest(changed) not in KNOWN


def test_white_space_does_not() -> None:
    assert replaced_digest(lambda name: module_text(name).replace("\n\n", "\n\n\n")) in KNOWN


def test_what_is_not_there_is_not_known() -> None:
    assert replaced_digest(lambda _name: "") is None
