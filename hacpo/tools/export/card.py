"""The model card of an exported checkpoint: only what the run's files say."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hacpo.artifacts import tables
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.run_files import RunFiles
from hacpo.artifacts.text_files import parse_yaml, read_bytes
from hacpo.artifacts.weights import policy_hash
from hacpo.errors import MissingInputError
from hacpo.evaluation.measure import measure
from hacpo.evaluation.metrics import Estimate
from hacpo.evaluation.results import Choice, Curves
from hacpo.settings.agents import INHERITED
from hacpo.settings.model_source import read_started_from, read_unpacked_from
from hacpo.settings.root import Settings
from hacpo.tools.export.folder import CARD
from hacpo.tools.export.lora_export import AdapterFacts
from hacpo.tools.report.facts import AgentFacts, ProblemSet, SettingRow, agent_facts, problem_sets, setting_rows

_HUB_DATASET = re.compile(r"hf://datasets/([^@/]+/[^@/]+)@")
_FRONT_MATTER = re.compile(r"\s*---\r?\n(.*?)\n---", re.DOTALL)
_LONGEST_FRONT_MATTER = 1 << 16
"""Bytes at the start of a model's own card that are looked at."""
_LICENCE = ("license", "license_name", "license_link")
_LONGEST_LICENCE = 200
"""Characters of what such a card says of its licence."""
_ABOUT_THE_RUN = ("seed", "steps", "sampling", "batch", "optimizer", "prompt", "pool", "verification", "engine.dtype")
"""Settings that shaped the weights, beside the algorithm's; the card lists those that are no defaults."""


@dataclass(frozen=True)
class CardFacts:
    """Everything that a card states."""

    run: str
    agent: AgentFacts
    partners: tuple[AgentFacts, ...]
    settings: Settings
    rows: tuple[SettingRow, ...]
    data: ProblemSet
    choice: Choice
    curves: Curves
    hub_datasets: tuple[str, ...]
    licence: Mapping[str, str]
    base_model: str | None
    adapter: AdapterFacts | None
    provenance: Mapping[str, str]


def gather_facts(
    layout: Layout,
    run: str,
    settings: Settings,
    agent: str,
    choice: Choice,
    curves: Curves,
    adapter: AdapterFacts | None = None,
) -> CardFacts:
    """Read what the card needs; `adapter` is what is exported of an agent that trains one.

    Raises:
        MissingInputError: the checkpoint or the resolved settings are missing.
        ArtifactError: a file of the run is damaged.
    """
    checkpoint = layout.checkpoint(choice.step, agent)
    if not layout.settings.is_file():
        raise MissingInputError(
            "the resolved settings are missing", where=layout.settings, remedy="run `hacpo resolve`"
        )
    agents = {facts.name: facts for facts in agent_facts(layout, settings)}
    data = next(each for each in problem_sets(layout, run, settings) if each.name == settings.data.train)
    start, unpacked = layout.checkpoint(0, agent), read_unpacked_from(checkpoint)
    return CardFacts(
        run=run,
        agent=agents[agent],
        partners=tuple(facts for name, facts in agents.items() if name != agent),
        settings=settings,
        rows=tuple(setting_rows(settings)),
        data=data,
        choice=choice,
        curves=curves,
        hub_datasets=_hub_datasets(layout, run, settings),
        licence=_licence(checkpoint / CARD),
        base_model=started[0] if (started := read_started_from(checkpoint)) else None,
        adapter=adapter,
        provenance={
            f"policy (SHA-256 of {'base and adapter' if adapter else 'the weights'})": policy_hash(checkpoint),
            **({"adapter's weights (SHA-256)": adapter.digest} if adapter else {}),
            **({"GGUF file that it started from (SHA-256)": unpacked[1]} if unpacked else {}),
            "weights at step 0 (SHA-256)": policy_hash(start) if start.is_dir() else "not there any more",
            "settings.json (SHA-256)": hashlib.sha256(layout.settings.read_bytes()).hexdigest(),
            "exported with": ", ".join(_versions()),
        },
    )


def _versions() -> list[str]:
    return [f"{name} {version(name)}" for name in ("hacpo", "transformers", "torch")] + [
        f"Python {platform.python_version()}"
    ]


def _hub_datasets(layout: Layout, run: str, settings: Settings) -> tuple[str, ...]:
    path = layout.problems(settings.data.train)
    if not path.is_file():
        return ()
    table = RunFiles(run, layout).read(tables.PROBLEMS, None, settings.data.train, columns=["source"])
    sources = table["source"].unique().to_pylist()
    return tuple(sorted({found[1] for source in sources if (found := _HUB_DATASET.match(source))}))


def _licence(card: Path) -> dict[str, str]:
    """What the card of the model that training started from says; the checkpoints carry it along."""
    stated: Any = {}
    with contextlib.suppress(OSError, ValueError):  # any text may stand in a model folder's README.md
        front = _FRONT_MATTER.match(read_bytes(card, _LONGEST_FRONT_MATTER).decode(errors="replace"))
        stated = parse_yaml(front[1]) if front else {}
    texts = {key: stated.get(key) for key in _LICENCE} if isinstance(stated, dict) else {}
    return {
        key: text
        for key, text in texts.items()
        if isinstance(text, str) and text.isprintable() and 0 < len(text) <= _LONGEST_LICENCE
    }


# --- rendering -------------------------------------------------------------------------------------------------------


def render(facts: CardFacts) -> str:
    """The card as Markdown with YAML front matter."""
    sections = [
        _front_matter(facts),
        f"# {facts.agent.name} of {facts.run}, step {facts.choice.step}\n",
        _summary(facts),
        _usage(facts.adapter),
        _agents(facts),
        _training(facts),
        _results(facts),
        _provenance(facts),
    ]
    return "\n".join(sections)


def _front_matter(facts: CardFacts) -> str:
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        library_name="peft" if facts.adapter and facts.adapter.alone else "transformers",
        pipeline_tag="text-generation",
        tags=["hacpo", "reinforcement-learning", facts.settings.algorithm.recipe],
        base_model=facts.base_model if facts.adapter is None or not facts.adapter.alone else facts.adapter.base,
        datasets=list(facts.hub_datasets) or None,
        license=facts.licence.get("license"),
        license_name=facts.licence.get("license_name"),
        license_link=facts.licence.get("license_link"),
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _summary(facts: CardFacts) -> str:
    step, others = facts.choice.step, " and ".join(f"`{each.name}`" for each in facts.partners)
    if step == 0:
        text = f"Agent `{facts.agent.name}` of the run `{facts.run}`, before training."
    else:
        company = f"together with {others}" if facts.settings.algorithm.rollouts.coupled and others else "on its own"
        text = (
            f"Trained for {step} of {facts.settings.steps} planned steps {company}, recipe "
            f"`{facts.settings.algorithm.recipe}` of hacpo ([the paper](https://arxiv.org/abs/2603.02604))."
        )
    if facts.choice.benchmark is not None:
        text += (
            f" This step is the best of {facts.choice.candidates} evaluated ones by `{facts.choice.benchmark}`, so its "
            "result there is too good by the luck of the choice."
        )
    if not facts.licence:
        text += " The licence of the model that training started from is not known from its files."
    return text + "\n"


def _usage(adapter: AdapterFacts | None) -> str:
    note = ""
    if adapter is not None and adapter.alone:
        at = f" at revision `{adapter.revision}`" if adapter.revision else ""
        note = (
            f"This is a LoRA adapter without its base, `{adapter.base}`{at}. With PEFT installed (`pip install peft`), "
            "transformers loads both:\n\n"
        )
    return (
        f"{note}```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."  # this folder, or the repository on the hub\n'
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        'model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")\n'
        "```\n"
    )


def _agents(facts: CardFacts) -> str:
    rollouts = facts.settings.algorithm.rollouts
    lines = [
        "## Agents\n",
        _table(
            ["agent", "started from", "architecture", "parameters"],
            [_agent_cells(facts.agent, " (this one)"), *(_agent_cells(each, "") for each in facts.partners)],
        ),
    ]
    if facts.partners and not rollouts.share:
        measured = ", measured against the rewards of all" if rollouts.share_rewards else ""
        lines.append(f"The recipe shares no rollouts: each of them learned from its own alone{measured}.\n")
    return "\n".join(lines)


def _agent_cells(agent: AgentFacts, note: str) -> list[str]:
    parameters = "" if agent.parameters is None else f"{agent.parameters:,}"
    return [f"`{agent.name}`{note}", _published(agent.origin), agent.architecture or "", parameters]


def _published(origin: str) -> str:
    """Of an absolute path its last name alone: a card is read by strangers."""
    words, _, path = origin.partition("/")
    return f"{words}{Path(path).name}" if words.endswith(" ") else origin


def _training(facts: CardFacts) -> str:
    settings = facts.settings
    problems = "" if facts.data.problems is None else f", {facts.data.problems:,} problems"
    lines = [
        "## Training\n",
        f"- Data: `{settings.data.train}` ({_published(facts.data.origin)}{problems})",
        f"- Each step: {settings.batch.prompts} prompts, {settings.responses_per_prompt} responses per prompt and "
        f"agent, {settings.updates_per_step} updates",
    ]
    if (lora := facts.adapter) is not None:
        lines.append(
            f"- LoRA adapter of rank {lora.rank}, alpha {lora.alpha}, {lora.parameters:,} parameters, on "
            f"{', '.join(f'`{name}`' for name in lora.targets)}"
            + ("" if lora.alone else "; here merged into the weights of its base")
        )
    overridden = [row for row in facts.rows if row.key.startswith("algorithm.") and row.standing == "changed"]
    lines.append(
        f"- Recipe `{settings.algorithm.recipe}`"
        + (", with these keys overridden:\n" if overridden else ", unchanged\n")
    )
    if overridden:
        cells = [[f"`{row.key}`", f"`{row.value}`", f"`{row.reference}`"] for row in overridden]
        lines.append(_table(["key", "value", "recipe"], cells))
    others = [row for row in facts.rows if _about_the_run(row)]
    lines.append("Other settings that are no defaults:\n")
    lines.append(_table(["key", "value"], [[f"`{row.key}`", f"`{row.value}`"] for row in others]))
    return "\n".join(lines)


def _about_the_run(row: SettingRow) -> bool:
    named = any(row.key == name or row.key.startswith(f"{name}.") for name in _ABOUT_THE_RUN)
    named = named or (row.key.startswith("agents.") and row.key.split(".")[2] in INHERITED)
    return named and row.standing in ("changed", "given") and row.value != "null"


def _results(facts: CardFacts) -> str:
    step = facts.choice.step
    lines = ["## Held-out results\n"]
    cells = []
    for series in facts.settings.evaluation.series:
        curve = facts.curves.get(series.name, {})
        asked = [facts.settings.evaluation.benchmarks[name] for name, _ in series.parts]
        what, protocol = series.title, ""
        if len(asked) == 1:
            what = f"{series.title} (`{asked[0].data}`)"
            protocol = f"{asked[0].samples} at temperature {asked[0].temperature:g}"
        problems = next((f"{each.problems:,}" for each in curve.values()), "")
        cells.append([what, problems, protocol, _estimate(curve.get(0)), _estimate(curve.get(step))])
    lines.append(_table(["benchmark", "problems", "responses per problem", "step 0", f"step {step}"], cells))
    word = measure(facts.settings.verification).capitalize()
    lines.append(f"{word}, or the metric beside the benchmark's name, ± its standard error over problems.\n")
    return "\n".join(lines)


def _estimate(found: Estimate | None) -> str:
    if found is None:
        return "not evaluated"
    return f"{found.mean:.3f}" + (f" ± {found.error:.3f}" if found.error is not None else "")


def _provenance(facts: CardFacts) -> str:
    rows = [["run", f"`{facts.run}`, agent `{facts.agent.name}`, step {facts.choice.step}"]]
    rows += [[name, f"`{value}`" if " " not in value else value] for name, value in facts.provenance.items()]
    return "## Provenance\n\n" + _table(["", ""], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines) + "\n"


def _escaped(cell: str) -> str:
    return " ".join(cell.replace("|", r"\|").split())
