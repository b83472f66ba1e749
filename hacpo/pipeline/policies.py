"""Whether a checkpoint holds the weights, config and tokenizer that the run's files were made with.

Most checkpoints are not in DVC's cache (`hacpo.pipeline.records.caching`): `git checkout` and `dvc checkout` bring back
the tables and locks of another state and leave those as they are. So the stage that makes a checkpoint notes the hash
of its weights (`policy`), and of what libraries read beside them (`policy_config`), in its metrics, which DVC does
cache, and whoever reads the checkpoint compares. Where metrics say nothing of the weights, the rollouts that were drawn
from the checkpoint do; where they say nothing of the rest (runs of earlier versions), nothing does.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from hacpo.artifacts import storage, tables
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.model_folder import config_files, config_hash
from hacpo.artifacts.tables import CHECKPOINT
from hacpo.artifacts.weights import holds_adapter, policy_files, policy_hash
from hacpo.errors import ArtifactError, HacpoError
from hacpo.pipeline.catalogue import maker_of
from hacpo.pipeline.noted import POLICY, POLICY_CONFIG, noted, stage_metrics
from hacpo.pipeline.project import Pipeline


def recorded_policy(layout: Layout, step: int, agent: str) -> str | None:
    """The hash of the weights that the run's files name; None where they do not."""
    return _noted(layout, step, agent, POLICY) or _sampled_policy(layout.rollouts(step + 1, agent))


def drawn_from_others(layout: Layout, step: int, agent: str) -> bool:
    """Whether an agent's rollouts of a step name other weights than the metrics of the step before; no weights are
    read."""
    made, drawn = _noted(layout, step - 1, agent, POLICY), _sampled_policy(layout.rollouts(step, agent))
    return made is not None and drawn is not None and made != drawn


def check_policy(
    pipeline: Pipeline, step: int, agent: str, policy: str | None = None, *, remembered: bool = True
) -> str:
    """Refuse a checkpoint with other weights, config or tokenizer than the run's files were made with; returns the hash
    of its weights.

    Args:
        policy: the hash of the weights, where somebody has computed it; they are read otherwise.
        remembered: note what was found for `holds_others`.

    Raises:
        ArtifactError: a hash is another than the recorded one.
        ModelError: there are no weights.
    """
    layout = pipeline.layout
    folder = layout.checkpoint(step, agent)
    stamps = _stamps(folder)
    policy = policy_hash(folder) if policy is None else policy
    config = config_hash(folder)
    if remembered:
        _remember(layout, step, agent, {POLICY: policy, POLICY_CONFIG: config, "files": stamps})
    _compare(pipeline, folder, "its weights are not those", POLICY, recorded_policy(layout, step, agent), policy)
    _compare_config(pipeline, step, agent, config)
    if step > 0 and holds_adapter(folder) and layout.checkpoint(0, agent).is_dir():
        check_config(pipeline, 0, agent)  # the base's; of its weights the adapter names the hash
    return policy


def policy_of(layout: Layout, step: int, agent: str) -> str:
    """The hash of a checkpoint's weights: as the last reader or writer found it, if the files are those that it met.

    Raises:
        ModelError: there are no weights.
    """
    folder = layout.checkpoint(step, agent)
    known = noted(layout.known_policy(step, agent))
    policy = known.get(POLICY) if known and known.get("files") == _stamps(folder) else None
    return policy if isinstance(policy, str) else policy_hash(folder)


def check_config(pipeline: Pipeline, step: int, agent: str) -> None:
    """Refuse a checkpoint with another config or tokenizer than the run's files were made with; no weights are read.

    Raises:
        ArtifactError: it has one.
    """
    _compare_config(pipeline, step, agent, config_hash(pipeline.layout.checkpoint(step, agent)))


def _compare_config(pipeline: Pipeline, step: int, agent: str, config: str) -> None:
    wanted = _noted(pipeline.layout, step, agent, POLICY_CONFIG)
    what = "its config, generation config, tokenizer or chat template is not the one"
    _compare(pipeline, pipeline.layout.checkpoint(step, agent), what, POLICY_CONFIG, wanted, config)


def _compare(pipeline: Pipeline, folder: Path, what: str, key: str, wanted: str | None, found: str) -> None:
    if wanted is not None and found != wanted:
        raise ArtifactError(
            f"{what} that the files of this run were made with",
            where=folder,
            expected=f"{key} {wanted[:16]}",
            found=found[:16],
            remedy=f"put the right checkpoint there, or make it again: `{pipeline.command('run')}`",
        )


def holds_others(layout: Layout, step: int, agent: str) -> bool:
    """Whether a checkpoint is known to hold other weights, config or tokenizer than the run's files were made with.

    Neither is read: what they hashed to is taken from the last reader or writer, as long as sizes and modification
    times are those that it met.
    """
    known = noted(layout.known_policy(step, agent))
    if not known or known.get("files") != _stamps(layout.checkpoint(step, agent)):
        return False
    if recorded_policy(layout, step, agent) not in (None, known.get(POLICY)):
        return True
    return _noted(layout, step, agent, POLICY_CONFIG) not in (None, known.get(POLICY_CONFIG))


def _noted(layout: Layout, step: int, agent: str, key: str) -> str | None:
    """What the metrics of the stage that made a checkpoint say of it; None where they say nothing."""
    value = stage_metrics(layout, maker_of(CHECKPOINT, step), step, agent).get(key)
    return value if isinstance(value, str) else None


def _remember(layout: Layout, step: int, agent: str, content: dict[str, object]) -> None:
    path = layout.known_policy(step, agent)
    if noted(path) != content:
        with contextlib.suppress(HacpoError, OSError):  # a run that may only be read is read all the same
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.write_json(path, content)


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Size and modification time in ns of the files that are hashed; empty where one is missing."""
    try:
        files = [*policy_files(folder), *config_files(folder)]
        return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    except (OSError, HacpoError):
        return {}


def _sampled_policy(rollouts: Path) -> str | None:
    """The policy of the first of an agent's rollouts; None where there are none, or none that can be read."""
    from hacpo.artifacts import parquet

    with contextlib.suppress(HacpoError, OSError):
        for shard in parquet.whole_shards(rollouts, tables.ROLLOUTS, columns=["policy"]):
            return str(shard.content["policy"][0].as_py()) if len(shard.content) else None
    return None
