"""Sources, records, the byte tokenizer, tokenizer.json, Hugging Face data sets, the token store: what they give and what they refuse."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import subprocess
import sys
import types
from pathlib import Path

import numpy
import pyarrow
import pytest
from intarsia.config.bases import ModelConfig
from intarsia.contracts import Document, Message
from intarsia.errors import PluginError, UsageError
from intarsia.train.build import check_vocabulary
from intarsia_arrow.config import ParquetConfig
from intarsia_arrow.sources import ParquetSource
from intarsia_data.config import ByteTokenizerConfig, JsonlConfig, StdlibConfig, TextConfig
from intarsia_data.files import CHUNK_BYTES, split_ranges
from intarsia_data.sources import JsonlSource, StdlibSource, TextSource
from intarsia_data.store import open_store
from intarsia_data.tokenizer import ByteTokenizer
from intarsia_huggingface.config import HFDatasetsConfig, TokenizerJsonConfig
from intarsia_huggingface.hf_datasets import HFDatasetsSource
from intarsia_huggingface.tokenizers_json import TokenizerJson
from pyarrow import parquet
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers


def jsonl(folder: Path, *lines: str, **settings) -> JsonlSource:
    path = folder / "a.jsonl"
    path.write_text("\n".join(lines))
    return JsonlSource(JsonlConfig(paths=(str(path),), **settings))


def test_jsonl_reads_text_chat_and_ids(tmp_path):
    source = jsonl(
        tmp_path,
        '{"body": "plain"}',
        "",
        '{"body": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "trained": false}]}',
        '{"body": [1, 2, 3], "trained": [true, 0, 1]}',
        '{"body": [4]}',
        field="body",
    )
    assert [source[n] for n in range(len(source))] == [
        Document(text="plain"),
        Document(messages=(Message("user", "hi"), Message("assistant", "ho", False))),
        Document(tokens=(1, 2, 3), trained=(True, False, True)),
        Document(tokens=(4,)),
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "x"', r"a.jsonl:3: not valid JSON: "),
        ("[1]", r"a.jsonl:3: expected an object with named fields, found list"),
        ('{"texts": "x", "id": 1}', r"a.jsonl:3: there is no field 'text'. Fields here: 'texts', 'id'. Did you mean 'texts'\?"),
        ('{"text": null}', r"a.jsonl:3: field 'text' holds null; a document is"),
        ('{"text": [1, "a"]}', r"a.jsonl:3: field 'text' holds a list of int and str"),
        ('{"text": [true]}', r"a.jsonl:3: field 'text' holds a list of bool"),
        ('{"text": [3, -1]}', r"a.jsonl:3: field 'text' holds -1, which can be no token id"),
        ('{"text": [36893488147419103232]}', r"a.jsonl:3: field 'text' holds 36893488147419103232, which can be no token id"),
        (r'{"text": "ab\ud800"}', r"a.jsonl:3: 'text' has a lone surrogate \('\\ud800'\) as its character 2"),
        (r'{"text": [{"role": "user", "content": "\udfff"}]}', r"a.jsonl:3: text\[0\]: 'content' has a lone surrogate"),
        ('{"text": [{"role": "user"}]}', r"a.jsonl:3: text\[0\]: 'content' must be a string, but is missing; fields here: 'role'"),
        ('{"text": [{"role": "user", "content": 3}]}', r"a.jsonl:3: text\[0\]: 'content' must be a string, but holds a value of type int"),
        ('{"text": [{"role": "u", "content": "a", "trained": "no"}]}', r"'trained' must be true, false or absent"),
        (r'{"text": [{"role": "\ud800", "content": "a"}]}', r"a.jsonl:3: text\[0\]: 'role' has a lone surrogate"),
        (r'{"text": [{"role": "u", "content": "a"}], "tools": [{"name": "\ud800"}]}', r"a.jsonl:3: 'tools' has a lone surrogate"),
        (
            r'{"text": [{"role": "u", "content": "a"}], "tools": [{"name": "f", "parameters": {"a": "\ud800"}}]}',
            r"a.jsonl:3: 'tools' has a lone surrogate",
        ),
        (
            '{"text": [{"role": "u", "content": "a"}], "tools": [{"name": "f", "parameters": {"a": NaN}}]}',
            r"a.jsonl:3: tools\[0\].parameters is no JSON: Out of range",
        ),
        (
            r'{"text": [{"role": "u", "content": "a", "tool_calls": [{"name": "\ud800", "arguments": {}}]}]}',
            r"a.jsonl:3: text\[0\]: 'tool_calls' has a lone surrogate",
        ),
        (
            '{"text": [{"role": "u", "content": "a", "tool_calls": [{"name": "f", "arguments": {"a": Infinity}}]}]}',
            r"a.jsonl:3: text\[0\]: tool_calls\[0\].arguments is no JSON: Out of range",
        ),
        ('{"text": [1, 2], "trained": [true]}', r"a.jsonl:3: 2 token ids in 'text' but 1 values in 'trained'"),
        ('{"text": [1, 2], "trained": "all"}', r"a.jsonl:3: field 'trained' must be a list of true and false"),
    ],
)
def test_bad_lines_are_named_by_file_and_line(tmp_path, line, expected):
    source = jsonl(tmp_path, '{"text": "good"}', "", line)
    assert source[0].text == "good"
    with pytest.raises(UsageError, match=expected):
        source[1]


def test_files_that_are_missing_or_no_utf8_are_named(tmp_path):
    with pytest.raises(UsageError, match="matches no file"):
        TextSource(TextConfig(paths=(f"{tmp_path}/*.txt",)))
    with pytest.raises(UsageError, match=r"is a folder; name its files, as in .*/\*\*/\*"):
        TextSource(TextConfig(paths=(str(tmp_path),)))
    with pytest.raises(UsageError, match="no paths are given"):
        TextSource(TextConfig(paths=()))
    with pytest.raises(UsageError, match="errors='ignore' is unknown"):
        TextSource(TextConfig(paths=(str(tmp_path),), errors="ignore"))
    (tmp_path / "a.txt").write_bytes(b"one\n\ntw\xffo")
    with pytest.raises(UsageError, match=r"a.txt, from byte 5 on: byte 2 \(0xff\) is not UTF-8.*errors=replace"):
        TextSource(TextConfig(paths=(f"{tmp_path}/a.txt",), separator="\n\n"))[1]
    assert TextSource(TextConfig(paths=(f"{tmp_path}/a.txt",), errors="replace"))[0].text == "one\n\ntw\ufffdo"
    (tmp_path / "b.txt.gz").write_bytes(b"not gzip")
    with pytest.raises(UsageError, match=r"b.txt.gz: cannot be read: Not a gzipped file"):
        TextSource(TextConfig(paths=(f"{tmp_path}/b.txt.gz",)))[0]


def test_pieces_are_found_across_chunks(tmp_path):
    pieces = [b"a" * (CHUNK_BYTES - 1), b" \n", b"b" * CHUNK_BYTES, b"", b"tail"]
    for name, opened in (("a.txt", open), ("a.txt.gz", gzip.open)):
        path = tmp_path / name
        with opened(path, "wb") as file:
            file.write(b"--".join(pieces))
        starts = [0, CHUNK_BYTES + 1, CHUNK_BYTES + 5, 2 * CHUNK_BYTES + 7, 2 * CHUNK_BYTES + 9]
        assert list(split_ranges(path, b"--")) == [(n, starts[n], len(pieces[n])) for n in (0, 2, 4)]


def test_stdlib_is_the_library_without_tests_and_packages(monkeypatch, tmp_path):
    source = StdlibSource(StdlibConfig())
    assert "argparse.py" in source.names and "json/decoder.py" in source.names and source.names == sorted(source.names)
    assert not [name for name in source.names if {"test", "tests", "site-packages"} & set(name.split("/")) or "_sysconfigdata" in name]
    assert "class ArgumentParser" in source[source.names.index("argparse.py")].text
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UsageError, match=r"holds no .py files.*Use another source"):
        StdlibSource(StdlibConfig())


def test_byte_tokenizer():
    tokenizer = ByteTokenizer(ByteTokenizerConfig())
    assert tokenizer.vocab_size == 264 == len(tokenizer.byte_lengths)
    assert tokenizer.decode([256, *tokenizer.encode("häé€"), 257]) == "häé€" and tokenizer.decode([0xE2, 65]) == "\ufffdA"
    assert [list(ids) for ids in tokenizer.encode_batch(["ab", ""])] == [[97, 98], []]
    with pytest.raises(UsageError, match=r"there is no role 'assistent'. Did you mean 'assistant'"):
        tokenizer.render([Message("assistent", "x")])
    assert tokenizer.fingerprint() != ByteTokenizer(ByteTokenizerConfig(roles=("user", "assistant"))).fingerprint()
    check_vocabulary(tokenizer, ModelConfig(vocab_size=264, dim=1, max_positions=1))
    with pytest.raises(UsageError, match="tokenizer has 264 ids but the model's vocabulary holds 256: ids 256 to 263"):
        check_vocabulary(tokenizer, ModelConfig(vocab_size=256, dim=1, max_positions=1))


@pytest.fixture
def byte_level(tmp_path):
    """A small byte-level BPE tokenizer with special tokens, as it is saved by its library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    specials = ["<|begin|>", "<|end|>", "<|turn|>", "<|stop|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat the dog the end"] * 4, trainer)
    tokenizer.add_tokens([AddedToken("hohe", special=False)])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>"}))
    return tmp_path


def test_tokenizer_json(byte_level):
    tokenizer = TokenizerJson(TokenizerJsonConfig(path=str(byte_level), turn_start="<|turn|>{role}:", turn_end="<|stop|>"))
    text = "the cat €, <|end|> and a longer hohe"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and not {0, 1, 2, 3} & set(ids), "special tokens in text are text"
    assert tokenizer.encode_batch([text, "the"]) == [ids, tokenizer.encode("the")]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, None)
    assert sum(tokenizer.byte_lengths[number] for number in ids) == len(text.encode())
    rendered, mask = tokenizer.render([Message("user", "the <|stop|>"), Message("assistant", "cat")])
    assert rendered.count(2) == 2 and rendered.count(3) == 2
    trained = [number for number, kept in zip(rendered, mask, strict=True) if kept]
    assert trained == [*tokenizer.encode("cat"), 3]
    with pytest.raises(UsageError, match="there is no role 'tol'"):
        tokenizer.render([Message("tol", "x")])


def test_tokenizer_json_mistakes(byte_level, tmp_path):
    path = str(byte_level / "tokenizer.json")
    with pytest.raises(UsageError, match="does not exist"):
        TokenizerJson(TokenizerJsonConfig(path=str(byte_level / "nothing.json")))
    with pytest.raises(UsageError, match=r"eos='<\|ende\|>' is no token of .* Did you mean '<\|end\|>'"):
        TokenizerJson(TokenizerJsonConfig(path=path, eos="<|ende|>"))
    with pytest.raises(UsageError, match=r"must contain \{role\}"):
        TokenizerJson(TokenizerJsonConfig(path=path, turn_start="<|turn|>"))
    plain = TokenizerJson(TokenizerJsonConfig(path=path, bos="", pad="<|stop|>"))
    assert (plain.bos_id, plain.pad_id) == (None, 3)
    with pytest.raises(UsageError, match=r"Set data.tokenizer.turn_start"):
        plain.render([Message("user", "x")])
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match=r"bad.json cannot be read"):
        TokenizerJson(TokenizerJsonConfig(path=str(tmp_path / "bad.json")))


def test_parquet_names_rows_and_columns(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b", None, "d"], "ids": [[1], [2, 3], [4], [5]]}), path, row_group_size=2)
    source = ParquetSource(ParquetConfig(paths=(str(path),)))
    assert len(source) == 4 and source[3].text == "d"
    with pytest.raises(UsageError, match=r"a.parquet, row 2: field 'text' holds null"):
        source[2]
    assert ParquetSource(ParquetConfig(paths=(str(path),), column="ids"))[1].tokens == (2, 3)
    with pytest.raises(UsageError, match=r"no column 'txt'. Columns here: 'text', 'ids'. Did you mean 'text'"):
        ParquetSource(ParquetConfig(paths=(str(path),), column="txt"))[0]
    path.write_bytes(b"no table")
    with pytest.raises(UsageError, match="cannot be read as parquet"):
        len(ParquetSource(ParquetConfig(paths=(str(path),))))


class Table:
    """As much of `datasets.Dataset` as the source uses."""

    def __init__(self, rows):
        self.rows, self.column_names, self._fingerprint = rows, list(rows[0]), str(rows)

    def select_columns(self, names):
        return Table([{name: row[name] for name in names} for row in self.rows])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_hugging_face_data_sets(monkeypatch, tmp_path):
    asked = []
    table = Table([{"id": n, "text": f"row {n}"} for n in range(4)])
    double = types.ModuleType("datasets")
    double.load_dataset = lambda *args, **kwargs: asked.append((args, kwargs)) or table
    double.load_from_disk = lambda path: {"train": table}
    monkeypatch.setitem(sys.modules, "datasets", double)
    source = HFDatasetsSource(HFDatasetsConfig(path="json", data_files=("a.json",), revision="abc"))
    assert asked == [(("json", None), {"split": "train", "data_files": ["a.json"], "revision": "abc"})]
    assert len(source) == 4 and source[2] == Document(text="row 2")
    with pytest.raises(UsageError, match=r"no column 'txt'. Columns here: 'id', 'text'. Did you mean 'text'"):
        HFDatasetsSource(HFDatasetsConfig(path="json", column="txt"))
    (tmp_path / "dataset_dict.json").write_text("{}")
    saved = HFDatasetsSource(HFDatasetsConfig(path=str(tmp_path)))
    assert saved.fingerprint() == source.fingerprint()
    with pytest.raises(UsageError, match=r"there is no split 'tran'. Did you mean 'train'"):
        HFDatasetsSource(HFDatasetsConfig(path=str(tmp_path), split="tran"))
    double.load_dataset = lambda *args, **kwargs: 1 / 0
    with pytest.raises(UsageError, match="split 'train' cannot be loaded: ZeroDivisionError"):
        HFDatasetsSource(HFDatasetsConfig(path="json"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PluginError, match=r"pip install 'intarsia-huggingface\[datasets\]'"):
        HFDatasetsSource(HFDatasetsConfig(path="json"))


# ---------------------------------------------------------------- the token store


class Counted:
    """Documents that count how often they are read."""

    def __init__(self, name="a", count=600):
        self.name, self.count, self.read = name, count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read += 1
        return Document(text=f"{self.name} {index}")

    def fingerprint(self):
        return f"{self.name} {self.count}"


def test_a_store_is_built_once_and_again_when_it_is_damaged_or_the_data_changes(tmp_path):
    tokenizer, source = ByteTokenizer(ByteTokenizerConfig()), Counted()
    store = open_store(source, tokenizer, "x", tmp_path)
    assert source.read == 600 and store.documents == 600 and store.trained is None and store.tokens.dtype == numpy.uint16
    assert store.tokens[: store.offsets[1]].tolist() == [256, *b"a 0", 257] and int(store.document_bytes[-1]) == 5
    again = Counted()
    assert open_store(again, tokenizer, "x", tmp_path).digest == store.digest and again.read == 0
    assert open_store(Counted("b"), tokenizer, "x", tmp_path).digest != store.digest
    folder = next(
        path for path in tmp_path.iterdir() if path.is_dir() and json.loads((path / "facts.json").read_text())["digest"] == store.digest
    )
    (folder / "tokens.bin").write_bytes(b"short")
    assert open_store(again, tokenizer, "x", tmp_path).digest == store.digest and again.read == 600
    assert not [path for path in tmp_path.iterdir() if "building" in path.name]


def test_a_failed_build_leaves_nothing_and_a_cache_that_cannot_be_written_is_named(tmp_path):
    tokenizer = ByteTokenizer(ByteTokenizerConfig())
    broken = Counted(count=3)
    broken.__class__ = type("Broken", (Counted,), {"__getitem__": lambda self, index: Document(text="\ud800")})
    with pytest.raises(PluginError, match="x: document 0 cannot be encoded: UnicodeEncodeError"):
        open_store(broken, tokenizer, "x", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/facts.json"))
    fine = open_store(type("Broken", (Counted,), {})(count=3), tokenizer, "x", tmp_path / "cache")
    assert fine.documents == 3 and len(list((tmp_path / "cache").iterdir())) == 2, "what was left over is gone"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"tokens cannot be kept in .*set data.cache to another folder"):
        open_store(Counted(), tokenizer, "x", tmp_path / "file")


def _build_in_process(cache, results):
    source = Counted(count=5000)
    store = open_store(source, ByteTokenizer(ByteTokenizerConfig()), "x", Path(cache))
    results.put((source.read, store.digest))


def test_of_several_processes_one_builds(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_build_in_process, args=(str(tmp_path), results)) for _ in range(3)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join(timeout=600)
    assert sorted(read for read, _ in answers) == [0, 0, 5000]
    assert len({digest for _, digest in answers}) == 1


def test_waiting_for_another_process_ends(tmp_path):
    import fcntl

    tokenizer, source = ByteTokenizer(ByteTokenizerConfig()), Counted()
    open_store(source, tokenizer, "x", tmp_path)
    (lock,) = tmp_path.glob("*.lock")
    next(path for path in tmp_path.iterdir() if path.is_dir()).joinpath("facts.json").unlink()
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process has been building its token store"):
            open_store(source, tokenizer, "x", tmp_path, timeout_s=0.1)


def test_configs_import_neither_torch_nor_numpy():
    code = (
        "import sys, intarsia_data, intarsia_data.config, intarsia_arrow.plugin, intarsia_arrow.config, intarsia_huggingface.plugin, "
        "intarsia_huggingface.config; sys.exit(bool({'torch', 'numpy', 'pyarrow', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=600).returncode == 0
