"""Which level of a model a grid of tokens is."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tomesd.policy import level_of

sides = st.integers(1, 300)


@given(size=st.tuples(sides, sides), grid=st.tuples(sides, sides))
def test_a_level_is_how_many_times_smaller_the_grid_is(
    size: tuple[int, int], grid: tuple[int, int]
) -> None:
    wanted = max(math.ceil(length / own) for length, own in zip(size, grid, strict=True))
    assert level_of(size, grid) == wanted
