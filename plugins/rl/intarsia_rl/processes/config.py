"""Settings of what this package offers. Torch-free."""

from __future__ import annotations

import chz

from intarsia_rl.bases import ProcessLauncherConfig, RoutingConfig


@chz.chz(typecheck=True)
class LeastLoadedConfig(RoutingConfig):
    """The generator with the fewest requests; of equal ones the first."""


@chz.chz(typecheck=True)
class LocalProcessesConfig(ProcessLauncherConfig):
    """Processes on this machine, which end with the one that started them."""

    start_s: float = chz.field(default=300.0, doc="Longest time that a process may take to start.")
    message_bytes: int = chz.field(default=1 << 28, doc="Largest message to or from a process.")
    log_folder: str | None = chz.field(
        default=None,
        doc="Folder that gets what each process prints (NAME.log); none: the last lines are kept, and shown when it dies.",
    )

    @chz.validate
    def _positive(self) -> None:
        if self.start_s <= 0 or self.message_bytes < 1 << 16:
            raise ValueError("start_s must be above 0 and message_bytes at least 65536")
