"""Samples and groups as JSON: for checkpoints, with every bit, and for rollouts/*.jsonl, for people."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from intarsia.contracts import Media, ToolCall, Turn

from intarsia_rl.contracts import Failure, PlacedMedia, Routes, Sample, Segment
from intarsia_rl.controller.buffer import Group


def turn_to_json(turn: Turn) -> dict[str, Any]:
    """A turn; fields that say nothing are left out."""
    content: Any = turn.content
    if not isinstance(content, str):
        content = [part if isinstance(part, str) else media_to_json(part) for part in content]
    value: dict[str, Any] = {"role": turn.role, "content": content}
    if turn.tokens is not None:
        value["tokens"] = list(turn.tokens)
    if turn.tool_calls:
        value["tool_calls"] = [dataclasses.asdict(call) for call in turn.tool_calls]
    if turn.tool_call_id is not None:
        value["tool_call_id"] = turn.tool_call_id
    if turn.actor != "policy":
        value["actor"] = turn.actor
    return value


def media_to_json(media: Media) -> dict[str, Any]:
    """An image or a video: a file's content and frames in base64, a file's path as it is."""
    value: dict[str, Any] = {"kind": media.kind, "media_type": media.media_type}
    if isinstance(media.data, str):
        return {**value, "path": media.data}
    if isinstance(media.data, bytes):
        return {**value, "data": base64.b64encode(media.data).decode()}
    return {**value, "frames": [base64.b64encode(frame).decode() for frame in media.data]}


def media_from_json(value: Mapping[str, Any]) -> Media:
    """The image or video."""
    data: bytes | str | tuple[bytes, ...]
    if "path" in value:
        data = value["path"]
    elif "data" in value:
        data = base64.b64decode(value["data"])
    else:
        data = tuple(base64.b64decode(frame) for frame in value["frames"])
    return Media(value["kind"], data, value["media_type"])


def turn_from_json(value: Mapping[str, Any]) -> Turn:
    """The turn."""
    content = value["content"]
    if not isinstance(content, str):
        content = tuple(part if isinstance(part, str) else media_from_json(part) for part in content)
    tokens = tuple(value["tokens"]) if "tokens" in value else None
    calls = tuple(ToolCall(**call) for call in value.get("tool_calls", ()))
    return Turn(value["role"], content, tokens, calls, value.get("tool_call_id"), value.get("actor", "policy"))


def segment_to_json(segment: Segment) -> dict[str, Any]:
    """A segment; routes in base64."""
    value: dict[str, Any] = {name: list(getattr(segment, name)) for name in ("tokens", "log_probs", "versions")}
    value["trained"] = "".join("1" if trained else "0" for trained in segment.trained)
    value["actor"] = segment.actor
    if segment.media:
        value["media"] = [{"at": each.at, **media_to_json(each.media)} for each in segment.media]
    if segment.routes is not None:
        value["routes"] = {"shape": list(segment.routes.shape), "data": base64.b64encode(segment.routes.data).decode()}
    return value


def segment_from_json(value: Mapping[str, Any]) -> Segment:
    """The segment."""
    routes = value.get("routes")
    return Segment(
        tuple(value["tokens"]), tuple(letter == "1" for letter in value["trained"]), tuple(value["log_probs"]), tuple(value["versions"]),
        None if routes is None else Routes(base64.b64decode(routes["data"]), tuple(routes["shape"])), value["actor"],
        tuple(PlacedMedia(media_from_json(each), each["at"]) for each in value.get("media", ())),
    )  # fmt: skip


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """All of a sample."""
    value: dict[str, Any] = {
        name: getattr(sample, name) for name in ("id", "group", "member", "task", "reward", "truncated", "audit_version")
    }
    value |= {name: dict(getattr(sample, name)) for name in ("rewards", "metrics", "timings_s")}
    value["segments"] = [segment_to_json(segment) for segment in sample.segments]
    value["turns"] = [turn_to_json(turn) for turn in sample.turns]
    value["failure"] = None if sample.failure is None else dataclasses.asdict(sample.failure)
    for name in ("reference_log_probs", "audit_log_probs"):
        scores: Sequence[Sequence[float]] | None = getattr(sample, name)
        # JSON has no nan, which stands where a token was not compared.
        value[name] = None if scores is None else [[None if math.isnan(score) else score for score in each] for each in scores]
    return value


def sample_from_json(value: Mapping[str, Any]) -> Sample:
    """The sample."""

    def scores(name: str) -> tuple[tuple[float, ...], ...] | None:
        if value[name] is None:
            return None
        return tuple(tuple(math.nan if score is None else score for score in each) for each in value[name])

    names = ("id", "group", "member", "task", "reward", "truncated", "audit_version", "rewards", "metrics", "timings_s")
    return Sample(
        **{name: value[name] for name in names},
        segments=tuple(segment_from_json(each) for each in value["segments"]),
        turns=tuple(turn_from_json(each) for each in value["turns"]),
        failure=None if value["failure"] is None else Failure(**value["failure"]),
        reference_log_probs=scores("reference_log_probs"),
        audit_log_probs=scores("audit_log_probs"),
    )


def group_to_json(group: Group) -> dict[str, Any]:
    """A group; of one that is unfinished only the task, since it is begun again."""
    value: dict[str, Any] = {"task": group.task, "status": group.status}
    if group.status != "unfinished":
        value |= {"samples": [sample_to_json(sample) for sample in group.samples], "advantages": list(group.advantages)}
    return value


def group_from_json(number: int, value: Mapping[str, Any]) -> Group:
    """The group."""
    samples = tuple(sample_from_json(each) for each in value.get("samples", ()))
    return Group(number, value["task"], value["status"], samples, tuple(value.get("advantages", ())))
