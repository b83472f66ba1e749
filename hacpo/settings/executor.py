"""Where the stages of `hacpo run` are carried out."""

from __future__ import annotations

from typing import Literal

from hacpo.settings.base import Section, knob

Kind = Literal["local", "ray", "slurm"]
KINDS: tuple[Kind, ...] = ("local", "ray", "slurm")


class StageResources(Section):
    """What one process of a stage needs of a machine."""

    cpus: float = knob(1, doc="CPU cores.", unit="cores", gt=0)
    gpus: float = knob(0, doc="GPUs.", unit="GPUs", ge=0)
    memory_gib: float | None = knob(None, doc="Memory; null: nothing is asked for.", unit="GiB", gt=0)


class ExecutorSettings(Section):
    """What carries out the stages of `hacpo run`. No byte depends on it, and DVC does not track it (docs/scale.md)."""

    kind: Kind = knob(
        "local",
        doc="`local`: processes of this machine; `ray`: tasks of a Ray cluster (`hacpo[ray]`); `slurm`: jobs "
        "(`hacpo[slurm]`). The others need the project under the same path on every machine. `hacpo run --executor` "
        "says otherwise for one command.",
    )
    address: str | None = knob(None, doc="Of the Ray cluster; null: the one that this machine is part of.")
    slices: int | None = knob(
        None,
        doc="Most parts that one agent's `generate`, `verify`, `pool` or `evaluate` is divided into; null: one for "
        "each file of its table (`storage.rows_per_shard`). Not with `local`.",
        unit="processes",
        ge=1,
    )
    retries: int = knob(
        3, doc="How often an order is repeated whose process or machine was lost. A stage's own error is never.", ge=0
    )
    keep_models: bool = knob(
        True, doc="With `ray`: processes with a model stay for the next step, as long as nobody waits for their room."
    )
    stages: dict[str, StageResources] = knob(
        default_factory=dict, doc="Stage -> what one process of it needs; `default` for those that are not named."
    )
    sbatch: dict[str, str | int] = knob(
        default_factory=dict, doc="With `slurm`: options of sbatch, such as `partition: gpu` and `time: 60`."
    )

    def resources(self, command: str) -> StageResources:
        """What a process of a stage's command needs."""
        return self.stages.get(command, self.stages.get("default", StageResources()))
