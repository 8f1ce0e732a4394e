"""The processor `patches` gives what transformers' Qwen processors give, bit for bit: tokens, positions, grids, pixels.

Images are compared with the class that needs no torchvision. That of video needs it for one step, resizing, which here is what torchvision does for it: torch's bicubic on bytes.
"""

from __future__ import annotations

import importlib
import itertools
import json
import types
from pathlib import Path
from typing import Any

import chz
import numpy
import pytest
import torch
from intarsia.contracts import Document, Media
from intarsia_multimodal import sizes
from intarsia_multimodal.config import PatchProcessorConfig
from intarsia_multimodal.hf import processor_to_ours, processor_to_theirs
from intarsia_multimodal.patches import PatchProcessor
from PIL import Image

from tests.support.media import SMALL, encoded, noise, smooth, tokenizer, video

pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
SHAPES = ((33, 500), (256, 256), (300, 517), (64, 1200), (1, 150), (700, 90), (32, 32))
SETTINGS = {
    "qwen3": PatchProcessorConfig(),
    "qwen2": PatchProcessorConfig(patch=14, min_pixels=3136, max_pixels=50176, **CLIP),
    "small": SMALL,
}


def media_of(processor: PatchProcessor, *parts: Any):
    prepared = processor.prepare(Document(parts=parts))
    return prepared, prepared.media


@pytest.mark.parametrize("name", SETTINGS)
def test_images_are_those_of_transformers(name):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = SETTINGS[name]
    ours = PatchProcessor(settings, tokenizer())
    theirs = Qwen2VLImageProcessorPil(
        patch_size=settings.patch,
        image_mean=list(settings.mean),
        image_std=list(settings.std),
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
    )
    for number, ((height, width), make) in enumerate(itertools.product(SHAPES, (noise, smooth))):
        pixels = make(height, width, number)
        _, (slot,) = media_of(ours, Media("image", encoded(pixels)))
        expected = theirs([Image.fromarray(pixels)], return_tensors="np")
        assert slot.grid == tuple(expected["image_grid_thw"][0].tolist())
        assert numpy.array_equal(ours.load(slot), expected["pixel_values"]), (height, width)


FILES: dict[str, dict[str, Any]] = {
    "silent": {},
    "older": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "min_pixels": 3136, "max_pixels": 40000, "size": {"shortest_edge": 1, "longest_edge": 2}},
    "newer": {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 90000}, "image_mean": [0.5, 0.5, 0.5]},
    "coarse": {"patch_size": 8, "merge_size": 4, "temporal_patch_size": 3, "image_std": [0.5, 0.25, 0.125], "rescale_factor": 0.00392156862745098},
}  # fmt: skip


@pytest.mark.parametrize("name", [*FILES, "ours"])
def test_a_folders_file_means_what_it_means_to_transformers(name, tmp_path):
    """The same `preprocessor_config.json`, which it or we wrote, read by both sides: the same numbers."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = PatchProcessorConfig(patch=8, merge=3, min_pixels=600, max_pixels=9000, **CLIP)
    files = processor_to_theirs(settings)[0] if name == "ours" else {"preprocessor_config.json": FILES[name]}
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    model = types.SimpleNamespace(vision=True)
    for _ in range(2):
        config, _ = processor_to_ours(
            lambda file: json.loads(found.read_text()) if (found := tmp_path / file).is_file() else None, model, settings
        )
        ours = PatchProcessor(config, tokenizer())
        for number, (height, width) in enumerate((*SHAPES, (1100, 1000))):
            pixels = noise(height, width, number)
            _, (slot,) = media_of(ours, Media("image", encoded(pixels)))
            expected = theirs([Image.fromarray(pixels)], return_tensors="np")
            assert slot.grid == tuple(expected["image_grid_thw"][0].tolist())
            assert numpy.array_equal(ours.load(slot), expected["pixel_values"]), (height, width)
        theirs.save_pretrained(tmp_path)  # in its own words


def merged(theirs: Any, folder: Path) -> dict[str, Any]:
    """Settings of their video class made from a folder's file, which needs torchvision to be made itself."""
    said, _ = theirs.Qwen3VLVideoProcessor.get_video_processor_dict(folder)
    names = ("size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "fps", "min_frames", "max_frames")
    names += ("cap_pixels_per_frame", "max_video_tokens")
    return {name: said.get(name, getattr(theirs.Qwen3VLVideoProcessor, name)) for name in names}


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "fps": 4, "max_frames": 100},
        {
            "cap_pixels_per_frame": True,
            "max_video_tokens": 9,
            "size": {"shortest_edge": 256, "longest_edge": 4096},
            "image_std": [0.5, 1.0, 0.5],
        },
    ],
)
def test_a_folders_video_file_means_what_it_means_to_transformers(content, tmp_path):
    theirs = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    images = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": content.get("image_std", [0.5] * 3)}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(content))
    model = types.SimpleNamespace(vision=True)
    for _ in range(2):
        said = merged(theirs, tmp_path)
        config, remarks = processor_to_ours(
            lambda file: json.loads(found.read_text()) if (found := tmp_path / file).is_file() else None, model, None
        )
        assert not remarks
        size = (said["size"]["shortest_edge"], said["size"]["longest_edge"])
        assert (config.video_min_pixels, config.video_max_pixels) == size
        assert (config.patch, config.temporal_patch, config.merge) == tuple(
            said[f"{name}_size"] for name in ("patch", "temporal_patch", "merge")
        )
        assert (list(config.mean), list(config.std)) == (said["image_mean"], said["image_std"])
        assert (config.fps, config.min_frames, config.max_frames) == tuple(said[name] for name in ("fps", "min_frames", "max_frames"))
        assert config.max_frame_tokens == (said["max_video_tokens"] if said["cap_pixels_per_frame"] else 0)
        for file, written in processor_to_theirs(config)[0].items():  # and again from what we write
            (tmp_path / file).write_text(json.dumps(written))


def test_modes_become_rgb_as_in_transformers():
    from intarsia_multimodal.media import to_rgb
    from transformers.image_transforms import convert_to_rgb

    colours = Image.fromarray(smooth(20, 30))
    alpha = Image.fromarray(numpy.linspace(0, 255, 600).astype(numpy.uint8).reshape(20, 30))
    clear = colours.convert("RGBA")
    clear.putalpha(alpha)
    palette = colours.quantize(16)
    palette.info["transparency"] = 3
    grey = Image.merge("LA", (colours.convert("L"), alpha))
    for image in (
        colours,
        clear,
        palette,
        grey,
        colours.convert("L"),
        colours.convert("1"),
        colours.convert("CMYK"),
        colours.convert("YCbCr"),
    ):
        assert numpy.array_equal(numpy.asarray(to_rgb(image)), convert_to_rgb(image, return_numpy=True)), image.mode


def resized(frames_THWC: numpy.ndarray, height: int, width: int) -> torch.Tensor:
    """What torchvision's resize makes of frames."""
    planes = torch.from_numpy(frames_THWC).permute(0, 3, 1, 2)
    if tuple(planes.shape[-2:]) == (height, width):
        return planes
    return torch.nn.functional.interpolate(planes, (height, width), mode="bicubic", align_corners=False, antialias=True)


@pytest.mark.parametrize(("name", "cap"), [("qwen3", 0), ("qwen3", 768), ("qwen3", 4), ("small", 0), ("small", 16)])
def test_videos_are_those_of_transformers(name, cap):
    theirs = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")

    settings = chz.replace(SETTINGS[name], resampling="torch", max_frame_tokens=cap)
    ours, factor = PatchProcessor(settings, tokenizer()), settings.patch * settings.merge
    for number, (frames, height, width) in enumerate([(2, 64, 64), (5, 70, 100), (8, 33, 61), (3, 10, 20)]):
        pixels = numpy.stack([smooth(height, width, 10 * number + frame) for frame in range(frames)])
        _, (slot,) = media_of(ours, Media("video", tuple(encoded(frame) for frame in pixels)))
        most = settings.video_max_pixels
        if cap:
            most = max(min(cap * factor**2, most // frames), int(settings.video_min_pixels * 1.05)) * frames
        size = theirs.smart_resize(frames, height, width, 2, factor, settings.video_min_pixels, most)
        mean, std = (torch.tensor(values).view(3, 1, 1) * (1.0 / (1 / 255)) for values in (settings.mean, settings.std))
        scaled = (resized(pixels, *size).float() - mean) / std
        patches, *grid = theirs.Qwen3VLVideoProcessor.patchify(None, scaled[None], settings.patch, settings.merge, 2)
        assert slot.grid == tuple(grid)
        assert numpy.array_equal(ours.load(slot), patches[0].numpy()), (frames, height, width)
    pillow = PatchProcessor(chz.replace(settings, resampling="pillow"), tokenizer())
    levels = numpy.abs(pillow.load(slot) - ours.load(slot)) * 255 * settings.std[0]
    assert 0 < levels.max() < 2.1, "Pillow's bicubic differs by grey levels that rounding makes"


def test_sizes_and_frames_are_those_of_transformers():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as image_rule

    theirs = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.video_utils import VideoMetadata

    sides = (1, 7, 16, 31, 32, 33, 48, 80, 199, 640, 1081)
    for height, width in itertools.product(sides, sides):
        if max(height, width) <= 200 * min(height, width):
            for bounds in ((256, 4096), (65536, 16777216)):
                assert sizes.image_size(height, width, 32, *bounds) == image_rule(height, width, 32, *bounds)
                assert sizes.video_size(5, height, width, 2, 32, *bounds) == theirs.smart_resize(5, height, width, 2, 32, *bounds)
    holder = types.SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    for total, fps in itertools.product((1, 2, 3, 10, 47, 300, 50_000), (1, 5, 23.976, 24, 30, 60)):
        expected = theirs.Qwen3VLVideoProcessor.sample_frames(holder, VideoMetadata(total_num_frames=total, fps=fps), fps=2)
        found = sizes.frame_numbers(total, fps, 2.0, 4, 768)
        assert found == tuple(expected.tolist())
        assert sizes.timestamps(found, fps, 2) == Qwen3VLProcessor._calculate_timestamps(None, list(found), fps, 2)


@pytest.mark.parametrize("marks", [False, True])
def test_placeholders_and_positions_are_those_of_transformers(marks):
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.video_utils import VideoMetadata

    ours = PatchProcessor(chz.replace(SMALL, video_marks=marks), tokenizer())
    prepared, slots = media_of(
        ours,
        "one ",
        Media("image", encoded(noise(24, 40))),
        " two ",
        Media("video", video(11, fps=4)),
        " three",
        Media("image", encoded(noise(16, 16))),
    )
    holder = types.SimpleNamespace(
        video_processor=types.SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="S",
        vision_end_token="E",
        video_token="V",
        _calculate_timestamps=lambda *arguments: Qwen3VLProcessor._calculate_timestamps(None, *arguments),
    )
    metadata = VideoMetadata(total_num_frames=11, fps=4.0, frames_indices=list(slots[1].frames))
    facts = {"video_grid_thw": numpy.array([slots[1].grid]), "video_metadata": [metadata]}
    middle = Qwen3VLProcessor.replace_video_token(holder, facts, 0)
    middle = f"S{middle}E" if marks else middle
    expected = f"one S{'I' * slots[0].features}E two {middle} threeS{'I' * slots[2].features}E"
    letters = {ours.ids["image_id"]: "I", ours.ids["video_id"]: "V", ours.ids["vision_start_id"]: "S", ours.ids["vision_end_id"]: "E"}
    ids = prepared.tokens_N.tolist()
    assert "".join(letters.get(number) or chr(number) for number in ids[1:-1]) == expected
    assert (ids[0], ids[-1]) == (256, 257), "bos and eos around it"

    model = types.SimpleNamespace(
        config=types.SimpleNamespace(vision_config=types.SimpleNamespace(spatial_merge_size=2)),
        get_vision_position_ids=lambda *arguments, **settings: Qwen3VLModel.get_vision_position_ids(None, *arguments, **settings),
    )
    kinds = torch.tensor([[{"I": 1, "V": 2}.get(letters.get(number, ""), 0) for number in ids]])
    grids = torch.tensor([slot.grid for slot in slots])
    positions, _ = Qwen3VLModel.get_rope_index(model, torch.tensor([ids]), kinds, grids[[0, 2]], grids[[1]])
    assert numpy.array_equal(prepared.positions_3N, positions[:, 0].numpy())


def test_a_video_file_is_read_as_by_transformers(tmp_path):
    from transformers.video_utils import load_video

    for container in ("mp4", "avi", "matroska"):
        path = tmp_path / f"video.{container}"
        path.write_bytes(video(10, container=container))
        ours = PatchProcessor(SMALL, tokenizer())
        _, (slot,) = media_of(ours, Media("video", str(path)))
        assert slot.frames == (0, 3, 6, 9) and slot.size == (48, 64)
        if container != "matroska":  # whose header does not count the frames, which transformers relies on
            frames, _ = load_video(str(path), backend="pyav")
            given = Media("video", tuple(encoded(frames[number]) for number in slot.frames))
            assert numpy.array_equal(ours.load(slot), ours.load(media_of(ours, given)[1][0]))
