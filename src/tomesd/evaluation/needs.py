"""Says early what is not installed."""

import importlib.util

from ..generation import LoadError


def need(*packages: str) -> None:
    """Raises if one is missing, before hours of work rather than after."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise LoadError(f"{package} is not installed: pip install 'tomesd[eval]'")
