"""What the page on transports shows runs, and its table is the contract."""

from __future__ import annotations

import re
from pathlib import Path

from intarsia.contracts import Transport

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "transports.md").read_text(encoding="utf-8")


def test_snippets_run() -> None:
    found = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(found) == 3
    for code in found:
        exec(compile(code, "transports.md", "exec"), {})


def test_each_member_of_the_contract_is_on_the_page() -> None:
    members = {name for name in (*Transport.__annotations__, *vars(Transport)) if not name.startswith("_")}
    shown = set(re.findall(r"^\| `(\w+)[`(]", PAGE.partition("## Write one")[2], re.MULTILINE))
    assert shown == members
