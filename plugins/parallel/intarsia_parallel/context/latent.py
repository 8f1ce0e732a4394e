"""Attention over a compressed latent (MLA): what is gathered is the latent, not the heads that are made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from intarsia_parallel.context.gather import collect
from intarsia_parallel.context.ring import Course
from intarsia_parallel.context.rows import Rows
from intarsia_parallel.context.transfer import connected


def latent(latent_BSC: Tensor, attend: Callable[..., Tensor], settings: dict[str, Any], rows: Rows, course: Course) -> Tensor:
    """`attend` gets the latents that this rank's queries see, in the row's order, with their positions and their documents' numbers in the row. Those of the
    queries are the context's `positions_BS` and `documents_BS`."""
    (latent_BTC,) = collect(course, latent_BSC)
    needs = course.plan.needs[course.rank]
    return connected(attend(latent_BTC, rows.positions_of(needs), rows.documents_of(needs), **settings), latent_BTC)
