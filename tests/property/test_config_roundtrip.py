"""flatten and rebuild are exact inverses, also through JSON; paths are written and read back."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import chz
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import config_fakes as fakes
from intarsia.config import MixturePart, ParameterGroup, flatten, rebuild, shapes
from intarsia.config.paths import join, matcher, matches, split, unquote

PLUGINS = fakes.loaded()

text = st.text(max_size=12)
numbers = st.floats(allow_nan=False)
integers = st.integers(-(2**70), 2**70)
leaves = st.one_of(st.none(), st.booleans(), integers, numbers, text)
ropes = st.none() | st.builds(fakes.RopeConfig, theta=numbers, factors=st.lists(numbers, max_size=3).map(tuple))
components = st.one_of(
    st.builds(fakes.AttentionConfig, heads=integers, window=st.none() | integers, rope=ropes, kind=st.sampled_from(["full", "sliding"])),
    st.builds(fakes.LatentConfig, rank=integers),
    st.builds(fakes.NothingConfig),
)
blocks = st.builds(fakes.BlockConfig, attention=components, marks=st.lists(st.builds(fakes.Empty), max_size=2).map(tuple))
models = st.builds(
    fakes.FamilyConfig,
    vocab_size=integers,
    dim=integers,
    max_positions=integers,
    layers=st.lists(blocks, max_size=3).map(tuple),
    extra=st.none() | st.builds(fakes.Empty),
    scales=st.dictionaries(text, numbers, max_size=3),
    grid=st.lists(st.lists(integers, max_size=2).map(tuple), max_size=2).map(tuple),
)
adams = st.builds(fakes.AdamConfig, lr=numbers, betas=st.tuples(numbers, numbers))
optimizers = adams | st.builds(fakes.MatrixConfig, inner=st.none() | adams)
sources = st.builds(fakes.TextConfig, paths=st.lists(text, max_size=2).map(tuple), separator=text) | st.builds(fakes.LibraryConfig)
parts = st.lists(st.builds(MixturePart, source=sources, weight=numbers), max_size=3).map(tuple)
groups = st.lists(
    st.builds(ParameterGroup, name=text, match=st.lists(text, max_size=2).map(tuple), options=st.dictionaries(text, leaves, max_size=3)),
    max_size=2,
).map(tuple)
extensions = st.dictionaries(
    text, st.builds(fakes.SectionConfig, x=st.integers(0, 9), options=st.dictionaries(text, leaves, max_size=3)), max_size=2
)


@st.composite
def recipes(draw):
    recipe = fakes.small(0)
    return chz.replace(
        recipe,
        name=draw(text),
        model=draw(models),
        optimizer=draw(optimizers),
        data=chz.replace(recipe.data, mixture=draw(parts), evaluation=draw(parts)),
        parameter_groups=draw(groups),
        kernels=draw(st.dictionaries(text, text, max_size=3)),
        sinks=draw(st.lists(st.builds(fakes.BoardConfig), max_size=2).map(tuple)),
        extensions=draw(extensions),
    )


@settings(max_examples=150, deadline=None)
@given(recipes())
def test_rebuild_is_the_inverse_of_flatten(recipe):
    values = flatten(recipe, PLUGINS)
    again = rebuild(values, PLUGINS)
    assert again == recipe
    assert repr(again) == repr(recipe)  # also tells 1 from True and 1.0
    through_json = json.loads(json.dumps({path: shapes.encode(value) for path, value in values.items()}, allow_nan=False))
    assert repr(rebuild(through_json, PLUGINS)) == repr(recipe)
    assert list(flatten(again, PLUGINS).items()) == list(values.items())


@settings(max_examples=300, deadline=None)
@given(st.lists(text, min_size=1, max_size=4))
def test_paths_are_read_as_they_are_written(segments):
    path = ""
    for segment in segments:
        path = join(path, segment)
    assert [unquote(segment) for segment in split(path)] == segments


@settings(max_examples=200, deadline=None)
@given(st.recursive(leaves, lambda inner: st.lists(inner, max_size=3)))
def test_leaves_survive_json(value):
    encoded = json.loads(json.dumps(shapes.encode(value), allow_nan=False))
    leaf = shapes.Leaf(frozenset(shapes.SCALARS))
    if not isinstance(value, list):
        assert repr(shapes.check(encoded, leaf)) == repr(value)


def test_nan_is_kept():
    recipe = chz.replace(fakes.small(), optimizer=fakes.AdamConfig(lr=math.nan))
    encoded = {path: shapes.encode(value) for path, value in flatten(recipe, PLUGINS).items()}
    assert encoded["optimizer.lr"] == {"float": "nan"}
    assert math.isnan(rebuild(json.loads(json.dumps(encoded)), PLUGINS).optimizer.lr)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", "bb", "lr", "0", "12"]), min_size=1, max_size=5), st.data())
def test_globs_match_what_they_were_made_from(segments, data):
    pattern = [data.draw(st.sampled_from([s, "*", s[0] + "*", "{" + s + ",zz}", "?" * len(s)])) for s in segments]
    assert matches([matcher(s) for s in pattern], segments)
    cut = data.draw(st.integers(0, len(segments)))
    assert matches([matcher(s) for s in ["**", *pattern[cut:]]], segments)
    assert matches([matcher(s) for s in [*pattern[:cut], "**"]], segments)
    assert not matches([matcher(s) for s in [*pattern, "*"]], segments)
