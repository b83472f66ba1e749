"""A user's mistake costs one clear line and a non-zero exit, and nothing is written."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import Cli


def tree(root: Path) -> dict[str, bytes]:
    """Every file of the project but locks between processes and DVC's own notes."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not {".locks", ".dvc"} & set(path.parts)
    }


def edit(old: str, new: str) -> Callable[[], None]:
    def change() -> None:
        path = Path("pipelines/small/params.yaml")
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "command", "code", "says"),
    [
        (edit("seed: 1", "sead: 1"), "run pipelines/small", 2, "unknown key 'sead'. Did you mean 'seed'?"),
        (
            edit("steps: 2", "steps: two"),
            "plan pipelines/small",
            2,
            "steps: input should be a valid integer (found 'two')",
        ),
        (edit("  ada:", "  a/b:"), "run pipelines/small", 2, "'a/b' cannot be a name"),
        (edit("group_size: 4", "group_size: 0"), "run pipelines/small", 2, "sampling.group_size"),
        (edit("seed: 1", "seed: 1"), "nothing pipelines/small", 2, "No such command 'nothing'"),
        (edit("seed: 1", "seed: 1"), "rnu pipelines/small", 2, "no such command 'rnu'. Did you mean 'run'?"),
        (
            edit("recipe: hacpo", "recipe: gspo\n  advantage: {epsilon: 1.0e-6} #"),
            "generate pipelines/small --step 1 --agent ada",
            2,
            "params.yaml: has changed since the settings were resolved",
        ),
        (
            edit("models/ada", "models/none"),
            "warmup pipelines/small --agent ada --out elsewhere",
            6,
            "the model folder is missing",
        ),
        (edit("seed: 1", "seed: 2"), "warmup pipelines/other --agent ada", 2, "there is no params.yaml"),
        (edit("seed: 1", "seed: 1"), "generate pipelines/small --step 1 --agent eve", 2, "no agent 'eve'"),
        (edit("seed: 1", "seed: 1"), "generate pipelines/small --step 3 --agent ada", 2, "--step is out of range"),
        (edit("seed: 1", "seed: 1"), "generate pipelines/small --step 0 --agent ada", 2, "--step is out of range"),
        (edit("seed: 1", "seed: 1"), "generate pipelines/small --agent ada", 2, "Missing option '--step'"),
        (edit("seed: 1", "seed: 1"), "generate . --step 1 --agent ada", 2, "is no pipeline folder"),
        (
            edit("problems: 64", "problems: 7"),
            "prepare pipelines/small --out elsewhere",
            5,
            "too few problems for one step",
        ),
        (
            edit("{task: arithmetic, split: train, problems: 64}", "{path: none.parquet}"),
            "prepare pipelines/small --out elsewhere",
            3,
            "none.parquet: the problem file is missing",
        ),
        (edit("seed: 1", "seed: 1"), "prepare pipelines/small --out x --set seed=[1", 2, "the value is not valid YAML"),
    ],
)
def test_refused_before_anything_is_written(
    finished_copy: Path, cli: Cli, change: Callable[[], None], command: str, code: int, says: str
) -> None:
    change()
    before = tree(finished_copy)
    result = cli(*command.split())
    assert says in result.error
    assert result.code == code
    assert tree(finished_copy) == before


@pytest.mark.parametrize(
    ("table", "command", "made_by"),
    [
        ("prompts/step=0001", "generate pipelines/small --step 1 --agent ada", "hacpo prepare pipelines/small"),
        (
            "checkpoints/step=0001/agent=bo",
            "generate pipelines/small --step 2 --agent bo",
            "hacpo update pipelines/small --step 1 --agent bo",
        ),
        (
            "rollouts/step=0001/agent=bo",
            "pool pipelines/small --step 1 --learner ada",
            "hacpo generate pipelines/small --step 1 --agent bo",
        ),
        (
            "verdicts/step=0001/agent=bo",
            "advantage pipelines/small --step 1",
            "hacpo verify pipelines/small --step 1 --agent bo",
        ),
        ("capability/step=0001", "advantage pipelines/small --step 2", "hacpo advantage pipelines/small --step 1"),
        (
            "pool/step=0002/learner=bo",
            "update pipelines/small --step 2 --agent bo",
            "hacpo pool pipelines/small --step 2 --learner bo",
        ),
        (
            "advantages/step=0002",
            "update pipelines/small --step 2 --agent bo",
            "hacpo advantage pipelines/small --step 2",
        ),
        ("data", "evaluate pipelines/small --step 0 --agent ada", "hacpo prepare pipelines/small"),
    ],
)
def test_a_missing_input_names_the_command_that_makes_it(
    finished_copy: Path, cli: Cli, table: str, command: str, made_by: str
) -> None:
    shutil.rmtree(finished_copy / "artifacts" / "small" / table)
    before = tree(finished_copy)
    result = cli(*command.split())
    assert result.code == 3
    assert f"is missing. Run `{made_by}`" in result.error
    assert tree(finished_copy) == before


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def flip(path: Path) -> None:
    """In the first column's page, which every reader needs."""
    column = pq.read_metadata(path).row_group(0).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 5] ^= 0xFF
    path.write_bytes(content)


def drop_column(path: Path) -> None:
    table = pq.read_table(path, partitioning=None)
    pq.write_table(table.drop(["reward"]), path)


def other_step(path: Path) -> None:
    shutil.copy(str(path).replace("step=0001", "step=0002"), path)


def other_run(path: Path) -> None:
    table = pq.read_table(path, partitioning=None)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"hacpo.run": b"other"}), path)


def other_agent(path: Path) -> None:
    shutil.copy(str(path).replace("agent=ada", "agent=bo"), path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, "damaged or truncated"),
        (flip, "damaged or truncated"),
        (drop_column, "column 'reward' is missing"),
        (other_step, "belongs to another partition (expected step=0001/agent=ada, found step=0002/agent=ada)"),
        (other_agent, "belongs to another partition"),
        (other_run, "belongs to another run (expected small, found other)"),
        (lambda path: path.unlink(), "a shard is missing, renamed or left over"),
    ],
)
def test_damaged_or_foreign_shards_are_refused(
    finished_copy: Path, cli: Cli, damage: Callable[[Path], None], says: str
) -> None:
    damage(finished_copy / "artifacts" / "small" / "verdicts" / "step=0001" / "agent=ada" / "part-00000.parquet")
    before = tree(finished_copy)
    for command in ("advantage pipelines/small --step 1", "pool pipelines/small --step 1 --learner bo"):
        result = cli(*command.split())
        assert result.code == 4
        assert says in result.error
        assert "hacpo verify pipelines/small --step 1 --agent ada" in result.error
    assert tree(finished_copy) == before


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no usable tokenizer"),
        (lambda folder: (folder / "config.json").unlink(), "is no model folder: it has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors weights"),
    ],
)
def test_unusable_model_folders_are_refused_at_warmup(
    project: Path, models: Path, cli: Cli, spoil: Callable[[Path], None], says: str
) -> None:
    shutil.copytree(models / "ada", project / "broken")
    (project / "broken" / "tokenizer_config.json").write_text((models / "ada" / "tokenizer_config.json").read_text())
    spoil(project / "broken")
    edit("models/ada", "broken")()
    assert cli("resolve", "pipelines/small").code == 0
    before = tree(project)
    result = cli("warmup", "pipelines/small", "--agent", "ada")
    assert result.code == 6
    assert says in result.error
    assert tree(project) == before


def test_damaged_weights_are_refused(finished_copy: Path, cli: Cli) -> None:
    path = finished_copy / "artifacts" / "small" / "checkpoints" / "step=0000" / "agent=ada" / "model.safetensors"
    content = path.read_bytes()
    path.unlink()  # a hard link to the model folder's own file
    path.write_bytes(content[:-500])
    result = cli("generate", "pipelines/small", "--step", 1, "--agent", "ada", "--out", finished_copy / "out")
    assert result.code in (4, 6)
    assert str(path.parent.relative_to(finished_copy)) in result.error


def test_a_prompt_that_the_template_refuses_is_named(project: Path, models: Path, cli: Cli) -> None:
    shutil.copytree(models / "ada", project / "picky")
    (project / "picky" / "chat_template.jinja").write_text(
        "{% if '%' in messages[0]['content'] %}{{ raise_exception('no percent signs') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    edit("models/ada", "picky")()
    for command in ("resolve pipelines/small", "prepare pipelines/small", "warmup pipelines/small --agent ada"):
        assert cli(*command.split()).code == 0
    result = cli("generate", "pipelines/small", "--step", 1, "--agent", "ada")
    assert result.code == 5
    assert "problem 'modular-" in result.error
    assert "no percent signs" in result.error
    assert not (project / "artifacts" / "small" / "rollouts").exists()


@pytest.mark.parametrize(
    ("command", "table"),
    [("generate pipelines/small --step 1", "rollouts"), ("evaluate pipelines/small --step 0", "evaluations")],
)
def test_a_prompt_beyond_the_models_context_is_refused_before_sampling(
    project: Path, models: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str, table: str
) -> None:
    """A template may make any length of a problem: a model of 128 tokens would sample from 3,000, or from millions."""
    from hacpo.engines.response_store import SavingSampler

    shutil.copytree(models / "ada", project / "wordy")
    (project / "wordy" / "chat_template.jinja").write_text('{{ "1" * 3000 }}')
    edit("models/ada", "wordy")()
    for before in ("resolve pipelines/small", "prepare pipelines/small", "warmup pipelines/small --agent ada"):
        assert cli(*before.split()).code == 0
    monkeypatch.setattr(SavingSampler, "sample", None)  # nothing is sampled
    result = cli(*command.split(), "--agent", "ada")
    assert result.code == 5
    assert "a prompt of 3,000 tokens leaves no room for a response in the model's context" in result.error
    assert not (project / "artifacts" / "small" / table).exists()


def test_a_tokenizer_that_encodes_nothing_is_refused(project: Path, models: Path, cli: Cli) -> None:
    """It loads, and what its vocabulary lacks, here everything, it has no token for."""
    shutil.copytree(models / "ada", project / "wordless")
    path = project / "wordless" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"] = {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}
    path.write_text(json.dumps(content))
    edit("models/ada", "wordless")()
    assert cli("resolve", "pipelines/small").code == 0
    result = cli("warmup", "pipelines/small", "--agent", "ada")
    assert result.code == 6, result.error
    assert "the tokenizer encodes no text: " in result.error
    assert "UNK" in result.error


def test_one_response_is_nothing_to_compare(finished_copy: Path, cli: Cli) -> None:
    edit("group_size: 4", "group_size: 1")()
    assert cli("plan", "pipelines/small").code == 0  # two agents share: two responses to compare
    edit("recipe: hacpo", "recipe: gspo")()
    before = tree(finished_copy)
    result = cli("run", "pipelines/small")
    assert result.code == 2
    assert "recipe 'gspo' compares responses to one prompt and needs at least 2, found 1" in result.error
    assert tree(finished_copy) == before


@pytest.mark.parametrize(
    ("command", "written"),
    [
        ("update pipelines/small --step 1 --agent ada", "checkpoints/step=0001/agent=ada"),
        ("verify pipelines/small --step 1 --agent ada", "verdicts/step=0001/agent=ada"),
        ("generate pipelines/small --step 1 --agent ada", ".saved/rollouts/step=0001/agent=ada"),
    ],
)
def test_a_disk_that_fills_up_in_any_stage_is_one_line(
    finished_copy: Path, cli: Cli, command: str, written: str
) -> None:
    before = tree(finished_copy)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        result = cli(*command.split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.code == 8
    assert f"small/{written}: cannot be written: file too large" in result.error
    assert tree(finished_copy) == before


def test_tables_that_do_not_belong_together_are_named(finished_copy: Path, cli: Cli) -> None:
    edit("seed: 1", "seed: 5")()
    assert cli("resolve", "pipelines/small").code == 0
    assert cli("prepare", "pipelines/small").code == 0
    result = cli("verify", "pipelines/small", "--step", 1, "--agent", "ada")
    assert result.code == 4
    assert "the rollouts are of other problems than the step's prompts" in result.error
    edit("recipe: hacpo", "recipe: gspo")()
    edit("seed: 5", "seed: 1")()
    for command in ("resolve pipelines/small", "prepare pipelines/small", "advantage pipelines/small --step 1"):
        assert cli(*command.split()).code == 0
    result = cli("update", "pipelines/small", "--step", 1, "--agent", "ada")
    assert result.code == 4
    assert "pool, advantages and rollouts do not belong together" in result.error


def drop_row(table: pa.Table) -> pa.Table:
    return table.slice(0, table.num_rows - 1)


def rename_agent(table: pa.Table) -> pa.Table:
    return table.set_column(table.schema.names.index("agent"), table.field("agent"), pa.array(["bo"] * table.num_rows))


def rename_ids(table: pa.Table) -> pa.Table:
    ids = [name.replace("/ada/", "/bo/") for name in table["rollout_id"].to_pylist()]
    return table.set_column(table.schema.names.index("rollout_id"), table.field("rollout_id"), pa.array(ids))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (drop_row, "rows are missing (expected 4 responses to each of 8 problems, found no '0001/ada/"),
        (rename_agent, "holds rows of another agent or step (expected step 1, ada, found '0001/ada/"),
        (rename_ids, "holds rows of another agent or step (expected step 1, ada, found '0001/bo/"),
    ],
)
def test_verify_refuses_rows_that_are_missing_or_another_agents(
    finished_copy: Path, cli: Cli, change: Callable[[pa.Table], pa.Table], line: str
) -> None:
    """The shard itself is whole: its metadata names the right run, step and agent."""
    shard = sorted(Path("artifacts/small/rollouts/step=0001/agent=ada").glob("part-*.parquet"))[-1]
    table = pq.read_table(shard)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), shard)
    before = tree(finished_copy)
    result = cli("verify", "pipelines/small", "--step", 1, "--agent", "ada")
    assert result.code == 4
    assert f"rollouts/step=0001/agent=ada: {line}" in result.error
    assert "Repeat `hacpo generate pipelines/small --step 1 --agent ada`" in result.error
    assert tree(finished_copy) == before


def test_a_full_disk_costs_one_line_and_leaves_nothing_half_written(finished_copy: Path, cli: Cli) -> None:
    """A file-size limit stands in for a full disk."""
    before = tree(finished_copy)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        result = cli("advantage", "pipelines/small", "--step", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.code == 8
    assert "small/capability/step=0001: cannot be written: file too large. Nothing was changed" in result.error
    assert tree(finished_copy) == before


def test_the_driver_reports_a_stages_error_and_keeps_what_was_done(finished_copy: Path, cli: Cli) -> None:
    edit("max_new_tokens: 26", "max_new_tokens: 20")()
    checkpoint = finished_copy / "artifacts" / "small" / "checkpoints" / "step=0000" / "agent=bo"
    (checkpoint / "chat_template.jinja").unlink()
    (checkpoint / "chat_template.jinja").write_text("{{ raise_exception('spoiled') }}")
    edit("models/bo", "models/none")()
    result = cli("run", "pipelines/small", "--jobs", "1", "--yes")
    assert result.code == 6
    assert "the model folder is missing" in result.error
    edit("models/none", "models/bo")()
    assert cli("run", "pipelines/small", "--jobs", "1", "--yes").code == 0


def test_the_version_is_said(cli: Cli) -> None:
    said = cli("--version")
    assert (said.code, said.out) == (0, f"hacpo {version('hacpo')}\n")
