"""The facade over the hook relay, and what happens around each call: owners in errors, switched-off observers, trace, guarded randomness."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from intarsia.discovery import contained, describe
from intarsia.errors import IntarsiaError, PluginError, UsageError, did_you_mean
from intarsia.hookspecs import SpecFacts

# How much of each argument's repr a trace line holds.
SHOWN_CHARACTERS = 200


@dataclasses.dataclass(frozen=True)
class Spec:
    """A declared hook: its facts, its arguments' names, the plugin (`distribution/entry-point`) that declares it."""

    name: str
    facts: SpecFacts
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    plugin: str


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One plugin's function for one hook; `arguments` are those of the spec's that it takes."""

    hook: str
    owner: str
    plugin: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Disabled:
    """An observer that raised and was switched off. Stability: provisional."""

    plugin: str
    hook: str
    cause: str


class Trace:
    """One JSON line for each hook call, to stderr or appended to a file: time, pid, rank, hook, plugin, arguments (bounded repr), seconds, error."""

    def __init__(self, destination: str):
        try:
            self._stream = sys.stderr if destination == "stderr" else open(destination, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"INTARSIA_TRACE={destination}: {error.strerror}; give a file that can be written, or stderr.") from error

    def write(self, implementation: Implementation, arguments: Mapping[str, Any], seconds: float, error: BaseException | None) -> None:
        """Append one line; several processes may share the file."""
        line = {
            "time_s": round(time.time(), 6),
            "pid": os.getpid(),
            "rank": environment_rank(),
            "hook": implementation.hook,
            "owner": implementation.owner,
            "plugin": implementation.plugin,
            "arguments": {name: _bounded(arguments[name]) for name in implementation.arguments},
            "seconds": round(seconds, 9),
            "error": None if error is None else describe(error),
        }
        self._stream.write(json.dumps(line) + "\n")


def _bounded(value: Any) -> str:
    text, error = contained(repr, value)
    text = text if error is None else f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def environment_rank() -> int:
    """The rank that a launcher gave this process; 0 without one."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else 0


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, Any], bool]]]:
    """The process-wide random generators of what is imported already: name -> (get, set, equal)."""
    found: dict[str, Any] = {"random": (random.getstate, random.setstate, lambda a, b: a == b)}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and hasattr(numpy, "get_state"):
        found["numpy.random"] = (numpy.get_state, numpy.set_state, lambda a, b: repr(a[2:]) == repr(b[2:]) and bytes(a[1]) == bytes(b[1]))
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_rng_state"):  # absent while torch itself is being imported
        found["torch"] = (torch.get_rng_state, torch.set_rng_state, torch.equal)
        if torch.cuda.is_initialized():
            found["torch.cuda"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state, torch.equal)
    return found


def undisturbed(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[Any, BaseException | None, list[str]]:
    """`contained`, and the process-wide random generators are put back as they were, so that no plugin changes a run's numbers by the way. The third
    item names those that had moved."""
    before = [(name, functions, functions[0]()) for name, functions in _generators().items()]
    result, error = contained(function, *arguments, **keywords)
    moved = []
    for name, (get, put_back, equal), state in before:
        if not equal(state, get()):
            put_back(state)
            moved.append(name)
    return result, error, moved


class Hooks:
    """Call hooks through this, never through pluggy's relay: `call(event, ...)`, or the event's name as a method.

    Participants run in declared order; an exception ends the call as a PluginError that names plugin and hook (an IntarsiaError keeps its class).
    Observers run on the ranks that their spec says; one that raises is switched off, listed in `disabled` and logged once to `intarsia.<owner>`.
    `rank` serves events without a `run` argument. Stability: stable.
    """

    def __init__(self, specs: Mapping[str, Spec], implementations: Mapping[str, Sequence[Implementation]], trace: Trace | None = None):
        self.rank = environment_rank()
        self.disabled: list[Disabled] = []
        self.moved_generators: list[tuple[str, str, str]] = []
        self._trace = trace
        self._warnings: list[str] = []
        self.install(specs, implementations)

    def install(self, specs: Mapping[str, Spec], implementations: Mapping[str, Sequence[Implementation]]) -> None:
        """Serve these, in this order; what was reported before stays."""
        self._specs = dict(specs)
        self._implementations = {name: list(found) for name, found in implementations.items()}

    def take_warnings(self) -> list[str]:
        """What was reported since the last call (switched-off observers, moved random generators), for the run's own log."""
        taken, self._warnings = self._warnings, []
        return taken

    def implementations(self, name: str) -> tuple[Implementation, ...]:
        """Who implements a hook, in the order of calls."""
        return tuple(self._implementations.get(name, ()))

    def events(self) -> tuple[Spec, ...]:
        """The declared events, core's first."""
        return tuple(spec for spec in self._specs.values() if spec.facts.sort in ("participant", "observer"))

    def call(self, name: str, /, **arguments: Any) -> None:
        """Call an event by name, with exactly the arguments of its spec. PluginError for an unknown event or wrong arguments."""
        spec = self._specs.get(name)
        if spec is None or spec.facts.sort not in ("participant", "observer"):
            known = [event.name for event in self.events()]
            raise PluginError(f"{name!r} is not an event that core or a loaded plugin declares. {did_you_mean(name, known)}")
        if arguments.keys() != set(spec.arguments):
            raise PluginError(f"event {name!r} takes ({', '.join(spec.arguments)}) and was called with ({', '.join(arguments)}).")
        found = self._implementations.get(name)
        if not found:
            return
        rank = arguments["run"].rank if "run" in arguments else self.rank
        if spec.facts.ranks == "all" or rank == 0:
            step = self._participate if spec.facts.sort == "participant" else self._observe
            for implementation in list(found):
                step(implementation, arguments)

    def invoke(self, implementation: Implementation, arguments: Mapping[str, Any]) -> tuple[Any, BaseException | None]:
        """Call one implementation, contained, traced, and without effect on the process-wide random generators."""
        started = time.perf_counter()
        chosen = {name: arguments[name] for name in implementation.arguments}
        result, error, moved = undisturbed(implementation.function, **chosen)
        self.report_moved(implementation, moved)
        if self._trace is not None:
            self._trace.write(implementation, arguments, time.perf_counter() - started, error)
        return result, error

    def report_moved(self, implementation: Implementation, moved: Iterable[str]) -> None:
        """Report, once for each, that a plugin moved process-wide random generators."""
        for generator in moved:
            fact = (implementation.plugin, implementation.hook, generator)
            if fact not in self.moved_generators:
                self.moved_generators.append(fact)
                text = f"plugin {implementation.plugin} seeded or drew from the global generator of {generator} in {implementation.hook}"
                self._warn(implementation.owner, f"{text}; its state was put back. Use run.rng(stream, owner) instead.")

    def _participate(self, implementation: Implementation, arguments: Mapping[str, Any]) -> None:
        _, error = self.invoke(implementation, arguments)
        if isinstance(error, IntarsiaError):
            with_owner(error, f"raised by plugin {implementation.plugin} in {implementation.hook}")
            raise error
        if error is not None:
            text = f"plugin {implementation.plugin} failed in {implementation.hook}: {describe(error)}"
            raise PluginError(f"{text}. Disable it with plugins.disable={implementation.plugin}, or ask its author.") from error

    def _observe(self, implementation: Implementation, arguments: Mapping[str, Any]) -> None:
        _, error = self.invoke(implementation, arguments)
        if error is not None:
            self._implementations[implementation.hook].remove(implementation)
            self.disabled.append(Disabled(implementation.plugin, implementation.hook, describe(error)))
            text = f"plugin {implementation.plugin} failed in {implementation.hook} and is no longer called there: {describe(error)}"
            self._warn(implementation.owner, text)
            logging.getLogger(f"intarsia.{implementation.owner}").debug("traceback of the above", exc_info=error)

    def _warn(self, owner: str, text: str) -> None:
        self._warnings.append(text)
        logging.getLogger(f"intarsia.{owner}").warning("%s", text)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """`hooks.before_step(run=run, step=0)` is `hooks.call("before_step", run=run, step=0)`, with arguments in the spec's order as well."""
        spec = self.__dict__.get("_specs", {}).get(name)
        if spec is None or spec.facts.sort not in ("participant", "observer"):
            raise AttributeError(f"Hooks have no event {name!r}.")
        return lambda *values, **named: self.call(name, **dict(zip(spec.arguments, values, strict=False)), **named)


def with_owner(error: IntarsiaError, owner: str) -> None:
    """End the exception's message in who raised it; class and exit code stay."""
    if owner not in str(error):
        error.args = (f"{error} [{owner}]",)
