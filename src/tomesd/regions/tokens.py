"""How a module takes image tokens in and gives them out, and what lies along them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..plan import MergePlan
from ..state import Decision

__all__ = ["Along", "Tokens", "take_item"]


@dataclass(frozen=True)
class Along:
    """An argument with a row for each token: merged tokens have that of their representative."""

    name: str
    axes: tuple[int, ...]
    """Where its rows are."""
    sequence: bool = False
    """Whether it has rows for all tokens of the sequence, text included, not the image's alone."""
    batched: bool = True
    """Whether its first axis is the batch. Otherwise all items have the same rows."""
    parts: tuple[int, ...] | None = None
    """Of a tuple: which of its parts lie along the tokens. None: all."""
    ndim: int | None = None
    """It lies along the tokens only if it has so many axes."""
    mean: bool = False
    """Tokens themselves, which are merged as the others are."""

    def length(self, value: Any) -> int:
        """How many rows it has."""
        while not isinstance(value, Tensor):
            value = value[0 if self.parts is None else self.parts[0]]
        return value.shape[self.axes[0]]

    def cut(self, value: Any, plan: MergePlan) -> Any:
        """The rows that are left, of a tensor or of tensors in tuples and lists."""
        if isinstance(value, Tensor):
            return self._cut(value, plan)
        if isinstance(value, tuple | list):
            parts = range(len(value)) if self.parts is None else self.parts
            inner = replace(self, parts=None)
            cut = [inner.cut(v, plan) if i in parts else v for i, v in enumerate(value)]
            return tuple(cut) if isinstance(value, tuple) else cut
        return value

    def _cut(self, rows: Tensor, plan: MergePlan) -> Tensor:
        if self.ndim is not None and rows.ndim != self.ndim:
            return rows
        if self.mean:
            return plan.merge(rows)
        for axis in self.axes:
            if rows.shape[axis] > 1:  # one row for all tokens is none for each
                rows = plan.pick(rows, axis, batched=self.batched)
        return rows


@dataclass(frozen=True)
class Tokens:
    """How one kind of module carries image tokens."""

    names: tuple[str, ...]
    """Its parameters, in order."""
    input: str
    """The parameter that takes the tokens, `[B, N, C]`."""
    output: int | None = None
    """Where they are in the tuple that it gives; None: it gives them alone."""
    joint: bool = False
    """Whether `input` holds the text's tokens too."""
    text: Literal["before", "after", "ragged"] = "before"
    """Where the text's tokens are in the sequence of all; ragged: before, as many as the prompt of
    each item has."""
    along: tuple[Along, ...] = ()
    refused: tuple[str, ...] = ()
    """Arguments that line up with the tokens and cannot be cut."""
    in_place: bool = False
    """Whether the module writes into the tokens it is given."""

    def get(self, name: str, args: tuple, kwargs: dict) -> Any:
        place = self.names.index(name)
        return args[place] if place < len(args) else kwargs.get(name)

    def take(self, args: tuple, kwargs: dict) -> Tensor:
        """The tokens."""
        tokens: Tensor = self.get(self.input, args, kwargs)
        return tokens

    def replaced(self, changes: dict[str, Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with other values for some of them."""
        known = min(len(self.names), len(args))  # PyTorch 2.8 compiles no zip of unequal lengths
        values = list(args)
        for place in range(known):
            if self.names[place] in changes:
                values[place] = changes[self.names[place]]
        by_place = self.names[:known]
        named = {name: value for name, value in changes.items() if name not in by_place}
        return tuple(values), {**kwargs, **named}

    def result(self, output: Any) -> Tensor:
        """The tokens in what the module gave."""
        tokens: Tensor = output if self.output is None else output[self.output]
        return tokens

    def with_result(self, tokens: Tensor, output: Any) -> Any:
        """What the module gave, with other tokens."""
        if self.output is None:
            return tokens
        return (*output[: self.output], tokens, *output[self.output + 1 :])

    def given_refused(self, args: tuple, kwargs: dict) -> str | None:
        """The first argument given that cannot be cut."""
        known = min(len(self.names), len(args))
        given = {**dict(zip(self.names[:known], args[:known], strict=True)), **kwargs}
        given.update(given.get("cross_attention_kwargs") or {})
        for name in self.refused:
            if given.get(name) is not None:
                return name
        return None

    def start(self, length: int, decision: Decision) -> int | Tensor:
        """Where the image's tokens begin in a sequence of all; `[B]` if that is ragged."""
        if self.text == "ragged" and decision.start is not None:
            return decision.start
        return 0 if self.text == "after" else length - decision.tokens

    def cut_along(
        self, plan: MergePlan, decision: Decision, args: tuple, kwargs: dict
    ) -> list[dict[str, Any]]:
        """What lies along the tokens, cut; for each item if they cannot be cut together.

        Args:
            plan: of the image's tokens.
        """
        given = [(along, self.get(along.name, args, kwargs)) for along in self.along]
        given = [(along, value) for along, value in given if value is not None]
        if not given:
            return [{}]
        # In a joint sequence, the image is where it is in the input, whatever rows come after it.
        length = self.take(args, kwargs).shape[1] if self.joint else None
        batch = plan.slot.shape[0]
        if batch == 1 or plan.shared or all(along.batched for along, _ in given):
            return [self._cut(plan, decision, given, length)]
        cuts = []
        for item in range(batch):
            own = [(a, take_item(v, item, batch) if a.batched else v) for a, v in given]
            cuts.append(self._cut(plan.item(item), decision, own, length))
        return cuts

    def _cut(
        self,
        plan: MergePlan,
        decision: Decision,
        given: list[tuple[Along, Any]],
        length: int | None,
    ) -> dict[str, Any]:
        cut: dict[str, Any] = {}
        for along, value in given:
            whole = plan
            if along.sequence:
                rows = along.length(value)
                start = self.start(rows if length is None else length, decision)
                whole = plan.placed(start, rows)
            cut[along.name] = along.cut(cut.get(along.name, value), whole)
        return cut

    def call(
        self, inner: Callable[..., Any], along: list[dict[str, Any]], args: tuple, kwargs: dict
    ) -> Any:
        """Calls the module with what lies along its tokens cut, item by item if need be."""
        if len(along) == 1:
            args, kwargs = self.replaced(along[0], args, kwargs)
            return inner(*args, **kwargs)
        outputs = []
        for item, cut in enumerate(along):
            own, named = take_item((args, kwargs), item, len(along))
            own, named = self.replaced(cut, own, named)
            outputs.append(inner(*own, **named))
        return _join_items(outputs)


def take_item(value: Any, item: int, batch: int) -> Any:
    """One item of all tensors in an argument that have a batch axis.

    Some have two rows for each item, those of all items one after the other.
    """
    if isinstance(value, Tensor):
        batched = value.ndim > 0 and value.shape[0] >= batch and value.shape[0] % batch == 0
        return value[item::batch] if batched else value
    if isinstance(value, dict):
        return {name: take_item(part, item, batch) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([take_item(part, item, batch) for part in value])
    return value


def _join_items(outputs: list[Any]) -> Any:
    """The outputs of the items of a batch as one."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs)
    if isinstance(first, tuple):
        return tuple(_join_items(list(parts)) for parts in zip(*outputs, strict=True))
    return first
