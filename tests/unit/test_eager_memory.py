"""The allocator's settings are taken by glibc, and left alone where the user made some."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

CODE = "from intarsia_eager.memory import keep_freed_memory; print(keep_freed_memory())"


def answer(**more: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return subprocess.run(
        [sys.executable, "-c", CODE], env={**environment, **more}, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_glibc_takes_the_settings():
    assert answer() == str(platform.libc_ver()[0] == "glibc")


def test_settings_of_the_user_stay():
    assert answer(MALLOC_ARENA_MAX="2") == "False"
