"""The first-party data sources keep every promise of the contract."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from intarsia.contracts import Document
from intarsia_arrow.config import ArrowConfig, ParquetConfig
from intarsia_data.config import JsonlConfig, StdlibConfig, TextConfig
from intarsia_testing.data_source import DataSourceConformance
from pyarrow import ipc, parquet

TEXTS = [f"Document {number}: ä €.\nIts second line." for number in range(25)]


class TestStdlib(DataSourceConformance):
    entry = "intarsia-data:stdlib"

    def config(self, folder):
        return StdlibConfig(limit=30)

    def changed(self, folder):
        return StdlibConfig(limit=29)

    def broken(self, folder):
        return StdlibConfig(limit=0)


class TestTextFiles(DataSourceConformance):
    entry = "intarsia-data:text"

    def config(self, folder):
        for number, text in enumerate(TEXTS):
            (folder / f"{number:02d}.txt").write_text(text)
        return TextConfig(paths=(f"{folder}/*.txt",))

    def changed(self, folder):
        (folder / "03.txt").write_text("Something else.")
        return TextConfig(paths=(f"{folder}/*.txt",))

    def broken(self, folder):
        return TextConfig(paths=(f"{folder}/*.nothing",))


class TestTextPieces(DataSourceConformance):
    entry = "intarsia-data:text"

    def config(self, folder):
        with gzip.open(folder / "all.txt.gz", "wt") as file:
            file.write("\n\n".join(TEXTS))
        return TextConfig(paths=(f"{folder}/all.txt.gz",), separator="\n\n")

    def broken(self, folder):
        (folder / "bad.txt").write_bytes(b"good\n\nb\xffad")
        return TextConfig(paths=(f"{folder}/bad.txt",), separator="\n\n")


class TestJsonl(DataSourceConformance):
    entry = "intarsia-data:jsonl"

    def config(self, folder):
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:10]))
        with gzip.open(folder / "b.jsonl.gz", "wt") as file:
            file.write("\n".join(json.dumps({"text": text}) for text in TEXTS[10:]))
        return JsonlConfig(paths=(f"{folder}/a.jsonl", f"{folder}/*.gz"))

    def changed(self, folder):
        with (folder / "a.jsonl").open("a") as file:
            file.write('{"text": "one more"}\n')
        return JsonlConfig(paths=(f"{folder}/a.jsonl", f"{folder}/*.gz"))

    def broken(self, folder):
        (folder / "c.jsonl").write_text('{"text": "good"}\n{"text": \n')
        return JsonlConfig(paths=(f"{folder}/c.jsonl",))


class TestParquet(DataSourceConformance):
    entry = "intarsia-arrow:parquet"

    def config(self, folder):
        parquet.write_table(pyarrow.table({"text": TEXTS, "other": list(range(25))}), folder / "a.parquet", row_group_size=7)
        parquet.write_table(pyarrow.table({"text": TEXTS[:3]}), folder / "b.parquet")
        return ParquetConfig(paths=(f"{folder}/*.parquet",))

    def changed(self, folder):
        parquet.write_table(pyarrow.table({"text": TEXTS[:4]}), folder / "b.parquet")
        return ParquetConfig(paths=(f"{folder}/*.parquet",))

    def broken(self, folder):
        self.config(folder)
        return ParquetConfig(paths=(f"{folder}/a.parquet",), column="texts")


class TestArrow(DataSourceConformance):
    entry = "intarsia-arrow:arrow"

    def config(self, folder):
        table = pyarrow.table({"text": TEXTS})
        with ipc.new_file(folder / "a.arrow", table.schema) as file:
            file.write_table(table, max_chunksize=4)
        with ipc.new_stream(folder / "b.arrow", table.schema) as stream:
            stream.write_table(table, max_chunksize=9)
        return ArrowConfig(paths=(f"{folder}/*.arrow",))

    def broken(self, folder):
        (folder / "c.arrow").write_bytes(b"this is no table")
        return ArrowConfig(paths=(f"{folder}/c.arrow",))


class Unsteady:
    """A source with a chosen fault."""

    def __init__(self, fault: str):
        self.fault, self.calls = fault, 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Document:
        self.calls += 1
        if self.fault == "unstable" and self.calls > 4:
            return Document(text="another")
        return Document(text="a", tokens=(1,)) if self.fault == "two kinds" else Document(text=f"a{index}")

    def fingerprint(self) -> str:
        return str(self.calls) if self.fault == "fingerprint" else "same"


class BrokenConformance(DataSourceConformance):
    """Not collected by its name: the kit's own tests on a source with a fault."""

    entry = "intarsia-data:text"
    fault = ""

    def config(self, folder):
        return None

    def changed(self, folder):
        return True

    def broken(self, folder):
        return True

    def _build(self, config):
        return Unsteady(self.fault)


@pytest.mark.parametrize(
    ("fault", "test", "promise"),
    [
        ("unstable", "test_length_and_documents_stay", "whenever asked"),
        ("two kinds", "test_documents_are_well_formed", "well formed"),
        ("fingerprint", "test_fingerprint_follows_the_documents", "the fingerprint stays"),
        ("", "test_fingerprint_follows_the_documents", "the fingerprint follows"),
        ("", "test_mistakes_are_usage_errors", "accepted without a word"),
    ],
)
def test_the_kit_sees_broken_promises(fault, test, promise, tmp_path: Path):
    kit = BrokenConformance()
    kit.fault = fault
    with pytest.raises(pytest.fail.Exception, match=promise):
        getattr(kit, test)(tmp_path)
