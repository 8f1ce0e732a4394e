"""The kit's pytest plugin: what is tested stands at the top of the report."""

from __future__ import annotations


def pytest_report_header() -> list[str]:
    """The plugins that are loaded, and those that failed: a conformance run says what it was run against."""
    from intarsia.plugins import current

    plugins = current()
    loaded = ", ".join(f"{name} {version}" for name, version in plugins.versions().items())
    report = plugins.report()
    return [f"intarsia plugins: {loaded}", *([report] if report else [])]
