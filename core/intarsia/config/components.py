"""`Recipe.overrides`: parts of the model config replaced where type and name match, in two phases: gather all claims, then apply."""

from __future__ import annotations

import dataclasses

from intarsia.config import shapes
from intarsia.config.bases import Config
from intarsia.config.paths import join, matcher, matches, split
from intarsia.config.recipe import ComponentOverride, Recipe
from intarsia.config.shapes import Leaf, Node, plain
from intarsia.config.tree import DEFAULT, ROOT, Branch, Schema, Slot, finish, together
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


def apply(root: Branch, recipe: Recipe, schema: Schema) -> None:
    """Change the tree of `recipe` in place, with "override by OWNER" as provenance."""
    if not recipe.overrides:
        return
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
            _replace(claim, schema, problems)
    if problems:
        raise UsageError(together("The component overrides", problems))


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
    found: dict[tuple[int, int], list[str]] = {}
    texts: dict[tuple[int, int], str] = {}
    for index, first in enumerate(claims):
        for second in claims[index + 1 :]:
            length = min(len(first.slot.segments), len(second.slot.segments))
            if first.slot.segments[:length] == second.slot.segments[:length]:
                same = first.slot.path == second.slot.path
                inner, outer = sorted((first, second), key=lambda claim: -len(claim.slot.segments))
                pair = (first.number, second.number)
                found.setdefault(pair, []).append(inner.slot.path)
                texts[pair] = (
                    f"{first.words} and {second.words} both replace `{{}}`"
                    if same
                    else f"{inner.words} replaces `{{}}`, which lies within what {outer.words} replaces"
                )
    advice = "remove one of them or narrow its `match` or `type`"
    return [
        texts[pair].format(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "") + f": {advice}."
        for pair, paths in found.items()
    ]


def _replace(claim: _Claim, schema: Schema, problems: list[str]) -> None:
    override, slot = claim.override, claim.slot
    assert isinstance(slot.shape, Node) and slot.branch is not None
    branch, source = slot.branch, f"override by {override.owner}"
    try:
        name, node = schema.choose(override.replace, slot.shape, slot.path)
    except IntarsiaError as error:
        problems.append(f"{claim.words}: {error}")
        return
    kept = dict(branch.children)
    if branch.value != name:
        branch.value, branch.source = name, source
        schema.seed(branch, node, slot.path)
        for child in branch.children.values():
            child.source = child.source or DEFAULT
    for field in schema.fields(node):
        if field in kept and field not in override.values:
            branch.children[field] = kept[field]
    for key, value in override.values.items():
        try:
            _set(branch, node, key, value, source, schema, slot.path)
        except (IntarsiaError, ValueError) as error:
            problems.append(f"{claim.words}: {error}")


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
