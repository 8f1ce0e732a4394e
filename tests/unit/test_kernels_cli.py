"""`intarsia kernels` answers mistakes with what was meant."""

from __future__ import annotations

import pytest
from intarsia.cli import main


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("check", "sdpa", "--op", "atention"), "There is no operator 'atention'. Did you mean 'attention'"),
        (("check", "spda", "--op", "attention"), "unknown kernel 'spda'. Did you mean 'sdpa'?"),
        (("bench", "atention"), "There is no operator 'atention'. Did you mean 'attention'"),
    ],
)
def test_misspelt_names_are_named_with_the_nearest(words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", *words]) == 2
    assert text in capsys.readouterr().err
