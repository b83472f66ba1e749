"""Agents that sample and are asked differently: one run on files, what it does to tables, audits and re-runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from conftest import PARAMS, SHARED, Cli, environment, make_finished
from hacpo.artifacts.problem_rows import Asked
from hacpo.engines.interface import Scorer
from hacpo.errors import SettingsError, TemplateError
from hacpo.pipeline.catalogue import STAGES
from hacpo.pipeline.project import Pipeline
from hacpo.settings import params as settings_of
from hacpo.settings.agents import MOST_KEPT, PromptSettings
from hacpo.settings.root import Settings
from hacpo.tokens.prompts import check_template, prompt_token_ids
from hacpo.tokens.tokenizers import ChatTokenizer
from hacpo.tools.audit.walk import audit
from hacpo.tools.report.facts import setting_rows
from tests.tampering import Sandbox

ADA = "ada: {model: models/ada, sampling: {temperature: 0.7, top_k: 20}}"
BO = """bo:
    model: models/bo
    sampling: {temperature: 1.3, max_new_tokens: 20, stop: ["=2", "=1", "x="]}
    prompt: {system: 2 or 3 words, user: "now: {problem}"}"""
DIFFERENT = (
    PARAMS.replace("ada: {model: models/ada}", ADA)
    .replace("bo: {model: models/bo}", BO)
    .replace("steps: 2", "steps: 1")
    .replace("every: 2", "every: 1")
)
STOP = ["=2", "=1", "x="]
ROLLOUTS = "rollouts/step=0001/agent=bo"


@pytest.fixture(scope="module")
def different(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a project whose run `small` has agents that differ in everything they can differ in."""
    return make_finished(tmp_path_factory.mktemp("different"), models, DIFFERENT)


@pytest.fixture(scope="module")
def damaged(different: Path) -> Path:
    return different


def load(folder: Path, params: str = DIFFERENT) -> Settings:
    (folder / "params.yaml").write_text(params)
    return settings_of.load(folder / "params.yaml")


def rows(root: Path, table: str) -> list[dict[str, Any]]:
    return pl.read_parquet(root / "artifacts" / "small" / table / "*.parquet", hive_partitioning=False).to_dicts()


def chat(root: Path, agent: str) -> ChatTokenizer:
    return ChatTokenizer(root / "artifacts/small/checkpoints/step=0000" / f"agent={agent}")


def scorer(root: Path, agent: str) -> Scorer:
    from hacpo.engines.cache import ModelCache
    from hacpo.engines.from_checkpoint import open_engine

    folder = root / "artifacts/small/checkpoints/step=0000" / f"agent={agent}"
    settings = Pipeline.open(root / "pipelines/small").settings.engine
    return open_engine(ModelCache(), agent, folder, settings, "hacpo warmup").scorer


# --- settings --------------------------------------------------------------------------------------------------------


def test_an_agent_takes_the_run_s_settings_where_it_gives_none(tmp_path: Path) -> None:
    changed = DIFFERENT.replace("max_new_tokens: 26}", 'max_new_tokens: 26, top_k: 9, top_p: 0.9, stop: ["."]}')
    settings = load(tmp_path, changed.replace("top_k: 20", "top_k: null"))
    ada, bo = (settings.agents[name].sampling for name in ("ada", "bo"))
    assert (ada.temperature, ada.top_p, ada.top_k, ada.max_new_tokens, ada.stop) == (0.7, 0.9, MOST_KEPT, 26, (".",))
    assert (bo.temperature, bo.top_p, bo.top_k, bo.max_new_tokens, bo.stop) == (1.3, 0.9, 9, 20, tuple(STOP))
    assert settings.agents["ada"].prompt == settings.prompt == PromptSettings()
    # What is written to settings.json says it all again, and reads as the same.
    dumped = settings_of.dump(settings)
    assert dumped["agents"]["ada"]["sampling"]["max_new_tokens"] == 26
    assert settings_of.resolve({key: value for key, value in dumped.items() if key != "agent_names"}) == settings


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("top_k: 20", "group_size: 3", "unknown key 'agents.ada.sampling.group_size'"),
        ("top_k: 20", "top_k: 0", "agents.ada.sampling.top_k: input should be greater than or equal to 1"),
        ("temperature: 0.7", "temprature: 1", "'agents.ada.sampling.temprature'. Did you mean 'temperature'"),
        ("max_new_tokens: 26", "max_new_tokens: 0", ": sampling.max_new_tokens: input should be"),
        ('"now: {problem}"', "now", "agents.bo.prompt.user: must contain {problem}"),
        ('stop: ["=2", "=1", "x="]', 'stop: [""]', "agents.bo.sampling: stop: expected texts of at least one"),
        ('stop: ["=2", "=1", "x="]', "stop: [2]", "agents.bo.sampling.stop.0: input should be a valid string"),
    ],
)  # fmt: skip
def test_a_bad_setting_is_named_where_it_was_written(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in DIFFERENT
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, DIFFERENT.replace(old, new))
    assert message in str(refused.value)


def test_only_the_stages_that_read_an_agents_settings_see_a_change(tmp_path: Path) -> None:
    before, after = load(tmp_path), load(tmp_path, DIFFERENT.replace("temperature: 0.7", "temperature: 0.8"))
    changed = {
        (stage, agent)
        for stage, spec in STAGES.items()
        for agent in ("ada", "bo")
        if settings_of.reads(before, spec.settings, agent) != settings_of.reads(after, spec.settings, agent)
    }
    assert changed == {("generate", "ada"), ("side_generate", "ada"), ("update", "ada")}


def test_a_stage_cannot_see_another_agents_settings(tmp_path: Path) -> None:
    settings = load(tmp_path)
    view = settings_of.restrict(settings, STAGES["update"].settings, "ada")
    assert list(view.agents) == ["ada", "bo"]
    assert view.agents["ada"].sampling.temperature == 0.7
    for read in (lambda: view.agents["bo"].sampling, lambda: view.agents["ada"].sampling.top_k, lambda: view.sampling):
        with pytest.raises(AttributeError):
            read()


def test_dvc_re_runs_what_reads_an_agents_settings_and_no_warmup(sandbox: Sandbox, cli: Cli) -> None:
    def stale() -> set[str]:
        command = [sys.executable, "-m", "dvc", "status", "-R", "pipelines/small", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
        return {name.removeprefix("pipelines/small/") for name in json.loads(done.stdout)}

    sandbox.replace(sandbox.pipeline / "params.yaml", "temperature: 0.7", "temperature: 0.9")
    sandbox.replace(sandbox.pipeline / "params.yaml", "now: {problem}", "then: {problem}")
    assert cli("resolve", "pipelines/small").code == 0
    first, start = "steps/0001/dvc.yaml", "steps/0000/dvc.yaml"
    assert stale() == {
        "dvc.yaml:resolve", "dvc.yaml:report", f"{first}:generate@ada", f"{first}:update@ada",
        f"{first}:generate@bo", f"{first}:pool@bo", f"{first}:evaluate@bo", f"{start}:evaluate@bo",
    }  # fmt: skip


# --- a run -----------------------------------------------------------------------------------------------------------


def test_the_audit_finds_the_run_clean_in_every_depth(
    different: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(different)
    said = cli("audit", "pipelines/small", "--texts", "all", "--deep", "--json")
    content = json.loads(said.out)
    assert (said.code, content["findings"]) == (0, [])
    assert content["coverage"]["deep"]["exact"] == content["coverage"]["deep"]["replayed"]


def test_ratios_are_between_policies_each_at_its_own_temperature(different: Path) -> None:
    """s = exp((log pi_learner(y) - log pi_source(y)) / |y|), the learner's at its temperature, the source's at its."""
    temperatures = {"ada": 0.7, "bo": 1.3}
    for learner, source in (("ada", "bo"), ("bo", "ada")):
        drawn = {row["rollout_id"]: row for row in rows(different, f"rollouts/step=0001/agent={source}")}
        pool = {row["rollout_id"]: row for row in rows(different, f"pool/step=0001/learner={learner}")}
        trace = [
            row
            for row in rows(different, f"updates/step=0001/agent={learner}")
            if not row["is_self"] and not row["update"]
        ]
        assert trace
        asked = [pool[row["rollout_id"]] for row in trace]
        mine = scorer(different, learner).score(
            [(row["prompt_token_ids"], row["token_ids"]) for row in asked], temperature=temperatures[learner]
        )
        theirs = scorer(different, source).score(
            [(drawn[row["rollout_id"]]["prompt_token_ids"], drawn[row["rollout_id"]]["token_ids"]) for row in asked],
            temperature=temperatures[source],
        )
        for row, entry, one, other in zip(trace, asked, mine, theirs, strict=True):
            np.testing.assert_allclose(one.mean(), row["learner_logprob"], atol=1e-4)
            np.testing.assert_allclose(other.sum(), entry["source_logprob"], atol=1e-3)
            ratio = np.exp((one.sum() - other.sum()) / len(entry["token_ids"]))
            np.testing.assert_allclose(ratio, row["ratio"], rtol=1e-3)


def test_a_response_ended_by_a_stop_string_has_no_eos_on_either_side(different: Path) -> None:
    ada, bo = chat(different, "ada"), chat(different, "bo")
    drawn = {row["rollout_id"]: row for row in rows(different, ROLLOUTS)}
    by_string = [row for row in drawn.values() if row["stop_string"] is not None]
    assert 4 < len(by_string) < len(drawn)
    for row in drawn.values():
        assert row["text"] == bo.decode(row["token_ids"])
        assert (row["token_ids"][-1] in bo.stop_token_ids) == (
            row["finish_reason"] == "stop" and row["stop_string"] is None
        )
        if row["stop_string"] is not None:
            assert row["finish_reason"] == "stop"
            assert row["stop_string"] in row["text"]
            assert not any(one in bo.decode(row["token_ids"][:-1]) for one in STOP)
    for row in rows(different, "pool/step=0001/learner=ada"):
        if row["source"] == "bo" and row["status"] == "kept":
            ended = (
                drawn[row["rollout_id"]]["stop_string"] is None and drawn[row["rollout_id"]]["finish_reason"] == "stop"
            )
            assert (row["token_ids"][-1] == ada.eos_token_id) == ended
    assert {row["stop_string"] for row in rows(different, "rollouts/step=0001/agent=ada")} == {None}
    verdicts = {row["rollout_id"]: row["verdict"] for row in rows(different, "verdicts/step=0001/agent=bo")}
    assert {verdicts[row["rollout_id"]] == "truncated" for row in by_string} == {False}


def test_without_scored_eos_only_an_eos_is_left_out(sandbox: Sandbox, cli: Cli, tmp_path: Path) -> None:
    for learner in ("ada", "bo"):
        done = cli("pool", "pipelines/small", "--step", 1, "--learner", learner, "--out", tmp_path,
                   "--set", "algorithm.importance.score_eos=false")  # fmt: skip
        assert done.code == 0, done.err
        drawn = {row["rollout_id"]: row for row in rows(sandbox.root, ROLLOUTS)}
        pool = pl.read_parquet(tmp_path / f"pool/step=0001/learner={learner}/*.parquet").to_dicts()
        seen = set()
        for row in pool:
            if row["source"] == "bo":
                sampled = drawn[row["rollout_id"]]
                eos = sampled["finish_reason"] == "stop" and sampled["stop_string"] is None
                assert row["source_tokens"] == len(sampled["token_ids"]) - (eos and len(sampled["token_ids"]) > 1)
                seen.add(eos)
        assert seen == {True, False}


def test_each_agent_is_asked_in_its_own_words(different: Path) -> None:
    bo = chat(different, "bo")
    for table in (ROLLOUTS, "pool/step=0001/learner=bo"):
        prompt = bo._tokenizer.decode(rows(different, table)[0]["prompt_token_ids"])
        assert prompt.startswith("<system>2 or 3 words<user>now: ")
    ada = chat(different, "ada")._tokenizer.decode(rows(different, "pool/step=0001/learner=ada")[0]["prompt_token_ids"])
    assert "now: " not in ada
    assert "<system>" not in ada


def test_stop_strings_and_prompts_hold_for_evaluation_and_the_report_names_them(different: Path) -> None:
    answers = rows(different, "evaluations/step=0001/agent=bo")
    assert any(one in row["text"] for row in answers for one in STOP)
    assert all(sum(row["text"].count(one) for one in STOP) <= 1 for row in answers)
    page = (different / "artifacts/small/report/index.html").read_text()
    assert "at temperature 0.7 for ada, 1.3 for bo, at most 26 for ada, 20 for bo tokens" in page
    settings = Pipeline.open(different / "pipelines/small").settings
    own = {
        row.key: (row.value, row.reference) for row in setting_rows(settings) if "agents." in row.key and row.reference
    }
    assert own["agents.ada.sampling.temperature"] == ("0.7", "1")
    assert own["agents.bo.sampling.stop"] == ("[=2, =1, x=]", "[]")
    assert "agents.ada.sampling.max_new_tokens" not in {row.key for row in setting_rows(settings)}


def test_a_setting_of_the_run_can_be_tried_on_an_agent_that_inherits_it(
    sandbox: Sandbox, cli: Cli, tmp_path: Path
) -> None:
    words = ["generate", "pipelines/small", "--step", 1, "--agent", "ada", "--out", tmp_path, "--limit", 1]
    assert cli(*words, "--set", "sampling.max_new_tokens=3").code == 0
    drawn = pl.read_parquet(tmp_path / "rollouts/step=0001/agent=ada/*.parquet")
    assert drawn["token_ids"].list.len().max() == 3
    assert "generate does not read this setting" in cli(*words, "--set", "agents.bo.sampling.top_k=3").error


# --- audits ----------------------------------------------------------------------------------------------------------


def found(column: str, *, texts: bool) -> list[tuple[str, str, Any, Any]]:
    mode: Any = "all" if texts else "none"
    result = audit(Pipeline.open(Path("pipelines/small")), texts=mode)
    return [(one.check, one.row, one.expected, one.found) for one in result.findings if one.column == column]


@pytest.mark.parametrize(
    ("old", "new"),
    [(None, "=1"), ("=1", None), ("=1", "=2"), ("=1", "?")],
    ids=["invented", "gone", "other", "unknown"],
)
def test_a_wrong_stop_string_is_found_in_the_tables_alone(sandbox: Sandbox, old: str | None, new: str | None) -> None:
    row = sandbox.edit(ROLLOUTS, "stop_string", lambda _: new, lambda row: row["stop_string"] == old)
    assert ("rollouts", row["rollout_id"], old, new) in found("stop_string", texts=False)


def test_a_response_that_goes_on_after_its_stop_string_is_found(sandbox: Sandbox) -> None:
    bo = chat(sandbox.root, "bo")
    (more,) = bo.encode("7")
    for column, change in (("token_ids", lambda ids: [*ids, more]), ("text", lambda text: f"{text}7")):
        row = sandbox.edit(ROLLOUTS, column, change, lambda row: row["stop_string"] == "=1")
    assert [("end", row["rollout_id"])] == [
        (check, name) for check, name, wanted, _ in found("token_ids", texts=True) if check == "end"
    ]


# --- chat templates --------------------------------------------------------------------------------------------------

QUESTION = "{%- for message in messages -%}{{- message['content'] -}}{%- endfor -%}"
GEMMA = "{%- if messages[0]['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}"
SILENT = "{{- messages[-1]['content'] -}}"
THINKS = "{%- if thinking is defined and thinking -%}{{- '<think>' -}}{%- endif -%}"


@pytest.mark.parametrize(
    ("template", "prompt", "message"),
    [
        (GEMMA + QUESTION, "system: Be brief", "agents.ada.prompt.system: the chat template refuses a system message "
         "(System role not supported). Leave agents.ada.prompt.system out"),
        (SILENT, "system: Be brief", "agents.ada.prompt.system: the chat template leaves the system message out"),
        (QUESTION, "thinking: true", "agents.ada.prompt.thinking: the chat template takes no notice of"),
        (QUESTION, "thinking: false", "agents.ada.prompt.thinking: the chat template takes no notice of"),
    ],
    ids=["refuses system", "drops system", "no thinking", "no thinking either"],
)  # fmt: skip
def test_a_template_that_will_not_is_one_line_before_any_weights_are_read(
    project: Path, cli: Cli, template: str, prompt: str, message: str
) -> None:
    params = PARAMS.replace(
        "{model: models/ada}", f"{{model: models/ada, chat_template: t.jinja, prompt: {{{prompt}}}}}"
    )
    (project / "pipelines/small/params.yaml").write_text(params)
    (project / "t.jinja").write_text(template)
    for words in (["resolve"], ["prepare"], ["warmup", "--agent", "ada"]):
        assert cli(words[0], "pipelines/small", *words[1:]).code == 0
    for weights in (project / "artifacts/small/checkpoints/step=0000/agent=ada").glob("*.safetensors"):
        weights.unlink()  # it is a link to the model that all tests share
        weights.write_bytes(b"no weights at all")
    for words in (["generate", "--step", 1], ["evaluate", "--step", 0]):
        refused = cli(words[0], "pipelines/small", *words[1:], "--agent", "ada")
        assert refused.code == 6
        assert message in refused.error
    assert not list(Path("artifacts/small").glob("rollouts/**/*.parquet"))


def test_a_template_that_knows_thinking_by_its_other_name(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "ada", tmp_path / "ada")
    (tmp_path / "ada" / "chat_template.jinja").write_text(QUESTION + THINKS)
    ada, problem = ChatTokenizer(tmp_path / "ada"), Asked("p", "1+1=?", "2")
    for thinking, expected in ((None, "1+1=?"), (False, "1+1=?"), (True, "1+1=?<think>")):
        settings = PromptSettings(thinking=thinking)
        check_template(ada, "ada", settings)
        assert ada._tokenizer.decode(prompt_token_ids(ada, problem, settings)) == expected


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "tokenizers/qwen3").is_dir(), reason="needs ../shared/tokenizers (Qwen3's tokenizer)")
def test_qwen3_thinks_or_not_and_hears_the_system_message() -> None:
    """Its template writes an empty thought into the prompt when thinking is off, and nothing when it is on."""
    qwen = ChatTokenizer(SHARED / "tokenizers" / "qwen3")
    problem = Asked("p", "1+1=?", "2")
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n"
    for thinking, end in ((None, ""), (True, ""), (False, "<think>\n\n</think>\n\n")):
        settings = PromptSettings(system="Be brief.", thinking=thinking)
        check_template(qwen, "ada", settings)
        assert qwen._tokenizer.decode(prompt_token_ids(qwen, problem, settings)) == start + end
    # What reaches the others is text, in which the tag is spelled out.
    think = qwen._tokenizer.convert_tokens_to_ids("<think>")
    assert qwen.decode([think, *qwen.encode("so 2")]) == "<think>so 2"
    assert think not in qwen.encode("<think>so 2")


def test_a_template_that_refuses_everything_says_so_itself(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "ada", tmp_path / "ada")
    (tmp_path / "ada" / "chat_template.jinja").write_text("{{- raise_exception('not today') -}}")
    ada = ChatTokenizer(tmp_path / "ada")
    with pytest.raises(TemplateError, match="the chat template cannot render this prompt: not today"):
        check_template(ada, "ada", PromptSettings(system="Be brief."))
