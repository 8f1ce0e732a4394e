"""How many questions a model answers rightly: by its answers' text, or by its predictions on batches.

asked = questions(source, range(200))
answers = [generate(each.prompt) for each in asked]
print(grade(asked, answers).accuracy)
"""

from __future__ import annotations

import collections
import dataclasses
import string
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from intarsia.contracts import IGNORE, Batch, DataSource, Message
from intarsia.errors import UsageError
from intarsia_data.tokenizer import text_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A conversation up to the last answer, that answer, the document's number and its kind (empty: the source has none)."""

    prompt: tuple[Message, ...]
    answer: str
    number: int
    kind: str


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """How many answers are right, of how many; the same for each kind."""

    right: int
    total: int
    by_kind: dict[str, tuple[int, int]]

    @property
    def accuracy(self) -> float:
        """The share that is right."""
        return self.right / self.total if self.total else 0.0


def questions(source: DataSource, numbers: Iterable[int]) -> list[Question]:
    """The questions of documents, which are conversations that end with the assistant's answer. Errors: UsageError for any other document."""
    found, kind_of = [], getattr(source, "kind_of", lambda number: "")
    for number in numbers:
        messages = source[number].messages or ()
        if len(messages) < 2 or messages[-1].role != "assistant":
            raise UsageError(f"document {number} is no conversation that ends with the assistant's answer, and so no question.")
        found.append(Question(messages[:-1], text_of(messages[-1].content), number, kind_of(number)))
    return found


def grade(asked: Sequence[Question], answers: Sequence[str]) -> Score:
    """The score of answers, which are compared without case, and without blanks and punctuation around them."""
    if len(asked) != len(answers):
        raise UsageError(f"{len(asked)} questions and {len(answers)} answers; there must be one for each.")
    by_kind: collections.defaultdict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for question, answer in zip(asked, answers, strict=True):
        by_kind[question.kind][0] += plain(answer) == plain(question.answer)
        by_kind[question.kind][1] += 1
    kinds = {kind: (right, total) for kind, (right, total) in by_kind.items()}
    return Score(sum(right for right, _ in kinds.values()), len(asked), kinds)


def plain(answer: str) -> str:
    """An answer as it is compared."""
    return answer.strip(string.whitespace + string.punctuation).casefold()


def right_documents(batch: Batch, predicted_BS: Tensor) -> tuple[int, int]:
    """(documents all of whose labels are predicted, documents with labels) of a batch, from the most probable next tokens, int64 [B, S].

    A model that decodes greedily would give exactly the answers of these documents: with every token before it right, each next one is the most probable.
    """
    counted_BS = batch.labels_BS != IGNORE
    wrong_BS = counted_BS & (predicted_BS != batch.labels_BS)
    right = total = 0
    for counted_S, wrong_S, documents_S in zip(counted_BS, wrong_BS, batch.documents_BS, strict=True):
        asked = set(documents_S[counted_S].tolist())
        total += len(asked)
        right += len(asked - set(documents_S[wrong_S].tolist()))
    return right, total
