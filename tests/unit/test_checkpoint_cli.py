"""`intarsia checkpoint`, in this process, over real folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from intarsia.cli import main
from intarsia.contracts import StateItem
from intarsia_checkpoint_formats.reader import open_checkpoint
from intarsia_checkpoint_posix.storage import PosixStorage
from intarsia_testing.stateful import Holder, OverStorage, tensor_item


def make_run(run: Path, steps: tuple[int, ...] = (1, 2)) -> Path:
    """A run directory with checkpoints whose weights depend on the step."""
    manager = OverStorage(PosixStorage(run, fsync=False), facts={"name": "tiny", "mesh": {"dp_shard": 1}}, keep_last=0)
    for step in steps:
        weights = torch.arange(12.0).view(3, 4)
        weights[1, 2] += step
        manager.save(
            step,
            [
                Holder(
                    tensor_item("w", weights),
                    tensor_item("b", torch.full((5,), 0.5, dtype=torch.bfloat16)),
                    tensor_item("e", torch.empty(0, 2)),
                    tensor_item("s", torch.tensor(3.5)),
                    StateItem("progress", "steps", "replicated", {"steps": step}),
                    StateItem("rng", "torch", "rank", torch.ones(3, dtype=torch.uint8)),
                )
            ],
        )
    manager.close()
    return run


def intarsia(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    code = main(["checkpoint", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def as_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """What `--json` prints."""
    got, out, err = intarsia(capsys, *words, "--json")
    assert got == code, err
    return json.loads(out)


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    (run / "checkpoints/step-00000002/COMMIT").unlink()
    (run / "checkpoints/saving.h.1.x.1.step-00000003").mkdir()
    (run / "checkpoints/saving.h.1.x.1.step-00000003/f").touch()
    facts = as_json(capsys, "list", str(run))
    assert [(ref["step"], ref["serial"]) for ref in facts["checkpoints"]] == [(1, 1)]
    assert ["COMMIT" in entry["reason"] or "temporary" in entry["reason"] for entry in facts["skipped"]] == [True, True]
    _, out, _ = intarsia(capsys, "list", str(run))
    assert "step-00000001" in out and out.count("not complete:") == 2
    code, _, err = intarsia(capsys, "list", str(tmp_path / "none"))
    assert code == 2 and "no run directory" in err


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    facts = as_json(capsys, "show", str(run))
    assert facts["step"] == 2 and facts["tensors"]["model/w"] == {"kind": "tensor", "shape": [3, 4], "dtype": "float32", "pieces": 1}
    assert facts["values"] == {"progress/steps": {"kind": "replicated", "value": {"steps": 2}}}
    _, out, _ = intarsia(capsys, "show", str(run / "checkpoints/step-00000001"))
    assert "step 1," in out and "rng/torch@rank0" in out and "intarsia-checkpoint-stream:stream" in out
    code, _, err = intarsia(capsys, "show", str(tmp_path))
    assert code == 5 and "no complete checkpoint" in err


def test_verify_names_each_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert as_json(capsys, "verify", str(run))["problems"] == []
    folder = run / "checkpoints/step-00000002"
    data = bytearray((folder / "data/rank-00000-000.bin").read_bytes())
    data[3] ^= 1
    (folder / "data/rank-00000-000.bin").write_bytes(data)
    (folder / "extra").touch()
    facts = as_json(capsys, "verify", str(folder), code=5)
    assert [problem["file"] for problem in facts["problems"]] == ["data/rank-00000-000.bin", "extra"]
    (folder / "manifest.json").write_bytes(b"{}")
    code, _, err = intarsia(capsys, "verify", str(folder))
    assert code == 5 and "COMMIT does not fit manifest.json" in err


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    one, two = (str(run / f"checkpoints/step-0000000{step}") for step in (1, 2))
    facts = as_json(capsys, "diff", one, two)
    assert facts["equal"] is False
    assert {entry["key"]: entry.get("max_abs") for entry in facts["differences"]} == {"model/w": 1.0, "progress/steps": None}
    assert as_json(capsys, "diff", one, one) == {"equal": True, "differences": []}
    other = OverStorage(PosixStorage(tmp_path / "other", fsync=False))
    items = (tensor_item("w", torch.full((3, 4), float("nan"))), tensor_item("b", torch.ones(5)), tensor_item("new", torch.ones(1)))
    other.save(1, [Holder(*items)])
    other.close()
    assert as_json(capsys, "diff", str(tmp_path / "other"), str(tmp_path / "other"))["equal"]
    _, out, _ = intarsia(capsys, "diff", one, str(tmp_path / "other"))
    assert "model/w: 12 of 12 elements differ, by at most nan" in out
    assert "model/b: bfloat16 [5] and float32 [5]" in out
    assert f"model/e: only in {one}" in out and "model/new: only in" in out


def test_safetensors_out_and_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder = make_run(tmp_path / "run"), tmp_path / "out"
    facts = as_json(capsys, "export", str(run), str(folder), "--to", "safetensors")
    assert facts["files"] == [str(folder / "model.safetensors")]
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    assert sorted(tensors) == ["b", "e", "s", "w"] and tensors["w"][1, 2] == 8 and tensors["s"].shape == ()
    sharded = tmp_path / "sharded"
    as_json(capsys, "export", str(run), str(sharded), "--to", "safetensors", "--option", "shard_bytes=20", "--option", "dtype=float16")
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2 and index["metadata"]["total_size"] == 2 * 18
    for name, file in index["weight_map"].items():
        assert safetensors.torch.load_file(sharded / file)[name].dtype == torch.float16
    code, _out, err = intarsia(capsys, "import", str(sharded), str(tmp_path / "new"), "--from", "safetensors")
    assert code == 0, err
    opened = open_checkpoint(tmp_path / "new")
    assert opened.manifest.step == 0 and torch.equal(opened.read("model/w"), tensors["w"].half()) and opened.verify() == []


def test_show_tells_the_recipe_and_counts_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = OverStorage(PosixStorage(tmp_path, fsync=False), facts={"recipe": {"name": "llama3-debug"}})
    manager.save(1, [Holder(tensor_item("w", torch.ones(2)))])
    manager.close()
    _, out, _ = intarsia(capsys, "show", str(tmp_path))
    assert "recipe llama3-debug" in out and "1 file\n" in out and "with 1 process," in out


@pytest.mark.parametrize("action", ["list", "show", "verify", "diff", "export"])
def test_a_path_that_is_not_there_is_a_wrong_request(tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str) -> None:
    more = {"diff": [str(tmp_path)], "export": [str(tmp_path / "out"), "--to", "safetensors"]}.get(action, [])
    code, _, err = intarsia(capsys, action, str(tmp_path / "missing"), *more)
    assert code == 2 and "missing" in err


def test_exports_are_refused_with_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    for words, text in [
        ((str(run), "--to", "safetensors"), "is not empty"),
        ((str(tmp_path / "x"), "--to", "safetensor"), "Did you mean 'safetensors'"),
        ((str(tmp_path / "x"), "--to", "safetensors", "--option", "owners=a"), "Did you mean 'owner'"),
        ((str(tmp_path / "x"), "--to", "safetensors", "--option", "owner=a"), "no tensors of the owner 'a'"),
        ((str(tmp_path / "x"), "--to", "safetensors", "--option", "shard_bytes=0"), "positive number"),
        ((str(tmp_path / "x"), "--to", "safetensors", "--option", "dtype"), "NAME=VALUE"),
    ]:
        code, _, err = intarsia(capsys, "export", str(run), *words)
        assert code != 0 and text in err, (words, err)


def test_native_copies_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    as_json(capsys, "export", str(run), str(tmp_path / "copy"), "--to", "native", "--option", "backend=stream")
    assert as_json(capsys, "diff", str(run), str(tmp_path / "copy"))["equal"]
    as_json(capsys, "import", str(tmp_path / "copy"), str(tmp_path / "back"), "--from", "native")
    assert as_json(capsys, "diff", str(run), str(tmp_path / "back"))["equal"]
    assert open_checkpoint(tmp_path / "back").manifest.facts == {"name": "tiny", "mesh": {"dp_shard": 1}}


def test_damaged_safetensors_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    safetensors.torch.save_file({"a": torch.ones(3)}, source / "one.safetensors")
    safetensors.torch.save_file({"a": torch.ones(3)}, source / "two.safetensors")
    code, _, err = intarsia(capsys, "import", str(source), str(tmp_path / "run"), "--from", "safetensors")
    assert code == 5 and "the tensor 'a' is in one.safetensors as well" in err
    (source / "two.safetensors").write_bytes((source / "one.safetensors").read_bytes()[:-2])
    code, _, err = intarsia(capsys, "import", str(source), str(tmp_path / "run"), "--from", "safetensors")
    assert code == 5 and "two.safetensors is not a sound safetensors file" in err
    (source / "two.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x", "b": "y"}}))
    code, _, err = intarsia(capsys, "import", str(source), str(tmp_path / "run"), "--from", "safetensors")
    assert code == 5 and "listed only ['b']" in err
    assert not (tmp_path / "run").exists()


def test_many_tensors_with_long_names_are_cut_into_shards_that_can_be_read() -> None:
    from intarsia.checkpoint.manifest import TensorRecord
    from intarsia_checkpoint_formats.plain import HEADER_BYTES, shards

    records = [TensorRecord("model", f"{i}" + "n" * 1000, "tensor", 1, (0,), "float32", ()) for i in range(100_000)]
    groups = list(shards(records, dict.fromkeys((record.key for record in records), 0), 1 << 30))
    assert sum(map(len, groups)) == 100_000 and len(groups) > 1
    assert all(sum(len(record.name) + 202 for record in group) <= HEADER_BYTES for group in groups)
