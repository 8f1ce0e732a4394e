"""The loader: exact positions at any number of ranks, labels, documents, masks, bytes, prefetching, errors."""

from __future__ import annotations

import types

import pytest
import torch
from intarsia.config import DataConfig, EvaluationConfig, MixturePart, TrainConfig
from intarsia.contracts import IGNORE, Document, Message
from intarsia.errors import CheckpointError, DistributedError, PluginError, UsageError
from intarsia_data import build_loader, has_evaluation
from intarsia_data.config import ByteTokenizerConfig, PackedConfig, StdlibConfig
from intarsia_data.plugin import after_build
from intarsia_data.tokenizer import ByteTokenizer
from intarsia_testing.communicator import run_ranks

from tests.support.documents import Listed


class Ids:
    """A tokenizer of which only given ids matter."""

    vocab_size, bos_id, eos_id, pad_id = 1000, None, None, 999

    def encode(self, text):
        return [ord(character) % 900 for character in text]

    def decode(self, ids):
        return "".join(chr(65 + number % 26) for number in ids)

    def fingerprint(self):
        return f"ids {self.eos_id}"


class Doubles:
    """Plugins of which only the sources' and tokenizer's builders are asked."""

    def __init__(self, *sources, tokenizer=None):
        self.sources, self.tokenizer = sources, tokenizer or Ids()

    def build(self, config):
        return self.tokenizer if isinstance(config, ByteTokenizerConfig) else self.sources[config.limit - 1]

    def entry_of(self, config):
        return types.SimpleNamespace(name="listed")


def tokens(*ids):
    return Document(tokens=tuple(ids))


def recipe(sources=1, weights=None, data=None, batches=8, **train):
    mixture = tuple(MixturePart(source=StdlibConfig(limit=n + 1), weight=(weights or [1.0] * sources)[n]) for n in range(sources))
    settings = {"held_out": 0.0, "prefetch": 0, "epochs": 1} | (data or {})
    return types.SimpleNamespace(
        data=DataConfig(loader=PackedConfig(), tokenizer=ByteTokenizerConfig(), mixture=mixture, **settings),
        train=TrainConfig(**({"sequence_length": 4, "micro_batch": 2, "global_batch": 8} | train)),
        evaluation=EvaluationConfig(batches=batches),
    )


def collect(loaders):
    """The next step's sample numbers over all ranks; None at the end, which must come to all alike."""
    steps = [loader.next_step() for loader in loaders]
    if steps[0] is None:
        assert all(step is None for step in steps)
        return None
    assert len({len(step) for step in steps}) == 1
    assert len({loader.samples for loader in loaders}) == 1
    return [sample for step in steps for batch in step for sample in batch.samples if sample >= 0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_resume_at_another_number_of_ranks_sees_exactly_what_is_left(tmp_path, ranks):
    forty = Doubles(Listed([tokens(n, n, n, n) for n in range(40)]))
    one_row_each = recipe(data={"packing": "one_per_row"})
    first = [build_loader(one_row_each, forty, rank, 4, tmp_path) for rank in range(4)]
    seen, ids = [], []
    for _ in range(3):
        seen += collect(first)
    (item,) = first[2].state()
    assert item.key == "data/position" and item.kind == "replicated" and item.value["samples"] == 24
    assert item.value == first[0].state()[0].value

    other = [build_loader(one_row_each, forty, rank, ranks, tmp_path) for rank in range(ranks)]
    for loader in other:
        loader.load_state({"position": item.value})
        assert loader.steps == 3
    while (samples := collect(other)) is not None:
        seen += samples
    assert sorted(seen) == list(range(40))
    every = build_loader(one_row_each, forty, 0, 1, tmp_path)
    while (step := every.next_step()) is not None:
        ids += [int(batch.tokens_BS[row, 0]) for batch in step for row in range(len(batch.samples))]
    assert sorted(ids) == list(range(40)) and ids != list(range(40))


def test_a_missing_position_stops_the_resume(tmp_path):
    loader = build_loader(recipe(), Doubles(Listed([tokens(*range(40))])), 0, 1, tmp_path)
    with pytest.raises(CheckpointError, match="data/position is missing"):
        loader.load_state({})


@pytest.mark.parametrize("part", ["data", "evaluation"])
def test_ranks_that_have_other_documents_are_stopped_before_the_first_step(tmp_path, part):
    """Files may differ by machine. Each rank works out for itself what the others are given."""
    settings = recipe(data={"held_out": 0.5})
    alike, other = ([tokens(1, 2, number, 3) for number in numbers] for numbers in (range(4), (0, 1, 2, 9)))

    def build(world):
        lists = {"data": alike, "evaluation": alike}
        lists[part] = other if world.rank == 1 and differ else alike
        folder = tmp_path / f"{differ}{world.rank}"
        loaders = {
            name: build_loader(settings, Doubles(Listed(documents)), world.rank, 2, folder / name, "train" if name == "data" else name)
            for name, documents in lists.items()
        }
        run = types.SimpleNamespace(parts={**loaders, "mesh": types.SimpleNamespace(world=world)})
        after_build(run, "data")  # collectives are allowed from the next stage on
        after_build(run, "model")
        return [loader.depends_on for loader in loaders.values()]

    differ = False
    mine, others = run_ranks(2, build)
    assert mine == others
    differ = True
    what = "the data" if part == "data" else "the data of evaluation"
    with pytest.raises(
        DistributedError,
        match=rf"disagree on {what} at data.mixture.0.source \(listed\) documents: rank 0: .*; rank 1: .*whether files differ by machine",
    ):
        run_ranks(2, build)


def test_changed_data_or_order_stops_the_resume_and_names_both_sides(tmp_path):
    documents = [tokens(*range(40))]
    value = build_loader(recipe(), Doubles(Listed(documents)), 0, 1, tmp_path).state()[0].value
    changed = build_loader(recipe(seed=5), Doubles(Listed([*documents, tokens(1, 2)])), 0, 1, tmp_path)
    with pytest.raises(UsageError) as caught:
        changed.load_state({"position": value})
    message = str(caught.value)
    assert "train.seed: 0 when saved, 5 now" in message and "data.mixture.0.source (listed) documents: " in message
    assert "sequence_length" not in message
    longer = build_loader(recipe(global_batch=3, micro_batch=1), Doubles(Listed(documents)), 0, 1, tmp_path)
    longer.load_state({"position": value | {"samples": 5}})
    assert longer.next_step()[0].samples == (5,)
    with pytest.raises(UsageError, match="seen 11 samples but the data now ends after 10"):
        longer.load_state({"position": value | {"samples": 11}})


@pytest.mark.parametrize(("length", "cut"), [(40, False), (39, True)])
def test_more_epochs_after_the_end_skip_no_token(tmp_path, length, cut):
    listed = Doubles(Listed([tokens(*range(length))]))
    first = build_loader(recipe(), listed, 0, 1, tmp_path)
    while first.next_step() is not None:
        pass
    (item,) = first.state()
    first.load_state({"position": item.value})
    again = build_loader(recipe(data={"epochs": 2}), listed, 0, 1, tmp_path)
    if cut:
        with pytest.raises(UsageError, match="last row was cut short"):
            again.load_state({"position": item.value})
    else:
        again.load_state({"position": item.value})
        seen = [token for step in iter(again.next_step, None) for batch in step for token in batch.tokens_BS.flatten().tolist()]
        assert sorted(seen) == list(range(40))


def test_documents_come_from_their_lengths_and_not_from_eos(tmp_path):
    """Documents of 3, 1 and 4 tokens with eos (7) inside one of them: boundaries are where documents end."""
    tokenizer = Ids()
    tokenizer.eos_id = 7
    source = Listed([tokens(1, 7, 7), tokens(7), tokens(2, 7, 3, 7)])
    loader = build_loader(recipe(data={"shuffle": False}, sequence_length=8), Doubles(source, tokenizer=tokenizer), 0, 1, tmp_path)
    (batch,) = loader.next_step()
    assert batch.lengths == ((3, 1, 4),)
    assert batch.tokens_BS.tolist() == [[1, 7, 7, 7, 2, 7, 3, 7]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert batch.documents_BS.tolist() == [[0, 0, 0, 1, 2, 2, 2, 2]]
    assert batch.labels_BS.tolist() == [[7, 7, IGNORE, IGNORE, 7, 3, 7, IGNORE]]
    assert (batch.tokens_BS.dtype, batch.positions_BS.dtype, batch.documents_BS.dtype) == (torch.int64, torch.int64, torch.int32)


def test_a_document_cut_by_a_row_goes_on_in_the_next_after_a_resume_too(tmp_path):
    doubles = Doubles(Listed([tokens(*range(1, 11))]))
    settings = recipe(data={"shuffle": False}, global_batch=1)
    loader = build_loader(settings, doubles, 0, 1, tmp_path)
    (first,) = loader.next_step()
    other = build_loader(settings, doubles, 0, 1, tmp_path)
    other.load_state({item.name: item.value for item in loader.state()})
    (second,), (third,) = other.next_step(), other.next_step()
    assert first.labels_BS.tolist() == [[2, 3, 4, 5]], "the label of a row's last token is the next row's first"
    assert second.tokens_BS.tolist() == [[5, 6, 7, 8]] and second.labels_BS.tolist() == [[6, 7, 8, 9]]
    assert second.positions_BS.tolist() == [[0, 1, 2, 3]]
    assert third.tokens_BS.tolist() == [[9, 10, 999, 999]] and third.labels_BS.tolist() == [[10] + [IGNORE] * 3]
    assert third.lengths == ((2, 2),) and third.documents_BS.tolist() == [[0, 0, 1, 1]]
    assert other.next_step() is None


def test_ranks_without_samples_get_padding_rows(tmp_path):
    loaders = [build_loader(recipe(global_batch=3), Doubles(Listed([tokens(*range(20))])), rank, 4, tmp_path) for rank in range(4)]
    steps = [loader.next_step() for loader in loaders]
    assert [[batch.samples for batch in step] for step in steps] == [[(-1,)], [(0,)], [(1,)], [(2,)]]
    (padding,) = steps[0]
    assert (padding.labels_BS == IGNORE).all() and (padding.tokens_BS == 999).all()
    assert padding.extra["padding_BS"].all() and padding.extra["bytes"] == 0 and "padding_BS" not in steps[1][0].extra
    assert sorted(collect(loaders)) == [3, 4]
    assert collect(loaders) is None


def test_chat_is_trained_where_the_predicted_token_is(tmp_path):
    talk = Document(
        messages=(Message("user", "ab"), Message("assistant", "cd"), Message("user", "e"), Message("assistant", "f", trained=False))
    )
    tokenizer = ByteTokenizer(ByteTokenizerConfig())
    settings = recipe(sequence_length=16, data={"packing": "one_per_row"})
    (batch,) = build_loader(settings, Doubles(Listed([talk]), tokenizer=tokenizer), 0, 1, tmp_path).next_step()
    #                    bos  user  a   b   end  assistant c   d   end  user  e    end  assistant f  end  eos
    assert batch.tokens_BS[0].tolist() == [256, 261, 97, 98, 259, 262, 99, 100, 259, 261, 101, 259, 262, 102, 259, 257]
    assert batch.labels_BS[0].tolist() == [IGNORE] * 5 + [99, 100, 259] + [IGNORE] * 8
    assert batch.extra == {"bytes": 2}


def test_bytes_are_those_of_the_counted_tokens(tmp_path):
    texts = ["häuser", "", "a" * 30, "€"]
    byte = Doubles(Listed([Document(text=text) for text in texts]), tokenizer=ByteTokenizer(ByteTokenizerConfig()))
    rough = Doubles(Listed([Document(text=text) for text in texts]))
    for doubles, lost in ((byte, 0), (rough, 3)):
        loader = build_loader(recipe(sequence_length=5), doubles, 0, 1, tmp_path)
        total = 0
        while (step := loader.next_step()) is not None:
            total += sum(batch.extra["bytes"] for batch in step)
        # Without byte lengths a document of one token predicts nothing, and so counts no byte.
        assert total == sum(len(text.encode()) for text in texts) - lost


def test_mixture_gives_shares_of_tokens_and_uses_up_every_source(tmp_path):
    long, short = Listed([tokens(*[1] * 8) for _ in range(300)]), Listed([tokens(*[2] * 2) for _ in range(300)])
    settings = recipe(2, [1.0, 3.0], {"packing": "one_per_row", "epochs": None}, sequence_length=8, global_batch=16, micro_batch=16)
    loader = build_loader(settings, Doubles(long, short), 0, 1, tmp_path)
    counted = [0, 0]
    for step in range(50):
        for batch in loader.next_step():
            counted = [counted[n] + int((batch.tokens_BS == n + 1).sum()) for n in (0, 1)]
        assert abs(counted[1] - 0.75 * sum(counted)) <= 8, f"off by more than a row after step {step}"
    facts = loader.facts()
    assert [round(source["share_seen"], 2) for source in facts["sources"]] == [0.25, 0.75]
    assert facts["sources"][1]["epochs_seen"] > 2 > 1 > facts["sources"][0]["epochs_seen"]

    settings = recipe(2, [1.0, 3.0], {"epochs": 2}, sequence_length=4)
    loader, seen = build_loader(settings, Doubles(long, short), 0, 1, tmp_path), [0, 0]
    while (step := loader.next_step()) is not None:
        for batch in step:
            seen = [seen[n] + int((batch.tokens_BS == n + 1).sum()) for n in (0, 1)]
    assert seen == [2 * 8 * 300, 2 * 2 * 300]
    assert [source["epochs_seen"] for source in loader.facts()["sources"]] == [2.0, 2.0]


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x.tokens_BS, y.tokens_BS) and torch.equal(x.labels_BS, y.labels_BS) and x.samples == y.samples
        for x, y in zip(a, b, strict=True)
    )


def test_prefetching_changes_nothing_and_the_position_is_what_was_delivered(tmp_path):
    doubles = Doubles(Listed([tokens(*range(n, n + 30)) for n in range(40)]))
    plain = build_loader(recipe(), doubles, 0, 1, tmp_path)
    ahead = build_loader(recipe(data={"prefetch": 3}), doubles, 0, 1, tmp_path)
    for _ in range(5):
        assert same(plain.next_step(), ahead.next_step())
    assert ahead.state()[0].value == plain.state()[0].value and ahead.samples == 40
    state = {"position": plain.state()[0].value}
    plain.next_step(), ahead.next_step(), ahead.next_step()
    ahead.load_state(state)
    plain.load_state(state)
    while (step := plain.next_step()) is not None:
        assert same(step, ahead.next_step())
    assert ahead.next_step() is None
    threads = list(ahead._pool._threads)
    ahead.close()
    assert threads and not any(thread.is_alive() for thread in threads)


def test_an_error_in_the_background_reaches_next_step_with_the_source_named(tmp_path):
    loader = build_loader(recipe(data={"prefetch": 2}), Doubles(Listed([tokens(*range(400))])), 0, 1, tmp_path)
    loader.next_step()
    loader._stores[0].tokens = loader._stores[0].tokens[:100]
    with pytest.raises(PluginError, match=r"data.mixture.0.source \(listed\): sample \d+ .* cannot be made: IndexError"):
        for _ in range(12):
            loader.next_step()
    with pytest.raises(PluginError):
        loader.next_step()
    loader.close()


def test_epochs_are_shuffled_anew_and_by_seed(tmp_path):
    doubles = Doubles(Listed([tokens(*[n] * 4) for n in range(30)]))

    def order(**settings):
        loader, ids = build_loader(recipe(data={"epochs": 2}, **settings), doubles, 0, 1, tmp_path), []
        while (step := loader.next_step()) is not None:
            ids += [int(row[0]) for batch in step for row in batch.tokens_BS]
        return ids

    first = order()
    assert sorted(first[:30]) == sorted(first[30:]) == list(range(30))
    assert first[:30] != first[30:] and first == order() and first != order(seed=1)


def test_evaluation_sees_the_held_out_documents_and_always_the_same_batches(tmp_path):
    doubles = Doubles(Listed([tokens(*[n] * 4) for n in range(40)]))
    settings = recipe(data={"held_out": 0.2, "epochs": 1})
    train = build_loader(settings, doubles, 0, 1, tmp_path)
    trained = set()
    while (step := train.next_step()) is not None:
        trained |= {int(row[0]) for batch in step for row in batch.tokens_BS}
    evaluation = build_loader(recipe(data={"held_out": 0.2}, seed=9), doubles, 0, 1, tmp_path, split="evaluation")
    first, again = evaluation.next_step(), None
    assert evaluation.next_step() is None
    evaluation.reset()
    again = evaluation.next_step()
    assert same(first, again)
    assert same(first, build_loader(settings, doubles, 0, 1, tmp_path, split="evaluation").next_step()), "whatever the seed"
    assert trained | {int(row[0]) for batch in first for row in batch.tokens_BS} == set(range(40)) and len(trained) == 32
    assert build_loader(recipe(data={"held_out": 0.2}, batches=1, global_batch=3), doubles, 0, 1, tmp_path, split="evaluation").total == 3

    own = (MixturePart(source=StdlibConfig(limit=2)),)
    settings = recipe(data={"evaluation": own, "held_out": 0.2})
    both = Doubles(Listed([tokens(*[n] * 4) for n in range(40)]), Listed([tokens(50, 51)]))
    assert build_loader(settings, both, 0, 1, tmp_path).facts()["documents"] == 40, "nothing is held out where evaluation has sources"
    (batch,) = build_loader(settings, both, 0, 1, tmp_path, split="evaluation").next_step()
    assert batch.tokens_BS.tolist() == [[50, 51, 999, 999]]
    assert not has_evaluation(recipe()) and has_evaluation(settings)


@pytest.mark.parametrize(
    ("documents", "data", "train", "expected"),
    [
        ([], {}, {}, "data set is empty: 0 documents"),
        ([Document(text="")], {}, {}, "data set is empty: 1 documents, none with any text"),
        ([tokens(1, 2)], {}, {}, r"1 documents to train on have 2 tokens, less than one row of train.sequence_length=4"),
        ([tokens(*range(9))], {"held_out": 0.1}, {}, "held_out=0.1 of 1 document leaves 0 to train on"),
        ([tokens(*range(9))] * 3, {"held_out": 0.9}, {}, "held_out=0.9 of 3 documents leaves 0 to train on"),
        ([tokens(1, 1000)], {}, {}, "document 0 cannot be encoded: token id 1000 is out of range: the tokenizer has the ids 0 to 999"),
        ([tokens(1, 2), Document()], {}, {}, "document 1 cannot be encoded: it has neither text nor messages nor tokens"),
        ([Document(tokens=(1, 2), trained=(True,))], {}, {}, "2 token ids but 1 values in their mask"),
    ],
)
def test_wrong_data_and_settings_are_refused_in_words(tmp_path, documents, data, train, expected):
    with pytest.raises(UsageError, match=expected):
        build_loader(recipe(data=data, **train), Doubles(Listed(documents)), 0, 1, tmp_path)


def test_splits_and_ranks_must_exist(tmp_path):
    doubles = Doubles(Listed([tokens(*range(9))]))
    with pytest.raises(UsageError, match="nothing to evaluate on"):
        build_loader(recipe(), doubles, 0, 1, tmp_path, split="evaluation")
    with pytest.raises(UsageError, match="split='test' is unknown"):
        build_loader(recipe(), doubles, 0, 1, tmp_path, split="test")
    with pytest.raises(UsageError, match="rank 2 of 2"):
        build_loader(recipe(), doubles, 2, 2, tmp_path)


def test_a_source_that_fails_is_named_with_its_document(tmp_path):
    class Failing(Listed):
        def __getitem__(self, index):
            if index == 3:
                raise ValueError("the disk is on fire")
            return super().__getitem__(index)

    with pytest.raises(PluginError, match=r"data.mixture.0.source \(listed\): document 3 cannot be read: ValueError: the disk is on fire"):
        build_loader(recipe(), Doubles(Failing([tokens(*range(9))] * 5)), 0, 1, tmp_path)
