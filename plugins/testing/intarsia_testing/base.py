"""What all conformance classes share: how the entry under test is named, and the promises that every entry makes whatever its kind."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, ClassVar

from intarsia.config import Config
from intarsia.contracts import Entry
from intarsia.errors import IntarsiaError
from intarsia.plugins import current

from intarsia_testing.promise import broken, keep


class Conformance:
    """Base of the conformance classes. Subclass one of them, name your entry, run pytest.

    `entry` is "owner:name", or a short name that is not ambiguous. `config` is the settings to test with, as an object or as a method that
    returns one; without it the defaults of the entry's config class are used. `configs` are several settings, each of which is held to every promise.
    Each test is one promise: it passes, or says in words what is broken.
    """

    kind: ClassVar[str] = ""
    """The kind of entry that the class examines, as `intarsia plugins list` calls it."""

    entry: ClassVar[str] = ""
    config: Any = None
    configs: ClassVar[tuple[Any, ...]] = ()

    # ------------------------------------------------------------ what is tested

    def found_entry(self) -> Entry:
        """The entry under test."""
        keep("named", self.entry, f"{type(self).__name__} names no {self.kind}: set the class attribute `entry` to its name.")
        try:
            return current().registry(self.kind).find(self.entry)
        except IntarsiaError as error:
            broken("offered", str(error))

    def given_configs(self, *arguments: Any) -> list[Any]:
        """The settings to test with, each checked to be the entry's own; `arguments` are handed to a `config` that is a method."""
        entry = self.found_entry()
        if self.configs:
            configs = list(self.configs)
        elif callable(self.config):
            configs = [self.config(*arguments)]
        elif self.config is not None:
            configs = [self.config]
        else:
            configs = [self._default(entry)]
        for config in configs:
            found = current().entry_of(config)
            keep(
                "settings are its own",
                found.full_name == entry.full_name,
                f"{type(config).__name__} is the settings of {found.full_name}, and {entry.full_name} is tested.",
            )
        return configs

    def _default(self, entry: Entry) -> Config:
        try:
            return current().config_class(entry)()
        except TypeError as error:
            broken("settings", f"{entry.full_name} has settings without a default ({error}): give `config` to {type(self).__name__}.")

    def light_references(self, entry: Entry) -> Iterable[str]:
        """Further "module:attribute" strings of the entry whose modules must be light."""
        return ()

    # ------------------------------------------------------------ promises of every entry

    def test_entry_modules_import_no_torch(self) -> None:
        """The plugin's module and that of its settings are light: listing plugins and resolving recipes never wait for torch."""
        if not self.entry:
            return
        entry = self.found_entry()
        references = [entry.config, *self.light_references(entry), *entry_points_of(entry)]
        modules = sorted({reference.partition(":")[0] for reference in references if reference})
        if modules and heavy(modules):
            for module in modules:
                problem = heavy([module])
                keep("light", not problem, f"importing {module} {problem}. Name heavy things as 'module:attribute' strings.")

    def test_entry_names_what_exists(self) -> None:
        """Its target and its settings can be imported, and the settings derive from the kind's base."""
        if not self.entry:
            return
        entry = self.found_entry()
        try:
            target = current().target(entry)
            if entry.config is not None:
                current().config_class(entry)
        except IntarsiaError as error:
            broken("entry", str(error))
        keep("entry", callable(target), f"the target {entry.target!r} is {target!r}, which cannot be called.")


def entry_points_of(entry: Entry) -> list[str]:
    """The references of the entry points through which the entry was offered; none for core's own and for plugins that a test made."""
    distribution, _, name = entry.plugin.partition("/")
    try:
        points = importlib.metadata.distribution(distribution).entry_points
    except importlib.metadata.PackageNotFoundError:
        return []
    return [point.value for point in points.select(group="intarsia", name=name)]


def heavy(modules: Iterable[str]) -> str:
    """What is wrong with importing these in a fresh process, in words; empty when it works and torch is not imported."""
    code = (
        f"import sys, importlib\nfor name in {list(modules)!r}: importlib.import_module(name)\nsys.exit(9 if 'torch' in sys.modules else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    if run.returncode == 9:
        return "imports torch"
    return f"fails: {' '.join(run.stderr.strip().splitlines()[-1:])}" if run.returncode else ""
