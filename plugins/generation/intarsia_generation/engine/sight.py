"""What requests show: images and video in their tokens, looked at once, in however many pieces a prompt is read, and by however many requests.

Shape suffixes: N tokens in a line, S tokens of a request, M visual features, D model width.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from intarsia_rl.contracts import Request
from intarsia_rl.media import prepared, used
from torch import Tensor, nn

from intarsia_generation.prompts import Features, joined, renumbered

if TYPE_CHECKING:
    from intarsia_multimodal.decoding import Decoder, Loaded

KEPT_FEATURES = 1 << 16
"""Features of media that are kept for other requests that show the same."""


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """One image or video of a request: tokens `at` to `stop` are its block, features `first` to `last` of the request its own. `digest` is over patches and grid."""

    at: int
    stop: int
    first: int
    last: int
    grid: tuple[int, int, int]
    loaded: Loaded
    digest: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Sight:
    """What a request shows. `positions_3S` (time, height and width) and `visual_S` (the number of the feature in a token's place, -1: none) are of its prompt and forced tokens, int64 on the CPU; later
    tokens are `ahead` of their numbers."""

    positions_3S: Tensor
    visual_S: Tensor
    media: tuple[Seen, ...]
    ahead: int

    def key(self, start: int, end: int) -> bytes:
        """Which media stand in tokens `start` to `end`, and where."""
        here = [each for each in self.media if each.at < end and each.stop > start]
        return b"".join(each.digest + (each.at - start).to_bytes(8, "little", signed=True) for each in here)

    @property
    def known(self) -> int:
        """How many tokens `positions_3S` and `visual_S` are of."""
        return self.visual_S.shape[0]

    def positions(self, start: int, end: int) -> Tensor:
        """[3, end - start]."""
        known = self.known
        later_S = torch.arange(max(start, known), max(end, known)) + self.ahead
        return torch.cat((self.positions_3S[:, start:end], later_S.expand(3, -1)), 1)


def look(request: Request, decoder: Decoder) -> Sight:
    """Load what a request shows. EnvironmentFailure for a medium that cannot be decoded, UsageError for one that is not where it is said to be."""
    media, seen = [], 0
    with used("a request"):
        found = prepared((*request.tokens, *request.forced), request.media, decoder.processor)
        for slot in found.media:
            loaded = decoder.load(slot)
            media.append(Seen(slot.at, slot.stop, seen, seen + slot.features, slot.grid, loaded, loaded.digest))
            seen += slot.features
    positions_3S, visual_S = torch.from_numpy(found.positions_3N), torch.from_numpy(found.visual())
    return Sight(positions_3S, visual_S, tuple(media), int(positions_3S.max()) + 1 - len(found.tokens_N))


class Part(Protocol):
    """What this side sees of a `Chunk`."""

    @property
    def job(self) -> Any: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class Eyes:
    """What a model saw, by what it was shown, under the weights that it has. Media are looked at one by one: what one is taken for does not depend on what others are shown."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model: Any = model
        self._device = device
        self._kept: OrderedDict[bytes, Features] = OrderedDict()
        self.looks = 0

    def forget(self) -> None:
        """The weights are others."""
        self._kept.clear()

    def extra_of(self, chunks: Sequence[Part]) -> Mapping[str, Any] | None:
        """What a context is given with chunks, one behind the other: `positions_3N` and, where features stand in tokens' places, `visual_N` and `features`. None where no request shows anything."""
        if all(chunk.job.sight is None for chunk in chunks):
            return None
        if all(chunk.job.sight is None or chunk.start >= chunk.job.sight.known for chunk in chunks):
            # Every step of decoding comes here, where tensors of each request would cost milliseconds.
            aheads = [0 if chunk.job.sight is None else chunk.job.sight.ahead for chunk in chunks]
            places = [place + ahead for chunk, ahead in zip(chunks, aheads, strict=True) for place in range(chunk.start, chunk.end)]
            return {"positions_3N": torch.tensor(places).repeat(3, 1).to(self._device)}
        positions, visual, taken, seen = [], [], [], 0
        for chunk in chunks:
            sight, start, end = chunk.job.sight, chunk.start, chunk.end
            if sight is None:
                positions.append(torch.arange(start, end).expand(3, -1))
                visual.append(torch.full((end - start,), -1, dtype=torch.int64))
                continue
            positions.append(sight.positions(start, end))
            known_S, low, high = renumbered(sight.visual_S[start:end], seen)
            visual += [known_S, torch.full((end - start - known_S.shape[0],), -1, dtype=torch.int64)]
            taken += self._between(sight, low, high)
            seen += high - low
        extra: dict[str, Any] = {"positions_3N": torch.cat(positions, 1).to(self._device)}
        if taken:
            extra |= {"visual_N": torch.cat(visual).to(self._device), "features": joined(taken)}
        return extra

    def _between(self, sight: Sight, low: int, high: int) -> list[Features]:
        """Features `low` to `high` of a request, medium by medium."""
        found = []
        for each in sight.media:
            if each.first < high and each.last > low:
                here = slice(max(low, each.first) - each.first, min(high, each.last) - each.first)
                features_MD, deepstack = self._features(each)
                found.append((features_MD[here], tuple(further_MD[here] for further_MD in deepstack)))
        return found

    def _features(self, medium: Seen) -> Features:
        """What the model sees of a medium, or saw of an equal one."""
        if medium.digest in self._kept:
            self._kept.move_to_end(medium.digest)
            return self._kept[medium.digest]
        self.looks += 1
        features = self._kept[medium.digest] = self._model.see(torch.from_numpy(medium.loaded.patches_NC).to(self._device), (medium.grid,))
        while len(self._kept) > 1 and sum(each.shape[0] for each, _ in self._kept.values()) > KEPT_FEATURES:
            self._kept.popitem(last=False)
        return features
