"""`intarsia generate`. torch is imported only once the arguments are known to be good."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intarsia.contracts import Media, Message
from intarsia.errors import UsageError

from intarsia_generation.settings import SamplingConfig

if TYPE_CHECKING:
    from intarsia_generation.generator import Completion, Generator


class GenerateCommand:
    """Generates."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The command's arguments."""
        add, defaults = parser.add_argument, SamplingConfig()
        add("source", metavar="SOURCE", help="a run directory (its newest complete checkpoint), a checkpoint, or a Hugging Face folder")
        add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated. Without any, standard input is one")
        add("--prompts-file", type=Path, metavar="FILE", help="a file with one prompt on each line")
        add("--chat", action="store_true", help="each prompt is a user's message, and the assistant answers")
        add(
            "--image",
            dest="media",
            action="append",
            default=[],
            type=_image,
            metavar="FILE",
            help="each prompt begins with this image; may be repeated",
        )
        add(
            "--video",
            dest="media",
            action="append",
            type=_video,
            metavar="FILE",
            help="the same for a video; the order is that of the command line",
        )
        add("--processor", metavar="NAME", help="what turns images and video into tokens; default: the run's own")
        add("--max-tokens", type=int, default=defaults.max_tokens, metavar="N", help="most tokens of a completion (default %(default)s)")
        add(
            "--temperature",
            type=float,
            default=defaults.temperature,
            metavar="T",
            help="divides the logits; 0 is greedy (default %(default)s)",
        )
        add("--greedy", action="store_true", help="always the likeliest token; the same as --temperature 0")
        add("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
        add("--top-p", type=float, default=1.0, metavar="P", help="draw among the likeliest tokens whose probabilities sum to P")
        add("--min-p", type=float, default=0.0, metavar="P", help="draw among tokens at least P times as likely as the likeliest")
        add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
        add("--ignore-eos", action="store_true", help="go on after an end-of-text token")
        add("--seed", type=int, default=0, metavar="N", help="seed of the draws (default %(default)s)")
        add("--samples", type=int, default=1, metavar="N", help="completions of each prompt (default %(default)s)")
        add("--tokenizer", metavar="PATH", help="a tokenizer.json, its folder, or a tokenizer's name; default: what goes with the model")
        add("--template", metavar="NAME", help="--chat: a chat template: its name, folder (the one beside the tokenizer) or a .jinja file")
        add("--device", default="auto", help="auto, cpu or cuda (default %(default)s)")
        add("--dtype", default="auto", help="what the model computes in (default: float32 on a CPU, else as it was trained)")
        add("--kernels", action="append", default=[], metavar="[OP=]KERNEL", help="kernels, as in a recipe: reference, or attention=sdpa")
        add("--batch", type=int, default=32, metavar="N", help="most completions generated together (default %(default)s)")
        add("--json", action="store_true", help="print JSON and nothing else to stdout: tokens and log-probabilities included")
        add("--no-stream", action="store_true", help="print a completion when it is whole")

    def run(self, arguments: argparse.Namespace) -> int:
        """Load, generate, show, and record it in the run."""
        if arguments.greedy and arguments.temperature not in (0.0, SamplingConfig().temperature):
            raise UsageError(f"--greedy and --temperature {arguments.temperature} contradict each other: give one of them.")
        if arguments.batch < 1:
            raise UsageError(f"--batch is {arguments.batch}; it must be at least 1.")
        config = SamplingConfig(
            max_tokens=arguments.max_tokens,
            temperature=0.0 if arguments.greedy else arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
            stop=tuple(arguments.stop),
            ignore_eos=arguments.ignore_eos,
            seed=arguments.seed,
            samples=arguments.samples,
        )
        if arguments.template is not None and not arguments.chat:
            raise UsageError("--template is for conversations: give --chat as well.")
        kernels = _kernels(arguments.kernels)
        media = _media(arguments.media)
        prompts = _prompts(arguments)
        from intarsia_generation.source import load

        generator = load(
            arguments.source,
            tokenizer=arguments.tokenizer,
            template=arguments.template,
            processor=arguments.processor,
            device=arguments.device,
            dtype=arguments.dtype,
            kernels=kernels,
            batch=arguments.batch,
        )
        inputs: list[Any] = [(*media, prompt) if media else prompt for prompt in prompts]
        if arguments.chat:
            inputs = [[Message("user", each)] for each in inputs]
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")
        streaming = not arguments.json and not arguments.no_stream and len(inputs) * config.samples == 1
        # The prompt is shown with the first piece of text: a refusal must not stand behind half an answer.
        waiting = [] if arguments.chat else [prompts[0]]

        def stream(_: int, text: str) -> None:
            _write("".join([*waiting, text]))
            waiting.clear()

        start = time.perf_counter()
        completions = generator.generate(inputs, config, stream if streaming else None)
        seconds_s = time.perf_counter() - start
        if streaming:
            stream(0, "\n")
        completions = [dataclasses.replace(each, prompt=prompts[number // config.samples]) for number, each in enumerate(completions)]
        _show(arguments, generator, config, completions, streaming, seconds_s)
        _record(generator, config, completions, seconds_s, [str(each.data) for each in media])
        return 0


command = GenerateCommand()


def _kernels(texts: list[str]) -> dict[str, str] | None:
    pairs = [text.partition("=") for text in texts]
    return {op if equals else "*": kernel if equals else op for op, equals, kernel in pairs} or None


def _image(path: str) -> Media:
    return Media("image", path)


def _video(path: str) -> Media:
    return Media("video", path)


def _media(media: list[Media]) -> list[Media]:
    """The command line's media, which must be files."""
    for each in media:
        named = str(each.data)
        if not named:
            raise UsageError(f"--{each.kind}: its file is named by an empty text.")
        if "://" in named:
            raise UsageError(f"--{each.kind} {named}: an URL is not fetched. Download it, and name the file.")
        path = Path(named)
        if not path.is_file():
            raise UsageError(f"--{each.kind} {named}: {'it is no file' if path.exists() else 'there is no such file'}.")
    return media


def _prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts of the command line, of the file, or of standard input."""
    prompts = list(arguments.prompt)
    if arguments.prompts_file is not None:
        try:
            prompts += arguments.prompts_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompts-file {arguments.prompts_file} cannot be read: {error}.") from error
        if not prompts:
            raise UsageError(f"--prompts-file {arguments.prompts_file} is empty.")
    if not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("There is no prompt: give --prompt TEXT, --prompts-file FILE, or a text on standard input.")
        prompts = [sys.stdin.read()]
    return prompts


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _settings(config: SamplingConfig) -> dict[str, Any]:
    return {**dataclasses.asdict(config), "stop": list(config.stop)}


def _show(
    arguments: argparse.Namespace,
    generator: Generator,
    config: SamplingConfig,
    completions: list[Completion],
    streaming: bool,
    seconds_s: float,
) -> None:
    count = sum(len(each.tokens) for each in completions)
    if arguments.json:
        facts = {"location": generator.location, "step": generator.step, "settings": _settings(config), "seconds_s": seconds_s}
        print(json.dumps({**facts, "completions": [dataclasses.asdict(each) for each in completions]}, indent=2, ensure_ascii=False))
        return
    if not streaming:
        for number, each in enumerate(completions):
            if len(completions) > 1:
                sample = f", sample {each.sample + 1}" if config.samples > 1 else ""
                print(f"--- prompt {number // config.samples + 1}{sample}")
            print(each.text if arguments.chat else f"{each.prompt}{each.text}")
    step = "" if generator.step is None else f", checkpoint of step {generator.step}"
    reasons = ", ".join(dict.fromkeys(each.finish for each in completions))
    sys.stdout.flush()
    print(f"{count} tokens in {seconds_s:.2f} s, {count / max(seconds_s, 1e-9):.1f} tokens/s{step}; ended by {reasons}", file=sys.stderr)


def _record(generator: Generator, config: SamplingConfig, completions: list[Completion], seconds_s: float, media: list[str]) -> None:
    """One event for each completion, in the run's own record."""
    if generator.run is None:
        return
    from intarsia.train.events import append_event

    rate = sum(len(each.tokens) for each in completions) / max(seconds_s, 1e-9)
    for each in completions:
        append_event(
            generator.run,
            "generate",
            step=generator.step,
            location=generator.location,
            prompt=each.prompt,
            sample=each.sample,
            text=each.text,
            tokens=len(each.tokens),
            finish=each.finish,
            seconds_s=seconds_s,
            tokens_per_s=rate,
            settings=_settings(config),
            **({"media": media} if media else {}),
        )
