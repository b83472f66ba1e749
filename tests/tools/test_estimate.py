"""`hacpo estimate`: numbers by hand, numbers against a finished run, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from conftest import PARAMS, ROOT, Cli
from hacpo.errors import SettingsError
from hacpo.settings import params as settings_of
from hacpo.settings.agents import AdapterSettings, TinySettings, WarmupSettings
from hacpo.settings.engine import LauncherSettings
from hacpo.settings.root import RetentionSettings
from hacpo.tools.estimate import arithmetic, disk, memory, shapes, throughput
from hacpo.tools.estimate.known_models import KNOWN_MODELS
from hacpo.tools.estimate.lengths import Lengths
from hacpo.tools.estimate.shapes import ModelShape, from_config, from_tiny
from hacpo.tools.estimate.workload import workload

RUN = "pipelines/small"


def estimated(cli: Cli, *arguments: object) -> Any:
    """The only pipeline's estimate as JSON."""
    result = cli("estimate", *arguments, "--json")
    assert result.code == 0, result.err
    (found,) = json.loads(result.out)["pipelines"]
    return found


# --- shapes ----------------------------------------------------------------------------------------------------------

# What the model cards state: all parameters, and those beside the embeddings (tied ones count once), in billions; and
# the exact sums where hub pages print them.
PUBLISHED = {
    "Qwen/Qwen3-0.6B": (0.6, 0.44, 596_049_920),
    "Qwen/Qwen3-1.7B-Base": (1.7, 1.4, 1_720_574_976),
    "Qwen/Qwen3-4B-Base": (4.0, 3.6, 4_022_468_096),
    "Qwen/Qwen3-4B-Instruct-2507": (4.0, 3.6, 4_022_468_096),
    "Qwen/Qwen3-8B-Base": (8.2, 6.95, 8_190_735_360),
    "meta-llama/Llama-3.2-1B-Instruct": (1.23, 0.97, 1_235_814_400),
    "meta-llama/Llama-3.2-3B-Instruct": (3.21, 2.8, 3_212_749_824),
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones(name: str) -> None:
    shape = KNOWN_MODELS[name]
    billions, beside, exact = PUBLISHED[name]
    assert shape.parameters == exact
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert (shape.parameters - shape.embedding * (1 if shape.tied else 2)) / 1e9 == pytest.approx(beside, rel=0.02)


def transformers_config(shape: ModelShape) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    kind = {"qwen3": Qwen3Config, "llama": LlamaConfig}[shape.architecture]
    return kind(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.context,
    )


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_those_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    shape = KNOWN_MODELS[name]
    config = transformers_config(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == shape.parameters
    assert from_config(config.to_dict(), where="config") == shape


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt_neox"])
@pytest.mark.parametrize("vocabulary", ["characters", "numbers_words", "digits_words"])
def test_parameters_of_an_agent_made_from_scratch(architecture: str, vocabulary: str, tmp_path: Path) -> None:
    from hacpo.engines.models.tiny import build_model, build_tokenizer

    tiny = TinySettings(
        architecture=architecture,
        layers=2,
        hidden=48,
        heads=2,
        vocabulary=vocabulary,
        warmup=WarmupSettings(steps=1),
    )
    model = build_model(tiny, build_tokenizer(tiny), seed=0)
    shape = from_tiny(tiny)
    assert shape.parameters == model.num_parameters()
    model.save_pretrained(str(tmp_path))
    read = shapes.from_folder(tmp_path)
    assert read.parameters == shape.parameters
    assert (read.vocabulary, read.context, read.tied) == (shape.vocabulary, tiny.context, True)


def test_an_adapter_trains_two_thin_matrices_beside_each_map() -> None:
    # One layer: queries 64 -> 128, keys and values 64 -> 64, output 128 -> 64, gate and up 64 -> 256, down 256 -> 64.
    shape = ModelShape("qwen3", 3, 64, 4, 2, 32, 256, 1000, tied=True)
    # 3 layers x rank 8 x (192 + 128 + 128 + 192 + 320 + 320 + 320)
    assert shape.trained(AdapterSettings(rank=8)) == 3 * 8 * 1600
    assert shape.trained(AdapterSettings(rank=4, targets=["q_proj", "v_proj"])) == 3 * 4 * (192 + 128)
    assert shape.trained(None) == shape.parameters


def test_any_architecture_of_transformers_is_counted(tmp_path: Path) -> None:
    """By hand, GPT-2 of width 8, 2 layers, 30 tokens and 16 positions: embeddings 8 x (30 + 16), a layer of 3 x 64 + 64
    + 2 x 256 weights, 24 + 8 + 32 + 8 biases and 2 norms of 16, a last norm of 16; the head is tied."""
    layer = 768 + 72 + 32
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": 32, "vocab_size": 30, "n_positions": 16}
    names = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = {"model_type": "gpt2", "tie_word_embeddings": True, **sizes, **names}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shapes.from_folder(tmp_path)
    assert (shape.parameters, shape.layer_parameters) == (8 * 46 + 2 * layer + 16, layer)


# --- memory ----------------------------------------------------------------------------------------------------------


def kept_for_backward(shape: ModelShape, dtype: str, layers: int, rows: int, length: int) -> int:
    """Bytes that PyTorch keeps between forward and backward pass, weights aside."""
    import dataclasses

    import torch
    from transformers import AutoModelForCausalLM

    from hacpo.engines.training.logprobs import collate, token_logprobs

    config = transformers_config(dataclasses.replace(shape, layers=layers))
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    sequences = [([1, 2, 3], [4] * (length - 3 - row)) for row in range(rows)]
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(model, collate(sequences, 0, torch.device("cpu")), 1.0)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_activations_of_a_layer_are_what_pytorch_keeps(architecture: str, dtype: memory.Dtype) -> None:
    rows, length = 2, 64
    for hidden, heads, kv_heads, head_dim, intermediate in ((64, 4, 2, 32, 256), (96, 6, 3, 16, 200)):
        shape = ModelShape(architecture, 1, hidden, heads, kv_heads, head_dim, intermediate, 500, True, 128)
        one, three = (kept_for_backward(shape, dtype, layers, rows, length) for layers in (1, 3))
        assert (three - one) / 2 == rows * length * memory.activations_per_token(shape, dtype, length)


def test_memory_of_training_by_hand() -> None:
    shape = KNOWN_MODELS["Qwen/Qwen3-4B-Base"]
    parts = memory.training_parts(
        shape,
        memory.padded(32, 5_000, 20_480),
        dtype="bfloat16",
        shards=8,
        wrapped=True,
        trained=shape.parameters,
        frozen=0,
        checkpointing=True,
        initial_policy=True,
    )
    found = {part.name: part.bytes for part in parts}
    n = 4_022_468_096
    assert found["weights, float32"] == found["gradients, float32"] == 4 * n / 8
    assert found["AdamW's two moments"] == n
    assert found["initial policy"] == 2 * n
    # 4 sequences of 5,000 tokens fit into 20,480. Each layer's input: 36 x 2,560 numbers of 2 bytes a token. One layer:
    # norms 2 x 2,560 x (4 + 2 x 2), queries and keys (4,096 + 1,024) x (4 + 2), attention 4 x 4,096 x 2, MLP 4 x 9,728
    # x 2, mask 2 x 5,000, statistics 4 x (2 + 32 + 32 + 8). The last norm: 2,560 x (4 + 2 x 2).
    a_layer = 40_960 + 30_720 + 32_768 + 77_824 + 10_000 + 296
    assert found["activations"] == 20_000 * (36 * 2_560 * 2 + a_layer + 20_480)
    # With an adapter only its matrices have gradients and moments; the rest is held once, in bfloat16.
    lora = memory.training_parts(
        shape,
        memory.padded(1, 5_000, None),
        dtype="bfloat16",
        shards=1,
        wrapped=True,
        trained=1_000_000,
        frozen=n,
        checkpointing=True,
        initial_policy=False,
    )
    assert {part.name: part.bytes for part in lora}["frozen weights"] == 2 * n
    assert {part.name: part.bytes for part in lora}["AdamW's two moments"] == 8_000_000


def test_the_cache_of_a_token_by_hand() -> None:
    # Keys and values of 36 layers x 8 heads x 128 numbers of 2 bytes.
    assert memory.cache_per_token(KNOWN_MODELS["Qwen/Qwen3-4B-Base"], "bfloat16") == 2 * 36 * 8 * 128 * 2


# --- work ------------------------------------------------------------------------------------------------------------


def paper(recipe: str) -> settings_of.Settings:
    """The paper's scale: 58 steps of 128 prompts x 8 responses, mini-batches of 64 prompts, two agents."""
    tree = settings_of.read_params(ROOT / "pipelines" / "quickstart" / "params.yaml")
    tree["algorithm"] = {"recipe": recipe}
    tree["steps"], tree["batch"] = 58, {"prompts": 128, "minibatch_prompts": 64}
    return settings_of.resolve(tree)


def test_hacpo_costs_half_the_rollouts_of_gspo_x2() -> None:
    lengths = Lengths(most_prompt=200, most_response=4_096, prompt=100.0, response=1_000.0)
    works = {
        recipe: workload(paper(recipe), dict.fromkeys(("ada", "bo"), lengths), {"ada": {}, "bo": {}}, evaluations=0)
        for recipe in ("hacpo", "gspo", "gspo_x2")
    }
    # 58 steps x 2 agents x 128 prompts x 8 responses, and 16 for gspo_x2.
    assert {recipe: work.rollouts() for recipe, work in works.items()} == {
        "hacpo": 118_784,
        "gspo": 118_784,
        "gspo_x2": 237_568,
    }
    # Both learn from 16 responses a prompt: one's own 8 and the other's, or one's own 16.
    assert works["hacpo"].learned() == works["gspo_x2"].learned() == 2 * works["gspo"].learned() == 237_568
    assert works["hacpo"].learned_tokens() == works["gspo_x2"].learned_tokens() == 237_568 * 1_100
    assert works["gspo_x2"].sampled_tokens() == 2 * works["hacpo"].sampled_tokens() == 237_568 * 1_000
    assert [works[recipe].agents["ada"].updates for recipe in ("hacpo", "gspo", "gspo_x2")] == [4, 2, 4]


def test_what_the_rivals_learn_from() -> None:
    """58 steps x 2 agents x 128 prompts; responses of 1,000 tokens, prompts of 100."""
    lengths = Lengths(most_prompt=200, most_response=4_096, prompt=100.0, response=1_000.0)
    each = {"gspo_two_passes": 2 * 8, "xgrpo": 8, "sgt": 8 + 1, "sapo": 4 + 4}  # responses a prompt, of sgt at most
    for recipe, count in each.items():
        work = workload(paper(recipe), dict.fromkeys(("ada", "bo"), lengths), {"ada": {}, "bo": {}}, evaluations=0)
        assert work.rollouts() == 118_784, recipe
        assert work.learned() == 58 * 2 * 128 * count, recipe
        assert work.learned_tokens() == 58 * 2 * 128 * count * 1_100, recipe
        updates = 4 if recipe == "gspo_two_passes" else 2
        assert work.agents["ada"].updates == updates, recipe


def test_a_comparison_shows_it(cli: Cli, project: Path) -> None:
    for recipe in ("gspo", "gspo_x2"):
        folder = Path("pipelines") / recipe
        folder.mkdir()
        (folder / "params.yaml").write_text(PARAMS.replace("recipe: hacpo", f"recipe: {recipe}"))
    result = cli("estimate", RUN, "pipelines/gspo", "pipelines/gspo_x2")
    assert result.code == 0, result.err
    found = {line.split()[0]: line.split()[1:3] for line in result.out.splitlines()[1:4]}
    # 2 steps x 2 agents x 8 prompts x 4 responses
    assert found == {"small": ["128", "1"], "gspo": ["128", "1"], "gspo_x2": ["256", "2"]}
    assert max(len(line) for line in result.out.splitlines()) <= 100
    assert cli("estimate", "pipelines").out.splitlines()[1:4] == [
        line for name in ("gspo", "gspo_x2", "small") for line in result.out.splitlines() if line.startswith(f"{name} ")
    ]
    assert "there is no params.yaml" in cli("estimate", "pipelines/none").error


# --- disk and time ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_by_hand() -> None:
    shape = KNOWN_MODELS["Qwen/Qwen3-4B-Base"]
    n = 4_022_468_096
    whole = disk.checkpoint_of(shape, n, 2)
    # bfloat16 weights; two float32 moments and the float32 masters.
    assert (whole.weights, whole.optimizer) == (2 * n, 12 * n)
    assert disk.checkpoint_of(shape, n, 4).optimizer == 8 * n
    adapter = disk.checkpoint_of(shape, 1_000_000, 2)
    assert (adapter.weights, adapter.optimizer) == (2_000_000, 12_000_000)
    assert adapter.start == whole.start > 2 * n


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({}, 20),
        ({"keep_last": 2}, 2),
        ({"keep_every": 5}, 4),  # 5, 10, 15, 20
        ({"keep_last": 2, "keep_every": 5}, 5),  # and 19
        ({"keep_last": 1, "keep_best": "heldout"}, 2),
    ],
)
def test_checkpoints_that_retention_leaves_of_twenty(rule: dict[str, Any], kept: int) -> None:
    assert disk.kept_after(RetentionSettings(**rule), 20) == kept


def test_flops_by_hand() -> None:
    shape = KNOWN_MODELS["Qwen/Qwen3-8B-Base"]
    # The embeddings are looked up, not multiplied; attention: 36 layers x 4,096 x 2 FLOPs x 1,000 tokens.
    assert arithmetic.forward_flops(shape, 1_000) == 2 * (8_190_735_360 - 151_936 * 4_096) + 36 * 4_096 * 2 * 1_000


def test_flops_of_a_step_by_hand(cli: Cli, project: Path) -> None:
    shape = KNOWN_MODELS["Qwen/Qwen3-0.6B"]
    tree = settings_of.read_params(ROOT / "pipelines" / "quickstart" / "params.yaml")
    settings = settings_of.resolve({**tree, "batch": {"prompts": 4, "minibatch_prompts": 2}})
    group = settings.responses_per_prompt
    work = workload(settings, {"ada": Lengths(100, 1_000, 100.0, 900.0)}, {"ada": {}}, evaluations=1).agents["ada"]
    flops = arithmetic.agent_flops(settings, shape, work)
    # Four prompts of G responses, each 100 + 900 tokens long: one pass to sample, one to rescore, three to learn.
    forward = 4 * group * 1_000 * arithmetic.forward_flops(shape, 1_000)
    assert (flops.sampling, flops.rescoring, flops.update) == (forward, forward, 3 * forward)
    assert (flops.step, flops.evaluation) == (5 * forward, 0)
    found = estimated(cli, RUN)
    each = [agent["flops"] for agent in found["agents"].values()]
    steps, evaluations = 2, found["totals"]["evaluations"]
    assert found["totals"]["flops"] == pytest.approx(
        sum(steps * (f["sampling"] + f["rescoring"] + f["update"]) + evaluations * f["evaluation"] for f in each)
    )


def test_no_seconds_that_nobody_measured(cli: Cli, project: Path) -> None:
    for hardware in throughput.DEVICES:
        found = estimated(cli, RUN, "--hardware", hardware)
        times = [found["totals"][key] for key in ("step_seconds", "run_seconds", "measured_seconds")]
        assert times == [None] * 3
        assert [agent["seconds"] for agent in found["agents"].values()] == [None, None]
    shown = cli("estimate", RUN).out
    assert "time: not known before it is measured; run one step, or name a finished run" in shown
    assert "time of a step" not in shown


def test_seconds_follow_the_users_table(cli: Cli, project: Path) -> None:
    table = Path("mine.yaml")
    # 8 prompts x 4 responses, on average 13 tokens as given: 416 tokens sampled, and 832 learned with their prompts.
    table.write_text(
        "mine:\n  source: by hand\n  models:\n"
        "    models/ada: {sampling: 208, training: 100, evaluation: 52, other: 3}\n"
        "    models/bo: {sampling: 416, training: 200}\n"
    )
    found = estimated(cli, RUN, "--throughput", table, "--hardware", "mine", "--mean-response-tokens", 13)
    ada, bo = found["agents"]["ada"], found["agents"]["bo"]
    assert ada["work"]["step"]["responses"] == 32
    assert ada["seconds"]["sampling"] == 416 / 208
    assert ada["seconds"]["update"] == pytest.approx(ada["work"]["learned_tokens"] / 100)
    assert ada["seconds"]["other"] == 3
    assert ada["seconds"]["evaluation"] == ada["work"]["evaluation"]["tokens"] / 52
    assert bo["seconds"]["evaluation"] == bo["work"]["evaluation"]["tokens"] / 416
    assert found["hardware"]["source"] == "by hand"
    # One agent after the other.
    steps = [sum(agent["seconds"][part] for part in ("sampling", "update", "other")) for agent in (ada, bo)]
    assert found["totals"]["step_seconds"] == pytest.approx(sum(steps))
    shown = cli("estimate", RUN, "--throughput", table, "--hardware", "mine").out
    assert "time of a step" in shown
    assert "mine: by hand" in shown
    # With the speeds of one agent alone the run's seconds are not known.
    table.write_text(table.read_text().replace("    models/bo: {sampling: 416, training: 200}\n", ""))
    alone = estimated(cli, RUN, "--throughput", table, "--hardware", "mine")
    assert alone["totals"]["run_seconds"] is None
    # A key of the user's replaces the shipped one alone.
    table.write_text("h100: {agents_at_once: 2}\n")
    assert throughput.load(table)["h100"].memory_gib == throughput.load()["h100"].memory_gib == 79


def test_more_processes_share_memory(cli: Cli, project: Path) -> None:
    params = Path(RUN) / "params.yaml"
    alone = estimated(cli, RUN)
    params.write_text(PARAMS + "launcher: {processes: 4}\n")
    sharded = estimated(cli, RUN)
    params.write_text(PARAMS + "launcher: {processes: 4, replicas: 4}\n")
    copied = estimated(cli, RUN)

    def moments(found: Any) -> float:
        parts = found["agents"]["ada"]["memory_bytes"]["training"]["parts"]
        return float(next(part["bytes"] for part in parts if part["name"].startswith("AdamW")))

    assert moments(alone) == moments(copied) == 4 * moments(sharded)
    assert LauncherSettings(processes=4).world_size == 4
    # Of several processes one reads the model, in float32; one process alone reads it to where it is trained.
    ada = sharded["agents"]["ada"]
    assert ada["host_bytes"] == copied["agents"]["ada"]["host_bytes"] == 4 * ada["parameters"]
    assert alone["agents"]["ada"]["host_bytes"] == 0


# --- against a finished run ------------------------------------------------------------------------------------------


@pytest.fixture
def there(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the finished project, to be read only."""
    monkeypatch.chdir(finished)
    return finished


def table_rows(name: str) -> pl.DataFrame:
    return pl.read_parquet(f"artifacts/small/{name}/**/*.parquet", hive_partitioning=False)


def test_counts_are_those_of_the_finished_run(cli: Cli, there: Path) -> None:
    found = estimated(cli, RUN)
    rollouts, answers, pool = table_rows("rollouts"), table_rows("evaluations"), table_rows("pool")
    totals = found["totals"]
    assert totals["rollouts"] == len(rollouts) == 128
    assert totals["answers"] == len(answers)
    assert totals["learned_responses"] == len(pool)
    tokens = int(rollouts["token_ids"].list.len().sum()) + int(answers["token_count"].sum())
    assert totals["sampled_tokens"] == pytest.approx(tokens)  # means are measured on this very run
    assert totals["most_sampled_tokens"] == 26 * (len(rollouts) + len(answers)) >= tokens
    assert "measured on 2 finished steps" in " ".join(found["notes"])
    for name, agent in found["agents"].items():
        mine = rollouts.filter(agent=name)
        assert int(mine["prompt_token_ids"].list.len().max()) <= agent["lengths"]["most_prompt"]
        assert agent["lengths"]["prompt"] == pytest.approx(mine["prompt_token_ids"].list.len().mean())


def test_disk_is_near_that_of_the_finished_run(cli: Cli, there: Path) -> None:
    found = estimated(cli, RUN)["disk_bytes"]

    def there_is(table: str) -> int:
        return sum(file.stat().st_size for file in Path("artifacts/small", table).rglob("*") if file.is_file())

    # Files of 20 rows here: what a file costs outweighs its rows.
    for table in ("rollouts", "verdicts", "pool", "advantages", "updates"):
        assert 2 * found["step"][table] == pytest.approx(there_is(table), rel=0.5), table
    assert 2 * found["evaluation"] == pytest.approx(there_is("evaluations"), rel=0.5)
    checkpoints = found["written"] - found["tables"]
    assert checkpoints == pytest.approx(there_is("checkpoints"), rel=0.1)


def test_a_finished_run_is_a_throughput_table(cli: Cli, there: Path) -> None:
    found = estimated(cli, RUN, "--throughput", RUN)
    seconds: dict[str, list[tuple[float, float]]] = {}
    for stage in ("generate", "verify", "pool", "update", "evaluate"):
        for path in Path("artifacts/small/metrics", stage).rglob("ada.json"):
            noted = json.loads(path.read_text())
            own = sum(noted.get(part, 0.0) for part in ("sampling_seconds", "scoring_seconds", "train_seconds"))
            seconds.setdefault(stage, []).append((own, noted["seconds"] - own))
    # What it was measured on takes as long as it took, but for what a cold process loads: of two steps the quicker.
    mean = {
        stage: sum(own for own, _ in each) / len(each) + min(rest for _, rest in each)
        for stage, each in seconds.items()
    }
    ada = found["agents"]["ada"]["seconds"]
    assert ada["sampling"] == pytest.approx(mean["generate"])
    assert ada["update"] == pytest.approx(mean["update"])
    assert ada["other"] == pytest.approx(mean["verify"] + mean["pool"])
    assert ada["evaluation"] == pytest.approx(mean["evaluate"])
    assert found["hardware"]["source"] == "measured by small"
    assert found["totals"]["run_seconds"] == pytest.approx(found["totals"]["measured_seconds"])


def test_a_cold_process_makes_no_run_slower(cli: Cli, finished_copy: Path) -> None:
    before = estimated(cli, RUN, "--throughput", RUN)["agents"]["ada"]["seconds"]["update"]
    paths = [finished_copy / f"artifacts/small/metrics/update/step=000{step}/ada.json" for step in (1, 2)]
    noted = [json.loads(path.read_text()) for path in paths]
    slower = max(range(2), key=lambda at: noted[at]["seconds"] - noted[at]["train_seconds"])
    paths[slower].write_text(json.dumps({**noted[slower], "seconds": noted[slower]["seconds"] + 20}))
    after = estimated(cli, RUN, "--throughput", RUN)["agents"]["ada"]["seconds"]["update"]
    assert after == pytest.approx(before)


def test_a_run_without_a_finished_step_is_none(cli: Cli, project: Path) -> None:
    refused = cli("estimate", RUN, "--throughput", RUN)
    assert refused.code == 2
    assert "small: this run has no finished step to take speeds from. Run a step of it first" in refused.error


def test_a_run_that_has_not_begun_is_assumed(cli: Cli, project: Path) -> None:
    found = estimated(cli, RUN)
    assert "assumed to be 0.5 of the longest" in " ".join(found["notes"])
    assert found["agents"]["ada"]["lengths"]["response"] == 13.0
    assert found["totals"]["measured_seconds"] is None
    assert estimated(cli, RUN, "--mean-response-tokens", 20)["agents"]["bo"]["lengths"]["response"] == 20.0


# --- the command -----------------------------------------------------------------------------------------------------


def test_it_writes_nothing_and_fits_a_terminal(cli: Cli, project: Path) -> None:
    before = sorted(project.rglob("*"))
    result = cli("estimate", RUN)
    assert result.code == 0, result.err
    assert sorted(project.rglob("*")) == before
    assert max(len(line) for line in result.out.splitlines()) <= 100
    for word in ("rollouts", "training", "after retention", "floating-point operations", "assumed"):
        assert word in result.out


def test_every_shipped_pipeline_can_be_estimated(cli: Cli) -> None:
    every = sorted(path.parent for path in (ROOT / "pipelines").rglob("params.yaml"))
    folders = [folder for folder in every if folder.parent.name != "smollm2"]
    for folder in set(every) - set(folders):  # of a file that is to be fetched first
        assert "the GGUF file is missing" in cli("estimate", folder).error
    result = cli("estimate", *folders)
    assert result.code == 0, result.err
    names = {line.split()[0] for line in result.out.splitlines()}
    assert {folder.relative_to(ROOT / "pipelines").as_posix() for folder in folders} <= names


@pytest.mark.parametrize("run", ["quickstart", "trio", "paper/llama-1b-instruct_llama-3b-instruct/hacpo"])
def test_shipped_estimates_fit_100_columns(run: str, cli: Cli) -> None:
    result = cli("estimate", ROOT / "pipelines" / run)
    assert result.code == 0, result.err
    assert max(len(line) for line in result.out.splitlines()) <= 100


def test_hub_models_are_known_without_a_network(cli: Cli, project: Path) -> None:
    params = Path(RUN) / "params.yaml"
    params.write_text(PARAMS.replace("models/ada", "Qwen/Qwen3-4B-Base"))
    assert estimated(cli, RUN)["agents"]["ada"]["parameters"] == 4_022_468_096
    params.write_text(PARAMS.replace("models/ada", "nobody/unheard-of"))
    assert "agents.ada.model: the shape of nobody/unheard-of is not known" in cli("estimate", RUN).error


def test_agents_that_are_trained_differently_stand_side_by_side(cli: Cli, project: Path) -> None:
    params = Path(RUN) / "params.yaml"
    params.write_text(
        PARAMS.replace("{model: models/ada}", "{model: Qwen/Qwen3-0.6B, adapter: {rank: 16}}").replace(
            "arithmetic/heldout: {task: arithmetic, split: heldout, problems: 16}",
            "arithmetic/heldout: {path: gone.parquet}",
        )
    )
    result = cli("estimate", RUN)
    assert result.code == 0, result.err
    # Rank 16 beside 28 layers whose maps have 3,072 + 2,048 + 2,048 + 3,072 + 3 x 4,096 inputs and outputs: 10,092,544
    # parameters of 4 bytes. The 596,049,920 of the model are frozen.
    parts = {line[:20].strip(): line.split()[-4:] for line in result.out.splitlines() if line.startswith("  ")}
    assert parts["weights, float32"][:2] == ["38.5", "MiB"]
    assert parts["frozen weights"][-3:] == ["2.2", "GiB", "-"]
    assert "arithmetic/heldout is not there and its size is not known: its evaluation is left out" in result.out


def test_a_folder_under_the_hubs_name_wins(cli: Cli, project: Path, models: Path) -> None:
    Path("Qwen").mkdir()
    Path("Qwen/Qwen3-4B-Base").symlink_to(models / "ada")
    (Path(RUN) / "params.yaml").write_text(PARAMS.replace("models/ada", "Qwen/Qwen3-4B-Base"))
    assert estimated(cli, RUN)["agents"]["ada"]["parameters"] < 100_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100: {bandwidth: 1}", "h100.bandwidth is no key of a throughput table"),
        ("h100: {memory_gib: 0}", "h100.memory_gib: input should be greater than 0"),
        ("mine: {models: {a/b: {sampling: 1}}}", "mine.models.a/b.training is missing"),
        ("- 1", "expected hardware names, each with its numbers"),
        ("h100: {", "not valid YAML"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        throughput.load(path)


def test_unknown_hardware_and_missing_files_are_one_line(cli: Cli, project: Path) -> None:
    assert "Did you mean 'h100'?" in cli("estimate", RUN, "--hardware", "h10").error
    assert "no such file" in cli("estimate", RUN, "--throughput", "none.yaml").error
    (Path(RUN) / "params.yaml").write_text(PARAMS.replace("models/ada", "models/gone"))
    assert "models/gone: has no readable config.json" in cli("estimate", RUN).error
