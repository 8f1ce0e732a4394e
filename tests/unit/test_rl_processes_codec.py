"""Messages between processes: what arrives is what was sent, bit for bit, and nothing else can be sent."""

from __future__ import annotations

import dataclasses
import json
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from intarsia.contracts import Limits, Media, Observation, StepResult, Task, ToolCall, ToolSpec, Turn
from intarsia_rl.contracts import Failure, Generated, Request, Routes, Sample, Sampling, Segment, WeightVersion
from intarsia_rl.processes.codec import CodecError, MessageTooLarge, check, decode, encode
from intarsia_testing.rl_doubles import through

TURN = Turn("assistant", ("see", Media("image", b"\x89PNG\x00", "image/png")), (1, 2, 3), (ToolCall("c", "guess", '{"x": 1}'),))
TOOL = ToolSpec("guess", "Guess.", {"type": "object", "properties": {}})
SEGMENT = Segment(
    tuple(range(40)), tuple(i % 3 == 0 for i in range(40)), tuple(-i / 3 for i in range(40)), (7,) * 40, Routes(b"\0\1" * 4, (2, 2, 1))
)
VALUES = [
    TURN,
    Observation((TURN,), (TOOL,), True, "other"),
    StepResult(None, 0.1, True, False, {"turns": 2}),
    Task("train/1", {"a": [1, {"b": None}]}, "train"),
    Limits(turns=3),
    Turn("user", (Media("video", tuple(bytes([number]) for number in range(20))), "of", Media("image", "/data/one.png"))),
    Request("r", (1, 2), Sampling(8, stop=("\n",), stop_ids=(0,), seed=2**63), (5,), True, -1, (b"jpeg",)),
    Generated("r", (3,) * 20, (-0.1,) * 20, (4,) * 20, "eos", None, 1, 0.5, 2.0),
    WeightVersion(3, "shared_memory", {"name": "/x", "bytes": 1 << 40}, {"w": "ab"}, {"w": "bfloat16"}),
    Sample("s", 1, 2, "t", (SEGMENT,), (TURN,), failure=Failure("tool", "broken"), reference_log_probs=((0.0,) * 40,)),
    ("a", ["b", ()], [], {}, None, True, 2**70, -0.0, math.inf, b"", "\ud800 lone", {"$": 1}, {3: "three", (1, 2): None}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_arrives_is_what_was_sent(value):
    arrived = through(value)
    assert arrived == value
    assert repr(arrived) == repr(value)  # tuples stay tuples, -0.0 stays -0.0


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=20) | st.lists(inner, max_size=20).map(tuple) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=30,
)


@settings(max_examples=200, deadline=None)
@given(PLAIN | st.lists(st.floats(allow_nan=False), min_size=16) | st.lists(st.integers(), min_size=16).map(tuple))
def test_plain_values_are_kept(value):
    assert repr(through(value)) == repr(value)


def test_numbers_of_long_tuples_are_exact():
    numbers = tuple(struct.unpack("<f", struct.pack("<I", 0xBF000000 + i * 7919))[0] for i in range(1000))
    assert through(numbers) == numbers
    assert math.isnan(through((math.nan,) * 20)[3])
    mixed = (*range(20), True, 2.0)
    assert list(map(type, through(mixed))) == list(map(type, mixed))
    assert through((2**70,) * 20) == (2**70,) * 20


@dataclasses.dataclass
class Stranger:
    x: int = 1


class Turnlike(Turn):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (StepResult(None, metrics={"what": object()}), r"value.metrics\['what'\] is a builtins.object, which cannot be sent"),
        (Stranger(), "Stranger"),
        (Turnlike("user", "a subclass has code of its own"), "Turnlike"),
        (Turn("user", {1, 2}), "value.content is a builtins.set"),
        (print, "builtin_function_or_method"),
        ([10**5000], "cannot be sent"),
    ],
)
def test_what_cannot_travel_is_named(value, words):
    with pytest.raises(CodecError, match=words):
        encode(value, 1 << 20)


def test_nesting_is_bounded():
    value = []
    for _ in range(1000):
        value = [value]
    with pytest.raises(CodecError, match="nested too deeply"):
        encode(value, 1 << 20)
    loop = []
    loop.append(loop)
    with pytest.raises(CodecError, match="nested too deeply"):
        encode(loop, 1 << 20)


def test_large_messages_are_refused_before_they_are_copied():
    much = "x" * (1 << 26)
    for call in (encode, check):
        with pytest.raises(MessageTooLarge, match=r"67,108,870 bytes, and 1,048,576 is the limit"):
            call(Observation((Turn("tool", much, tool_call_id="1"),)), 1 << 20)
    with pytest.raises(MessageTooLarge):
        encode([b"x" * 600_000] * 2, 1 << 20)
    with pytest.raises(MessageTooLarge):
        encode("\N{SNOWMAN}" * 300_000, 1 << 20)  # six bytes each, escaped


@pytest.mark.parametrize(
    "plain",
    [
        {"$": "Popen", "args": ["true"]},
        {"$": "Turn", "role": "user"},
        {"$": "Turn", "role": "user", "content": "", "evil": 1},
        {"$": "bytes", "at": 3},
        {"$": "bytes", "at": -1},
        {"$": "tuple"},
        {"$": "tuple", "q": 0},
        {"$": "map", "of": [[[], 1]]},
        {"$": ["Turn"]},
    ],
)
def test_messages_of_strangers_are_refused(plain):
    with pytest.raises(CodecError):
        decode(json.dumps(plain).encode(), [b"123"])


def test_broken_json_is_refused():
    for text in (b"", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(CodecError, match="no message"):
            decode(text, [])
