"""What `hacpo run` refuses before it asks, writes or removes anything: of all that `hacpo plan --check` looks at, what
costs next to nothing and would end the run halfway."""

from __future__ import annotations

from hacpo.errors import SettingsError
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.views.progress import next_command


def check_before_run(pipeline: Pipeline) -> None:
    """Refuse what cannot be: too few problems for a step, responses longer than a model's context, a GPU that is not
    there. A run of which everything is there is not looked at.

    Raises:
        SettingsError: with the first of these, and how many more there are.
    """
    changed = _changed_keys(pipeline)
    if changed is not None and not changed and next_command(pipeline) is None:
        return
    from hacpo.tools.check.quick_look import obstacles  # which loads Arrow

    if refused := obstacles(pipeline, changed):
        more = f" ({len(refused) - 1} more: `{pipeline.command('plan')} --check`)" if len(refused) > 1 else ""
        raise SettingsError(f"{refused[0]}{more}", where=pipeline.folder / "params.yaml")


def _changed_keys(pipeline: Pipeline) -> tuple[str, ...] | None:
    """Settings that are others than the run's files were made with; None where these are not known."""
    if not pipeline.layout.settings.is_file():
        return None
    try:
        return tuple(pipeline.changed_settings())
    except (OSError, ValueError):
        return None
