"""Whether a checkpoint holds the weights that the run's files were made with.

Most checkpoints are not in DVC's cache (`hacpo.pipeline.records.caching`): `git checkout` and `dvc checkout` bring back
the tables and locks of another state and leave those as they are. So the stage that makes a checkpoint notes the hash
of its weights (`policy`) in its metrics, which DVC does cache, and whoever reads the checkpoint compares. Where metrics
say nothing, the rollouts that were drawn from the checkpoint do.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from hacpo.artifacts import storage, tables
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.tables import CHECKPOINT
from hacpo.artifacts.weights import policy_files, policy_hash
from hacpo.errors import ArtifactError, HacpoError
from hacpo.pipeline.catalogue import maker_of
from hacpo.pipeline.noted import POLICY, noted, stage_metrics
from hacpo.pipeline.project import Pipeline


def recorded_policy(layout: Layout, step: int, agent: str) -> str | None:
    """The hash that the run's files name; None where they do not."""
    recorded = stage_metrics(layout, maker_of(CHECKPOINT, step), step, agent).get(POLICY)
    return recorded if isinstance(recorded, str) else _sampled_policy(layout.rollouts(step + 1, agent))


def check_policy(
    pipeline: Pipeline, step: int, agent: str, policy: str | None = None, *, remembered: bool = True
) -> str:
    """Refuse a checkpoint with other weights than the run's files were made with; returns their hash.

    Args:
        policy: the hash of the weights, where somebody has computed it; they are read otherwise.
        remembered: note it for `holds_others`.

    Raises:
        ArtifactError: the hash is another than the recorded one.
        ModelError: there are no weights.
    """
    layout = pipeline.layout
    folder = layout.checkpoint(step, agent)
    stamps = _stamps(folder)
    policy = policy_hash(folder) if policy is None else policy
    if remembered:
        _remember(layout, step, agent, policy, stamps)
    wanted = recorded_policy(layout, step, agent)
    if wanted is not None and policy != wanted:
        raise ArtifactError(
            "its weights are not those that the files of this run were made with",
            where=folder,
            expected=f"policy {wanted[:16]}",
            found=policy[:16],
            remedy=f"put the right checkpoint there, or make it again: `{pipeline.command('run')}`",
        )
    return policy


def holds_others(layout: Layout, step: int, agent: str) -> bool:
    """Whether a checkpoint is known to hold other weights than the run's files were made with.

    No weights are read: what they hashed to is taken from the last reader or writer, as long as sizes and modification
    times are those that it met.
    """
    known = noted(layout.known_policy(step, agent))
    if not known or known.get("files") != _stamps(layout.checkpoint(step, agent)):
        return False
    return recorded_policy(layout, step, agent) not in (None, known.get("policy"))


def _remember(layout: Layout, step: int, agent: str, policy: str, stamps: dict[str, list[int]]) -> None:
    path, content = layout.known_policy(step, agent), {"policy": policy, "files": stamps}
    if noted(path) != content:
        with contextlib.suppress(HacpoError, OSError):  # a run that may only be read is read all the same
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.write_json(path, content)


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Size and modification time in ns of the files that make the policy; empty where one is missing."""
    try:
        return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in policy_files(folder)}
    except (OSError, HacpoError):
        return {}


def _sampled_policy(rollouts: Path) -> str | None:
    """The policy of the first of an agent's rollouts; None where there are none, or none that can be read."""
    from hacpo.artifacts import parquet

    with contextlib.suppress(HacpoError, OSError):
        for shard in parquet.whole_shards(rollouts, tables.ROLLOUTS, columns=["policy"]):
            return str(shard.content["policy"][0].as_py()) if len(shard.content) else None
    return None
