"""`intarsia media`: what it prints, and images as the model sees them."""

from __future__ import annotations

import json

import numpy
import pytest
from intarsia.cli import main
from intarsia_llama3.recipes import debug
from intarsia_multimodal.resampling import from_patches, level_table, to_patches
from PIL import Image

from tests.support.media import encoded, noise, smooth, video

RECIPE = """
import chz
from intarsia.config import DataConfig, MixturePart
from intarsia_data.config import ByteTokenizerConfig
from intarsia_qwen3_vl.recipes import debug
from intarsia_multimodal.config import DrawnConfig, MultimodalConfig, PatchProcessorConfig


def seeing():
    processor = PatchProcessorConfig(patch=4, min_pixels=256, max_pixels=4096, video_min_pixels=256, video_max_pixels=16384)
    tokenizer = ByteTokenizerConfig(specials=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"))
    data = DataConfig(
        loader=MultimodalConfig(processor=processor), tokenizer=tokenizer, mixture=(MixturePart(source=DrawnConfig(documents=40)),)
    )
    recipe = debug()
    return chz.replace(recipe, data=data, model=chz.replace(recipe.model, vision=chz.replace(recipe.model.vision, patch=4)))
"""


def show(folder, capsys, *words):
    (folder / "recipes.py").write_text(RECIPE)
    code = main(["media", f"{folder}/recipes.py:seeing", *words])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_it_shows_documents_and_images(tmp_path, capsys):
    (tmp_path / "v.mp4").write_bytes(video(8))
    (tmp_path / "a.png").write_bytes(encoded(smooth(16, 32)))
    (tmp_path / "b.png").write_bytes(encoded(noise(16, 16))[:200])
    records = [
        {"messages": [{"role": "user", "content": [{"image": "a.png"}, "What?"]}, {"role": "assistant", "content": "That."}]},
        {"parts": ["one ", {"video": "v.mp4"}]},
        {"images": ["b.png"], "text": "damaged"},
        {"images": ["c.png"], "text": "missing"},
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source = "data.mixture.0.source"
    settings = [
        f"{source}=media_jsonl",
        f"{source}.paths={tmp_path}/d.jsonl",
        "data.held_out=0",
        "data.loader.bad_media=skip",
        "data.epochs=1",
    ]
    settings += ["train.sequence_length=256", "train.global_batch=1", "train.micro_batch=1"]
    code, out, _ = show(tmp_path, capsys, *settings, "--images", str(tmp_path / "seen"), "--steps", "9")
    assert code == 0
    assert "3 documents" in out and "0 too long, 1 with media that cannot be used\n  document 3: image " in out
    assert "tokens: [1 x 4 x 8 patches, 8 tokens]What?>That.<\n" in out
    assert ">one <<0.2 seconds>[2 x 12 x 16 patches, 96 tokens]<1.2 seconds>" in out
    assert "padding instead of data.mixture.0.source (media_jsonl): document 2: image " in out and "tokens: (padding)\n" in out
    assert "The data ends after 1 steps." in out
    code, _, error = show(tmp_path, capsys, "--steps", "-1")
    assert code and "--steps is -1; it must be at least 1." in error
    names = sorted(path.name for path in (tmp_path / "seen").iterdir())
    assert len(names) == 5
    (image,) = (path for path in (tmp_path / "seen").iterdir() if path.stem.count("-") == 1)
    assert numpy.array_equal(numpy.asarray(Image.open(image)), smooth(16, 32)), "an image whose size fits is seen as it is"


def test_it_shows_what_evaluation_sees(tmp_path, capsys):
    _, train, _ = show(tmp_path, capsys)
    code, held_out, _ = show(tmp_path, capsys, "--split", "evaluation")
    assert code == 0 and "38 documents" in train and "data.mixture.0.source (drawn): 2 documents" in held_out
    assert train.count("?>") > 4


def test_a_recipe_without_media_is_refused(capsys):
    assert debug().data.loader is not None
    assert main(["media", "llama3/debug"]) == 2
    assert "The recipe's loader is packed, whose documents have no media. Choose data.loader=multimodal" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["pillow", "torch"])
def test_patches_become_pictures_again(how):
    mean, std = (0.48, 0.45, 0.4), (0.27, 0.26, 0.25)
    frames = numpy.stack([noise(24, 48, number) for number in range(4)])
    patches = to_patches(frames, level_table(mean, std, how), 4, 2, 2)
    assert numpy.array_equal(from_patches(patches, (2, 6, 12), mean, std, 4, 2, 2), frames)


def test_it_says_how_many_media_do_not_fit(tmp_path, capsys):
    (tmp_path / "large.png").write_bytes(encoded(smooth(64, 64)))
    (tmp_path / "small.png").write_bytes(encoded(smooth(16, 16)))
    records = [{"images": ["small.png"], "text": "a"}, {"images": ["small.png", "large.png"], "text": "b"}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source = "data.mixture.0.source"
    code, out, _ = show(
        tmp_path, capsys, f"{source}=media_jsonl", f"{source}.paths={tmp_path}/d.jsonl", "data.held_out=0", "data.loader.patches=32"
    )
    assert code == 0 and "1 too long (by which 1 of 3 media are lost), 0 with media" in out
    code, _, err = show(
        tmp_path, capsys, f"{source}=media_jsonl", f"{source}.paths={tmp_path}/d.jsonl", "data.held_out=0", "data.loader.patches=8"
    )
    assert code == 2 and "none of its 3 images and videos is left" in err
