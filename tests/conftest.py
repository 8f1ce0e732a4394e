"""What holds for every test of the repository: kernels that it puts in force are out of force after it, the numbers that it draws are the same whatever ran before it,
and no speed is asked of it.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import hypothesis
import pytest

# Of tests with settings of their own these are the rest. A time limit for an example would be one on the machine. Other examples at every run are nightly's.
hypothesis.settings.register_profile(
    "intarsia",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=os.environ.get("INTARSIA_HYPOTHESIS", "") != "thorough",
)
hypothesis.settings.load_profile("intarsia")

_looked_at: dict[str, ModuleType] = {}
_operators: dict[Any, Any] = {}
"""Every operator of an imported module, with the choice that is in force before any is made."""


def operators() -> dict[Any, Any]:
    """The operators that first-party modules have, as far as they are imported: nothing is imported for this, neither torch nor a plugin."""
    home: Any = sys.modules.get("intarsia.ops.operator")
    if home is None:
        return {}
    for name, module in list(sys.modules.items()):
        if name.startswith("intarsia") and _looked_at.get(name) is not module:
            _looked_at[name] = module
            for each in list(vars(module).values()):
                if isinstance(each, home.Operator):
                    _operators.setdefault(each, home.Choice("reference", "nothing was selected"))
    return _operators


@contextlib.contextmanager
def kept_choices() -> Iterator[None]:
    """After the block every operator has the choice that it had before; one whose module is imported in the block has its reference."""
    before = {operator: operator.choice for operator in operators()}
    yield
    for operator, unchosen in operators().items():
        choice = before.get(operator, unchosen)
        if operator.choice is not choice:
            operator.put(choice)


@pytest.fixture(autouse=True, scope="module")
def _choices_of_a_module() -> Iterator[None]:
    """What fixtures of a module put in force is in force for its tests alone."""
    with kept_choices():
        yield


@pytest.fixture(autouse=True)
def _choices_of_a_test(_choices_of_a_module: None) -> Iterator[None]:
    """What a test puts in force (a selection, a trainer that it makes) is in force for it alone."""
    with kept_choices():
        yield


@pytest.fixture(autouse=True)
def _draws_of_a_test() -> None:
    """Random generators of the process begin alike in every test. Neither library is imported for this."""
    random.seed(0)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)
    torch: Any = sys.modules.get("torch.random")
    if torch is not None:
        torch.manual_seed(0)
