"""Processors of images in Hugging Face folders: read on import, compared with a recipe's, written on export; and what cannot be read is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import chz
import pytest
from intarsia.checkpoint import open_weights
from intarsia.cli import main
from intarsia.config import load_saved
from intarsia.errors import CheckpointError, UsageError
from intarsia.plugins import current, import_reference
from intarsia_data.config import ByteTokenizerConfig
from intarsia_generation import load
from intarsia_huggingface.rules import apply_rules, whole_numbers
from intarsia_multimodal.config import PatchProcessorConfig
from intarsia_multimodal.hf import IMAGES, TOGETHER, VIDEOS, processor_to_ours, processor_to_theirs
from intarsia_multimodal.recipes import SPECIALS, small_processor
from intarsia_qwen3_5 import config as qwen3_5
from intarsia_testing.model import fill
from safetensors.torch import save_file

SEEING, TEXT = qwen3_5.debug(), qwen3_5.text_debug()
BOTH = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}
RELEASED_IMAGES: dict[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    **BOTH,
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
RELEASED_VIDEOS: dict[str, Any] = {
    "size": {"longest_edge": 25165824, "shortest_edge": 4096},
    **BOTH,
    "video_processor_type": "Qwen3VLVideoProcessor",
}
OTHER = chz.replace(small_processor(), max_pixels=4096, video_max_pixels=16384, mean=(0.25, 0.5, 0.75), fps=1.5, max_frame_tokens=9)


def read(images: Any = RELEASED_IMAGES, videos: Any = RELEASED_VIDEOS, base: Any = None, model: Any = SEEING, **files: Any) -> Any:
    have = {IMAGES: images, VIDEOS: videos, TOGETHER: None, **files}
    return processor_to_ours(lambda name: have[name], model, base)


def test_released_files_are_the_defaults():
    """Those of Qwen3-VL and Qwen3.5."""
    assert read() == (PatchProcessorConfig(), [])
    assert read(base=OTHER)[0] == chz.replace(PatchProcessorConfig(), fps=2.0)


def test_what_files_do_not_say_is_what_the_classes_do():
    found, said = read({"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "min_pixels": 1024, "max_pixels": 4096}, None)
    assert (found.patch, found.merge, found.min_pixels, found.max_pixels) == (16, 2, 1024, 4096) and found.mean[0] == 0.48145466
    assert said == [f"there is no {VIDEOS}: what the processor does with video stays as it is (video_min_pixels=4096, video_max_pixels=25165824, max_frame_tokens=0, fps=2.0, min_frames=4, max_frames=768)"]  # fmt: skip
    null = dict.fromkeys(("min_pixels", "max_pixels", "do_resize", "image_mean"))
    found, said = read(
        {**RELEASED_IMAGES, **null}, {**RELEASED_VIDEOS, "num_frames": None, "fps": None, "image_mean": [0.48145466, 0.4578275, 0.40821073]}
    )
    assert (found.min_pixels, found.max_pixels, found.mean[0], said) == (65536, 16777216, 0.48145466, [])
    found, said = read(RELEASED_IMAGES, {"cap_pixels_per_frame": True})
    assert (found.video_min_pixels, found.video_max_pixels, found.max_frame_tokens) == (131072, 786432, 768) and not said


def test_one_file_for_both_comes_first():
    both = {"image_processor": {**RELEASED_IMAGES, "patch_size": 14}, "video_processor": {**RELEASED_VIDEOS, "patch_size": 14, "fps": 3}}
    found, said = read(**{TOGETHER: both})
    assert (found.patch, found.fps, said) == (14, 3.0, [])
    found, said = read(**{TOGETHER: {"processor_class": "Qwen3VLProcessor"}})
    assert (found.patch, said) == (16, [])


@pytest.mark.parametrize(
    "images,message",
    [
        (None, r"no preprocessor_config\.json.*the recipe's processor stays as it is \(patch=8, .*max_pixels=4096"),
        ({**RELEASED_IMAGES, "image_processor_type": "Qwen2VLImageProcesor"}, r"'Qwen2VLImageProcesor'.*Qwen2VLImageProcessor.*patch=8"),
        ({**RELEASED_IMAGES, "image_processor_type": "SiglipImageProcessor"}, r"image_processor_type = 'SiglipImageProcessor'.*stays"),
        ({**RELEASED_IMAGES, "do_normalize": False}, r"do_normalize = False, and patches has only True"),
        ({**RELEASED_IMAGES, "rescale_factor": 0.5}, r"rescale_factor = 0\.5"),
        ({**RELEASED_IMAGES, "resample": 2}, r"resample = 2"),
        ({**RELEASED_IMAGES, "size": {"height": 224, "width": 224}}, r"size = .*shortest_edge and longest_edge"),
        ({**RELEASED_IMAGES, "patch_size": "16"}, r"patch_size = '16', which must be a whole number"),
        ({**RELEASED_IMAGES, "image_std": [0.5, 0.5]}, r"image_std = \[0\.5, 0\.5\], which must be three numbers"),
        ({**RELEASED_IMAGES, "size": {"shortest_edge": 99, "longest_edge": 9}}, r"cannot be used: processor\.min_pixels is 99, above"),
    ],
)
def test_what_cannot_be_read_leaves_the_recipes_processor(images, message):
    found, said = read(images, base=OTHER)
    assert found == OTHER
    assert re.search(message, " ".join(said))


@pytest.mark.parametrize(
    "videos,message",
    [
        ({**RELEASED_VIDEOS, "video_processor_type": "Qwen2VLVideoProcessor"}, r"'Qwen2VLVideoProcessor'.*video_max_pixels=16384"),
        ({**RELEASED_VIDEOS, "num_frames": 8}, r"num_frames = 8"),
        ({**RELEASED_VIDEOS, "do_sample_frames": False}, r"do_sample_frames = False"),
        ({**RELEASED_VIDEOS, "image_mean": [0.1, 0.5, 0.5]}, r"image_mean is \(0\.1, 0\.5, 0\.5\), and \(0\.5, 0\.5, 0\.5\) for images"),
        ({**RELEASED_VIDEOS, "fps": "two"}, r"fps = 'two', which must be a number"),
        ({**RELEASED_VIDEOS, "fps": 0}, r"^video_preprocessor_config\.json cannot be used: processor\.fps is 0\.0.*max_frames=768\)$"),
        (
            {**RELEASED_VIDEOS, "size": {"shortest_edge": 99, "longest_edge": 9}},
            r"^video_preprocessor_config\.json cannot be used: processor\.video_min_pixels is 99, above.*video_max_pixels=16384",
        ),
    ],
)
def test_what_cannot_be_read_of_video_leaves_the_recipes_settings(videos, message):
    found, said = read(RELEASED_IMAGES, videos, OTHER)
    assert found.max_pixels == 16777216 and (found.video_max_pixels, found.fps, found.max_frame_tokens) == (16384, 1.5, 9)
    assert re.search(message, " ".join(said))


def test_nothing_is_made_up_where_there_is_no_recipe():
    assert read(None) == (None, [])
    found, said = read({**RELEASED_IMAGES, "image_processor_type": "SiglipImageProcessor"})
    assert found is None and "nothing says how images become patches" in said[0]


def test_models_of_text_have_none_and_other_processors_are_left_alone():
    assert read(base=OTHER, model=TEXT) == (OTHER, [])
    found, said = read(base=ByteTokenizerConfig())
    assert found == ByteTokenizerConfig() and "ByteTokenizerConfig" in said[0]
    files, said = processor_to_theirs(ByteTokenizerConfig())
    assert files == {} and "not written" in said[0]
    assert "time stamps" in processor_to_theirs(chz.replace(OTHER, timestamps=False))[1][0]


@pytest.mark.parametrize("processor", [PatchProcessorConfig(), PatchProcessorConfig(fps=3), OTHER, small_processor()])
def test_files_go_round(processor):
    files, said = processor_to_theirs(processor)
    files = json.loads(json.dumps(files))
    assert not said and read(files[IMAGES], files[VIDEOS], chz.replace(PatchProcessorConfig(), fps=9.0)) == (processor, [])


# ---------------------------------------------------------------- folders


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the debug size, without a processor's files."""
    folder = tmp_path_factory.mktemp("hub")
    table = import_reference(current().entry_of(SEEING).hf)
    theirs = import_reference(table.config_to_theirs)(SEEING)
    model = fill(current().build(SEEING), 0, 0.05)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    aliases = {other: group[0] for group in model.regions().ties for other in group[1:]}
    layers, sizes = len(model.regions().blocks), whole_numbers(theirs)
    tensors = apply_rules(table, values, layers, "export", sizes=sizes, names=set(values), aliases=aliases)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(theirs))
    return folder


def folder_with(weights: Path, place: Path, files: Any) -> Path:
    place.mkdir()
    for file in weights.iterdir():
        (place / file.name).symlink_to(file)
    for name, content in files.items():
        (place / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return place


def imported(folder: Path, run: Path, *more: str) -> int:
    return main(["checkpoint", "import", str(folder), str(run), "--from", "hf", *more])


def test_an_imported_run_sees_as_the_folder_says_and_exports_it(weights, tmp_path, caplog):
    folder = folder_with(weights, tmp_path / "hub", processor_to_theirs(OTHER)[0])
    assert imported(folder, tmp_path / "run", "--option", "recipe=qwen3_5/debug") == 0
    loader: Any = load_saved(tmp_path / "run").recipe.data.loader
    assert loader.processor == OTHER
    assert f"data.loader.processor becomes that of {folder}: max_pixels is 1024, there 4096." in caplog.text
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hf"]) == 0
    for name in (IMAGES, VIDEOS):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((folder / name).read_text())
    caplog.clear()
    other = folder_with(weights, tmp_path / "other", processor_to_theirs(small_processor())[0])
    assert imported(other, tmp_path / "run") == 0
    assert f"data.loader.processor is not that of {other}: max_pixels is 4096, there 1024." in caplog.text
    assert load_saved(tmp_path / "run").recipe.data.loader.processor == OTHER  # type: ignore[attr-defined]


def test_a_folder_without_files_leaves_the_recipes_processor_and_says_which(weights, tmp_path, caplog):
    assert imported(weights, tmp_path / "run", "--option", "recipe=qwen3_5/debug") == 0
    assert load_saved(tmp_path / "run").recipe.data.loader.processor == small_processor()  # type: ignore[attr-defined]
    assert f"{weights}: there is no {IMAGES}" in caplog.text and "max_pixels=1024" in caplog.text
    caplog.clear()
    assert imported(weights, tmp_path / "text", "--option", "recipe=qwen3_5/text-debug") == 0
    assert IMAGES not in caplog.text, "a loader of text needs no processor"


def test_a_broken_file_is_told_by_name(weights, tmp_path):
    folder = folder_with(weights, tmp_path / "hub", {IMAGES: "{"})
    with pytest.raises(CheckpointError, match=rf"{IMAGES} is not valid JSON"):
        open_weights(folder).processor_on(small_processor())


def test_generation_sees_as_the_folder_says(weights, tmp_path, caplog):
    tokenizer = ByteTokenizerConfig(specials=SPECIALS)
    folder = folder_with(weights, tmp_path / "hub", processor_to_theirs(OTHER)[0])
    for choice in (None, "patches"):
        assert load(folder, tokenizer=tokenizer, processor=choice, device="cpu").processor.config == OTHER
    assert load(folder, tokenizer=tokenizer, processor=small_processor(), device="cpu").processor.config == small_processor()
    with pytest.raises(UsageError, match="no folder whose files describe one"):
        load(weights, tokenizer=tokenizer, device="cpu").processor  # noqa: B018 - the property raises
    assert not caplog.text


def test_a_run_that_begins_with_a_folder_says_where_it_sees_otherwise(weights, tmp_path):
    folder = folder_with(weights, tmp_path / "hub", processor_to_theirs(OTHER)[0])
    settings = [
        "train.steps=1",
        "train.global_batch=1",
        "train.micro_batch=1",
        "train.sequence_length=128",
        "data.loader.workers=0",
        "data.mixture.0.source.documents=8",
    ]
    assert main(["train", "qwen3_5/debug", "--quiet", "--init-from", str(folder), "--dir", str(tmp_path / "run"), *settings]) == 0
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    said = [event for event in events if "data.loader.processor is not that of" in json.dumps(event)]
    assert said and any("max_pixels is 1024, there 4096" in json.dumps(event) for event in said)
