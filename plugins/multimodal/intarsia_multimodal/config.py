"""Settings of the processor, the loader and the sources. Torch-free."""

from __future__ import annotations

import math

import chz
from intarsia.config.bases import Config, DataSourceConfig, EnvironmentConfig, LoaderConfig
from intarsia.errors import UsageError, did_you_mean

from intarsia_multimodal.bases import ProcessorConfig

QUESTIONS = ("shape", "colour", "count", "digit", "place", "colour_of")
"""Kinds of questions that `drawn` knows."""
PARTS = ("train", "held_out", "all")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """UsageError unless `value` is one of `choices`."""
    if value not in choices:
        raise UsageError(f"{name} is {value!r}. {did_you_mean(value, choices)}")


@chz.chz(typecheck=True)
class ReadingConfig(Config):
    """What may be read as a medium, and how much of it."""

    max_source_pixels: int = chz.field(
        default=89_478_485,
        doc="Pixels of an image, or of one frame of a video, as its header says; more is refused before anything is decoded (decompression bombs).",
    )
    max_file_bytes: int = chz.field(default=1 << 30, doc="Bytes of a file, or of what an URL gives; more is refused.")
    max_video_seconds: float = chz.field(default=6 * 3600.0, doc="Length of a video; more is refused.")
    allow_urls: bool = chz.field(default=False, doc="Fetch media that are named by http and https URLs, again in each epoch.")
    url_timeout_s: float = chz.field(default=20.0, doc="Seconds for one URL in all.")

    @chz.validate
    def _limits_are_positive(self) -> None:
        for name in ("max_source_pixels", "max_file_bytes", "max_video_seconds", "url_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"reading.{name} is {getattr(self, name)}; it must be finite and above 0.")
        if self.max_source_pixels > 2 * 89_478_485:
            raise UsageError(f"reading.max_source_pixels is {self.max_source_pixels}; Pillow decodes at most {2 * 89_478_485}.")


@chz.chz(typecheck=True)
class PatchProcessorConfig(ProcessorConfig):
    """Images and video as patches of pixels. The defaults are those of Qwen3-VL."""

    patch: int = chz.field(default=16, doc="Pixels on a side of a patch.")
    temporal_patch: int = chz.field(default=2, doc="Frames in a patch; an image is repeated.")
    merge: int = chz.field(default=2, doc="Patches on a side that make one feature.")
    min_pixels: int = chz.field(default=65_536, doc="Least pixels of an image after resizing.")
    max_pixels: int = chz.field(default=16_777_216, doc="Most pixels of an image after resizing.")
    video_min_pixels: int = chz.field(default=4_096, doc="Least pixels of a video, all its frames together, after resizing.")
    video_max_pixels: int = chz.field(default=25_165_824, doc="Most pixels of a video, all its frames together, after resizing.")
    max_frame_tokens: int = chz.field(
        default=0,
        doc="Most tokens of a video's frame, so that short videos do not spend the whole of video_max_pixels on few frames; 0: no such limit.",
    )
    fps: float = chz.field(default=2.0, doc="Frames of a video file that are taken for each second.")
    min_frames: int = chz.field(default=4, doc="Least frames that are taken of a video file, where it has so many.")
    max_frames: int = chz.field(default=768, doc="Most frames that are taken of a video file.")
    given_fps: float = chz.field(default=24.0, doc="Frames per second of videos that are given as frames, all of which are taken.")
    mean: tuple[float, ...] = chz.field(default=(0.5, 0.5, 0.5), doc="Taken from each channel (0 to 1), red, green, blue.")
    std: tuple[float, ...] = chz.field(default=(0.5, 0.5, 0.5), doc="What each channel is divided by then.")
    resampling: str = chz.field(
        default="pillow",
        doc="Whose bicubic resampling: pillow is the same on every machine and needs no torch; torch equals transformers where torchvision is installed. They differ by one grey level in few pixels.",
    )
    image_token: str = chz.field(default="<|image_pad|>", doc="Special token that stands in the place of an image's features.")
    video_token: str = chz.field(default="<|video_pad|>", doc="Special token that stands in the place of a video's features.")
    start_token: str = chz.field(default="<|vision_start|>", doc="Special token before an image, and before each frame of a video.")
    end_token: str = chz.field(default="<|vision_end|>", doc="Special token behind an image, and behind each frame of a video.")
    timestamps: bool = chz.field(default=True, doc="Write `<1.5 seconds>` before each frame of a video.")
    video_marks: bool = chz.field(
        default=False,
        doc="Write start_token and end_token around a whole video too: what transformers 5.24 makes of the released chat templates, and earlier versions do not.",
    )
    reading: ReadingConfig = chz.field(default_factory=ReadingConfig, doc="What may be read.")

    @chz.validate
    def _settings_fit(self) -> None:
        for name in ("patch", "temporal_patch", "merge", "min_pixels", "video_min_pixels", "fps", "min_frames", "given_fps"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"processor.{name} is {getattr(self, name)}; it must be finite and above 0.")
        for low, high in (("min_pixels", "max_pixels"), ("video_min_pixels", "video_max_pixels"), ("min_frames", "max_frames")):
            if getattr(self, low) > getattr(self, high):
                raise UsageError(f"processor.{low} is {getattr(self, low)}, above processor.{high} ({getattr(self, high)}).")
        if self.max_pixels < (self.patch * self.merge) ** 2:
            raise UsageError(f"processor.max_pixels is {self.max_pixels}, and one feature has {(self.patch * self.merge) ** 2} pixels.")
        finite = all(math.isfinite(value) for value in (*self.mean, *self.std))
        if len(self.mean) != 3 or len(self.std) != 3 or not finite or not all(value > 0 for value in self.std):
            raise UsageError(f"processor.mean {self.mean} and processor.std {self.std} need 3 finite values each, those of std above 0.")
        check_choice("processor.resampling", self.resampling, ("pillow", "torch"))
        tokens = (self.image_token, self.video_token, self.start_token, self.end_token)
        if len(set(tokens)) < 4:
            raise UsageError(f"processor: image_token, video_token, start_token and end_token must be four tokens, and are {tokens}.")


@chz.chz(typecheck=True)
class MultimodalConfig(LoaderConfig):
    """Rows packed from whole documents with images and video, in an exact global order."""

    processor: ProcessorConfig = chz.field(doc="What turns documents into tokens and patches; the model's family says which.")
    patches: int = chz.field(default=16_384, doc="Most patches of a row, all its images and videos together.")
    too_long: str = chz.field(
        default="truncate",
        doc="Documents with more tokens than train.sequence_length or more patches than `patches`: truncate (never inside a medium: from the first that does not fit on all is cut), skip, or stop.",
    )
    bad_media: str = chz.field(
        default="stop", doc="Documents with a medium that cannot be used: stop, or skip, which counts them, names them and leaves them out."
    )
    open_rows: int = chz.field(
        default=16, doc="Rows that are filled at the same time: a document goes into the first in which it fits. 1: in turn."
    )
    workers: int = chz.field(default=2, doc="Processes on each rank that read and decode; 0: the loader's own process does.")
    worker_timeout_s: float = chz.field(
        default=600.0, doc="Seconds for one row in a worker process, after which the run ends and names it."
    )

    @chz.validate
    def _settings_fit(self) -> None:
        check_choice("data.loader.too_long", self.too_long, ("truncate", "skip", "stop"))
        check_choice("data.loader.bad_media", self.bad_media, ("skip", "stop"))
        for name, least in (("patches", 1), ("open_rows", 1), ("workers", 0), ("worker_timeout_s", 0.001)):
            if not least <= getattr(self, name) < math.inf:
                raise UsageError(f"data.loader.{name} is {getattr(self, name)}; it must be finite and at least {least}.")


@chz.chz(typecheck=True)
class MediaJsonlConfig(DataSourceConfig):
    """Files with one JSON object on each line, plain or .gz, that name or hold images and videos."""

    paths: tuple[str, ...] = chz.field(doc="Files or globs (** goes into folders). Each must match something.")
    roots: tuple[str, ...] = chz.field(
        default=(),
        doc="Folders in which media may lie. Relative paths are looked for in the folder of their JSONL file first, which is always allowed, then in these.",
    )
    errors: str = chz.field(default="strict", doc="Bytes that are no UTF-8: strict stops, replace puts U+FFFD.")


@chz.chz(typecheck=True)
class MediaFolderConfig(DataSourceConfig):
    """Images and videos, each with a caption in a text file of the same name beside it (`cat.jpg`, `cat.txt`)."""

    paths: tuple[str, ...] = chz.field(
        doc="Files or globs of images and videos (** goes into folders); text files among them are captions."
    )
    prompt: str = chz.field(
        default="",
        doc="Where given, a document is a conversation: the medium and this from the user, the caption from the assistant. Else the medium, then its caption.",
    )


@chz.chz(typecheck=True)
class DrawnConfig(DataSourceConfig):
    """Questions on images that the program draws. Document n is the same everywhere; documents of `train` and of `held_out` never show the same scene."""

    documents: int = chz.field(default=10_000, doc="How many documents there are.")
    part: str = chz.field(default="train", doc="Scenes to draw: train, held_out (one scene in ten), or all.")
    questions: tuple[str, ...] = chz.field(
        default=("shape", "colour", "count", "digit"),
        doc=f"Kinds of questions, in turn: {', '.join(QUESTIONS)}. Each has at least four answers, equally often.",
    )
    size: int = chz.field(default=32, doc="Pixels on a side.")
    noise: int = chz.field(default=8, doc="Most grey levels by which a pixel is off; 0: none.")
    seed: int = chz.field(default=0, doc="Other seeds draw other documents.")

    @chz.validate
    def _settings_fit(self) -> None:
        check_choice("drawn.part", self.part, PARTS)
        for question in self.questions:
            check_choice("drawn.questions", question, QUESTIONS)
        if not self.questions or len(set(self.questions)) != len(self.questions):
            raise UsageError(f"drawn.questions is {self.questions}; it must name at least one kind, each once.")
        for name, least, most in (("documents", 1, 1 << 40), ("size", 24, 1024), ("noise", 0, 64)):
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"drawn.{name} is {getattr(self, name)}; it must be between {least} and {most}.")


@chz.chz(typecheck=True)
class DrawnTasksConfig(EnvironmentConfig):
    """An image that the program draws, a question about it, an answer of a word or two. The reward is 1 for it, and less for what has some of its letters in their places."""

    questions: tuple[str, ...] = chz.field(
        default=("shape", "colour", "count", "digit"), doc=f"Kinds of questions, in turn: {', '.join(QUESTIONS)}."
    )
    ask: bool = chz.field(
        default=True, doc="Write the question behind the image; false: the image alone, where there is one kind of question."
    )
    answer: str = chz.field(
        default="words", doc="words, or letter: the first letter of the words alone, where these differ within each kind of question."
    )
    size: int = chz.field(default=32, doc="Pixels on a side.")
    noise: int = chz.field(default=8, doc="Most grey levels by which a pixel is off; 0: none.")
    tasks: int = chz.field(default=2000, doc="Tasks of the split train.")
    held_out: int = chz.field(default=200, doc="Tasks of the split held_out. No scene is in both.")
    seed: int = chz.field(default=0, doc="Other seeds draw other scenes.")
    partial: float = chz.field(
        default=0.3, doc="Reward of a wrong answer of which all letters but one are right; 0: the right answer alone is rewarded."
    )
    instructions: str = chz.field(default="Answer with one word.", doc="The system turn; empty: none.")
    tokens: int | None = chz.field(
        default=None, doc="Longest answer in tokens; none: the longest right answer's letters and one for its end."
    )

    @chz.validate
    def _settings_fit(self) -> None:
        wrong = {
            f"partial is {self.partial}; it must be from 0 on and below 1, which is the right answer's reward": not 0 <= self.partial < 1,
            f"tasks is {self.tasks} and held_out is {self.held_out}; each must be at least 1": min(self.tasks, self.held_out) < 1,
            f"tokens is {self.tokens}; it must be at least 1, or none": self.tokens is not None and self.tokens < 1,
            f"ask is false, and there are {len(self.questions)} kinds of questions, which nobody could tell apart": not self.ask
            and len(self.questions) > 1,
        }
        if found := [text for text, is_wrong in wrong.items() if is_wrong]:
            raise UsageError(f"drawn: {'; '.join(found)}.")
        check_choice("drawn.answer", self.answer, ("words", "letter"))
