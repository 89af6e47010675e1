"""Another version of the library beside this one, under another name: mostly tomesd 0.1.3."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..settings import Settings

_MODULE = "tomesd_original"


def load_original(folder: str | Path) -> ModuleType:
    """tomesd 0.1.3 out of `folder`, which is the package or holds it.

    (`pip install --no-deps --target FOLDER tomesd==0.1.3` makes such a folder.)
    """
    path = Path(folder).resolve()
    if not (path / "patch.py").is_file():
        path = path / "tomesd"
    if not (path / "patch.py").is_file():
        raise ValueError(f"original={str(folder)!r}: there is no tomesd 0.1.3 in this folder")
    loaded = sys.modules.get(_MODULE)
    if loaded is not None and Path(str(loaded.__file__)).parent == path:
        return loaded
    for name in [name for name in sys.modules if name.split(".")[0] == _MODULE]:
        del sys.modules[name]  # of another folder
    spec = importlib.util.spec_from_file_location(
        _MODULE, path / "__init__.py", submodule_search_locations=[str(path)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # its parts find each other by this name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_MODULE]
        raise
    return module


def original_options(original: ModuleType, settings: Settings) -> dict[str, Any]:
    """What another version knows of the settings; None is the default there too."""
    known = inspect.signature(original.apply_patch).parameters
    given = {name: value for name, value in vars(settings).items() if value is not None}
    return {name: value for name, value in given.items() if name in known}
