"""repair: mend what a kill left in DVC's files; for those who use `dvc repro`."""

from __future__ import annotations

from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.options import PipelineFolder


def repair(pipeline: PipelineFolder) -> None:
    """Mend what a killed DVC left and every DVC command then stumbles over.

    `run`, `plan`, `status` and `audit` do it by themselves inside the project; a cache elsewhere is mended by this
    command alone. No result is removed.
    """
    from hacpo.pipeline.project import Pipeline
    from hacpo.pipeline.records.bookkeeping import Books
    from hacpo.pipeline.records.repairing import repair as mend

    opened = Pipeline.open(pipeline)
    books = Books(opened.root)
    with books.open():
        made = mend(opened, books, asked=True)
    print(f"{opened.run}: {str(made) or 'nothing to mend'}")


if __name__ == "__main__":
    main_of(repair)
