"""The command line: help, errors and exit codes, and `intarsia plugins`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import pytest
from intarsia import PLUGIN_API, __version__, cli, plugins
from intarsia.contracts import Entry, KernelEntry
from intarsia.errors import CheckpointError, DistributedError, NumericsError, PluginError, StoppedWithCheckpoint, UsageError
from intarsia.hookspecs import hookimpl


class Echo:
    """A third party's command."""

    outcome: object = 0

    def add_arguments(self, parser):
        parser.add_argument("word")
        parser.add_argument("--times", type=int, default=1)

    def run(self, arguments):
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        print(arguments.word * arguments.times)
        return self.outcome


NOT_A_COMMAND = 3
CONSOLE = plugins.Candidate("intarsia-console", "1", "console", "intarsia_console.plugin")


def nothing() -> list[Entry]:
    return []


def entry(name: str, attribute: str, **more) -> Entry:
    return Entry(name=name, target=f"acme_cli_targets:{attribute}", doc=f"The {name}.", **more)


@pytest.fixture
def acme(monkeypatch):
    """Core, the console (whose `plugins` most tests run), one good third party with commands, one that failed."""
    for name in ("INTARSIA_PLUGINS_DISABLE", "INTARSIA_PLUGINS_ALLOW", "INTARSIA_TRACE", "INTARSIA_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    targets = types.ModuleType("acme_cli_targets")
    targets.Echo, targets.three = Echo, NOT_A_COMMAND
    monkeypatch.setitem(sys.modules, "acme_cli_targets", targets)
    commands = [entry("echo", "Echo"), entry("three", "three"), entry("gone", "gone"), entry("train", "Echo")]
    good = types.SimpleNamespace(INTARSIA_API=PLUGIN_API, offer_commands=hookimpl(lambda: commands))
    bad = types.SimpleNamespace(INTARSIA_API=PLUGIN_API + 7, offer_losses=hookimpl(nothing))
    points = [CONSOLE, plugins.Candidate("acme-cli", "1.2", "cli", plugin=good), plugins.Candidate("acme-bad", "0.1", "bad", plugin=bad)]

    def use(with_bad: bool = False) -> None:
        plugins.use(plugins.load(entry_points=points[: 2 + with_bad]))

    use()
    yield use
    plugins.use(None)
    Echo.outcome = 0


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_help_lists_commands_without_importing_them(acme, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "acme_cli_targets")
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    assert "  echo                    The echo. [acme-cli]\n" in out
    assert "  intarsia-console:train " in out, "a name that two plugins offer is shown in full"
    assert "  acme-cli:train " in out
    assert "INTARSIA_TRACE" in out
    assert run(capsys)[0] == 2
    assert run(capsys, "--version") == (0, f"intarsia {__version__} (plugin API {PLUGIN_API})\n", "")


def test_a_third_partys_command_runs(acme, capsys):
    assert run(capsys, "echo", "ab", "--times", "2") == (0, "abab\n", "")
    assert run(capsys, "acme-cli:train", "x") == (0, "x\n", "")
    code, out, _ = run(capsys, "echo", "--help")
    assert code == 0
    assert "The echo." in out
    Echo.outcome = 7
    assert run(capsys, "echo", "x")[0] == 7
    Echo.outcome = None
    assert run(capsys, "echo", "x")[0] == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["ehco"], 2, "usage error: unknown command 'ehco'. Did you mean 'echo'?"),
        (["train"], 2, "'train' is offered several times. Write 'acme-cli:train' or 'intarsia-console:train'"),
        (["--verbose"], 2, "unknown option '--verbose'"),
        (["--disable"], 2, "--disable needs the name"),
        (["echo"], 2, "the following arguments are required: word"),
        (["echo", "x", "--times", "two"], 2, "invalid int value: 'two'"),
        (["echo", "x", "--tim", "2"], 2, "unrecognized arguments: --tim 2\nDid you mean '--times'"),
        (["plugins"], 2, "usage: intarsia plugins"),
        (["plugins", "lst"], 2, "'trace')\nDid you mean 'list'"),
        (["plugins", "list", "--jsn"], 2, "unrecognized arguments: --jsn\nDid you mean '--json'"),
        (["plugins", "show", "acme-clj"], 2, "no plugin and no entry is called 'acme-clj'. Did you mean 'acme-cli'"),
        (["three"], 3, "command 'acme-cli:three' of plugin acme-cli/cli: acme_cli_targets:three must have add_arguments"),
        (["gone"], 3, "command 'acme-cli:gone' of plugin acme-cli/cli: cannot import 'acme_cli_targets:gone'"),
    ],
)
def test_mistakes_are_told_without_a_traceback(acme, capsys, words, code, message):
    got, out, err = run(capsys, *words)
    assert got == code
    assert message in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("u"), 2),
        (PluginError("p"), 3),
        (NumericsError("n"), 4),
        (CheckpointError("c"), 5),
        (DistributedError("d"), 6),
        (StoppedWithCheckpoint("s"), 75),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(acme, capsys, monkeypatch, error, code):
    Echo.outcome = error
    got, _, err = run(capsys, "echo", "x")
    assert got == code
    assert "Traceback" not in err
    assert "intarsia: error" not in err  # each class has a title of its own
    monkeypatch.setenv("INTARSIA_DEBUG", "1")
    if code != 130:
        assert "Traceback" in run(capsys, "echo", "x")[2]


def test_a_bug_is_shown_with_a_traceback_and_whose_it_is(acme, capsys):
    Echo.outcome = ZeroDivisionError("oops")
    code, _, err = run(capsys, "echo", "x")
    assert code == 1
    assert "Traceback" in err
    assert "to the authors of plugin acme-cli/cli" in err


def test_an_unknown_command_while_a_plugin_failed(acme, capsys):
    acme(with_bad=True)
    Echo.outcome = 0
    assert run(capsys, "echo", "x")[0] == 0
    code, _, err = run(capsys, "generate")
    assert code == 3
    assert "acme-bad/bad 0.1, api: it is written for plugin API" in err


def test_list_json_is_exact(acme, capsys):
    acme(with_bad=True)
    code, out, _ = run(capsys, "plugins", "list", "--json")
    assert code == 0
    facts = json.loads(out)
    assert list(facts) == ["intarsia", "plugin_api", "fingerprint", "plugins", "kinds", "failures", "skipped", "notices"]
    assert facts["fingerprint"] == plugins.current().fingerprint()
    assert next(fact for fact in facts["plugins"] if fact["distribution"] == "acme-cli") == {
        "distribution": "acme-cli",
        "version": "1.2",
        "api": PLUGIN_API,
        "entry_points": ["cli"],
        "hooks": ["offer_commands"],
        "entries": [{"kind": "command", "name": name, "entry_point": "cli"} for name in ("echo", "three", "gone", "train")],
    }
    (failure,) = facts["failures"]
    assert list(failure) == ["plugin", "distribution", "version", "entry_point", "hook", "cause"]
    assert failure["plugin"] == "acme-bad/bad"
    assert (facts["skipped"], facts["notices"]) == ([], [])
    assert run(capsys, "plugins", "list", "--json")[1] == out
    text = run(capsys, "plugins", "list")[1]
    assert "acme-cli 1.2\n  command: echo, three, gone, train\n" in text
    assert "failed: acme-bad/bad 0.1, api:" in text


def test_show_a_plugin_and_an_entry(acme, capsys):
    for name in ("acme-cli", "acme_cli", "acme-cli/cli"):
        code, out, _ = run(capsys, "plugins", "show", name, "--json")
        facts = json.loads(out)
        assert code == 0
        assert [plugin["plugin"] for plugin in facts["plugins"]] == ["acme-cli/cli"]
        assert facts["plugins"][0]["hooks"] == {"offer_commands": []}
    facts = json.loads(run(capsys, "plugins", "show", "train", "--json")[1])
    assert [shown["full_name"] for shown in facts["entries"]] == ["acme-cli:train", "intarsia-console:train"]
    assert facts["entries"][0]["settings"] == []
    assert "command acme-cli:echo: The echo." in run(capsys, "plugins", "show", "acme-cli:echo")[1]
    assert "hook offer_commands()" in run(capsys, "plugins", "show", "acme-cli")[1]


def test_show_an_entrys_settings(acme, capsys, monkeypatch):
    import chz
    from intarsia.config import LossConfig

    targets = sys.modules["acme_cli_targets"]

    @chz.chz(typecheck=True)
    class Settings(LossConfig):
        needed: float
        power: int = chz.field(default=2, doc="Exponent.")
        names: tuple[str, ...] = chz.field(default_factory=tuple)

    targets.Settings = Settings
    offered = [entry("power", "Echo", config="acme_cli_targets:Settings")]
    plugin = types.SimpleNamespace(INTARSIA_API=PLUGIN_API, offer_losses=hookimpl(lambda: offered))
    plugins.use(plugins.load(entry_points=[CONSOLE, plugins.Candidate("acme-loss", "1", "loss", plugin=plugin)]))
    settings = json.loads(run(capsys, "plugins", "show", "power", "--json")[1])["entries"][0]["settings"]
    assert settings == [
        {"name": "needed", "type": "float", "default": None, "doc": ""},
        {"name": "power", "type": "int", "default": "2", "doc": "Exponent."},
        {"name": "names", "type": "tuple[str, ...]", "default": "[]", "doc": ""},
    ]
    text = run(capsys, "plugins", "show", "power")[1]
    assert "  needed: float (required)\n" in text
    assert "  power: int = 2  Exponent.\n" in text


def test_show_a_failed_plugin(acme, capsys):
    acme(with_bad=True)
    code, out, _ = run(capsys, "plugins", "show", "acme-bad", "--json")
    assert code == 3
    assert json.loads(out)["failures"][0]["hook"] == "api"


def test_doctor_imports_everything_and_reports_each_problem(acme, capsys):
    acme(with_bad=True)
    code, out, _ = run(capsys, "plugins", "doctor", "--json")
    facts = json.loads(out)
    assert code == 3
    mine = {(p["plugin"], p["where"]): p["problem"] for p in facts["problems"] if p["plugin"].startswith("acme")}
    assert set(mine) == {("acme-bad/bad", "api"), ("acme-cli/cli", "command three, target"), ("acme-cli/cli", "command gone, target")}
    assert "must have add_arguments" in mine["acme-cli/cli", "command three, target"]
    assert any("command 'train' is also offered as intarsia-console:train" in note["note"] for note in facts["notes"])
    text = run(capsys, "plugins", "doctor")[1]
    assert f"intarsia {__version__}, plugin API {PLUGIN_API}: 3 plugins" in text
    assert f"{len(facts['problems'])} problem(s)" in text


def test_doctor_does_not_import_kernels_for_other_machines(acme, capsys):
    offered = [KernelEntry(name="far", op="rope", target="not_importable_here:rope", doc="Fast there.", needs=("cpu", "quantum"))]
    plugin = types.SimpleNamespace(INTARSIA_API=PLUGIN_API, offer_kernels=hookimpl(lambda: offered))
    plugins.use(plugins.load(entry_points=[CONSOLE, plugins.Candidate("acme-far", "1", "far", plugin=plugin)]))
    facts = json.loads(run(capsys, "plugins", "doctor", "--json")[1])
    assert not [problem for problem in facts["problems"] if problem["plugin"] == "acme-far/far"]
    assert [n["note"] for n in facts["notes"]] == ["kernel 'far' for rope needs quantum, which this machine has not: not imported"]


def test_doctor_names_what_loads_slowly(acme, capsys, monkeypatch, tmp_path):
    (tmp_path / "triton.py").write_text("")  # stands for a heavy library
    (tmp_path / "acme_heavy.py").write_text(
        f"import triton\nfrom intarsia.hookspecs import hookimpl\nINTARSIA_API = {PLUGIN_API}\n@hookimpl\ndef after_run(): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    try:
        plugins.use(plugins.load(entry_points=[CONSOLE, plugins.Candidate("acme-heavy", "1", "heavy", "acme_heavy")]))
        problems = json.loads(run(capsys, "plugins", "doctor", "--json")[1])["problems"]
        assert [p for p in problems if p["plugin"] == "acme-heavy/heavy" and "loading it imports triton" in p["problem"]]
    finally:
        for name in ("triton", "acme_heavy"):
            sys.modules.pop(name, None)


# ---------------------------------------------------------------- real processes


def spawn(*words: str, **environment: str) -> subprocess.CompletedProcess:
    program = [sys.executable, "-m", "intarsia", *words]
    return subprocess.run(program, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)


def test_trace_counts_the_calls_of_a_command():
    done = spawn("plugins", "trace", "--json", "--", "plugins", "list", INTARSIA_PLUGINS_ALLOW="intarsia,intarsia-console")
    facts = json.loads(done.stdout)
    assert done.returncode == facts["exit_code"] == 0
    assert facts["command"] == ["plugins", "list"]
    assert {call["plugin"] for call in facts["calls"]} == {"intarsia-console/console"}
    totals = [(total["plugin"], total["calls"], total["errors"]) for total in facts["totals"] if total["hook"] == "offer_commands"]
    assert sorted(totals) == [("intarsia-console/console", 1, 0)]
    assert "command: " in done.stderr, "the command's own output goes to stderr"
    done = spawn("plugins", "trace", "--calls", "--", "no-such-command", INTARSIA_PLUGINS_ALLOW="intarsia,intarsia-console")
    assert done.returncode == 2
    assert "offer_commands()  intarsia-console/console" in done.stdout
    assert spawn("plugins", "trace", INTARSIA_PLUGINS_ALLOW="intarsia,intarsia-console").returncode == 0


def test_options_before_the_command_select_plugins():
    done = spawn("--allow=intarsia", "--allow=intarsia-console", "plugins", "list", "--json")
    facts = json.loads(done.stdout)
    assert [fact["distribution"] for fact in facts["plugins"]] == ["intarsia", "intarsia-console"]
    done = spawn("--disable", "no-such-plugin", "plugins", "list")
    assert done.returncode == 2
    assert "plugins.disable names 'no-such-plugin'" in done.stderr


def test_help_and_list_import_nothing_heavy():
    """Speed is a benchmark's to measure; this is what it comes from. chz is for recipes, and takes longer than all that the list needs."""
    heavy = {"torch", "numpy", "chz", "transformers", "triton", "asyncio", "multiprocessing", "ssl"}
    program = f"import sys\nfrom intarsia.cli import main\ncode = main(sys.argv[1:])\nprint(code, sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    for words in (["--help"], ["plugins", "list"], ["plugins", "list", "--json"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=600)
        assert done.stderr.splitlines()[-1] == "0 []", words


def test_a_reader_that_goes_away_is_no_error():
    program = f"{sys.executable} -m intarsia --allow intarsia --allow intarsia-console plugins list --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() in ("0", "141")
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr
