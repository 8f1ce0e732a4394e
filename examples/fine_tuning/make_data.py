"""Write the two files of this folder: conversations about sums, and pairs of answers to questions about sums.

python make_data.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
SYSTEM = {"role": "system", "content": "Answer with a number."}


def conversation(draw: random.Random) -> dict[str, object]:
    """Two questions with their answers. About half of the conversations begin with a wrong answer, which is not trained on."""
    a, b, c = (draw.randrange(10) for _ in range(3))
    first = {"role": "assistant", "content": str(a + b)}
    if draw.random() < 0.5:
        first = {"role": "assistant", "content": str(a + b + 1), "trained": False}
    questions = [{"role": "user", "content": f"{a}+{b}"}, {"role": "user", "content": f"{a}+{c}"}]
    return {"messages": [SYSTEM, questions[0], first, questions[1], {"role": "assistant", "content": str(a + c)}]}


def preference(draw: random.Random) -> dict[str, object]:
    """The shorter of two right answers is preferred."""
    a, b = draw.randrange(10), draw.randrange(10)
    return {"prompt": [SYSTEM, {"role": "user", "content": f"{a}+{b}"}], "chosen": str(a + b), "rejected": f"It is {a + b}."}


def main() -> None:
    """Both files, the same ones every time."""
    draw = random.Random(0)
    for name, make, count in (("conversations", conversation, 400), ("preferences", preference, 200)):
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(make(draw)) + "\n" for _ in range(count)))


if __name__ == "__main__":
    main()
