"""safetensors files: every damage is named with file, tensor and reason; reading a box and writing in blocks are exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia.contracts import Box
from intarsia.errors import CheckpointError, PluginError, UsageError
from intarsia_huggingface import safetensors_file
from intarsia_huggingface.safetensors_file import Head, SafetensorsFile, shards, write_file
from safetensors.torch import load_file, save_file

TENSORS = {
    "a": torch.arange(24.0).view(4, 6),
    "b": torch.arange(30, dtype=torch.float16).view(2, 3, 5),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 4),
}


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "header,data,words",
    [
        ({"a": entry(0, 4)}, b"12", ("tensor 'a'", "truncated")),
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"123456", ("tensor 'b'", "overlaps 'a'")),
        ({"a": entry(0, 4), "b": entry(6, 10)}, b"1234567890", ("tensor 'b'", "hole of 2 bytes")),
        ({"a": entry(2, 6)}, b"123456", ("tensor 'a'", "hole of 2 bytes")),
        ({"a": entry(0, 4)}, b"123456", ("2 bytes at its end belong to no tensor",)),
        ({"a": entry(0, 4, (2,))}, b"1234", ("tensor 'a'", "takes 8 bytes", "hold 4")),
        ({"a": entry(0, 4, (-1,))}, b"1234", ("tensor 'a'", "whole numbers")),
        ({"a": entry(0, 4, (True,))}, b"1234", ("tensor 'a'", "whole numbers")),
        ({"a": entry(0, 4, dtype="F33")}, b"1234", ("tensor 'a'", "'F33' is not known")),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"1234", ("tensor 'a'", "data_offsets")),
        ({"__metadata__": {"a": 1}}, b"", ("__metadata__",)),
        (b'{"a": {}, "a": {}}', b"", ("tensor 'a'", "twice")),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', b"", ("twice",)),
        (b"[]", b"", ("no object",)),
        (b"{", b"", ("not JSON",)),
        (b"\xff{}", b"", ("not JSON",)),
    ],
)
def test_damage_is_named(tmp_path, header, data, words):
    path = raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert all(word in str(caught.value) for word in (str(path), *words)), caught.value


@pytest.mark.parametrize("length,words", [(200_000_000, "200000000 bytes; readers accept 100000000"), (5000, "header has 5000 bytes")])
def test_headers_that_are_too_long(tmp_path, length, words):
    with pytest.raises(CheckpointError, match=words):
        SafetensorsFile(raw(tmp_path / "m", b"{}", length=length))
    (tmp_path / "short").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="it has 4 bytes"):
        SafetensorsFile(tmp_path / "short")
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsFile(tmp_path / "absent")


@pytest.mark.parametrize("block_bytes", [1, 40, 1 << 20])
def test_any_box_of_a_file_of_the_library(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", block_bytes)
    save_file(TENSORS, tmp_path / "m", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "m")
    assert file.metadata == {"format": "pt"} and set(file.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        whole = file.read(name)
        assert whole.dtype == tensor.dtype and torch.equal(whole, tensor)
    for start in range(4):
        for size in range(5 - start):
            assert torch.equal(file.read("a", Box((start, 2), (size, 3))), TENSORS["a"][start : start + size, 2:5])
    for box in (Box((1, 1, 0), (1, 2, 5)), Box((0, 0, 2), (2, 3, 2)), Box((0, 2, 1), (2, 1, 1)), Box((0, 0, 0), (2, 3, 5))):
        expected = TENSORS["b"][tuple(slice(a, b) for a, b in zip(box.start, box.end, strict=True))]
        assert torch.equal(file.read("b", box), expected)
    with pytest.raises(UsageError, match=r"not inside the shape \[4, 6\]"):
        file.read("a", Box((0, 0), (5, 6)))


def write(path: Path, tensors: dict[str, torch.Tensor], blocks: Callable[[torch.Tensor], Any]) -> None:
    heads = [Head(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()]
    write_file(path, heads, lambda name: blocks(tensors[name]))


def test_the_library_reads_what_is_written_in_blocks(tmp_path):
    write(tmp_path / "m", TENSORS, lambda tensor: tensor.split(1) if tensor.ndim else [tensor])
    found = load_file(tmp_path / "m")
    assert set(found) == set(TENSORS) and all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert all(place.offset % getattr(torch, place.dtype).itemsize == 0 for place in SafetensorsFile(tmp_path / "m").tensors.values())


def test_a_write_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(PluginError, match=r"a gave 48 bytes; shape \[4, 6\] in float32 has 96"):
        write(tmp_path / "m", TENSORS, lambda tensor: [tensor[:2] if tensor.ndim else tensor])
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path / "absent" / "m", TENSORS, lambda tensor: [tensor])


def test_shards_are_bounded_by_data_and_by_header():
    heads = [Head(f"tensor.{number}", (100,), "float32") for number in range(10)]
    assert [len(group) for group in shards(heads, 1000)] == [2] * 5
    assert [len(group) for group in shards(heads, 100)] == [1] * 10, "a tensor that is larger has a file of its own"
    assert [len(group) for group in shards(heads, 10**9, header_bytes=700)] == [3, 3, 3, 1]
    assert [head for group in shards(heads, 1000) for head in group] == heads
