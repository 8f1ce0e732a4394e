"""Settings as JSON, so that another process can make them again: how the kit asks a fresh process the same question."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import chz
from intarsia.plugins import import_reference


def to_plain(value: Any) -> Any:
    """A config as JSON, with its class's name."""
    if chz.is_chz(type(value)):
        fields = {name: to_plain(getattr(value, name)) for name in chz.chz_fields(type(value))}
        return {"class": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    return [to_plain(item) for item in value] if isinstance(value, tuple) else value


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`."""
    if isinstance(value, dict):
        return import_reference(value["class"])(**{name: from_plain(item) for name, item in value["fields"].items()})
    return tuple(from_plain(item) for item in value) if isinstance(value, list) else value


def ask_another_process(module: str, config: Any, **question: Any) -> Any:
    """What `python -m module` answers, in JSON on the last line, to `{"config": ..., **question}` on its standard input. RuntimeError if it fails."""
    text = json.dumps({"config": to_plain(config), **question})
    run = subprocess.run([sys.executable, "-m", module], input=text, capture_output=True, text=True, timeout=600, check=False)
    if run.returncode:
        said = " ".join(run.stderr.strip().splitlines()[-1:])
        # What a scaffold has left to write is left to write here as well.
        unwritten = said.partition("NotImplementedError: ")[2]
        raise RuntimeError(said) from (NotImplementedError(unwritten) if unwritten else None)
    return json.loads(run.stdout.splitlines()[-1])
