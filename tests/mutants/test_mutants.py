"""The list of mutants holds for the code and the tests of now, wherever they have moved to."""

from __future__ import annotations

import pytest

from tests.mutants.mutation import Mutant, mutants, node_ids, place_of

EVERY = pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)


@EVERY
def test_its_text_stands_once_in_its_function(mutant: Mutant) -> None:
    assert place_of(mutant)[1] == mutant.function
    assert mutant.new != mutant.old


@EVERY
def test_the_tests_that_kill_it_are_there(mutant: Mutant) -> None:
    assert len(list(node_ids(mutant.killed_by))) == len(mutant.killed_by) > 0
