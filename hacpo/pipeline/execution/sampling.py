"""What generate and evaluate begin with: an agent's checkpoint of a step, as a tokenizer, and as an engine whose
responses are saved while they are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hacpo.artifacts.tables import CHECKPOINT, Table
from hacpo.pipeline.execution.stage import Stage

if TYPE_CHECKING:
    from hacpo.engines.from_checkpoint import Engine
    from hacpo.engines.response_store import SavingSampler
    from hacpo.tokens.tokenizers import ChatTokenizer


def blocks_around(rows: range, together: int, total: int) -> range:
    """The rows of all blocks of `together` rows that some rows are in, of `total` rows."""
    start = rows.start // together * together
    return range(start, min(-(-rows.stop // together) * together, total))


def open_asking_tokenizer(stage: Stage, step: int) -> ChatTokenizer:
    """The tokenizer of the agent's checkpoint of a step, whose chat template takes the agent's prompts. No weights are
    read: what a template refuses must not cost loading them.

    Raises:
        MissingInputError: there is no such checkpoint.
        ModelError: it cannot be used.
        SettingsError: the template refuses the prompt.
    """
    from hacpo.engines.from_checkpoint import open_tokenizer
    from hacpo.tokens.prompts import check_template

    made_by = stage.made_by(CHECKPOINT, step=step)
    tokenizer = open_tokenizer(stage.session.models, stage.checkpoint(step), made_by)
    check_template(tokenizer, stage.mine, stage.settings.agents[stage.mine].prompt)
    return tokenizer


def open_sampler(stage: Stage, step: int, table: Table) -> tuple[Engine, SavingSampler]:
    """The engine of the agent's checkpoint of a step, and its sampler, which saves what it draws until `remove_saved`.

    Args:
        table: which the stage makes of the responses.

    Raises:
        ArtifactError: the weights are not those that the run's files were made with.
        HacpoError: see `from_checkpoint.open_engine`.
    """
    from hacpo.engines.from_checkpoint import open_engine
    from hacpo.engines.response_store import SavingSampler

    settings = stage.settings.engine
    engine = open_engine(
        stage.session.models,
        stage.mine,
        stage.checkpoint(step),
        settings,
        stage.made_by(CHECKPOINT, step=step),
        stage.folder,
        stage.outputs.merged(f"{stage.mine}-{stage.name}"),
    )
    stage.check_policy(step, engine.policy)
    saved = stage.outputs.saved(table.name, stage.step, stage.mine)
    return engine, SavingSampler(engine.sampler, engine.policy, settings, saved)
