"""One step of training: which responses each update sees, and that saving and resuming changes no bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from hacpo.algorithm import batching
from hacpo.algorithm.training_pool import TrainingPool
from hacpo.algorithm.updates import UpdatePlan, plan_updates
from hacpo.artifacts.model_folder import config_hash
from hacpo.engines.models.checkpoint import load_model, policy_hash, save_model
from hacpo.engines.training.policy import Policy
from hacpo.engines.training.trainer import Trainer
from hacpo.errors import ArtifactError
from hacpo.settings.algorithm import AlgorithmSettings
from hacpo.settings.engine import EngineSettings
from hacpo.settings.recipes import RECIPES
from hacpo.settings.training import OptimizerSettings
from hacpo.tokens.tokenizers import ChatTokenizer

SETTINGS = EngineSettings(device="cpu", threads=1)


def rows_of(
    problems: int = 6, sources: tuple[str, ...] = ("ada", "bo"), group: int = 2, **values: Any
) -> list[dict[str, Any]]:
    return [
        {
            "rollout_id": f"{problem}/{source}/{sample}",
            "problem_id": str(problem),
            "source": source,
            "is_self": source == "ada",
            "status": "kept",
            "prompt_token_ids": [5] * (3 + problem),
            "token_ids": [6 + sample, 7 + problem, 1],
            "learner_tokens": 3,
            "source_tokens": 3,
            "source_logprob": -6.0,
            "text_bytes": 3,
            "effective_advantage": (-1.0) ** sample,
            "old_logprobs": [-2.0, -2.0, -2.0],
            "sampler_weight": 1.0,
            **values,
        }
        for problem in range(problems)
        for source in sources
        for sample in range(group)
    ]


def pool_of(rows: list[dict[str, Any]]) -> TrainingPool:
    return TrainingPool(pa.Table.from_pylist(rows), [None] * len(rows))


def planned(rows: list[dict[str, Any]], **options: Any) -> tuple[list[list[dict[str, Any]]], list[dict[str, int]]]:
    """The rows and counts of each update."""
    plan = plan_updates(pa.Table.from_pylist(rows), **options)
    return [[rows[number] for number in part] for part in plan.rows], plan.counts


def train(
    trainer: Trainer, rows: list[dict[str, Any]], **options: Any
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The trace's rows and the metrics of a step."""
    pool = pool_of(rows)
    trace, metrics = trainer.train(plan_updates(pool.table, **options), pool)
    return trace.to_pylist(), metrics


def test_mixed_updates_take_whole_prompts_each_once() -> None:
    rows = rows_of()
    parts, each = planned(rows, updates=3, order="mixed", seeds=[1])
    assert sorted(row["rollout_id"] for part in parts for row in part) == sorted(row["rollout_id"] for row in rows)
    for part, counts in zip(parts, each, strict=True):
        assert len({row["problem_id"] for row in part}) == 2
        assert counts == {"ada": 4, "bo": 4}
    assert planned(rows, updates=3, order="mixed", seeds=[1])[0] == parts
    assert planned(rows, updates=3, order="mixed", seeds=[2])[0] != parts


def test_self_first_takes_own_responses_in_the_earlier_updates() -> None:
    parts, _ = planned(rows_of(), updates=4, order="self_first", seeds=[1])
    assert [{row["source"] for row in part} for part in parts] == [{"ada"}, {"ada"}, {"bo"}, {"bo"}]
    assert sum(len(part) for part in parts) == 24


def test_without_a_seed_prompts_keep_their_order() -> None:
    for order, updates, wanted in (("mixed", 3, ["01", "23", "45"]), ("self_first", 4, ["012", "345", "012", "345"])):
        parts, _ = planned(rows_of(), updates=updates, order=order, seeds=[None])
        assert ["".join(sorted({row["problem_id"] for row in part})) for part in parts] == wanted


def test_unusable_responses_are_left_out_but_counted() -> None:
    rows = rows_of()
    for row in rows:
        row["status"] = "too_long" if row["source"] == "bo" and row["rollout_id"].endswith("1") else "kept"
    parts, counts = planned(rows, updates=1, order="mixed", seeds=[1])
    assert len(parts[0]) == 18
    assert counts == [{"ada": 12, "bo": 12}]


def trainer_of(folder: Path, micro_batch_size: int = 64, recipe: str = "hacpo", **loss: Any) -> Trainer:
    preset = {**RECIPES[recipe], "recipe": recipe}
    preset["loss"] = {**preset["loss"], **loss}
    return Trainer(
        load_model(folder, SETTINGS),
        ChatTokenizer(folder).pad_token_id,
        AlgorithmSettings.model_validate(preset),
        OptimizerSettings(learning_rate=1e-3, micro_batch_size=micro_batch_size),
        temperature=1.0,
        initial_model=load_model(folder, SETTINGS) if loss.get("kl_coef") else None,
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def test_what_dvc_keeps_in_its_cache_by_link_belongs_to_the_next_checkpoint(models: Path, tmp_path: Path) -> None:
    """`cache.type symlink`: of the checkpoint before, every file leads to an object; other links are nobody's."""
    like, folder = tmp_path / "before", tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copytree(models / "ada", like)
    for number, file in enumerate(sorted(like.iterdir())):
        cached = tmp_path / f".dvc/cache/files/md5/{number:02x}/{number:030x}"
        cached.parent.mkdir(parents=True)
        file.rename(cached)
        cached.chmod(0o444)
        file.symlink_to(cached)
    (tmp_path / "private").write_text("{}")
    (like / "special_tokens_map.json").symlink_to(tmp_path / "private")
    save_model(trainer_of(models / "ada").model, folder, like=like)
    assert {file.name for file in folder.iterdir()} == {file.name for file in (models / "ada").iterdir()}
    assert not any(file.is_symlink() for file in folder.iterdir())
    assert policy_hash(folder) == policy_hash(models / "ada")
    assert config_hash(folder) == config_hash(models / "ada")


def test_saving_and_resuming_between_steps_changes_no_bit(models: Path, tmp_path: Path) -> None:
    pool = pool_of(rows_of())
    plans = [plan_updates(pool.table, updates=2, order="mixed", seeds=[seed]) for seed in (1, 2)]
    through = trainer_of(models / "ada")
    for plan in plans:
        through.train(plan, pool)

    first = trainer_of(models / "ada")
    first.train(plans[0], pool)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_model(first.model, folder, like=models / "ada")
    first.save(folder / "trainer")
    second = trainer_of(folder)
    second.load(folder / "trainer")
    trace, _ = second.train(plans[1], pool)
    assert len(trace) == 24
    for name, tensor in weights(through).items():
        assert torch.equal(tensor, weights(second)[name]), name
    assert policy_hash(folder) != policy_hash(models / "ada")
    assert (folder / "tokenizer.json").read_bytes() == (models / "ada" / "tokenizer.json").read_bytes()
    assert (folder / "config.json").read_bytes() == (models / "ada" / "config.json").read_bytes()


def test_damaged_optimizer_state_is_refused(models: Path, tmp_path: Path) -> None:
    trainer = trainer_of(models / "ada")
    train(trainer, rows_of(), updates=1, order="mixed", seeds=[1])
    trainer.save(tmp_path / "trainer")
    file = tmp_path / "trainer" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="the optimizer state cannot be used"):
        trainer_of(models / "ada").load(tmp_path / "trainer")


def test_micro_batches_do_not_change_the_gradient(models: Path) -> None:
    """Same trace to rounding, and weights within what AdamW's first step makes of a rounding error."""
    results = []
    for size in (64, 5):
        trainer = trainer_of(models / "ada", micro_batch_size=size)
        trace, metrics = train(trainer, rows_of(), updates=1, order="mixed", seeds=[1])
        results.append((trace, metrics))
    for one, other in zip(*(result[0] for result in results), strict=True):
        assert one["rollout_id"] == other["rollout_id"]
        assert one["ratio"] == pytest.approx(other["ratio"], abs=1e-5)
    assert results[0][1]["grad_norm"] == pytest.approx(results[1][1]["grad_norm"], rel=1e-4)


def test_on_a_cpu_a_pass_takes_few_tokens(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 responses fit into one micro-batch of 64, but not into 100 tokens: each pass is full but for the next one."""
    monkeypatch.setattr(batching, "CPU_TOKENS", 100)
    trainer = trainer_of(models / "ada")
    shapes: list[tuple[int, ...]] = []
    trainer.model.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    _, metrics = train(trainer, rows_of(), updates=1, order="mixed", seeds=[1])
    assert metrics["micro_batches"] == len(shapes) > 1
    assert sum(rows for rows, _ in shapes) == 24
    assert all(rows * tokens <= 100 < (rows + 1) * tokens for rows, tokens in shapes[:-1])


def test_no_signal_leaves_the_weights_alone(models: Path) -> None:
    trainer = trainer_of(models / "ada")
    before = weights(trainer)
    _, metrics = train(trainer, rows_of(effective_advantage=0.0), updates=2, order="mixed", seeds=[1])
    assert metrics["grad_norm"] == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_an_update_without_usable_responses_counts_and_changes_nothing(models: Path) -> None:
    trainer = trainer_of(models / "ada")
    before = weights(trainer)
    trace, _ = trainer.train(UpdatePlan([[], []], [{"ada": 2}, {"ada": 2}]), pool_of(rows_of()))
    assert len(trace) == 0
    assert trainer.optimizer.updates_done == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_recipe_trains_with_finite_numbers(models: Path, recipe: str) -> None:
    sources = ("ada", "bo") if RECIPES[recipe]["rollouts"]["share"] else ("ada",)
    trainer = trainer_of(models / "ada", recipe=recipe, kl_coef=0.01)
    trace, metrics = train(trainer, rows_of(sources=sources), updates=2, order="mixed", seeds=[1])
    assert all(torch.isfinite(torch.tensor([v for v in row.values() if isinstance(v, float)])).all() for row in trace)
    assert metrics["grad_norm"] > 0


def test_ratios_to_the_own_old_policy_need_no_response_of_another(models: Path) -> None:
    """An agent alone, or one whose others taught nothing in a step."""
    trace, _ = train(
        trainer_of(models / "ada", recipe="sapo"), rows_of(sources=("ada",)), updates=2, order="mixed", seeds=[1]
    )
    assert {row["source"] for row in trace} == {"ada"}


def test_a_penalty_on_own_responses_never_asks_the_initial_policy_about_others(models: Path) -> None:
    """Micro-batches of 5 mix own and cross rows, whose lengths differ; the penalty is a mean over own rows alone."""
    far = load_model(models / "ada", SETTINGS)
    with torch.no_grad():
        for parameter in far.parameters():
            parameter.mul_(0.5)
    asked: list[int] = []
    far.register_forward_pre_hook(lambda module, args, kwargs: asked.append(len(kwargs["input_ids"])), with_kwargs=True)
    losses = {}
    for responses, kl_coef in (("own", 0.0), ("own", 0.1), ("all", 0.1)):
        for size in (64, 5):
            trainer = trainer_of(models / "ada", size, kl_coef=kl_coef, kl_responses=responses)
            trainer.initial = Policy(far)
            asked.clear()
            _, metrics = train(trainer, rows_of(), updates=1, order="mixed", seeds=[1])
            losses[responses, kl_coef, size] = metrics["loss"]
            assert sum(asked) == {("own", 0.0): 0, ("own", 0.1): 12, ("all", 0.1): 24}[responses, kl_coef]
    for responses, kl_coef in (("own", 0.1), ("all", 0.1)):
        assert losses[responses, kl_coef, 64] == pytest.approx(losses[responses, kl_coef, 5], abs=1e-6)
    assert losses["all", 0.1, 64] > losses["own", 0.1, 64] > losses["own", 0.0, 64]
    # A partner's responses alone: no penalty, and no initial policy is needed.
    trainer = trainer_of(models / "ada", kl_coef=0.1, kl_responses="own")
    trainer.initial_model = None
    cross = [row for row in rows_of() if not row["is_self"]]
    _, metrics = train(trainer, cross, updates=1, order="mixed", seeds=[1])
    assert metrics["cross.rows"] == 12


def test_a_sampler_weight_of_zero_is_no_signal_and_is_traced(models: Path) -> None:
    def trained(**own: Any) -> tuple[Trainer, list[dict[str, Any]]]:
        trainer = trainer_of(models / "ada")
        rows = [{**row, **(own if row["is_self"] else {})} for row in rows_of()]
        trace, _ = train(trainer, rows, updates=2, order="mixed", seeds=[1])
        return trainer, trace

    weightless, trace = trained(sampler_weight=0.0)
    silent, _ = trained(effective_advantage=0.0)
    plain, plain_trace = trained()
    for name, tensor in weights(weightless).items():
        assert torch.equal(tensor, weights(silent)[name]), name
    assert any(not torch.equal(tensor, weights(plain)[name]) for name, tensor in weights(weightless).items())
    assert [row["sampler_weight"] for row in trace] == [0.0 if row["is_self"] else 1.0 for row in trace]
    # The objective does not show it: in the first update the two runs are alike.
    for one, other in zip(trace, plain_trace, strict=True):
        if one["update"] == 0:
            assert (one["rollout_id"], one["objective"]) == (other["rollout_id"], other["objective"])


def test_the_name_of_a_partner_is_only_a_label(models: Path) -> None:
    results = []
    for partner in ("bo", "zed"):
        trainer = trainer_of(models / "ada")
        rows = rows_of(sources=("ada", partner))
        trace, metrics = train(trainer, rows, updates=2, order="mixed", seeds=[1])
        numbers = [
            {name: value for name, value in row.items() if name not in ("rollout_id", "source")} for row in trace
        ]
        results.append((numbers, metrics, weights(trainer)))
    assert results[0][:2] == results[1][:2]
    assert all(torch.equal(tensor, results[1][2][name]) for name, tensor in results[0][2].items())


def test_naive_by_own_policy_divides_by_the_learners_old_logprobs(models: Path) -> None:
    preset = {**RECIPES["naive"], "recipe": "naive"}
    preset["importance"] = {**preset["importance"], "reference": "self"}
    trainer = trainer_of(models / "ada")
    trainer.algorithm = AlgorithmSettings.model_validate(preset)
    trace, _ = train(trainer, rows_of(), updates=1, order="mixed", seeds=[1])
    for row in trace:
        if not row["is_self"]:
            assert row["ratio"] == pytest.approx(1.0, abs=1e-6)
            assert row["source_logprob"] == pytest.approx(row["learner_logprob"], abs=1e-6)


def test_a_gradient_that_is_not_finite_stops_the_step(models: Path) -> None:
    trainer = trainer_of(models / "ada")
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    with pytest.raises(ArtifactError, match="the gradient is not finite"):
        train(trainer, rows_of(), updates=1, order="mixed", seeds=[1])
