"""Rows of tokens, labels, positions and documents from segments of a token store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy
import torch
from intarsia.contracts import IGNORE, Batch

from intarsia_data.order import Segments
from intarsia_data.store import TokenStore


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row before it is stacked: int64 tokens and labels of S, document lengths that sum to S, bytes that the labels stand for, how many tokens at its end are padding."""

    tokens: numpy.ndarray
    labels: numpy.ndarray
    lengths: numpy.ndarray
    bytes: int
    sample: int
    padding: int = 0


def make_row(store: TokenStore, segments: Segments, size: int, pad_id: int, byte_lengths: numpy.ndarray | None, sample: int) -> Row:
    """A row of `size` tokens. A label is the next token of the same document where there is one and it is trained on, else IGNORE.

    `byte_lengths[id]` are the bytes that an id stands for; without it the bytes of each document are spread evenly over its tokens, in integers
    whose sum over the document is exact. What is left of the row is padding, as a document of its own.
    """
    filled = int(segments.length.sum())
    row_start = numpy.cumsum(segments.length) - segments.length
    # Place in the store of each token, and of the token after it.
    place = numpy.arange(filled) + numpy.repeat(segments.begin - row_start, segments.length)
    following = place + 1
    first, end = store.offsets[segments.document], store.offsets[segments.document + 1]
    inside = following < numpy.repeat(end, segments.length)
    following = numpy.minimum(following, store.token_count - 1)
    if store.trained is not None:
        inside &= store.trained[following] != 0
    tokens, labels = numpy.full(size, pad_id, numpy.int64), numpy.full(size, IGNORE, numpy.int64)
    tokens[:filled] = store.tokens[place]
    labels[:filled][inside] = store.tokens[following[inside]]
    if byte_lengths is not None:
        count = int(byte_lengths[labels[:filled][inside]].sum())
    else:
        number = (following - numpy.repeat(first, segments.length))[inside]
        total, share = (
            (numpy.repeat(values, segments.length)[inside]) for values in (end - first - 1, store.document_bytes[segments.document])
        )
        # The first token of a document is never predicted: the bytes are spread over the others.
        count = int((share * number // total - share * (number - 1) // total).sum())
    lengths = segments.length if filled == size else numpy.append(segments.length, size - filled)
    return Row(tokens, labels, lengths, count, sample, size - filled)


def padding_row(size: int, pad_id: int) -> Row:
    """A row that counts for nothing, for a rank that has no sample: all labels are IGNORE, its sample number is -1."""
    return Row(numpy.full(size, pad_id, numpy.int64), numpy.full(size, IGNORE, numpy.int64), numpy.array([size]), 0, -1, size)


def stack(rows: Sequence[Row], size: int) -> Batch:
    """The rows as one Batch."""
    positions_BS, documents_BS = places([row.lengths for row in rows], size)
    return Batch(
        tokens_BS=torch.from_numpy(numpy.stack([row.tokens for row in rows])),
        labels_BS=torch.from_numpy(numpy.stack([row.labels for row in rows])),
        positions_BS=positions_BS,
        documents_BS=documents_BS,
        lengths=tuple(tuple(row.lengths.tolist()) for row in rows),
        samples=tuple(row.sample for row in rows),
        extra={"bytes": sum(row.bytes for row in rows), **padding_of(rows, size)},
    )


def places(lengths: Sequence[Sequence[int] | numpy.ndarray], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions (int64) and document numbers (int32) [B, size] of rows whose documents have these lengths. They are made here and nowhere else."""
    positions_BS = numpy.empty((len(lengths), size), numpy.int64)
    documents_BS = numpy.empty((len(lengths), size), numpy.int32)
    for number, row in enumerate(lengths):
        positions_BS[number] = numpy.arange(size) - numpy.repeat(numpy.cumsum(row) - row, row)
        documents_BS[number] = numpy.repeat(numpy.arange(len(row), dtype=numpy.int32), row)
    return torch.from_numpy(positions_BS), torch.from_numpy(documents_BS)


def padding_of(rows: Sequence[Row], size: int) -> dict[str, torch.Tensor]:
    """`padding_BS` (bool) for `Batch.extra`, which tells a model the tokens that are only there to fill rows; nothing where there are none."""
    if not any(row.padding for row in rows):
        return {}
    return {"padding_BS": torch.from_numpy(numpy.stack([numpy.arange(size) >= size - row.padding for row in rows]))}
