"""Parses the command line, runs a command, and turns errors into one line."""

import os
import sys
import warnings
from dataclasses import fields, is_dataclass, replace
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any

import docstring_parser
import tyro
from rich.console import Console

from .. import __version__
from ..settings import MergeWarning
from .bench import Bench
from .calibrate import Calibrate
from .demo import Demo
from .describe import Describe
from .eval import Eval
from .generate import Generate
from .options import named_in, types
from .report import Report
from .show import Show
from .tune import NothingFoundError, Tune
from .ui import Ui

_COMMANDS: tuple[Any, ...] = (
    *(Demo, Generate, Show, Describe, Bench),
    *(Eval, Report, Calibrate, Tune, Ui),
)


def run(arguments: list[str]) -> int:
    """Exit code: 0 done, 1 the run failed, 2 the request was wrong, 130 interrupted."""
    console, errors = (
        Console(highlight=False, markup=False, soft_wrap=True, stderr=stderr)
        for stderr in (False, True)
    )
    if arguments == ["--version"]:
        console.print(f"tomesd {__version__}")
        return 0
    warnings.showwarning = _show_warning(errors)
    try:
        parse(arguments).run(console)
        return 0
    except SystemExit as exit:  # help, or words that do not parse
        return exit.code if isinstance(exit.code, int) else 2
    except KeyboardInterrupt:
        errors.print("tomesd: interrupted")
        return 130
    except BrokenPipeError:  # who read it, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write
        return 1
    except (ValueError, TypeError) as error:
        errors.print(f"tomesd: {error}")
        return 2
    except (NothingFoundError, OSError) as error:
        errors.print(f"tomesd: {error}")
        return 1
    except (RuntimeError, MemoryError) as error:
        return _tell_failure(errors, error)


def _tell_failure(errors: Console, error: Exception) -> int:
    """One line on what the libraries raised; a fault of the program is raised again."""
    import torch

    from ..generation import LoadError
    from ..hosts import UnsupportedModelError

    if isinstance(error, LoadError | UnsupportedModelError):
        errors.print(f"tomesd: {error}")
        return 2
    if not isinstance(error, torch.OutOfMemoryError | MemoryError):
        raise error
    errors.print(
        "tomesd: out of memory; try a smaller --size, a higher --ratio, --dtype float16 or "
        "--offload model"
    )
    return 1


def parse(arguments: list[str]) -> Any:
    """The command that the words ask for."""
    _keep_help_together()
    # Each is called by the name of its class.
    named: Any = (Annotated[c, tyro.conf.subcommand(c.__name__.lower())] for c in _COMMANDS)
    commands: Any = reduce(or_, named)
    with types:
        command = tyro.cli(
            commands,
            prog="tomesd",
            description="Token merging for diffusion models.",
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    if hasattr(command, "merge"):
        command = replace(command, merge=replace(command.merge, named=named_in(arguments)))
    return command


@cache
def _keep_help_together() -> None:
    """Gives tyro the docstring of every option as one line: it would keep the breaks in them."""
    for command in _COMMANDS:
        groups = [f.type for f in fields(command) if is_dataclass(f.type)]
        for options in (command, *groups):
            parsed = [docstring_parser.parse_from_object(cls) for cls in options.__mro__[-2::-1]]
            help = {p.arg_name: p.description or "" for one in parsed for p in one.params}
            options.__annotations__ = {
                f.name: Annotated[f.type, tyro.conf.arg(help=" ".join(help[f.name].split()))]
                if f.name in help
                else f.type
                for f in fields(options)
            }


def _show_warning(errors: Console) -> Any:
    before, said = warnings.showwarning, set[str]()

    def show(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, MergeWarning):
            if str(message) not in said:
                errors.print(f"tomesd: {message}")
            said.add(str(message))
        elif sys.warnoptions:
            before(message, category, *rest, **more)

    return show
