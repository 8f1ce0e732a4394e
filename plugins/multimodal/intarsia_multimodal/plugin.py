"""The kind of processors, the processor `patches`, the loader `multimodal` and sources with media. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import BuildStage, Entry, Run
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def add_hookspecs() -> Sequence[str]:
    """The kind that this distribution owns."""
    return ["intarsia_multimodal.hookspecs"]


@hookimpl(optionalhook=True)
def offer_processors() -> Sequence[Entry]:
    """The processor."""
    return [
        Entry(
            name="patches",
            config="intarsia_multimodal.config:PatchProcessorConfig",
            target="intarsia_multimodal.patches:build",
            doc="Images and video as patches of pixels, placeholders in the text, positions on three axes: what the Qwen families read.",
        )
    ]


@hookimpl
def offer_loaders() -> Sequence[Entry]:
    """The loader."""
    return [
        Entry(
            name="multimodal",
            config="intarsia_multimodal.config:MultimodalConfig",
            target="intarsia_multimodal.loader:build",
            doc="Rows packed from whole documents with images and video, within budgets of tokens and of patches, in an exact global order.",
        )
    ]


@hookimpl
def offer_data_sources() -> Sequence[Entry]:
    """The sources."""
    home, configs = "intarsia_multimodal", "intarsia_multimodal.config"
    return [
        Entry(
            name="media_jsonl",
            config=f"{configs}:MediaJsonlConfig",
            target=f"{home}.sources:MediaJsonlSource",
            doc="One JSON object on each line: text and media in turns, or a conversation with media.",
        ),
        Entry(
            name="media_folder",
            config=f"{configs}:MediaFolderConfig",
            target=f"{home}.sources:MediaFolderSource",
            doc="Images and videos in folders, each with its caption in a text file beside it.",
        ),
        Entry(
            name="drawn",
            config=f"{configs}:DrawnConfig",
            target=f"{home}.drawn:DrawnSource",
            doc="Questions on images that the program draws: shapes, colours, counts and digits. Needs no download.",
        ),
    ]


@hookimpl
def offer_environments() -> Sequence[Entry]:
    """The environment."""
    return [
        Entry(
            name="drawn",
            config="intarsia_multimodal.config:DrawnTasksConfig",
            target="intarsia_multimodal.environment:build",
            doc="Questions on images that the program draws, one turn: what a policy that sees can learn in minutes.",
        )
    ]


@hookimpl
def offer_commands() -> Sequence[Entry]:
    """The command."""
    return [
        Entry(
            name="media",
            target="intarsia_multimodal.show_command:MediaCommand",
            doc="Show the rows that a run with images would be given, and the images as the model sees them.",
        )
    ]


@hookimpl
def after_build(run: Run, stage: BuildStage) -> None:
    """Have evaluations record media that could not be decoded, as training does."""
    if stage == "data" and "evaluation" in run.parts and _leaves_out(run):
        from intarsia_multimodal.hooks import watch_evaluation

        watch_evaluation(run)


@hookimpl
def before_step(run: Run, step: int) -> None:
    """Record media that could not be decoded for this step, where the loader leaves them out, before any rank computes with what it was given. The same on every rank."""
    if _leaves_out(run):
        from intarsia_multimodal.hooks import record_skipped

        record_skipped(run, step)


def _leaves_out(run: Run) -> bool:
    from intarsia_multimodal.config import MultimodalConfig

    settings = run.recipe.data.loader
    return isinstance(settings, MultimodalConfig) and settings.bad_media == "skip"
