"""`Recipe.overrides`: parts of the model config replaced where type and name match, in two phases: gather all claims, then apply."""

from __future__ import annotations

import dataclasses

from intarsia.config import shapes
from intarsia.config.bases import Config
from intarsia.config.overrides import Dropped
from intarsia.config.paths import join, matcher, matches, split
from intarsia.config.recipe import ComponentOverride, Recipe
from intarsia.config.shapes import Leaf, Node, plain
from intarsia.config.tree import ROOT, Branch, Schema, Slot, finish, together
from intarsia.errors import IntarsiaError, UsageError, nearest
from intarsia.plugins import Plugins

KIND = "component"


@dataclasses.dataclass(frozen=True)
class _Claim:
    number: int
    override: ComponentOverride
    slot: Slot

    @property
    def words(self) -> str:
        return f"{self.override.owner} (overrides.{self.number}: {self.override.match} -> {self.override.replace})"


def apply_overrides(recipe: Recipe, plugins: Plugins) -> Recipe:
    """The recipe with every `ComponentOverride` applied to its model. Stability: provisional.

    A replaced component keeps the values of fields that the new one has too; `values` come on top. UsageError: two overrides claim the
    same node or one within the other, one matches nothing, a replacement does not fit, a field is unknown; all are reported together.
    """
    schema = Schema(plugins)
    root = schema.grow(recipe, ROOT, "", "recipe")
    apply(root, recipe, schema)
    return finish(root, schema, "The component overrides")


def apply(root: Branch, recipe: Recipe, schema: Schema) -> list[Dropped]:
    """Change the tree of `recipe` in place, with "override by OWNER" as provenance. Returns the values that the new components have no place for."""
    dropped: list[Dropped] = []
    if not recipe.overrides:
        return dropped
    components = [slot for slot in schema.slots(root, Recipe) if slot.segments[0] == "model" and _is_component(slot, schema)]
    problems: list[str] = []
    claims: list[_Claim] = []
    for number, override in enumerate(recipe.overrides):
        try:
            claims += _claims(number, override, components, schema)
        except (IntarsiaError, ValueError) as error:
            problems.append(f"overrides.{number} of {override.owner}: {error}")
    problems += _conflicts(claims)
    if not problems:
        for claim in claims:
            dropped += _replace(claim, schema, problems)
    if problems:
        raise UsageError(together("The component overrides", problems))
    return dropped


def _is_component(slot: Slot, schema: Schema) -> bool:
    return isinstance(slot.shape, Node) and slot.node is not None and schema.kind(slot.shape.declared) == KIND


def _claims(number: int, override: ComponentOverride, components: list[Slot], schema: Schema) -> list[_Claim]:
    registry = schema.plugins.registry(KIND)
    registry.find(override.replace)
    wanted = None if override.type == "*" else registry.find(override.type).full_name
    pattern = [matcher(segment) for segment in split(override.match)]
    at = [slot for slot in components if matches(pattern, slot.segments[1:])]
    hits = [slot for slot in at if slot.branch is not None and wanted in (None, slot.branch.value)]
    if hits:
        return [_Claim(number, override, slot) for slot in hits]
    if at:
        standing = ", ".join(sorted({str(slot.branch.value) for slot in at if slot.branch}))
        raise UsageError(
            f"{override.match!r} matches {len(at)} components, but none of the type {override.type!r}: {standing} stands there."
        )
    paths = [slot.path.removeprefix("model.") for slot in components]
    close = nearest(override.match, paths) or tuple(paths[:6])
    raise UsageError(
        f"{override.match!r} matches no component of the model. " + (f"Near: {', '.join(close)}." if close else "It has none.")
    )


def _conflicts(claims: list[_Claim]) -> list[str]:
    """One sentence for each pair of overrides that meet, at the first node where they do."""
    found: dict[tuple[int, int], list[str]] = {}
    for index, first in enumerate(claims):
        for second in claims[index + 1 :]:
            inner, outer = sorted((first, second), key=lambda claim: -len(claim.slot.segments))
            if inner.slot.segments[: len(outer.slot.segments)] != outer.slot.segments:
                continue
            text = f"{first.words} and {second.words} both replace `{inner.slot.path}`"
            if inner.slot.path != outer.slot.path:
                text = f"{inner.words} replaces `{inner.slot.path}` within `{outer.slot.path}`, which {outer.words} replaces"
            found.setdefault((first.number, second.number), []).append(text)
    more = {pair: f" (and {len(texts) - 1} more)" if len(texts) > 1 else "" for pair, texts in found.items()}
    return [f"{texts[0]}{more[pair]}: remove one of them or narrow its `match` or `type`." for pair, texts in found.items()]


def _replace(claim: _Claim, schema: Schema, problems: list[str]) -> list[Dropped]:
    override, slot = claim.override, claim.slot
    assert isinstance(slot.shape, Node) and slot.branch is not None
    branch, source, path = slot.branch, f"override by {override.owner}", slot.path
    try:
        name, node = schema.choose(override.replace, slot.shape, path)
    except IntarsiaError as error:
        problems.append(f"{claim.words}: {error}")
        return []
    kept, fields = dict(branch.children), schema.fields(node)
    if branch.value != name:
        branch.value, branch.source = name, source
        schema.seed(branch, node, path)
    branch.children |= {field: kept[field] for field in kept if field in fields and field not in override.values}
    for key, value in override.values.items():
        try:
            _set(branch, node, key, value, source, schema, path)
        except (IntarsiaError, ValueError) as error:
            problems.append(f"{claim.words}: {error}")
    lost = [entry for field in kept if field not in fields for entry in kept[field].flat(join(path, field))]
    return [Dropped(gone, old.value, old.source, source) for gone, old in lost]


def _set(branch: Branch, node: type[Config], key: str, value: object, source: str, schema: Schema, path: str) -> None:
    if key not in schema.fields(node):
        raise UsageError(schema.unknown_field(path, key, node))
    shape = schema.fields(node)[key].shape
    child = branch.children.setdefault(key, Branch())
    if isinstance(shape, Leaf):
        checked = shapes.parse(value, shape) if isinstance(value, str) and str not in shape.scalars else shapes.check(value, shape)
        child.value, child.children = plain(checked), {}
    elif isinstance(shape, Node) and isinstance(value, str):
        child.value, chosen = schema.choose(value, shape, join(path, key))
        schema.seed(child, chosen, join(path, key))
    elif value is None:
        child.value, child.children = None, {}
    else:
        raise UsageError(f"`{join(path, key)}` is no plain value; override what is beneath it by a match of its own.")
    child.source = source
