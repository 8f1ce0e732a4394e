"""Loading plugins: each one is checked whole before anything of it is registered, and a rejected one leaves nothing behind."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pluggy

import intarsia
from intarsia import hookspecs
from intarsia.contracts import Entry
from intarsia.discovery import REFERENCE, Candidate, Failure, contained, describe, import_contained, load_object
from intarsia.errors import did_you_mean
from intarsia.hooks import Hooks, Implementation, Spec, Trace, undisturbed
from intarsia.hookspecs import SpecFacts

ENTRY_NAME = (r"[a-z0-9][a-z0-9_./+-]*", "letters, digits and . _ / + -")
# What an entry may be called, as a pattern and in words; an extension's name is a key of the recipe and therefore an identifier.
EXTENSION_NAME = (r"[a-z][a-z0-9_]*", "letters, digits and _, beginning with a letter")

# What loading a plugin must not import: each takes a second of every command.
HEAVY = ("torch", "numpy", "transformers", "triton")

CORE_SPECS = "intarsia/core"


class Rejected(Exception):
    """A plugin can't be taken, for `cause`, found in `hook`."""

    def __init__(self, hook: str, cause: str, error: BaseException | None = None):
        super().__init__(cause)
        self.hook = hook
        self.error = error


@dataclasses.dataclass
class Record:
    """A plugin that is loaded. `specs` are the hooks it declares, `entries` all that it offers, `heavy` what it should not have
    imported when it was loaded."""

    candidate: Candidate
    plugin: Any
    api: int = 0
    heavy: tuple[str, ...] = ()
    implementations: dict[str, Implementation] = dataclasses.field(default_factory=dict)
    optional: set[str] = dataclasses.field(default_factory=set)
    specs: dict[str, Spec] = dataclasses.field(default_factory=dict)
    offered: dict[str, tuple[Entry, ...]] = dataclasses.field(default_factory=dict)

    @property
    def entries(self) -> list[Entry]:
        """All entries, in the order of hooks."""
        return [entry for entries in self.offered.values() for entry in entries]


class Loader:
    """One act of loading; afterwards `hooks` serves the loaded plugins and `failures` lists the rejected ones."""

    def __init__(self) -> None:
        self.hooks = Hooks({}, {}, Trace(os.environ["INTARSIA_TRACE"]) if os.environ.get("INTARSIA_TRACE") else None)
        self.failures: list[Failure] = []
        self._lost: dict[str, str] = {}  # hooks that a rejected plugin declares

    def load(self, candidates: Sequence[Candidate]) -> tuple[list[Record], dict[str, Spec]]:
        """Load candidates, which are in declared order. Returns the accepted ones in that order, and all specs.

        The first pass imports each and gathers the specs it declares. The second checks all against the specs, and is repeated while it rejects
        any: a plugin that goes takes its specs, and its claims to names, with it.
        """
        records: list[Record] = []
        for record in [Record(candidate, None) for candidate in candidates]:
            if self._attempt(record, self._open, record, records):
                records.append(record)
        while True:
            specs = core_specs()
            accepted = [record for record in records if self._attempt(record, self._add_specs, record, specs)]
            relay = pluggy.PluginManager("intarsia")
            relay.add_hookspecs(type("Specs", (), {name: staticmethod(spec.function) for name, spec in specs.items()}))
            claims: dict[tuple[str, ...], str] = {}
            checked = [record for record in accepted if self._attempt(record, self._check, record, specs, claims)]
            # pluggy calls the last registered first: registering backwards makes the calls run in declared order.
            registered = [r for r in reversed(checked) if self._attempt(r, relay.register, r.plugin, r.candidate.id)]
            if len(registered) == len(records):
                break
            records = registered[::-1]
        relay.check_pending()
        self._serve(relay, records, specs)
        return records, specs

    def _serve(self, relay: pluggy.PluginManager, records: Sequence[Record], specs: dict[str, Spec]) -> None:
        by_plugin = {record.candidate.id: record for record in records}
        ordered = {}
        for name in specs:
            calls = reversed(getattr(relay.hook, name).get_hookimpls())
            ordered[name] = [by_plugin[call.plugin_name].implementations[name] for call in calls]
        self.hooks.install(specs, ordered)

    def _attempt(self, record: Record, step: Callable[..., Any], *arguments: Any) -> bool:
        """Whether a step of loading went well; if not, the plugin is listed as failed. Anything but KeyboardInterrupt is contained."""
        _, error = contained(step, *arguments)
        if error is None:
            return True
        hook, cause, origin = (error.hook, str(error), error.error) if isinstance(error, Rejected) else ("register", describe(error), error)
        candidate = record.candidate
        hooks = frozenset(record.implementations) if record.plugin is not None else None
        self.failures.append(Failure(candidate.distribution, candidate.version, candidate.name, hook, cause, hooks, origin))
        self._lost.update(dict.fromkeys(record.specs, candidate.id))
        return False

    # ------------------------------------------------------------ first pass

    def _open(self, record: Record, earlier: Sequence[Record]) -> None:
        """Import a plugin, check its API, read its hook implementations, and gather the specs it declares."""
        candidate, present = record.candidate, set(sys.modules)
        found, error, moved = undisturbed(load_object, candidate)
        self.hooks.report_moved(Implementation("import", candidate.distribution, candidate.id, load_object, ()), moved)
        refuse(error, "import", str(error), error and error.__cause__)
        plugin, module = found
        record.heavy = tuple(name for name in HEAVY if name in sys.modules and name not in present)
        for other in earlier:
            shared = f"it names the same object as {other.candidate.id}: an entry point needs a module or object of its own"
            refuse(other.plugin is plugin, "import", shared)
        record.api = check_api(getattr(plugin, "INTARSIA_API", getattr(module, "INTARSIA_API", None)))
        record.implementations, record.optional = read_implementations(candidate, plugin)
        record.plugin = plugin
        declares = record.implementations.get("add_hookspecs")
        for name in self._answer(declares) if declares else ():
            refuse(not isinstance(name, str), "add_hookspecs", f"it must return module names and returned {name!r}")
            record.specs.update(declared_specs(candidate, name))

    def _answer(self, implementation: Implementation) -> list[Any]:
        """What an offer or a declaration returns, as a list."""
        answer, error = self.hooks.invoke(implementation, {})
        listed = isinstance(answer, Iterable) and not isinstance(answer, str | bytes)
        if listed:
            answer, error = contained(list, answer)
        refuse(error, implementation.hook, describe(error) if error else "", error)
        refuse(not listed, implementation.hook, f"it must return a list and returned {answer!r} (nothing to offer: return [])")
        return answer

    # ------------------------------------------------------------ second pass

    def _add_specs(self, record: Record, specs: dict[str, Spec]) -> None:
        takers = {taken: spec.plugin for name, spec in specs.items() for taken in (name, spec.facts.kind) if taken}
        for name, spec in record.specs.items():
            for what, value in (("hook", name), ("kind", spec.facts.kind)):
                refuse(value in takers, "add_hookspecs", f"{what} {value!r} is declared by {takers.get(value)} already")
        specs.update(record.specs)

    def _check(self, record: Record, specs: dict[str, Spec], claims: dict[tuple[str, ...], str]) -> None:
        """Check every implementation against its spec, then call and check the offers. Claims are kept only when all is well."""
        for name, implementation in record.implementations.items():
            if name in specs:
                check_implementation(implementation, specs[name])
            elif name not in record.optional:
                lost = f" Plugin {self._lost[name]}, which declares it, failed to load." if name in self._lost else ""
                text = f"there is no such hook.{lost} {did_you_mean(name, specs)}"
                raise Rejected(name, f"{text} (If its owner may be absent, mark it @hookimpl(optionalhook=True).)")
        for name in specs:
            unmarked = name not in record.implementations and inspect.isfunction(getattr(record.plugin, name, None))
            refuse(unmarked, name, "the function is not marked with @hookimpl")
        record.offered = {name: entries for name, entries in record.offered.items() if name in specs}
        mine: dict[tuple[str, ...], str] = {}
        for name, implementation in record.implementations.items():
            if name in specs and specs[name].facts.sort == "offer":
                if name not in record.offered:
                    offered = self._answer(implementation)
                    record.offered[name] = tuple(check_entry(e, specs[name], record.candidate) for e in offered)
                for entry in record.offered[name]:
                    claim(entry, claims, mine)
        claims.update(mine)


def refuse(wrong: Any, hook: str, cause: str, error: BaseException | None = None) -> None:
    """Reject the plugin at hand if something is wrong."""
    if wrong:
        raise Rejected(hook, cause, error)


def core_specs() -> dict[str, Spec]:
    """The hooks of `intarsia.hookspecs`."""
    marked = {name: value for name, value in vars(hookspecs).items() if isinstance(getattr(value, "spec_facts", None), SpecFacts)}
    return {name: spec_of(name, value, CORE_SPECS) for name, value in marked.items()}


def spec_of(name: str, function: Callable[..., Any], plugin: str) -> Spec:
    """A Spec from a marked function."""
    return Spec(name, function.spec_facts, function, tuple(inspect.signature(function).parameters), plugin)  # type: ignore[attr-defined]


def declared_specs(candidate: Candidate, module_name: str) -> dict[str, Spec]:
    """The hooks that a plugin's module of specs declares; what it imported from elsewhere is not its own."""
    module, error = contained(import_contained, module_name, f"cannot import {module_name!r}")
    refuse(error, "add_hookspecs", str(error), error and error.__cause__)
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", None) == module_name}
    for name, value in own.items():
        bare = hasattr(value, "intarsia_spec") and not hasattr(value, "spec_facts")
        refuse(bare, "add_hookspecs", f"{module_name}.{name} must be marked by offer, participant or observer, not by a bare hookspec")
    found = {name: spec_of(name, value, candidate.id) for name, value in own.items() if hasattr(value, "spec_facts")}
    refuse(not found, "add_hookspecs", f"module {module_name!r} has no function marked by offer, participant or observer")
    return found


def check_api(declared: Any) -> int:
    """The plugin-API version that a plugin declares, if core speaks it: PLUGIN_API or one less."""
    spoken = [version for version in (intarsia.PLUGIN_API - 1, intarsia.PLUGIN_API) if version > 0]
    accepts = " and ".join(map(str, spoken))
    refuse(
        declared is None, "api", f"it declares no plugin API: write INTARSIA_API = {intarsia.PLUGIN_API} beside its hook implementations"
    )
    text = f"INTARSIA_API must be an integer (this core accepts {accepts}) and is {declared!r}"
    refuse(isinstance(declared, bool) or not isinstance(declared, int), "api", text)
    what = "upgrade the plugin" if declared < spoken[0] else "upgrade intarsia, or install an older version of the plugin"
    text = f"it is written for plugin API {declared}; intarsia {intarsia.__version__} accepts {accepts}: {what}"
    refuse(declared not in spoken, "api", text)
    return declared


def read_implementations(candidate: Candidate, plugin: Any) -> tuple[dict[str, Implementation], set[str]]:
    """The functions that are marked by `hookimpl`, by hook; and which of those hooks may be absent."""
    reader = pluggy.PluginManager("intarsia")
    marked = [(name, options) for name in dir(plugin) if (options := reader.parse_hookimpl_opts(plugin, name)) is not None]
    found: dict[str, Implementation] = {}
    for name, options in marked:
        hook, function = options.get("specname") or name, getattr(plugin, name)
        parameters = inspect.signature(function).parameters.values()
        unnamed = ", ".join(p.name for p in parameters if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        wrapper = options.get("wrapper") or options.get("hookwrapper")
        refuse(hook in found, hook, "two functions of the plugin implement it")
        refuse(wrapper, hook, "wrappers are not supported: implement the before_ and the after_ event")
        refuse(unnamed, hook, f"arguments are handed over by name: {unnamed} can't be *, ** or positional-only")
        found[hook] = Implementation(hook, candidate.distribution, candidate.id, function, tuple(p.name for p in parameters))
    return found, {options.get("specname") or name for name, options in marked if options.get("optionalhook")}


def check_implementation(implementation: Implementation, spec: Spec) -> None:
    """Refuse arguments that the spec does not have, and functions that would not run when called."""
    for name in implementation.arguments:
        if name not in spec.arguments:
            takes = f"the hook has the arguments ({', '.join(spec.arguments)}). {did_you_mean(name, spec.arguments)}"
            raise Rejected(spec.name, f"it takes an argument {name!r}, but {takes}")
    function = implementation.function
    runs_later = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    runs_later = runs_later or (spec.facts.sort != "offer" and inspect.isgeneratorfunction(function))
    refuse(runs_later, spec.name, "it must be an ordinary function: a coroutine or generator would never run")


def check_entry(entry: Any, spec: Spec, candidate: Candidate) -> Entry:
    """The entry with kind, owner and plugin filled in, once all its fields are well formed."""
    hook, facts = spec.name, spec.facts
    refuse(not isinstance(entry, facts.entry), hook, f"{entry!r} is a {type(entry).__name__} and must be a {facts.entry.__name__}")
    pattern, allowed = EXTENSION_NAME if facts.kind == "extension" else ENTRY_NAME
    well_named = isinstance(entry.name, str) and re.fullmatch(pattern, entry.name)
    refuse(not well_named, hook, f"{entry.name!r} is not a valid name: lower-case {allowed}")
    documented = isinstance(entry.doc, str) and entry.doc.strip() and "\n" not in entry.doc
    refuse(not documented, hook, f"entry {entry.name!r} needs a doc of one line and has {entry.doc!r}")
    for field in ("target", "config", "hf", "sharding"):
        value = getattr(entry, field, None)
        fits = (value is None and field != "target") or (isinstance(value, str) and REFERENCE.fullmatch(value))
        refuse(not fits, hook, f"entry {entry.name!r}: {field} is {value!r} and must be of the form 'module:attribute'")
    useless = entry.config is not None and not facts.base
    refuse(useless, hook, f"entry {entry.name!r} names a config class, but a {facts.kind} has no settings")
    return dataclasses.replace(entry, kind=facts.kind, owner=candidate.distribution, plugin=candidate.id)


def claim(entry: Entry, claims: dict[tuple[str, ...], str], mine: dict[tuple[str, ...], str]) -> None:
    """Reject a name that the distribution has already (for kernels: for the same operator), and a config class that another entry has."""
    wanted = {entry.full_name: (entry.kind, entry.full_name, getattr(entry, "op", ""))}
    if entry.config is not None:
        wanted[f"config {entry.config!r}"] = (entry.kind, "config", entry.config)
    for what, key in wanted.items():
        other = claims.get(key) or mine.get(key)
        refuse(other, f"offer of {entry.kind} {entry.name!r}", f"{what} is taken by {other} already; each entry needs its own")
        mine[key] = f"{entry.plugin} ({entry.name})"
