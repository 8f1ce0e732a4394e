"""Messages between stages: payloads one way, their gradients the other. Torch.

Each pair of ranks that exchange messages has a group of its own for each direction, since a device carries out the calls of one group one after the other: no send stands
behind a receive of another pair or of the other direction. Within a group all messages are one queue, in the order of the schedule's sends, which both sides know.

Forms are agreed once: the first message of a stage for batches of one shape comes with its form, and what follows must have that form. Both sides see batches of the
same shapes, hence know when a form comes along.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from intarsia.comm import Communicator
from intarsia.errors import PluginError
from torch import Tensor

from intarsia_pipeline.payload import Form, form_of
from intarsia_pipeline.validate import Message, receiver

Edge = tuple[int, int]
"""(from, to): two ranks of the pipeline."""


def edges_of(placement: Sequence[int]) -> list[Edge]:
    """Pairs (from, to) of different ranks with a message between them, in order."""
    found = {(first, second) for first, second in itertools.pairwise(placement) if first != second}
    return sorted(found | {(second, first) for first, second in found})


def rounds_of(edges: Sequence[Edge]) -> list[list[Edge]]:
    """The pairs of ranks (lower first) dealt out to as few rounds as need be, no rank twice in one: what can be made into groups at the same time."""
    rounds: list[list[Edge]] = []
    for edge in sorted({(min(edge), max(edge)) for edge in edges}):
        free = next((each for each in rounds if not any(set(edge) & set(other) for other in each)), None)
        if free is None:
            rounds.append([edge])
        else:
            free.append(edge)
    return rounds


def make_ways(group: Communicator, placement: Sequence[int]) -> dict[Edge, Communicator]:
    """A group of two for each edge that this rank is on. A collective of the pipeline: every rank makes equally many groups, in one order."""
    ways: dict[Edge, Communicator] = {}
    for number, pairs in enumerate(rounds_of(edges_of(placement))):
        paired = {rank for pair in pairs for rank in pair}
        parts = [list(pair) for pair in pairs] + [[rank] for rank in range(group.size) if rank not in paired]
        mine = next((pair for pair in pairs if group.rank in pair), None)
        for way in ("up", "down"):
            made = group.split(parts, f"pipeline {way} {number}")
            if mine is not None:
                ways[mine if way == "up" else (mine[1], mine[0])] = made
    return ways


@dataclasses.dataclass
class Arrival:
    """A message that is to come: what waits for it, once it has been begun, and its tensors."""

    message: Message
    key: Hashable
    tensors: list[Tensor] | None = None
    works: list[Any] = dataclasses.field(default_factory=list)
    form: Form | None = None


class Transfers:
    """The messages of one rank. `placement[stage]` is a stage's rank in the group of the pipeline."""

    def __init__(self, group: Communicator, ways: Mapping[Edge, Communicator], placement: Sequence[int]) -> None:
        self._ways, self._placement = dict(ways), tuple(placement)
        self.rank, self.device = group.rank, group.device
        self._forms: dict[tuple[int, Hashable], Form] = {}
        self._queues: dict[int, deque[Arrival]] = defaultdict(deque)
        self._arrivals: dict[Message, Arrival] = {}
        self._sent: dict[Message, list[tuple[Any, Tensor]]] = {}
        self._releases: Mapping[Message, Sequence[Message]] = {}

    def begin(self, releases: Mapping[Message, Sequence[Message]]) -> None:
        """A step begins. `releases`: for a message that comes here, those from here that were received before it was sent (`intarsia_pipeline.lower.releases`)."""
        self._releases = releases

    def introduce(self) -> None:
        """Let each pair of ranks meet once, in one order everywhere: backends connect two ranks at their first message, and wait for each other then."""
        for edge in edges_of(self._placement):
            if edge in self._ways:
                token = torch.zeros(1, device=self.device)
                group, peer = self._way(*edge)
                (group.send if self.rank == edge[0] else group.receive)(token, peer, "meet").wait()

    def _way(self, source: int, target: int) -> tuple[Communicator, int]:
        """The group from one rank to another, and the other one's place in it."""
        other = target if self.rank == source else source
        return self._ways[source, target], int(other > self.rank)

    # ------------------------------------------------------------ sending

    def send_payload(self, stage: int, micro_batch: int, key: Hashable, payload: Any) -> None:
        """To the stage after `stage`, on another rank."""
        form, tensors = form_of(payload)
        target = self._placement[stage + 1]
        group, peer = self._way(self.rank, target)
        message: Message = ("F", stage, micro_batch)
        parts: list[tuple[Any, Tensor]] = []
        if self.is_new(stage, key):
            text = torch.frombuffer(bytearray(form.text()), dtype=torch.uint8).to(self.device)
            length = torch.tensor([text.numel()], dtype=torch.int64, device=self.device)
            parts += [(group.send(each, peer, f"form of stage {stage}"), each) for each in (length, text)]
        self.agree(stage, key, form)
        parts += self._send(group, peer, tensors, f"payload of stage {stage}")
        self._sent[message] = parts

    def send_gradients(self, stage: int, micro_batch: int, gradients: Sequence[Tensor]) -> None:
        """Those of what stage `stage` was given, to the stage before it, on another rank."""
        target = self._placement[stage - 1]
        group, peer = self._way(self.rank, target)
        self._sent["B", stage, micro_batch] = self._send(group, peer, gradients, f"gradient of stage {stage}")

    def _send(self, group: Communicator, peer: int, tensors: Sequence[Tensor], what: str) -> list[tuple[Any, Tensor]]:
        parts = [tensor.detach().contiguous() for tensor in tensors]
        return [(group.send(part, peer, what), part) for part in parts]

    def finish(self) -> None:
        """End all sends of the step."""
        for message in list(self._sent):
            self._release(message)

    def _release(self, message: Message) -> None:
        for work, _ in self._sent.pop(message, ()):
            work.wait()

    def abandon(self) -> None:
        """A step has failed: whatever was under way is of no use."""
        self._sent.clear()
        self._arrivals.clear()
        self._queues.clear()

    # ------------------------------------------------------------ receiving

    def expect(self, message: Message, key: Hashable) -> None:
        """Post the receive of a message; in the order in which it is sent."""
        arrival = Arrival(message, key)
        self._arrivals[message] = arrival
        self._queues[self._placement[message[1]]].append(arrival)
        self._begin_known(self._placement[message[1]])

    def take(self, message: Message) -> tuple[Form, list[Tensor]]:
        """The message's form and tensors, waited for."""
        arrival = self._arrivals.pop(message)
        source = self._placement[message[1]]
        while arrival.tensors is None:
            self._begin(self._queues[source].popleft())
        self._begin_known(source)
        for work in arrival.works:
            work.wait()
        # Whoever sent this has received those: their memory may go.
        for sent in self._releases.get(message, ()):
            self._release(sent)
        assert arrival.form is not None
        return arrival.form, arrival.tensors

    def _begin_known(self, source: int) -> None:
        """Begin those at the head of the queue whose form is known: the others would block now, and perhaps for what this rank has yet to do."""
        queue = self._queues[source]
        while queue and self._is_known(queue[0]):
            self._begin(queue.popleft())

    def _is_known(self, arrival: Arrival) -> bool:
        direction, stage, _ = arrival.message
        return (stage if direction == "F" else receiver(arrival.message), arrival.key) in self._forms

    def _begin(self, arrival: Arrival) -> None:
        direction, stage, _ = arrival.message
        source = self._placement[stage]
        group, peer = self._way(source, self.rank)
        if direction == "F":
            form = self._forms.get((stage, arrival.key))
            if form is None:
                form = self._receive_form(group, peer, stage)
                self._forms[stage, arrival.key] = form
            leaves = form.leaves
            what = f"payload of stage {stage}"
        else:
            form = self._forms[stage - 1, arrival.key]
            leaves = tuple(leaf for leaf in form.leaves if leaf.differentiable)
            what = f"gradient of stage {stage}"
        tensors = [leaf.empty(self.device) for leaf in leaves]
        arrival.form, arrival.tensors = form, tensors
        arrival.works = [group.receive(tensor, peer, what) for tensor in tensors]

    def _receive_form(self, group: Communicator, peer: int, stage: int) -> Form:
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        group.receive(length, peer, f"form of stage {stage}").wait()
        text = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        group.receive(text, peer, f"form of stage {stage}").wait()
        return Form.of_text(bytes(text.cpu().tolist()))

    # ------------------------------------------------------------ forms

    def is_new(self, stage: int, key: Hashable) -> bool:
        """Whether nothing is known of what `stage` hands on for batches of this shape."""
        return (stage, key) not in self._forms

    def agree(self, stage: int, key: Hashable, form: Form) -> None:
        """Hold `form` against the one that was agreed for batches of this shape. PluginError where it is another."""
        known = self._forms.setdefault((stage, key), form)
        if known != form:
            raise PluginError(
                f"Pipeline stage {stage} hands on another payload than it did for a batch of the same shape ({key}): {known.difference(form)}. What a stage hands on may "
                "depend on the batch's shape only."
            )

    def form(self, stage: int, key: Hashable) -> Form:
        """What `stage` hands on for batches of this shape."""
        return self._forms[stage, key]
