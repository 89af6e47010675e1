"""What settings mean on a grid of tokens: how many tokens go, and at which level it is."""

from .kernels import Cells
from .selectors import SELECTORS
from .settings import Settings


def removable(settings: Settings, cells: Cells, ratio: float) -> int:
    """Tokens that a ratio removes."""
    # Attention that is not fused is much slower where its scores are no multiple of 16 bytes. The
    # window of the paper means its numbers too, and of few tokens, a few more are many.
    exact = settings.window == 0 or cells.tokens < 512
    return SELECTORS[settings.selector].removable(cells, ratio, multiple=1 if exact else 8)


def level_of(size: tuple[int, int], grid: tuple[int, int]) -> int:
    """How many times smaller than a latent of that size a grid is.

    Counted, so that it is a number also where sizes are symbols of the compiler.
    """
    level = 1
    while size[0] > level * grid[0] or size[1] > level * grid[1]:
        level += 1
    return level


def level_merges(
    max_downsample: int | None,
    size: tuple[int, int],
    finest: tuple[int, int],
    grid: tuple[int, int],
) -> bool:
    """Whether `max_downsample` lets tokens be merged on a grid."""
    if max_downsample is None:
        return grid[0] >= finest[0] and grid[1] >= finest[1]
    return size[0] <= max_downsample * grid[0] and size[1] <= max_downsample * grid[1]
