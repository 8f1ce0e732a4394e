"""Distributions installed by pip into a folder of their own, without a network: what they need is this environment's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def install(site: Path, *folders: Path) -> None:
    """`pip install` of source folders into `site`, which a process then has in PYTHONPATH."""
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--upgrade", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", *options, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
