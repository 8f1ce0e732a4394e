"""The sandbox `process` keeps the contract."""

from __future__ import annotations

from intarsia_testing import SandboxConformance


class TestProcess(SandboxConformance):
    entry = "intarsia-sandbox:process"
