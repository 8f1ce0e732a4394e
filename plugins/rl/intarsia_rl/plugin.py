"""Two plugins, so that each can be switched off alone: the kinds, the loader `rollouts`, the loss `policy` and the command `rl`; and the algorithms. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import BuildStage, Entry, KernelEntry, Run
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def add_hookspecs() -> Sequence[str]:
    """The kinds that this distribution owns."""
    return ["intarsia_rl.hookspecs"]


@hookimpl
def offer_loaders() -> Sequence[Entry]:
    """The loader."""
    return [
        Entry(
            name="rollouts",
            config="intarsia_rl.config:RolloutsConfig",
            target="intarsia_rl.loader:build",
            doc="Batches of rollouts: tasks of an environment, tried by the policy that is being trained.",
        ),
        Entry(
            name="preferences",
            config="intarsia_rl.preferences.config:PreferencesConfig",
            target="intarsia_rl.preferences.loader:build",
            doc="Batches of pairs of answers, one of which is preferred, with what the run's initial weights say of them.",
        ),
    ]


@hookimpl
def offer_data_sources() -> Sequence[Entry]:
    """The source."""
    return [
        Entry(
            name="preferences",
            config="intarsia_rl.preferences.config:PreferenceFilesConfig",
            target="intarsia_rl.preferences.source:PreferenceFiles",
            doc="One pair as a JSON object on each line: a prompt, the chosen answer and the rejected one.",
        )
    ]


@hookimpl
def offer_losses() -> Sequence[Entry]:
    """The losses."""
    return [
        Entry(
            name="policy",
            config="intarsia_rl.algorithms.config:PolicyLossConfig",
            target="intarsia_rl.algorithms.policy:build",
            doc="The policy-gradient loss of an algorithm (`loss.algorithm=grpo`), on rollouts.",
        ),
        Entry(
            name="dpo",
            config="intarsia_rl.algorithms.config:DPOConfig",
            target="intarsia_rl.algorithms.dpo:build",
            doc="Direct preference optimisation, on pairs (arXiv 2305.18290).",
        ),
    ]


@hookimpl
def offer_operators() -> Sequence[Entry]:
    """The operator."""
    return [
        Entry(
            name="token_log_probs",
            target="intarsia_rl.algorithms.operators:token_log_probs",
            doc="Log-probability and entropy of given tokens, from hidden states.",
        )
    ]


@hookimpl
def offer_kernels() -> Sequence[KernelEntry]:
    """What stands in the batch-invariant mode's table for operators that it refuses."""
    return [
        KernelEntry(
            name="gated_delta_rule/refused",
            op="gated_delta_rule",
            target="intarsia_rl.invariant.refused:gated_delta_rule",
            dtypes=("float32", "bfloat16"),
            numerics="bitwise",
            invariant=True,
            doc="Of the batch-invariant mode: refuses every call.",
        )
    ]


@hookimpl
def offer_routings() -> Sequence[Entry]:
    """The routing."""
    return [
        Entry(
            name="least_loaded",
            config="intarsia_rl.processes.config:LeastLoadedConfig",
            target="intarsia_rl.processes.routing:LeastLoaded",
            doc="The generator with the fewest requests.",
        )
    ]


@hookimpl
def offer_process_launchers() -> Sequence[Entry]:
    """The launcher."""
    return [
        Entry(
            name="local_processes",
            config="intarsia_rl.processes.config:LocalProcessesConfig",
            target="intarsia_rl.processes.local:LocalProcesses",
            doc="Processes on this machine.",
        )
    ]


@hookimpl
def offer_weight_transports() -> Sequence[Entry]:
    """The transports."""
    return [
        Entry(
            name="shared_memory",
            config="intarsia_rl.weights.config:SharedMemoryConfig",
            target="intarsia_rl.weights.shared_memory:SharedMemory",
            doc="Through memory that trainer and generators of one machine share.",
        ),
        Entry(
            name="socket",
            config="intarsia_rl.weights.config:SocketConfig",
            target="intarsia_rl.weights.socket:Socket",
            doc="Over TCP, each trainer rank sending its own parts: between machines, without a process group.",
        ),
        Entry(
            name="collective",
            config="intarsia_rl.weights.config:CollectiveConfig",
            target="intarsia_rl.weights.collective:Collective",
            doc="By point-to-point sends of process groups: NCCL from device to device, gloo elsewhere; a group for each trainer rank and generator.",
        ),
    ]


@hookimpl
def offer_renderers() -> Sequence[Entry]:
    """The renderer."""
    return [
        Entry(
            name="chat",
            config="intarsia_rl.render.config:ChatConfig",
            target="intarsia_rl.render.chat:build",
            doc="Roles as the tokenizer marks them; tools as JSON.",
        )
    ]


@hookimpl
def offer_transforms() -> Sequence[Entry]:
    """The transform."""
    return [
        Entry(
            name="batch_invariant",
            target="intarsia_rl.invariant.transform:batch_invariant",
            doc="Trainer and generator equal bit for bit: batch-invariant operators on both sides.",
        )
    ]


@hookimpl
def offer_commands() -> Sequence[Entry]:
    """The command."""
    return [
        Entry(name="rl", target="intarsia_rl.command:command", doc="Show rollouts; prove that trainer and generator agree bit for bit.")
    ]


@hookimpl
def before_build(run: Run, stage: BuildStage) -> None:
    """Refuse, before anything is built, operators that the batch-invariant mode does not know."""
    if stage == "mesh" and _learns_from_rollouts(run):
        from intarsia_rl import hooks

        hooks.check(run)


@hookimpl
def after_build(run: Run, stage: BuildStage) -> None:
    """Refuse a loss for pairs with a loader of documents; later show the loader the parts of the run that it publishes weights from, or asks the reference of."""
    if stage == "data":
        from intarsia_rl.preferences.check import check_gives_pairs

        check_gives_pairs(run)
    elif stage == "checkpoint" and _learns_from_rollouts(run):
        from intarsia_rl import hooks

        hooks.attach(run)
    elif stage == "checkpoint" and _learns_from_pairs(run):
        run.parts["data"].attach(run)


@hookimpl
def before_update(run: Run, step: int) -> None:
    """Record what this step's rollouts were, and the largest difference between trainer and generator."""
    if _learns_from_rollouts(run):
        from intarsia_rl import hooks

        hooks.record_step(run, step)


def _learns_from_rollouts(run: Run) -> bool:
    from intarsia_rl.config import RolloutsConfig

    return isinstance(run.recipe.data.loader, RolloutsConfig)


def _learns_from_pairs(run: Run) -> bool:
    from intarsia_rl.preferences.config import PreferencesConfig

    return isinstance(run.recipe.data.loader, PreferencesConfig)


class Algorithms:
    """Offers the algorithms."""

    INTARSIA_API = 1

    @hookimpl(optionalhook=True)
    def offer_algorithms(self) -> Sequence[Entry]:
        """All of them."""
        rows = (
            (
                "grpo",
                "GRPOConfig",
                "grpo:GRPO",
                "Group-relative policy optimisation: advantages in units of the group's deviation (arXiv 2402.03300).",
            ),
            ("dr_grpo", "DrGRPOConfig", "grpo:DrGRPO", "GRPO without its biases to length and difficulty (arXiv 2503.20783)."),
            ("dapo", "DAPOConfig", "grpo:DAPO", "Token-level loss, wider clip upwards, groups that teach something (arXiv 2503.14476)."),
            ("rloo", "RLOOConfig", "rloo:RLOO", "REINFORCE against the mean of the other tries (arXiv 2402.14740)."),
        )
        home = "intarsia_rl.algorithms"
        return [
            Entry(name=name, config=f"{home}.config:{config}", target=f"{home}.{target}", doc=doc) for name, config, target, doc in rows
        ]


algorithms = Algorithms()
