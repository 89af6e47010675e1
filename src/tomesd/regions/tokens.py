"""How a module receives and returns image tokens, and which arguments have a row per token."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from ..plan import MergePlan, Rows
from ..state import Cut, Decision
from .item_rows import ItemRows
from .role import find_argument, replace_arguments


@dataclass(frozen=True)
class Along:
    """An argument with a row per token: a merged token has the row of its representative."""

    name: str
    axes: tuple[int, ...]
    """The axes that have one entry per token."""
    sequence: bool = False
    """Whether it has rows for the whole sequence, text included; otherwise for the image."""
    batched: bool = True
    """Whether its first axis is the batch. If not, all items share the rows."""
    parts: tuple[int | str, ...] | None = None
    """Of a tuple or dictionary: its entries with a row per token; None: all entries."""
    ndim: int | None = None
    """The number of axes with which it has a row per token; None: any."""
    mean: bool = False
    """Whether it holds tokens, which are averaged as the others are."""
    tokens_first: bool = False
    """Whether it is `[N, B, ...]`; `axes` then refer to `[B, N, ...]`."""

    def is_in(self, value: Any) -> bool:
        """Whether the argument is given; a dictionary may lack the entries."""
        if isinstance(value, dict):
            return any(value.get(part) is not None for part in self.parts or ())
        return value is not None

    def length(self, value: Any) -> int:
        """Number of rows."""
        while not isinstance(value, Tensor):
            value = value[0 if self.parts is None else self.parts[0]]
        return value.shape[0 if self.tokens_first else self.axes[0]]

    def cut(self, value: Any, picker: "_RowPicker") -> Any:
        """The rows left after merging, of a tensor or of tensors in tuples, lists or dictionaries.
        An int is a number of tokens, and becomes the number left."""
        if isinstance(value, Tensor):
            return self._cut(value, picker)
        if isinstance(value, int):
            return picker.plan.span.shape[1]
        inner = replace(self, parts=None)
        if isinstance(value, dict):
            names = [name for name in self.parts or () if name in value]
            return value | {name: inner.cut(value[name], picker) for name in names}
        if isinstance(value, tuple | list):
            parts = range(len(value)) if self.parts is None else self.parts
            cut = [inner.cut(v, picker) if i in parts else v for i, v in enumerate(value)]
            return tuple(cut) if isinstance(value, tuple) else cut
        return value

    def _cut(self, rows: Tensor, picker: "_RowPicker") -> Any:
        if self.ndim is not None and rows.ndim != self.ndim:
            return rows
        if self.tokens_first:
            inner = replace(self, tokens_first=False)
            return inner._cut(rows.transpose(0, 1), picker).transpose(0, 1)
        if self.mean:
            return picker.plan.merge(rows)
        for axis in self.axes:
            if rows.shape[axis] > 1:  # a single row is shared by all tokens
                rows = picker.pick(rows, axis, batched=self.batched)
        return rows


class _RowPicker:
    """Picks the rows that a plan leaves, of its own tokens or of a sequence that holds them."""

    def __init__(self, plan: MergePlan, start: int | Tensor | None, length: int):
        self.plan, self.start, self.length = plan, start, length
        self._rows: Rows | None = None  # computed once, when first needed

    def pick(self, rows: Tensor, axis: int, *, batched: bool) -> Any:
        if self._rows is None:
            self._rows = self.plan.rows(self.start, self.length)
        picked = self._rows.pick(rows, axis, batched=batched)
        # Rows that already have an axis for heads broadcast against queries `[B, N, H, C]`.
        got_batch_axis = picked.ndim > rows.ndim
        return ItemRows(picked) if got_batch_axis and rows.ndim < 3 else picked


@dataclass(frozen=True)
class Tokens:
    """How a kind of module receives and returns image tokens."""

    names: tuple[str, ...] = ()
    """Parameters of its forward, in order."""
    input: str = "hidden_states"
    """The parameter that takes the tokens, `[B, N, C]`."""
    output: int | None = None
    """Index of the tokens in the returned tuple; None: they are returned alone."""
    joint: bool = False
    """Whether `input` also holds the text tokens."""
    text: Literal["before", "after", "ragged"] = "before"
    """Where the text tokens are in the sequence. "ragged": before the image, as many as the item's
    prompt has."""
    along: tuple[Along, ...] = ()
    other: str = "encoder_hidden_states"
    """If two streams go in and out: the parameter that takes the second one."""
    refused: tuple[str, ...] = ()
    """Arguments with a row per token that cannot be cut."""
    tokens_first: bool = False
    """Whether tokens are passed as `[N, B, C]`."""
    after_with: str = ""
    """An argument that, if given, means that the text comes after the image."""
    in_place: bool = False
    """Whether the module modifies its input in place."""

    def get(self, name: str, args: tuple, kwargs: dict) -> Any:
        return find_argument(self.names, name, args, kwargs)

    def take(self, args: tuple, kwargs: dict) -> Tensor:
        """The tokens, `[B, N, C]`."""
        return self._turned(self.get(self.input, args, kwargs))

    def given(self, tokens: Tensor, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with other image tokens."""
        return self.replaced({self.input: self._turned(tokens)}, args, kwargs)

    def _turned(self, tokens: Tensor) -> Tensor:
        return tokens.transpose(0, 1) if self.tokens_first else tokens

    def replaced(self, changes: dict[str, Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments, some of them replaced."""
        return replace_arguments(self.names, changes, args, kwargs)

    def result(self, output: Any) -> Tensor:
        """The image tokens in the module's output, `[B, N, C]`."""
        return self._turned(output if self.output is None else output[self.output])

    def take_other(self, args: tuple, kwargs: dict) -> Tensor | None:
        """The tokens of the second stream, if the module updates those too."""
        if self.output is None or self.other not in self.names:
            return None
        found: Tensor | None = self.get(self.other, args, kwargs)
        return found

    def result_other(self, output: Any) -> Tensor | None:
        """The tokens of the second stream in the module's output."""
        return None if self.output is None else output[1 - self.output]

    def unchanged(self, args: tuple, kwargs: dict) -> Any:
        """The output of a module that does nothing."""
        tokens = self.take(args, kwargs)
        return self.with_results(tokens, self.take_other(args, kwargs), (None, None))

    def with_results(self, tokens: Tensor, other: Tensor | None, output: Any) -> Any:
        """The module's output with the tokens of one stream or both replaced."""
        tokens = self._turned(tokens)
        if self.output is None:
            return tokens
        results = list(output)
        results[self.output] = tokens
        if other is not None:
            results[1 - self.output] = other
        return tuple(results)

    def given_refused(self, args: tuple, kwargs: dict) -> str | None:
        """Name of the first given argument that cannot be cut."""
        known = min(len(self.names), len(args))
        given = {**dict(zip(self.names[:known], args[:known], strict=True)), **kwargs}
        given.update(given.get("cross_attention_kwargs") or {})
        for name in self.refused:
            if given.get(name) is not None:
                return name
        return None

    def start(self, length: int, decision: Decision, args: tuple, kwargs: dict) -> int | Tensor:
        """Where the image begins in the joint sequence; `[B]` if that is ragged."""
        if self.text == "ragged" and decision.start is not None:
            return decision.start.to(self.take(args, kwargs).device)
        after = self.after_with and self.get(self.after_with, args, kwargs) is not None
        return 0 if after or self.text == "after" else length - decision.tokens

    def cut_along(
        self,
        plan: MergePlan,
        decision: Decision,
        args: tuple,
        kwargs: dict,
        cuts: list[Cut] | None = None,
    ) -> dict[str, Any]:
        """The arguments with a row per token, cut by a plan, by name.

        Args:
            plan: for the image tokens.
            cuts: the cuts made so far in this call, to find an equal one in or to add this one to.
        """
        given = [(along, self.get(along.name, args, kwargs)) for along in self.along]
        given = [(along, value) for along, value in given if along.is_in(value)]
        if not given:
            return {}
        starts = [self._start_in(a, v, decision, args, kwargs) for a, v in given]
        if cuts is None or any(isinstance(start, Tensor) for start in starts):
            return _cut(plan, given, starts)
        for cut in cuts:
            if cut.plan is plan and cut.starts == starts and _same(cut.given, given):
                return cut.along
        cuts.append(Cut(plan, given, starts, _cut(plan, given, starts)))
        return cuts[-1].along

    def _start_in(
        self, along: Along, value: Any, decision: Decision, args: tuple, kwargs: dict
    ) -> int | Tensor | None:
        """Where the image's rows begin in an argument; None: it has no other rows."""
        if not along.sequence or along.length(value) == 1:  # one row, shared by all tokens
            return None
        # In a joint sequence the input tells where the image is, also if the argument is longer.
        rows = self.take(args, kwargs).shape[1] if self.joint else along.length(value)
        return self.start(rows, decision, args, kwargs)


def _same(one: list[tuple[Along, Any]], other: list[tuple[Along, Any]]) -> bool:
    """Whether these are the very same arguments, not just equal ones."""
    return len(one) == len(other) and all(
        a == b and value is given for (a, value), (b, given) in zip(one, other, strict=True)
    )


def _cut(
    plan: MergePlan, given: list[tuple[Along, Any]], starts: list[int | Tensor | None]
) -> dict[str, Any]:
    """Arguments by name, cut. An argument with rows on two axes, or with two forms, comes twice."""
    cut: dict[str, Any] = {}
    # One for each length; 0 is that of the image alone. The compiler may have symbols for lengths,
    # which can be compared, but not looked up.
    pickers: list[_RowPicker] = []
    for (along, value), start in zip(given, starts, strict=True):
        length = 0 if start is None else along.length(value)
        if not any(picker.length == length for picker in pickers):
            pickers.append(_RowPicker(plan, start, length))
        (picker,) = [picker for picker in pickers if picker.length == length]
        cut[along.name] = along.cut(cut.get(along.name, value), picker)
    return cut
