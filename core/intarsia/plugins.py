"""Plugins of this process: loading them one by one, registries of what they offer, who owns what, and proof that processes agree.

`load` makes a `Plugins`; `current()` is the one of this process. Nothing here imports torch, and listing imports no plugin's config or target.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import intarsia
from intarsia.contracts import KernelEntry
from intarsia.discovery import (
    CORE,
    Candidate,
    Failure,
    Selection,
    candidate_of,
    check_known,
    contained,
    describe,
    import_reference,
    names_of,
    normalise,
    scan,
    unique,
)
from intarsia.errors import IntarsiaError, PluginError, UsageError, did_you_mean
from intarsia.hooks import Hooks, Spec, with_owner
from intarsia.loader import Loader, Record

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia.config import Config
    from intarsia.contracts import Entry

__all__ = [
    "Candidate",
    "Failure",
    "Plugins",
    "Registry",
    "check_same_plugins",
    "child_environment",
    "current",
    "import_reference",
    "load",
    "use",
    "verify_child",
]

# The environment variable by which a process tells those it starts which plugins they must hold.
EXPECTED = "INTARSIA_PLUGINS_EXPECTED"

_current: Plugins | None = None
_warned: set[str] = set()


class Registry:
    """All entries of one kind. Stability: stable."""

    def __init__(self, spec: Spec, entries: Sequence[Entry], plugins: Plugins):
        self.kind = spec.facts.kind
        self.base = spec.facts.base
        self.hook = spec.name
        self._entries = tuple(entries)
        self._plugins = plugins

    def entries(self) -> list[Entry]:
        """In declared order: core's, then by distribution and entry point."""
        return list(self._entries)

    def names(self) -> list[str]:
        """Names to choose by: short where only one owner has it, else `owner:name`."""
        owners: dict[str, set[str]] = {}
        for entry in self._entries:
            owners.setdefault(entry.name, set()).add(entry.owner)
        return list(dict.fromkeys(entry.name if len(owners[entry.name]) == 1 else entry.full_name for entry in self._entries))

    def find(self, name: str, **fields: Any) -> Entry:
        """The entry of that name (`name` or `owner:name`), among those whose attributes equal `fields` (`op="rope"` for kernels).

        UsageError when it is unknown (with the nearest) or ambiguous (with the full names); PluginError when a plugin that failed may offer it.
        """
        owner, _, short = name.rpartition(":")
        owner = normalise(owner)
        fitting = [entry for entry in self._entries if all(getattr(entry, key, None) == value for key, value in fields.items())]
        found = [entry for entry in fitting if entry.name == short and owner in ("", entry.owner)]
        if len(found) == 1:
            return found[0]
        if found:
            choices = " or ".join(repr(entry.full_name) + (f" for {entry.op}" if isinstance(entry, KernelEntry) else "") for entry in found)
            raise UsageError(f"{self.kind} {name!r} is offered several times. Write {choices}, or disable a plugin (plugins.disable).")
        suspects = self._plugins.suspects(self.hook, owner)
        hint = did_you_mean(name, [entry.full_name if owner else entry.name for entry in fitting])
        if suspects:
            causes = "".join(f"\n  {failure}" for failure in suspects)
            raise PluginError(f"unknown {self.kind} {name!r}. {hint} A plugin that failed to load may offer it:{causes}")
        skipped = self._plugins.skipped
        left_out = f" Not loaded, since disabled or not allowed: {', '.join(c.id for c in skipped)}." if skipped else ""
        raise UsageError(f"unknown {self.kind} {name!r}. {hint}{left_out}")


class Plugins:
    """A set of loaded plugins. Made by `load`, immutable but for caches. Stability: stable.

    `hooks` calls events; `failures` are the rejected plugins; `notices` are oddities that harm nothing; `skipped` were not selected.
    """

    def __init__(
        self,
        records: Sequence[Record],
        specs: Mapping[str, Spec],
        hooks: Hooks,
        failures: Sequence[Failure],
        notices: Sequence[str],
        skipped: Sequence[Candidate],
    ):
        self.hooks = hooks
        self.failures = tuple(failures)
        self.notices = tuple(notices)
        self.skipped = tuple(skipped)
        self.records = tuple(records)
        entries: dict[str, list[Entry]] = {}
        for record in records:
            for entry in record.entries:
                entries.setdefault(entry.kind, []).append(entry)
        offers = [spec for spec in specs.values() if spec.facts.sort == "offer"]
        self._registries = {spec.facts.kind: Registry(spec, entries.get(spec.facts.kind, ()), self) for spec in offers}
        self._classes: dict[str, type[Config]] = {}  # config reference -> its class
        self._entry_of: dict[type, Entry] = {}
        self._targets: dict[str, Any] = {}

    # ------------------------------------------------------------ what there is

    def kinds(self) -> list[str]:
        """Kinds of entries, core's first, then those that plugins declare."""
        return list(self._registries)

    def registry(self, kind: str) -> Registry:
        """The registry of a kind. PluginError when neither core nor a loaded plugin declares it."""
        if kind not in self._registries:
            failed = f"{self.report()}" if self.failures else ""
            raise PluginError(
                f"no kind {kind!r} is declared by core or a loaded plugin. {did_you_mean(kind, self.kinds())} {failed}".rstrip()
            )
        return self._registries[kind]

    def suspects(self, hook: str, owner: str = "") -> list[Failure]:
        """The failed plugins (of `owner`, where given) that implement `hook`, or of which that isn't known."""
        return [f for f in self.failures if owner in ("", f.distribution) and (f.hooks is None or hook in f.hooks)]

    def report(self) -> str:
        """All failures in one text; empty without any."""
        if not self.failures:
            return ""
        count = len(self.failures)
        lines = "".join(f"\n  {failure}" for failure in self.failures)
        return f"{count} plugin{'s' if count > 1 else ''} failed to load and {'are' if count > 1 else 'is'} left out:{lines}"

    def require(self, names: Iterable[str]) -> None:
        """See that these plugins (distribution, or distribution/entry-point) are loaded whole. PluginError when one failed; UsageError when it is
        not selected or not installed."""
        candidates = [record.candidate for record in self.records]
        failed = {name: failure for failure in self.failures for name in (failure.distribution, failure.plugin)}
        left_out = names_of(self.skipped)
        for name in map(normalise, names):
            if name in failed:
                raise PluginError(f"plugin {name!r} was asked for. {self.report()}")
            if name in left_out:
                raise UsageError(f"plugin {name!r} was asked for, but plugins.disable or plugins.allow leaves it out.")
            check_known(name, names_of(candidates) | left_out, "plugins.require")

    # ------------------------------------------------------------ from an entry to its code

    def config_class(self, entry: Entry) -> type[Config]:
        """The entry's config class, imported now. PluginError when it can't be imported, isn't a chz subclass of the kind's base, or belongs to another entry."""
        if entry.config is None:
            raise PluginError(f"{entry.kind} {entry.full_name!r} has no config class.")
        if entry.config not in self._classes:
            found = self._import(entry, entry.config)
            base = import_reference(self.registry(entry.kind).base)
            # chz.is_chz is true of an undecorated subclass, too, whose own fields would be lost.
            if not (isinstance(found, type) and issubclass(found, base) and found is not base and "__chz_fields__" in vars(found)):
                text = f"{entry.kind} {entry.full_name!r} of plugin {entry.plugin}: {entry.config!r} must be a subclass of {base.__name__}"
                raise PluginError(f"{text}, decorated with @chz.chz(typecheck=True).")
            other = self._entry_of.setdefault(found, entry)
            if other.config != entry.config:
                text = f"{entry.kind} {entry.full_name!r} and {other.kind} {other.full_name!r} name one config class, {found.__qualname__}"
                raise PluginError(f"{text}. Each entry needs a class of its own: the class says which entry was chosen.")
            self._classes[entry.config] = found
        return self._classes[entry.config]

    def entry_of(self, config: Config | type[Config]) -> Entry:
        """The entry that a config object's class belongs to. PluginError if there is none."""
        chosen = config if isinstance(config, type) else type(config)
        if chosen in self._entry_of:
            return self._entry_of[chosen]
        bases = {parent.__qualname__ for parent in chosen.__mro__}
        kinds = [registry for registry in self._registries.values() if registry.base.rpartition(":")[2] in bases]
        entries = [entry for registry in kinds for entry in registry.entries() if entry.config is not None]
        # Nearly always the class is where its entry says; one that is re-exported elsewhere is found by importing the others.
        reference, name = f"{chosen.__module__}:{chosen.__qualname__}", f":{chosen.__qualname__}"
        for entry in sorted(entries, key=lambda entry: (entry.config != reference, not str(entry.config).endswith(name))):
            _, error = contained(self.config_class, entry)
            if error is not None and entry.config == reference:  # another entry's fault must not hide the answer
                raise error
            if chosen in self._entry_of:
                return self._entry_of[chosen]
        raise PluginError(
            f"{chosen.__module__}.{chosen.__qualname__} is not the config class of any entry of a loaded plugin. {self.report()}".rstrip()
        )

    def target(self, entry: Entry) -> Any:
        """The entry's code, imported now. PluginError names owner, entry and cause."""
        if entry.target not in self._targets:
            self._targets[entry.target] = self._import(entry, entry.target)
        return self._targets[entry.target]

    def build(self, config: Config, *args: Any, **kwargs: Any) -> Any:
        """`target(entry_of(config))(config, *args, **kwargs)`. What the target raises becomes a PluginError that names it; IntarsiaErrors keep their class."""
        entry = self.entry_of(config)
        target = self.target(entry)
        try:
            return target(config, *args, **kwargs)
        except IntarsiaError as error:
            with_owner(error, f"from {entry.kind} {entry.full_name}")
            raise
        except Exception as error:
            raise PluginError(f"{entry.kind} {entry.full_name!r} of plugin {entry.plugin} can't be built: {describe(error)}") from error

    def _import(self, entry: Entry, reference: str) -> Any:
        try:
            return import_reference(reference)
        except PluginError as error:
            raise PluginError(f"{entry.kind} {entry.full_name!r} of plugin {entry.plugin}: {error}") from error.__cause__

    # ------------------------------------------------------------ what is recorded and compared

    def facts(self) -> list[dict[str, Any]]:
        """What is loaded, as JSON: one object for each distribution, in declared order."""
        found: dict[str, dict[str, Any]] = {}
        for record in self.records:
            candidate = record.candidate
            fresh: dict[str, Any] = {"distribution": candidate.distribution, "version": candidate.version, "api": record.api}
            fact = found.setdefault(candidate.distribution, {**fresh, "entry_points": [], "hooks": [], "entries": []})
            fact["api"] = min(fact["api"], record.api)
            fact["entry_points"].append(candidate.name)
            fact["hooks"] = sorted({*fact["hooks"], *record.implementations})
            fact["entries"] += [{"kind": entry.kind, "name": entry.name, "entry_point": candidate.name} for entry in record.entries]
        return list(found.values())

    def fingerprint(self) -> str:
        """Equal exactly when the same plugins, versions, hooks and entries are loaded."""
        import hashlib  # here, since loading OpenSSL would slow down every command

        entries = [
            [entry.plugin, entry.kind, entry.name, entry.target, entry.config] for record in self.records for entry in record.entries
        ]
        return hashlib.sha256(json.dumps([self.facts(), entries], sort_keys=True).encode()).hexdigest()[:16]

    def versions(self) -> dict[str, str]:
        """`distribution/entry-point` to version, of what is loaded."""
        return {record.candidate.id: record.candidate.version for record in self.records}


def load(
    disable: Sequence[str] = (), allow: Sequence[str] = (), require: Sequence[str] = (), entry_points: Iterable[Any] | None = None
) -> Plugins:
    """Load the installed plugins (or `entry_points`, for tests) that are selected here and by INTARSIA_PLUGINS_DISABLE and INTARSIA_PLUGINS_ALLOW.

    A plugin that fails is left out whole and listed in `failures`, with one warning for all; one named by `require` is fatal (PluginError).
    A name in `disable`, `allow` or `require` that matches nothing is a UsageError. Stability: stable.
    """
    selection = Selection.of(disable, allow)
    found = scan() if entry_points is None else map(candidate_of, entry_points)
    core = Candidate(CORE, intarsia.__version__, "core", "intarsia.builtin")
    candidates, doubles, notices = unique([core, *(candidate for candidate in found if candidate.id != core.id)])
    refused = [Candidate(failure.distribution, failure.version, failure.entry_point) for failure in doubles]
    selection.check(names_of([*candidates, *refused]))
    loader = Loader()
    records, specs = loader.load([candidate for candidate in candidates if selection.takes(candidate)])
    failures = [failure for failure, candidate in zip(doubles, refused, strict=True) if selection.takes(candidate)] + loader.failures
    skipped = [candidate for candidate in candidates if not selection.takes(candidate)]
    plugins = Plugins(records, specs, loader.hooks, failures, notices, skipped)
    plugins.require(require)
    _warn_once(plugins)
    return plugins


def _warn_once(plugins: Plugins) -> None:
    report = plugins.report()
    if report and report not in _warned:
        _warned.add(report)
        logging.getLogger("intarsia.plugins").warning("%s\n`intarsia plugins doctor` says more.", report)


def current() -> Plugins:
    """The plugins of this process, loaded on first use. Stability: stable."""
    global _current
    if _current is None:
        _current = load()
    return _current


def use(plugins: Plugins | None) -> None:
    """Set what `current()` gives; None: load again on next use. Stability: stable."""
    global _current
    _current = plugins


# ---------------------------------------------------------------- several processes


def check_same_plugins(comm: Communicator, plugins: Plugins | None = None) -> None:
    """Prove that all ranks hold the same plugin set; collective. What `agree` raises shows both sides. Stability: stable."""
    plugins = plugins or current()
    comm.agree({"fingerprint": plugins.fingerprint(), "plugins": plugins.versions()}, "the plugins that are loaded")


def child_environment(plugins: Plugins | None = None) -> dict[str, str]:
    """Variables for the environment of a process to be started: the same selection, and what it must hold (see `verify_child`). Stability: stable."""
    plugins = plugins or current()
    expected = json.dumps({"fingerprint": plugins.fingerprint(), "plugins": plugins.versions()})
    allowed = ",".join(plugins.versions()) if plugins.skipped else ""
    return {"INTARSIA_PLUGINS_DISABLE": "", "INTARSIA_PLUGINS_ALLOW": allowed, EXPECTED: expected}


def verify_child(plugins: Plugins | None = None) -> None:
    """In a process started with `child_environment`: PluginError, naming the differences, unless it holds the starter's plugins. Stability: stable."""
    plugins = plugins or current()
    text = os.environ.get(EXPECTED)
    if not text:
        return
    expected = json.loads(text)
    if expected["fingerprint"] == plugins.fingerprint():
        return
    theirs, ours = expected["plugins"], plugins.versions()
    parts = [f"{name} {theirs[name]} is missing" for name in theirs if name not in ours]
    parts += [f"{name} {ours[name]} is extra" for name in ours if name not in theirs]
    parts += [f"{name} is {ours[name]} and not {theirs[name]}" for name in ours if theirs.get(name, ours[name]) != ours[name]]
    difference = "; ".join(parts) or "the same versions offer different entries"
    raise PluginError(f"this process does not hold the plugins of the one that started it: {difference}. {plugins.report()}".rstrip())
