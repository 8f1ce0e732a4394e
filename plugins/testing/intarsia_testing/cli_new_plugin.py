"""`intarsia new-plugin KIND NAME`: a distribution whose conformance run is red in exactly the places left to write."""

from __future__ import annotations

import argparse
import dataclasses
import keyword
import re
import string
import sys
from pathlib import Path

from intarsia.errors import UsageError, did_you_mean, nearest

TEMPLATES = Path(__file__).parent / "templates"
MARK = "# file: "


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a kind's scaffold needs to know: its words, the classes around it, and further distributions that its code uses."""

    words: str
    depends: tuple[str, ...] = ()
    tests_depend: tuple[str, ...] = ()


KINDS = {
    "model": Kind("a model family", ("intarsia-models-common", "torch>=2.11")),
    "placement": Kind("a placement"),
    "kernel": Kind("a kernel", ("torch>=2.11",)),
    "storage": Kind("a storage"),
    "checkpoint-backend": Kind("a checkpoint backend", ("torch>=2.11",)),
    "environment": Kind("an environment"),
    "optimizer": Kind("an optimizer", ("torch>=2.11",)),
    "data-source": Kind("a data source"),
    "processor": Kind("a processor of images and video", ("intarsia-multimodal", "numpy")),
    "role": Kind("a role of sharding tables", ("intarsia-parallel", "torch>=2.11")),
    "schedule": Kind("a learning-rate schedule"),
    "loss": Kind("a loss", ("torch>=2.11",)),
    "metric-sink": Kind("a metric sink"),
    "tokenizer": Kind("a tokenizer"),
    "command": Kind("a command"),
}
"""Kinds that have a scaffold, by the name that the command line takes."""

BY_HAND = {"dispatcher": "write-a-dispatcher.md", "pipeline-schedule": "write-a-pipeline-schedule.md"}
"""Kinds without one, and the page in docs/how-to that shows every file."""


class NewPlugin:
    """The command."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """KIND NAME [--dir] [--entry]."""
        parser.add_argument("kind", metavar="KIND", help=f"What it adds: {', '.join(KINDS)}.")
        parser.add_argument("name", metavar="NAME", help="The distribution's name, such as acme-bucket.")
        parser.add_argument("--dir", type=Path, default=Path(), help="The folder in which the new folder NAME is made (default: here).")
        parser.add_argument("--entry", default="", help="The entry's name (default: the last word of NAME).")
        parser.add_argument("--op", default="swiglu", help="kernel: the operator that it computes (default: swiglu).")

    def run(self, arguments: argparse.Namespace) -> int:
        """Write the files and say what comes next."""
        kind = check_kind(arguments.kind)
        name = check_name(arguments.name)
        entry = check_entry(arguments.entry or name.rpartition("-")[2])
        operator = check_operator(arguments.op) if kind == "kernel" else ""
        files = render(kind, name, entry, operator)
        folder = arguments.dir / name
        write(folder, files)
        for path in files:
            print(f"  {folder / path}")
        print(
            f"\n{KINDS[kind].words.capitalize()} is scaffolded in {folder}. Next:\n\n"
            f"    pip install -e '{folder}[test]'\n"
            f"    intarsia plugins show {name}\n"
            f"    pytest {folder}\n\n"
            "The conformance report says what is left to write."
        )
        return 0


def check_kind(kind: str) -> str:
    """The kind, however its words are joined; UsageError with the nearest one."""
    given = re.sub(r"[ _]+", "-", kind.strip().lower())
    for form in (given, given.removesuffix("s")):
        if form in KINDS:
            return form
        if form in BY_HAND:
            page = f"docs/how-to/{BY_HAND[form]}"
            raise UsageError(
                f"There is no scaffold for kind {kind!r}: {page} shows its files, and the class of the conformance kit to test it."
            )
    hint = f" {did_you_mean(given, KINDS)}" if nearest(given, KINDS) else ""
    raise UsageError(f"There is no scaffold for kind {kind!r}.{hint} Kinds: {', '.join(KINDS)}.")


def check_name(name: str) -> str:
    """A name that pip, the import system and Intarsia take as it stands; UsageError with a better one."""
    valid = re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) is not None
    package = name.replace("-", "_")
    if not valid:
        better = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-").lstrip("0123456789-")
        hint = f" Take {better!r}." if better else ""
        raise UsageError(
            f"{name!r} is no name for a distribution here: lower-case words of letters and digits, joined by '-', as in acme-bucket.{hint}"
        )
    if keyword.iskeyword(package) or package in sys.stdlib_module_names:
        raise UsageError(f"A distribution {name!r} would hide Python's own {package!r}. Put your own word before it: acme-{name}.")
    if package == "intarsia" or package.startswith("intarsia_"):
        raise UsageError(
            f"The names intarsia and intarsia-... are the project's own. Put your own word before it: acme-{name.removeprefix('intarsia').strip('-') or 'plugin'}."
        )
    return name


def check_entry(entry: str) -> str:
    """An entry's name."""
    if re.fullmatch(r"[a-z0-9][a-z0-9._+-]*", entry) is None:
        raise UsageError(f"{entry!r} is no name for an entry: lower-case letters, digits and . _ + -, beginning with a letter or digit.")
    return entry


def check_operator(op: str) -> str:
    """An operator of `intarsia.ops`."""
    from intarsia import ops

    known = list(ops.operators())
    if op not in known:
        raise UsageError(f"There is no operator {op!r}. {did_you_mean(op, known)} Operators: {', '.join(known)}.")
    return op


def render(kind: str, name: str, entry: str, operator: str = "") -> dict[str, str]:
    """The files of a scaffold: path to text."""
    facts = KINDS[kind]
    package = name.replace("-", "_")
    values = {
        "name": name,
        "package": package,
        "entry": entry,
        "Class": class_name(entry),
        "words": facts.words,
        "kind": kind,
        "depends": ", ".join(f'"{one}"' for one in ("intarsia", *facts.depends)),
        **(operator_values(operator) if operator else {}),
    }
    files: dict[str, str] = {}
    for template in ("common.txt", f"{kind}.txt"):
        for block in (TEMPLATES / template).read_text(encoding="utf-8").split(f"\n{MARK}"):
            path, _, text = block.removeprefix(MARK).partition("\n")
            files[string.Template(path).substitute(values)] = string.Template(text.strip("\n") + "\n").substitute(values)
    return files


def class_name(entry: str) -> str:
    """The entry's name as a class's, other than those of the contracts."""
    from intarsia import config, contracts

    name = "".join(word.capitalize() for word in re.split(r"[^a-z0-9]+", entry) if word).lstrip("0123456789")
    taken = not name or hasattr(contracts, name) or hasattr(config, f"{name}Config")
    return f"My{name}" if taken else name


def operator_values(op: str) -> dict[str, str]:
    """An operator's name, its signature as source and its arguments' names."""
    import inspect

    from intarsia import ops

    reference = ops.operators()[op].reference
    parameters = inspect.signature(reference).parameters.values()
    parts, keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        annotation = "Tensor" if str(parameter.annotation).removeprefix("torch.") == "Tensor" else "Any"
        default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{parameter.name}: {annotation}{default}")
    return {"op": op, "signature": ", ".join(parts)}


def write(folder: Path, files: dict[str, str]) -> None:
    """Write all files into a folder that does not exist yet."""
    if folder.exists():
        raise UsageError(f"{folder} exists already and is left as it is. Choose another name, or another place with --dir.")
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot write to {folder}: {error.strerror or error}.") from error
