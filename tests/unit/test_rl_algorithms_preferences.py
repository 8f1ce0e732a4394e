"""Pairs: their source, where their documents lie, the loss by hand, and runs that resume exactly."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from intarsia.config import Resolved, resolve
from intarsia.contracts import IGNORE, Batch
from intarsia.errors import CheckpointError, StoppedWithCheckpoint, UsageError
from intarsia.plugins import current
from intarsia.train import step as steps
from intarsia.train import trainer
from intarsia_data.config import ByteTokenizerConfig
from intarsia_rl.algorithms.config import DPOConfig
from intarsia_rl.algorithms.dpo import DPO
from intarsia_rl.preferences import packing
from intarsia_rl.preferences.config import PreferenceFilesConfig
from intarsia_rl.preferences.loader import PreferencesLoader
from intarsia_rl.preferences.loader import build as build_loader

# ---------------------------------------------------------------- the source


def documents(folder: Path, *records: Any, **fields: str) -> list[Any]:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = current().build(PreferenceFilesConfig(paths=(str(path),), **fields))
    assert len(source) == 2 * len(records)
    return [source[number] for number in range(len(source))]


def said(document: Any) -> list[tuple[str, str, bool]]:
    return [(turn.role, turn.content, turn.role == "assistant" if turn.trained is None else turn.trained) for turn in document.messages]


def test_strings_are_a_users_turn_and_an_assistants(tmp_path):
    chosen, rejected = documents(tmp_path, {"q": "2+2?", "good": "4", "bad": "5"}, prompt="q", chosen="good", rejected="bad")
    assert said(chosen) == [("user", "2+2?", False), ("assistant", "4", True)]
    assert said(rejected) == [("user", "2+2?", False), ("assistant", "5", True)]


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def test_conversations_with_and_without_a_prompt_of_their_own(tmp_path):
    """What whole conversations have in common is not trained on, even where the assistant spoke."""
    apart = {"prompt": turns("a", "b", "c"), "chosen": turns("", "d")[1:], "rejected": "e"}
    whole = {"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "b", "c", "e")}
    made = documents(tmp_path, apart, whole)
    assert (
        said(made[0]) == said(made[2]) == [("user", "a", False), ("assistant", "b", False), ("user", "c", False), ("assistant", "d", True)]
    )
    assert said(made[1]) == said(made[3]) and said(made[3])[3] == ("assistant", "e", True)


def test_token_ids_are_taken_as_they_are(tmp_path):
    chosen, rejected = documents(tmp_path, {"prompt": [1, 2], "chosen": [3], "rejected": [4, 5]})
    assert (chosen.tokens, chosen.trained) == ((1, 2, 3), (False, False, True))
    assert (rejected.tokens, rejected.trained) == ((1, 2, 4, 5), (False, False, True, True))


def test_fields_that_are_named_like_media_may_be_read_and_be_empty(tmp_path):
    chosen, _ = documents(tmp_path, {"image": "2+2?", "chosen": "4", "rejected": "5", "images": [], "video": None}, prompt="image")
    assert said(chosen) == [("user", "2+2?", False), ("assistant", "4", True)]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, r"pairs.jsonl:1: there is no field 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "nothing to prefer"),
        ({"chosen": "b", "rejected": "c"}, "no whole conversations"),
        ({"chosen": turns("a"), "rejected": turns("a", "b")}, "nothing to prefer"),
        ({"prompt": "a", "chosen": [1], "rejected": [2]}, "all three must be there"),
        ({"prompt": [1], "chosen": "a", "rejected": "b"}, "'prompt' holds token ids"),
        ({"prompt": [1], "chosen": [2], "rejected": []}, "one of them is empty"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "field 'chosen' holds a value of type int"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "images": ["a.png"]},
            "images or videos in the field 'images', and pairs are of text alone",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}, "a"]}], "chosen": "b", "rejected": "c"},
            r"pairs.jsonl:1: .*in the field 'prompt'",
        ),
        ({"prompt": "a", "chosen": [{"role": "assistant", "content": "b", "video": "b.mp4"}], "rejected": "c"}, "in the field 'chosen'"),
        (
            {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": [{"image_url": {"url": "c"}}]}]},
            "in the field 'rejected'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_records_that_are_wrong_are_named(tmp_path, record, message):
    with pytest.raises(UsageError, match=message):
        documents(tmp_path, record)


def test_a_loader_of_documents_is_refused_before_the_model_is_built(tmp_path):
    overrides = ["loss=dpo", "data.mixture.0.source.limit=3"]
    resolved = resolve("llama3/debug", overrides, [])
    with pytest.raises(
        UsageError, match=r"`dpo` learns from pairs of answers, and the loader \(`packed`\) gives documents.*pairs are of text alone"
    ):
        trainer.train(trainer.Request(resolved, current(), tmp_path / "run", False, False, False))
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert {event.get("stage") for event in events} & {"mesh", "data", "model"} == {"mesh"}


# ---------------------------------------------------------------- packing


def test_pairs_stay_together_and_every_document_lies_somewhere():
    draw = random.Random(0)
    for _ in range(200):
        size, rows, ranks = draw.randint(4, 12), draw.randint(2, 4), draw.randint(1, 4)
        lengths = [(draw.randint(1, size), draw.randint(1, size)) for _ in range(draw.randint(0, 11))]
        plan = packing.step(lengths, size, rows, ranks)
        assert len({len(each) for each in plan}) == 1 and plan[0]
        seen = []
        for each in (micro_batch for rank in plan for micro_batch in rank):
            assert len(each) == rows
            places = [place for row in each for place in row]
            assert sorted(places) == sorted((pair, side) for pair in {pair for pair, _ in places} for side in (0, 1))
            assert all(sum(lengths[pair][side] for pair, side in row) <= size for row in each)
            seen += places
        assert sorted(seen) == [(pair, side) for pair in range(len(lengths)) for side in (0, 1)]
        # Pairs go to ranks in order.
        assert [sorted({pair for each in rank for row in each for pair, _ in row}) for rank in plan] == [
            list(range(len(lengths) * rank // ranks, len(lengths) * (rank + 1) // ranks)) for rank in range(ranks)
        ]


def test_short_pairs_share_rows():
    plan = packing.micro_batches([(0, (2, 2)), (1, (3, 1)), (2, (4, 4))], 8, 2)
    assert plan == [[[(0, 0), (0, 1), (1, 0), (1, 1)], [(2, 0), (2, 1)]]]


# ---------------------------------------------------------------- the loss


class Head:
    """Two ids; hidden states are their logits."""

    head_weight_VD = torch.eye(2)


def pairs(*answers: tuple[float, float], reference: tuple[tuple[float, float], ...] | None = None) -> tuple[Batch, torch.Tensor]:
    """One row for each pair: a chosen answer of one token, then a rejected one, with these log-probabilities."""
    rows = len(answers)
    labels = torch.tensor([[0, IGNORE, 0, IGNORE]] * rows).view(rows, 4)
    sides = torch.tensor([[2 * row, -1, 2 * row + 1, -1] for row in range(rows)], dtype=torch.int32).view(rows, 4)
    probabilities = torch.tensor([[[c, c], [r, r]] for c, r in answers]).view(rows, 4).exp()
    hidden = torch.stack([probabilities, 1 - probabilities], -1).log()
    extra: dict[str, Any] = {"sides_BS": sides, "pairs": tuple(range(rows))}
    if reference is not None:
        extra["reference_P"] = torch.tensor(reference, dtype=torch.float64).flatten()
    return Batch(labels.clamp_min(0), labels, labels, labels, ((1, 1, 1, 1),) * rows, extra=extra), hidden.requires_grad_()


def of(config: DPOConfig, *answers: tuple[float, float], reference: tuple[tuple[float, float], ...]) -> tuple[float, dict[str, float]]:
    batch, hidden = pairs(*answers, reference=reference)
    result = DPO(config)(Head(), hidden, batch)  # type: ignore[arg-type]
    return result.total.item(), {name: value.item() for name, value in result.sums.items()}


def test_losses_by_hand():
    """Log-ratios ln 3 and -ln 2 with beta 1: m = ln 6, sigmoid(m) = 6/7."""
    answers, reference = (-1.0, -2.0), ((-1.0 - math.log(3), -2.0 + math.log(2)),)
    total, sums = of(DPOConfig(beta=1.0), answers, reference=reference)
    assert total == pytest.approx(-math.log(6 / 7), rel=1e-5)
    assert sums == pytest.approx(
        {"accuracy": 1.0, "margin": math.log(6), "chosen_reward": math.log(3), "rejected_reward": -math.log(2)}, rel=1e-5
    )
    smoothed, _ = of(DPOConfig(beta=1.0, label_smoothing=0.25), answers, reference=reference)
    assert smoothed == pytest.approx(-0.75 * math.log(6 / 7) - 0.25 * math.log(1 / 7), rel=1e-5)
    halved, _ = of(DPOConfig(beta=0.5), answers, reference=reference)
    assert halved == pytest.approx(math.log(1 + 6**-0.5), rel=1e-5)
    hinge, _ = of(DPOConfig(beta=0.5, kind="hinge"), answers, reference=reference)
    assert hinge == pytest.approx(1 - 0.5 * math.log(6), rel=1e-5)
    ipo, _ = of(DPOConfig(beta=0.5, kind="ipo"), answers, reference=reference)
    assert ipo == pytest.approx((math.log(6) - 1) ** 2, rel=1e-4)
    likely, sums = of(DPOConfig(beta=1.0, likelihood=0.5), answers, reference=reference)
    assert likely == pytest.approx(-math.log(6 / 7) + 0.5 * 1.0, rel=1e-5) and sums["chosen_cross_entropy"] == pytest.approx(1.0, rel=1e-5)


def test_sums_are_over_pairs_and_none_is_nothing():
    one = of(DPOConfig(), (-1.0, -2.0), reference=((-1.5, -1.0),))
    other = of(DPOConfig(), (-0.5, -0.7), reference=((-0.25, -2.0),))
    both = of(DPOConfig(), (-1.0, -2.0), (-0.5, -0.7), reference=((-1.5, -1.0), (-0.25, -2.0)))
    assert both[0] == pytest.approx(one[0] + other[0])
    assert both[1] == pytest.approx({name: one[1][name] + other[1][name] for name in one[1]})
    batch, hidden = pairs((-1.0, -2.0), reference=())
    batch.labels_BS.fill_(IGNORE)
    batch.extra["pairs"] = ()
    result = DPO(DPOConfig())(Head(), hidden, batch)  # type: ignore[arg-type]
    result.total.backward()
    assert result.total.item() == 0.0 and hidden.grad is not None and not hidden.grad.any()


@pytest.mark.parametrize(
    "fields", [{"beta": 0.0}, {"label_smoothing": 0.5}, {"kind": "sigmod"}, {"kind": "ipo", "label_smoothing": 0.1}, {"likelihood": -1.0}]
)
def test_settings_that_make_no_sense_are_refused(fields):
    with pytest.raises(UsageError, match=next(iter(reversed(fields)))):
        DPOConfig(**fields)


# ---------------------------------------------------------------- the loader and runs


SETTINGS = (
    "model.dim=32", "model.vocab_size=270", "data.loader=preferences", "data.held_out=0.2", "loss=dpo", "optimizer=adamw", "optimizer.lr=3e-3",
    "schedule=constant", "train.steps=6", "train.sequence_length=24", "train.micro_batch=2", "train.global_batch=5", "train.log_every=1",
    "evaluation.every=3", "evaluation.batches=3", "checkpoint.every=2", "checkpoint.background=False", "data.mixture.0.source=preferences",
)  # fmt: skip


def recipe(folder: Path, *overrides: str) -> Resolved:
    """Questions of a few letters, of whose answers one begins with a, the other with b."""
    draw, path = random.Random(1), folder / "pairs.jsonl"
    if not path.exists():
        questions = ["".join(draw.choice("abc") for _ in range(1 + n % 5)) for n in range(21)]
        lines = [{"prompt": question, "chosen": f"a{n}", "rejected": "b" * (1 + n % 3)} for n, question in enumerate(questions)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = dict(each.split("=", 1) for each in (*SETTINGS, f"data.mixture.0.source.paths=[{path}]", *overrides))
    return resolve("llama3/debug", [f"{name}={value}" for name, value in settings.items()])


def loader_of(made: Resolved, folder: Path, rank: int = 0, ranks: int = 1) -> PreferencesLoader:
    loader = build_loader(made.recipe.data.loader, made.recipe, current(), rank, ranks, folder, "train")  # type: ignore[arg-type]
    assert isinstance(loader, PreferencesLoader)
    return loader


def numbers(batches: list[Batch] | None) -> list[int]:
    return [pair for batch in batches or () for pair in batch.extra["pairs"]]


def test_every_pair_once_an_epoch_in_the_same_order_on_any_number_of_ranks(tmp_path):
    made = recipe(tmp_path)
    alone, twins = loader_of(made, tmp_path), [loader_of(made, tmp_path / "two", rank, 2) for rank in range(2)]
    seen = []
    for _ in range(7):
        step, halves = alone.next_step(), [each.next_step() for each in twins]
        assert numbers(step) == numbers(halves[0]) + numbers(halves[1])
        assert len(halves[0]) == len(halves[1])
        seen += numbers(step)
    train, held_out = set(seen), set(alone.held_out.tolist())
    assert len(train) == 17 and len(held_out) == 4 and not train & held_out
    assert sorted(seen[:17]) == sorted(seen[17:34]) and seen[:17] != seen[17:34]
    state = {item.name: item.value for item in alone.state()}
    fresh = loader_of(made, tmp_path)
    fresh.load_state(state)
    assert numbers(fresh.next_step()) == numbers(alone.next_step())
    assert loader_of(recipe(tmp_path, "data.epochs=1"), tmp_path).total == 17


def test_labels_are_the_answers_tokens(tmp_path):
    (batch, *_) = loader_of(recipe(tmp_path), tmp_path).next_step() or ()
    tokenizer = current().build(ByteTokenizerConfig())
    for side, first in ((0, "a"), (1, "b")):
        for place in range(len(batch.extra["pairs"])):
            chosen = batch.labels_BS[batch.extra["sides_BS"] == 2 * place + side].tolist()
            assert tokenizer.decode(chosen).startswith(first) and chosen[-2:] == [tokenizer.end_of_turn_id, tokenizer.eos_id]
    assert bool(((batch.labels_BS != IGNORE) == (batch.extra["sides_BS"] >= 0)).all())


def test_what_cannot_be_loaded_is_said(tmp_path):
    with pytest.raises(UsageError, match=r"data.mixture.0.source \(preferences\): pair \d+ has documents of \d+ and \d+ tokens"):
        loader_of(recipe(tmp_path, "train.sequence_length=11"), tmp_path)
    loader = loader_of(recipe(tmp_path, "train.sequence_length=11", "data.loader.too_long=skip"), tmp_path)
    assert 0 < loader.facts()["skipped_pairs"] < 21 and loader.pairs.lengths_N2.max() <= 11
    plain = recipe(
        tmp_path,
        "data.mixture.0.source=jsonl",
        f"data.mixture.0.source.paths=[{tmp_path}/pairs.jsonl]",
        "data.mixture.0.source.field=prompt",
    )
    with pytest.raises(UsageError, match=r"Choose data.mixture.0.source=preferences"):
        loader_of(plain, tmp_path)
    state = {item.name: item.value for item in loader.state()}
    with pytest.raises(CheckpointError, match="data/reference is missing"):
        loader.load_state({"position": state["position"]})
    other = loader_of(recipe(tmp_path), tmp_path)
    with pytest.raises(UsageError, match=r"(?s)have changed:.*train.sequence_length: 11 when saved, 24 now"):
        other.load_state(state)


def train(made: Resolved, directory: Path, resume: bool = False, stop_at: int | None = None) -> list[dict[str, Any]]:
    """Run it, asked to stop after a step; its events."""
    real = steps.update

    def update(built: Any, step: int, factor: float) -> None:
        real(built, step, factor)
        if step + 1 == stop_at:
            built.run.stop_reason = "the test asks for it"

    steps.update = update
    try:
        trainer.train(trainer.Request(made, current(), directory, resume, False, False))
    except StoppedWithCheckpoint:
        assert stop_at is not None
    finally:
        steps.update = real
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def told(events: list[dict[str, Any]], kind: str) -> dict[int, Any]:
    return {event["step"]: (event["loss"], event.get("metrics", event.get("margin"))) for event in events if event["event"] == kind}


def test_a_run_begins_at_its_reference_learns_and_resumes_exactly(tmp_path):
    made = recipe(tmp_path)
    whole = train(made, tmp_path / "whole")
    numbers_of = told(whole, "step")
    assert numbers_of[1][0] == pytest.approx(math.log(2), rel=1e-12)
    assert numbers_of[1][1]["margin"] == 0.0 and numbers_of[1][1]["chosen_reward"] == 0.0
    assert numbers_of[6][0] < 0.6 and numbers_of[6][1]["accuracy"] > 0.9
    train(made, tmp_path / "cut", stop_at=3)
    resumed = train(made, tmp_path / "cut", resume=True)
    assert told(resumed, "step") == numbers_of and told(resumed, "evaluation")[6] == told(whole, "evaluation")[6]
    # The initial weights were asked once.
    assert [event["pairs"] for event in resumed if event["event"] == "reference"] == [21]


def test_pairs_without_a_reference_are_refused_where_the_initial_weights_are_gone(tmp_path):
    loader = loader_of(recipe(tmp_path), tmp_path)
    state = {item.name: item.value for item in loader.state()}
    known = loader._order(0)[:5]
    state["reference"] = state["reference"].clone()
    state["reference"][known] = -1.5
    resumed = loader_of(recipe(tmp_path), tmp_path)
    resumed.load_state(state)
    resumed.attach(SimpleNamespace(step=2, parts={"loss": DPO(DPOConfig())}))  # type: ignore[arg-type]
    (batch, *_) = resumed.next_step() or ()
    assert batch.extra["reference_P"].tolist() == [-1.5] * (2 * len(batch.extra["pairs"]))
    with pytest.raises(UsageError, match=r"reference_steps as large as train.steps will ever be"):
        resumed.next_step()


def test_loader_and_loss_that_do_not_go_together_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"the loss is `cross_entropy`. Choose loss=dpo"):
        train(recipe(tmp_path, "loss=cross_entropy"), tmp_path / "one")
    with pytest.raises(UsageError, match=r"Set data.loader=preferences"):
        train(resolve("llama3/debug", ["loss=dpo", "model.dim=32", "data.mixture.0.source.limit=5"]), tmp_path / "two")
