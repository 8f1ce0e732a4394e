"""The command `intarsia`. Commands are entries of kind "command"; only the one that runs is imported.

Exit codes: 0 done, 1 a bug of ours, 2 usage, 3 plugin, 4 numerics, 5 checkpoint, 6 distributed, 75 stopped with a checkpoint, 130 interrupted.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import intarsia
from intarsia.contracts import Entry
from intarsia.discovery import CORE
from intarsia.errors import IntarsiaError, PluginError, UsageError, nearest
from intarsia.plugins import current, use

INTERRUPTED = 130
BROKEN_PIPE = 141
TITLES = {2: "usage error", 3: "plugin error", 4: "numerics error", 5: "checkpoint error", 6: "distributed error", 75: "stopped"}

USAGE = """\
Usage: intarsia [--disable PLUGIN] [--allow PLUGIN] COMMAND ...

Options before the command (each may be repeated):
  --disable PLUGIN   leave out a plugin: a distribution, or distribution/entry-point
  --allow PLUGIN     load only these plugins (and core)
  --version          print the version and the plugin API
  -h, --help         print this; `intarsia COMMAND --help` says more of one command

Environment: INTARSIA_PLUGINS_DISABLE, INTARSIA_PLUGINS_ALLOW (comma-separated), INTARSIA_TRACE (stderr or a file), INTARSIA_DEBUG=1 (tracebacks)

Commands:
"""


@runtime_checkable
class Command(Protocol):
    """The target of an entry of kind "command": an object with these two methods, or a class of such objects. Stability: stable."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare options and positionals; the parser has a description already."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; returns the exit code. IntarsiaErrors are shown without a traceback."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UsageErrors. Stability: provisional."""

    def names(self) -> list[str]:
        """What may be written: its options, what they and its actions choose among, and the actions' own."""
        inner = [each for action in self._actions if isinstance(action, argparse._SubParsersAction) for each in action.choices.values()]
        choices = [str(choice) for action in self._actions for choice in action.choices or ()]
        return [*self._option_string_actions, *choices, *(name for parser in inner for name in parser.names())]

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, with the nearest names."""
        wrong = re.search(r"arguments:.*?(?<!\S)(--[\w-]+)|choice: '([^']*)'", message)
        near = nearest(wrong[1] or wrong[2], self.names()) if wrong else []
        hint = f"Did you mean {' or '.join(map(repr, near))}?\n" if near else ""
        raise UsageError(f"{message}\n{hint}{self.format_usage().strip()}\n`{self.prog} --help` says more.")


def run() -> NoReturn:
    """This process's whole life: `main`, then the end. Stability: private.

    A rank ends at once behind its exit handlers. The interpreter's own end would come too early for the threads of its process groups: one that still lets go of
    a tensor then aborts the process, and no call says when the last has (gloo's end with the group's last reference, which torch may hold).
    """
    code: list[int] = []
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # The first handler that is registered is the last that runs.
        atexit.register(_leave, code)
    code.append(main())
    sys.exit(*code)


def _leave(code: list[int]) -> None:
    if code:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(*code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name; None: this process's). Returns the exit code. Stability: stable."""
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # Where the reader has gone this is the place to learn it: at exit it would be an error.
        return code
    except KeyboardInterrupt:
        print("intarsia: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`): Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except IntarsiaError as error:
        if os.environ.get("INTARSIA_DEBUG", "") not in ("", "0"):
            traceback.print_exc()
        print(f"intarsia: {TITLES.get(error.exit_code, 'error')}: {error}", file=sys.stderr)
        return error.exit_code


def _dispatch(argv: list[str]) -> int:
    rest = _leading_options(argv)
    if rest is None:
        return 0
    if not rest or rest[0] in ("-h", "--help"):
        print(USAGE + _command_list(), end="")
        return 0 if rest else UsageError.exit_code
    if rest[0].startswith("-"):
        raise UsageError(f"unknown option {rest[0]!r} before the command. `intarsia --help` lists the options.")
    entry = current().registry("command").find(rest[0])
    command = load_command(entry)
    parser = Parser(prog=f"intarsia {rest[0]}", description=entry.doc, allow_abbrev=False)
    try:
        command.add_arguments(parser)
        try:
            arguments = parser.parse_intermixed_args(rest[1:])  # options may stand between overrides
        except TypeError:
            arguments = parser.parse_args(rest[1:])  # a command with commands of its own
        return int(command.run(arguments) or 0)
    except SystemExit as stop:  # argparse, after printing help
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except (IntarsiaError, BrokenPipeError):
        raise
    except Exception:
        traceback.print_exc()
        whose = "intarsia" if entry.owner == CORE else f"plugin {entry.plugin}"
        print(
            f"intarsia: command {entry.full_name!r} met a bug. Please report it, with the lines above, to the authors of {whose}.",
            file=sys.stderr,
        )
        return IntarsiaError.exit_code


def _leading_options(argv: list[str]) -> list[str] | None:
    """Take the options before the command. They go into the environment, so that processes that are started select alike. None: all is done."""
    rest = list(argv)
    chosen: dict[str, list[str]] = {}
    while rest and rest[0].startswith("-"):
        option, equals, value = rest[0].partition("=")
        if option == "--version":
            print(f"intarsia {intarsia.__version__} (plugin API {intarsia.PLUGIN_API})")
            return None
        if option not in ("--disable", "--allow"):
            break
        del rest[0]
        if not equals:
            if not rest:
                raise UsageError(f"{option} needs the name of a plugin.")
            value = rest.pop(0)
        chosen.setdefault(option, []).append(value)
    for option, names in chosen.items():
        variable = f"INTARSIA_PLUGINS_{option[2:].upper()}"
        earlier = [os.environ[variable]] if os.environ.get(variable) and option == "--disable" else []
        os.environ[variable] = ",".join([*earlier, *names])
        use(None)
    return rest


def _command_list() -> str:
    registry = current().registry("command")
    short = set(registry.names())
    rows = [(e.name if e.name in short else e.full_name, e.doc, "" if e.owner == CORE else f" [{e.owner}]") for e in registry.entries()]
    width = max(len(name) for name, _, _ in rows)
    return "".join(f"  {name:<{width}}  {doc}{owner}\n" for name, doc, owner in rows)


def load_command(entry: Entry) -> Command:
    """The command of an entry, imported now. PluginError when it can't be, or is none. Stability: provisional."""
    found: Any = current().target(entry)
    command = found() if isinstance(found, type) else found
    if not isinstance(command, Command):
        raise PluginError(
            f"command {entry.full_name!r} of plugin {entry.plugin}: {entry.target} must have add_arguments(parser) and run(arguments)."
        )
    return command
