"""what-if: a step's advantages, ratios and weights under other settings, from the same rollouts."""

from __future__ import annotations

from typing import Annotated

import typer

from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.options import PipelineFolder, StepOption


def what_if(
    pipeline: PipelineFolder,
    step: StepOption,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Ask about another setting, key.path=value; may be repeated.")
    ] = None,
    learner: Annotated[str | None, typer.Option("--learner", help="Only this learner.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
    top: Annotated[int, typer.Option("--top", help="How many of the most changed responses to list.", min=0)] = 10,
) -> None:
    """Print what other settings would have changed in a step; nothing is sampled, trained or written."""
    import numpy as np

    from hacpo.tools.inspect.answer import as_tree, read_texts
    from hacpo.tools.inspect.comparison import changes, compare
    from hacpo.tools.inspect.plain import open_console, print_json
    from hacpo.tools.inspect.question import ask
    from hacpo.tools.inspect.recompute import recompute
    from hacpo.tools.inspect.step_reader import learners_of
    from hacpo.tools.inspect.what_if_view import print_what_if

    question = ask(pipeline, overrides or ())
    with np.errstate(all="ignore"):  # what overflows is shown as it comes out
        result = recompute(question, step, learners_of(question.pipeline, learner))
        comparisons = {name: compare(before, after) for name, (before, after) in result.learners.items()}
        changed = {name: changes(before, after, top) for name, (before, after) in result.learners.items()}
    texts = read_texts(result.reader, [change.rollout_id for listed in changed.values() for change in listed])
    if as_json:
        print_json(as_tree(result, comparisons, changed, texts))
    else:
        print_what_if(open_console(), result, comparisons, changed, texts)


if __name__ == "__main__":
    main_of(what_if)
