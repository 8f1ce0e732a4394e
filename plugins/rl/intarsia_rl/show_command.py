"""`intarsia rl show RUN`: the rollouts that a run has written. A table of steps, a list of samples by what they have in common, or one sample token by token. Torch-free."""

from __future__ import annotations

import argparse
import collections
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from intarsia.contracts import Boundary
from intarsia.errors import UsageError, did_you_mean
from intarsia.train.events import FILE

from intarsia_rl.controller.writer import FOLDER, files, read

Record = Mapping[str, Any]
BOUNDARIES: tuple[str, ...] = get_args(Boundary)
LIMIT = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's arguments."""
    parser.add_argument("directory", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--step", metavar="N or A:B", help="only of these steps (the first optimizer step is 1)")
    parser.add_argument("--held-out", action="store_true", help="the evaluations' samples, not those of training")
    parser.add_argument("--task", help="only of tasks whose name contains this")
    parser.add_argument("--sample", metavar="ID", help="only this sample, GROUP/MEMBER (held_out/STEP/PLACE with --held-out)")
    parser.add_argument("--status", choices=("kept", "filtered", "failed"), help="only of groups that were trained on, left out, or failed")
    parser.add_argument("--min-reward", type=float, help="only with at least this reward")
    parser.add_argument("--max-reward", type=float, help="only with at most this reward")
    parser.add_argument(
        "--failure", metavar="BOUNDARY", choices=("any", *BOUNDARIES), help=f"only failures at {', '.join(BOUNDARIES)}; any: all of them"
    )
    parser.add_argument("--min-length", type=int, help="only with at least this many generated tokens")
    parser.add_argument("--max-length", type=int, help="only with at most this many generated tokens")
    parser.add_argument("--truncated", action="store_true", help="only what a limit ended")
    parser.add_argument("--limit", type=int, help=f"how many samples to list (default {LIMIT}; 0: all)")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="print the samples token by token: log-probability, version, and its gap to the trainer's",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: the table of steps, or the samples, one a line")


def run(arguments: argparse.Namespace) -> int:
    """Print to standard output."""
    folder: Path = arguments.directory / FOLDER
    if not arguments.directory.is_dir():
        raise UsageError(f"There is no directory {arguments.directory}. A run directory is what `intarsia train` names in its first lines.")
    if not folder.is_dir():
        raise UsageError(
            f"{arguments.directory} has no folder {FOLDER}: it is no run directory, the run has made no step yet, or it does not learn from rollouts "
            "(data.loader=rollouts, keep_rollouts)."
        )
    kind = "held_out" if arguments.held_out else "step"
    if arguments.held_out and arguments.status is not None:
        raise UsageError(
            "--status is of groups that were trained on or left out, and evaluations (--held-out) have none. Use --failure any for what failed there."
        )
    if arguments.limit is not None and arguments.limit < 0:
        raise UsageError(f"--limit is {arguments.limit}; it must be at least 1, or 0 for all.")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    first, last = steps_of(arguments.step)
    wanted = [(number, path) for found, number, path in files(folder) if found == kind and first <= number <= last]
    if not wanted:
        numbers = [number for found, number, _ in files(folder) if found == kind]
        there = f"there are {numbers[0]} to {numbers[-1]}" if numbers else "there are none"
        raise UsageError(f"{folder} has no file {kind}-NUMBER.jsonl of these steps: {there}.")
    records = (record for _, path in wanted for record in with_trained(path))
    if not filtered(arguments):
        rows = [summary(number, list(read(path))) for number, path in wanted]
        add_events(rows, arguments.directory, kind)
        print(json.dumps(rows, indent=2) if arguments.json else "\n".join(table(rows)))
        return 0
    limit = LIMIT if arguments.limit is None else arguments.limit
    shown = count = 0
    for record in records:
        if not matches(record, arguments):
            continue
        count += 1
        if limit and count > limit:
            continue
        shown += 1
        if arguments.json:
            print(json.dumps({**record, "gap": gap_of(record)}))
        else:
            print("\n".join(map(printable, token_lines(record) if arguments.tokens else [one_line(record)])))
    if not count and arguments.sample is not None:
        check_sample(arguments.sample, wanted)
    if not arguments.json:
        print(f"{shown} of {count} samples" + (" (--limit 0 shows all)" if shown < count else ""))
    return 0


def check_sample(wanted: str, paths: Sequence[tuple[int, Path]]) -> None:
    """UsageError where no file has a sample of this id."""
    known = [record["id"] for _, path in paths for record in read(path)]
    if wanted not in known:
        steps = f"step {paths[0][0]}" if len(paths) == 1 else f"steps {paths[0][0]} to {paths[-1][0]}"
        raise UsageError(f"No sample of {steps} has the id {wanted!r}. {did_you_mean(wanted, known)}")


def steps_of(text: str | None) -> tuple[int, int]:
    """The first and last step of `N` or `A:B`, whose sides may be empty."""
    if text is None:
        return 0, sys.maxsize
    low, colon, high = text.partition(":")
    try:
        first = int(low) if low else 0
        return first, (int(high) if high else sys.maxsize) if colon else first
    except ValueError:
        raise UsageError(f"--step {text!r} is no step N and no range A:B.") from None


def filtered(arguments: argparse.Namespace) -> bool:
    """Whether samples are asked for, and not the table of steps."""
    names = ("task", "sample", "status", "min_reward", "max_reward", "failure", "min_length", "max_length", "limit")
    return arguments.truncated or arguments.tokens or any(getattr(arguments, name) is not None for name in names)


def matches(record: Record, arguments: argparse.Namespace) -> bool:
    """Whether a sample is asked for. A sample that failed has no reward and no length."""
    failure, length = record["failure"], length_of(record)
    live = failure is None
    lowest, highest = arguments.min_reward, arguments.max_reward
    return (
        (arguments.task is None or arguments.task in record["task"])
        and (arguments.sample is None or arguments.sample == record["id"])
        and (arguments.status is None or arguments.status == record["status"])
        and (lowest is None or (live and record["reward"] >= lowest))
        and (highest is None or (live and record["reward"] <= highest))
        and (arguments.failure is None or (not live and arguments.failure in ("any", failure["boundary"])))
        and (arguments.min_length is None or (live and length >= arguments.min_length))
        and (arguments.max_length is None or (live and length <= arguments.max_length))
        and (not arguments.truncated or record["truncated"])
    )


# ---------------------------------------------------------------- numbers


def length_of(record: Record) -> int:
    """Generated tokens that count."""
    return sum(segment["trained"].count("1") for segment in record["segments"])


def with_trained(path: Path) -> Iterator[Record]:
    """The samples of a file; `trained_log_probs` are the trainer's, for each segment one of each trained token, None where they were not written."""
    beside = path.with_name(path.name.replace("step-", "trained-"))
    found = {(line["id"], line["segment"]): line["log_probs"] for line in read(beside)} if beside != path and beside.exists() else {}
    for record in read(path):
        yield {**record, "trained_log_probs": [found.get((record["id"], place)) for place in range(len(record["segments"]))]}


def gap_of(record: Record) -> float | None:
    """The largest difference in log-probability, by absolute value, between trainer and generator; None where it is not known. It is theirs alone where both had the same weights (lag 0);
    else most of it is the difference of the weights."""
    gaps = [gap for segment in range(len(record["segments"])) for gap in gaps_of(record, segment) if gap is not None]
    return max(map(abs, gaps), default=None)


def gaps_of(record: Record, number: int) -> list[float | None]:
    """For each token of a segment the trainer's log-probability less the one that it was generated with; None where there is none."""
    segment, values = record["segments"][number], record.get("trained_log_probs") or []
    trained = [place for place, mark in enumerate(segment["trained"]) if mark == "1"]
    gaps: list[float | None] = [None] * len(segment["tokens"])
    if number < len(values) and values[number] is not None and len(values[number]) == len(trained):
        for place, value in zip(trained, values[number], strict=True):
            gaps[place] = value - segment["log_probs"][place]
    return gaps


def summary(number: int, records: Sequence[Record]) -> dict[str, Any]:
    """A step in numbers."""
    live = [record for record in records if record["failure"] is None]
    lengths = [length_of(record) for record in live]
    lags = [record["lag"] for record in live if "lag" in record]
    return {
        "step": number,
        "samples": len(records),
        "reward": statistics.fmean(record["reward"] for record in live) if live else None,
        "length": statistics.fmean(lengths) if lengths else None,
        "longest": max(lengths, default=0),
        "truncated": sum(record["truncated"] for record in live),
        "filtered": sum(record["status"] == "filtered" for record in records),
        "failures": dict(sorted(collections.Counter(record["failure"]["boundary"] for record in records if record["failure"]).items())),
        "lag": max(lags, default=None),
    }


def add_events(rows: Sequence[dict[str, Any]], directory: Path, kind: str) -> None:
    """Put what the run's events say of each step beside it: the gap between trainer and generator, idle shares and kills. Of a step that was done again the last."""
    found: dict[int, Record] = {}
    path = directory / FILE
    if kind == "step" and path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and event.get("event") == "rollouts":
                found[event["step"]] = event
    for row in rows:
        event = found.get(row["step"], {})
        row |= {name: event.get(name) for name in ("gap", "idle", "kills")}


# ---------------------------------------------------------------- text


def table(rows: Sequence[Record]) -> Iterator[str]:
    """The steps, one a line."""
    yield f"{'step':>6} {'reward':>8} {'samples':>8} {'length':>8} {'longest':>8} {'cut':>5} {'filtered':>9} {'failed':>7} {'lag':>4} {'gap':>10} {'idle t/g':>10}"
    for row in rows:
        idle = row.get("idle") or {}
        sides = "/".join(
            f"{100 * value:.0f}%" if isinstance(value, float) else "-" for value in (idle.get("trainer"), idle.get("generators"))
        )
        yield (
            f"{row['step']:>6} {number(row['reward'], 4):>8} {row['samples']:>8} {number(row['length'], 1):>8} {row['longest']:>8} {row['truncated']:>5} "
            f"{row['filtered']:>9} {sum(row['failures'].values()):>7} {'-' if row['lag'] is None else row['lag']:>4} {gap_text(row.get('gap')):>10} {sides:>10}"
        )


def number(value: float | None, digits: int) -> str:
    """A number, or a dash."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def gap_text(gap: float | None) -> str:
    """A gap; exactly none is 0.0."""
    return "-" if gap is None else "0.0" if gap == 0 else f"{gap:.1e}"


def one_line(record: Record) -> str:
    """A sample in one line."""
    head = f"{record['step']:>6} {record['id']:>10} {record['task']}"
    if record["failure"]:
        failure = record["failure"]
        return f"{head}  FAILED at {failure['boundary']} after {failure['attempts']} attempts: {failure['message']}"
    parts = " ".join(f"{name} {value:g}" for name, value in record["rewards"].items())
    said = " | ".join(text_of(turn) for turn in record["turns"] if turn["role"] == "assistant")
    marks = ("cut " if record["truncated"] else "") + (f"lag {record['lag']} " if "lag" in record else "")
    gap, length = gap_of(record), length_of(record)
    apart = "" if gap is None else f"{apart_name(record)} {gap_text(gap)} "
    return f"{head}  reward {record['reward']:g} ({parts})  {length} token{'' if length == 1 else 's'} {marks}{apart} {short(said)}"


def apart_name(record: Record) -> str:
    """What the difference to the trainer's log-probabilities is called: the gap of a step is taken under equal weights, of a sample with lag most is what the weights moved."""
    return "moved" if record.get("lag") else "gap"


def text_of(turn: Record) -> str:
    """What a turn says, calls of tools included."""
    content = (
        turn["content"]
        if isinstance(turn["content"], str)
        else "".join(part if isinstance(part, str) else f"[{part['kind']}]" for part in turn["content"])
    )
    calls = "".join(f" {call['name']}({call['arguments']})" for call in turn.get("tool_calls", ()))
    return content + calls


def printable(text: str) -> str:
    """The text in one line: what a terminal would obey, and halves of surrogate pairs, as their escapes."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def short(text: str, most: int = 100) -> str:
    """The text in one line, cut."""
    line = json.dumps(text, ensure_ascii=False)[1:-1]
    return line if len(line) <= most else f"{line[: most - 3]}..."


def token_lines(record: Record) -> Iterator[str]:
    """A sample whole: its turns, then its segments token by token."""
    yield one_line(record)
    for turn in record["turns"]:
        actor = f" ({turn['actor']})" if "actor" in turn else ""
        yield f"    {turn['role']}{actor}: {short(text_of(turn), 2000)}"
    for place, segment in enumerate(record["segments"]):
        yield f"    segment {place} of {segment['actor']}, {len(segment['tokens'])} tokens"
        yield f"    {'place':>7} {'id':>8} {'log-prob':>12} {'version':>8} {apart_name(record):>10}"
        rows = zip(segment["tokens"], segment["trained"], segment["log_probs"], segment["versions"], gaps_of(record, place), strict=True)
        for at, (token, trained, log_prob, version, gap) in enumerate(rows):
            if trained == "1":
                yield f"    {at:>7} {token:>8} {log_prob:>12.6f} {version:>8} {gap_text(gap):>10}"
            else:
                yield f"    {at:>7} {token:>8}"
