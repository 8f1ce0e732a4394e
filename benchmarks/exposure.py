"""Communication that nothing hides, from the spans of a trace. Torch-free."""

from __future__ import annotations


def exposure(spans: list[tuple[float, float, bool]]) -> dict[str, float]:
    """Time by what runs: compute alone, both, communication alone (exposed), nothing; of (begin, end, is communication). In the spans' unit."""
    points = sorted([(begin, 1, kind) for begin, _, kind in spans] + [(end, -1, kind) for _, end, kind in spans])
    running = {False: 0, True: 0}
    total = {"compute_only": 0.0, "both": 0.0, "exposed": 0.0, "idle": 0.0}
    last = points[0][0] if points else 0.0
    for moment, change, kind in points:
        compute, moving = running[False] > 0, running[True] > 0
        what = "both" if compute and moving else "compute_only" if compute else "exposed" if moving else "idle"
        total[what] += moment - last
        last = moment
        running[kind] += change
    return total
