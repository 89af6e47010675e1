"""The options of `apply_patch`: one frozen dataclass, checked when it is made."""

import math
import numbers
import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

__all__ = ["DOWNSAMPLES", "Backend", "MergeWarning", "Settings", "Share", "When"]

DOWNSAMPLES = (1, 2, 4, 8)

Share = Literal["block", "level", "steps"]
When = Literal["if_faster", "always"]
Backend = Literal["auto", "triton", "reference"]


class MergeWarning(UserWarning):
    """Merging does less than was asked for, and here is why."""


@dataclass(frozen=True)
class Settings:
    """How tokens are merged."""

    # The docstrings of the fields are the documentation of the options, and the help of commands.

    ratio: float = 0.5
    """Share of the tokens to remove, 0 to 1. At most `1 - 1/(sx*sy)` of them can be removed
    (0.75 in 2x2 cells); more is merged at that cap, with a warning."""

    max_downsample: int | None = None
    """Merge where the feature map is at most this many times smaller than the latent: 1, 2, 4 or 8.
    `None` is the finest level that has attention: 1 on SD 1 and 2, 2 on SDXL."""

    sx: int = 2
    """Width of the cells, in tokens. Each cell keeps one token that others can merge into."""

    sy: int = 2
    """Height of the cells, in tokens."""

    use_rand: bool = True
    """Draw the kept token of each cell at random, anew at every step. `False`: the top left one."""

    merge_attn: bool = True
    """Merge tokens in self-attention. Recommended: most of the gain, least of the loss."""

    merge_crossattn: bool = False
    """Merge tokens in cross-attention too."""

    merge_mlp: bool = False
    """Merge tokens in the feed-forward layers too."""

    seed: int = 0
    """Seed of the random draws: the same seed gives the same image."""

    window: int | None = None
    """Side of the square of tokens in which each looks for its like: larger ones cost more, and
    merge what is far apart. 0 is the whole image, as in the paper. `None` takes 8 for ratios up to
    two thirds of the cap (0.5), where that is closer to the unmerged image, and 0 above."""

    share: Share = "block"
    """Where to use what is found out about which tokens belong together: in the one `block`, as the
    paper does; in all blocks of the `level`, which costs quality; or there for some `steps`."""

    refresh: int = 4
    """With `share="steps"`: for how many steps, 1 or more. A new image always starts anew."""

    when: When = "if_faster"
    """`if_faster`: leave layers alone where merging would cost more time than it saves, by an
    estimate from their size and the device. `always`: merge them all the same."""

    backend: Backend = "auto"
    """`triton`: GPU kernels. `reference`: plain PyTorch. `auto`: the first where it can run."""

    def __post_init__(self) -> None:
        _check_real("ratio", self.ratio, low=0.0, high=1.0)
        if self.max_downsample is not None:
            _check_type("max_downsample", self.max_downsample, numbers.Integral, "None or an int")
            if self.max_downsample not in DOWNSAMPLES:
                allowed = ", ".join(map(str, DOWNSAMPLES))
                raise ValueError(
                    f"max_downsample={self.max_downsample!r}: must be None or one of {allowed}"
                )
        if self.window is not None:
            _check_type("window", self.window, numbers.Integral, "None or an int")
            if self.window < 0:
                raise ValueError(f"window={self.window!r}: must be None or at least 0")
        for name, low in (("sx", 1), ("sy", 1), ("seed", 0), ("refresh", 1)):
            value = getattr(self, name)
            _check_type(name, value, numbers.Integral, "an int")
            if value < low:
                raise ValueError(f"{name}={value!r}: must be at least {low}")
        for name in ("use_rand", "merge_attn", "merge_crossattn", "merge_mlp"):
            _check_type(name, getattr(self, name), bool, "a bool")
        for name, words in (("share", Share), ("when", When), ("backend", Backend)):
            _check_word(name, getattr(self, name), get_args(words))

    @property
    def ratio_cap(self) -> float:
        """Largest share of tokens that can be removed: all but one in each cell."""
        return 1 - 1 / (self.sx * self.sy)

    @property
    def search(self) -> int:
        """Least side of the windows, 0 for one of them."""
        if self.window is not None:
            return self.window
        return 8 if 3 * self.ratio <= 2 * self.ratio_cap else 0

    @property
    def merges(self) -> dict[str, bool]:
        """Whether each kind of layer runs on merged tokens."""
        return {"attn": self.merge_attn, "crossattn": self.merge_crossattn, "mlp": self.merge_mlp}

    @property
    def active(self) -> bool:
        """Whether these settings ask for any merging at all."""
        return self.ratio > 0 and any(self.merges.values())

    def warn_if_capped(self) -> None:
        if self.ratio > self.ratio_cap and self.active:
            warnings.warn(
                f"ratio={self.ratio:g} is more than {self.sx}x{self.sy} cells allow: merging at "
                f"the cap, an effective ratio of {self.ratio_cap:g} (larger cells raise it)",
                MergeWarning,
                stacklevel=3,
            )


def _check_type(name: str, value: Any, kind: type, wanted: str) -> None:
    # bool is an int to Python, but `sx=True` is a slip of the pen.
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise TypeError(f"{name}={value!r}: must be {wanted}, not {type(value).__name__}")


def _check_real(name: str, value: Any, low: float, high: float) -> None:
    _check_type(name, value, numbers.Real, "a number")
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name}={value!r}: must be between {low:g} and {high:g}")


def _check_word(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
