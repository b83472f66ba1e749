"""Whether the machine that checks could run it: GPUs, vLLM's build, the launcher's program, a DVC project."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping

from hacpo.engines.vllm.refusals import installed_build, not_on_cpu, not_on_machine, this_machine
from hacpo.errors import HacpoError
from hacpo.pipeline.project import Pipeline
from hacpo.pipeline.records.bookkeeping import project_root
from hacpo.settings.engine import EngineSettings, sampling_engine
from hacpo.settings.root import Settings
from hacpo.tools.check.remarks import Remark, error
from hacpo.tools.estimate.shapes import ModelShape


def check_project(pipeline: Pipeline) -> Iterator[Remark]:
    """Whether DVC can record the run."""
    try:
        project_root(pipeline.root)
    except HacpoError as refusal:
        yield error(refusal)


def check_machine(settings: Settings, shapes: Mapping[str, ModelShape | None]) -> Iterator[Remark]:
    """What this machine lacks.

    Args:
        shapes: agent -> its model's shape; None where it is not known.
    """
    try:
        gpus = _gpus(settings.engine)
    except HacpoError as refusal:
        yield error(refusal)
        return
    launcher, engine = settings.launcher, settings.engine
    program = (launcher.started_by or [""])[0]
    if program and shutil.which(program) is None:
        yield error(f"launcher.command: {program!r} cannot be started: No such file or directory")
    if gpus and not program and launcher.processes > gpus:
        yield error(
            f"launcher.processes: {launcher.processes} processes need a GPU each, and torch sees {gpus}: lower it"
        )
    if engine.attention == "flash_attention_2" and not gpus:
        yield error("engine.attention: flash_attention_2 needs a GPU, and torch sees none: set it to auto")
    yield from _check_vllm(engine, shapes, on_gpu=bool(gpus))


def engine_here(engine: EngineSettings) -> str:
    """What would sample on this machine, where a GPU that is asked for counts as there."""
    on_gpu = engine.device == "cuda" or (engine.device == "auto" and this_machine().gpus > 0)
    return sampling_engine(engine, on_gpu=on_gpu, vllm=installed_build())


def _gpus(engine: EngineSettings) -> int:
    """How many GPUs the training stack has; 0 without asking torch where it makes no difference.

    Raises:
        ModelError: cuda is asked for and not there.
    """
    if engine.device == "cpu":
        return 0
    from hacpo.engines.models.checkpoint import resolve_device

    return this_machine().gpus if resolve_device(engine).type == "cuda" else 0


def _check_vllm(engine: EngineSettings, shapes: Mapping[str, ModelShape | None], *, on_gpu: bool) -> Iterator[Remark]:
    """vLLM in the stages' own processes; that it is not installed is another remark."""
    build = installed_build()
    if build is None or sampling_engine(engine, on_gpu=on_gpu, vllm=build) != "vllm":
        return
    machine = this_machine()
    refused = not_on_machine(engine, machine)
    if refused is not None:
        yield error(f"vLLM: {refused[0]}: {refused[1]}")
    for name, shape in shapes.items():
        if shape is not None:
            refused = not_on_cpu({"num_attention_heads": shape.heads, "head_dim": shape.head_dim}, machine)
            if refused is not None:
                yield error(f"vLLM: {refused[0]} (agent {name}): {refused[1]}")
