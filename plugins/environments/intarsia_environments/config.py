"""Settings of the environments and of the tokenizer `characters`. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config.bases import EnvironmentConfig, TokenizerConfig
from intarsia_sandbox.config import ProcessSandboxConfig, SandboxConfig


@chz.chz(typecheck=True)
class ArithmeticConfig(EnvironmentConfig):
    """Questions with one whole number for an answer, in one turn. The reward is 1 for it, and less for what shares digits with it."""

    level: int = chz.field(
        default=1,
        doc="0: sums of five digits from 0 to 2; 1: sums of two digits; 2: sums and differences of two numbers below 100; 3: products as well, below 1000; 4: four numbers, with brackets.",
    )
    tasks: int = chz.field(default=2000, doc="Tasks of the split train, at most: a low level has fewer.")
    held_out: int = chz.field(default=200, doc="Tasks of the split held_out, at most. No question is in both.")
    seed: int = chz.field(default=0, doc="Seed of the tasks.")
    partial: float = chz.field(
        default=0.3, doc="Reward of a wrong answer whose digits are all but right; 0: the right answer alone is rewarded."
    )
    instructions: str = chz.field(default="Compute. Answer with the number alone.", doc="The system turn; empty: none.")
    tokens: int | None = chz.field(default=None, doc="Longest answer in tokens; none: the answer's longest form and one for its end.")


@chz.chz(typecheck=True)
class AlphabetSortConfig(EnvironmentConfig):
    """Names come in several turns; each answer is all names so far in alphabetical order. A turn earns the share of places that are right, over the turns."""

    letters: int = chz.field(default=26, doc="Names are made of the first this many letters of the alphabet.")
    length: int = chz.field(default=5, doc="Letters of a name.")
    first: int = chz.field(default=3, doc="Names of the first turn.")
    more: int = chz.field(default=2, doc="Names of each further turn.")
    turns: int = chz.field(default=3, doc="Turns of an episode.")
    separator: str = chz.field(default=" ", doc="What stands between names; may be empty for names of one letter.")
    exponent: float = chz.field(
        default=1.0, doc="The share of right places is raised to this power: above 1, what is nearly right earns less."
    )
    tasks: int = chz.field(default=2000, doc="Tasks of the split train, at most.")
    held_out: int = chz.field(default=200, doc="Tasks of the split held_out, at most. None is in both: at least their order differs.")
    seed: int = chz.field(default=0, doc="Seed of the tasks.")
    instructions: str = chz.field(
        default="Names come in several turns. Answer each turn with all names so far, in alphabetical order.",
        doc="The system turn; empty: none.",
    )
    tokens: int | None = chz.field(default=None, doc="Longest answer in tokens; none: the right answer's letters and one for its end.")


@chz.chz(typecheck=True)
class CodeConfig(EnvironmentConfig):
    """Write a function in Python. Hidden tests run in a sandbox; their errors come back, and the function may be written again."""

    level: int = chz.field(
        default=1,
        doc="1: one operation on a number; 2: numbers and conditions; 3: texts and lists; 4: several steps. 0: expressions of one operation.",
    )
    turns: int = chz.field(default=3, doc="Tries of an episode.")
    tests: int = chz.field(default=8, doc="Hidden tests of a function.")
    shown: int = chz.field(default=2, doc="Examples in the question.")
    form: str = chz.field(
        default="tool",
        doc="tool: functions are handed in by the tool `submit`, whose answer is what the tests say; text: a turn's code block, or its whole text, is the "
        "function; expression: the text is the expression that the function returns.",
    )
    tasks: int = chz.field(default=400, doc="Tasks of the split train, at most.")
    held_out: int = chz.field(default=40, doc="Tasks of the split held_out, at most. No function is in both.")
    seed: int = chz.field(default=0, doc="Seed of the tasks.")
    runs: float = chz.field(
        default=0.1, doc="Reward of a function that runs on every test and is right on none; each right one adds to it, up to 1."
    )
    seconds: float = chz.field(default=5.0, doc="CPU time that all tests of one try may take; on the clock four times as much.")
    memory_mb: int = chz.field(default=256, doc="Memory that they may take, in MiB.")
    sandbox: SandboxConfig = chz.field(default_factory=ProcessSandboxConfig, doc="Where the functions run.")
    python: tuple[str, ...] = chz.field(default=(), doc="The command of an interpreter in the sandbox; empty: this one.")
    instructions: str | None = chz.field(default=None, doc="The system turn; none: what the form asks for; empty: no system turn.")
    tokens: int | None = chz.field(default=1024, doc="Longest turn in tokens; none: unbounded.")


@chz.chz(typecheck=True)
class CharactersConfig(TokenizerConfig):
    """One id for each character of an alphabet, one for every other character, then the end of a turn and one marker for each role: for models of a few seconds."""

    alphabet: str = chz.field(
        default="abcdefghijklmnopqrstuvwxyz0123456789+-*()= ", doc="The characters, each once, in the order of their ids."
    )
    roles: tuple[str, ...] = chz.field(
        default=("system", "user", "assistant", "tool"), doc="Roles of conversations, in the order of their ids."
    )
    specials: tuple[str, ...] = chz.field(
        default=(), doc="Further special tokens, such as those that stand for images, in the order of their ids, the last ones."
    )
