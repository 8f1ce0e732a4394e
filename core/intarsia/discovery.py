"""Finding plugins: entry points, which of them a run selects, and importing what they name. Imports no plugin by itself."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from intarsia.errors import IntarsiaError, PluginError, UsageError, did_you_mean

# The group of entry points in which plugins are found.
GROUP = "intarsia"

# The distribution name of core: its offers come first, and it can be neither disabled nor disallowed.
CORE = "intarsia"

# `module:attribute`, both dotted.
REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An entry point before it is loaded. Tests hand over `plugin` (a module or an object) in place of `value`. Stability: provisional."""

    distribution: str
    version: str
    name: str
    value: str = ""
    plugin: Any = None
    location: str = ""

    @property
    def id(self) -> str:
        """`distribution/entry-point`, unique in a process."""
        return f"{self.distribution}/{self.name}"


@dataclasses.dataclass(frozen=True)
class Failure:
    """One plugin that was rejected, and why. Stability: stable.

    `hook` is where it happened: a hook's name, or `discovery`, `import`, `api`, `register`. `hooks` are the hooks that the plugin implements, None
    when it did not get so far: a plugin that may offer a thing that a run asks for makes the run fail.
    """

    distribution: str
    version: str
    entry_point: str
    hook: str
    cause: str
    hooks: frozenset[str] | None = dataclasses.field(default=None, compare=False, repr=False)
    error: BaseException | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def plugin(self) -> str:
        """`distribution/entry-point`."""
        return f"{self.distribution}/{self.entry_point}"

    def __str__(self) -> str:
        return f"{self.plugin} {self.version}, {self.hook}: {self.cause}"


def describe(error: BaseException) -> str:
    """An exception in one line, with the file and line that raised it (where that is neither the loader nor the import system)."""
    text = str(error) if isinstance(error, IntarsiaError) else f"{type(error).__name__}: {error}".rstrip(": ")
    hidden = (os.path.dirname(importlib.__file__), os.path.dirname(__file__))
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<") and os.path.dirname(f.filename) not in hidden
    ]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames and not isinstance(error, SyntaxError) else text


def import_reference(reference: str) -> Any:
    """The object that `"module:attribute"` names. Raises PluginError with the cause; whatever the module raises is contained. Stability: stable."""
    if not isinstance(reference, str) or not REFERENCE.fullmatch(reference):
        raise PluginError(f"{reference!r} is not of the form 'module:attribute'.")
    module_name, _, path = reference.partition(":")
    found = import_contained(module_name, f"cannot import {reference!r}")
    for name in path.split("."):
        if not hasattr(found, name):
            hint = did_you_mean(name, [key for key in dir(found) if not key.startswith("_")])
            raise PluginError(f"cannot import {reference!r}: {module_name} has no {name!r}. {hint}")
        found = getattr(found, name)
    return found


def contained(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[Any, BaseException | None]:
    """(what a plugin's function returns, None) or (None, what it raised). A plugin may raise anything; only the user's KeyboardInterrupt passes."""
    try:
        return function(*arguments, **keywords), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, error


def import_contained(module_name: str, what: str) -> Any:
    """Import a module; what it raises becomes a PluginError that begins with `what`."""
    module, error = contained(importlib.import_module, module_name)
    if error is not None:
        raise PluginError(f"{what}: {describe(error)}") from error
    return module


def normalise(name: str) -> str:
    """A distribution's name as packaging compares it: lower case, runs of `-`, `_` and `.` are one `-`. An entry point's name after `/` is kept."""
    distribution, slash, entry_point = name.strip().partition("/")
    return re.sub(r"[-_.]+", "-", distribution).lower() + slash + entry_point


def scan() -> Iterator[Candidate]:
    """Every entry point of our group on sys.path, in scan order, also those that importlib's own scan would drop (a second distribution of one name).

    Only distributions that have the group are read further, by hand: parsing each METADATA as a message costs more than all the rest.
    """
    seen: set[tuple[str, str, str]] = set()
    for distribution in importlib.metadata.distributions():
        found, error = contained(_candidates, distribution)
        if error is not None:  # reported like any plugin that fails, and no reason to lose the others
            path = str(getattr(distribution, "_path", "unnamed"))
            found = [Candidate(normalise(os.path.basename(path).partition("-")[0]), "unknown", "metadata", plugin=error, location=path)]
        identity = {(one.distribution, one.version, os.path.realpath(one.location)) for one in found}
        if not identity & seen:  # the same folder can stand on sys.path twice
            seen |= identity
            yield from found


def _candidates(distribution: importlib.metadata.Distribution) -> list[Candidate]:
    """The entry points of our group in one distribution."""
    text = distribution.read_text("entry_points.txt")
    if not text or f"[{GROUP}]" not in text:
        return []
    place = str(distribution.locate_file(""))
    header = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[0]
    fields = dict(re.findall(r"^(Name|Version):\s*(\S+)", header, re.MULTILINE))
    owner, version = normalise(fields.get("Name", "unnamed")), fields.get("Version", "unknown")
    points = (point for point in distribution.entry_points if point.group == GROUP)
    return [Candidate(owner, version, point.name, point.value, location=place) for point in points]


def candidate_of(point: Any) -> Candidate:
    """A Candidate as it is; an `importlib.metadata.EntryPoint` as one."""
    if isinstance(point, Candidate):
        return dataclasses.replace(point, distribution=normalise(point.distribution))
    dist = point.dist
    name, version = (dist.name, dist.version) if dist is not None else (point.value.partition(".")[0].partition(":")[0], "unknown")
    return Candidate(normalise(name), version, point.name, point.value)


def unique(candidates: Iterable[Candidate]) -> tuple[list[Candidate], list[Failure], list[str]]:
    """Put candidates in declared order (core, then by distribution, then by entry point) and settle doubles, whatever the scan order was.

    A distribution found twice with the same version and entry points counts once, with a notice; with different ones neither is loaded, since
    which of them Python would import is not ours to guess. Returns (candidates, failures, notices).
    """
    copies: dict[str, dict[str, list[Candidate]]] = {}
    for candidate in candidates:
        copies.setdefault(candidate.distribution, {}).setdefault(f"{candidate.location}\0{candidate.version}", []).append(candidate)
    kept, failures, notices = [], [], []
    for distribution in sorted(copies, key=lambda name: (name != CORE, name)):
        contents = {tuple(sorted((c.version, c.name, c.value) for c in group)) for group in copies[distribution].values()}
        groups = [sorted(group, key=lambda c: (c.name, c.value)) for _, group in sorted(copies[distribution].items())]
        if len(groups) > 1:
            where = "; ".join(f"{group[0].version} in {group[0].location or 'an unknown place'}" for group in groups)
            if len(contents) > 1 and distribution != CORE:
                cause = f"the distribution is installed {len(groups)} times ({where}); none is loaded: uninstall all but one"
                failures += [Failure(distribution, group[0].version, c.name, "discovery", cause) for group in groups for c in group]
                continue
            notices.append(f"{distribution} is installed {len(groups)} times, alike ({where}); it is loaded once.")
        for name in dict.fromkeys(c.name for c in groups[0]):
            same = [c for c in groups[0] if c.name == name]
            if len(same) == 1:
                kept.append(same[0])
            else:
                cause = f"the distribution lists this entry point {len(same)} times ({', '.join(c.value or repr(c.plugin) for c in same)})"
                failures.append(Failure(distribution, same[0].version, name, "discovery", cause))
    for name in sorted({c.name for c in kept}):
        ids = [c.id for c in kept if c.name == name]
        notices += [f"entry points share the name {name!r}: {', '.join(ids)}; all are loaded."] if len(ids) > 1 else []
    return kept, failures, notices


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which plugins are loaded: `disable` and `allow` name distributions or `distribution/entry-point`; every non-empty list in `allow` restricts."""

    disable: tuple[str, ...] = ()
    allow: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, disable: Sequence[str], allow: Sequence[str]) -> Selection:
        """From arguments and the environment variables INTARSIA_PLUGINS_DISABLE and INTARSIA_PLUGINS_ALLOW (comma-separated)."""
        off = (*disable, *_environment("INTARSIA_PLUGINS_DISABLE"))
        lists = [names for names in (tuple(allow), _environment("INTARSIA_PLUGINS_ALLOW")) if names]
        return cls(tuple(sorted({normalise(name) for name in off})), tuple(sorted({tuple(sorted(map(normalise, x))) for x in lists})))

    def takes(self, candidate: Candidate) -> bool:
        """Whether the candidate may be imported."""
        names = {candidate.distribution, candidate.id}
        return candidate.distribution == CORE or (not names & set(self.disable) and all(names & set(allowed) for allowed in self.allow))

    def check(self, known: set[str]) -> None:
        """UsageError for a name that matches nothing, or that would switch off core."""
        for name in (*self.disable, *(name for allowed in self.allow for name in allowed)):
            check_known(name, known, "plugins.disable" if name in self.disable else "plugins.allow")
        for name in self.disable:
            if name.partition("/")[0] == CORE:
                raise UsageError(f"plugins.disable names {name!r}: core can't be disabled.")


def check_known(name: str, known: set[str], where: str) -> None:
    """UsageError with the nearest installed plugin when `name` is neither a distribution nor a `distribution/entry-point`."""
    if normalise(name) not in known:
        raise UsageError(f"{where} names {name!r}, which is not an installed plugin. {did_you_mean(name, known)}")


def names_of(candidates: Iterable[Candidate]) -> set[str]:
    """Every name by which plugins can be selected."""
    return {name for candidate in candidates for name in (candidate.distribution, candidate.id)}


def load_object(candidate: Candidate) -> tuple[Any, Any]:
    """(the plugin: a module or an object, the module it comes from or None). A class is instantiated. Raises PluginError."""
    plugin = candidate.plugin
    if isinstance(plugin, BaseException):
        raise PluginError(f"the metadata in {candidate.location} can't be read: {describe(plugin)}") from plugin
    module = sys.modules.get(getattr(plugin, "__module__", type(plugin).__module__))
    if plugin is None:
        value = re.sub(r"\s*\[.*\]\s*$", "", candidate.value).strip()
        module = import_contained(value.partition(":")[0], f"cannot import {value!r}")
        plugin = import_reference(value) if ":" in value else module
    if isinstance(plugin, type):
        found, error = contained(plugin)
        if error is not None:
            raise PluginError(f"the class {plugin.__qualname__} can't be instantiated without arguments: {describe(error)}") from error
        plugin = found
    return plugin, module


def _environment(name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in os.environ.get(name, "").split(",") if part.strip())
