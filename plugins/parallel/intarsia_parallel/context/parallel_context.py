"""The SequenceContext of one rank's part of a batch. Shape suffixes: B rows, S tokens here, T tokens of the whole row or what is seen of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from intarsia import ops
from intarsia.comm import Communicator
from intarsia.errors import PluginError, UsageError
from torch import Tensor

from intarsia_parallel.context import choose
from intarsia_parallel.context.block import Settings
from intarsia_parallel.context.cut import SequenceCut
from intarsia_parallel.context.gather import gather
from intarsia_parallel.context.latent import latent
from intarsia_parallel.context.plan import Documents, Plan
from intarsia_parallel.context.recurrent import recurrent
from intarsia_parallel.context.ring import Course, over_gathered, ring
from intarsia_parallel.context.rows import Rows
from intarsia_parallel.context.ulysses import ulysses

if TYPE_CHECKING:
    from intarsia.contracts import Batch

log = logging.getLogger("intarsia.parallel")


class ContextSettings(Protocol):
    """What is read of the paralleliser's config."""

    @property
    def context(self) -> str:
        """Which method: see `choose`."""


class ParallelContext:
    """A SequenceContext over one rank's part of whole rows: every token is new, and no cache is kept. Stability: provisional.

    `positions_BS` and `documents_BS` (None: one document to a row) are those of the tokens here, true positions and numbers along the whole row;
    `following_BSK`, `routes_BSLK` and `extra` as the batch, cut, has them. It serves softmax, latent and associative recurrent mixers; an indexed one is refused by name.
    All ranks of `comm` call the same mixers in the same order, those without tokens, too.
    """

    packing: ops.Packing | None = None
    """Kernels for whole rows have no use for part of one."""

    def __init__(
        self,
        method: str,
        positions_BS: Tensor,
        lengths: tuple[tuple[int, ...], ...],
        windows: Sequence[int | None],
        cut: SequenceCut,
        comm: Communicator,
        following_BSK: Tensor | None = None,
        routes_BSLK: Tensor | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        choose.check(method)
        if cut.ranks != comm.size:
            raise PluginError(f"A cut over {cut.ranks} ranks was given to a group of {comm.size}.")
        if positions_BS.shape[1] != cut.counts[comm.rank]:
            raise PluginError(
                f"Rank {comm.rank} holds {cut.counts[comm.rank]} of {cut.tokens} tokens, the batch has {positions_BS.shape[1]}."
            )
        self.method, self.cut, self.comm = method, cut, comm
        self.positions_BS, self.following_BSK, self.routes_BSLK = positions_BS, following_BSK, routes_BSLK
        self.extra: Mapping[str, Any] = extra or {}
        self.rows = Rows(cut, lengths, windows, positions_BS.device)
        self.documents_BS = self.rows.documents_of(cut.ranges[comm.rank])
        self._courses: dict[int | None, Course] = {}
        self._choices: dict[tuple[choose.Shape, int | None], choose.Choice] = {}

    @torch.compiler.disable
    def softmax(
        self,
        mixer: str,
        q_BSHD: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Causal softmax attention of the tokens here within their documents, over the whole row. Returns [B, S, H, Dv]."""
        settings = Settings(scale, window, softcap)
        method = self.method if self.method != "auto" else self._chosen(q_BSHD, k_BSKD, v_BSKD, window)
        if method == "ulysses":
            return ulysses(mixer, q_BSHD, k_BSKD, v_BSKD, sinks_H, settings, self.rows, self.comm)
        attend = ring if method == "ring" else gather
        return attend(q_BSHD, k_BSKD, v_BSKD, sinks_H, settings, self._course(window))

    @torch.compiler.disable
    def latent(self, mixer: str, latent_BSC: Tensor, attend: Callable[..., Tensor], **settings: Any) -> Tensor:
        """Attention over a latent: `attend` sees what the tokens here see of the whole row, in its order, with true positions and documents."""
        return latent(latent_BSC, attend, settings, self.rows, self._course(None))

    @torch.compiler.disable
    def attention(
        self,
        q_BSHD: Tensor,
        k_BTKD: Tensor,
        v_BTKD: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """For use within `attend`: causal softmax attention of the tokens here over keys and values made of all that `latent` handed out, as `ops.attention` with
        positions and documents gives it, but computed segment by segment, by fast kernels where they take it. Returns [B, S, H, Dv]."""
        return over_gathered(q_BSHD, k_BTKD, v_BTKD, sinks_H, Settings(scale, None, softcap), self._course(None))

    @torch.compiler.disable
    def recurrent(self, mixer: str, cache: str, update: Callable[..., Any], *inputs: Tensor, **settings: Any) -> Tensor:
        """A recurrence whose update offers `carry` and `combine`: states come from the ranks before by combination (see `context.recurrent`)."""
        return recurrent(mixer, update, inputs, settings, self.cut, self.rows.documents, self.documents_BS, self.comm)

    def indexed(self, mixer: str, *inputs: Tensor, **settings: Any) -> Tensor:
        """Refused: attention by an indexer needs a context that keeps index keys."""
        served = "it serves softmax, latent and associative recurrent mixers"
        raise UsageError(f"Mixer {mixer!r} asks for a context of kind 'indexed', which {type(self).__name__} does not serve ({served}).")

    def _course(self, window: int | None) -> Course:
        if window not in self._courses:
            self._courses[window] = _course_of(self.cut, self.rows.lengths, window, self.comm)
        return self._courses[window]

    def _chosen(self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, window: int | None) -> str:
        """The same on all ranks, since it follows from what all know."""
        rows, _, heads, dim = q_BSHD.shape
        shape = choose.Shape(rows, heads, k_BSKD.shape[2], dim, v_BSKD.shape[-1], k_BSKD.element_size())
        if (shape, window) not in self._choices:
            choice = self._choices[shape, window] = choose.choose(shape, self._course(window).plan)
            log.debug("context parallelism by %s (%s)", choice.method, choice.reason)
        return self._choices[shape, window].method


@functools.lru_cache(maxsize=32)
def _course_of(cut: SequenceCut, lengths: tuple[tuple[int, ...], ...], window: int | None, comm: Communicator) -> Course:
    """Batches of the same documents share what is worked out on the host and brought to the device."""
    return Course(Plan(cut, Documents.of(lengths), window), comm)


def build(config: ContextSettings, batch: Batch, windows: Sequence[int | None], cut: SequenceCut, comm: Communicator) -> ParallelContext:
    """The context of a batch that `cut.local` has cut for this rank of `comm` (the group along cp). `windows` are those that the model's mixers use."""
    given = {name: batch.extra.get(name) for name in ("following_BSK", "routes_BSLK")}
    return ParallelContext(config.context, batch.positions_BS, batch.lengths, windows, cut, comm, **given, extra=batch.extra)
