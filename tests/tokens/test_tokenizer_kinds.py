"""Tokenizers of every kind meet: hostile texts, whole runs of three kinds at a time, models without a chat template."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conftest import PARAMS, Cli, make_project
from hacpo.tokens.chat_templates import settle_chat
from hacpo.tokens.retokenize import retokenize
from hacpo.tokens.tokenizers import ChatTokenizer
from tokenizer_kinds import KINDS, write_model, write_tokenizer

NAMES = [*KINDS, "python_bytes"]
LOSSLESS = ("byte_level", "byte_level_base", "llama2", "unigram_bytes", "python_bytes")
"""Kinds that have tokens for every text."""

SPELLED = ("<|im_end|>", "</s>", "<eos>", "<unk>", "<think>", "[SEP]", "<0x0A>", "<end_of_turn>", "\uffff</s>\uffff")
HOSTILE = st.lists(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(
            [
                *"\u200b\u200d\u202e\u0301\u0323\u00a0\u2581\ufeff\x00\x07\u3000\U0001f468\ufffd",
                " ",
                "  ",
                "\n",
                "\r\n",
                "\t",
            ]
        ),
        st.sampled_from(["7", "x", "A", "ﬁ", "½", "é", "e\u0301", "각", "שלום", "##s", "\\boxed{", *SPELLED]),
        st.builds(lambda letter, count: letter * count, st.characters(exclude_categories=["Cs"]), st.integers(30, 300)),
    ),
    max_size=20,
).map("".join)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    root = tmp_path_factory.mktemp("kinds")
    for name in NAMES:
        (root / name).mkdir()
        write_tokenizer(root / name, name)
        settle_chat(root / name, root / name)
    return {name: ChatTokenizer(root / name) for name in NAMES}


# --- any text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(text=HOSTILE, stopped=st.booleans())
@example(text=" 7+3", stopped=True)
@example(text="".join(SPELLED), stopped=True)
@settings(max_examples=150, deadline=None)
def test_any_text_has_a_defined_result(name: str, chats: dict[str, ChatTokenizer], text: str, stopped: bool) -> None:
    chat = chats[name]
    result = retokenize(text, terminal=chat.eos_token_id if stopped else None, tokenizer=chat, room=1 << 30)
    if result.status == "kept":
        body = result.token_ids[:-1] if stopped else result.token_ids
        assert (result.token_ids[-1:] == [chat.eos_token_id]) or not stopped
        assert result.roundtrip == (chat.decode(body) == text)
        control = {i for i, token in chat._tokenizer.added_tokens_decoder.items() if token.content.strip()}
        assert control.isdisjoint(body)
        assert max(body) < len(chat._tokenizer)
    else:
        assert result.status == ("empty" if not text else "not_representable")
        assert (result.token_ids, result.roundtrip) == ([], not text)
    spelled_wrongly = name == "unigram_bytes" and ("<0x0A>" in text or "\u2581" in text)
    if name in LOSSLESS and text and "\uffff" not in text and "\u2581" not in text and not spelled_wrongly:
        assert result.status == "kept"


@pytest.mark.parametrize(
    ("name", "text", "status", "roundtrip"),
    [
        ("byte_level", "e\u0301", "kept", False),  # NFC: one letter
        ("llama2", "e\u0301", "kept", True),
        ("unigram", "7 +  3\n", "kept", True),  # its Strip normaliser is for whole documents
        ("unigram", "\uff17", "kept", False),  # NFKC: a wide 7
        ("llama2", "7\u25813", "not_representable", False),  # the sign that stands for a space
        ("wordpiece", "the answer  is 3\n", "kept", False),  # white space only
        ("wordpiece", "The answer is 3", "not_representable", False),  # it has no capital letters
        ("characters", "7\u00d73", "not_representable", False),
        ("digits", "x=3", "kept", True),
        ("digits", "y=3", "not_representable", False),
        ("wordpiece", " \n", "not_representable", False),  # nothing of it is left
        ("llama2", " ", "kept", True),
    ],
)
def test_what_a_normaliser_changes(
    name: str, text: str, status: str, roundtrip: bool, chats: dict[str, ChatTokenizer]
) -> None:
    result = retokenize(text, terminal=chats[name].eos_token_id, tokenizer=chats[name], room=99)
    assert (result.status, result.roundtrip) == (status, roundtrip)


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_are_those_that_decoding_leaves_out(name: str, chats: dict[str, ChatTokenizer]) -> None:
    chat = chats[name]
    three = chat.encode("3")
    text, last = chat.decode([*three, *three]), max(chat._tokenizer.get_vocab().values())
    for token_id in range(last + 1):
        piece = chat._tokenizer.convert_ids_to_tokens(token_id)
        if name == "python_bytes" and len(piece) == 1 and ord(piece) > 127:
            continue  # a part of a character, which ByT5 leaves out too
        assert chat.holds_control([*three, token_id]) == (chat.decode([*three, token_id, *three]) == text), piece
    assert chat.holds_control([last + 1])  # a row that the model has and no token


@pytest.mark.slow
@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("unit", ["a", " ", "\u0301\u0323", "😀", "<|im_end|></s>", "7", "The answer is 12.\n"])
def test_a_long_run_takes_time_in_proportion(name: str, unit: str, chats: dict[str, ChatTokenizer]) -> None:
    def seconds(characters: int) -> float:
        text = unit * (characters // len(unit))
        start = time.process_time()
        retokenize(text, terminal=chats[name].eos_token_id, tokenizer=chats[name], room=1 << 30)
        return time.process_time() - start

    seconds(1000)
    # Quadratic time would be 64 times as much; proportional is 8. A tenth of a second for a noisy clock.
    assert seconds(400_000) < 24 * seconds(50_000) + 0.1


# --- whole runs ------------------------------------------------------------------------------------------------------


def _project(tmp_path: Path, kinds: list[str], **extra: str) -> Path:
    for seed, name in enumerate(kinds):
        write_model(tmp_path / "models" / name, name, seed)
    agents = "\n".join(f"  {name}: {{model: models/{name}{extra.get(name, '')}}}" for name in kinds)
    params = PARAMS.replace("steps: 2", "steps: 1").replace(
        "  ada: {model: models/ada}\n  bo: {model: models/bo}", agents
    )
    params = params.replace("every: 2", "every: 9").replace(
        "prompts: 8, minibatch_prompts: 4", "prompts: 6, minibatch_prompts: 6"
    )
    return make_project(tmp_path / "project", tmp_path / "models", params)


def _parts(root: Path, table: str) -> pl.DataFrame:
    return pl.read_parquet(root / "artifacts" / "small" / table / "**" / "*.parquet", hive_partitioning=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        ["llama2", "unigram_bytes", "byte_level"],
        ["characters", "wordpiece", "byte_level_base"],
        ["unigram", "digits", "python_bytes"],
    ],
    ids="-".join,
)
def test_three_kinds_learn_from_each_other(
    kinds: list[str], tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = _project(tmp_path, kinds)
    monkeypatch.chdir(root)
    result = cli("run", "pipelines/small", "--jobs", "1")
    assert result.code == 0, result.err
    pool, rollouts = _parts(root, "pool"), _parts(root, "rollouts")
    # 3 learners x 6 prompts x 3 sources x 4 samples
    assert len(pool) == 3 * 6 * 3 * 4
    texts = dict(rollouts.select("rollout_id", "text").iter_rows())
    stops = dict(rollouts.select("rollout_id", "finish_reason").iter_rows())
    statuses: Counter[str] = Counter()
    for learner in kinds:
        chat = ChatTokenizer(root / "artifacts" / "small" / "checkpoints" / "step=0000" / f"agent={learner}")
        control = {i for i, token in chat._tokenizer.added_tokens_decoder.items() if token.content.strip()}
        for row in pool.filter(pl.col("learner") == learner, ~pl.col("is_self")).iter_rows(named=True):
            statuses[row["status"]] += 1
            text, stopped = texts[row["rollout_id"]], stops[row["rollout_id"]] == "stop"
            if row["status"] != "kept":
                assert row["token_ids"] == [] or row["status"] == "too_long"
                continue
            body = row["token_ids"][:-1] if stopped else row["token_ids"]
            assert row["learner_terminal"] == (row["token_ids"][-1] if stopped else None)
            assert (row["token_ids"][-1] in chat.stop_token_ids) == stopped
            assert control.isdisjoint(body)
            assert row["roundtrip"] == (chat.decode(row["token_ids"]) == text)
    assert set(statuses) <= {"kept", "empty", "not_representable", "too_long"}
    assert statuses["kept"] > 0
    for source in kinds:
        chat = ChatTokenizer(root / "artifacts" / "small" / "checkpoints" / "step=0000" / f"agent={source}")
        for row in rollouts.filter(pl.col("agent") == source).iter_rows(named=True):
            assert (row["token_ids"][-1] in chat.stop_token_ids) == (row["finish_reason"] == "stop")
            assert row["text"] == chat.decode(row["token_ids"])
    trace = _parts(root, "updates")
    assert trace["ratio"].is_finite().all()


# --- chat templates --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_base_model_gets_the_plain_template_and_is_deployed_with_it(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = _project(tmp_path, ["byte_level_base", "characters"])
    monkeypatch.chdir(root)
    assert cli("run", "pipelines/small", "--jobs", "1").code == 0
    folders = root / "artifacts" / "small" / "checkpoints"
    start = (folders / "step=0000" / "agent=byte_level_base" / "chat_template.jinja").read_bytes()
    assert start == (folders / "step=0001" / "agent=byte_level_base" / "chat_template.jinja").read_bytes()
    assert not (tmp_path / "models" / "byte_level_base" / "chat_template.jinja").exists()
    row = _parts(root, "rollouts").filter(pl.col("agent") == "byte_level_base").row(0, named=True)
    chat = ChatTokenizer(folders / "step=0001" / "agent=byte_level_base")
    prompt = chat.decode(row["prompt_token_ids"])
    assert prompt.startswith("User: ")
    assert prompt.endswith("\n\nAssistant:\n")


def test_warmup_says_that_it_added_a_template(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _project(tmp_path, ["byte_level_base", "llama2"])
    monkeypatch.chdir(root)
    assert cli("resolve", "pipelines/small").code == 0
    said = cli("warmup", "pipelines/small", "--agent", "byte_level_base")
    assert "taken from models/byte_level_base, plain chat template added, it has none" in said.out + said.err
    said = cli("warmup", "pipelines/small", "--agent", "llama2")
    assert "taken from models/llama2" in said.out + said.err
    assert "template" not in said.out + said.err


@pytest.mark.slow
def test_ones_own_template_is_used_and_watched(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _project(tmp_path, ["byte_level", "characters"], byte_level=", chat_template: templates/short.jinja")
    monkeypatch.chdir(root)
    (root / "templates").mkdir()
    template = root / "templates" / "short.jinja"
    template.write_text("Q: {{ messages[-1].content }}\nA:")
    assert cli("plan", "pipelines/small").code == 0
    start = (root / "pipelines" / "small" / "steps" / "0000" / "dvc.yaml").read_text()
    assert start.count("- templates/short.jinja") == 1
    said = cli("run", "pipelines/small", "--jobs", "1")
    assert said.code == 0
    rows = _parts(root, "rollouts").filter(pl.col("agent") == "byte_level")
    folder = root / "artifacts" / "small" / "checkpoints" / "step=0000" / "agent=byte_level"
    assert (folder / "chat_template.jinja").read_text() == template.read_text()
    chat = ChatTokenizer(folder)
    assert chat.decode(rows["prompt_token_ids"][0].to_list()).startswith("Q: ")
    # The template's turns end in nothing: the tokenizer's EOS ends a response.
    assert chat._tokenizer.convert_ids_to_tokens(chat.eos_token_id) == "<|im_end|>"
    template.write_text("Question: {{ messages[-1].content }}\nA:")
    assert cli("run", "pipelines/small", "--jobs", "1", "--yes").code == 0
    rows = _parts(root, "rollouts").filter(pl.col("agent") == "byte_level")
    assert chat.decode(rows["prompt_token_ids"][0].to_list()).startswith("Question: ")


def test_a_template_that_cannot_be_used_is_one_line(project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project / "pipelines" / "small" / "params.yaml"
    path.write_text(path.read_text().replace("{model: models/ada}", "{model: models/ada, chat_template: my.jinja}"))
    assert cli("resolve", "pipelines/small").code == 0
    missing = cli("warmup", "pipelines/small", "--agent", "ada")
    assert missing.code == 6
    assert missing.error == "hacpo: error: my.jinja: the chat template is missing. Correct agents.ada.chat_template"
    (project / "my.jinja").write_bytes(b"\xff\xfe")
    assert (
        "my.jinja: the chat template cannot be read: not UTF-8"
        in cli("warmup", "pipelines/small", "--agent", "ada").error
    )
    (project / "my.jinja").write_text("{% for %}")
    refused = cli("warmup", "pipelines/small", "--agent", "ada")
    assert refused.code == 5
    assert "with my.jinja: the chat template cannot render this prompt" in refused.error
    assert not list((project / "artifacts" / "small" / "checkpoints").glob("step=0000/agent=*"))


def test_a_template_needs_a_model_and_cannot_be_the_runs_own_output(project: Path, cli: Cli) -> None:
    path = project / "pipelines" / "small" / "params.yaml"
    text = path.read_text()
    own = "{model: models/ada, chat_template: artifacts/small/checkpoints/step=0000/agent=bo/chat_template.jinja}"
    path.write_text(text.replace("{model: models/ada}", own))
    refused = cli("plan", "pipelines/small")
    assert refused.code == 2
    assert "agents.ada.chat_template: an agent cannot start from its own run's output" in refused.error
    tiny = json.dumps(
        {
            "tiny": {"architecture": "llama", "layers": 1, "hidden": 16, "heads": 2, "vocabulary": "characters"}
            | {"warmup": {"steps": 1}},
            "chat_template": "my.jinja",
        }
    )
    path.write_text(text.replace("{model: models/ada}", tiny))
    refused = cli("plan", "pipelines/small")
    assert refused.code == 2
    assert "`chat_template` belongs to `model`" in refused.error
