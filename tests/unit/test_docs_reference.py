"""The documentation is whole: each hook with its exact arguments, each command, each field; each page in the navigation; README's commands exist."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest
from intarsia import hookspecs, plugins
from intarsia.cli import main
from intarsia.config import Config, Recipe
from intarsia_console.fields import fields

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import docs_reference  # noqa: E402

SPECS = {name: function for name, function in vars(hookspecs).items() if hasattr(function, "spec_facts")}
SHELL = ("bash", "console", "text", "")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return docs_reference.pages()


def section(page: str, heading: str) -> str:
    """The text below a heading, to the next heading of any depth."""
    (found,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", page, re.MULTILINE | re.DOTALL)
    return found


def commands(text: str) -> list[str]:
    """Every `intarsia ...` line of a page: of fenced blocks without a language of their own, and of indented ones."""
    fenced = [body for language, body in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if language in SHELL]
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for body in fenced for line in body.splitlines()] + [line[4:] for line in rest.splitlines() if line.startswith("    ")]
    return [re.split(r"\s{3,}", line)[0] for line in lines if line.startswith("intarsia ")]


DOCUMENTED = [
    (path.relative_to(ROOT).as_posix(), line)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for line in commands(path.read_text("utf-8"))
]


# ---------------------------------------------------------------- generated pages


@pytest.mark.parametrize("name", SPECS)
def test_each_hook_is_there_with_its_exact_arguments(pages: dict[str, str], name: str) -> None:
    text = section(pages["reference/hooks.md"], name)
    signature = str(inspect.signature(SPECS[name])).replace("'", "")
    assert f"{name}{signature}" in text
    assert inspect.cleandoc(SPECS[name].__doc__ or "") in text and SPECS[name].__doc__
    facts = SPECS[name].spec_facts
    assert not facts.kind or f"Kind: `{facts.kind}`" in text
    assert not facts.base or f"`{facts.base}`" in text


def test_each_sort_of_hook_says_when_where_and_what_becomes_of_an_error(pages: dict[str, str]) -> None:
    for sort in ("Offers", "Participants", "Observers"):
        text = section(pages["reference/hooks.md"], sort)
        assert re.search("exception|error", text, re.IGNORECASE) and re.search("rank|process|implementation", text), sort


def test_hooks_of_plugins_that_declare_some_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gadget_specs.py").write_text(
        textwrap.dedent(
            """
            from __future__ import annotations
            from intarsia.hookspecs import offer, participant

            @offer("gadget")
            def offer_gadgets() -> list[Entry]:
                "Gadgets."

            @participant
            def before_gadget(run: Run, size: int = 3) -> None:
                "When: before a gadget."
            """
        )
    )
    (tmp_path / "gadget_plugin.py").write_text(
        "from intarsia.hookspecs import hookimpl\nINTARSIA_API = 1\n@hookimpl\ndef add_hookspecs():\n    return ['gadget_specs']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = plugins.load(entry_points=[plugins.Candidate("acme-gadgets", "1.0", "gadgets", "gadget_plugin")])
    monkeypatch.setattr(plugins, "current", lambda: loaded)
    page = docs_reference.hooks_page()
    assert "Hooks of acme-gadgets" in page
    assert "before_gadget(run: Run, size: int=3) -> None" in section(page, "before_gadget") and "Kind: `gadget`" in section(
        page, "offer_gadgets"
    )


def test_each_command_and_each_of_its_actions_is_there_with_every_option(pages: dict[str, str]) -> None:
    loaded = plugins.current()
    for entry in loaded.registry("command").entries():
        command = loaded.target(entry)
        parser = argparse.ArgumentParser()
        (command() if isinstance(command, type) else command).add_arguments(parser)
        for heading, one in {entry.name: parser, **{f"{entry.name} {n}": p for n, p in docs_reference.actions(parser).items()}}.items():
            text = section(pages["reference/commands.md"], heading)
            for action in one._actions:
                names = action.option_strings or [str(action.metavar or action.dest)]
                assert all(name in text for name in names), (heading, names)


def nodes(config: type, seen: set[type]) -> set[type]:
    """The config classes that are fields of one another, tuples' and mappings' members included."""
    if config not in seen:
        seen.add(config)
        for found in re.findall(r"[A-Z]\w+", " ".join(row.type for row in fields(config))):
            member = getattr(sys.modules["intarsia.config"], found, None)
            if isinstance(member, type) and issubclass(member, Config):
                nodes(member, seen)
    return seen


def test_each_field_of_the_recipe_is_there_with_a_meaning(pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `(.+?)` \| (.+?) \| (.*) \|$", pages["reference/recipe-fields.md"], re.MULTILINE)
    documented = {path for path, *_ in rows}
    assert not [path for path, *_, meaning in rows if not meaning.strip()]
    for config in nodes(Recipe, set()):
        for name in getattr(config, "__annotations__", {}):
            assert any(path.split(".")[-1] == name for path in documented), (config, name)
    assert set(Recipe.__annotations__) <= documented


def test_each_entry_is_there_with_its_settings_and_their_meanings(pages: dict[str, str]) -> None:
    loaded, page = plugins.current(), pages["reference/entries.md"]
    for kind in loaded.kinds():
        for entry in loaded.registry(kind).entries():
            assert f"### {entry.full_name}\n\n{entry.doc}\n" in page
    assert not re.findall(r"^\| `[^`]+` \| .+ \|  \|$", page, re.MULTILINE)


# ---------------------------------------------------------------- pages by hand


def test_each_page_is_in_the_navigation(pages: dict[str, str]) -> None:
    navigation = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2], re.MULTILINE)
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(navigation) == sorted(written | set(pages))


def own_readmes() -> list[Path]:
    """README files of this repository: environments that nox and others make in hidden folders hold other people's."""
    found = [path for top in ROOT.iterdir() if top.is_dir() and not top.name.startswith(".") for path in top.rglob("README.md")]
    return [path for path in found if not any(part.startswith(".") or part == "node_modules" for part in path.relative_to(ROOT).parts)]


def test_links_from_files_outside_the_documentation_lead_somewhere() -> None:
    readmes = own_readmes()
    assert {ROOT / "core" / "README.md", ROOT / "plugins" / "rl" / "README.md"} <= set(readmes)
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *readmes]:
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text("utf-8")):
            assert target.startswith(("http:", "https:")) or (path.parent / target).exists(), (path, target)


def nox_sessions() -> dict[str, ast.FunctionDef]:
    """The sessions in noxfile.py by name. It is read and not run: tests need no nox."""
    found = {}
    for node in ast.parse((ROOT / "noxfile.py").read_text("utf-8")).body:
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if ast.unparse(decorator).startswith("nox.session"):
                (given,) = [word.value for word in getattr(decorator, "keywords", ()) if word.arg == "name"] or [ast.Constant(node.name)]
                found[ast.literal_eval(given)] = node
    return found


def test_contributors_are_told_of_each_session() -> None:
    sessions = nox_sessions()
    assert {"tests", "rl-quickstart"} <= set(sessions)
    table = section((ROOT / "CONTRIBUTING.md").read_text("utf-8"), "Sessions")
    first = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    assert {name.removeprefix("nox -s ") for name in re.findall(r"`([^`]+)`", first)} == set(sessions)


def test_each_session_that_is_named_exists() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *own_readmes(), *(ROOT / "docs").rglob("*.md")]
        for name in re.findall(r"nox -s ([a-z][a-z-]*)", path.read_text("utf-8"))
    }
    assert len(named) > 10
    assert {name for _, name in named} <= set(nox_sessions()), named


def test_sessions_of_tests_on_a_cpu_have_one_thread() -> None:
    """With more, threads of tiny models wait for each other: on a machine that does something else as well, many times as long."""
    testing = {name: text for name, node in nox_sessions().items() if "session.run('pytest'" in (text := ast.unparse(node))}
    assert set(testing) == {"tests", "nightly", "parity", "kernels", "vllm", "gpu"}
    assert {name for name, text in testing.items() if "session.env.update(ONE_THREAD" not in text} == {"gpu"}


@pytest.mark.parametrize(("page", "line"), DOCUMENTED)
def test_each_command_in_the_documentation_is_taken(page: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Command, action and options exist; recipe and overrides of `train` resolve, except where files of the reader's own are named."""
    words = shlex.split(line.replace("$'", "'").split(" | ")[0], comments=True)[1:]
    while words and words[0] in ("--disable", "--allow"):
        words = words[2:]
    if any(word.isupper() or word == "..." or word.startswith("[") for word in words) or not words:
        return  # a form, not a command: `intarsia plugins show NAME`
    target = plugins.current().target(plugins.current().registry("command").find(words[0]))
    parser = argparse.ArgumentParser(exit_on_error=False)
    (target() if isinstance(target, type) else target).add_arguments(parser)
    parsed = parser.parse_args(words[1:]) if parser._subparsers else parser.parse_intermixed_args(words[1:])
    recipe, chosen = getattr(parsed, "recipe", None), dict(each.partition("=")[::2] for each in getattr(parsed, "overrides", ()))
    if chosen.get("data.loader.environment", "code") not in plugins.current().registry("environment").names():
        return  # an environment that the page has the reader write
    if recipe and recipe in plugins.current().registry("recipe").names() and not getattr(parsed, "diff", None):
        assert main(["config", recipe, *parsed.overrides]) == 0, (page, capsys.readouterr().err)


def test_there_are_commands_to_test() -> None:
    assert {page for page, _ in DOCUMENTED} >= {
        "README.md",
        "docs/tutorial/first-run.md",
        "docs/how-to/generate.md",
        "docs/how-to/recipes.md",
    }
    assert len(DOCUMENTED) > 40
