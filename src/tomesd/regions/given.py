"""The arguments of a call of a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Given:
    """The arguments of a call, by name; `a.b` is the entry `b` of the dict `a`, if it has one."""

    names: tuple[str, ...]
    args: tuple
    kwargs: dict

    def __getitem__(self, name: str) -> Any:
        name, *entries = name.split(".")
        place = self.names.index(name) if name in self.names else len(self.args)
        value = self.args[place] if place < len(self.args) else self.kwargs.get(name)
        for entry in entries:
            value = value.get(entry) if isinstance(value, dict) else None
        return value

    def replaced(self, values: Mapping[str, Any]) -> "Given":
        """The same with other values for some names."""
        args = tuple(
            values.get(name, value) for name, value in zip(self.names, self.args, strict=False)
        )
        by_place = self.names[: len(args)]
        others = {name: value for name, value in values.items() if name not in by_place}
        return Given(self.names, args, self.kwargs | others)
