"""The kit's pytest plugin: after a conformance run it says how many promises each entry keeps, which are broken, and what is left to write; after a parity run how far a family is from its reference.

It imports nothing but pytest until a conformance class is collected, and adds nothing to the report of a run without one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import pytest

from intarsia_testing.parity_table import PARITY, parity_table

TESTED = "intarsia_conformance"
"""The marker of every conformance test, and the name under which a report carries what it examined."""

UNWRITTEN = "intarsia_unwritten"
"""The name under which a report carries what a scaffold has left to write."""

pytest.register_assert_rewrite(
    *(
        f"intarsia_testing.{name}"
        for name in (
            "base",
            "checkpoint_backend",
            "data_source",
            "environment",
            "generator",
            "generator_case",
            "kernel",
            "model",
            "optimizer",
            "parity",
            "parity_greedy",
            "parity_layers",
            "parity_samples",
            "placement",
            "storage",
            "transport",
            "transport_promises",
        )
    )
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", f"{TESTED}: one promise of a contract, examined by intarsia-testing (added by itself).")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark conformance tests, and let their reports carry what they examine, from worker processes too."""
    for item in items:
        examined: Any = getattr(item, "cls", None)
        kind = getattr(examined, "kind", None)
        if isinstance(kind, str) and hasattr(examined, "found_entry"):
            item.add_marker(TESTED)
            operator = getattr(examined, "op", "")
            entry = getattr(examined, "entry", "")
            named = f"{entry} ({examined.__name__})" if entry else examined.__name__
            item.user_properties.append((TESTED, (item.nodeid.rpartition("::")[0], " ".join(filter(None, (kind, operator, named))))))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, None]:
    """Note what is left to write: the NotImplementedError that a failure comes from, directly or wrapped in the kit's own words."""
    outcome = yield
    if call.excinfo is not None and item.get_closest_marker(TESTED):
        unwritten = unwritten_of(call.excinfo.value)
        if unwritten:
            outcome.get_result().user_properties.append((UNWRITTEN, unwritten))


def unwritten_of(error: BaseException | None) -> str:
    """The message of the NotImplementedError among an error's causes and contexts; empty when there is none."""
    while error is not None:
        if isinstance(error, NotImplementedError):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table of parity, and the conformance report: entry by entry, and each broken promise in a sentence."""
    # Deselected tests are listed among the reports as items: they were not examined.
    everything = [report for reports in terminalreporter.stats.values() for report in reports if isinstance(report, pytest.TestReport)]
    calls = sorted((report for report in everything if report.when == "call"), key=lambda report: report.nodeid.partition("::")[0])
    found: list[Any] = [value for report in calls for name, value in report.user_properties if name == PARITY]
    table = parity_table(found)
    if table:
        terminalreporter.section("intarsia parity")
        for line in table:
            terminalreporter.write_line(line)
    lines = conformance_report(everything)
    if not lines:
        return
    terminalreporter.section("intarsia conformance")
    for line in lines:
        terminalreporter.write_line(line)
    if any(terminalreporter.stats.get(outcome) for outcome in ("failed", "error")):
        from intarsia.plugins import current

        # A plugin that did not load is the likeliest reason why an entry is missing.
        terminalreporter.write_line(current().report())


def conformance_report(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Lines for each examined class: how many promises are kept, which are broken and why, what is left to write, what could not be examined here."""
    found: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for report in reports:
        properties = dict(report.user_properties)
        if TESTED not in properties or (report.when != "call" and report.outcome == "passed"):
            continue
        outcomes = found.setdefault(tuple(properties[TESTED]), {"passed": [], "failed": [], "skipped": []})  # type: ignore[arg-type]
        outcomes[report.outcome].append(report)
    lines: list[str] = []
    for (_, subject), outcomes in found.items():
        kept, failed, skipped = outcomes["passed"], outcomes["failed"], outcomes["skipped"]
        lines.append(f"{subject} keeps {len(kept)} of {len(kept) + len(failed) + len(skipped)} promises{':' if failed or skipped else '.'}")
        unwritten: dict[str, int] = {}
        for report in failed:
            text = dict(report.user_properties).get(UNWRITTEN)
            if text:
                unwritten[text] = unwritten.get(text, 0) + 1
            else:
                lines.append(f"  broken   {name_of(report)}: {sentence_of(report)}")
        for text, count in unwritten.items():
            lines.append(f"  to write {text.removeprefix('write ')} ({count} promise{'s' if count > 1 else ''})")
        for report in skipped:
            reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            lines.append(f"  not here {name_of(report)}: {str(reason).removeprefix('Skipped: ')}")
    return lines


def name_of(report: Any) -> str:
    """The test's name, in words."""
    return report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")


def sentence_of(report: Any) -> str:
    """What the kit said; for any other error its last line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (crash.message if crash is not None else str(report.longrepr)).strip()
    text = text.removeprefix("Failed: ")
    return text.splitlines()[0] if text else "it failed without a word."
