"""`Recipe.overrides`: parts of the model config replaced where type and name match, in two phases: gather all claims, then apply."""

from __future__ import annotations

import dataclasses

from intarsia.config import shapes
from intarsia.config.paths import join, matcher, matches, split
from intarsia.config.recipe import ComponentOverride, Recipe
from intarsia.config.shapes import Leaf, Node
from intarsia.config.tree import Branch, Dropped, Schema, Slot, together
from intarsia.errors import IntarsiaError, UsageError, nearest

KIND = "component"


@dataclasses.dataclass(frozen=True)
class _Claim:
    number: int
    override: ComponentOverride
    slot: Slot

    def __str__(self) -> str:
        return f"{self.override.owner} (overrides.{self.number}: {self.override.match} -> {self.override.replace})"


def apply(root: Branch, recipe: Recipe, schema: Schema) -> list[Dropped]:
    """Change the tree of `recipe` in place, with "override by OWNER" as provenance. Returns the values that the new components have no place for.

    A replaced component keeps the values of fields that the new one has too; `values` come on top. UsageError: two overrides claim the
    same node or one within the other, one matches nothing, a replacement does not fit, a field is unknown; all are reported together.
    """
    below_model = [slot for slot in schema.slots(root, Recipe) if slot.segments[0] == "model" and slot.node is not None]
    components = [slot for slot in below_model if isinstance(slot.shape, Node) and schema.kind(slot.shape.declared) == KIND]
    problems: list[str] = []
    claims: list[_Claim] = []
    for number, override in enumerate(recipe.overrides):
        try:
            claims += _claims(number, override, components, schema)
        except (IntarsiaError, ValueError) as error:
            problems.append(f"overrides.{number} of {override.owner}: {error}")
    problems += _conflicts(claims)
    dropped: list[Dropped] = []
    for claim in claims if not problems else ():
        try:
            dropped += _replace(claim, schema)
        except (IntarsiaError, ValueError) as error:
            problems.append(f"{claim}: {error}")
    if problems:
        raise UsageError(together("The component overrides", problems))
    return dropped


def _claims(number: int, override: ComponentOverride, components: list[Slot], schema: Schema) -> list[_Claim]:
    registry = schema.plugins.registry(KIND)
    registry.find(override.replace)
    wanted = None if override.type == "*" else registry.find(override.type).full_name
    pattern = [matcher(segment) for segment in split(override.match)]
    standing = {slot.path: slot.branch.value for slot in components if slot.branch and matches(pattern, slot.segments[1:])}
    if not standing:
        paths = [slot.path.removeprefix("model.") for slot in components]
        close = ", ".join(nearest(override.match, paths) or paths[:6])
        raise UsageError(f"{override.match!r} matches no component of the model. " + (f"Near: {close}." if close else "It has none."))
    hits = [slot for slot in components if slot.path in standing and wanted in (None, standing[slot.path])]
    if not hits:
        there = ", ".join(sorted(set(standing.values())))
        raise UsageError(
            f"{override.match!r} matches {len(standing)} components, but none of the type {override.type!r}: {there} stands there."
        )
    return [_Claim(number, override, slot) for slot in hits]


def _conflicts(claims: list[_Claim]) -> list[str]:
    """One sentence for each pair of overrides that meet, at the first node where they do."""
    found: dict[tuple[int, int], list[str]] = {}
    for index, first in enumerate(claims):
        for second in claims[index + 1 :]:
            inner, outer = sorted((first, second), key=lambda claim: -len(claim.slot.segments))
            if inner.slot.segments[: len(outer.slot.segments)] == outer.slot.segments:
                within = f"{inner} replaces `{inner.slot.path}` within `{outer.slot.path}`, which {outer} replaces"
                text = f"{first} and {second} both replace `{inner.slot.path}`" if inner.slot.path == outer.slot.path else within
                found.setdefault((first.number, second.number), []).append(text)
    more = {pair: f" (and {len(texts) - 1} more)" if len(texts) > 1 else "" for pair, texts in found.items()}
    return [f"{texts[0]}{more[pair]}: remove one of them or narrow its `match` or `type`." for pair, texts in found.items()]


def _replace(claim: _Claim, schema: Schema) -> list[Dropped]:
    values, branch, path = claim.override.values, claim.slot.branch, claim.slot.path
    assert isinstance(claim.slot.shape, Node) and branch is not None
    source, kept = f"override by {claim.override.owner}", dict(branch.children)
    schema.put(branch, claim.slot.shape, path, claim.override.replace, source)
    node = schema.node_at(branch, claim.slot.shape, path)
    assert node is not None
    fields = schema.fields(node)
    branch.children |= {name: kept[name] for name in kept if name in fields and name not in values}
    for name, value in values.items():
        if name not in fields:
            raise UsageError(schema.unknown_field(path, name, node))
        shape, child = fields[name].shape, branch.children.setdefault(name, Branch())
        typed = isinstance(shape, Leaf) and isinstance(value, str) and str not in shape.scalars
        meant = shapes.parse(value, shape) if typed else value  # type: ignore[arg-type]
        schema.put(child, shape, join(path, name), meant, source)
    lost = [entry for name in kept if name not in fields for entry in kept[name].flat(join(path, name))]
    return [Dropped(gone, old.value, old.source, source) for gone, old in lost]
