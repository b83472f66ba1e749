"""What a step of several agents costs beside a step of one; see `bench`."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench import Row, Side, measured
from growing import watched
from starting import project

_SEVERAL = 4
_FIRST, _LAST = 3, 13


@measured(
    "agents",
    ratio=Row(f"processor time of a step of {_SEVERAL} equal agents over {_SEVERAL} times that of one", "<= 1.05"),
)
def agents(side: Side, folder: Path) -> dict[str, float]:
    """The smoke pipeline's first agent by itself, and copies of it that share nothing: each has the same work."""
    taken = {count: _step(side, folder / str(count), count) for count in (1, _SEVERAL)}
    return {"ratio": taken[_SEVERAL] / (_SEVERAL * taken[1])}


def _step(side: Side, folder: Path, count: int) -> float:
    """Processor seconds of a step, of all processes; those of starting are left out."""
    if not folder.exists():
        project(side, folder, "smoke")
        pipeline = folder / "pipelines" / "smoke"
        text = (pipeline / "params.yaml").read_text()
        before, agent, rest = text.partition("  ada:")
        agent, _, rest = (agent + rest).partition("  bo:")
        rest = rest[rest.index("\nalgorithm:") :]
        copies = "".join(agent.replace("ada:", f"agent{index}:", 1) for index in range(count))
        text = f"{before}{copies}{rest}".replace("recipe: hacpo", "recipe: gspo").replace(
            "  every: 2\n", f"  every: {_LAST}\n"
        )
        text = text.replace("steps: 2\n", f"steps: {_LAST}\n", 1).replace("steps: 150\n", "steps: 2\n")
        (pipeline / "params.yaml").write_text(text)
        side.run("hacpo", "run", "pipelines/smoke", "--until", "0", at=folder)
        shutil.copytree(folder, folder.with_suffix(".started"), symlinks=True)
    shutil.rmtree(folder)
    shutil.copytree(folder.with_suffix(".started"), folder, symlinks=True)
    used = watched(side, folder, folder / "artifacts" / "smoke", "hacpo", "run", "pipelines/smoke", agents=count)
    return (used[_LAST].seconds - used[_FIRST].seconds) / (_LAST - _FIRST)
