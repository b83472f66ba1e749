"""Every settings file below pipelines/: valid, named in docs/recipes.md, and two steps of it run and audit clean.

A run here is a new folder whose params.yaml extends the shipped one and changes only how long it takes: two steps, few
problems, small groups, and model folders made once per agent by the shipped warm start, cut short. The algorithm is
the shipped one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from conftest import ROOT, Cli
from hacpo.settings import params as settings_of
from hacpo.settings.agents import AgentSettings, TinySettings
from hacpo.settings.base import merged
from hacpo.settings.model_source import hub_repository
from hacpo.settings.recipes import RECIPES, overridden
from hacpo.settings.root import Settings

PIPELINES = ROOT / "pipelines"
SHIPPED = {path.parent.relative_to(PIPELINES).as_posix(): path for path in PIPELINES.rglob("params.yaml")}
RECIPES_PAGE = ROOT / "docs" / "recipes.md"

# --- the paper's rows, by hand ---------------------------------------------------------------------------------------

# Table 5: alpha, delta (its text's 0.2; the table prints the lower bound 0.8), delta_step.
TABLE_5 = {"state": (3.0, 0.2, 0.01), "size": (1.0, 0.2, 0.025), "model": (1.0, 0.2, 0.025), "large": (3.0, 0.2, 0.025)}

# run: what it sets beyond the recipe and, for HACPO and its ablations, beyond the pair's row of Table 5.
ROWS: dict[str, dict[str, Any]] = {
    # Table 1
    **{
        f"tiny/{pair}/{recipe}": {}
        for pair in ("state", "size", "model")
        for recipe in ("grpo", "gspo", "gspo_x2", "naive", "hacpo")
    },
    "tiny/size/no_capability_baseline": {},  # Table 2
    "tiny/size/no_discrepancy": {},  # Table 3
    **{f"tiny/size/alpha_{alpha}": {"importance": {"alpha": float(alpha)}} for alpha in (0, 2, 3)},  # Table 4
    "tiny/large/hacpo": {},  # Table 4, Figure 4
    **{f"tiny/large/alpha_{alpha}": {"importance": {"alpha": float(alpha)}} for alpha in (0, 1, 2)},
    "tiny/large/no_stepwise": {"clip": {"cross_step": 0.0}},  # Figure 4
    "tiny/large/no_clip": {},
    # Not the paper's
    **{f"tiny/size/{recipe}": {} for recipe in ("gspo_two_passes", "xgrpo", "sgt", "sapo")},
}
BASELINES = ("grpo", "gspo", "gspo_x2", "naive")
NEIGHBOURS = ("gspo_two_passes", "xgrpo", "sgt", "sapo")  # whose cross term, if any, is not HACPO's

SIZE, LARGE = "paper/qwen3-1b7-base_qwen3-4b-base", "paper/qwen3-4b-base_qwen3-8b-base"
ALPHA = {SIZE: 1.0, LARGE: 3.0}  # Table 5; both pairs have delta 0.2 and delta_step 0.025, as the preset
PAPER_BASELINES = {
    f"paper/{path.stem}/{recipe}"
    for path in (PIPELINES / "paper" / "pairs").glob("*.yaml")
    for recipe in (*BASELINES, "hacpo")
}
# run: what its algorithm says otherwise than the pair's HACPO.
PAPER_ABLATIONS: dict[str, dict[str, Any]] = {
    f"{SIZE}/no_capability_baseline": {"recipe": "no_capability_baseline", "advantage": {"baseline": "joint"}},
    f"{SIZE}/no_discrepancy": {"recipe": "no_discrepancy", "advantage": {"discrepancy": False}},
    **{f"{SIZE}/alpha_{alpha}": {"importance": {"alpha": float(alpha)}} for alpha in (0, 2, 3)},
    **{f"{LARGE}/alpha_{alpha}": {"importance": {"alpha": float(alpha)}} for alpha in (0, 1, 2)},
    f"{LARGE}/figure_4/hacpo": {},
    f"{LARGE}/figure_4/no_clip": {"recipe": "no_clip", "clip": {"cross": "none"}},
    f"{LARGE}/figure_4/no_stepwise": {"recipe": "no_stepwise", "clip": {"cross_step": 0.0}},
}

# recipe: how many agents' rollouts one learns from out of n, times the rollouts and, beside n, times the updates.
COUNTS = {
    "grpo": (False, 1),
    "gspo": (False, 1),
    "gspo_x2": (False, 2),
    "gspo_two_passes": (False, 1),
    "xgrpo": (False, 1),
}
PASSES = {"gspo_two_passes": 2}
CHOSEN = ("sgt", "sapo")  # of what is shared only some is trained on, in as many updates as alone
SHARED = (True, 1)


def recipe_of(run: str) -> str:
    name = run.rsplit("/", 1)[-1]
    return "hacpo" if name.startswith("alpha_") else name


def expected_algorithm(run: str) -> dict[str, Any]:
    """The preset, the pair's row of Table 5 where the recipe has a cross term of its own, and the run's own change."""
    recipe = recipe_of(run)
    alpha, delta, step = TABLE_5[run.split("/")[1]]
    tree = dict(RECIPES[recipe])
    if recipe != "grpo":  # the tiny models' own interval, for sequence ratios
        tree = merged(tree, {"clip": {"own_low": 0.03, "own_high": 0.03}})
    if recipe not in (*BASELINES, *NEIGHBOURS):
        tree = merged(tree, {"importance": {"alpha": alpha}, "clip": {"cross_delta": delta, "cross_step": step}})
    return merged({"recipe": recipe, **tree}, ROWS[run])


# --- the files -------------------------------------------------------------------------------------------------------


def missing_models(settings: Settings) -> list[str]:
    """Model folders of this machine that are not there; what is on the hub is fetched when it is needed."""
    named = [agent.model for agent in settings.agents.values() if agent.model]
    return [name for name in named if hub_repository(name, ROOT) is None and not (ROOT / name).exists()]


@pytest.mark.parametrize("run", sorted(SHIPPED))
def test_it_is_valid_and_named_in_the_recipes_page(run: str) -> None:
    settings = settings_of.load(SHIPPED[run])
    if missing := missing_models(settings):
        pytest.skip(f"needs model folders that are not here: {', '.join(missing)}")
    # A pair of `paper` stands for its five baselines; its ablations are named one by one.
    named, shown = named_runs(), run.rpartition("/")[0] if run in PAPER_BASELINES else run
    assert shown in named, f"docs/recipes.md does not name {shown}"


def named_runs() -> set[str]:
    """Every run that a table of docs/recipes.md names."""
    rows = [line for line in RECIPES_PAGE.read_text().splitlines() if line.startswith("|")]
    return {
        name.removeprefix("pipelines/").rstrip("/") for line in rows for name in re.findall(r"`([a-z0-9_/-]+)`", line)
    }


def test_the_recipes_page_names_no_run_that_is_not_there() -> None:
    groups = {run.rpartition("/")[0] for run in PAPER_BASELINES}
    assert {name for name in named_runs() if name.startswith(("tiny/", "paper/"))} <= {*SHIPPED, *groups}


def test_every_row_of_the_paper_has_its_file_and_nothing_else_is_there() -> None:
    assert {run for run in SHIPPED if run.startswith("tiny/")} == set(ROWS)
    assert {run for run in SHIPPED if run.startswith("paper/")} == {*PAPER_BASELINES, *PAPER_ABLATIONS}


@pytest.mark.parametrize("run", sorted(PAPER_ABLATIONS))
def test_an_ablation_at_the_papers_scale_differs_in_its_one_switch(run: str) -> None:
    """From the pair's HACPO, whose row of Table 5 it keeps; Figure 4's are also longer, and looked at more often."""
    pair = "/".join(run.split("/")[:2])
    hacpo = settings_of.spoken_out(settings_of.dump(settings_of.load(SHIPPED[f"{pair}/hacpo"])))
    assert hacpo["algorithm"] == merged({"recipe": "hacpo", **RECIPES["hacpo"]}, {"importance": {"alpha": ALPHA[pair]}})
    length = {"steps": 150} if "/figure_4/" in run else {"steps": 58}
    evaluation = {"evaluation": {"every": 15}} if "/figure_4/" in run else {}
    expected = merged(hacpo, {**length, **evaluation, "algorithm": PAPER_ABLATIONS[run]})
    assert settings_of.spoken_out(settings_of.dump(settings_of.load(SHIPPED[run]))) == expected


@pytest.mark.parametrize("run", sorted(ROWS))
def test_the_algorithm_is_the_preset_and_the_pairs_row_of_table_5(run: str) -> None:
    algorithm = settings_of.load(SHIPPED[run]).algorithm.model_dump()
    algorithm["rollouts"]["draw_seed"] = None  # filled in from `seed` where something is drawn
    assert algorithm == expected_algorithm(run)


@pytest.mark.parametrize(
    ("run", "keys"),
    [
        ("tiny/state/grpo", []),
        ("tiny/state/gspo", ["clip.own_low", "clip.own_high"]),
        ("tiny/state/naive", ["clip.own_low", "clip.own_high"]),
        ("tiny/state/hacpo", ["importance.alpha", "clip.own_low", "clip.own_high", "clip.cross_step"]),
        ("tiny/large/no_stepwise", ["importance.alpha", "clip.own_low", "clip.own_high"]),
        ("tiny/size/hacpo", ["clip.own_low", "clip.own_high"]),
    ],
)
def test_what_the_report_will_list_as_changed(run: str, keys: list[str]) -> None:
    assert [line.split(" ")[0] for line in overridden(settings_of.load(SHIPPED[run]).algorithm)] == keys


@pytest.mark.parametrize("pair", sorted(TABLE_5))
def test_the_runs_of_a_pair_differ_in_the_algorithm_alone(pair: str) -> None:
    trees = [settings_of.dump(settings_of.load(SHIPPED[run])) for run in ROWS if run.split("/")[1] == pair]
    for tree in trees:
        tree.pop("algorithm")
    assert len(trees) > 1
    assert all(tree == trees[0] for tree in trees)


def test_the_pairs_differ_in_their_agents_alone() -> None:
    """And an agent that is in two pairs is the same one: same name and seed, same warm start, same bytes."""
    trees = [settings_of.dump(settings_of.load(SHIPPED[f"tiny/{pair}/hacpo"])) for pair in TABLE_5]
    agents: dict[str, Any] = {}
    for tree in trees:
        for name, agent in tree.pop("agents").items():
            assert agents.setdefault(name, agent) == agent
        tree.pop("agent_names")
        tree.pop("algorithm")
    assert all(tree == trees[0] for tree in trees)
    assert len(agents) == 6


# --- agents, made once -----------------------------------------------------------------------------------------------

WARMUP_STEPS = 120  # of the 1400 to 1800 shipped: enough for boxes, so that some groups have right and wrong answers

Make = Callable[[str, AgentSettings], str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def make(folders: Path) -> Make:
    """Warm-start a shipped agent, `WARMUP_STEPS` of it, once; gives the folder's name."""
    import torch

    from hacpo.engines.training.warm_start import warm_start

    made: dict[str, str] = {}

    def warm(name: str, agent: AgentSettings) -> str:
        assert agent.tiny is not None
        key = name + agent.tiny.model_dump_json()
        if key not in made:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            folder = folders / f"{name}-{len(made)}"
            folder.mkdir()
            warm_start(name, agent.tiny, 1, folder, limit=WARMUP_STEPS)
            torch.set_num_threads(threads)
            made[key] = folder.name
        return made[key]

    return warm


def pair_folders(run: str, make: Make, folders: Path) -> list[Path]:
    settings = settings_of.load(SHIPPED[run])
    return [folders / make(name, agent) for name, agent in settings.agents.items()]


def tokenizer_bytes(folder: Path) -> dict[str, bytes]:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return {name: (folder / name).read_bytes() for name in names}


def model_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def cut(folder: Path, text: str) -> list[str]:
    from transformers import AutoTokenizer

    pieces: list[str] = AutoTokenizer.from_pretrained(str(folder)).tokenize(text)
    return pieces


SHAPE = ("hidden_size", "num_hidden_layers", "intermediate_size")


@pytest.mark.slow
def test_heterogeneous_state_is_the_same_model_with_other_weights(make: Make, folders: Path) -> None:
    weak, strong = pair_folders("tiny/state/hacpo", make, folders)
    assert (weak / "config.json").read_bytes() == (strong / "config.json").read_bytes()
    assert tokenizer_bytes(weak) == tokenizer_bytes(strong)
    assert (weak / "model.safetensors").read_bytes() != (strong / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("run", ["tiny/size/hacpo", "tiny/large/hacpo"])
def test_heterogeneous_size_is_one_family_and_tokenizer_in_other_dimensions(
    run: str, make: Make, folders: Path
) -> None:
    smaller, larger = pair_folders(run, make, folders)
    assert tokenizer_bytes(smaller) == tokenizer_bytes(larger)
    assert model_config(smaller)["model_type"] == model_config(larger)["model_type"] == "qwen3"
    small, large = ([model_config(folder)[key] for key in SHAPE] for folder in (smaller, larger))
    assert small != large
    assert all(left <= right for left, right in zip(small, large, strict=True))


@pytest.mark.slow
def test_heterogeneous_model_is_another_architecture_and_tokenizer(make: Make, folders: Path) -> None:
    qwen, llama = pair_folders("tiny/model/hacpo", make, folders)
    assert [model_config(folder)["model_type"] for folder in (qwen, llama)] == ["qwen3", "llama"]
    assert cut(qwen, "12+3 has") == ["1", "2", "+", "3", " ", "h", "a", "s"]
    assert cut(llama, "12+3 has") == ["12", "+", "3", " ", "has"]


@pytest.mark.slow
def test_the_trio_has_three_architectures_and_three_tokenizers(make: Make, folders: Path) -> None:
    trio = pair_folders("trio", make, folders)
    assert [model_config(folder)["model_type"] for folder in trio] == ["qwen3", "llama", "gpt_neox"]
    assert [cut(folder, "12 has") for folder in trio] == [
        ["1", "2", " ", "h", "a", "s"],
        ["12", " ", "has"],
        ["1", "2", " ", "has"],
    ]


# --- two steps of each -----------------------------------------------------------------------------------------------

PROMPTS, GROUP, ALONE = 10, 4, 2  # prompts, responses each, updates an agent alone makes (10 prompts / 5 per minibatch)
SHORT = {
    "steps": 2,
    "data": {"sets": {"arithmetic/train": {"problems": 32}, "arithmetic/heldout": {"problems": 8}}},
    "sampling": {"group_size": GROUP},
    "batch": {"prompts": PROMPTS, "minibatch_prompts": PROMPTS // ALONE},
    "evaluation": {"every": 2, "benchmarks": {"heldout": {"samples": 1}, "heldout-greedy": None}},
}


@pytest.fixture
def root(tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with every shipped settings file and none of their runs, in its root."""
    for path in PIPELINES.rglob("*.yaml"):
        if path.name != "dvc.yaml":
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    (tmp_path / "models").symlink_to(folders)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc" / "config").write_text(
        "[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n"
    )
    shutil.copy(ROOT / ".dvcignore", tmp_path / ".dvcignore")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shortened(run: str, agents: dict[str, Any]) -> tuple[Settings, str]:
    """Write pipelines/short/params.yaml, JSON being YAML; returns its settings and its folder."""
    folder = Path("pipelines") / "short"
    folder.mkdir()
    base = os.path.relpath(Path("pipelines") / run / "params.yaml", folder)
    (folder / "params.yaml").write_text(json.dumps({"extends": base, "agents": agents, **SHORT}))
    return settings_of.load(folder / "params.yaml"), str(folder)


def made_by(make: Make, agents: dict[str, AgentSettings]) -> dict[str, Any]:
    return {name: {"tiny": None, "model": f"models/{make(name, agent)}"} for name, agent in agents.items()}


def rows(table: str, step: int, **agent: str) -> pl.DataFrame:
    ((key, name),) = agent.items()
    return pl.read_parquet(f"artifacts/short/{table}/step={step:04d}/{key}={name}/*.parquet", hive_partitioning=False)


def check_counts(agents: list[str], recipe: str) -> None:
    """Rollouts, pools and updates of both steps as in docs/recipes.md's table of recipes."""
    share, times = COUNTS.get(recipe, SHARED)
    passes = PASSES.get(recipe, 1)
    for step in (1, 2):
        for agent in agents:
            sources = agents if share else [agent]
            assert len(rows("rollouts", step, agent=agent)) == PROMPTS * GROUP * times
            pool = rows("pool", step, learner=agent)
            assert dict(pool["source"].value_counts().iter_rows()) == dict.fromkeys(sources, PROMPTS * GROUP * times)
            trace = rows("updates", step, agent=agent)
            kept = pool.filter(status="kept")
            if recipe in CHOSEN:
                chosen = rows("advantages", step, learner=agent).filter("selected")
                kept = kept.filter(pl.col("rollout_id").is_in(chosen["rollout_id"].to_list()))
            assert sorted(trace["rollout_id"]) == sorted([*kept["rollout_id"]] * passes)
            each = 1 if recipe in CHOSEN else len(sources)
            assert set(trace["update"]) == set(range(ALONE * times * each * passes))


def live_share(agents: list[str]) -> float:
    """Share of advantages that are not those of a uniform group: without any, nothing was learned or tested."""
    frames = [rows("advantages", step, learner=agent) for step in (1, 2) for agent in agents]
    return float(1 - pl.concat(frames)["uniform"].mean())  # type: ignore[arg-type]


def cross_bounds(agents: list[str]) -> dict[int, tuple[float, float]]:
    """update -> the clip bounds in force for cross responses."""
    trace = pl.concat([rows("updates", step, agent=agent) for step in (1, 2) for agent in agents])
    cross = trace.filter(~pl.col("is_self")).select("update", "lower", "upper").unique()
    bounds = {update: (lower, upper) for update, lower, upper in cross.iter_rows()}
    assert len(bounds) == len(cross)
    return bounds


@pytest.mark.slow
@pytest.mark.parametrize("run", sorted(ROWS))
def test_two_steps_of_a_table_row(run: str, root: Path, make: Make, cli: Cli) -> None:
    shipped = settings_of.load(SHIPPED[run])
    settings, folder = shortened(run, made_by(make, shipped.agents))
    assert settings.algorithm == shipped.algorithm
    assert (settings.optimizer, settings.engine, settings.seed) == (shipped.optimizer, shipped.engine, shipped.seed)
    done = cli("run", folder, "--jobs", 1)
    assert done.code == 0, done.err
    agents, recipe = list(settings.agents), recipe_of(run)
    check_counts(agents, recipe)
    assert live_share(agents) > 0.05
    _, delta, delta_step = TABLE_5[run.split("/")[1]]
    bounds = cross_bounds(agents)
    if recipe in COUNTS:
        assert not bounds
    elif recipe in ("naive", "sapo"):
        assert set(bounds.values()) == {(0.97, 1.03)}
    elif recipe in ("no_clip", "sgt"):
        assert set(bounds.values()) == {(0.0, 1e5)}
    else:
        rising = 0.0 if recipe == "no_stepwise" else delta_step
        # n U = 4 updates a step: the lower bound of update m is 1 - delta + m delta_step.
        assert bounds == {m: (pytest.approx(1 - delta + m * rising, abs=1e-12), 1.0) for m in range(4)}
    audit = cli("audit", folder)
    assert audit.code == 0, audit.out + audit.err


# Beyond the trio: two more agents of the tables.
OTHERS = {"di": ("tiny/size/hacpo", "qwen-small"), "ed": ("tiny/model/hacpo", "llama")}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_two_steps_of_one_to_five_agents(count: int, root: Path, make: Make, cli: Cli) -> None:
    shipped = settings_of.load(SHIPPED["trio"])
    names = [*shipped.agents, *OTHERS][:count]
    trio = {name: agent for name, agent in shipped.agents.items() if name in names}
    agents = {**dict.fromkeys(shipped.agents), **made_by(make, trio)}  # null leaves an agent out
    for name in names[3:]:
        run, agent = OTHERS[name]
        agents[name] = {"model": f"models/{make(agent, settings_of.load(SHIPPED[run]).agents[agent])}"}
    settings, folder = shortened("trio", agents)
    assert list(settings.agents) == names
    assert settings.algorithm == shipped.algorithm
    done = cli("run", folder, "--jobs", 1)
    assert done.code == 0, done.err
    check_counts(names, "hacpo")  # 2 n updates of each agent on n * 40 responses
    assert live_share(names) > 0.05
    audit = cli("audit", folder)
    assert audit.code == 0, audit.out + audit.err


@pytest.mark.slow
def test_the_trios_warm_starts_run_in_the_pipeline(root: Path, cli: Cli) -> None:
    shipped = settings_of.load(SHIPPED["trio"])
    _, folder = shortened("trio", {name: {"tiny": {"warmup": {"steps": 2}}} for name in shipped.agents})
    done = cli("run", folder, "--jobs", 1, "--until", 0)
    assert done.code == 0, done.err
    for name, agent in shipped.agents.items():
        config = model_config(Path(f"artifacts/short/checkpoints/step=0000/agent={name}"))
        assert isinstance(agent.tiny, TinySettings)
        assert config["model_type"] == agent.tiny.architecture


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_the_trios_own_settings_hold_for_any_number_of_agents(count: int) -> None:
    """The shipped batch (32 prompts, 16 per update of an agent alone) can be split over 2 n updates."""
    tree = settings_of.read_params(SHIPPED["trio"])
    trio = list(tree["agents"].values())
    tree["agents"] = {f"agent{index}": trio[index % 3] for index in range(count)}
    assert settings_of.resolve(tree).updates_per_step == 2 * count
