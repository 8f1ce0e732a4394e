"""Loading: every way in which a plugin can be broken, order, atomicity, selection. Each fake distribution is a real .dist-info folder on sys.path."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from intarsia import PLUGIN_API, discovery, plugins
from intarsia.errors import PluginError, UsageError

HEADER = f"""
from intarsia.contracts import Entry, KernelEntry, ModelEntry
from intarsia.hookspecs import hookimpl, hookspec, offer, observer, participant
INTARSIA_API = {PLUGIN_API}
"""

GOOD = """
@hookimpl
def offer_losses():
    return [Entry(name="{name}", target="{name}_code:build", config="{name}_code:Settings", doc="A loss.")]
"""


class Site:
    """A folder of fake distributions that is put on sys.path."""

    def __init__(self, path: Path):
        self.path = path
        self.count = 0

    def add(
        self, distribution: str, body: str, *, version: str = "1.0", entry_points: dict[str, str] | None = None, header: str = HEADER
    ) -> str:
        """A distribution with one module named after it; returns the module's name."""
        module = distribution.replace("-", "_")
        (self.path / f"{module}.py").write_text(header + textwrap.dedent(body))
        self.metadata(distribution, version, entry_points or {distribution.rpartition("-")[2]: module})
        return module

    def metadata(self, distribution: str, version: str, entry_points: dict[str, str], folder: Path | None = None) -> None:
        info = (folder or self.path) / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n\nVersion: not this\n")
        lines = "".join(f"{name} = {value}\n" for name, value in entry_points.items())
        (info / "entry_points.txt").write_text(f"[intarsia]\n{lines}")

    def scan(self) -> list[plugins.Candidate]:
        """The candidates that lie here, among all that are installed."""
        return [c for c in discovery.scan() if Path(c.location).is_relative_to(self.path)]

    def load(self, **options) -> plugins.Plugins:
        return plugins.load(entry_points=self.scan(), **options)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("INTARSIA_PLUGINS_DISABLE", "INTARSIA_PLUGINS_ALLOW", "INTARSIA_TRACE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def only_failure(loaded: plugins.Plugins) -> plugins.Failure:
    assert len(loaded.failures) == 1, loaded.report()
    return loaded.failures[0]


BROKEN = {
    "import-error": ("import there_is_no_such_module", "import", "ModuleNotFoundError: No module named 'there_is_no_such_module'"),
    "syntax-error": ("def broken(:", "import", "SyntaxError"),
    "exits": ("raise SystemExit(0)", "import", "SystemExit: 0"),
    "stops-all": ("class Stop(BaseException): pass\nraise Stop('x')", "import", "Stop: x"),
    "wrong-signature": ("@hookimpl\ndef after_step(run, sumary): pass", "after_step", "'sumary'.*Did you mean 'summary'"),
    "wrong-default": ("@hookimpl\ndef after_step(run, extra=1): pass", "after_step", "'extra'"),
    "star-arguments": ("@hookimpl\ndef after_step(**everything): pass", "after_step", "everything can't be"),
    "misspelt-hook": ("@hookimpl\ndef after_stepp(run): pass", "after_stepp", "no such hook. Did you mean 'after_step'"),
    "unmarked": ("def offer_losses(): return []", "offer_losses", "not marked with @hookimpl"),
    "wrapper": ("@hookimpl(wrapper=True)\ndef after_step(): yield", "after_step", "wrappers are not supported"),
    "coroutine": ("@hookimpl\nasync def after_step(): pass", "after_step", "ordinary function"),
    "generator-event": ("@hookimpl\ndef before_step(): yield", "before_step", "ordinary function"),
    "twice": ("@hookimpl\ndef after_step(): pass\n@hookimpl(specname='after_step')\ndef other(): pass", "after_step", "two functions"),
    "raises": (
        "@hookimpl\ndef offer_losses(): raise ValueError('no licence')",
        "offer_losses",
        r"ValueError: no licence \(.*raises.py:\d+\)",
    ),
    "exits-late": ("@hookimpl\ndef offer_losses(): raise SystemExit(3)", "offer_losses", "SystemExit: 3"),
    "raises-in-generator": ("@hookimpl\ndef offer_losses():\n    yield 1 / 0", "offer_losses", "ZeroDivisionError"),
    "returns-none": ("@hookimpl\ndef offer_losses(): pass", "offer_losses", "must return a list and returned None"),
    "returns-text": ("@hookimpl\ndef offer_losses(): return 'mse'", "offer_losses", "must return a list"),
    "wrong-type": ("@hookimpl\ndef offer_losses(): return ['mse']", "offer_losses", "'mse' is a str and must be a Entry"),
    "wrong-entry": (
        "@hookimpl\ndef offer_models(): return [Entry(name='m', target='a:b', doc='d')]",
        "offer_models",
        "is a Entry and must be a ModelEntry",
    ),
    "bad-name": (
        "@hookimpl\ndef offer_losses(): return [Entry(name='My Loss', target='a:b', doc='d')]",
        "offer_losses",
        "'My Loss' is not a valid",
    ),
    "colon-name": (
        "@hookimpl\ndef offer_losses(): return [Entry(name='a:b', target='a:b', doc='d')]",
        "offer_losses",
        "'a:b' is not a valid name",
    ),
    "extension-name": (
        "@hookimpl\ndef offer_extensions(): return [Entry(name='a.b', target='a:b', doc='d')]",
        "offer_extensions",
        "'a.b' is not a valid name",
    ),
    "bad-target": (
        "@hookimpl\ndef offer_losses(): return [Entry(name='a', target='a.b', doc='d')]",
        "offer_losses",
        "target is 'a.b' and must be",
    ),
    "code-target": (
        "@hookimpl\ndef offer_losses(): return [Entry(name='a', target=print, doc='d')]",
        "offer_losses",
        "must be of the form",
    ),
    "bad-config": (
        "@hookimpl\ndef offer_losses(): return [Entry(name='a', target='a:b', config='', doc='d')]",
        "offer_losses",
        "config is ''",
    ),
    "no-doc": ("@hookimpl\ndef offer_losses(): return [Entry(name='a', target='a:b', doc='')]", "offer_losses", "doc of one line"),
    "config-of-recipe": (
        "@hookimpl\ndef offer_recipes(): return [Entry(name='a', target='a:b', config='a:C', doc='d')]",
        "offer_recipes",
        "a recipe has no settings",
    ),
    "same-name": (
        "@hookimpl\ndef offer_losses(): return [Entry(name='a', target='a:b', doc='d'), Entry(name='a', target='a:c', doc='d')]",
        "offer of loss 'a'",
        "acme-same-name:a is taken",
    ),
    "same-config": (
        "@hookimpl\ndef offer_losses(): return [Entry(name=n, target='a:b', config='a:C', doc='d') for n in 'xy']",
        "offer of loss 'y'",
        "config 'a:C' is taken by acme-same-config/config",
    ),
    "no-specs": ("@hookimpl\ndef add_hookspecs(): return ['json']", "add_hookspecs", "no function marked"),
    "specs-missing": ("@hookimpl\ndef add_hookspecs(): return ['nowhere_to_be']", "add_hookspecs", "No module named 'nowhere_to_be'"),
    "bare-spec": (
        "@hookspec\ndef offer_things(): pass\n@hookimpl\ndef add_hookspecs(): return [__name__]",
        "add_hookspecs",
        "not by a bare hookspec",
    ),
    "steals-spec": (
        "@participant\ndef before_run(run): pass\n@hookimpl(specname='add_hookspecs')\ndef declare(): return [__name__]",
        "add_hookspecs",
        "declared by intarsia/core already",
    ),
    "steals-kind": (
        "@offer('loss')\ndef offer_other_losses(): pass\n@hookimpl\ndef add_hookspecs(): return [__name__]",
        "add_hookspecs",
        "kind 'loss' is declared by intarsia/core already",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_rejected_with_its_cause_and_others_go_on(site, name):
    body, hook, cause = BROKEN[name]
    site.add(f"acme-{name}", body)
    site.add("acme-good", GOOD.format(name="good"))
    loaded = site.load()
    failure = only_failure(loaded)
    entry_point = name.rpartition("-")[2]
    assert (failure.distribution, failure.version, failure.entry_point, failure.hook) == (f"acme-{name}", "1.0", entry_point, hook)
    assert re.search(cause, failure.cause, re.DOTALL), failure.cause
    assert loaded.registry("loss").find("good").owner == "acme-good"
    assert f"acme-{name}/{entry_point} 1.0, {hook}: " in loaded.report()
    assert f"acme-{name}" not in json.dumps(loaded.facts())


@pytest.mark.parametrize(
    ("declared", "cause"),
    [
        ("", f"write INTARSIA_API = {PLUGIN_API}"),
        ("INTARSIA_API = True", "must be an integer"),
        ("INTARSIA_API = '1'", "must be an integer"),
        (
            f"INTARSIA_API = {PLUGIN_API + 1}",
            f"written for plugin API {PLUGIN_API + 1}; intarsia .* accepts {PLUGIN_API}: upgrade intarsia",
        ),
        (f"INTARSIA_API = {PLUGIN_API - 2}", "upgrade the plugin"),
    ],
)
def test_the_plugin_api_is_checked(site, declared, cause):
    site.add("acme-api", "@hookimpl\ndef offer_losses(): return []", header=HEADER.replace(f"INTARSIA_API = {PLUGIN_API}", declared))
    failure = only_failure(site.load())
    assert failure.hook == "api"
    assert re.search(cause, failure.cause)


def test_the_api_before_is_accepted_too(site, monkeypatch):
    monkeypatch.setattr("intarsia.PLUGIN_API", PLUGIN_API + 1)
    site.add("acme-old", GOOD.format(name="old"))
    loaded = site.load()
    assert not loaded.failures
    assert loaded.facts()[-1]["api"] == PLUGIN_API


def test_an_object_and_a_class_are_plugins_and_the_module_declares_the_api(site):
    body = """
    class Both:
        @hookimpl
        def offer_losses(self):
            return [Entry(name="from_class", target="a:b", doc="d")]
        @hookimpl
        def before_step(self, run, step): pass
    class NeedsArgument:
        def __init__(self, x): pass
    instance = Both()
    Other = type("Other", (Both,), {"offer_losses": hookimpl(lambda self: [Entry(name="other", target="a:b", doc="d")])})
    """
    points = {
        "a": "acme_objects:instance",
        "b": "acme_objects:Other",
        "c": "acme_objects:NeedsArgument",
        "d": "acme_objects:instance",
        "e": "acme_objects:gone",
    }
    site.add("acme-objects", body, entry_points=points)
    loaded = site.load()
    assert loaded.registry("loss").names()[-2:] == ["from_class", "other"]
    causes = {failure.entry_point: failure.cause for failure in loaded.failures}
    assert "can't be instantiated without arguments" in causes["c"]
    assert "same object as acme-objects/a" in causes["d"]
    assert "has no 'gone'" in causes["e"]
    assert len(causes) == 3


def test_order_does_not_depend_on_the_scan(site):
    for name in ("zeta", "alpha", "mid"):
        site.add(
            f"acme-{name}",
            f"@hookimpl\ndef offer_losses(): return [Entry(name='{name}', target='a:b', doc='d')]\n@hookimpl\ndef before_step(run): run.append('{name}')",
        )
    site.add("acme-bad", "import nothing_like_this")
    site.metadata("acme-many", "1", {"z": "acme_many_z", "a": "acme_many_a"})
    for letter in "za":
        (site.path / f"acme_many_{letter}.py").write_text(HEADER + f"@hookimpl\ndef before_step(run): run.append('{letter}')\n")
    found = site.scan()
    seen = set()
    for permutation in itertools.islice(itertools.permutations(found), 0, 720, 37):
        loaded = plugins.load(entry_points=permutation)
        order = Ranked()
        loaded.hooks.before_step(order, 0)
        seen.add((loaded.fingerprint(), json.dumps(loaded.facts()), str(loaded.failures), tuple(order)))
    assert len(seen) == 1
    assert next(iter(seen))[3] == ("alpha", "a", "z", "mid", "zeta")
    assert loaded.facts()[0]["distribution"] == "intarsia"


class Ranked(list):
    """A double of Run that records."""

    rank = 0


def test_tryfirst_and_trylast_move_within_the_declared_order(site):
    for name, option in (("a", "trylast=True"), ("b", ""), ("c", "tryfirst=True"), ("d", "")):
        site.add(f"acme-{name}", f"@hookimpl({option})\ndef before_step(run): run.append('{name}')")
    order = Ranked()
    site.load().hooks.before_step(order, 0)
    assert order == ["c", "b", "d", "a"]


def test_a_rejected_plugin_leaves_nothing_behind(site):
    """Everything about it is right but its last entry: no entry, no hook, no kind, no claim on a name stays."""
    (site.path / "acme_half_specs.py").write_text(
        HEADER + "@offer('gadget')\ndef offer_gadgets(): pass\n@participant\ndef before_gadget(size): pass\n"
    )
    body = """
    calls = []
    @hookimpl
    def add_hookspecs(): return ["acme_half_specs"]
    @hookimpl
    def before_step(run): calls.append(1)
    @hookimpl
    def offer_gadgets(): return [Entry(name="g", target="a:b", doc="d")]
    @hookimpl
    def offer_losses(): return [Entry(name="fine", target="a:b", config="shared:C", doc="d"), Entry(name="NOT FINE", target="a:b", doc="d")]
    """
    module = site.add("acme-half", body)
    site.add("acme-later", "@hookimpl\ndef offer_losses(): return [Entry(name='late', target='a:b', config='shared:C', doc='d')]")
    site.add("acme-user", "@hookimpl\ndef offer_gadgets(): return []")
    site.add("acme-optional", "@hookimpl(optionalhook=True)\ndef offer_gadgets(): return [Entry(name='x', target='a:b', doc='d')]")
    loaded = site.load()
    failed = {failure.distribution: failure.cause for failure in loaded.failures}
    assert set(failed) == {"acme-half", "acme-user"}
    assert "Plugin acme-half/half, which declares it, failed to load" in failed["acme-user"]
    assert "gadget" not in loaded.kinds()
    assert "fine" not in loaded.registry("loss").names()
    assert loaded.registry("loss").find("late").owner == "acme-later", "the rejected plugin's claim to the config class must not stay"
    assert "acme-optional/optional" in loaded.versions()
    assert "'x'" not in str(loaded.facts()), "an optional offer whose kind has gone is no entry"
    loaded.hooks.before_step(Ranked(), 0)
    assert sys.modules[module].calls == []
    with pytest.raises(PluginError, match=r"'before_gadget' is not an event"):
        loaded.hooks.call("before_gadget", size=1)


def test_names_and_config_classes_belong_to_one_entry_across_plugins(site):
    offer_one = "@hookimpl\ndef offer_losses(): return [Entry(name='{}', target='a:b', config='{}', doc='d')]"
    site.add("acme-pair", offer_one.format("same", "x:A"), entry_points={"one": "acme_pair", "two": "acme_pair_two"})
    (site.path / "acme_pair_two.py").write_text(HEADER + offer_one.format("same", "x:B"))
    site.add("acme-thief", offer_one.format("other", "x:A"))
    loaded = site.load()
    causes = {failure.plugin: failure.cause for failure in loaded.failures}
    assert causes == {
        "acme-pair/two": "acme-pair:same is taken by acme-pair/one (same) already; each entry needs its own",
        "acme-thief/thief": "config 'x:A' is taken by acme-pair/one (same) already; each entry needs its own",
    }
    assert loaded.registry("loss").find("same").plugin == "acme-pair/one"


def test_a_kind_added_by_a_plugin_is_like_cores_own(site):
    (site.path / "acme_gadgets_specs.py").write_text(
        HEADER
        + "from intarsia.hookspecs import before_run\nfrom intarsia.contracts import StepSummary\n"
        + "@offer('gadget', base='intarsia.config:Config')\ndef offer_gadgets(): pass\n"
        + "@participant\ndef before_gadget(size, log): pass\n@observer()\ndef after_gadget(log): pass\n@observer('all')\ndef after_gadget_everywhere(log): pass\n"
    )
    site.add("acme-zz-owner", "@hookimpl\ndef add_hookspecs(): return ['acme_gadgets_specs']")
    user = "@hookimpl\ndef offer_gadgets(): return [Entry(name='g', target='a:b', config='acme_conf:G', doc='d')]\n"
    user += "@hookimpl\ndef before_gadget(log, size): log.append(size)\n@hookimpl\ndef after_gadget(log): log.append('zero')\n"
    user += "@hookimpl\ndef after_gadget_everywhere(log): log.append('all')\n"
    site.add("acme-aa-user", user)
    (site.path / "acme_conf.py").write_text(
        "import chz\nfrom intarsia.config import Config\n@chz.chz(typecheck=True)\nclass G(Config):\n    x: int = 1\n"
    )
    loaded = site.load()
    assert not loaded.failures, loaded.report()
    assert loaded.kinds()[-1] == "gadget"
    entry = loaded.registry("gadget").find("acme-aa-user:g")
    assert (entry.kind, entry.owner, entry.plugin) == ("gadget", "acme-aa-user", "acme-aa-user/user")
    assert loaded.entry_of(loaded.config_class(entry)(x=2)) == entry
    log: list = []
    loaded.hooks.rank = 1
    loaded.hooks.call("before_gadget", size=3, log=log)
    loaded.hooks.call("after_gadget", log=log)
    loaded.hooks.call("after_gadget_everywhere", log=log)
    assert log == [3, "all"]
    with pytest.raises(PluginError, match=r"takes \(size, log\) and was called with \(log\)"):
        loaded.hooks.call("before_gadget", log=log)


def test_doubles_are_refused_or_counted_once(site, tmp_path, monkeypatch):
    site.add("acme-once", GOOD.format(name="once"))
    site.add("acme-other", "@hookimpl\ndef before_run(): pass", entry_points={"once": "acme_other"})
    second = tmp_path / "second"
    monkeypatch.syspath_prepend(str(second))
    site.metadata("acme-once", "1.0", {"once": "acme_once"}, second)
    loaded = site.load()
    assert not loaded.failures
    assert any("acme-once is installed 2 times, alike" in notice for notice in loaded.notices)
    assert any("share the name 'once': acme-once/once, acme-other/once" in notice for notice in loaded.notices)
    site.metadata("acme-once", "2.0", {"once": "acme_once"}, second / "deeper")
    monkeypatch.syspath_prepend(str(second / "deeper"))
    for found in (site.scan(), site.scan()[::-1]):
        loaded = plugins.load(entry_points=found)
        assert {failure.plugin for failure in loaded.failures} == {"acme-once/once"}
        assert "installed 3 times" in loaded.failures[0].cause
        assert "once" not in loaded.registry("loss").names()


def test_an_entry_point_listed_twice_is_refused(site):
    site.add("acme-list", GOOD.format(name="list"))
    info = site.path / "acme_list-1.0.dist-info" / "entry_points.txt"
    info.write_text("[intarsia]\nlist = acme_list\nlist = json\n[other]\nlist = acme_list\n")
    assert "lists this entry point 2 times" in only_failure(site.load()).cause


@pytest.mark.parametrize(
    ("file", "content"), [("entry_points.txt", b"[intarsia]\nno equals sign\n"), ("entry_points.txt", b"\xff"), ("METADATA", b"\xff")]
)
def test_a_distribution_whose_metadata_is_damaged_harms_no_other(site, file, content):
    site.add("acme-damaged", GOOD.format(name="damaged"))
    site.add("acme-good", GOOD.format(name="good"))
    (site.path / "acme_damaged-1.0.dist-info" / file).write_bytes(content)
    loaded = site.load()
    failure = only_failure(loaded)
    assert failure.distribution == "acme-damaged" and f"{site.path}/acme_damaged-1.0.dist-info can't be read" in failure.cause
    assert "acme-good" in {record.candidate.distribution for record in loaded.records}


def test_nobody_asked_gives_one_warning_and_asked_for_is_fatal(site, caplog):
    site.add("acme-broken", "import gone_forever")
    site.add("acme-wrong", "@hookimpl\ndef offer_models(): return None")
    site.add("acme-good", GOOD.format(name="good"))
    loaded = site.load()
    site.load()
    warnings = [record for record in caplog.records if record.name == "intarsia.plugins"]
    assert len(warnings) == 1
    assert "acme-broken/broken 1.0" in warnings[0].getMessage()
    assert "acme-wrong/wrong 1.0" in warnings[0].getMessage()
    for name in ("acme-broken", "acme_broken", "acme-broken/broken"):
        with pytest.raises(PluginError, match=r"was asked for(.|\n)*gone_forever"):
            site.load(require=[name])
    with pytest.raises(UsageError, match=r"'acme-godo'.*Did you mean 'acme-good'"):
        site.load(require=["acme-godo"])
    with pytest.raises(UsageError, match=r"leaves it out"):
        site.load(require=["acme-good"], disable=["acme-good"])
    with pytest.raises(PluginError, match=r"unknown loss 'wanted'.*may offer it:\n  acme-broken/broken") as raised:
        loaded.registry("loss").find("wanted")
    assert "acme-wrong" not in str(raised.value), "it is known not to offer losses"
    with pytest.raises(PluginError, match=r"acme-broken/broken"):
        loaded.registry("loss").find("acme-broken:wanted")
    with pytest.raises(UsageError, match=r"Did you mean 'acme-good:good'"):
        loaded.registry("loss").find("acme-good:god")
    with pytest.raises(PluginError, match=r"no kind 'gadget'(.|\n)*acme-broken"):
        loaded.registry("gadget")


def test_without_failures_an_unknown_name_is_a_usage_error(site):
    site.add("acme-good", GOOD.format(name="good"))
    with pytest.raises(UsageError, match=r"unknown loss 'godo'. Did you mean 'good'"):
        site.load().registry("loss").find("godo")
    with pytest.raises(UsageError, match=r"Not loaded, since disabled or not allowed: acme-good/good"):
        site.load(disable=["acme-good"]).registry("loss").find("good")


def test_selection_imports_nothing_that_is_left_out(site, monkeypatch):
    for name in ("one", "two", "three"):
        site.add(f"acme-{name}", GOOD.format(name=name))
    assert "acme-two/two" not in site.load(disable=["Acme_Two"]).versions()
    assert "acme_two" not in sys.modules
    monkeypatch.setenv("INTARSIA_PLUGINS_ALLOW", "acme-one, acme-three/three")
    assert list(site.load().versions()) == ["intarsia/core", "acme-one/one", "acme-three/three"]
    assert list(site.load(allow=["acme-three", "acme-two"]).versions()) == ["intarsia/core", "acme-three/three"]
    monkeypatch.setenv("INTARSIA_PLUGINS_DISABLE", "acme-three")
    loaded = site.load()
    assert list(loaded.versions()) == ["intarsia/core", "acme-one/one"]
    assert "acme_two" not in sys.modules
    monkeypatch.setenv("INTARSIA_PLUGINS_DISABLE", "acme-tree")
    with pytest.raises(UsageError, match=r"plugins.disable names 'acme-tree'.*Did you mean 'acme-three"):
        site.load()
    monkeypatch.delenv("INTARSIA_PLUGINS_DISABLE")
    with pytest.raises(UsageError, match=r"plugins.allow names 'nobody'"):
        site.load(allow=["nobody"])
    for name in ("intarsia", "intarsia/core"):
        with pytest.raises(UsageError, match=r"core can't be disabled"):
            site.load(disable=[name])


def test_short_names_that_clash_are_chosen_in_full(site):
    for name in ("left", "right"):
        site.add(f"acme-{name}", f"@hookimpl\ndef offer_losses(): return [Entry(name='same', target='{name}:b', doc='d')]")
    registry = site.load().registry("loss")
    with pytest.raises(UsageError, match=r"'same' is offered several times. Write 'acme-left:same' or 'acme-right:same'"):
        registry.find("same")
    assert registry.find("acme-right:same").target == "right:b"
    assert registry.find("Acme_Right:same").target == "right:b"
    assert registry.names()[-2:] == ["acme-left:same", "acme-right:same"]


def test_kernels_of_one_name_are_told_apart_by_operator(site):
    body = "@hookimpl\ndef offer_kernels(): return [KernelEntry(name='fast', op=op, target='a:b', doc='d') for op in ('rope', 'norm')]"
    site.add("acme-kernels", body)
    registry = site.load().registry("kernel")
    assert registry.find("fast", op="rope").op == "rope"
    assert registry.names() == ["fast"]
    with pytest.raises(UsageError, match=r"'acme-kernels:fast' for rope or 'acme-kernels:fast' for norm"):
        registry.find("fast")


def test_entries_lead_to_their_code_and_faults_name_the_owner(site):
    body = """
    @hookimpl
    def offer_losses():
        names = ("fine", "raises", "usage", "base", "plain", "shared", "lost", "broken")
        return [Entry(name=n, target=f"acme_code_code:{n}", config=f"acme_code_code:{n.title()}", doc="d") for n in names]
    """
    site.add("acme-code", body)
    (site.path / "acme_code_code.py").write_text(
        textwrap.dedent("""
        import chz
        from intarsia.config import Config, LossConfig as Base
        from intarsia.errors import NumericsError
        @chz.chz(typecheck=True)
        class Fine(Base):
            x: int = 1
        @chz.chz(typecheck=True)
        class Raises(Base): pass
        @chz.chz(typecheck=True)
        class Usage(Base): pass
        class Plain(Base): pass
        Shared = Fine
        @chz.chz(typecheck=True)
        class Lost(Base): pass
        def fine(config, y, z=0): return (config.x, y, z)
        def raises(config): raise OSError("disk")
        def usage(config): raise NumericsError("bad number")
        """)
    )
    loaded = site.load()
    registry = loaded.registry("loss")
    config = loaded.config_class(registry.find("fine"))
    assert loaded.build(config(x=5), 6, z=7) == (5, 6, 7)
    assert loaded.entry_of(config).name == "fine"
    import acme_code_code as code
    from intarsia.errors import NumericsError

    with pytest.raises(
        PluginError, match=r"loss 'acme-code:raises' of plugin acme-code/code can't be built: OSError: disk \(.*acme_code_code.py:\d+\)"
    ):
        loaded.build(code.Raises())
    with pytest.raises(NumericsError, match=r"bad number \[from loss acme-code:usage\]"):
        loaded.build(code.Usage())
    with pytest.raises(
        PluginError, match=r"loss 'acme-code:lost' of plugin acme-code/code: cannot import 'acme_code_code:lost'.*has no 'lost'"
    ):
        loaded.build(code.Lost())
    with pytest.raises(PluginError, match=r"must be a subclass of LossConfig"):
        loaded.config_class(registry.find("plain"))
    with pytest.raises(PluginError, match=r"name one config class"):
        loaded.config_class(registry.find("shared"))
    with pytest.raises(PluginError, match=r"has no 'Base_?'|subclass of LossConfig"):
        loaded.config_class(registry.find("base"))
    from intarsia.config import LossConfig

    with pytest.raises(PluginError, match=r"LossConfig is not the config class of any entry"):
        loaded.entry_of(LossConfig)


def test_a_config_class_under_another_module_is_found(site):
    site.add(
        "acme-export",
        "@hookimpl\ndef offer_losses(): return [Entry(name='x', target='acme_public:X', config='acme_public:Named', doc='d')]",
    )
    (site.path / "acme_private.py").write_text(
        "import chz\nfrom intarsia.config import LossConfig\n@chz.chz(typecheck=True)\nclass X(LossConfig): pass\n"
    )
    (site.path / "acme_public.py").write_text("from acme_private import X\nNamed = X\n")
    loaded = site.load()
    import acme_private

    assert loaded.entry_of(acme_private.X()).name == "x"


@pytest.mark.parametrize("reference", ["os", "os:", ":path", "os:path:join", "os:path()", "os.path: join", "lambda:x y", 3])
def test_references_that_are_none_are_refused(reference):
    with pytest.raises(PluginError, match=r"not of the form 'module:attribute'"):
        plugins.import_reference(reference)


def test_references_lead_to_objects():
    assert plugins.import_reference("os.path:join") is os.path.join
    assert plugins.import_reference("pathlib:Path.cwd")() == Path.cwd()
    with pytest.raises(PluginError, match=r"has no 'jion'. Did you mean 'join'"):
        plugins.import_reference("os.path:jion")


def test_importing_a_plugin_does_not_move_random_generators(site):
    site.add("acme-seeds", "import random\nrandom.seed(1)\n@hookimpl\ndef offer_losses():\n    random.random()\n    return []")
    before = random.getstate()
    loaded = site.load()
    assert random.getstate() == before
    assert loaded.hooks.moved_generators == [("acme-seeds/seeds", "import", "random"), ("acme-seeds/seeds", "offer_losses", "random")]


def test_fifty_entry_points_load(site):
    for index in range(25):
        site.add(f"acme-n{index}", GOOD.format(name=f"n{index}"))
        (site.path / f"acme_n{index}_more.py").write_text(HEADER + "@hookimpl\ndef after_step(run, summary): pass\n")
        info = site.path / f"acme_n{index}-1.0.dist-info" / "entry_points.txt"
        info.write_text(f"[intarsia]\na = acme_n{index}\nb = acme_n{index}_more\n")
    loaded = site.load()
    assert len(loaded.versions()) == 51


# ---------------------------------------------------------------- processes


CHILD = """
import sys
from intarsia import plugins
try:
    plugins.verify_child()
except Exception as error:
    print(type(error).__name__, error)
    sys.exit(3)
print(plugins.current().fingerprint())
"""


def spawn(site: Site, environment: dict[str, str]) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(site.path), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", CHILD], env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True, timeout=600
    )


def test_a_worker_process_proves_that_it_holds_the_same_plugins(site):
    site.add("acme-one", GOOD.format(name="one"))
    site.add("acme-two", GOOD.format(name="two"))
    loaded = plugins.load(allow=["acme-one"])
    environment = plugins.child_environment(loaded)
    same = spawn(site, environment)
    assert same.returncode == 0, same.stdout + same.stderr
    assert same.stdout.strip() == loaded.fingerprint()
    extra = spawn(site, {**environment, "INTARSIA_PLUGINS_ALLOW": "acme-one,acme-two"})
    assert extra.returncode == 3
    assert "acme-two/two 1.0 is extra" in extra.stdout
    (site.path / "acme_one.py").write_text("import gone_in_the_worker\n")
    missing = spawn(site, environment)
    assert missing.returncode == 3
    assert "acme-one/one 1.0 is missing" in missing.stdout
    assert "gone_in_the_worker" in missing.stdout


def test_a_worker_whose_plugin_offers_something_else_is_refused(site, monkeypatch):
    site.add("acme-one", GOOD.format(name="one"))
    loaded = site.load()
    for key, value in plugins.child_environment(loaded).items():
        monkeypatch.setenv(key, value)
    plugins.verify_child(loaded)
    sys.modules.pop("acme_one")
    (site.path / "acme_one.py").write_text(HEADER + GOOD.format(name="another"))
    with pytest.raises(PluginError, match=r"the same versions offer different entries"):
        plugins.verify_child(site.load())


def test_ranks_agree_on_the_plugins(site):
    class Agrees:
        def __init__(self):
            self.values = []

        def agree(self, value, what):
            json.dumps(value)
            self.values.append(value)
            assert value == self.values[0], what

    site.add("acme-one", GOOD.format(name="one"))
    comm = Agrees()
    plugins.check_same_plugins(comm, site.load())
    plugins.check_same_plugins(comm, site.load())
    with pytest.raises(AssertionError, match=r"the plugins that are loaded"):
        plugins.check_same_plugins(comm, site.load(disable=["acme-one"]))


def test_current_is_loaded_once_and_can_be_set(site):
    mine = site.load()
    plugins.use(mine)
    try:
        assert plugins.current() is mine
    finally:
        plugins.use(None)
