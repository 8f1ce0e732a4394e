"""Prompts as tokens and what they show, and how they are read: an image is looked at once, in however many pieces its prompt is read.

Shape suffixes: B sequences, S tokens, N patches, C values of a patch, M visual features, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from intarsia.contracts import Document, Media, Message, Parts
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_generation.cache import CacheContext

Prompt = str | Sequence[int] | Parts | Sequence[Message] | Document
"""A text; tokens, which are taken as they are; text and media in turns; a conversation that the assistant goes on with; a document that is one of these."""

Features = tuple[Tensor, tuple[Tensor, ...]]
"""What a model saw: features [M, D], and those that are added behind its first blocks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """A prompt as tokens. `prepared` is what the processor says of its media (`intarsia_multimodal.contracts.Prepared`; None: there are none), `text` the prompt where it is a text, `ends` tokens
    that end the completion besides those that always do."""

    tokens: tuple[int, ...]
    prepared: Any = None
    text: str | None = None
    ends: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """What a prompt shows: `positions_3S`, the number of the feature in each token's place `visual_S` (-1: none), both int64 on the CPU, patches float32 [N, C] and the grids of its media.
    `digest` is over patches and grids."""

    positions_3S: Tensor
    visual_S: Tensor
    patches_NC: Tensor
    grids: tuple[tuple[int, int, int], ...]
    digest: str


@dataclasses.dataclass(frozen=True)
class Input:
    """A prompt that is ready to be read. Equal where tokens and what they show are."""

    tokens: tuple[int, ...]
    digest: str = ""
    shown: Shown | None = dataclasses.field(default=None, compare=False)


def media_of(content: Any) -> list[Media]:
    """The media in a prompt, in order."""
    if isinstance(content, Document):
        content = content.messages or content.parts or ()
    if isinstance(content, str):
        return []
    if content and isinstance(content[0], Message):
        return [medium for message in content for medium in media_of(message.content)]
    return [part for part in content if isinstance(part, Media)]


def look(prepared: Any, decoder: Any) -> Shown:
    """Load a prompt's media. MediaError where one cannot be decoded."""
    loaded = [decoder.load(slot) for slot in prepared.media]
    digest = hashlib.sha256()
    for each in loaded:
        digest.update(repr(tuple(each.grid)).encode())
        digest.update(each.patches_NC.tobytes())
    patches_NC = torch.cat([torch.from_numpy(each.patches_NC) for each in loaded])
    positions_3S, visual_S = torch.from_numpy(prepared.positions_3N), torch.from_numpy(prepared.visual())
    return Shown(positions_3S, visual_S, patches_NC, tuple(tuple(each.grid) for each in loaded), digest.hexdigest())


def check_sight(model: Any, where: str) -> None:
    """UsageError unless the model sees."""
    if getattr(model, "visual", None) is None:
        raise UsageError(
            f"The prompt has images or video, and the model of {where or 'this generator'}, {type(model).__name__}, has no vision tower. Ask it in text, or take a model that sees."
        )


def check_no_placeholders(model: Any, tokens: Sequence[int], number: int) -> None:
    """UsageError where a prompt that shows nothing has tokens that stand for images or video."""
    config = getattr(model, "config", None)
    if getattr(config, "vision", None) is None:
        return
    for name in ("image_id", "video_id"):
        if getattr(config, name, None) in tokens:
            raise UsageError(
                f"Prompt {number} has the token {getattr(config, name)}, in whose place a feature of an image or a video stands (model.{name}), and nothing to see. Give media as parts "
                "of the prompt, which puts these tokens there."
            )


class View:
    """What a model saw of one prompt: features, kept until the prompt is read."""

    def __init__(self, model: Any, shown: Shown | None, length: int, device: torch.device):
        self.positions_3S = torch.arange(length).expand(3, length) if shown is None else shown.positions_3S
        self.visual_S = torch.full((length,), -1, dtype=torch.int64) if shown is None else shown.visual_S
        self.features_MD: Tensor | None = None
        self.deepstack: tuple[Tensor, ...] = ()
        if shown is not None:
            # By prompts, not by batches: what one is shown does not depend on what others are.
            self.features_MD, self.deepstack = model.see(shown.patches_NC.to(device), shown.grids)


def piece_of(views: Sequence[View], first: int, counts: Sequence[int], device: torch.device) -> Mapping[str, Any]:
    """What a context shows of tokens `first` to `first + counts[b]` of each prompt: `positions_3BS`, and where features stand in their places `visual_BS` and `features`."""
    width = max(counts)
    positions_3BS = torch.zeros((3, len(views), width), dtype=torch.int64)
    visual_BS = torch.full((len(views), width), -1, dtype=torch.int64)
    taken: list[Features] = []
    seen = 0
    for row, (view, count) in enumerate(zip(views, counts, strict=True)):
        here = slice(first, first + count)
        positions_3BS[:, row, :count] = view.positions_3S[:, here]
        visual_BS[row, :count], low, high = renumbered(view.visual_S[here], seen)
        if view.features_MD is not None and low < high:
            taken.append((view.features_MD[low:high], tuple(each_MD[low:high] for each_MD in view.deepstack)))
            seen += high - low
    extra: dict[str, Any] = {"positions_3BS": positions_3BS.to(device)}
    if taken:
        extra |= {"visual_BS": visual_BS.to(device), "features": joined(taken)}
    return extra


def renumbered(visual_S: Tensor, first: int) -> tuple[Tensor, int, int]:
    """The numbers of features in a piece's tokens, counted from `first` on, and which features of its own prompt these are: from the one up to the other."""
    numbers = visual_S[visual_S >= 0]
    if not numbers.numel():
        return visual_S, 0, 0
    low, high = int(numbers[0]), int(numbers[-1]) + 1
    return torch.where(visual_S >= 0, visual_S - low + first, -1), low, high


def joined(taken: Sequence[Features]) -> Features:
    """What a model saw of several, one behind the other."""
    return torch.cat([features_MD for features_MD, _ in taken]), tuple(
        torch.cat(several) for several in zip(*(each for _, each in taken), strict=True)
    )


def prefill(model: Any, context: CacheContext, prompts: Sequence[Input]) -> Tensor:
    """Read prompts into a fresh context, `context.chunk` tokens at a time; returns the logits behind each one's last token, [B, V]."""
    device, chunk = context.device, context.chunk
    sees = any(each.shown is not None for each in prompts)
    views = [View(model, each.shown, len(each.tokens), device) for each in prompts] if sees else []
    last: list[Tensor | None] = [None] * len(prompts)
    for first in range(0, max(len(each.tokens) for each in prompts), chunk):
        parts = [each.tokens[first : first + chunk] for each in prompts]
        counts = [len(part) for part in parts]
        width = max(counts)
        tokens_BS = torch.tensor([[*part, *[0] * (width - len(part))] for part in parts], dtype=torch.int64, device=device)
        context.begin(counts, piece_of(views, first, counts, device) if sees else None)
        hidden_BSD = model(tokens_BS, context)
        for row, each in enumerate(prompts):
            if first < len(each.tokens) <= first + chunk:
                last[row] = hidden_BSD[row, len(each.tokens) - first - 1]
    rows_BD = torch.stack([hidden for hidden in last if hidden is not None])
    return model.project(rows_BD[:, None])[:, -1]
