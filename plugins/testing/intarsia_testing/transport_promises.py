"""What a transport promises, each promise a function of a transport and the communicator of one rank. Every rank runs it; a broken one is said in words.

`examine` runs all of them, in threads (`intarsia_testing.communicator.run_ranks`) or in processes (`intarsia_testing.transport`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_testing.promise import broken, keep

DTYPES = (torch.bfloat16, torch.uint8, torch.float32)

Notes = list[str]
"""What is wrong on this rank. Noted and not raised where other ranks may find nothing wrong: they would wait for this one in the next collective."""


def counts_of(size: int) -> dict[str, list[int]]:
    """How many elements each rank has, in the cases that transports get wrong."""
    return {
        "even": [96] * size,
        "uneven": [(rank * 37 + 5) % 101 for rank in range(size)],
        "nothing on the last rank": [64] * (size - 1) + [0],
        "all on the last rank": [0] * (size - 1) + [33],
        "nothing at all": [0] * size,
    }


def values(count: int, rank: int, turn: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What rank `rank` holds in a turn: whole numbers below 128, which every dtype holds exactly."""
    return ((torch.arange(count, device=device) * 7 + rank * 31 + turn * 13) % 127).to(dtype)


def expected(counts: Sequence[int], turn: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a gather of everybody's `values` gives."""
    return torch.cat([values(count, rank, turn, dtype, device) for rank, count in enumerate(counts)])


def pause(comm: Communicator) -> None:
    """Let this rank's device (on a CPU: this rank) be late."""
    if comm.device.type == "cuda":
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    else:
        time.sleep(0.15)


def gather(transport: Any, comm: Communicator, local: Tensor, full: Tensor, counts: Sequence[int], promise: str, what: str) -> Any:
    """The prepared gather of memory that the transport gave."""
    prepared = transport.prepare_gather(comm, local, full, list(counts), what)
    keep(promise, prepared is not None, f"prepare_gather gives None for {what}, though every rank's part lies in memory from empty().")
    return prepared


def run(prepared: Any, *arguments: Any) -> None:
    """One run to its end."""
    prepared.start(*arguments)
    prepared.wait()


# ---------------------------------------------------------------- the promises


def serves(transport: Any, comm: Communicator, notes: Notes) -> None:
    """It has a name, and serves this group."""
    keep("names itself", isinstance(transport.name, str) and transport.name, f"name is {transport.name!r}; messages and recipes need one.")
    try:
        transport.check(comm)
    except UsageError as error:
        broken("serves", f"check() refuses a group of {comm.size} on {comm.device}: {error}")


def serves_one(transport: Any, comm: Communicator, notes: Notes) -> None:
    """In a group of one there is nothing to move, and a recipe that names the transport still runs."""
    alone = SelfCommunicator(comm.device)
    try:
        transport.check(alone)
        memory = transport.empty(alone, 5, torch.float32)
        transport.fence(alone)
        prepared = transport.prepare_gather(alone, memory.fill_(3), torch.zeros_like(memory), [5], "alone")
    except Exception as error:
        broken("serves one process", f"in a group of one it raises {type(error).__name__}: {error}")
    keep("serves one process", memory.shape == (5,) and memory.dtype == torch.float32, f"empty(5, float32) is {described(memory)}.")
    if prepared is not None:
        run(prepared)


def gives_memory(transport: Any, comm: Communicator, notes: Notes) -> None:
    """Memory of each rank's own size, writable, which overlaps nothing; what it takes of the device is counted."""
    before, given = transport.bytes_allocated, []
    for dtype in (*DTYPES, torch.int16):
        for case, counts in counts_of(comm.size).items():
            memory = transport.empty(comm, counts[comm.rank], dtype)
            right = memory.shape == (counts[comm.rank],) and memory.dtype == dtype and memory.is_contiguous()
            note(notes, "gives memory", right, f"{case}: empty({counts[comm.rank]}, {dtype}) is {described(memory)}.")
            note(
                notes,
                "gives memory",
                memory.device.type == comm.device.type,
                f"memory is on {memory.device}, the communicator on {comm.device}.",
            )
            given.append(memory)
    for number, memory in enumerate(given):
        memory.fill_(number)
    for number, memory in enumerate(given):
        note(notes, "memory is its own", bool((memory == number).all()), "writing to one tensor from empty() changes another.")
    taken = transport.bytes_allocated
    note(notes, "counts its memory", isinstance(taken, int) and taken >= before >= 0, f"bytes_allocated went from {before!r} to {taken!r}.")


def gathers(transport: Any, comm: Communicator, notes: Notes) -> None:
    """All ranks' parts in rank order, at their true sizes, and nothing else is written."""
    for dtype in DTYPES:
        for case, counts in counts_of(comm.size).items():
            local = transport.empty(comm, counts[comm.rank], dtype)
            guarded = torch.full((sum(counts) + 16,), 99, dtype=dtype, device=comm.device)
            prepared = gather(transport, comm, local, guarded[8:-8], counts, "gathers", f"{case}, {dtype}")
            moved = (sum(counts) - counts[comm.rank]) * local.element_size()
            note(notes, "counts true bytes", prepared.bytes == moved, f"{case}: bytes is {prepared.bytes}, and {moved} are received.")
            local.copy_(values(local.numel(), comm.rank, 0, dtype, comm.device))
            transport.fence(comm)
            run(prepared)
            same(notes, "gathers", guarded[8:-8], expected(counts, 0, dtype, comm.device), f"{case}, {dtype}")
            edges = torch.cat([guarded[:8], guarded[-8:]])
            note(
                notes, "writes nothing else", bool((edges == 99).all()), f"{case}, {dtype}: elements before or behind `full` were written."
            )
            transport.fence(comm)


def gathers_pieces(transport: Any, comm: Communicator, notes: Notes) -> None:
    """Any piece of memory from empty() can be gathered, at another place on each rank."""
    memory, counts = transport.empty(comm, 300, torch.bfloat16), [20 + 3 * rank for rank in range(comm.size)]
    begin = 17 * comm.rank + 1
    local, full = memory[begin : begin + counts[comm.rank]], torch.zeros(sum(counts), dtype=torch.bfloat16, device=comm.device)
    prepared = gather(transport, comm, local, full, counts, "gathers pieces", "pieces")
    local.copy_(values(local.numel(), comm.rank, 1, torch.bfloat16, comm.device))
    transport.fence(comm)
    run(prepared)
    same(notes, "gathers pieces", full, expected(counts, 1, torch.bfloat16, comm.device), "pieces at different places")
    transport.fence(comm)


def gathers_in_place(transport: Any, comm: Communicator, notes: Notes) -> None:
    """`local` may be `full`'s own part."""
    counts = counts_of(comm.size)["uneven"]
    full = transport.empty(comm, sum(counts), torch.float32)
    local = full.split(counts)[comm.rank]
    prepared = gather(transport, comm, local, full, counts, "gathers in place", "in place")
    full.fill_(-1)
    local.copy_(values(local.numel(), comm.rank, 2, torch.float32, comm.device))
    transport.fence(comm)
    run(prepared)
    same(notes, "gathers in place", full, expected(counts, 2, torch.float32, comm.device), "in place")
    transport.fence(comm)


def fence_orders_writes(transport: Any, comm: Communicator, notes: Notes) -> None:
    """What a rank wrote before its fence is what others read after theirs, also when that rank is late."""
    counts = [40] * comm.size
    local = transport.empty(comm, 40, torch.float32)
    full = torch.zeros(sum(counts), dtype=torch.float32, device=comm.device)
    prepared = gather(transport, comm, local, full, counts, "fence orders writes", "under fence")
    for turn in range(2 * comm.size):
        if turn % comm.size == comm.rank:
            pause(comm)
        local.copy_(values(40, comm.rank, turn, torch.float32, comm.device))
        transport.fence(comm)
        run(prepared)
        same(
            notes,
            "fence orders writes",
            full,
            expected(counts, turn, torch.float32, comm.device),
            f"turn {turn}, rank {turn % comm.size} late",
        )
        transport.fence(comm)


def fence_orders_reads(transport: Any, comm: Communicator, notes: Notes) -> None:
    """What a rank gathers before its fence is not yet changed by others, though they go ahead."""
    counts = [40] * comm.size
    local = transport.empty(comm, 40, torch.float32)
    full = torch.zeros(sum(counts), dtype=torch.float32, device=comm.device)
    prepared = gather(transport, comm, local, full, counts, "fence orders reads", "under fence")
    for late in range(comm.size):
        local.copy_(values(40, comm.rank, late, torch.float32, comm.device))
        transport.fence(comm)
        if late == comm.rank:
            pause(comm)
        run(prepared)
        transport.fence(comm)
        local.fill_(-1)
        same(
            notes, "fence orders reads", full, expected(counts, late, torch.float32, comm.device), f"rank {late} late, the others overwrote"
        )
        transport.fence(comm)


def agrees_on_other_memory(transport: Any, comm: Communicator, notes: Notes) -> None:
    """Memory of other origin is gathered right or left to the process group, by all ranks alike, also when only one rank has some."""
    counts = [12] * comm.size
    for case, foreign in (("on every rank", range(comm.size)), ("on rank 0 alone", range(1))):
        given = transport.empty(comm, 12, torch.float32)
        local = torch.empty(12, dtype=torch.float32, device=comm.device) if comm.rank in foreign else given
        full = torch.zeros(sum(counts), dtype=torch.float32, device=comm.device)
        prepared = transport.prepare_gather(comm, local, full, counts, "foreign")
        answers = comm.gather_json(prepared is None, "answers")
        keep("agrees", len(set(answers)) == 1, f"memory of other origin {case}: prepare_gather gives None on some ranks only ({answers}).")
        if prepared is not None:
            local.copy_(values(12, comm.rank, 3, torch.float32, comm.device))
            transport.fence(comm)
            run(prepared)
            same(notes, "gathers", full, expected(counts, 3, torch.float32, comm.device), f"memory of other origin {case}")


def reduces(transport: Any, comm: Communicator, notes: Notes) -> None:
    """Contributions come in rank order and true sizes, run after run, and the buffer may be filled again at once. None everywhere is fine."""
    for case, counts in counts_of(comm.size).items():
        full = transport.empty(comm, sum(counts), torch.bfloat16)
        seen: list[list[int]] = []

        def combine(parts: Sequence[Tensor], out: Tensor, seen: list[list[int]] = seen) -> None:
            seen.append([part.numel() for part in parts])
            out.zero_()
            for place, part in enumerate(parts):
                out.add_(part.to(out.dtype) * (place + 1))

        prepared = transport.prepare_reduce_scatter(comm, full, counts, case, combine, None)
        answers = comm.gather_json(prepared is None, "answers")
        keep("agrees", len(set(answers)) == 1, f"{case}: prepare_reduce_scatter gives None on some ranks only ({answers}).")
        if prepared is None:
            continue
        begin, count = sum(counts[: comm.rank]), counts[comm.rank]
        for turn in range(comm.size + 1):
            if turn == comm.rank:
                pause(comm)
            full.copy_(values(sum(counts), comm.rank, turn, torch.bfloat16, comm.device))
            out = torch.full((count,), float("nan"), device=comm.device)
            run(prepared, out)
            # The buffer is free once the run is over: a rank that goes ahead must not change what others still fetch.
            full.fill_(-1)
            wanted = sum(
                (rank + 1) * values(sum(counts), rank, turn, torch.float32, comm.device)[begin : begin + count] for rank in range(comm.size)
            )
            assert isinstance(wanted, Tensor)
            same(notes, "reduces", out, wanted, f"{case}, run {turn}")
        note(
            notes, "reduces", all(sizes == [count] * comm.size for sizes in seen), f"{case}: combine was given parts of {seen[0]} elements."
        )


def serves_communicators(transport: Any, comm: Communicator, notes: Notes) -> None:
    """A communicator that it was given to uses it, and counts what it moves."""
    given, counts = comm.duplicate("with a transport", transport), counts_of(comm.size)["uneven"]
    local = given.empty(counts[comm.rank], torch.float32)
    full = torch.zeros(sum(counts), dtype=torch.float32, device=comm.device)
    prepared = given.prepare_gather(local, full, counts, "unshard")
    for turn in range(2):
        local.copy_(values(local.numel(), comm.rank, turn, torch.float32, comm.device))
        given.fence()
        run(prepared)
        same(notes, "serves communicators", full, expected(counts, turn, torch.float32, comm.device), f"run {turn}")
        given.fence()
    counted, moved = given.stats()["unshard"], 8 * (sum(counts) - counts[comm.rank])
    note(
        notes,
        "serves communicators",
        (counted.calls, counted.bytes) == (2, moved),
        f"two runs are counted as {counted.calls} calls of {counted.bytes} bytes in all, not as 2 calls of {moved}: call begin() in start().",
    )


def can_be_captured(transport: Any, comm: Communicator, notes: Notes) -> None:
    """Fences and gathers can be captured into a CUDA graph, which reads what is there when it is replayed. On CPU there is nothing to capture."""
    if comm.device.type != "cuda":
        return
    counts = counts_of(comm.size)["uneven"]
    local = transport.empty(comm, counts[comm.rank], torch.float32)
    full = torch.zeros(sum(counts), dtype=torch.float32, device=comm.device)
    prepared = gather(transport, comm, local, full, counts, "can be captured", "captured")
    transport.fence(comm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        transport.fence(comm)
        run(prepared)
        transport.fence(comm)
    for turn in range(comm.size + 1):
        if turn == comm.rank:
            pause(comm)
        local.copy_(values(local.numel(), comm.rank, turn, torch.float32, comm.device))
        graph.replay()
        same(notes, "can be captured", full, expected(counts, turn, torch.float32, comm.device), f"replay {turn}")


PROMISES: tuple[Callable[[Any, Communicator, Notes], None], ...] = (
    serves,
    serves_one,
    gives_memory,
    gathers,
    gathers_pieces,
    gathers_in_place,
    fence_orders_writes,
    fence_orders_reads,
    agrees_on_other_memory,
    reduces,
    serves_communicators,
    can_be_captured,
)


def examine(transport: Any, comm: Communicator, only: Sequence[str] = ()) -> Iterator[tuple[str, str | None]]:
    """The name of each promise (of those in `only`, if any), and how it is broken on some rank, in words; None when it is kept. Every rank iterates to
    the end, and is told the same. Ends early where the transport refuses the group, or ranks have
    parted."""
    for promise in PROMISES:
        if only and promise.__name__ not in only:
            continue
        notes: Notes = []
        try:
            promise(transport, comm, notes)
        except pytest.fail.Exception as error:
            notes.append(str(error))
        except Exception as error:
            notes.append(f"promise `{promise.__name__}` is broken: {type(error).__name__}: {error}")
        name = promise.__name__
        answers = comm.gather_json({"after": name, "notes": notes[:1]}, f"after {name}")
        if any(not isinstance(each, dict) or each.get("after") != name for each in answers):
            yield name, notes[0] if notes else f"promise `{name}` is broken: another rank raised an error in the middle of it."
            return
        problems = [each["notes"][0] for each in answers if each["notes"]]
        yield name, problems[0] if problems else None
        if problems and promise is serves:
            return


def note(notes: Notes, promise: str, kept: object, sentence: str) -> None:
    """Note that a promise is broken, unless `kept`."""
    if not kept:
        notes.append(f"promise `{promise}` is broken: {sentence}")


def same(notes: Notes, promise: str, found: Tensor, wanted: Tensor, case: str) -> None:
    """Note unless bitwise equal."""
    if not torch.equal(found, wanted):
        place = int((found != wanted).nonzero()[0])
        note(notes, promise, False, f"{case}: element {place} of {wanted.numel()} is {found[place].item()}, not {wanted[place].item()}.")


def described(tensor: Tensor) -> str:
    """A tensor in few words."""
    return f"a {'' if tensor.is_contiguous() else 'non-contiguous '}{tensor.dtype} of shape {tuple(tensor.shape)}"
