"""A fake third-party distribution with a model family, components, optimizers, extensions, recipes and transforms. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Literal

import chz
from intarsia import plugins
from intarsia.config import (
    CheckpointBackendConfig,
    CheckpointConfig,
    Choice,
    ComponentConfig,
    ComponentOverride,
    Config,
    DataConfig,
    DataSourceConfig,
    EngineConfig,
    ExtensionConfig,
    LoaderConfig,
    LossConfig,
    MetricSinkConfig,
    MixturePart,
    ModelConfig,
    OptimizerConfig,
    ParameterGroup,
    Recipe,
    ScheduleConfig,
    SharderConfig,
    StorageConfig,
    TokenizerConfig,
    TrainConfig,
)
from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

MODULE = "config_fakes"
sys.modules.setdefault(MODULE, sys.modules[__name__])


@chz.chz(typecheck=True)
class RopeConfig(Config):
    theta: float = chz.field(default=10000.0, doc="Base of the angles.")
    factors: tuple[float, ...] = ()


@chz.chz(typecheck=True)
class AttentionConfig(ComponentConfig):
    heads: int = 4
    window: int | None = None
    rope: RopeConfig | None = chz.field(default_factory=RopeConfig)
    kind: Literal["full", "sliding"] = "full"


@chz.chz(typecheck=True)
class LatentConfig(ComponentConfig):
    rank: int
    heads: int = 2
    window: int | None = None


@chz.chz(typecheck=True)
class NothingConfig(ComponentConfig):
    pass


@chz.chz(typecheck=True)
class Empty(Config):
    pass


@chz.chz(typecheck=True)
class BlockConfig(Config):
    attention: ComponentConfig
    dim: int = 8
    marks: tuple[Empty, ...] = ()


@chz.chz(typecheck=True)
class FamilyConfig(ModelConfig):
    layers: tuple[BlockConfig, ...]
    extra: Empty | None = None
    scales: Mapping[str, float] = chz.field(default_factory=dict)
    grid: tuple[tuple[int, ...], ...] = ()


@chz.chz(typecheck=True)
class AdamConfig(OptimizerConfig):
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)


@chz.chz(typecheck=True)
class MatrixConfig(OptimizerConfig):
    lr: float = 0.02
    momentum: float = 0.95
    inner: OptimizerConfig | None = None


@chz.chz(typecheck=True)
class TextConfig(DataSourceConfig):
    paths: tuple[str, ...]
    separator: str = ""


@chz.chz(typecheck=True)
class LibraryConfig(DataSourceConfig):
    limit: int = 0


@chz.chz(typecheck=True)
class PlainLoaderConfig(LoaderConfig):
    pass


@chz.chz(typecheck=True)
class BytesConfig(TokenizerConfig):
    bos: bool = True


@chz.chz(typecheck=True)
class FlatConfig(ScheduleConfig):
    floor: float = 0.0


@chz.chz(typecheck=True)
class PlainLossConfig(LossConfig):
    z: float = 0.0


@chz.chz(typecheck=True)
class PlainEngineConfig(EngineConfig):
    pass


@chz.chz(typecheck=True)
class PlainSharderConfig(SharderConfig):
    pass


@chz.chz(typecheck=True)
class PlainBackendConfig(CheckpointBackendConfig):
    pass


@chz.chz(typecheck=True)
class PlainStorageConfig(StorageConfig):
    root: str = ""


@chz.chz(typecheck=True)
class BoardConfig(MetricSinkConfig):
    port: int = 6006


@chz.chz(typecheck=True)
class SectionConfig(ExtensionConfig):
    x: int = 1
    options: Mapping[str, Choice] = chz.field(default_factory=dict)

    @chz.validate
    def _small(self) -> None:
        if self.x > 1000:
            raise ValueError(f"x must be at most 1000, and is {self.x}")


def small(layers: int = 3) -> Recipe:
    return Recipe(
        name="fake-small",
        model=FamilyConfig(
            vocab_size=64, dim=8, max_positions=128, layers=tuple(BlockConfig(attention=AttentionConfig(window=16)) for _ in range(layers))
        ),
        data=DataConfig(loader=PlainLoaderConfig(), tokenizer=BytesConfig(), mixture=(MixturePart(source=LibraryConfig()),)),
        optimizer=AdamConfig(lr=1e-3),
        schedule=FlatConfig(),
        loss=PlainLossConfig(),
        engine=PlainEngineConfig(),
        sharder=PlainSharderConfig(),
        checkpoint=CheckpointConfig(backend=PlainBackendConfig(), storage=PlainStorageConfig()),
        train=TrainConfig(steps=10, sequence_length=32),
        parameter_groups=(ParameterGroup(name="norms", match=("*norm*",), options={"weight_decay": 0.0}),),
    )


def large() -> Recipe:
    return small(62)


def wrong() -> str:
    return "no recipe"


def longer(recipe: Recipe) -> Recipe:
    return chz.replace(recipe, train=chz.replace(recipe.train, steps=20))


def matrix(recipe: Recipe) -> Recipe:
    return chz.replace(recipe, optimizer=MatrixConfig(lr=0.05))


def latent(recipe: Recipe) -> Recipe:
    claim = ComponentOverride(match="layers.{0,2}.attention", type="full", replace="latent", values={"rank": 7}, owner="latent")
    return chz.replace(recipe, overrides=(*recipe.overrides, claim))


def everywhere(recipe: Recipe) -> Recipe:
    claim = ComponentOverride(match="layers.*.attention", replace="none", owner="everywhere")
    return chz.replace(recipe, overrides=(*recipe.overrides, claim))


def not_a_function(recipe: Recipe) -> None:
    return None


CHOICES = {
    "models": {"family": "FamilyConfig"},
    "components": {"full": "AttentionConfig", "latent": "LatentConfig", "none": "NothingConfig"},
    "optimizers": {"adam": "AdamConfig", "matrix": "MatrixConfig"},
    "data_sources": {"files": "TextConfig", "library": "LibraryConfig"},
    "loaders": {"plain": "PlainLoaderConfig"},
    "tokenizers": {"bytes": "BytesConfig"},
    "schedules": {"flat": "FlatConfig"},
    "losses": {"plain": "PlainLossConfig"},
    "engines": {"plain": "PlainEngineConfig"},
    "sharders": {"plain": "PlainSharderConfig"},
    "checkpoint_backends": {"plain": "PlainBackendConfig"},
    "storages": {"plain": "PlainStorageConfig"},
    "metric_sinks": {"board": "BoardConfig"},
    "extensions": {"my_section": "SectionConfig"},
}
FUNCTIONS = {
    "recipes": {"fake/small": "small", "fake/large": "large", "fake/wrong": "wrong"},
    "transforms": {"longer": "longer", "matrix": "matrix", "latent": "latent", "everywhere": "everywhere", "broken": "not_a_function"},
}


class FakePlugin:
    INTARSIA_API = 1


def _offer(kind: str):
    def offer(self):
        from intarsia.contracts import ModelEntry

        make = ModelEntry if kind == "models" else Entry
        configs = CHOICES.get(kind, {})
        entries = [
            make(name=name, config=f"{MODULE}:{config}", target=f"{MODULE}:{config}", doc=f"Fake {name}.")
            for name, config in configs.items()
        ]
        functions = FUNCTIONS.get(kind, {})
        return entries + [Entry(name=name, target=f"{MODULE}:{function}", doc=f"Fake {name}.") for name, function in functions.items()]

    offer.__name__ = f"offer_{kind}"
    return hookimpl(offer)


for _kind in (*CHOICES, *FUNCTIONS):
    setattr(FakePlugin, f"offer_{_kind}", _offer(_kind))

fake = FakePlugin()


class FakeDistribution:
    name = "fake-family"
    version = "1.0"


class FakeEntryPoint:
    name, value, group, dist = "fake", f"{MODULE}:fake", "intarsia", FakeDistribution()

    def load(self):
        return fake


def loaded(*more: plugins.Candidate) -> plugins.Plugins:
    return plugins.load(entry_points=[FakeEntryPoint(), *more])


CONSOLE = plugins.Candidate("intarsia-console", "0", "console", "intarsia_console.plugin")
