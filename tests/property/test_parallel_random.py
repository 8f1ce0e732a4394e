"""Random meshes, schedules, micro-batches, methods, dispatchers: what is legal computes what one process does, and what is not is refused when it is built.

What is legal is said here a second time (`problem`), from the numbers alone. A failing example is printed; to run it again:

    python tests/property/test_parallel_random.py '{"family": "deepseek", "mesh": {"tp": 2}, ...}'
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from intarsia.errors import UsageError
from intarsia_testing.strategies import THOROUGH

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
from _build import build_rank
from _meshes import Meshes
from parallel_recipes import write_documents

# By the nightly session, other ones at every run; elsewhere always the same.
LEGAL, ANY = (100, 300) if THOROUGH else (30, 20)
TOLERANCE = 1e-5
STEPS = ["train.steps=3"]
BATCH, BLOCKS, HEADS, EXPERTS = 8, 4, 4, 8
FAMILIES = ("llama", "llama_tied", "llama_muon", "deepseek", "deepseek_tied", "deepseek_muon", "deepseek_tied_muon")
STAGES = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "interleaved": None, "zbv": 2, "dualpipev": 2}
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
REFUSALS = hypothesis.settings(max_examples=ANY, derandomize=not THOROUGH, database=None, deadline=None)
RUNS = hypothesis.settings(
    max_examples=LEGAL,
    derandomize=not THOROUGH,
    database=None,
    deadline=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much, hypothesis.HealthCheck.data_too_large],
)


@st.composite
def examples(draw: Any, legal: bool = False) -> dict[str, Any]:
    """A family, degrees of at most 8 processes together, and settings."""
    degrees = st.sampled_from([1, 1, 1, 2, 2, 4] if legal else [1, 1, 1, 2, 2, 3, 4, 5, 8])
    mesh = {axis: draw(degrees) for axis in draw(st.permutations(AXES))[: draw(st.integers(1, 4))]}
    hypothesis.assume(2 <= math.prod(mesh.values()) <= 8)
    return {
        "family": draw(st.sampled_from(FAMILIES)),
        "mesh": mesh,
        "ep": draw(st.sampled_from([1, 2, 4] if legal else [1, 1, 2, 3, 4, 8])),
        "schedule": draw(st.sampled_from(list(STAGES))),
        "virtual": draw(st.integers(1, 3)),
        "few": draw(st.booleans()),
        "split": draw(st.booleans()),
        "unshard": draw(st.sampled_from(["step", "action"])),
        "reduce": draw(st.sampled_from(["last", "each"])),
        "micro_batch": draw(st.sampled_from([1, 1, 2, 3, 8])),
        "context": draw(st.sampled_from(["auto", "ring", "gather", "ulysses"])),
        "dispatcher": draw(st.sampled_from(["all_to_all", "fixed_capacity"])),
        "recompute": draw(st.sampled_from([0, 0, 1, 2])),
        "placement": draw(st.sampled_from(["row", "flat", "owned"])),
        "reshard": draw(st.sampled_from(["always", "never", "after 1"])),
    }


def sizes_of(example: dict[str, Any]) -> dict[str, int]:
    """Degrees of all axes."""
    return {axis: example["mesh"].get(axis, 1) for axis in AXES}


def problem(example: dict[str, Any]) -> str | None:
    """Why an example cannot be: by the numbers of `parallel_recipes`."""
    sizes, is_moe = sizes_of(example), example["family"].startswith("deepseek")
    if example["ep"] > 1:
        if (sizes["dp_shard"] * sizes["cp"] * sizes["tp"]) % example["ep"]:
            return "ep does not fold"
        if not is_moe or EXPERTS % example["ep"]:
            return "experts"
    if HEADS % sizes["tp"]:
        return "heads"
    if example["context"] == "ulysses" and not is_moe and sizes["cp"] > 1 and HEADS // sizes["tp"] % sizes["cp"]:
        return "heads by context"
    if sizes["pp"] > 1:
        virtual = STAGES[example["schedule"]] or example["virtual"]
        if virtual * sizes["pp"] > BLOCKS:
            return "stages"
        rows = math.ceil(BATCH / (sizes["dp_replicate"] * sizes["dp_shard"]))
        least = {"zbv": 2 * sizes["pp"] - 1, "dualpipev": 2 * sizes["pp"]}.get(example["schedule"], sizes["pp"])
        if math.ceil(rows / example["micro_batch"]) < least and not example["few"]:
            return "micro-batches"
    return None


def overrides_of(example: dict[str, Any]) -> list[str]:
    """As they stand on a command line."""
    sizes, overrides = sizes_of(example), [*STEPS, f"train.micro_batch={example['micro_batch']}", f"mesh.ep={example['ep']}"]
    overrides += [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    overrides += ["parallel=declared", f"parallel.context={example['context']}"]
    if example["ep"] > 1:
        overrides.append(f"parallel.dispatcher={example['dispatcher']}")
        if example["dispatcher"] == "fixed_capacity":
            overrides.append(f"parallel.dispatcher.factor={float(example['ep'])}")  # Whatever the routing is.
    if sizes["pp"] > 1:
        overrides += ["engine=pipeline", f"engine.schedule={example['schedule']}", f"engine.few_micro_batches={example['few']}"]
        overrides += [f"engine.{name}={example[name]}" for name in ("unshard", "reduce")] + [f"engine.split_backward={example['split']}"]
        if example["schedule"] == "interleaved":
            overrides.append(f"engine.schedule.virtual_stages={example['virtual']}")
    if example["recompute"]:
        overrides += ["recompute.mode=blocks", f"recompute.every={example['recompute']}"]
    return [*overrides, f"sharder.placement={example['placement']}", f"sharder.reshard={example['reshard']}"]


@REFUSALS
@hypothesis.given(examples())
def test_what_is_illegal_is_refused_on_every_rank_when_it_is_built(example: dict[str, Any]) -> None:
    ranks = math.prod(sizes_of(example).values())
    said = set()
    for rank in range(ranks) if THOROUGH else {0, ranks // 2, ranks - 1}:
        try:
            build_rank(example["family"], overrides_of(example), ranks, rank)
            said.add("")
        except UsageError as error:
            said.add(str(error))
    assert len(said) == 1, f"ranks differ, and some would wait: {json.dumps(example)}: {said}"
    assert (said == {""}) == (problem(example) is None), f"{problem(example)}, but {said}: {json.dumps(example)}"


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meshes]:
    """Processes for all examples."""
    folder: Path = tmp_path_factory.mktemp("random")
    write_documents(folder)
    with Meshes(folder) as made:
        yield made


REFERENCES: dict[tuple[int, str], dict[str, Any]] = {}


def check(example: dict[str, Any], meshes: Meshes) -> None:
    """Run it, and compare it with one process."""
    family, ranks = example["family"], math.prod(sizes_of(example).values())
    key = (id(meshes), family)
    if key not in REFERENCES:
        REFERENCES[key] = meshes.run([{"name": family, "ranks": 1, "recipe": family, "overrides": STEPS, "keep": family}])[family]
    expected, name = REFERENCES[key], f"run-{len(list(meshes.folder.glob('runs/*')))}"
    job = {"name": name, "ranks": ranks, "recipe": family, "overrides": overrides_of(example), "compare": family}
    found = meshes.run([job])[name]
    told = json.dumps(example)
    assert "error" not in found, f"{told}\n{found['error']}"
    for step, numbers in expected["steps"].items():
        for what, value in numbers.items():
            assert found["steps"][step][what] == pytest.approx(value, rel=TOLERANCE), f"{told}: {what} of step {step}"
    assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=TOLERANCE), told
    worst = max((error, name) for rank in found["by_rank"] for name, error in rank["worst"])
    assert worst[0] < TOLERANCE, f"{told}: {worst}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@RUNS
@hypothesis.given(example=examples(legal=True).filter(lambda example: problem(example) is None))
def test_what_is_legal_equals_one_process(example: dict[str, Any], meshes: Meshes) -> None:
    hypothesis.note(json.dumps(example))
    check(example, meshes)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        write_documents(Path(place))
        with Meshes(Path(place)) as made:
            for text in sys.argv[1:]:
                check(json.loads(text), made)
