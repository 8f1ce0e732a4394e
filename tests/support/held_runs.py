"""Runs that are killed, or whose processes are, in the middle: they stay there until the test is through, however slow either is."""

from __future__ import annotations

from pathlib import Path

PLUGIN = """
import time
from pathlib import Path

from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def after_step(run, summary):
    end = time.monotonic() + 1000
    while summary.step == {step} and not Path({released!r}).exists() and time.monotonic() < end:
        time.sleep(0.02)
"""


def held_after(step: int, folder: Path) -> tuple[str, Path]:
    """What is to be put into PYTHONPATH for a run, on any number of ranks, to stay after it has made `step` steps; and the path that releases it once a file is there."""
    released = folder / "released"
    distribution = folder / "acme_held-1.0.dist-info"
    distribution.mkdir(parents=True)
    (folder / "acme_held.py").write_text(PLUGIN.format(step=step - 1, released=str(released)))
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-held\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text("[intarsia]\nheld = acme_held\n")
    return str(folder), released
