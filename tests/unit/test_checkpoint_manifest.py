"""Manifests that were crafted or damaged: each is refused with file, tensor and reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from intarsia.checkpoint.manifest import decode, encode, from_json, to_json
from intarsia.contracts import Box
from intarsia.errors import CheckpointError
from intarsia.layout import find_overlap

WHERE = "run/checkpoints/step-00000001/manifest.json"


def piece(start: list[int], size: list[int], offset: int, length: int, file: str = "data/0.bin") -> dict[str, Any]:
    return {"start": start, "size": size, "file": file, "offset": offset, "length": length}


def good() -> dict[str, Any]:
    """A manifest of two ranks with every kind of item."""
    head = {"owner": "model", "name": "w", "kind": "tensor", "version": 1, "shape": [4, 3], "dtype": "float32"}
    rank = {"owner": "rng", "name": "torch", "kind": "rank", "version": 1, "shape": [2], "dtype": "uint8"}
    return {
        "format": "intarsia-checkpoint",
        "version": 1,
        "step": 3,
        "serial": 1,
        "time_s": 1.5,
        "world": 2,
        "writer": "intarsia 0.1",
        "backend": "a:stream",
        "facts": {"mesh": {"dp_shard": 2}},
        "tensors": {
            "model/w": head | {"pieces": [piece([0, 0], [2, 3], 0, 24), piece([2, 0], [2, 3], 24, 24)]},
            "model/e": head | {"name": "e", "shape": [0, 3], "pieces": []},
            "rng/torch@rank0": rank | {"rank": 0, "pieces": [piece([0], [2], 48, 2)]},
            "rng/torch@rank1": rank | {"rank": 1, "pieces": [piece([0], [2], 50, 2)]},
        },
        "values": {
            "data/c": {"owner": "data", "name": "c", "kind": "keyed", "version": 1, "value": {"a": 1}},
            "a/r": {"owner": "a", "name": "r", "kind": "rank", "version": 2, "value": {"0": None, "1": [1]}},
        },
        "files": {"data/0.bin": {"size": 52, "sha256": "0" * 64}},
    }


def test_the_good_one_is_read_and_written_back() -> None:
    manifest = from_json(good(), WHERE)
    assert to_json(manifest) == good()
    assert from_json(decode(encode(to_json(manifest)), WHERE), WHERE) == manifest
    assert manifest.items() == {
        "model/w": ("tensor", 1),
        "model/e": ("tensor", 1),
        "rng/torch": ("rank", 1),
        "data/c": ("keyed", 1),
        "a/r": ("rank", 2),
    }


def w(value: dict[str, Any]) -> dict[str, Any]:
    return value["tensors"]["model/w"]


def first(value: dict[str, Any]) -> dict[str, Any]:
    return w(value)["pieces"][0]


CRAFTED: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("hole", lambda v: w(v)["pieces"].pop(), r"tensor 'model/w': its boxes hold 6 of the 12 elements of shape \[4, 3\]: there is a hole"),
    ("overlap", lambda v: w(v)["pieces"][1].update(start=[1, 0]), r"tensor 'model/w': the boxes \[0:2, 0:3\] and \[1:3, 0:3\] overlap"),
    ("twice", lambda v: w(v)["pieces"].append(copy.deepcopy(first(v))), "overlap"),
    ("outside the shape", lambda v: first(v).update(start=[3, 0]), r"box \[3, 0\] \+ \[2, 3\] is empty or outside"),
    ("empty box", lambda v: first(v).update(size=[0, 3], length=0), "empty or outside"),
    ("dimensions", lambda v: first(v).update(start=[0]), "not as many dimensions"),
    ("negative", lambda v: first(v).update(start=[-1, 0]), "start must be a list of integers of at least 0"),
    ("offset", lambda v: first(v).update(offset=40), r"bytes 40 to 64 are outside the file 'data/0.bin' of 52 bytes"),
    ("negative offset", lambda v: first(v).update(offset=-1), "offset must be an integer of at least 0, is -1"),
    ("true offset", lambda v: first(v).update(offset=True), "offset must be an integer of at least 0, is True"),
    ("length", lambda v: first(v).update(length=20), r"a box of size \[2, 3\] in float32 has 24 bytes, not 20"),
    ("shared bytes", lambda v: first(v).update(offset=8), "file 'data/0.bin': tensors 'model/w' and 'model/w' overlap at byte 24"),
    ("shared between tensors", lambda v: v["tensors"]["rng/torch@rank0"]["pieces"][0].update(offset=46), "'model/w' and 'rng/torch@rank0' overlap at byte 46"),
    ("file not listed", lambda v: first(v).update(file="data/1.bin"), "its file 'data/1.bin' is not listed. Did you mean 'data/0.bin'"),
    ("dtype", lambda v: w(v).update(dtype="float23"), "unknown dtype 'float23'. Did you mean 'float32'"),
    ("dtype of another size", lambda v: w(v).update(dtype="float64"), "in float64 has 48 bytes, not 24"),
    ("shape", lambda v: w(v).update(shape=[4, 4]), "there is a hole"),
    ("huge shape", lambda v: w(v).update(shape=[4 << 50, 3]), "there is a hole"),
    ("shape of text", lambda v: w(v).update(shape="43"), "shape must be a list"),
    ("float in shape", lambda v: w(v).update(shape=[4.0, 3]), "shape must be a list of integers"),
    ("time", lambda v: v.update(time_s=1e300), "time_s must be a number of seconds in the years 1970 to 9999, is 1e"),
    ("time of a clock that counts otherwise", lambda v: v.update(time_s=-1), "time_s must be a number of seconds in the years"),
    ("recipe is a list", lambda v: v["facts"].update(recipe=[]), r"facts: recipe must be an object, is \[\]"),
    ("plugins", lambda v: v["facts"].update(plugins=[3]), "facts: plugins must be a list of objects"),
    ("mesh", lambda v: v["facts"].update(mesh={"dp_shard": "2"}), "facts: mesh must be an object of integers"),
    ("kind", lambda v: w(v).update(kind="pickle"), "kind is tensor, replicated or rank, not 'pickle'"),
    ("key", lambda v: w(v).update(name="v"), "owner, name and rank say 'model/v'"),
    ("surplus rank", lambda v: w(v).update(rank=0), "unknown field 'rank'"),
    ("rank outside", lambda v: v["tensors"]["rng/torch@rank1"].update(rank=2), "owner, name and rank say 'rng/torch@rank2'"),
    ("rank lost", lambda v: v["tensors"].pop("rng/torch@rank1"), "'rng/torch' must have an entry for each of 2 ranks, and lacks rank 1"),
    ("value of a rank lost", lambda v: v["values"]["a/r"]["value"].pop("0"), "'a/r' must have an entry for each of 2 ranks, and lacks rank 0"),
    ("value of a surplus rank", lambda v: v["values"]["a/r"]["value"].update({"2": 0}), "'a/r' has entries for more ranks than the 2"),
    ("keyed is a list", lambda v: v["values"]["data/c"].update(value=[1]), "value 'data/c': value must be an object"),
    ("tensor as value", lambda v: v["values"]["data/c"].update(kind="tensor"), "kind is replicated, keyed or rank"),
    ("item twice", lambda v: v["values"].update({"model/w": {"owner": "model", "name": "w", "kind": "replicated", "version": 1, "value": 0}}), "the item 'model/w' is there in a second form"),
    ("escaping file", lambda v: v["files"].update({"../x": {"size": 0, "sha256": "0" * 64}}), r"file '\.\./x': a data file's name is relative"),
    ("absolute file", lambda v: v["files"].update({"/etc/passwd": {"size": 0, "sha256": "0" * 64}}), "file '/etc/passwd': a data file's name is relative"),
    ("marker as data", lambda v: v["files"].update({"COMMIT": {"size": 0, "sha256": "0" * 64}}), "not the manifest or the marker"),
    ("hash", lambda v: v["files"]["data/0.bin"].update(sha256="0" * 63), "sha256 must be 64 hexadecimal digits"),
    ("no hash", lambda v: v["files"]["data/0.bin"].pop("sha256"), "file 'data/0.bin': the field 'sha256' is missing"),
    ("file size", lambda v: v["files"]["data/0.bin"].update(size=50), "outside the file 'data/0.bin' of 50 bytes"),
    ("unknown field", lambda v: w(v).update(dtyp="x"), "unknown field 'dtyp'. Did you mean 'dtype'"),
    ("unknown field on top", lambda v: v.update(code="import os"), "top level: unknown field 'code'"),
    ("missing field", lambda v: v.pop("world"), "top level: the field 'world' is missing"),
    ("step", lambda v: v.update(step="3"), "step must be an integer"),
    ("time", lambda v: v.update(time_s="now"), "time_s must be a number"),
    ("tensors as a list", lambda v: v.update(tensors=[]), "tensors must be an object"),
    ("pieces as an object", lambda v: w(v).update(pieces={}), "pieces must be a list"),
    ("piece as a number", lambda v: w(v).update(pieces=[3]), "must be an object, is 3"),
    ("format", lambda v: v.update(format="zip"), "'format' must be 'intarsia-checkpoint'"),
    ("newer", lambda v: v.update(version=7), "checkpoint format 7, written by Intarsia 'intarsia 0.1'; this Intarsia reads formats up to 1"),
    ("version", lambda v: v.update(version="1"), "'version' must be a positive integer"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [entry[1:] for entry in CRAFTED], ids=[entry[0] for entry in CRAFTED])
def test_crafted_manifests_are_refused(change: Callable[[dict[str, Any]], Any], words: str) -> None:
    value = good()
    change(value)
    with pytest.raises(CheckpointError, match=words) as caught:
        from_json(value, WHERE)
    assert str(caught.value).startswith(WHERE)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1, "a": 2}', "the key 'a' is given more than once"),
        (b'{"a": {"b": 1, "c": 0, "b": 1}}', "the key 'b' is given more than once"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b"\x80\x04\x95", "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b"[" * 100_000, "nested too deeply|not valid JSON"),
        (b"1" * 10_000, "not valid JSON"),
        (b"[]", "not a manifest"),
        (b'"x"', "not a manifest"),
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        from_json(decode(data, WHERE), WHERE)
    assert str(caught.value).startswith(WHERE)


def test_any_field_of_another_type_is_an_error_or_harmless() -> None:
    """No TypeError, KeyError or the like comes out, whatever stands where."""

    def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(found for key, child in inner for found in places(child, (*path, key)))]

    for path in places(good())[1:]:
        for replacement in (None, True, -1, 1.5, "", "x", [], {}, [[]], 10**30, {"a": 1}):
            value = good()
            parent = value
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = replacement
            try:
                from_json(value, WHERE)
            except CheckpointError as error:
                assert WHERE in str(error)


@pytest.mark.timeout(240)  # a second or two: what grows with the square of items or pieces would take minutes
def test_large_manifests_are_checked() -> None:
    value = good()
    for name in range(20_000):
        key = f"{name}-" + "n" * 1000
        value["tensors"][f"model/{key}"] = w(good()) | {"name": key, "shape": [0], "pieces": []}
    rows = [piece([2 * r, 0], [2, 3], 24 * r, 24, "data/1.bin") for r in range(4096)]
    value["tensors"]["model/big"] = w(good()) | {"name": "big", "shape": [8192, 3], "pieces": rows}
    value["files"]["data/1.bin"] = {"size": 24 * 4096, "sha256": "f" * 64}
    data = encode(to_json(from_json(value, WHERE)))
    assert from_json(decode(data, WHERE), WHERE).tensors["model/big"].numel == 3 * 8192


def test_overlaps_are_found_in_any_dimension() -> None:
    grid = [Box((i, j), (2, 3)) for i in (0, 2, 4) for j in (0, 3, 6)]
    assert find_overlap(grid) is None
    assert find_overlap([*grid, Box((5, 8), (3, 3))]) == (grid.index(Box((4, 6), (2, 3))), len(grid))
    assert find_overlap([Box((), ())]) is None and find_overlap([Box((), ())] * 2) is not None
