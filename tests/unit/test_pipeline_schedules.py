"""Pipeline schedules as data: each is valid for a grid of sizes, what is broken is told, and simulated bubbles are the published ones. No torch."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from intarsia import plugins
from intarsia.errors import PluginError, UsageError
from intarsia_pipeline.actions import Action, Schedule, freeze, loop, restrict, v_shape
from intarsia_pipeline.build import KIND, Asked, Knobs, check_micro_batches, make, ready, schedule_of
from intarsia_pipeline.config import InterleavedConfig, OneFOneBConfig
from intarsia_pipeline.lower import releases, with_messages, with_sharding
from intarsia_pipeline.show_command import config_of
from intarsia_pipeline.simulate import Times, simulate
from intarsia_pipeline.validate import ScheduleError, message, peak_live, validate

NAMES = [entry.name for entry in plugins.current().registry(KIND).entries()]
RANKS, COUNTS = (1, 2, 3, 4, 7), (1, 2, 3, 5, 8, 13)


def made(name: str, ranks: int, micro_batches: int, **settings: Any) -> Schedule:
    return make(config_of(name, [f"{key}={value}" for key, value in settings.items()]), ranks, micro_batches)


def test_the_schedules_are_entries_of_a_kind() -> None:
    assert sorted(NAMES) == ["1f1b", "dualpipev", "gpipe", "interleaved", "zb_h1", "zbv"]


def test_schedules_import_no_torch() -> None:
    code = "import sys; from intarsia_pipeline import show_command as s; s.make(s.config_of('zbv', []), 4, 8); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_valid_for_every_size(name: str) -> None:
    for ranks in RANKS:
        for micro_batches in COUNTS:
            schedule, facts = ready(config_of(name, []), ranks, micro_batches)
            assert schedule.ranks == ranks
            assert facts.peak_live == tuple(peak_live(actions)[0] for actions in schedule.plan)


@pytest.mark.parametrize("virtual", [1, 3, 4])
def test_interleaved_with_other_numbers_of_stages(virtual: int) -> None:
    for ranks in RANKS:
        for micro_batches in COUNTS:
            ready(InterleavedConfig(virtual_stages=virtual), ranks, micro_batches)


@pytest.mark.parametrize("unshard", ["step", "action"])
@pytest.mark.parametrize("reduce", ["last", "each"])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_where_parameters_come_and_gradients_go(unshard: str, reduce: str, ahead: int) -> None:
    for name in NAMES:
        schedule, _ = ready(config_of(name, []), 3, 7, Knobs(unshard, ahead, reduce))
        for rank, actions in enumerate(schedule.plan):
            for stage in schedule.own(rank):
                kinds = [action.kind for action in actions if action.stage == stage]
                backwards = sum(kind in "BW" for kind in kinds)
                assert kinds.count("REDUCE") == (1 if reduce == "last" else backwards)
                assert kinds.count("UNSHARD") == kinds.count("RESHARD") >= 1
                assert unshard == "action" or kinds.count("UNSHARD") == 1


# ---------------------------------------------------------------- published bubbles

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.5, 1.0), (2.0, 2.5, 1.5)]


@pytest.mark.parametrize("f, i, w", TIMES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bubbles_of_1f1b_and_its_kin(ranks: int, f: float, i: float, w: float) -> None:
    times = Times(f=f, i=i, w=w)
    for name, bubble in {"gpipe": f + i + w, "1f1b": f + i + w, "zb_h1": f + i - w}.items():
        found = simulate(made(name, ranks, 3 * ranks), times)
        assert found.bubble == pytest.approx((ranks - 1) * bubble), name
        assert found.idle == pytest.approx([(ranks - 1) * bubble] * ranks), name
    # A stage is 1 / V of a rank's work.
    for virtual in (2, 3):
        found = simulate(made("interleaved", ranks, 3 * ranks, virtual_stages=virtual), Times(f=f / virtual, i=i / virtual, w=w / virtual))
        assert found.bubble == pytest.approx((ranks - 1) * (f + i + w) / virtual)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 32])
def test_zbv_has_no_bubble_where_all_take_equally_long(ranks: int) -> None:
    """arXiv 2401.10241, section 6: no bubble, in 1F1B's memory of R micro-batches of both stages."""
    for micro_batches in (2 * ranks - 1, 2 * ranks, 3 * ranks + 1):
        found = simulate(made("zbv", ranks, micro_batches), Times())
        assert found.bubble == 0
        assert found.makespan == 6 * micro_batches + ranks - 1
        assert max(found.peak_live) == 2 * ranks


@pytest.mark.parametrize("w, pair", [(1.0, 3.0), (1.0, 2.5), (0.5, 2.5), (0.8, 2.2), (0.6, 2.0)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_dualpipev_has_the_published_bubble(ranks: int, w: float, pair: float) -> None:
    """(S / 2 - 1)(F&B + B - 3 W) for S = 2 R stages and at most S + 1 activations; DeepSeek's DualPipe repository, where forward and backward for inputs take equally long."""
    found = simulate(made("dualpipev", ranks, 4 * ranks), Times(f=1.0, i=1.0, w=w, pair=pair))
    assert max(found.idle) == pytest.approx((ranks - 1) * (pair + (1.0 + w) - 3 * w))
    assert max(found.peak_live) == 2 * ranks + (ranks > 0)


def test_activations_kept() -> None:
    assert simulate(made("gpipe", 4, 9)).peak_live == (9, 9, 9, 9)
    assert simulate(made("1f1b", 4, 9)).peak_live == (4, 3, 2, 1)
    assert simulate(made("zb_h1", 4, 9)).peak_live == (4, 4, 4, 4)
    assert simulate(made("1f1b", 4, 2)).peak_live == (2, 2, 2, 1)


def test_uneven_stages_messages_and_unsharding() -> None:
    schedule = made("gpipe", 2, 2)
    # Rank 0 ends its forwards at 2; the second stage's come at 4 and 7, its backwards (2 each) at 9 and 11; the last of rank 0 begins when its message is there.
    found = simulate(schedule, Times(f=(1.0, 3.0), i=1.0, w=1.0, comm=0.5))
    assert [span.start for span in found.spans[1]] == [1.5, 4.5, 7.5, 9.5]
    assert [span.start for span in found.spans[0]] == [0, 1, 10, 12]
    with_parameters = simulate(with_sharding(schedule, ahead=0), Times(unshard=2.0))
    assert with_parameters.spans[0][0].start == 2.0
    with pytest.raises(UsageError, match="f has 3 values, and there are 2 stages"):
        simulate(schedule, Times(f=(1.0, 1.0, 1.0)))
    with pytest.raises(UsageError, match="comm is -1"):
        simulate(schedule, Times(comm=-1))


def test_hundreds_of_ranks() -> None:
    found = simulate(made("zbv", 128, 256))
    assert found.bubble == 0 and len(found.idle) == 128


# ---------------------------------------------------------------- broken schedules


def edited(schedule: Schedule, rank: int, edit: Callable[[list[Action]], Any]) -> Schedule:
    actions = list(schedule.plan[rank])
    edit(actions)
    return dataclasses.replace(schedule, plan=freeze([*schedule.plan[:rank], actions, *schedule.plan[rank + 1 :]]))


def swap(first: int, second: int) -> Callable[[list[Action]], None]:
    def edit(actions: list[Action]) -> None:
        actions[first], actions[second] = actions[second], actions[first]

    return edit


def put(position: int, action: Action) -> Callable[[list[Action]], None]:
    return lambda actions: actions.insert(position, action)


def drop(kind: str, nth: int = 0) -> Callable[[list[Action]], None]:
    return lambda actions: actions.remove([action for action in actions if action.kind == kind][nth])


BROKEN: list[tuple[str, str, int, Callable[[list[Action]], Any], str]] = [
    ("1f1b", "bare", 1, lambda actions: actions.pop(0), r"rank 1, position \d+.*comes before F|lacks F"),
    ("1f1b", "bare", 1, lambda actions: actions.pop(), r"stage 1, micro-batch 4 lacks B"),
    ("zb_h1", "bare", 1, drop("W", 2), r"rank 1.*stage 1, micro-batch 2 lacks W"),
    ("zb_h1", "bare", 1, drop("I", 1), r"rank 1.*stage 1, micro-batch 1 lacks I"),
    ("zb_h1", "bare", 0, lambda actions: actions.append(Action("B", 0, 1)), r"whole backward \(B\) and parts of one \(I, W\)"),
    ("1f1b", "bare", 0, put(3, Action("F", 0, 0)), r"rank 0, position 3, F\(stage 0, micro-batch 0\): it is there already, at position 0"),
    ("1f1b", "bare", 0, put(0, Action("F", 1, 0)), r"rank 0, position 0, F\(stage 1, micro-batch 0\): stage 1 is rank 1's"),
    ("1f1b", "bare", 0, put(0, Action("F", 7, 0)), r"there is no stage 7; stages are 0 to 2"),
    ("1f1b", "bare", 0, put(0, Action("F", 0, 9)), r"there is no such micro-batch; they are 0 to 4"),
    ("1f1b", "bare", 0, put(0, Action("X", 0, 0)), r"there is no action 'X'"),  # type: ignore[arg-type]
    ("1f1b", "bare", 0, put(1, Action("F", 0, 1, True)), r"runs beside the action before it, which must be one of the other direction"),
    ("1f1b", "bare", 2, swap(0, 1), r"rank 2, position 0, B\(stage 2, micro-batch 0\): it comes before F"),
    ("zb_h1", "bare", 0, swap(3, 4), r"it comes before I\(stage 0, micro-batch 0\)"),
    (
        "1f1b",
        "bare",
        0,
        lambda actions: actions.insert(0, actions.pop(2)) or actions.insert(1, actions.pop(3)),
        r"cannot end: rank 0 stands at position 1, B\(stage 0, micro-batch 0\)|comes before F",
    ),
    ("1f1b", "full", 0, drop("SEND_F", 1), r"rank 1, position \d+, RECEIVE_F\(stage 1, micro-batch \d\)|never sends it|it meets"),
    ("1f1b", "full", 1, drop("RECEIVE_F", 1), r"RECEIVE_F\(stage 1, micro-batch 1\) does not come before it"),
    ("1f1b", "full", 1, put(0, Action("SEND_B", 1, 0)), r"what it sends has not been computed yet"),
    ("1f1b", "full", 0, put(99, Action("SEND_B", 0, 0)), r"there is no stage at the other end"),
    ("1f1b", "full", 2, lambda actions: actions.append(Action("RECEIVE_F", 2, 0)), r"rank 1 never sends it"),
    ("1f1b", "full", 0, drop("UNSHARD"), r"needs the parameters of stage 0, which are not unsharded|was not unsharded before"),
    ("1f1b", "full", 0, drop("RESHARD"), r"stage 0 is unsharded and never resharded"),
    (
        "1f1b",
        "full",
        0,
        lambda actions: actions.insert(4, actions.pop(next(p for p, a in enumerate(actions) if a.kind == "REDUCE"))),
        r"not reduced",
    ),
    ("zbv", "full", 2, put(0, Action("SEND_F", 2, 0)), r"stages 2 and 3 are both on this rank"),
]


@pytest.mark.parametrize("name, form, rank, edit, told", BROKEN, ids=[str(number) for number in range(len(BROKEN))])
def test_each_fault_is_found_and_placed(name: str, form: str, rank: int, edit: Callable[[list[Action]], Any], told: str) -> None:
    schedule = made(name, 3, 5)
    if form == "full":
        schedule = with_messages(with_sharding(schedule))
    validate(schedule)
    with pytest.raises(ScheduleError, match=told) as caught:
        validate(edited(schedule, rank, edit))
    assert f"Schedule {name!r}" in str(caught.value) and isinstance(caught.value, PluginError)


def test_a_deadlock_names_who_waits_for_whom() -> None:
    """Both wait for the other's later action; each rank's own order is right."""
    plan = [
        [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)],
        [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)],
    ]
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule("mine", (0, 1), 2, freeze(plan)))
    text = str(caught.value)
    assert "rank 0 stands at position 1, B(stage 0, micro-batch 0), and waits for B(stage 1, micro-batch 0) of rank 1" in text
    assert "rank 1 stands at position 1, F(stage 1, micro-batch 1), and waits for F(stage 0, micro-batch 1) of rank 0" in text
    assert (caught.value.rank, caught.value.position) == (0, 1)
    with pytest.raises(ScheduleError, match="cannot end"):
        simulate(Schedule("mine", (0, 1), 2, freeze(plan)))


def test_messages_in_two_orders_are_told() -> None:
    schedule = with_messages(with_sharding(made("gpipe", 2, 3)))
    places = [place for place, action in enumerate(schedule.plan[1]) if action.kind == "RECEIVE_F"]
    broken = edited(schedule, 1, swap(places[0], places[1]))
    with pytest.raises(
        ScheduleError,
        match=r"rank 0, position \d+, SEND_F\(stage 0, micro-batch 0\): as message 0 from rank 0 to rank 1 it meets RECEIVE_F\(stage 1, micro-batch 1\)",
    ):
        validate(broken)


def test_uneven_placements_are_told() -> None:
    with pytest.raises(ScheduleError, match="rank 0: 2, rank 1: 1"):
        validate(Schedule("mine", (0, 1, 0), 1, ((), ())))


def test_memory_is_bounded() -> None:
    schedule = made("gpipe", 2, 5)
    assert validate(schedule, 5).peak_live == (5, 5)
    with pytest.raises(
        UsageError, match=r"keeps 5 activations alive on rank 0, at position 4 \(F\(stage 0, micro-batch 4\)\), and max_live is 4"
    ):
        validate(schedule, 4)


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_have_messages_in_one_order(name: str) -> None:
    schedule = with_messages(made(name, 4, 9))
    for source in range(4):
        for target in range(4):
            sent = [message(a) for a in schedule.plan[source] if a.kind.startswith("SEND") and schedule.placement[_arrives(a)] == target]
            received = [
                message(a) for a in schedule.plan[target] if a.kind.startswith("RECEIVE") and schedule.placement[message(a)[1]] == source
            ]
            assert sent == received


def _arrives(action: Action) -> int:
    return action.stage + 1 if action.kind == "SEND_F" else action.stage - 1


def test_what_a_message_says_about_earlier_ones() -> None:
    schedule = with_messages(made("1f1b", 2, 2))
    # Rank 1 receives micro-batch 0, sends its gradient, receives the next.
    assert releases(schedule, 0) == {("B", 1, 0): [("F", 0, 0)], ("B", 1, 1): [("F", 0, 1)]}
    assert releases(schedule, 1) == {} or all(key[0] == "F" for key in releases(schedule, 1))


def test_restriction_leaves_no_half_pairs() -> None:
    plan = [[Action("F", 0, 5), Action("B", 1, 2, True), Action("F", 0, 1), Action("B", 1, 7, True)]]
    assert restrict(plan, 3) == [[Action("B", 1, 2), Action("F", 0, 1)]]


def test_placements() -> None:
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert v_shape(3) == (0, 1, 2, 2, 1, 0)


# ---------------------------------------------------------------- sizes that are refused


def test_too_few_micro_batches() -> None:
    with pytest.raises(UsageError, match=re.escape("needs at least 4 micro-batches in a step, and there are 3")) as caught:
        check_micro_batches(OneFOneBConfig(), 4, 3)
    assert "Take 4" in str(caught.value) and "mesh.pp of at most 3" in str(caught.value)
    check_micro_batches(OneFOneBConfig(), 4, 3, few=True)
    for name in NAMES:
        source = schedule_of(config_of(name, []))
        check_micro_batches(config_of(name, []), 5, source.least(5))
        with pytest.raises(UsageError):
            check_micro_batches(config_of(name, []), 5, source.least(5) - 1)


def test_sizes_that_are_none() -> None:
    with pytest.raises(UsageError, match="not 0 and 4"):
        make(OneFOneBConfig(), 0, 4)
    with pytest.raises(UsageError, match=r"schedule.virtual_stages is 0"):
        make(InterleavedConfig(virtual_stages=0), 2, 4)
    with pytest.raises(UsageError, match=r"engine.reduce is 'lst'.*'last'"):
        with_sharding(made("1f1b", 2, 2), reduce="lst")
    with pytest.raises(UsageError, match="unshard_ahead is -1"):
        with_sharding(made("1f1b", 2, 2), ahead=-1)


# ---------------------------------------------------------------- what a third party's schedule answers wrongly


class Given:
    """A schedule as the documentation says, of which a test replaces one method."""

    def placement(self, ranks: int) -> Any:
        return loop(ranks, 1)

    def least(self, ranks: int) -> Any:
        return ranks

    def plan(self, ranks: int, micro_batches: int) -> Any:
        numbers = range(micro_batches)
        return [[*(Action("F", rank, k) for k in numbers), *(Action("B", rank, k) for k in numbers)] for rank in range(ranks)]


WRONG = [
    ("placement", lambda ranks: None, "placement(2) gave no answer: TypeError: 'NoneType' object is not iterable"),
    ("placement", lambda ranks: ["a", "b"], "placement(2) gave ['a', 'b']: each stage's rank is a whole number from 0 to 1."),
    ("placement", lambda ranks: (0, 2), "placement(2) gave [0, 2]"),
    ("least", lambda ranks: None, "least(2) gave None: a number of micro-batches is whole, and at least 1."),
    ("least", lambda ranks: 0, "least(2) gave 0"),
    ("plan", lambda ranks, count: 1 // 0, "plan(2, 3) gave no answer: ZeroDivisionError"),
    ("plan", lambda ranks: [], "plan(2, 3) gave no answer: TypeError"),
    ("plan", lambda ranks, count: [[]], "plan(2, 3) gave actions for 1 ranks, and there are 2."),
    ("plan", lambda ranks, count: [[("F", 0, 0)], []], "plan(2, 3) gave ('F', 0, 0) at rank 0, position 0: an action is Action("),
    ("plan", lambda ranks, count: [[], [Action("F", 1, 0.0)]], "at rank 1, position 0: an action is Action(kind, stage, micro_batch), with whole numbers"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize("method, answer, told", WRONG)
def test_a_broken_schedule_is_named_with_what_it_answered(method: str, answer: Any, told: str) -> None:
    source = Given()
    entry = plugins.current().registry(KIND).find("gpipe")
    assert Asked(entry, source).plan(2, 3) and Asked(entry, source).least(2) == 2
    setattr(source, method, answer)
    asked = Asked(entry, source)
    with pytest.raises(PluginError, match="pipeline schedule 'intarsia-pipeline:gpipe' of plugin intarsia-pipeline") as caught:
        asked.placement(2), asked.least(2), asked.plan(2, 3)
    assert told in str(caught.value)


def test_what_one_rank_says_of_parameters_and_gradients_all_must() -> None:
    bare = made("1f1b", 2, 3)
    with pytest.raises(ScheduleError, match=r"rank 1, position 0, .*needs the parameters of stage 1, which are not unsharded"):
        validate(edited(bare, 0, lambda actions: (actions.insert(0, Action("UNSHARD", 0)), actions.append(Action("RESHARD", 0)))))
    with pytest.raises(ScheduleError, match=r"rank 1, .*its gradients are not reduced: no REDUCE\(stage 1\) follows"):
        validate(edited(bare, 0, lambda actions: actions.append(Action("REDUCE", 0))))


@pytest.mark.parametrize("kinds", [("UNSHARD", "RESHARD"), ("REDUCE",)])
def test_sums_and_parameters_are_added_each_for_itself(kinds: tuple[str, ...]) -> None:
    """A schedule that says when parameters come still has its gradients summed, and the other way round."""
    full = with_sharding(made("zbv", 2, 5))
    partly = dataclasses.replace(full, plan=freeze([action for action in actions if action.kind not in kinds] for actions in full.plan))
    again = with_sharding(partly)
    validate(again)
    assert [sorted(map(str, actions)) for actions in again.plan] == [sorted(map(str, actions)) for actions in full.plan]
