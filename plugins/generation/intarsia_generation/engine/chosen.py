"""From hidden states to the next tokens of many requests, each with settings and random numbers of its own.

Shape suffixes: N rows, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from intarsia_generation.engine.request import Job
from intarsia_generation.engine.scheduler import Chunk
from intarsia_generation.sampling import draw, probabilities

ROWS = 1024
"""Rows whose logits are there at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A hidden state from which a request's next token follows: `place` in the line of a call; `token` is known, or has to be chosen (None)."""

    job: Job
    place: int
    token: int | None


def rows_of(chunks: Iterable[Chunk]) -> list[Row]:
    """The rows that decide something, of chunks that lie one behind the other. Positions whose next token was decided before are left out."""
    rows, first = [], 0
    for chunk in chunks:
        job = chunk.job
        for position in range(max(chunk.start, job.decided - 1), chunk.end):
            following = position + 1
            rows.append(Row(job, first + position - chunk.start, job.tokens[following] if following < len(job.tokens) else None))
        first += chunk.end - chunk.start
    return rows


def decide(logits: Callable[[Tensor], Tensor], hidden_ND: Tensor, rows: list[Row]) -> tuple[list[int], list[float]]:
    """Each row's token, known or chosen, and its log-probability under the model itself (temperature 1, nothing left out, float32). `logits` makes [n, V] of [n, D], at most `ROWS` at once."""
    tokens: list[int] = []
    log_probs: list[float] = []
    for first in range(0, len(rows), ROWS):
        some = rows[first : first + ROWS]
        logits_NV = logits(hidden_ND[first : first + ROWS])
        log_probs_NV = logits_NV.float().log_softmax(-1)
        tokens_N = _tokens(logits_NV, log_probs_NV, some)
        both_2N = torch.stack((tokens_N.double(), log_probs_NV.gather(-1, tokens_N[:, None])[:, 0].double())).tolist()
        tokens += map(int, both_2N[0])
        log_probs += both_2N[1]
    return tokens, log_probs


def _tokens(logits_NV: Tensor, log_probs_NV: Tensor, rows: list[Row]) -> Tensor:
    """[N] int64."""
    tokens_N = torch.tensor([row.token or 0 for row in rows]).to(logits_NV.device)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, row in enumerate(rows):
        if row.token is None:
            settings = row.job.request.sampling
            alike.setdefault((settings.temperature, settings.top_k, settings.top_p, settings.min_p), []).append(number)
    for (temperature, *_), numbers in alike.items():
        is_all = len(numbers) == len(rows)
        index = torch.tensor(numbers).to(logits_NV.device)
        if temperature == 0:  # the first of equals
            chosen = (log_probs_NV if is_all else log_probs_NV[index]).argmax(-1)
        else:
            uniform = torch.tensor([rows[number].job.random.random() for number in numbers], dtype=torch.float64).to(logits_NV.device)
            some_NV = logits_NV if is_all else logits_NV[index]
            chosen = draw(probabilities(some_NV, rows[numbers[0]].job.request.sampling), uniform)
        tokens_N = chosen if is_all else tokens_N.index_copy(0, index, chosen)
    return tokens_N
