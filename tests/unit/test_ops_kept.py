"""Kernels that a test or a module's fixture leaves in force are out of force for the next one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parent.parent / "conftest.py"

LEAVES = """
    from intarsia import ops
    from intarsia.ops.operator import find

    def put(name, kernel):
        ops.install(ops.Selection({name: ops.Choice(kernel, "a test", find(name).reference)}))

    def in_force():
        return [find(name).choice.kernel for name in ("linear", "rms_norm", "token_log_probs")]
"""


def test_choices_end_with_the_test_or_the_module_that_made_them(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(
        leaves=LEAVES,
        test_first="""
            import pytest
            from leaves import in_force, put

            @pytest.fixture(scope="module")
            def module():
                put("linear", "of the module")

            def test_leaves_it(module):
                put("rms_norm", "of a test")
                put("linear", "of a test")
                put("token_log_probs", "of a test")
                assert in_force() == ["of a test"] * 3

            def test_finds_what_the_module_put(module):
                assert in_force() == ["of the module", "reference", "reference"]
        """,
        test_second="""
            from leaves import in_force

            def test_finds_nothing():
                assert in_force() == ["reference"] * 3
        """,
    )
    pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "test_first.py", "test_second.py").assert_outcomes(passed=3)


def test_nothing_is_imported_for_it() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import conftest\n"
        "with conftest.kept_choices():\n    import intarsia.plugins\n"
        "assert 'torch' not in sys.modules and not conftest.operators()\n"
        "with conftest.kept_choices():\n    from intarsia import ops\n    ops.rope.put(ops.Choice('new', 'a test', ops.rope.reference))\n"
        "assert ops.rope.choice.kernel == 'reference', ops.rope.choice\n"
    )
    subprocess.run([sys.executable, "-c", program, str(CONFTEST.parent)], check=True, timeout=600)
