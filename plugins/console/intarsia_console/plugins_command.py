"""`intarsia plugins list|show|doctor|trace`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import intarsia
from intarsia import plugins
from intarsia.cli import load_command
from intarsia.contracts import Entry, KernelEntry
from intarsia.discovery import Failure, import_reference, normalise
from intarsia.errors import IntarsiaError, PluginError, UsageError, did_you_mean
from intarsia.loader import Record


class PluginsCommand:
    """List, show and check plugins; trace hook calls."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the four actions."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|doctor|trace")
        texts = {
            "list": "what is loaded, what failed and what is left out",
            "show": "one plugin, or one entry with its settings",
            "doctor": "import everything that plugins name and report each problem (exit code 3 if there is any)",
            "trace": "run a command and show each hook call; without a command: loading alone",
        }
        for name, text in texts.items():
            action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
            action.add_argument("--json", action="store_true", help="print JSON and nothing else to stdout")
            if name == "show":
                action.add_argument("name", metavar="NAME", help="a distribution, distribution/entry-point, entry name, or owner:name")
            if name == "trace":
                action.add_argument("--calls", action="store_true", help="print every call with its arguments, not only sums")
                action.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="a command line of intarsia to run")

    def run(self, arguments: argparse.Namespace) -> int:
        """Do the chosen action."""
        if arguments.action == "trace":
            return trace(arguments.command, arguments.calls, arguments.json)
        loaded = plugins.current()
        if arguments.action == "show":
            facts, code = show(loaded, arguments.name)
            text = show_text(facts)
        elif arguments.action == "doctor":
            facts = doctor(loaded)
            text, code = doctor_text(facts), PluginError.exit_code if facts["problems"] else 0
        else:
            facts, code = listing(loaded), 0
            text = list_text(facts)
        print(json.dumps(facts, indent=2) if arguments.json else text)
        return code


command = PluginsCommand()


# ---------------------------------------------------------------- list


def failure_facts(failure: Failure) -> dict[str, Any]:
    """A failure as JSON."""
    return {name: getattr(failure, name) for name in ("plugin", "distribution", "version", "entry_point", "hook", "cause")}


def listing(loaded: plugins.Plugins) -> dict[str, Any]:
    """What `list --json` prints."""
    return {
        "intarsia": intarsia.__version__,
        "plugin_api": intarsia.PLUGIN_API,
        "fingerprint": loaded.fingerprint(),
        "plugins": loaded.facts(),
        "kinds": {kind: loaded.registry(kind).names() for kind in loaded.kinds()},
        "failures": [failure_facts(failure) for failure in loaded.failures],
        "skipped": [candidate.id for candidate in loaded.skipped],
        "notices": list(loaded.notices),
    }


def list_text(facts: dict[str, Any]) -> str:
    """The listing for people."""
    lines = []
    for fact in facts["plugins"]:
        lines.append(f"{fact['distribution']} {fact['version']}")
        kinds: dict[str, list[str]] = {}
        for entry in fact["entries"]:
            kinds.setdefault(entry["kind"], []).append(entry["name"])
        lines += [f"  {kind}: {', '.join(dict.fromkeys(names))}" for kind, names in kinds.items()]
        events = [hook for hook in fact["hooks"] if not hook.startswith("offer_")]
        lines += [f"  hooks: {', '.join(events)}"] if events else []
    lines += [f"not loaded (disabled or not allowed): {', '.join(facts['skipped'])}"] if facts["skipped"] else []
    lines += [f"failed: {f['plugin']} {f['version']}, {f['hook']}: {f['cause']}" for f in facts["failures"]]
    return "\n".join([*lines, *(f"note: {notice}" for notice in facts["notices"])])


# ---------------------------------------------------------------- show


def entry_facts(entry: Entry) -> dict[str, Any]:
    """An entry as JSON; the fields of its own type included."""
    return {"full_name": entry.full_name, **dataclasses.asdict(entry)}


def settings_of(loaded: plugins.Plugins, entry: Entry) -> list[dict[str, Any]]:
    """Name, type, default (as typed on a command line; None: required) and doc of each field of the entry's config class."""
    if entry.config is None:
        return []
    from intarsia_console.fields import fields

    rows = [field for field in fields(loaded.config_class(entry)) if "." not in field.path]
    return [{"name": row.path, "type": row.type, "default": row.default, "doc": row.doc} for row in rows]


def plugin_facts(record: Record) -> dict[str, Any]:
    """A plugin as JSON: `show`'s view of one entry point."""
    candidate = record.candidate
    return {
        "plugin": candidate.id,
        "distribution": candidate.distribution,
        "version": candidate.version,
        "entry_point": candidate.name,
        "value": candidate.value,
        "api": record.api,
        "hooks": {name: list(implementation.arguments) for name, implementation in record.implementations.items()},
        "declares": {name: {"sort": spec.facts.sort, "kind": spec.facts.kind} for name, spec in record.specs.items()},
        "entries": [entry_facts(entry) for entry in record.entries],
    }


def show(loaded: plugins.Plugins, name: str) -> tuple[dict[str, Any], int]:
    """Everything that goes by `name`, and the exit code: 3 when it is (also) the name of a plugin that failed."""
    wanted = normalise(name)
    records = [r for r in loaded.records if wanted in (r.candidate.distribution, r.candidate.id)]
    failures = [f for f in loaded.failures if wanted in (f.distribution, f.plugin)]
    every = [entry for record in loaded.records for entry in record.entries]
    owner, _, short = name.rpartition(":")
    entries = [e for e in every if e.name == short and owner in ("", e.owner)] if not records else []
    if not (records or failures or entries):
        known = {n for r in loaded.records for n in (r.candidate.distribution, r.candidate.id)} | {e.name for e in every}
        raise UsageError(f"no plugin and no entry is called {name!r}. {did_you_mean(name, known)} {loaded.report()}".rstrip())
    facts = {
        "name": name,
        "plugins": [plugin_facts(r) for r in records],
        "entries": [{**entry_facts(entry), "settings": settings_of(loaded, entry)} for entry in entries],
        "failures": [failure_facts(f) for f in failures],
    }
    return facts, PluginError.exit_code if failures else 0


def show_text(facts: dict[str, Any]) -> str:
    """`show` for people."""
    lines = []
    for plugin in facts["plugins"]:
        lines.append(f"{plugin['plugin']} {plugin['version']} (plugin API {plugin['api']}), from {plugin['value'] or 'an object'}")
        lines += [f"  hook {name}({', '.join(arguments)})" for name, arguments in plugin["hooks"].items()]
        lines += [f"  declares {spec['sort']} {name} {spec['kind']}".rstrip() for name, spec in plugin["declares"].items()]
        lines += [f"  {entry['kind']} {entry['name']}: {entry['doc']}" for entry in plugin["entries"]]
    for entry in facts["entries"]:
        lines.append(f"{entry['kind']} {entry['full_name']}: {entry['doc']}")
        hidden = ("full_name", "kind", "name", "doc", "owner", "settings")
        lines += [f"  {key}: {value}" for key, value in entry.items() if key not in hidden and value not in (None, "", (), {})]
        for setting in entry["settings"]:
            default = " (required)" if setting["default"] is None else f" = {setting['default']}"
            lines.append(f"  {setting['name']}: {setting['type']}{default}  {setting['doc']}".rstrip())
    return "\n".join([*lines, *(f"failed: {f['plugin']} {f['version']}, {f['hook']}: {f['cause']}" for f in facts["failures"])])


# ---------------------------------------------------------------- doctor


def doctor(loaded: plugins.Plugins) -> dict[str, Any]:
    """Import every config and target of every entry. `problems` must be mended, `notes` are worth knowing."""
    problems = [{"plugin": f.plugin, "where": f.hook, "problem": f.cause} for f in loaded.failures]
    notes = [{"plugin": "", "note": notice} for notice in loaded.notices]
    notes += [{"plugin": candidate.id, "note": "not loaded: disabled or not allowed"} for candidate in loaded.skipped]
    for record in loaded.records:
        plugin = record.candidate.id
        if record.heavy:
            slow = f"loading it imports {', '.join(record.heavy)}; name code as 'module:attribute' and import there"
            problems.append({"plugin": plugin, "where": "import", "problem": slow})
        if record.api < intarsia.PLUGIN_API:
            notes.append({"plugin": plugin, "note": f"written for plugin API {record.api}; this core speaks {intarsia.PLUGIN_API}"})
    for kind in loaded.kinds():
        entries = loaded.registry(kind).entries()
        for entry in entries:
            others = [other.full_name for other in entries if other.name == entry.name and other.owner != entry.owner]
            if others:
                notes.append(
                    {"plugin": entry.plugin, "note": f"{kind} {entry.name!r} is also offered as {', '.join(others)}: choose by full name"}
                )
            _examine(loaded, entry, problems, notes)
    return {
        "intarsia": intarsia.__version__,
        "plugin_api": intarsia.PLUGIN_API,
        "plugins": len(loaded.records),
        "entries": sum(len(record.entries) for record in loaded.records),
        "problems": problems,
        "notes": notes,
    }


def _examine(loaded: plugins.Plugins, entry: Entry, problems: list[dict[str, Any]], notes: list[dict[str, Any]]) -> None:
    steps: list[tuple[str, Any]] = [("target", lambda: load_command(entry) if entry.kind == "command" else loaded.target(entry))]
    if isinstance(entry, KernelEntry) and entry.needs:
        missing = set(entry.needs) - import_reference("intarsia.device:capabilities")()
        if missing:
            note = f"kernel {entry.name!r} for {entry.op} needs {', '.join(sorted(missing))}, which this machine has not: not imported"
            notes.append({"plugin": entry.plugin, "note": note})
            return
    if entry.config is not None:
        steps.append(("config", lambda: loaded.config_class(entry)))
    for field in ("hf", "sharding"):
        if getattr(entry, field, None) is not None:
            steps.append((field, lambda field=field: import_reference(getattr(entry, field))))
    for field, step in steps:
        try:
            found = step()
            if field == "target" and entry.kind != "command" and not callable(found):
                raise PluginError(f"{entry.kind} {entry.full_name!r}: {entry.target} is a {type(found).__name__} and can't be called")
        except IntarsiaError as error:
            problems.append({"plugin": entry.plugin, "where": f"{entry.kind} {entry.name}, {field}", "problem": str(error)})


def doctor_text(facts: dict[str, Any]) -> str:
    """The doctor's report for people."""
    lines = [
        f"intarsia {facts['intarsia']}, plugin API {facts['plugin_api']}: {facts['plugins']} plugins, {facts['entries']} entries examined"
    ]
    lines += [f"problem: {p['plugin']}, {p['where']}: {p['problem']}" for p in facts["problems"]]
    lines += [f"note: {n['plugin']}{': ' if n['plugin'] else ''}{n['note']}" for n in facts["notes"]]
    return "\n".join([*lines, f"{len(facts['problems'])} problem(s)" if facts["problems"] else "no problem found"])


# ---------------------------------------------------------------- trace


def trace(words: Sequence[str], every_call: bool, as_json: bool) -> int:
    """Run `intarsia WORDS` under INTARSIA_TRACE and show calls; returns the command's exit code. With JSON, its output goes to stderr."""
    line = list(words[1:] if words[:1] == ["--"] else words)
    with tempfile.TemporaryDirectory(prefix="intarsia-trace-") as folder:
        path = Path(folder) / "calls.jsonl"
        program = [sys.executable, "-m", "intarsia", *(line or ["--help"])]
        output = sys.stderr if as_json else None
        hidden = subprocess.DEVNULL if not line else output
        finished = subprocess.run(program, env={**os.environ, "INTARSIA_TRACE": str(path)}, stdout=hidden)
        calls = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    totals: dict[tuple[str, str], dict[str, Any]] = {}
    for call in calls:
        fresh = {"hook": call["hook"], "plugin": call["plugin"], "calls": 0, "errors": 0, "seconds": 0.0}
        total = totals.setdefault((call["hook"], call["plugin"]), fresh)
        total["calls"] += 1
        total["errors"] += call["error"] is not None
        total["seconds"] = round(total["seconds"] + call["seconds"], 9)
    if as_json:
        print(json.dumps({"command": line, "exit_code": finished.returncode, "totals": list(totals.values()), "calls": calls}, indent=2))
        return finished.returncode
    for call in calls if every_call else []:
        arguments = ", ".join(f"{name}={text}" for name, text in call["arguments"].items())
        print(f"{call['seconds'] * 1e3:9.3f} ms  {call['hook']}({arguments})  {call['plugin']}  {call['error'] or ''}".rstrip())
    print(f"{'hook':<28} {'plugin':<40} {'calls':>6} {'errors':>6} {'ms':>10}")
    for total in totals.values():
        print(f"{total['hook']:<28} {total['plugin']:<40} {total['calls']:>6} {total['errors']:>6} {total['seconds'] * 1e3:>10.3f}")
    return finished.returncode
