"""params.yaml: what is accepted, what is refused, and that a stage reads only what it declares."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from conftest import PARAMS, ROOT, Cli
from hacpo.errors import SettingsError
from hacpo.pipeline.catalogue import STAGES, UPDATE, WARMUP
from hacpo.settings import params as settings_of
from hacpo.settings.document import document
from hacpo.settings.recipes import RECIPES, overridden
from hacpo.settings.root import Settings


def write(folder: Path, text: str) -> Path:
    path = folder / "params.yaml"
    path.write_text(text)
    return path


def load(folder: Path, text: str) -> Settings:
    return settings_of.load(write(folder, text))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("group_size: 4", "gruop_size: 4", "unknown key 'sampling.gruop_size'. Did you mean 'group_size'?"),
        ("seed: 1", "sede: 1", "unknown key 'sede'. Did you mean 'seed'?"),
        ("importance: {alpha: 1.0}", "importance: {alfa: 1.0}", "unknown key 'algorithm.importance.alfa'"),
        ("group_size: 4", "group_size: four", "sampling.group_size: input should be a valid integer (found 'four')"),
        ("group_size: 4", "group_size: 4.5", "sampling.group_size"),
        ("group_size: 4", "group_size: true", "sampling.group_size"),
        ("alpha: 1.0", "alpha: .nan", "algorithm.importance.alpha"),
        ("alpha: 1.0", "alpha: -1", "algorithm.importance.alpha"),
        ("seed: 1\n", "", "'seed' is missing"),
        ("recipe: hacpo", "recipe: hacop", "Did you mean 'hacpo'?"),
        ("  ada: {", "  a/da: {", "agents: 'a/da' cannot be a name"),
        ("  ada: {", "  ..: {", "cannot be a name"),
        ("ada: {model: models/ada}", "ada: {}", "give exactly one of `model` (a folder) and `tiny`"),
        ("train: arithmetic/train", "train: arithmetic/tain", "'arithmetic/tain' is not in data.sets"),
        ("prompts: 8, minibatch_prompts: 4", "prompts: 2, minibatch_prompts: 1", "cannot be split over 4 updates"),
        ("seed: 1", "seed: 1\nseed: 2", "not valid YAML"),
        ("seed: 1", "seed: [1", "not valid YAML"),
    ],
)
def test_bad_params_are_refused_in_one_clear_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in PARAMS
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, PARAMS.replace(old, new, 1))
    assert says in str(refused.value)
    assert str(tmp_path / "params.yaml") in str(refused.value)
    assert "\n" not in str(refused.value)


def test_self_first_needs_as_many_prompts_as_the_larger_of_its_two_parts_has_updates(tmp_path: Path) -> None:
    """U = 4 / 1 = 4 and three agents: 4 updates on own responses, 8 on cross ones, of 4 prompts: half saw nothing."""
    three = PARAMS.replace("  ada: {", "  cy: {model: models/ada}\n  ada: {", 1)
    three = three.replace("  recipe: hacpo", "  recipe: hacpo\n  loss: {minibatch_order: self_first}")
    with pytest.raises(SettingsError, match="4 prompts cannot be split over 8 updates"):
        load(tmp_path, three.replace("prompts: 8, minibatch_prompts: 4", "prompts: 4, minibatch_prompts: 1"))
    # U = 2: 2 and 4 updates.
    assert load(tmp_path, three.replace("prompts: 8, minibatch_prompts: 4", "prompts: 4, minibatch_prompts: 2"))


def test_responses_that_ranks_cannot_share_evenly_are_refused(tmp_path: Path) -> None:
    """8 prompts, 4 responses of each of two agents, 4 updates: 16 responses an update, for 1, 2, 4, 8 or 16 ranks."""
    assert load(tmp_path, PARAMS.replace("recipe: hacpo", "recipe: reference_code")).algorithm.loss.ranks == 8
    for order in ("self_first", "balanced"):
        text = PARAMS.replace("  recipe: hacpo", f"  recipe: hacpo\n  loss: {{minibatch_order: {order}, ranks: RANKS}}")
        assert load(tmp_path, text.replace("RANKS", "16"))
        with pytest.raises(
            SettingsError, match=r"64 responses .* to 3 ranks with 4 updates each; take a divisor of 16$"
        ):
            load(tmp_path, text.replace("RANKS", "3"))
        odd = text.replace("prompts: 8, minibatch_prompts: 4", "prompts: 7, minibatch_prompts: 3").replace("RANKS", "2")
        with pytest.raises(SettingsError, match=r"56 .* 6 updates each; make batch.prompts a multiple of batch.minib"):
            load(tmp_path, odd)
    with pytest.raises(
        SettingsError, match="loss.ranks: responses are dealt to ranks under algorithm.loss.minibatch_order self_first"
    ):
        load(tmp_path, PARAMS.replace("  recipe: hacpo", "  recipe: hacpo\n  loss: {ranks: 2}"))


def test_a_group_of_one_is_refused_only_where_nothing_else_is_compared(tmp_path: Path) -> None:
    one = PARAMS.replace("group_size: 4", "group_size: 1")
    assert load(tmp_path, one).responses_per_prompt == 1  # two agents share: 2 responses per prompt
    with pytest.raises(SettingsError, match="recipe 'gspo' compares responses to one prompt and needs at least 2"):
        load(tmp_path, one.replace("recipe: hacpo", "recipe: gspo"))
    assert load(tmp_path, one.replace("recipe: hacpo", "recipe: gspo_x2")).responses_per_prompt == 2


@pytest.mark.parametrize(
    ("recipe", "responses", "updates"),
    # U = 8 prompts / 4 per minibatch = 2; sharing: n U with n = 2; gspo_x2: 2 U; two passes over U each.
    [
        *[("grpo", 4, 2), ("gspo", 4, 2), ("gspo_x2", 8, 4), ("naive", 4, 4), ("hacpo", 4, 4), ("no_clip", 4, 4)],
        *[("gspo_two_passes", 4, 4), ("xgrpo", 4, 2), ("sgt", 4, 2), ("sapo", 4, 2)],
    ],
)
def test_rollout_and_update_counts_of_the_recipes(tmp_path: Path, recipe: str, responses: int, updates: int) -> None:
    settings = load(tmp_path, PARAMS.replace("recipe: hacpo", f"recipe: {recipe}"))
    assert (settings.responses_per_prompt, settings.updates_per_step) == (responses, updates)


def test_passes_do_not_need_more_prompts(tmp_path: Path) -> None:
    """U = 8 updates of one prompt in a pass; sixteen in two."""
    text = PARAMS.replace("recipe: hacpo", "recipe: gspo_two_passes").replace(
        "minibatch_prompts: 4", "minibatch_prompts: 1"
    )
    assert load(tmp_path, text).updates_per_step == 16


def test_rewards_are_shared_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"rollouts.share_rewards: true shares rewards alone and needs"):
        load(tmp_path, PARAMS.replace("recipe: hacpo", "recipe: xgrpo\n  rollouts: {share: true}"))


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ("recipe: sgt\n  rollouts: {share: false}", "rollouts.select: rescue chooses among shared responses"),
        ("recipe: sapo\n  loss: {minibatch_order: self_first}", "sample needs `loss.minibatch_order: mixed`"),
        ("recipe: hacpo\n  rollouts: {own_fraction: 0.5}", "only `select: sample` draws groups, and it is all"),
        ("recipe: sapo\n  rollouts: {own_fraction: 0.1}", "1 own groups cannot be split over"),
    ],
)
def test_contradictions_about_shared_responses_are_one_line(tmp_path: Path, algorithm: str, says: str) -> None:
    text = PARAMS.replace("recipe: hacpo", algorithm)
    text = text.replace("minibatch_prompts: 4", "minibatch_prompts: 2")
    with pytest.raises(SettingsError, match=re.escape(says)):
        load(tmp_path, text)


def test_draws_follow_the_runs_seed_unless_they_have_one(tmp_path: Path) -> None:
    def seed(rollouts: str) -> int | None:
        return load(
            tmp_path, PARAMS.replace("recipe: hacpo", f"recipe: sapo{rollouts}").replace("seed: 1", "seed: 5")
        ).algorithm.rollouts.draw_seed

    assert seed("") == 5
    assert seed("\n  rollouts: {draw_seed: 9}") == 9
    settings = load(tmp_path, PARAMS.replace("recipe: hacpo", "recipe: sapo"))
    assert not [line for line in overridden(settings.algorithm) if "draw_seed" in line]  # nobody's choice
    assert load(tmp_path, PARAMS).algorithm.rollouts.draw_seed is None


def test_a_switch_that_does_nothing_is_in_no_file(tmp_path: Path) -> None:
    """So that settings.json and tables of the recipes without it are those of a program that had no such switch."""

    def written(algorithm: str) -> dict[str, Any]:
        settings = load(tmp_path, PARAMS.replace("recipe: hacpo", algorithm))
        again = settings_of.resolve(
            {key: value for key, value in settings_of.dump(settings).items() if key != "agent_names"}
        )
        assert again == settings
        return dict(settings_of.dump(settings)["algorithm"]["rollouts"])

    plain = {"share": True, "group_multiplier": 1}
    assert written("recipe: hacpo") == plain
    assert written("recipe: gspo_two_passes") == {**plain, "share": False, "passes": 2}
    # Said where the preset says otherwise: without it the preset's 2 would be read.
    assert written("recipe: gspo_two_passes\n  rollouts: {passes: 1}") == {**plain, "share": False, "passes": 1}
    assert written("recipe: xgrpo") == {**plain, "share": False, "share_rewards": True}
    assert settings_of.spoken_out({"algorithm": {"rollouts": plain, "clip": {}}})["algorithm"] == {
        "rollouts": {
            **plain,
            "passes": 1,
            "share_rewards": False,
            **{"select": "all", "own_fraction": 1.0, "external_fraction": 1.0, "draw_seed": None},
        },
        "clip": {},
    }


def test_a_run_without_later_settings_is_as_it_was(tmp_path: Path) -> None:
    """What was made before them is current, and goes on: its settings.json and its stages name none of them."""
    params = (ROOT / "pipelines/quickstart/params.yaml").read_text()
    settings = load(tmp_path, params)
    tree = settings_of.dump(settings)
    assert "start_seed" not in tree
    assert "partial_scores" not in tree["verification"]
    assert not any("mixture" in block for block in tree["data"]["sets"].values())
    assert not {"mixture", "problems"} & set(tree["agents"]["ada"]["tiny"]["warmup"])
    assert "seed" in settings_of.tracked(settings, WARMUP.settings, "ada")
    apart = load(tmp_path, "start_seed: 7\n" + params)
    assert settings_of.changed(tree, settings_of.dump(apart)) == {"start_seed": (None, 7)}
    assert {"start_seed"} == set(settings_of.tracked(apart, WARMUP.settings, "ada")) - set(
        settings_of.tracked(settings, WARMUP.settings, "ada")
    )
    assert settings_of.spoken_out(tree)["agents"]["ada"]["tiny"]["warmup"]["problems"] == 4000


def test_keys_override_the_recipe_and_exponents_are_numbers(tmp_path: Path) -> None:
    settings = load(tmp_path, PARAMS.replace("alpha: 1.0", "alpha: 3").replace("own_low: 0.03", "own_low: 3e-4"))
    assert settings.algorithm.importance.alpha == 3
    assert settings.algorithm.clip.own_low == 3e-4
    assert settings.algorithm.clip.cross_delta == RECIPES["hacpo"]["clip"]["cross_delta"]


def test_set_overrides_one_value(tmp_path: Path) -> None:
    path = write(tmp_path, PARAMS)
    assert settings_of.load(path, ["algorithm.importance.alpha=2.5"]).algorithm.importance.alpha == 2.5
    with pytest.raises(SettingsError, match="not of the form key=value"):
        settings_of.load(path, ["algorithm.importance.alpha"])
    with pytest.raises(SettingsError, match="unknown key 'algorithm.importance.alfa'"):
        settings_of.load(path, ["algorithm.importance.alfa=1"])


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_stage_sees_only_what_it_declares(tmp_path: Path, stage: str) -> None:
    settings = load(tmp_path, PARAMS)
    view = settings_of.restrict(settings, STAGES[stage].settings, "ada")
    declared = settings_of.spoken_out(settings_of.reads(settings, STAGES[stage].settings, "ada"))
    if "start_seed" in STAGES[stage].settings:  # which is the run's
        declared["start_seed"] = declared.pop("seed")

    def check(seen: Any, allowed: dict[str, Any], full: Any) -> None:
        for name in type(full).model_fields:
            if name == "agents":
                continue
            if name not in allowed:
                with pytest.raises(AttributeError):
                    getattr(seen, name)
            elif isinstance(allowed[name], dict) and hasattr(full, name) and hasattr(getattr(full, name), "model_dump"):
                check(getattr(seen, name), allowed[name], getattr(full, name))
            else:
                assert getattr(seen, name) == getattr(full, name)

    check(view, declared, settings)


@pytest.mark.parametrize(
    ("override", "fsdp"), [("seed=1", False), ("engine.dtype=bfloat16", True), ("launcher.processes=2", True)]
)
def test_whether_fsdp_holds_the_model_follows_from_what_update_declares(
    tmp_path: Path, override: str, fsdp: bool
) -> None:
    settings = settings_of.load(write(tmp_path, PARAMS), [override])
    assert settings.fsdp is settings_of.restrict(settings, UPDATE.settings, "ada").fsdp is fsdp


def test_what_differs_between_two_trees_of_settings() -> None:
    before = {"seed": 1, "clip": {"own_low": 0.2, "cross": "own"}, "retired": 3, "agents": {"ada": {"model": "a"}}}
    now = {"clip": {"cross": "own", "own_low": 0.3}, "seed": 1, "agents": {"ada": {}, "bo": {"model": "b"}}}
    in_both = {"clip.own_low": (0.2, 0.3)}
    assert settings_of.changed(before, now, in_both=True) == in_both
    assert list(settings_of.changed(before, now).items()) == [
        *in_both.items(),
        ("retired", (3, None)),
        ("agents.ada.model", ("a", None)),
        ("agents.bo.model", (None, "b")),
    ]
    assert settings_of.changed(before, before) == {}


def test_settings_page_is_current() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == document(), (
        "run `python -m hacpo.settings.document > docs/settings.md`"
    )


def _types() -> dict[str, str]:
    """Key -> the type column of the settings page."""
    types, block = {}, ""
    for line in document().split("## Recipes")[0].splitlines():
        if line.startswith("## `"):
            block = f"{line[4:-1]}."
        elif line.startswith("| `"):
            key, kind = re.findall(r"(?<!\\)\| (.*?) (?=\|)", line)[:2]
            types[block + key.strip("`")] = kind
    return types


def test_types_on_the_settings_page_are_words_not_python() -> None:
    types = _types()
    assert len(types) > 100
    python = re.compile(
        r"typing|Literal|Optional|Union|tuple|dict|\bstr\b|\bint\b|\bfloat\b|bool|None|[\[\]]|\bge\b|\blt\b"
    )
    assert [(key, kind) for key, kind in types.items() if python.search(kind)] == []
    # Written down in the settings as Literal["arithmetic"] | None, Literal[...] | None, float >= 0 and <= 1, ...
    expected = {
        "data.sets.<name>.task": "`arithmetic`, `reasoning_gym` or null",
        "data.sets.<name>.split": "`train`, `heldout`, `final` or null",
        "data.sets.<name>.problems": "integer from 1 or null",
        "agents.<name>.tiny.warmup.slips": "number from 0 to 1",
        "agents.<name>.tiny.warmup.guessing": "name -> number",
        "agents.<name>.adapter.targets": "text or list of texts",
        "sampling.top_p": "number above 0 and at most 1",
        "sampling.stop": "list of texts",
        "optimizer.beta1": "number from 0 and below 1",
        "evaluation.metrics": "name -> list of texts",
        "evaluation.average": "list of texts or null",
        "agents": "name -> block",
        "engine.vllm.sleep": "true/false",
        "data.sets.<name>.seed": "integer",
    }
    assert {key: types[key] for key in expected} == expected


@pytest.mark.parametrize("path", sorted((ROOT / "pipelines").glob("*/params.yaml")), ids=lambda path: path.parent.name)
def test_shipped_pipelines_are_valid_and_the_quickstart_is_stamped(path: Path) -> None:
    """Only the quickstart ships its DVC files, so that `dvc status` in a fresh clone speaks of it alone."""
    from hacpo.pipeline.project import Pipeline
    from hacpo.pipeline.records.dvc_files import rendered

    for file, text in rendered(Pipeline.open(path.parent)).items():
        if path.parent.name == "quickstart":
            assert file.read_text() == text, "run `hacpo plan pipelines/quickstart`"


def test_settings_that_no_stage_reads_may_be_younger_than_a_run(finished_copy: Path, cli: Cli, tmp_path: Path) -> None:
    """A settings.json of an earlier version, which knew fewer of them: nothing has changed, and its stages go on."""
    path = finished_copy / "artifacts/small/settings.json"
    tree = json.loads(path.read_text())
    for key in settings_of.ADDED:
        block, _, name = key.partition(".")
        assert tree[block].pop(name, "absent") == settings_of.ADDED[key]
    tree = {key: value for key, value in tree.items() if value != {}}
    path.write_text(json.dumps(tree))
    assert "changed" not in cli("status", "pipelines/small").out
    verify = cli("verify", "pipelines/small", "--step", 1, "--agent", "ada")
    assert verify.code == 0, verify.err
    findings = json.loads(cli("audit", "pipelines/small", "--json").out)["findings"]
    assert {finding["check"] for finding in findings} == {"lock"}  # which knows that the file was edited just now
