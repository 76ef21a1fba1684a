"""A session keeps its laws whatever happens in whatever order. Must not test single rules: they have their tables."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.domain.walk import Walk

DICE = st.randoms(use_true_random=False)


@settings(max_examples=80, deadline=None, report_multiple_bugs=False)
@given(dice=DICE, count=st.integers(1, 30))
def test_session_keeps_its_laws_when_anything_happens(dice: Random, count: int) -> None:
    """Short lives, made shorter by Hypothesis where one breaks a law."""
    walk = Walk()
    for _ in range(count):
        walk.step(dice)
    walk.finish()


@pytest.mark.parametrize("block", range(4))
def test_session_keeps_its_laws_when_much_happens(block: int) -> None:
    """Long lives by fixed dice: some faults need a dozen things to happen in the right order."""
    for seed in range(block * 50, block * 50 + 50):
        dice, walk = Random(seed), Walk()
        for _ in range(100):
            walk.step(dice)
        walk.finish()
