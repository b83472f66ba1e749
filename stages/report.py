"""report: what the run did, as one HTML page, a small metrics file and the held-out curves."""

from __future__ import annotations

from hacpo.pipeline.catalogue import REPORT_STAGE
from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.execution.stage import Stage
from hacpo.pipeline.execution.stage_command import stage_command


@stage_command(REPORT_STAGE)
def report(stage: Stage) -> None:
    """Write report/index.html, metrics.json and curves.csv from what is there (--limit: problems a step to browse)."""
    from hacpo.artifacts import storage, tables
    from hacpo.pipeline.views.made_otherwise import alike_until, in_words, made_otherwise
    from hacpo.tools.report import browser, collect, facts, page, summary

    layout, outputs = stage.inputs, stage.outputs
    settings = facts.run_settings(layout, stage.settings)
    shown = stage.settings.report
    if stage.limit is not None:
        shown = shown.model_copy(update={"problems_per_step": stage.limit})
    settings = settings.model_copy(update={"report": shown})
    agents = list(settings.agents)
    measurements = collect.collect(layout, stage.run, agents, settings.steps, settings.evaluation.series)
    schedule = stage.read(tables.SCHEDULE) if layout.schedule.is_file() else None
    embedded = browser.embed(layout, stage.run, agents, schedule, settings.report)
    otherwise = made_otherwise(layout, settings)
    html = page.render(
        stage.run,
        settings,
        measurements,
        facts.agent_facts(layout, settings),
        facts.problem_sets(layout, stage.run, settings),
        embedded,
        otherwise,
    )
    for artifact, text in ((tables.CURVES, summary.curves_csv(measurements, settings)), (tables.REPORT, html)):
        with storage.atomic(outputs.path(artifact)) as scratch:
            scratch.write_text(text, encoding="utf-8", newline="\n")
    storage.write_json(outputs.path(tables.HEADLINES), summary.metrics(measurements, settings))
    steps = alike_until(otherwise, measurements.steps_trained)
    stage.summary = f"{outputs.path(tables.REPORT)} ({len(html.encode()) / 2**20:.1f} MiB), {steps} steps"
    if otherwise:
        stage.summary += f"; {in_words(otherwise)}"


if __name__ == "__main__":
    main_of(report)
