"""`intarsia rl`: what reinforcement learning adds to the command line. Only the subcommand that runs is imported. Torch-free."""

from __future__ import annotations

import argparse
from typing import Any

from intarsia.cli import Parser
from intarsia.discovery import import_reference

SUBCOMMANDS = {
    "show": ("intarsia_rl.show_command", "print the rollouts of a run: which there are, and one of them token by token"),
    "parity": ("intarsia_rl.invariant.parity.command", "prove that trainer and generator agree bit for bit on a recipe"),
}


class LazyParser(Parser):
    """A parser whose module adds its arguments when it is used."""

    module = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Add them, once, then parse."""
        module, self.module = self.module, ""
        if module:
            import_reference(f"{module}:add_arguments")(self)
        return super().parse_known_args(args, namespace)


class RlCommand:
    """Dispatches."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """A parser for each subcommand."""
        choices = parser.add_subparsers(dest="subcommand", required=True, metavar="|".join(SUBCOMMANDS), parser_class=LazyParser)
        for name, (module, text) in SUBCOMMANDS.items():
            choices.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False).module = module

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the one that was chosen."""
        return int(import_reference(f"{SUBCOMMANDS[arguments.subcommand][0]}:run")(arguments) or 0)


command = RlCommand()
