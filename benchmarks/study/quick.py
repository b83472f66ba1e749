"""The same study in minutes: the same sweeps with a few seeds, steps and variants, as a project of its own below
artifacts/. It shows that all of it works, and nothing about recipes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hacpo.artifacts.text_files import load_yaml

STUDY = Path("pipelines/study")
_FEW: dict[str, tuple[str, ...]] = {
    "tuning": ("hacpo",),
    "main": ("hacpo", "gspo_x2", "gspo_two_passes", "naive"),
    "gap": ("hacpo", "own"),
    "pairs": ("hacpo", "gspo", "gspo_x2"),
    "neighbours": ("hacpo", "sgt"),
    "ablations": ("hacpo", "no_clip", "no_stepwise"),
}
_WARMUP, _STEPS, _PROBLEMS = 60, 10, 50


def project(at: Path, source: Path) -> None:
    """Write the quick study's project, or find it as it was: what is done there stays done."""
    (at / ".dvc").mkdir(parents=True, exist_ok=True)
    (at / ".dvc/config").write_text("[core]\n    no_scm = true\n    analytics = false\n", encoding="utf-8")
    for file in [source / STUDY / "base.yaml", *(source / STUDY / "pairs").glob("*.yaml")]:
        if file.name != "sweep.yaml":
            text = re.sub(r"^( +steps:) \d+$", rf"\1 {_WARMUP}", file.read_text("utf-8"), flags=re.MULTILINE)
            _write(at / file.relative_to(source), text)
    for family in _FEW:
        sweep = STUDY / family / "sweep.yaml"
        if not (at / sweep).exists():
            _write(at / sweep, _text(few(family, load_yaml(source / sweep))))
    page = Path("docs/results.md")
    _write(at / page, (source / page).read_text("utf-8"))


def few(family: str, sweep: dict[str, Any]) -> dict[str, Any]:
    """A sweep with few cells of few steps."""
    heldout = {"sets": {name: {"problems": _PROBLEMS} for name in ("gym/heldout", "gym/final")}}
    return {
        **sweep,
        "bases": dict([*sweep["bases"].items()][:1]),
        "variants": {name: sweep["variants"][name] for name in _FEW[family]},
        "seeds": sweep["seeds"][: 2 if family == "main" else 1],
        "start_seeds": sweep["start_seeds"][:1],
        "settings": {**sweep["settings"], "steps": _STEPS, "data": heldout},
    }


def _text(sweep: dict[str, Any]) -> str:
    """As YAML with a line for each variant."""
    lines = []
    for key, value in sweep.items():
        if key == "variants":
            lines += ["variants:", *(f"  {name}: {json.dumps(changes)}" for name, changes in value.items())]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
