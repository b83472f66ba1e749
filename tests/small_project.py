"""Small projects with tiny models: what tests and the attack (`tests/soak`) run is made here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
RUN = "small"

PARAMS = """
seed: 1
steps: 2
agents:
  ada: {model: models/ada}
  bo: {model: models/bo}
algorithm:
  recipe: hacpo
  importance: {alpha: 1.0}
  clip: {own_low: 0.03, own_high: 0.03}
data:
  train: arithmetic/train
  sets:
    arithmetic/train: {task: arithmetic, split: train, problems: 64}
    arithmetic/heldout: {task: arithmetic, split: heldout, problems: 16}
sampling: {group_size: 4, max_new_tokens: 26}
batch: {prompts: 8, minibatch_prompts: 4}
optimizer: {learning_rate: 3.0e-4, micro_batch_size: 32}
engine: {device: cpu, threads: 1}
storage: {rows_per_shard: 20}
evaluation:
  every: 2
  benchmarks:
    heldout: {data: arithmetic/heldout, samples: 2, temperature: 1.0}
"""
"""Two steps of two agents in about a second, once torch is loaded."""

DVC_CONFIG = "[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n"

VOCABULARIES = {"ada": ("qwen3", "characters"), "bo": ("llama", "numbers_words")}
"""Architecture and vocabulary of the agents that `make_models` knows."""


def changed(params: str, changes: str) -> str:
    """Settings with others in place of some, key by key as `extends` does it; null takes a key out."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False
    written = StringIO()
    yaml.dump(_merged(yaml.load(params), yaml.load(changes)), written)
    return written.getvalue()


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return {key: value for key, value in merged.items() if value is not None}


def make_models(folder: Path, names: Iterable[str] = VOCABULARIES, *, hidden: int = 48, steps: int = 300) -> Path:
    """Warm-started model folders of these names, which are right now and then; returns the folder."""
    from hacpo.engines.training.warm_start import warm_start
    from hacpo.settings.agents import TinySettings, WarmupSettings

    for name in names:
        architecture, vocabulary = VOCABULARIES[name]
        settings = TinySettings(
            architecture=architecture,
            layers=1,
            hidden=hidden,
            initializer_range=0.1,
            heads=2,
            vocabulary=vocabulary,
            warmup=WarmupSettings(steps=steps, batch_size=32, learning_rate=4e-3, drills=0.2),
        )
        (folder / name).mkdir(parents=True)
        warm_start(name, settings, 1, folder / name)
    return folder


def make_project(folder: Path, models: Path | None, params: str = PARAMS, run: str = RUN) -> Path:
    """A project with one pipeline, ready for `hacpo plan`; returns its root.

    Args:
        models: what its `models` is a link to; None: it has none.
    """
    (folder / "pipelines" / run).mkdir(parents=True)
    (folder / "pipelines" / run / "params.yaml").write_text(params)
    if models is not None:
        (folder / "models").symlink_to(models)
    (folder / ".dvc").mkdir()
    (folder / ".dvc" / "config").write_text(DVC_CONFIG)
    shutil.copy(ROOT / ".dvcignore", folder / ".dvcignore")
    return folder


def make_finished(folder: Path, models: Path, params: str = PARAMS) -> Path:
    """A project whose run `small` is complete; returns its root."""
    from hacpo.cli import app
    from hacpo.pipeline.execution.command_line import run_app

    root, before = make_project(folder, models, params), Path.cwd()
    os.chdir(root)
    try:
        assert run_app(app, ["run", f"pipelines/{RUN}", "--jobs", "1"]) == 0
    finally:
        os.chdir(before)
    return root
