"""Documents in memory as a source."""

from __future__ import annotations

import hashlib


class Listed:
    """A source from documents in memory."""

    def __init__(self, documents):
        self.documents = documents

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, index):
        return self.documents[index]

    def fingerprint(self):
        return hashlib.sha256(repr(self.documents).encode()).hexdigest()
