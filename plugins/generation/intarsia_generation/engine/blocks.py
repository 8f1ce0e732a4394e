"""Which block of the caches holds what. Torch-free.

A block holds the entries of `size` consecutive tokens of one sequence, in every cache of the model at once. Full blocks have a name: a digest of the weights' version and of all tokens up to the
block's end, and of the images and video in them, so that equal names mean equal content. Blocks of a name are shared and never written again; a block that is not full belongs to one request.
"""

from __future__ import annotations

import array
import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


def root(version: int) -> bytes:
    """The name of nothing at all under the weights of a version: what names of first blocks are made from."""
    return hashlib.sha256(f"weights {version}".encode()).digest()


def name_of(parent: bytes, tokens: Sequence[int], shown: bytes = b"") -> bytes:
    """The name of a full block of these tokens, behind the block or root `parent`; `shown` says which images and video stand in it, and where."""
    return hashlib.sha256(parent + array.array("q", tokens).tobytes() + shown).digest()


class BlockPool:
    """Hands out block numbers 1 to `count`; number 0 is never anyone's (tables of block numbers are filled up with it).

    A block is referred to by a number of requests; with none it is free. A free block that has a name keeps its content until it is needed: the one that was released
    longest ago goes first.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._blank: deque[int] = deque(range(1, count + 1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._users = [0] * (count + 1)
        self._names: dict[int, bytes] = {}
        self._found: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that could be taken now."""
        return len(self._blank) + len(self._kept)

    @property
    def used(self) -> int:
        """Blocks that requests refer to."""
        return self.count - self.available

    @property
    def named(self) -> int:
        """Blocks that have a name."""
        return len(self._names)

    def take(self) -> int | None:
        """A block of one's own, without a name; None where all are in use."""
        if self._blank:
            block = self._blank.popleft()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            self._unname(block)
        else:
            return None
        self._users[block] = 1
        return block

    def find(self, name: bytes) -> int | None:
        """The block of a name, which may be shared by `share`."""
        return self._found.get(name)

    def is_free(self, block: int) -> bool:
        """Whether no request refers to it."""
        return self._users[block] == 0

    def share(self, block: int) -> None:
        """One more request refers to a block."""
        self._users[block] += 1
        self._kept.pop(block, None)

    def name(self, block: int, name: bytes) -> None:
        """Say what a block of one's own holds, now that it is full. Where another block has that name this one stays without."""
        if name not in self._found and block not in self._names:
            self._found[name], self._names[block] = block, name

    def release(self, blocks: Iterable[int]) -> None:
        """One request less refers to each. Given in a sequence's order: its end is forgotten before its beginning, without which it could not be found."""
        for block in reversed(list(blocks)):
            self._users[block] -= 1
            if self._users[block] == 0:
                if block in self._names:
                    self._kept[block] = None
                else:
                    self._blank.append(block)

    def forget(self) -> None:
        """No block has a name any more; who uses one keeps it."""
        self._blank.extend(self._kept)
        self._kept.clear()
        self._names.clear()
        self._found.clear()

    def _unname(self, block: int) -> None:
        del self._found[self._names.pop(block)]
