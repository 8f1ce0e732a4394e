"""What differs between the run that saved and the run that resumes, and how bad that is. Torch-free."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from intarsia.errors import UsageError

Level = Literal["fatal", "warning", "note"]

# First match wins: what differs, as a glob; how bad it is; why.
RULES: tuple[tuple[str, Level, str], ...] = (
    ("recipe model*", "fatal", "the saved weights belong to another model"),
    ("recipe data.tokenizer*", "fatal", "token ids have another meaning"),
    ("recipe data.*", "warning", "the saved position in the data may have another meaning"),
    ("recipe optimizer", "fatal", "the saved optimizer state is another optimizer's; a new run can begin with the weights: --init-from"),
    ("recipe train.seed", "fatal", "order of the data and random streams would change in the middle of the run"),
    ("recipe train.sequence_length", "fatal", "the saved position in the data counts rows of the old length"),
    ("recipe train.global_batch", "warning", "from here on a step trains on another number of rows"),
    ("recipe train.steps", "note", "the schedule is stretched to the new number of steps"),
    ("recipe train.*", "note", "it changes how the run goes on"),
    ("recipe mesh.*", "note", "the state is redistributed"),
    ("recipe parallel*", "note", "it computes the same in other parts"),
    ("recipe precision.*", "warning", "losses will not be those of the unbroken run"),
    ("recipe checkpoint.*", "note", "it concerns later checkpoints only"),
    ("recipe sinks*", "note", "it does not change training"),
    ("recipe evaluation.*", "note", "it does not change training"),
    ("recipe profile.*", "note", "it does not change training"),
    ("recipe *", "warning", "losses will not be those of the unbroken run"),
    ("world", "note", "tensors are redistributed; random generators of ranks start anew, so the run is not bitwise that of before"),
    ("plugin *", "warning", "it may compute something else"),
    ("kernel *", "warning", "losses may differ by rounding"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One difference. `fatal`: resuming makes no sense unless the user says so. Stability: provisional."""

    what: str
    saved: Any
    now: Any
    level: Level
    why: str

    def __str__(self) -> str:
        return f"{self.what}: was {self.saved!r}, is {self.now!r} ({self.why})"


def compare_facts(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    """Differences between a manifest's facts and a run's, the worst first.

    Both hold, as far as they are known: `recipe` (path to plain value), `plugins` (as `Plugins.facts()` gives them), `kernels` (operator
    to kernel) and `world`. A value that is on one side only is None on the other; of weights that came without a recipe, no recipe is compared, and
    so on. Stability: provisional.
    """
    old, new = _flat(saved), _flat(current)
    found = []
    known = {what.partition(" ")[0] for what in old}
    for what in sorted(old.keys() | new.keys()):
        if what.partition(" ")[0] in known and old.get(what) != new.get(what):
            level, why = next((level, why) for glob, level, why in RULES if fnmatch.fnmatchcase(what, glob))
            found.append(Difference(what, old.get(what), new.get(what), level, why))
    return sorted(found, key=lambda difference: ("fatal", "warning", "note").index(difference.level))


def check_changes(differences: Sequence[Difference], allow_changes: bool, location: str) -> list[str]:
    """What to warn of when a run is resumed. Raises UsageError, with both sides of each, for fatal differences unless they are allowed."""
    fatal = [difference for difference in differences if difference.level == "fatal"]
    if fatal and not allow_changes:
        lines = "\n".join(f"  {difference}" for difference in fatal)
        raise UsageError(
            f"{location} was made by another run than this:\n{lines}\n"
            "Undo the changes, or start a new run. If you know that they are right, say --allow-changes."
        )
    return [f"Resumed with a change: {difference}." for difference in differences if difference.level != "note"]


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    flat = {f"recipe {path}": value for path, value in facts.get("recipe", {}).items()}
    flat |= {f"kernel {op}": kernel for op, kernel in facts.get("kernels", {}).items()}
    flat |= {f"plugin {plugin.get('distribution')}": plugin.get("version") for plugin in facts.get("plugins", [])}
    return flat | ({"world": facts["world"]} if "world" in facts else {})
