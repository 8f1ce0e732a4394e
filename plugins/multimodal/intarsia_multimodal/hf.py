"""The processor `patches` and what Hugging Face folders say of theirs, both ways, for tables of families (`HFTable.extra["processor_to_ours"]` and `["processor_to_theirs"]`). Torch-free.

transformers has two processors: one of images (`preprocessor_config.json`) and one of video (`video_preprocessor_config.json`); version 5 may have written both into `processor_config.json`,
which then comes first. What a file does not say is what its class does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import chz
from intarsia.errors import UsageError, did_you_mean

from intarsia_multimodal.config import PatchProcessorConfig

IMAGES, VIDEOS, TOGETHER = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"
IMAGE_CLASSES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
VIDEO_CLASSES = ("Qwen3VLVideoProcessor",)

Read = Callable[[str], Mapping[str, Any] | None]

_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_IMAGE_SAYS: dict[str, Any] = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    **_CLIP,
}
_VIDEO_SAYS: dict[str, Any] = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    **_HALVES,
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
    "cap_pixels_per_frame": False,
    "max_video_tokens": 768,
}
"""What the classes do where a file says nothing."""
_SHARED = {
    "patch": ("patch_size", int),
    "temporal_patch": ("temporal_patch_size", int),
    "merge": ("merge_size", int),
    "mean": ("image_mean", tuple),
    "std": ("image_std", tuple),
}
_ONLY: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
}
_VIDEO_ONLY = {**_ONLY, "do_sample_frames": True}
_VIDEO_SETTINGS = ("video_min_pixels", "video_max_pixels", "max_frame_tokens", "fps", "min_frames", "max_frames")


class _Unreadable(Exception):
    """A file's settings are none that `patches` can have: why, in words."""


def processor_to_ours(read: Read, model: Any, processor: Any) -> tuple[Any, list[str]]:
    """The processor of a folder, and sentences on what could not be taken from it.

    Arguments: `read(name)` gives a JSON file of the folder (None: there is none), `model` is the model's config, `processor` what a recipe has so far (None: nothing, and then nothing is
    returned unless the folder says all that images need). Settings that files do not have (special tokens, time stamps, whose resampling) stay as they are.
    """
    if getattr(model, "vision", None) is None:
        return processor, []
    if processor is not None and type(processor) is not PatchProcessorConfig:
        return processor, [f"the recipe's processor is a {type(processor).__name__}, for which {IMAGES} and {VIDEOS} are not read"]
    base = processor or PatchProcessorConfig()
    together = read(TOGETHER) or {}
    images, images_in = _part(read, together, "image_processor", IMAGES)
    videos, videos_in = _part(read, together, "video_processor", VIDEOS)
    if images is None:
        return processor, [] if processor is None else [f"there is no {IMAGES} (nor a {TOGETHER} that has it within): {_stays(processor)}"]
    try:
        found = _image_settings(images, images_in)
    except _Unreadable as error:
        return processor, [f"{error}: {_stays(processor)}"]
    try:
        seen = chz.replace(base, **found)
    except UsageError as error:
        return processor, [f"{images_in} cannot be used: {error} So {_stays(processor)}"]
    try:
        if videos is None:
            raise _Unreadable(f"there is no {VIDEOS}")
        return chz.replace(seen, **_video_settings(videos, videos_in, found)), []
    except _Unreadable as error:
        why = f"{error}:"
    except UsageError as error:
        why = f"{videos_in} cannot be used: {error} So"
    shown = ", ".join(f"{name}={getattr(base, name)}" for name in _VIDEO_SETTINGS)
    return seen, [f"{why} what the processor does with video stays as it is ({shown})"]


def _part(read: Read, together: Mapping[str, Any], key: str, name: str) -> tuple[Mapping[str, Any] | None, str]:
    """Settings of one processor and where they stand."""
    nested = together.get(key)
    return (nested, f"{TOGETHER}'s {key}") if isinstance(nested, Mapping) else (read(name), name)


def _stays(processor: Any) -> str:
    if processor is None:
        return "nothing says how images become patches"
    numbers = ("patch", "temporal_patch", "merge", "min_pixels", "max_pixels", "mean", "std")
    return f"the recipe's processor stays as it is ({', '.join(f'{name}={getattr(processor, name)}' for name in numbers)})"


def _image_settings(said: Mapping[str, Any], where: str) -> dict[str, Any]:
    _check(said, "image_processor_type", IMAGE_CLASSES, _ONLY, where)
    size = _size(said, _IMAGE_SAYS, where)
    # Older files have these beside `size`, and they count; some have them as null.
    edges = dict(zip(("min_pixels", "max_pixels"), size, strict=True))
    return {**_shared(said, _IMAGE_SAYS, where), **{key: _value(_said(said, edges, key), int, key, where) for key in edges}}


def _video_settings(said: Mapping[str, Any], where: str, images: Mapping[str, Any]) -> dict[str, Any]:
    """`images` are the settings that were found for them."""
    _check(said, "video_processor_type", VIDEO_CLASSES, _VIDEO_ONLY, where)
    shared = _shared(said, _VIDEO_SAYS, where)
    if differing := [
        f"{_SHARED[name][0]} is {value}, and {images[name]} for images" for name, value in shared.items() if images[name] != value
    ]:
        raise _Unreadable(f"{where} says otherwise than for images ({'; '.join(differing)}), and patches has one setting for both")
    if said.get("num_frames") is not None:
        raise _Unreadable(f"{where} says num_frames = {said['num_frames']!r}, and patches takes frames by their number for each second")
    every = {**_VIDEO_SAYS, **{key: value for key, value in said.items() if value is not None}}
    least, most = _size(said, _VIDEO_SAYS, where)
    return {
        "video_min_pixels": least,
        "video_max_pixels": most,
        "max_frame_tokens": _value(every["max_video_tokens"], int, "max_video_tokens", where) if every["cap_pixels_per_frame"] else 0,
        "fps": _value(every["fps"], float, "fps", where),
        "min_frames": _value(every["min_frames"], int, "min_frames", where),
        "max_frames": _value(every["max_frames"], int, "max_frames", where),
    }


def _check(said: Mapping[str, Any], key: str, classes: tuple[str, ...], only: Mapping[str, Any], where: str) -> None:
    kind = said.get(key)
    if kind is not None and kind not in classes:
        raise _Unreadable(f"{where} is for {key} = {kind!r}, which patches does not do. {did_you_mean(str(kind), classes).rstrip('.')}")
    for name, value in only.items():
        found = said.get(name)
        is_close = isinstance(value, float) and isinstance(found, float) and abs(found / value - 1) < 1e-6
        if found is not None and found != value and not is_close:
            raise _Unreadable(f"{where} says {name} = {found!r}, and patches has only {value!r}")


def _shared(said: Mapping[str, Any], otherwise: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What images and video have in common."""
    return {ours: _value(_said(said, otherwise, key), kind, key, where) for ours, (key, kind) in _SHARED.items()}


def _said(said: Mapping[str, Any], otherwise: Mapping[str, Any], key: str) -> Any:
    return otherwise[key] if said.get(key) is None else said[key]


def _size(said: Mapping[str, Any], otherwise: Mapping[str, Any], where: str) -> tuple[int, int]:
    size = _said(said, otherwise, "size")
    if not isinstance(size, Mapping) or not {"shortest_edge", "longest_edge"} <= set(size):
        raise _Unreadable(f"{where} says size = {size!r}, which must have shortest_edge and longest_edge: the least and the most pixels")
    least, most = (_value(size[key], int, f"size.{key}", where) for key in ("shortest_edge", "longest_edge"))
    return least, most


def _value(value: Any, kind: Any, key: str, where: str) -> Any:
    """A number, or three of them as a tuple."""
    if kind is tuple:
        numbers = value if isinstance(value, list | tuple) else ()
        if len(numbers) == 3 and all(type(number) in (int, float) for number in numbers):
            return tuple(float(number) for number in numbers)
        raise _Unreadable(f"{where} says {key} = {value!r}, which must be three numbers")
    if type(value) is int or (kind is float and type(value) is float):
        return kind(value)
    raise _Unreadable(f"{where} says {key} = {value!r}, which must be a {'whole ' if kind is int else ''}number")


def processor_to_theirs(processor: Any) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Their files, by name, that say what this processor does, and sentences on what no file can say. Nothing where it is not `patches`."""
    if type(processor) is not PatchProcessorConfig:
        return {}, [
            f"the processor is a {type(processor).__name__}, for which transformers has no files: {IMAGES} and {VIDEOS} are not written"
        ]
    shared = {key: list(value) if kind is tuple else value for ours, (key, kind) in _SHARED.items() for value in [getattr(processor, ours)]}
    images = {
        **shared,
        "size": {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels},
        **_ONLY,
        "image_processor_type": IMAGE_CLASSES[0],
        "processor_class": "Qwen3VLProcessor",
    }
    capped = {"cap_pixels_per_frame": bool(processor.max_frame_tokens)}
    videos = {
        **shared,
        "size": {"shortest_edge": processor.video_min_pixels, "longest_edge": processor.video_max_pixels},
        **_VIDEO_ONLY,
        **capped,
        **({"max_video_tokens": processor.max_frame_tokens} if processor.max_frame_tokens else {}),
        "fps": int(processor.fps) if processor.fps == int(processor.fps) else processor.fps,
        "min_frames": processor.min_frames,
        "max_frames": processor.max_frames,
        "video_processor_type": VIDEO_CLASSES[0],
        "processor_class": "Qwen3VLProcessor",
    }
    said = [] if processor.timestamps else ["the processor writes no time stamps before a video's frames, and transformers' always does"]
    return {IMAGES: images, VIDEOS: videos}, said
