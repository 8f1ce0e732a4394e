"""Progress: one live line on a terminal, plain lines elsewhere. Torch-free."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from intarsia_console.config import ProgressConfig

UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(value: float) -> str:
    """A number with three digits and a unit letter: 12.3k."""
    for size, letter in UNITS:
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """1:02:03, or 02:03."""
    minutes, rest = divmod(max(0, math.ceil(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def step_line(event: Mapping[str, Any], steps: int, remaining_s: float | None, rollouts: Mapping[str, Any] | None = None) -> str:
    """One step event in words; `rollouts` is the event of that name of the same step, where there is one."""
    parts = [f"step {event['step']}/{steps}", *([] if rollouts is None else rollout_words(rollouts))]
    parts += [f"loss {event['loss']:.4f}", f"norm {event['gradient_norm']:.3g}", f"lr {event['learning_rate']:.3g}"]
    parts += [] if rollouts is None else policy_words(event.get("metrics") or {}, rollouts)
    parts.append(f"{short(event['tokens_per_s'])} tok/s")
    if event.get("mfu") is not None:
        parts.append(f"MFU {event['mfu']:.1%}")
    if event.get("memory_bytes"):
        parts.append(f"mem {short(event['memory_bytes'])}B")
    if remaining_s is not None:
        parts.append(f"ETA {clock(remaining_s)}")
    return "  ".join(parts)


def rollout_words(event: Mapping[str, Any]) -> list[str]:
    """What is shown of a `rollouts` event: mean reward, largest lag, the gap between trainer and generator, and the share of time that trainer and generators waited."""
    idle = event.get("idle") or {}
    numbers = {"reward": event.get("reward"), "lag": (event.get("lag") or {}).get("max"), "gap": event.get("gap")}
    words = [f"{name} {value:.2g}" for name, value in numbers.items() if value is not None]
    shares = [idle.get(side) for side in ("trainer", "generators")]
    return words + ([f"idle {shares[0]:.0%}/{shares[1]:.0%}"] if None not in shares else [])


def policy_words(metrics: Mapping[str, Any], rollouts: Mapping[str, Any]) -> list[str]:
    """What is shown of a policy: tokens of a try in the mean, entropy in nats, divergence of the generating policy, share of tokens whose ratio is clipped; and failures and processes that died,
    where there are any."""
    numbers = {"length": (rollouts.get("length") or {}).get("mean"), "entropy": metrics.get("entropy"), "kl": metrics.get("kl")}
    words = [f"{name} {value:.3g}" for name, value in numbers.items() if value is not None]
    if metrics.get("clip_share") is not None:
        words.append(f"clip {metrics['clip_share']:.1%}")
    counts = {"failed": rollouts.get("failures") or {}, "killed": rollouts.get("kills") or {}}
    return words + [f"{name} {sum(each.values())}" for name, each in counts.items() if any(each.values())]


class Progress:
    """The `progress` entry: an `intarsia.contracts.MetricSink`."""

    def __init__(self, line_s: float = 1.0, stream: TextIO | None = None):
        self._line_s = line_s
        self._steps = 0
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._start: tuple[int, float] | None = None
        self._last = 0.0
        self._open = False
        self._rollouts: Mapping[str, Any] | None = None

    def write(self, event: Mapping[str, Any]) -> None:
        """Show one event."""
        kind = event["event"]
        if kind == "run_start":
            self._steps = event["steps"]
            self.line(f"run directory {event['directory']}")
        elif kind == "step":
            self._step(event)
        elif kind == "rollouts":
            self._rollouts = event
        elif kind == "held_out":
            reward = "none" if event.get("reward") is None else f"{event['reward']:.4f}"
            self.line(f"held out after step {event['step']}  reward {reward}")
        elif kind == "evaluation":
            bits = f"  bits/byte {event['bits_per_byte']:.4f}" if event.get("bits_per_byte") is not None else ""
            self.line(f"evaluation after step {event['step']}  loss {event['loss']:.4f}{bits}")
        elif kind == "checkpoint":
            self.line(f"checkpoint after step {event['step']}  {event['location']}")
        elif kind == "resume":
            self.line(f"resumed after step {event['step']} from {event['location']}")
        elif kind == "warning":
            self.line(f"warning: {event['message']}")

    def _step(self, event: Mapping[str, Any]) -> None:
        now, step = time.monotonic(), int(event["step"])
        if self._start is None:
            self._start = (step, now)
        first, since = self._start
        remaining = (self._steps - step) * (now - since) / (step - first) if step > first else None
        line = step_line(event, self._steps, remaining, self._rollouts)
        if self._live:
            width = shutil.get_terminal_size().columns
            full = round(20 * step / max(1, self._steps))
            self._stream.write("\r\x1b[K" + f"[{'=' * full}{' ' * (20 - full)}] {line}"[: width - 1])
            self._stream.flush()
            self._open = True
        elif step == first or step == self._steps or now - self._last >= self._line_s:
            self._last = now
            self.line(line)

    def line(self, text: str) -> None:
        """A line of its own above the live one."""
        if self._open:
            self._stream.write("\n")
            self._open = False
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the cursor on a line of its own."""
        if self._open:
            self._stream.write("\n")
            self._open = False


def build(config: ProgressConfig, run_directory: Path) -> Progress:
    """The entry's target."""
    return Progress(config.line_s)
