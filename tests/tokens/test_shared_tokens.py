"""Equal tokenizers share token ids as sampled; between different ones terminal tokens are decided once per pair."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import PARAMS, Cli, environment, make_project
from hacpo.algorithm.pooling import Limits, build_pool
from hacpo.artifacts import parquet, storage, tables
from hacpo.artifacts.layout import Layout
from hacpo.artifacts.problem_rows import Asked
from hacpo.errors import ModelError
from hacpo.pipeline.project import Pipeline
from hacpo.settings.agents import PromptSettings
from hacpo.tokens.same_tokenizer import same_tokenizer
from hacpo.tokens.terminals import Terminals, terminal_map
from hacpo.tokens.tokenizers import ChatTokenizer
from hacpo.tools.audit.findings import Finding
from hacpo.tools.audit.walk import audit
from tests.tampering import Sandbox
from tokenizer_kinds import write_model, write_tokenizer

Row = dict[str, Any]

AGENTS = {"ada": "byte_level", "bo": "byte_level", "cy": "llama2"}
"""Two of Qwen's kind with the same tokenizer and other weights, and one of another."""

SMALL = (
    PARAMS.replace("steps: 2", "steps: 1")
    .replace("every: 2", "every: 9")
    .replace("prompts: 8, minibatch_prompts: 4", "prompts: 3, minibatch_prompts: 3")
    .replace(
        "  ada: {model: models/ada}\n  bo: {model: models/bo}",
        "\n".join(f"  {a}: {{model: models/{a}}}" for a in AGENTS),
    )
)
POOL = "pipelines/small", "--step", 1, "--learner"


class Step:
    """A step of three agents, of which ada's first four responses are given."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layout = Layout(root / "artifacts" / "small")
        self.chats = {name: ChatTokenizer(self.layout.checkpoint(0, name)) for name in AGENTS}

    def control(self, agent: str, content: str) -> int:
        return int(self.chats[agent]._tokenizer.get_vocab()[content])

    def given(self) -> list[Row]:
        """Four responses of ada."""
        chat = self.chats["ada"]
        end, start, turn = (self.control("ada", f"<|{name}|>") for name in ("endoftext", "im_start", "im_end"))
        letters = [token for letter in "So 7+3=10 is 10, as" for token in chat.encode(letter)]
        body = chat.encode("7+3=10 10-2=8")
        assert len(letters) == 19
        assert letters != chat.encode("So 7+3=10 is 10, as")  # not the tokens that the text would become
        told = [
            ([*letters, end], "stop"),  # 20 tokens
            ([*body, start, *body, turn], "stop"),
            ([*body, start], "length"),
            ([end], "stop"),
        ]
        return [
            {
                "token_ids": token_ids,
                "text": chat.decode(token_ids),
                "finish_reason": reason,
                "stop_string": None,
                "logprobs": [-1.0] * len(token_ids),
                "sampler_logprobs": [-1.0] * len(token_ids),
            }
            for token_ids, reason in told
        ]

    def write(self) -> None:
        path = self.layout.rollouts(1, "ada")
        rows = parquet.read_table(path, tables.ROLLOUTS).to_pylist()
        rows = [{**row, **given} for row, given in zip(rows, self.given(), strict=False)] + rows[4:]
        metadata = parquet.read_metadata(path)["settings"]
        parquet.write_table(
            path,
            tables.ROLLOUTS,
            parquet.to_arrow(tables.ROLLOUTS, rows),
            run="small",
            partition=tables.ROLLOUTS.partition(1, "ada"),
            settings=metadata,
            rows_per_shard=20,
        )

    def pool(self, learner: str, source: str, root: Path | None = None) -> list[Row]:
        """A source's responses in a learner's pool, in order."""
        path = Layout(root).pool(1, learner) if root else self.layout.pool(1, learner)
        return [row for row in parquet.read_table(path, tables.POOL).to_pylist() if row["source"] == source]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Step:
    """Prompts, rollouts and verdicts of the step, to be pooled; read only."""
    from hacpo.cli import app
    from hacpo.pipeline.execution.command_line import run_app

    base = tmp_path_factory.mktemp("shared")
    for seed, (name, kind) in enumerate(AGENTS.items()):
        write_model(base / "models" / name, kind, seed)
    root = make_project(base / "project", base / "models", SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)

        def each(*words: object) -> None:
            assert run_app(app, [str(word) for word in words]) == 0

        for name in ("resolve", "prepare"):
            each(name, "pipelines/small")
        for agent in AGENTS:
            each("warmup", "pipelines/small", "--agent", agent)
            each("generate", "pipelines/small", "--step", 1, "--agent", agent)
        step = Step(root)
        step.write()
        for agent in AGENTS:
            each("verify", "pipelines/small", "--step", 1, "--agent", agent)
        for agent in AGENTS:
            each("pool", *POOL, agent)
    return step


@pytest.fixture
def step(made: Step, monkeypatch: pytest.MonkeyPatch) -> Step:
    monkeypatch.chdir(made.root)
    return made


# --- equal tokenizers ------------------------------------------------------------------------------------------------


def test_a_learner_with_the_same_tokenizer_gets_the_sampled_ids_and_the_sampled_end(step: Step) -> None:
    given, cross = step.given(), step.pool("bo", "ada")
    end = step.control("ada", "<|endoftext|>")
    assert cross[0]["token_ids"] == given[0]["token_ids"]
    assert (cross[0]["token_ids"][-1], cross[0]["source_terminal"], cross[0]["learner_terminal"]) == (end, end, end)
    # A learner that gives every token -1 as the source did, but <|im_end|> -6, 5 nats less: over 20 tokens the ratio is
    # exp((-20 + 20) / 20) = 1. With <|im_end|> for the <|endoftext|> that was sampled: exp((-19 - 6 + 20) / 20) =
    # exp(-5 / 20) = .779, which the lower bound of .8 drops.
    logprob = {step.control("ada", "<|im_end|>"): -6.0}
    learner_sum = sum(logprob.get(token, -1.0) for token in cross[0]["token_ids"])
    assert (cross[0]["source_logprob"], cross[0]["learner_tokens"], cross[0]["source_tokens"]) == (-20.0, 20, 20)
    assert math.exp((learner_sum - cross[0]["source_logprob"]) / 20) == 1.0


def test_control_tokens_ends_alone_and_cut_responses_are_copied_too(step: Step) -> None:
    given, cross = step.given(), step.pool("bo", "ada")
    assert [row["token_ids"] for row in cross[:4]] == [row["token_ids"] for row in given]
    assert {(row["status"], row["roundtrip"], row["as_sampled"]) for row in cross[:4]} == {("kept", True, True)}
    turn, end = (step.control("ada", f"<|{name}|>") for name in ("im_end", "endoftext"))
    assert [row["learner_terminal"] for row in cross[:4]] == [end, turn, None, end]
    assert all(row["source_tokens"] == row["learner_tokens"] for row in cross)
    # The author's own row says the same.
    assert [(row["token_ids"], row["as_sampled"]) for row in step.pool("ada", "ada")[:4]] == [
        (row["token_ids"], True) for row in given
    ]


def test_agents_of_both_kinds_stand_side_by_side(step: Step) -> None:
    found = {
        (learner, source): {row["as_sampled"] for row in step.pool(learner, source)}
        for learner in AGENTS
        for source in AGENTS
    }
    shared = {("ada", "ada"), ("ada", "bo"), ("bo", "ada"), ("bo", "bo"), ("cy", "cy")}
    assert found == {pair: {pair in shared} for pair in found}
    metrics = json.loads(step.layout.metrics("pool", 1, "bo").read_text())
    assert metrics["as_sampled"] == 0.5  # ada's 12 of the 24 that bo did not sample


def test_an_end_that_is_not_scored_is_copied_by_neither_side(step: Step, cli: Cli, tmp_path: Path) -> None:
    assert cli("pool", *POOL, "bo", "--out", tmp_path, "--set", "algorithm.importance.score_eos=false").code == 0
    given, cross = step.given(), step.pool("bo", "ada", tmp_path)
    end = step.control("ada", "<|endoftext|>")
    assert [row["token_ids"] for row in cross[:4]] == [
        given[0]["token_ids"][:-1],
        given[1]["token_ids"][:-1],
        given[2]["token_ids"],
        [end],  # nothing but EOS keeps it
    ]
    assert [row["source_tokens"] for row in cross[:4]] == [row["learner_tokens"] for row in cross[:4]]
    assert [(row["source_terminal"], row["learner_terminal"]) for row in cross[:4]] == [(None, None)] * 3 + [(end, end)]


def test_what_does_not_fit_is_too_long_as_ever(step: Step, cli: Cli, tmp_path: Path) -> None:
    prompt = len(step.pool("bo", "ada")[0]["prompt_token_ids"])
    for most, status in ((prompt + 20, "kept"), (prompt + 19, "too_long")):
        assert cli("pool", *POOL, "bo", "--out", tmp_path / str(most), "--set", f"pool.max_tokens={most}").code == 0
        row = step.pool("bo", "ada", tmp_path / str(most))[0]
        assert (row["status"], len(row["token_ids"]), row["as_sampled"]) == (status, 20, True)


@pytest.mark.parametrize(
    ("vocabulary", "tokens", "token_ids", "status"),
    [
        (100, 12, [5, 99], "kept"),
        (99, 12, [], "not_representable"),  # whose largest id is 98
        (100, 11, [5, 99], "too_long"),  # 10 tokens of prompt and 2
        (99, 11, [], "not_representable"),
    ],
)
def test_limits_of_a_learner_that_takes_ids_as_sampled(
    vocabulary: int, tokens: int, token_ids: list[int], status: str
) -> None:
    def response(agent: str, ids: list[int]) -> pa.Table:
        row = {"rollout_id": f"0001/{agent}/p/000", "problem_id": "p", "sample": 0, "token_ids": ids, "text": "ab"}
        more = {"finish_reason": "length", "stop_string": None, "logprobs": [-1.0] * len(ids), "reward": 1.0}
        return pa.Table.from_pylist([{**row, **more, "prompt_token_ids": [7] * 10}])

    own, cross = build_pool(
        [Asked("p", "1+1=?", "2")],
        # An agent's own is kept whatever it is.
        {"ada": response("ada", [5, 200]), "bo": response("bo", [5, 99])},
        learner="ada",
        group_size=1,
        routes={},
        prompt_settings=PromptSettings(),
        limits=Limits(tokens, vocabulary),
        score_eos=True,
    ).to_pylist()
    assert (own["token_ids"], own["status"], own["roundtrip"]) == ([5, 200], "kept", True)
    assert (cross["token_ids"], cross["status"]) == (token_ids, status)
    assert (cross["roundtrip"], cross["learner_tokens"]) == (status != "not_representable", len(token_ids))
    assert (cross["source_logprob"], cross["source_tokens"]) == (-2.0, 2)


def test_a_run_whose_tokenizers_are_equal_needs_no_tokenizer_library(step: Step, cli: Cli, tmp_path: Path) -> None:
    root = step.root
    params = (root / "pipelines/small/params.yaml").read_text()
    code = (
        "import sys\nfrom hacpo.pipeline.execution.command_line import run_app\nfrom hacpo.cli import app\n"
        f"words = ['pool', 'pipelines/pair', '--step', '1', '--learner', 'bo', '--out', {str(tmp_path)!r}]\n"
        "code = run_app(app, words)\n"
        "print(code, [name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    )
    # The same step of the two agents alone.
    (root / "pipelines/pair").mkdir(exist_ok=True)
    (root / "pipelines/pair/params.yaml").write_text(params.replace("  cy: {model: models/cy}\n", ""))
    _copied_run(root / "artifacts", "small", "pair")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True, cwd=root
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    # What the model can take is read from its config.json, without the library's word for a damaged one.
    (root / "artifacts/pair/checkpoints/step=0000/agent=bo/config.json").write_text("[1")
    refused = cli("pool", "pipelines/pair", "--step", 1, "--learner", "bo", "--out", tmp_path)
    assert refused.code == 6
    assert "agent=bo/config.json: is no JSON mapping" in refused.error


def _copied_run(artifacts: Path, old: str, new: str) -> None:
    """The tables that pool reads, under another run's name."""
    from hacpo.settings.params import dump

    for path in (artifacts / old).rglob("*"):
        target = artifacts / new / path.relative_to(artifacts / old)
        if path.suffix == ".parquet":
            content = pq.read_table(path, partitioning=None)
            content = content.replace_schema_metadata({**content.schema.metadata, b"hacpo.run": new.encode()})
            target.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(content, target)
        elif path.is_file() and "checkpoints" in path.parts:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    pipeline = Pipeline.open(artifacts.parent / "pipelines" / new)
    storage.write_json(artifacts / new / "settings.json", dump(pipeline.settings))


# --- different tokenizers --------------------------------------------------------------------------------------------


def test_a_learner_with_another_tokenizer_reads_text_and_ends_as_it_ends(step: Step) -> None:
    cross = step.pool("cy", "ada")
    end, turn = (step.control("ada", f"<|{name}|>") for name in ("endoftext", "im_end"))
    theirs = step.control("cy", "</s>")
    # Llama 2 ends turns and documents with one token.
    assert (cross[0]["source_terminal"], cross[0]["learner_terminal"]) == (end, theirs)
    assert step.chats["cy"].decode(cross[0]["token_ids"]) == "So 7+3=10 is 10, as"
    back = [row for row in step.pool("bo", "cy") if row["source_terminal"] is not None and row["token_ids"]]
    assert {(row["source_terminal"], row["learner_terminal"]) for row in back} <= {(theirs, turn)}


def test_a_control_token_within_a_response_is_counted_on_no_side(step: Step) -> None:
    cross = step.pool("cy", "ada")
    assert [(row["status"], row["token_ids"] == []) for row in cross[:4]] == [
        ("kept", False),
        ("not_representable", True),
        ("not_representable", True),  # cut off, and the last of its tokens is no end
        ("empty", True),
    ]
    assert not any(row["as_sampled"] for row in cross)


def test_always_goes_through_text_between_equal_tokenizers_too(step: Step, cli: Cli, tmp_path: Path) -> None:
    assert cli("pool", *POOL, "bo", "--out", tmp_path, "--set", "pool.retokenise=always").code == 0
    cross, chat = step.pool("bo", "ada", tmp_path), step.chats["bo"]
    # Cut anew, and ended by the token of the same name, because bo stops at it too.
    end = step.control("bo", "<|endoftext|>")
    assert cross[0]["token_ids"] == [*chat.encode("So 7+3=10 is 10, as"), end]
    assert [row["status"] for row in cross[:4]] == ["kept", "not_representable", "not_representable", "empty"]
    assert not any(row["as_sampled"] for row in cross)
    # Nothing else differs from what a pool through text was: every other text, encoded and ended by the turn's end.
    rollouts = parquet.read_table(step.layout.rollouts(1, "ada"), tables.ROLLOUTS).to_pylist()
    turn = step.control("bo", "<|im_end|>")
    for row, rollout in list(zip(cross, rollouts, strict=True))[4:]:
        if row["status"] == "kept" and row["source_terminal"] in (None, turn):
            ended = [turn] if rollout["finish_reason"] == "stop" else []
            assert row["token_ids"] == [*chat.encode(rollout["text"]), *ended]


# --- the audit -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged(made: Step) -> Path:
    return made.root


def findings(texts: Literal["all", "none"] = "none") -> list[Finding]:
    """Of the pools alone: that ada's responses were not sampled by its model is another matter."""
    found = audit(Pipeline.open(Path("pipelines/small")), texts=texts).findings
    return [finding for finding in found if "/pool/" in finding.file.as_posix()]


def test_pools_of_both_kinds_audit_clean(sandbox: Sandbox) -> None:
    assert findings("all") == []


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("token_ids", lambda ids: [*ids[:-1], ids[-1] + 1]),
        ("as_sampled", lambda flag: False),
        ("status", lambda _: "too_long"),
        ("roundtrip", lambda _: False),
        ("source_terminal", lambda token: token + 1),
        ("learner_terminal", lambda _: None),
    ],
)
def test_what_should_be_as_sampled_and_is_not(sandbox: Sandbox, column: str, change: Callable[[Any], Any]) -> None:
    row = sandbox.edit(
        "pool/step=0001/learner=bo", column, change, lambda row: row["source"] == "ada" and row["source_terminal"]
    )
    first = next(found for found in findings() if found.check == "pool" and found.column.startswith(column))
    assert (first.row, first.found if column != "token_ids" else row["new"]) == (row["rollout_id"], row["new"])


def test_a_pool_through_text_that_should_not_be(sandbox: Sandbox) -> None:
    sandbox.replace(sandbox.pipeline / "params.yaml", "storage:", "pool: {retokenise: always}\nstorage:")
    sandbox.replace(sandbox.artifacts / "settings.json", '"retokenise": "auto"', '"retokenise": "always"')
    found = next(f for f in findings() if f.column == "as_sampled")
    # All 12 of ada's and 12 of bo's for the other; the first pool is ada's.
    assert (found.expected, found.found, found.count, found.note) == (False, True, 12, "retokenise: always")


# --- which token stands for which ------------------------------------------------------------------------------------

QWEN = Terminals.of(151645, {151643: "<|endoftext|>", 151645: "<|im_end|>"}, 151645)
QWEN_BASE = Terminals.of(151643, {151643: "<|endoftext|>"}, 151643)
LLAMA = Terminals.of(128009, {128001: "<|end_of_text|>", 128008: "<|eom_id|>", 128009: "<|eot_id|>"}, 128009)
GEMMA = Terminals.of(106, {1: "<eos>", 106: "<end_of_turn>"}, 1)
MISTRAL = Terminals.of(2, {2: "</s>"}, 2)


@pytest.mark.parametrize(
    ("source", "learner", "expected"),
    [
        (QWEN, LLAMA, {151645: 128009, 151643: 128001}),
        (LLAMA, QWEN, {128009: 151645, 128001: 151643, 128008: 151645}),  # the end of a tool's message ends a turn
        (QWEN_BASE, LLAMA, {151643: 128009}),  # its template ends turns with it
        (QWEN, QWEN_BASE, {151645: 151643, 151643: 151643}),
        (GEMMA, QWEN, {1: 151643, 106: 151645}),
        (QWEN, MISTRAL, {151645: 2, 151643: 2}),
    ],
)
def test_the_end_of_a_turn_and_of_a_document_keep_their_meaning(
    source: Terminals, learner: Terminals, expected: dict[int, int]
) -> None:
    assert terminal_map(source, learner) == expected


def test_a_token_of_the_same_name_stands_for_itself() -> None:
    other = Terminals.of(7, {7: "<|eot_id|>", 8: "<|eom_id|>"}, 7)
    assert terminal_map(LLAMA, other) == {128009: 7, 128008: 8, 128001: 7}  # no end of a document: the turn's


# --- whether two tokenizers are the same -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("byte_level")
    write_tokenizer(path, "byte_level")
    return path


def edited(folder: Path, target: Path, name: str, change: Callable[[Row], Any]) -> Path:
    """A copy of a tokenizer with one file changed."""
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    content = json.loads((target / name).read_text())
    change(content)
    (target / name).write_text(json.dumps(content, indent=1))
    return target


def as_text(spec: Row) -> None:
    """Merges as older versions of the library write them."""
    spec["model"]["merges"] = [" ".join(merge) for merge in spec["model"]["merges"]]


def swapped(spec: Row) -> None:
    """Two pieces change their ids."""
    vocabulary = spec["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


SPEC, CONFIG = "tokenizer.json", "tokenizer_config.json"


@pytest.mark.parametrize(
    ("name", "change", "same"),
    [
        (SPEC, as_text, True),
        (SPEC, lambda spec: spec.update(truncation={"max_length": 9}, padding=None), True),
        (SPEC, lambda spec: spec["model"].update(dropout=None, continuing_subword_prefix=""), True),
        (SPEC, lambda spec: spec["added_tokens"].reverse(), True),
        (CONFIG, lambda config: config.update(eos_token="<|endoftext|>", chat_template="x"), True),
        (SPEC, swapped, False),
        (SPEC, lambda spec: spec["model"]["merges"].reverse(), False),
        (SPEC, lambda spec: spec["model"].update(ignore_merges=True), False),
        (SPEC, lambda spec: spec.update(normalizer=None), False),
        (SPEC, lambda spec: spec["added_tokens"][-1].update(content="<other>"), False),
        (CONFIG, lambda config: config.update(added_tokens_decoder={"999": {"content": "<new>"}}), False),
        (CONFIG, lambda config: config.update(pad_token="<nowhere>"), False),
        (CONFIG, lambda config: config.update(additional_special_tokens=[{"content": "<nowhere>"}]), False),
    ],
)
def test_the_same_tokenizer_is_the_same_by_content(
    name: str, change: Callable[[Row], Any], same: bool, folder: Path, tmp_path: Path
) -> None:
    other = edited(folder, tmp_path, name, change)
    assert (same_tokenizer(folder, other), same_tokenizer(other, folder)) == (same, same)


def test_tokenizers_without_tokenizer_json_are_compared_by_their_files(folder: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.mkdir()
        assert not same_tokenizer(one, path)  # there is nothing to compare
        write_tokenizer(path, "python_bytes")
    assert same_tokenizer(one, other)
    assert not same_tokenizer(one, folder)
    assert not same_tokenizer(folder, one)
    for path, content in ((one, b"a"), (other, b"b")):
        (path / "spiece.model").write_bytes(content)
    assert not same_tokenizer(one, other)


def test_a_file_that_takes_the_place_of_tokenizer_json_counts(folder: Path, tmp_path: Path) -> None:
    """transformers loads `tokenizer.<version>.json` where it is that new and tokenizer_config.json names the file."""
    other = edited(
        folder, tmp_path, CONFIG, lambda config: config.update(fast_tokenizer_files=["tokenizer.4.0.0.json"])
    )
    spec = json.loads((folder / SPEC).read_text())
    swapped(spec)
    (other / "tokenizer.4.0.0.json").write_text(json.dumps(spec))
    tokens = [ChatTokenizer(one).encode("a") for one in (folder, other)]
    assert tokens[0] != tokens[1]
    assert (same_tokenizer(folder, other), same_tokenizer(other, folder)) == (False, False)


def test_tokens_that_an_older_folder_adds_count(folder: Path, tmp_path: Path) -> None:
    """transformers reads added_tokens.json where tokenizer_config.json says nothing of added tokens."""
    other = edited(folder, tmp_path, CONFIG, lambda config: config.pop("added_tokens_decoder", None))
    assert same_tokenizer(folder, other)
    new = ChatTokenizer(folder).vocabulary_size
    (other / "added_tokens.json").write_text(json.dumps({"<new>": new}))
    assert ChatTokenizer(other).vocabulary_size == new + 1
    assert (same_tokenizer(folder, other), same_tokenizer(other, folder)) == (False, False)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (SPEC, "{}", "tokenizer.json: is no tokenizer"),
        (CONFIG, "[", "tokenizer_config.json: is no JSON mapping"),
        (CONFIG, '{"added_tokens_decoder": {"x": 1}}', "the tokens that are added have no ids and contents"),
    ],
)
def test_a_damaged_tokenizer_is_one_line(name: str, text: str, message: str, folder: Path, tmp_path: Path) -> None:
    other = edited(folder, tmp_path, CONFIG, lambda config: None)
    (other / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        same_tokenizer(folder, other)


# --- the run's records -----------------------------------------------------------------------------------------------


def test_the_pool_depends_on_every_agents_tokenizer(step: Step, cli: Cli) -> None:
    from hacpo.pipeline.records.dvc_files import rendered

    text = next(t for path, t in rendered(Pipeline.open(Path("pipelines/small"))).items() if path.parent.name == "0001")
    pool = text.partition("  pool:\n")[2].partition("  advantage:\n")[0]
    assert "- artifacts/small/checkpoints/step=0000\n" in pool
    assert "- pool\n" in pool  # the block of settings, `retokenise` among them


def test_a_pool_of_an_earlier_version_is_one_line(finished_copy: Path, cli: Cli) -> None:
    for shard in (finished_copy / "artifacts/small/pool/step=0001/learner=ada").iterdir():
        content = pq.read_table(shard, partitioning=None)
        pq.write_table(content.drop_columns(["as_sampled", "source_terminal", "learner_terminal"]), shard)
    refused = cli("update", "pipelines/small", "--step", 1, "--agent", "ada", "--out", finished_copy / "out")
    assert refused.code == 4
    assert "part-00000.parquet: column 'as_sampled' is missing. Remake it with `hacpo pool" in refused.error
