"""What each option may be: types, and checks with messages of one form."""

import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any  # the help of the commands needs no torch


DOWNSAMPLES = (1, 2, 4, 8)
KINDS = ("attn", "crossattn", "mlp")
Selector = Literal["bipartite", "kmeans", "grid"]
Metric = Literal["input", "keys", "mean", "previous", "clean"]
Target = Literal["attn", "kv", "block", "stack"]
Depth = tuple[float, float]
Shape = Literal["linear", "cosine"]
Stage = float | tuple[Selector, float]
Schedule = Shape | Sequence[Stage] | Callable[[float], float] | None
Protect = Literal["guidance"] | Tensor | None
Share = Literal["block", "level", "steps"]
When = Literal["if_faster", "always"]
Backend = Literal["auto", "triton", "reference"]


class _TensorType(type):
    def __instancecheck__(cls, value: Any) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(value, torch.Tensor)


class AnyTensor(metaclass=_TensorType):
    """Any tensor is an instance of this; before torch is imported, nothing is."""


@dataclass(frozen=True)
class _Allowed:
    """What an option may be."""

    words: str
    kind: Any
    fits: Callable[[Any], bool] = lambda value: True

    def check(self, name: str, value: Any, or_none: bool) -> None:
        """Raises an error that names the option, its value and what is allowed.

        Args:
            or_none: whether None is allowed too.
        """
        if value is None and or_none:
            return
        # bool is an int to Python, but `sx=True` is a slip of the pen.
        slip = isinstance(value, bool) and self.kind is not bool
        right_kind = isinstance(value, self.kind) and not slip
        if not right_kind or not self.fits(value):
            is_tensor = isinstance(value, AnyTensor)
            shown = f"a tensor {list(value.shape)}" if is_tensor else repr(value)
            none = "None or " if or_none else ""
            error = ValueError if right_kind else TypeError
            raise error(f"{name}={shown}: must be {none}{self.words}")


def _is_share(value: Any) -> bool:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return number and 0 <= value <= 1


def _is_schedule(value: Any) -> bool:
    if isinstance(value, str):
        return value in get_args(Shape)
    return callable(value) or (len(value) > 0 and all(map(_is_stage, value)))


def _is_stage(value: Any) -> bool:
    if not isinstance(value, Sequence):
        return _is_share(value)
    return len(value) == 2 and value[0] in get_args(Selector) and _is_share(value[1])


def _is_span(value: Any) -> bool:
    return len(value) == 2 and all(map(_is_share, value)) and value[0] < value[1]


def _is_protection(value: Any) -> bool:
    return value == "guidance" if isinstance(value, str) else value.ndim in (2, 3)


def _at_least(low: int) -> _Allowed:
    return _Allowed(f"an int of at least {low}", numbers.Integral, lambda value: value >= low)


def _one_of(allowed: tuple[Any, ...], kind: type = str) -> _Allowed:
    words = f"one of {', '.join(map(repr, allowed))}"
    return _Allowed(words, kind, lambda value: value in allowed)


def _shares_by(keys: tuple[Any, ...]) -> _Allowed:
    return _Allowed(
        f"a dict from {', '.join(map(repr, keys))} to numbers between 0 and 1",
        Mapping,
        lambda value: all(key in keys and _is_share(share) for key, share in value.items()),
    )


_SHARE = _Allowed("a number between 0 and 1", numbers.Real, _is_share)
_SPAN = _Allowed("two numbers between 0 and 1 that rise", Sequence, _is_span)
_SCHEDULE = _Allowed(
    "'linear', 'cosine', a list of numbers between 0 and 1, also with a selector as in "
    "('grid', 0.75), or a function",
    (Sequence, Callable),
    _is_schedule,
)
_PROTECT = _Allowed("'guidance' or a tensor [h, w] or [b, h, w]", (str, AnyTensor), _is_protection)

ALLOWED = {
    name: allowed
    for names, allowed in (
        ("ratio ratio_end reference_ratio start end tau protect_share coarse", _SHARE),
        ("reuse_start reuse_within", _SHARE),
        ("use_rand merge_attn merge_crossattn merge_mlp proportional", _Allowed("a bool", bool)),
        ("reuse_attention extrapolate", _Allowed("a bool", bool)),
        ("reuse reuse_end", _at_least(2)),
        ("sx sy st refresh", _at_least(1)),
        ("seed window", _at_least(0)),
        ("max_downsample", _one_of(DOWNSAMPLES, numbers.Integral)),
        ("share", _one_of(get_args(Share))),
        ("when", _one_of(get_args(When))),
        ("backend", _one_of(get_args(Backend))),
        ("selector", _one_of(get_args(Selector))),
        ("metric", _one_of(get_args(Metric))),
        ("target", _one_of(get_args(Target))),
        ("level_ratios", _shares_by(DOWNSAMPLES)),
        ("kind_ratios", _shares_by(KINDS)),
        ("depth", _SPAN),
        ("schedule", _SCHEDULE),
        ("protect", _PROTECT),
    )
    for name in names.split()
}
"""By option. Where the default is None, None is allowed too."""
