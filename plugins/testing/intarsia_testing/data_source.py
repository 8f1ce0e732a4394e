"""Conformance of data sources. Subclass, name your entry, say how data for it is made, run pytest; a failure says which promise is broken, in words.

    class TestTables(DataSourceConformance):
        entry = "my-distribution:tables"

        def config(self, folder):
            write_table(folder / "a.table", rows=20)
            return TablesConfig(path=str(folder / "a.table"))

        def changed(self, folder):
            write_table(folder / "a.table", rows=21)
            return TablesConfig(path=str(folder / "a.table"))

        def broken(self, folder):
            return TablesConfig(path=str(folder / "missing"))

The promises are those of `intarsia.contracts.DataSource`. Run as a module, this file answers from another process.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from intarsia.contracts import DataSource, Document, Message
from intarsia.errors import UsageError
from intarsia.plugins import current

from intarsia_testing.base import Conformance
from intarsia_testing.plain import ask_another_process, from_plain
from intarsia_testing.promise import broken


def answers(source: DataSource, indices: Sequence[int]) -> dict[str, Any]:
    """What a source says, short enough to compare: length, fingerprint, and a hash of each document."""
    documents = [hashlib.blake2b(repr(source[index]).encode("utf-8", "surrogatepass"), digest_size=12).hexdigest() for index in indices]
    return {"length": len(source), "fingerprint": source.fingerprint(), "documents": documents}


def answers_of_another_process(config: Any, indices: Sequence[int]) -> dict[str, Any]:
    """`answers` of a source that a fresh process builds. A process that fails breaks a promise."""
    try:
        return ask_another_process("intarsia_testing.data_source", config, indices=list(indices))
    except RuntimeError as error:
        broken("the same in another process", f"a fresh process cannot read it: {error}")


class DataSourceConformance(Conformance):
    """Every promise of `intarsia.contracts.DataSource`, one test each.

    Set `entry`. Override `config`, which is given a folder, and where they make sense `changed` and `broken`. `max_documents` bounds how many
    documents are read.
    """

    kind: ClassVar[str] = "data source"
    max_documents: ClassVar[int] = 40

    # ------------------------------------------------------------ what is tested

    def config(self, folder: Path) -> Any:
        """Settings of a source with at least two documents; files that it reads go into `folder`."""
        return self._default(self.found_entry())

    def changed(self, folder: Path) -> Any | None:
        """Change the data that `config` wrote into `folder` (another document, at least) and return settings for it; None where data never changes."""
        return None

    def broken(self, folder: Path) -> Any | None:
        """Settings that cannot work: a file that is missing, a field that no document has. None where there are none."""
        return None

    def _build(self, config: Any) -> DataSource:
        """A fresh source, checked to be one of the entry under test."""
        entry, expected = current().entry_of(config), self.found_entry()
        if entry.full_name != expected.full_name:
            broken("settings are its own", f"the settings are those of {entry.full_name}, and {expected.full_name} is tested.")
        return current().build(config)

    def _indices(self, source: DataSource) -> list[int]:
        """The first documents and the last one."""
        count = len(source)
        return sorted({*range(min(count, self.max_documents - 1)), count - 1} - {-1})

    # ------------------------------------------------------------ promises

    def test_it_is_a_data_source(self, tmp_path: Path) -> None:
        """It has a length, documents by number, and a fingerprint."""
        source = self._build(self.config(tmp_path))
        if not isinstance(source, DataSource):
            broken("is a data source", f"{source!r} lacks one of `__len__`, `__getitem__`, `fingerprint`.")
        if len(source) < 2:
            broken(
                "is a data source", f"`config` must give at least two documents for the kit to compare, but its source has {len(source)}."
            )

    def test_documents_are_well_formed(self, tmp_path: Path) -> None:
        """Each is a Document with exactly one of text, messages, tokens and parts; a mask belongs to tokens and is as long."""
        source = self._build(self.config(tmp_path))
        for index in self._indices(source):
            document = source[index]
            if not isinstance(document, Document):
                broken("documents are well formed", f"document {index} is a {type(document).__name__}, not an intarsia.contracts.Document.")
            given = [name for name in ("text", "messages", "tokens", "parts") if getattr(document, name) is not None]
            if len(given) != 1:
                broken(
                    "documents are well formed",
                    f"document {index} must have one of text, messages, tokens and parts; it has {given or 'none'}.",
                )
            if document.trained is not None and (document.tokens is None or len(document.trained) != len(document.tokens)):
                broken("documents are well formed", f"document {index}: `trained` needs `tokens` of the same length.")
            if not all(isinstance(message, Message) for message in document.messages or ()):
                broken("documents are well formed", f"document {index}: `messages` must be a tuple of intarsia.contracts.Message.")

    def test_length_and_documents_stay(self, tmp_path: Path) -> None:
        """Asked twice, in any order, and from a second object with the same settings, it says the same."""
        config = self.config(tmp_path)
        source, other = self._build(config), self._build(config)
        indices = self._indices(source)
        first = [source[index] for index in indices]
        for words, asked in (("backwards", indices[::-1]), ("in another order", random.Random(0).sample(indices, len(indices)))):
            for index in asked:
                if source[index] != first[indices.index(index)]:
                    broken("document i is the same whenever asked", f"document {index} is another one when documents are read {words}.")
        for index in indices[::-1]:
            if other[index] != first[indices.index(index)]:
                broken("document i is the same whenever asked", f"a second object with the same settings gives another document {index}.")
        if len({len(source), len(other), len(source)}) != 1:
            broken("the length stays", "its length changes between calls, or between two objects with the same settings.")

    def test_another_process_agrees(self, tmp_path: Path) -> None:
        """Ranks build their own sources and must see the same data."""
        config = self.config(tmp_path)
        source = self._build(config)
        here, there = answers(source, self._indices(source)), answers_of_another_process(config, self._indices(source))
        for what in here:
            if here[what] != there[what]:
                broken("the same in another process", f"{what} differs: {here[what]!r} here, {there[what]!r} there.")

    def test_fingerprint_follows_the_documents(self, tmp_path: Path) -> None:
        """Equal for equal documents; another one after the data has changed. It is what finds stale token stores."""
        config = self.config(tmp_path)
        source = self._build(config)
        before = source.fingerprint()
        if not isinstance(before, str) or not before:
            broken("the fingerprint is text", f"it is {before!r}.")
        for index in self._indices(source):
            source[index]
        if source.fingerprint() != before or self._build(config).fingerprint() != before:
            broken("the fingerprint stays", "it changes by reading, or between two objects with the same settings.")
        changed = self.changed(tmp_path)
        if changed is not None and self._build(changed).fingerprint() == before:
            broken(
                "the fingerprint follows the documents", "the data changed and the fingerprint did not: runs would go on with stale tokens."
            )

    def test_mistakes_are_usage_errors(self, tmp_path: Path) -> None:
        """What a user gets wrong is a UsageError that says what, where and what to do; nothing else reaches them."""
        config = self.broken(tmp_path)
        if config is None:
            return
        try:
            source = self._build(config)
            for index in range(min(len(source), self.max_documents)):
                source[index]
        except UsageError as error:
            if len(str(error)) < 20:
                broken("mistakes are usage errors", f"the message {str(error)!r} does not say what is wrong and what to do.")
            return
        except Exception as error:
            broken("mistakes are usage errors", f"settings that cannot work raise {type(error).__name__} ({error}) instead of UsageError.")
        broken("mistakes are usage errors", "settings that cannot work are accepted without a word.")

    def test_random_generators_are_left_alone(self, tmp_path: Path) -> None:
        """Order is the loader's: a source draws nothing from the global generator."""
        state = random.getstate()
        source = self._build(self.config(tmp_path))
        answers(source, self._indices(source))
        if random.getstate() != state:
            broken("random generators are left alone", "it draws from Python's global random generator.")


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(answers(current().build(from_plain(asked["config"])), asked["indices"])))
