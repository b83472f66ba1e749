"""export: one agent's checkpoint as a plain model folder with a model card, and on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.options import AgentOption, PipelineFolder
from hacpo.pipeline.records.elsewhere import checkpoint_command

if TYPE_CHECKING:
    from hacpo.pipeline.project import Pipeline
    from hacpo.settings.engine import EngineSettings
    from hacpo.tools.export.lora_export import AdapterFacts


def export(
    pipeline: PipelineFolder,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make.", show_default=False)],
    agent: AgentOption,
    step: Annotated[str, typer.Option("--step", help="Training step (0 is the start), or best.", show_default=False)],
    by: Annotated[
        str | None, typer.Option("--by", help="With --step best: the benchmark to choose by.", show_default=False)
    ] = None,
    alone: Annotated[
        bool, typer.Option("--adapter", help="Of an agent with a LoRA adapter: the adapter without its base.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="NAME", help="With --adapter: what others call its base.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model folder that is there.")] = False,
    repository: Annotated[
        str | None, typer.Option("--push", metavar="OWNER/NAME", help="Also upload it to the hub.", show_default=False)
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: make a private repository.")] = False,
) -> None:
    """Write a model folder that any tool loads: weights, config, tokenizer, chat template, model card."""
    from hacpo.errors import SettingsError
    from hacpo.evaluation.results import choose_step, held_out
    from hacpo.pipeline.project import Pipeline
    from hacpo.pipeline.views.made_otherwise import check_made_alike
    from hacpo.tools.export.card import gather_facts, render
    from hacpo.tools.export.folder import check_target
    from hacpo.tools.export.lora_export import adapter_facts
    from hacpo.tools.report.facts import run_settings

    if private and repository is None:
        raise SettingsError("--private belongs to --push")
    if base is not None and not alone:
        raise SettingsError("--base belongs to --adapter")
    opened = Pipeline.open(pipeline)
    layout = opened.layout
    settings = run_settings(layout, opened.settings)
    if agent not in settings.agents:
        raise SettingsError(
            f"no agent {agent!r} in this run", where=pipeline, expected=f"one of {', '.join(settings.agents)}"
        )
    check_target(target, layout.root, force=force)
    curves = held_out(layout, opened.run, settings, agent)
    choice = choose_step(step, by, curves, settings, pipeline)
    checkpoint = _checkpoint(opened, choice.step, agent)
    check_made_alike(opened, settings, [agent], last=choice.step)
    adapter = adapter_facts(checkpoint, alone=alone, base=base, pushed=repository is not None)
    card = render(gather_facts(layout, opened.run, settings, agent, choice, curves, adapter))
    whole = target.resolve()
    _write(whole, opened, choice.step, agent, card, adapter, settings.engine, loadable=not alone)
    what = "adapter alone, in the" if alone else "model"
    print(f"{agent} at step {choice.step}{_why(choice.benchmark, choice.candidates)}: {what} folder {target}")
    if repository is not None:
        from hacpo.hub import push

        address = push(whole, repository, private=private, message=f"{opened.run}: {agent} at step {choice.step}")
        print(f"uploaded: {address}")


def _checkpoint(pipeline: Pipeline, step: int, agent: str) -> Path:
    """The folder of the checkpoint, which is there and holds no links."""
    from hacpo.artifacts.model_folder import check_checkpoint
    from hacpo.errors import MissingInputError
    from hacpo.phrases import ranges
    from hacpo.pipeline.retention.pruned import checkpoints_there, was_pruned

    layout = pipeline.layout
    checkpoint = layout.checkpoint(step, agent)
    if not checkpoint.is_dir():
        pruned = was_pruned(layout, step, agent)
        remaining = ranges(checkpoints_there(layout, agent)) or "none"
        raise MissingInputError(
            "the checkpoint is missing" if pruned is None else f"the checkpoint was pruned (retention: {pruned.rule})",
            where=checkpoint,
            found=f"{agent}'s checkpoints of steps {remaining}",
            remedy=f"run `{checkpoint_command(pipeline, step, agent)}`"
            + ("" if pruned is None else " to train it again"),
        )
    check_checkpoint(checkpoint)
    return checkpoint


def _write(
    target: Path,
    pipeline: Pipeline,
    step: int,
    agent: str,
    card: str,
    adapter: AdapterFacts | None,
    engine: EngineSettings,
    *,
    loadable: bool,
) -> None:
    """Write the model folder whole, its files and its card.

    Args:
        loadable: whether it must be a model by itself, and not an adapter alone.
    """
    from hacpo.artifacts import storage
    from hacpo.engines.models.safe_load import check_loadable
    from hacpo.tools.export.folder import CARD, copy_model
    from hacpo.tools.export.lora_export import export_adapter

    checkpoint = pipeline.layout.checkpoint(step, agent)
    with storage.atomic(target) as scratch:
        scratch.mkdir()
        if adapter is not None:
            export_adapter(checkpoint, scratch, adapter, engine)
        else:
            copy_model(checkpoint, scratch)
        if loadable:
            check_loadable(scratch, called=checkpoint)
        _check_policies(pipeline, step, agent, copy=scratch if adapter is None else None)
        (scratch / CARD).write_text(card, encoding="utf-8")


def _check_policies(pipeline: Pipeline, step: int, agent: str, copy: Path | None) -> None:
    """Refuse weights that are not the run's, a copy that has others, and a start, which the card names, that is not the
    run's."""
    from hacpo.artifacts.weights import policy_hash
    from hacpo.errors import ArtifactError
    from hacpo.pipeline.policies import check_policy

    policy = check_policy(pipeline, step, agent)
    if copy is not None and policy_hash(copy) != policy:
        checkpoint = pipeline.layout.checkpoint(step, agent)
        raise ArtifactError("the weights changed while they were copied", where=checkpoint, remedy="try again")
    if step > 0 and pipeline.layout.checkpoint(0, agent).is_dir():
        check_policy(pipeline, 0, agent)


def _why(benchmark: str | None, candidates: int) -> str:
    return f" (the best of {candidates} by {benchmark})" if benchmark is not None else ""


if __name__ == "__main__":
    main_of(export)
