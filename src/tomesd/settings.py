"""The options of `apply_patch`: one frozen dataclass, checked when it is made."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .allowed import (
    ALLOWED,
    KINDS,
    Backend,
    Depth,
    Metric,
    Protect,
    Schedule,
    Selector,
    Share,
    Target,
    When,
)

_ROUNDING = 1e-4
"""How far a progress that is read from a timestep may be off."""


class _Default:
    """Stands for an option that was not given."""

    def __repr__(self) -> str:
        return "default"


DEFAULT: Any = _Default()


class MergeWarning(UserWarning):
    """Merging does less than was asked for, and here is why."""


@dataclass(frozen=True)
class Settings:
    """How tokens are merged."""

    # The docstrings of the fields are the documentation of the options, and the help of commands.

    ratio: float = 0.5
    """Share of the tokens to remove, 0 to 1. At most `1 - 1/(sx*sy)` of them can be removed
    (0.75 in 2x2 cells; `st` counts too); more is merged at that cap, with a warning. Of 512 tokens
    or more, up to 7 more are removed, so that a multiple of 8 is left, unless `window` is 0."""

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
    """Side of the square, in tokens, in which each token looks for similar ones. Larger squares
    cost more, and merge what is far apart. 0 is the whole image, as in the paper. `None` takes 8
    for ratios up to two thirds of the cap (0.5); above, 64 on UNets, and the cells on
    transformers."""

    share: Share | None = None
    """Where a plan, which says what tokens belong together, is used: in one `block`, as in the
    paper; in all blocks of a `level`; or in those for several `steps`. `None` is `block` on UNets,
    and `level` (one plan a step) on transformers."""

    refresh: int = 4
    """With `share="steps"`: for how many steps a plan is used, 1 or more. A new image always gets a
    new one."""

    when: When = "if_faster"
    """`if_faster`: leave layers alone where merging would cost more time than it saves, by an
    estimate from their size and the device. `always`: merge them all the same."""

    backend: Backend = "auto"
    """`triton`: GPU kernels. `reference`: plain PyTorch. `auto`: the first where it can run."""

    selector: Selector = "bipartite"
    """How tokens are grouped. `bipartite`: the most similar ones merge into the kept token of a
    cell (the paper). `kmeans`: into clusters. `grid`: whole cells, whatever is in them."""

    metric: Metric | None = None
    """What similarity is measured on: the block's `input` (the paper), the `keys` of its
    self-attention, the similarity to the image's `mean` token, the block's output at the
    `previous` step, or the `clean` image that the last step led to expect. `None` is `clean` on
    transformers that are rectified flows, and `input` on all other models."""

    target: Target | None = None
    """What runs on merged tokens. `attn`: self-attention, and the layers that `merge_crossattn` and
    `merge_mlp` add, each on its own. `kv`: only keys and values of self-attention. `block`: whole
    blocks; each token gets what its group gained. `stack`: the same around a run of blocks. `None`
    is `attn` on UNets, and `stack` on transformers."""

    depth: Depth | None = None
    """Transformers: the part of the blocks that runs on merged tokens, from and to, as shares of
    their number: `(0.5, 1)` is the second half. `None` leaves the first and the last block
    alone."""

    st: int | None = None
    """Videos: how many frames a cell spans. `None` is 1: every frame is merged by itself."""

    reference_ratio: float | None = None
    """Editing models: share of the tokens of reference images to remove. `None` is `ratio`."""

    proportional: bool = False
    """In self-attention, let a merged token count as many times as there are tokens in it."""

    schedule: Schedule = None
    """How the ratio changes while an image is made: `linear` or `cosine`, from `ratio` to
    `ratio_end` in steps of a twentieth; a list for equal parts of the way, of ratios, or of
    selectors and ratios such as `("grid", 0.75)`; or a function of the progress, 0 (noise) to 1
    (image)."""

    ratio_end: float | None = None
    """Ratio at the end of a `linear` or `cosine` schedule."""

    start: float | None = None
    """Merge from this progress on: 0 is noise, 1 the image. `None` is 0."""

    end: float | None = None
    """Merge up to this progress. `None` is 1 on UNets; on transformers, where merging near the end
    spoils detail, it is 0.5."""

    tau: float | None = None
    """Merge only where noise makes up less than this share of the latent's variance, 0 to 1."""

    level_ratios: Mapping[int, float] | None = None
    """Other ratios where the feature map is 1, 2, 4 or 8 times smaller than the latent. Levels that
    are named here are merged whatever `max_downsample` says."""

    kind_ratios: Mapping[str, float] | None = None
    """Other ratios for kinds of layers: `attn`, `crossattn`, `mlp`."""

    reuse: int | None = None
    """Run a part of the model at every so many steps only, 2 or more. At the steps between, it adds
    to the image what it added last time. On UNets the part is all that lies below the finest
    level; on transformers it is the blocks that `depth` names. `None` runs it at every step."""

    reuse_start: float | None = None
    """With `reuse`: the progress from which on steps are left out. `None` is 0 on UNets, and 0.5 on
    transformers."""

    reuse_end: int | None = None
    """With `reuse`: at the end of the way, run that part at every so many steps only. The number
    grows evenly from `reuse` at `reuse_start`. Late steps differ less, so that this keeps images
    closer than the same number of steps evenly. `None` is `reuse`."""

    reuse_within: float | None = None
    """With `reuse`: use a result for at most this part of the way, however few steps there are.
    `None` sets no limit; the presets set 0.15 to 0.22, so that of four steps none is left out."""

    reuse_attention: bool = False
    """With `reuse`, on UNets: use again what self-attention at the finest level gave, too, which
    otherwise runs at every step. Large images spend most of their time there."""

    extrapolate: bool = False
    """With `reuse`: carry on how the last two results differed, instead of using the last one."""

    coarse: float | None = None
    """Run the first steps, up to this progress, on the image at half its height and width, which is
    a quarter of the tokens, with the noise level that this leaves. Nothing is merged or reused in
    them. `None` and 0: no step. For many transformers of diffusers, and its UNets of images."""

    protect: Protect = field(default=None, compare=False)
    """Tokens that are merged last: where a mask `[h, w]` of any size is not zero; or, with
    `guidance`, where the prompt made the most difference at the step before."""

    protect_share: float = 0.1
    """Share of the tokens that `guidance` protects."""

    def __post_init__(self) -> None:
        for option in fields(Settings):
            value = getattr(self, option.name)
            ALLOWED[option.name].check(option.name, value, option.default is None)
        self._check_together()

    def _check_together(self) -> None:
        """Refuses options that contradict or need each other."""
        if self.target not in (None, "attn") and not self.merge_attn:
            raise ValueError(f"merge_attn=False: target={self.target!r} merges self-attention")
        if self.whole_blocks:
            needed = f"target='attn' or 'kv', not {self.target!r}"
            self._refuse_without(needed, "proportional", "kind_ratios", "reuse_attention")
        if self.ratio == 0:
            self._refuse_without("a ratio above 0", "kind_ratios")
        if self.reuse is None:
            needing = ("reuse_start", "reuse_end", "reuse_within", "reuse_attention", "extrapolate")
            self._refuse_without("reuse", *needing)
        others = self.selectors - {"bipartite"}
        if self.protect is not None and others:
            raise ValueError(f"protect: needs selector='bipartite', not {min(others)!r}")
        if isinstance(self.schedule, str) and self.ratio_end is None:
            raise ValueError(f"schedule={self.schedule!r}: needs ratio_end")
        if not isinstance(self.schedule, str) and self.ratio_end is not None:
            raise ValueError("ratio_end: needs schedule='linear' or 'cosine'")
        start, end = self.span
        if start >= end:
            raise ValueError(f"start={start!r}: must be below end={end!r}")

    def _refuse_without(self, needed: str, *names: str) -> None:
        """Refuses options that do nothing without something else, if they are used."""
        for name in names:
            if value := getattr(self, name):
                raise ValueError(f"{name}={value!r}: needs {needed}")

    def refuse(self, names: Iterable[str], model: str, why: str = "") -> None:
        """Refuses options that mean nothing on a model, if they are given.

        Raises:
            ValueError: one of them is not its default.
        """
        for name in names:
            value = getattr(self, name)
            if value != getattr(Settings, name):
                raise ValueError(f"{name}={value!r}: means nothing on a {model}{why}")

    def filled(self, **defaults: Any) -> "Settings":
        """The same, with these values where a field is None.

        A given schedule, threshold or start speaks for the whole way, which a default `end` would
        cut short.
        """
        if self.schedule is not None or self.tau is not None or self.start is not None:
            defaults["end"] = 1.0
        if self.reuse is None:
            defaults.pop("reuse_start", None)
        unset = {k: v for k, v in defaults.items() if getattr(self, k) is None}
        return replace(self, **unset)

    def __hash__(self) -> int:
        compared = (getattr(self, field.name) for field in fields(self) if field.compare)
        return hash(tuple(map(_hashable, compared)))

    @property
    def ratio_cap(self) -> float:
        """Largest share of tokens that can be removed: all but one in each cell."""
        return 1 - 1 / (self.sx * self.sy * (self.st or 1))

    @property
    def search(self) -> int:
        """Least side of a window; 0: the whole grid is one."""
        if self.window is not None:
            return self.window
        return 64 if self.is_near_cap else 8

    @property
    def is_near_cap(self) -> bool:
        """Whether so many tokens go that most of them have to, like each other or not."""
        return 3 * self.ratio > 2 * self.ratio_cap

    @property
    def whole_blocks(self) -> bool:
        return self.target in ("block", "stack")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers that run on merged tokens."""
        merged = (self.merge_attn, self.merge_crossattn, self.merge_mlp)
        return tuple(k for k, m in zip(KINDS, merged, strict=True) if m or self.whole_blocks)

    @property
    def layers(self) -> tuple[str, ...]:
        """The kinds of layers that merge on their own."""
        return () if self.whole_blocks else self.kinds

    @property
    def changes(self) -> bool:
        """Whether what is merged depends on how far the image is."""
        varies = self.schedule is not None or self.tau is not None or self.span != (0, 1)
        return varies or self.reuse is not None or bool(self.coarse)

    def may_merge(self, progress: float) -> bool:
        """Whether `start` and `end` let tokens merge at a progress, 0 (noise) to 1 (image)."""
        start, end = self.span
        return start - _ROUNDING <= progress <= end + _ROUNDING

    def may_reuse(self, progress: float) -> bool:
        """Whether steps may be left out at a progress, 0 (noise) to 1 (image)."""
        return progress >= (self.reuse_start or 0.0) - _ROUNDING

    def reuse_every(self, progress: float) -> int:
        """Steps from one that runs the whole model at a progress to the next one."""
        assert self.reuse is not None
        start = self.reuse_start or 0.0
        way = max(0.0, progress - start) / (1 - start) if start < 1 else 0.0
        return int(self.reuse + way * ((self.reuse_end or self.reuse) - self.reuse) + 0.5)

    def is_coarse(self, progress: float) -> bool:
        """Whether the model runs on a coarser image at a progress, 0 (noise) to 1 (image)."""
        return progress < (self.coarse or 0.0) - _ROUNDING

    @property
    def span(self) -> tuple[float, float]:
        """Progress from which and up to which tokens are merged."""
        return self.start or 0.0, 1.0 if self.end is None else self.end

    @property
    def active(self) -> bool:
        """Whether these settings ask for any merging at all."""
        return (self.highest_ratio > 0 or callable(self.schedule)) and bool(self.kinds)

    @property
    def highest_ratio(self) -> float:
        """The highest ratio anywhere, at any time; a schedule that is a function is not asked."""
        ratios = [self.ratio, self.ratio_end or 0.0, self.reference_ratio or 0.0]
        ratios += (self.level_ratios or {}).values()
        ratios += [ratio for _, ratio in self.stages]
        return max(ratios)

    @property
    def stages(self) -> tuple[tuple[Selector, float], ...]:
        """Selectors and ratios for equal parts of the way, if the schedule is a list."""
        if self.schedule is None or isinstance(self.schedule, str) or callable(self.schedule):
            return ()
        return tuple(
            (stage[0], stage[1]) if isinstance(stage, Sequence) else (self.selector, stage)
            for stage in self.schedule
        )

    @property
    def selectors(self) -> frozenset[Selector]:
        """All selectors that are used while an image is made."""
        return frozenset([self.selector, *(selector for selector, _ in self.stages)])

    def ratio_of(self, kind: str, level: int, ratio: float) -> float:
        """Share of the tokens to remove.

        Args:
            level: how many times smaller than the latent the feature map is.
            ratio: what `ratio` is now. Other ratios change with it in proportion.
        """
        found = ratio
        if self.level_ratios and level in self.level_ratios:
            found = self.level_ratios[level] * (ratio / self.ratio if self.ratio else 1.0)
        if self.kind_ratios and kind in self.kind_ratios:
            found *= self.kind_ratios[kind] / self.ratio
        return min(1.0, found)

    def warn_if_capped(self) -> None:
        ratio = self.highest_ratio
        if ratio > self.ratio_cap and self.active:
            sides = (self.sx, self.sy, self.st) if self.st else (self.sx, self.sy)
            cells = "x".join(map(str, sides))
            warnings.warn(
                f"ratio={ratio:g} is more than {cells} cells allow: merging at the "
                f"cap, an effective ratio of {self.ratio_cap:g} (larger cells raise it)",
                MergeWarning,
                stacklevel=3,
            )


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return frozenset(value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
