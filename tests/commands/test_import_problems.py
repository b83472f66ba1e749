"""`hacpo import`: columns found, answers taken out, every check able to fail, and files that runs can use."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_stub import HubStub, running_hub

from conftest import SHARED, Cli
from hacpo.artifacts.problem_rows import Problem
from hacpo.data.importing.cells import bare_answer, digest, final_answer, level_of, normalised
from hacpo.data.importing.known import KNOWN
from hacpo.data.problems import load
from hacpo.settings.root import DataSet

shared_data = pytest.mark.skipif(not (SHARED / "data/math").is_dir(), reason="no ../shared/data here")

ROWS = [
    {"question": "1+1?", "answer": "2", "level": "Level 1", "type": "Sums"},
    {"question": "Half of 1?", "answer": r"$\frac{1}{2}$", "level": "Level 2", "type": "Parts"},
    {"question": "2+2?", "answer": "4", "level": "Level ?", "type": "Sums"},
]


@pytest.fixture(autouse=True)
def _fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(rows: list[dict[str, Any]], name: str) -> Path:
    """The rows as a file of the kind that its name says."""
    path = Path(name)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps({"version": 1, "data": rows}))
    else:
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def imported(name: str = "mine", split: str = "train") -> list[Problem]:
    """What a run would read."""
    return load(f"{name}/{split}", DataSet(path=f"data/{name}/{split}.parquet"), Path())


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json", "csv", "tsv"])
def test_every_kind_of_file_gives_the_same_problems(cli: Cli, kind: str) -> None:
    done = cli("import", "mine", "--from", write(ROWS, f"raw.{kind}"))
    assert done.code == 0, done.err
    rows = imported()
    assert [row.answer for row in rows] == ["2", r"\frac{1}{2}", "4"]
    assert [row.level for row in rows] == [1, 2, None]
    assert [row.subject for row in rows] == ["Sums", "Parts", "Sums"]
    assert rows[2].source == f"raw.{kind}#2"
    assert "problem from question, answer from answer, subject from type, level from level" in done.out
    assert "subject   Parts 1, Sums 2" in done.out
    assert "level     1 1, 2 1, none 1" in done.out
    assert "    mine/train: {path: data/mine/train.parquet}" in done.out
    assert b"hacpo.run" not in (pq.read_schema("data/mine/train.parquet").metadata or {})


def test_ids_that_are_made_depend_on_the_text_alone(cli: Cli) -> None:
    cli("import", "mine", "--from", write(ROWS, "a.jsonl"))
    first = {row.problem: row.problem_id for row in imported()}
    cli("import", "mine", "--from", write(ROWS[::-1] + ROWS[:1], "b.jsonl"), "--force")
    again = imported()
    assert {row.problem: row.problem_id for row in again[:3]} == first
    assert again[3].problem_id == f"{first['1+1?']}-2"
    assert first["1+1?"] == f"mine/train/{digest('1+1?')}"


def test_columns_are_mapped_also_into_nested_ones(cli: Cli) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}+0?"}],
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "answer": "elsewhere",
            "name": f"q{n}",
        }
        for n in range(3)
    ]
    path = write(rows, "verl.parquet")
    refused = cli("import", "mine", "--from", path)
    assert refused.code == 5
    assert "the problem is no text (expected a string, found list). Name the text inside it" in refused.error
    mapping = "problem=prompt.0.content,answer=reward_model.ground_truth"
    done = cli("import", "mine", "--from", path, "--map", mapping, "--map", "problem_id=name")
    assert done.code == 0, done.err
    assert [(row.problem_id, row.problem, row.answer) for row in imported()] == [
        (f"q{n}", f"{n}+0?", str(n)) for n in range(3)
    ]


def test_the_answer_is_found_at_the_end_of_the_solution(cli: Cli) -> None:
    rows = [
        {"problem": "a", "solution": r"First \boxed{1}, then \boxed{\frac{1}{2}}."},
        {"problem": "b", "solution": "So 3.\n#### 1,234"},
    ]
    done = cli("import", "mine", "--from", write(rows, "raw.jsonl"))
    assert [row.answer for row in imported()] == [r"\frac{1}{2}", "1234"]
    assert r"its last \boxed{}, or what follows ####" in done.out


@pytest.mark.parametrize(
    ("cell", "answer"),
    [
        ("2", "2"),
        (2, "2"),
        (27.0, "27"),
        (0.5, "0.5"),
        ("$x=2$.", "x=2"),
        (r"\$5", r"\$5"),
        (r"the answer is \boxed{(1,234)}", "(1,234)"),
        ("He buys <<2*3=6>>6.\n#### 6", "6"),
        (["$2$", "$3$"], "2, 3"),
        (None, ""),
        ("1,234", "1,234"),
        ("and so on...", "and so on..."),
    ],
)
def test_answers_are_bare(cell: object, answer: str) -> None:
    assert bare_answer(cell) == answer


def test_small_texts() -> None:
    assert final_answer("no end") is None
    assert final_answer(r"\boxed{1} and $\boxed 9$.") == "9"
    assert final_answer(r"\boxed 1 and \boxed {9}") == "9"
    assert [level_of(value) for value in ("Level 5", "5", 5, 5.0, "Level ?", "hard", None, True)] == [
        *[5] * 4,
        *[None] * 4,
    ]
    assert normalised("What is $1 + 1$?") == normalised("what is 1+1") == "whatis11"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"question": "  "}, "1 of 3 rows have no problem (found first: "),
        ({"answer": ""}, "1 of 3 rows have no answer (found first: "),
        ({"answer": None}, "1 of 3 rows have no answer (found first: "),
    ],
)
def test_rows_without_a_text_are_refused(cli: Cli, change: dict[str, Any], says: str) -> None:
    refused = cli("import", "mine", "--from", write([ROWS[0] | change, *ROWS[1:]], "raw.jsonl"))
    assert refused.code == 5
    assert says in refused.error
    assert "from raw.jsonl#0" in refused.error
    assert not Path("data").exists()


def test_ids_that_occur_twice_are_refused(cli: Cli) -> None:
    path = write([row | {"id": 7} for row in ROWS], "raw.jsonl")
    refused = cli("import", "mine", "--from", path)
    assert refused.code == 5
    assert "1 problem_ids occur more than once (found first: 7)" in refused.error
    assert not Path("data").exists()
    assert cli("import", "mine", "--from", path, "--map", "problem_id=").code == 0


def test_doubts_are_listed_and_refused_only_when_strict(cli: Cli) -> None:
    rows = [
        {"id": "open", "problem": "a", "answer": r"\frac{1}{2"},
        {"id": "unread", "problem": "b", "answer": "x +"},
        {"id": "fine", "problem": "c", "answer": r"\frac{1}{2}"},
        {"id": "words", "problem": "d", "answer": r"\text{Monday}"},
    ]
    path = write(rows, "raw.jsonl")
    refused = cli("import", "mine", "--from", path, "--strict")
    assert refused.code == 5
    assert "2 answers cannot be verified" in refused.error
    assert not Path("data").exists()
    done = cli("import", "mine", "--from", path)
    assert done.code == 0
    assert r"open '\\frac{1}{2': boxed, it is judged no_answer against itself" in done.out
    assert "unread 'x +': only the same characters match: the gold answer cannot be read" in done.out
    assert "fine" not in done.out
    assert "words" not in done.out


def test_what_is_listed_is_bounded_however_many_are_the_same_and_however_long_their_names(cli: Cli) -> None:
    """A line holds 400 characters, of 20 names at most, after 12 spaces; values of a column 60 characters each."""
    rows = [{"id": f"p{n:04}", "problem": "B", "answer": "2", "level": "l" * 5000} for n in range(1000)]
    rows += [{"id": f"{n}{'q' * 5000}", "problem": "C", "answer": "3", "level": "l" * 5000} for n in range(2)]
    done = cli("import", "mine", "--from", write(rows, "raw.jsonl"))
    assert done.code == 0
    assert "p0000 = p0001 = " in done.out
    assert "p0019 and 980 more" in done.out
    assert max(map(len, done.out.splitlines())) <= 412


def test_texts_shared_within_and_with_other_sets_are_reported(cli: Cli) -> None:
    cli("import", "held", "--split", "test", "--from", write([{"problem": "What is $1+1$?", "answer": "2"}], "a.jsonl"))
    rows = [{"id": f"p{n}", "problem": text, "answer": "2"} for n, text in enumerate(["what is 1 + 1", "B", "b."])]
    done = cli("import", "mine", "--from", write(rows, "b.jsonl"))
    assert "texts     1 occur more than once" in done.out
    assert "p1 = p2" in done.out
    assert "overlap   1 of 1 other sets share problems" in done.out
    held = imported("held", "test")[0].problem_id
    assert f"1 with data/held/test.parquet, first p0 = {held}" in done.out
    # A set is not compared with what it replaces.
    assert "1 of 1 other" in cli("import", "mine", "--from", "b.jsonl").out


def test_a_file_that_differs_is_not_replaced_unawares(cli: Cli) -> None:
    first = write(ROWS, "a.jsonl")
    assert cli("import", "mine", "--from", first).code == 0
    assert cli("import", "mine", "--from", first).code == 0  # the same bytes
    before = Path("data/mine/train.parquet").read_bytes()
    refused = cli("import", "mine", "--from", write(ROWS[:2], "b.jsonl"))
    assert refused.code == 2
    assert "is there and differs. Add --force" in refused.error
    assert Path("data/mine/train.parquet").read_bytes() == before
    assert cli("import", "mine", "--from", "b.jsonl", "--force").code == 0
    assert len(imported()) == 2
    assert [file.name for file in Path("data/mine").iterdir()] == ["train.parquet"]


@pytest.mark.parametrize(
    ("arguments", "content", "says"),
    [
        (["--from", "none.jsonl"], None, "none.jsonl: there is no such file"),
        (["--from", "raw.xlsx"], "x", "not a kind of file that can be imported"),
        (["--from", "raw.jsonl"], '{"a": 1}\n{"a"', "raw.jsonl:2: not valid JSON"),
        (["--from", "raw.jsonl"], "[1]", "raw.jsonl:1: is no JSON object"),
        (["--from", "raw.jsonl"], "", "raw.jsonl: holds no rows"),
        (["--from", "raw.json"], '"x"', "is no list of problems"),
        (["--from", "raw.csv"], "problem,answer\na\n", "raw.csv:2: another number of cells than the header"),
        (["--from", "raw.csv"], "text,answer\na,1\n", "which column is the problem? (found text, answer)"),
        (["--from", "raw.csv"], "problem,key\na,1\n", "which column is the answer?"),
        (["--from", "raw.parquet"], "PAR", "not readable as Parquet"),
        (["--from", "raw.csv", "--map", "answer=final"], "problem,answer\na,1\n", "there is no column 'final'"),
        (["--from", "raw.csv", "--map", "gold=x"], "problem,answer\na,1\n", "--map gold=x: not of the form"),
        (["--from", "raw.csv", "--revision", "main"], "problem,answer\na,1\n", "--revision belongs to the hub"),
        ([], None, "no set 'mine' is known (expected math, gsm8k, math500, aime2025"),
    ],
)
def test_what_cannot_be_imported_is_one_line(cli: Cli, arguments: list[str], content: str | None, says: str) -> None:
    if content is not None:
        Path(arguments[1]).write_text(content)
    refused = cli("import", "mine", *arguments)
    assert refused.code != 0
    assert says in refused.error
    assert not Path("data").exists()


def test_an_imported_set_trains(cli: Cli, project: Path) -> None:
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(20)]
    assert cli("import", "mine", "--from", write(rows, "raw.csv")).code == 0
    params = project / "pipelines/small/params.yaml"
    text = params.read_text().replace("train: arithmetic/train", "train: mine/train")
    text = text.replace("  sets:\n", "  sets:\n    mine/train: {path: data/mine/train.parquet}\n")
    params.write_text(text)
    for stage in ("resolve", "prepare"):
        done = cli(stage, "pipelines/small")
        assert done.code == 0, done.err
    table = pl.read_parquet("artifacts/small/data/mine/train.parquet")
    assert table["source"][0] == "raw.csv#0"


# --- the hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStub]:
    """A hub without data sets, and an empty cache."""
    with running_hub() as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield stub


def offer(hub: HubStub, name: str, files: dict[str, bytes], revision: str | None = None) -> None:
    """Put the files of a known set on the hub."""
    known = KNOWN[name]
    commit = revision or known.revision
    hub.commits[f"{known.repository}@{commit}"] = commit
    for path, content in files.items():
        hub.files[f"{known.repository}@{commit}/{path}"] = content


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """The rows as the bytes of a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


def lines(rows: list[dict[str, Any]]) -> bytes:
    """The rows as the bytes of a JSON lines file."""
    return "\n".join(map(json.dumps, rows)).encode()


def test_a_known_set_is_imported_from_its_commit(cli: Cli, hub: HubStub) -> None:
    rows = [{"question": f"Q{n}?", "answer": f"It is <<{n}={n}>>{n}.\n#### {n},000"} for n in range(1, 4)]
    offer(
        hub,
        "gsm8k",
        {f"main/{split}-00000-of-00001.parquet": parquet(rows[:count]) for split, count in (("train", 3), ("test", 1))},
    )
    hub.licences["openai/gsm8k"] = "mit"
    done = cli("import", "gsm8k")
    assert done.code == 0, done.err
    commit = KNOWN["gsm8k"].revision
    assert f"gsm8k: openai/gsm8k on the hub, commit {commit}" in done.out
    assert "licence   the dataset card states mit; GSM8K (Cobbe et al. 2021) is under the MIT licence" in done.out
    assert "warning   gsm8k/train has 3 problems, expected 7,473" in done.out
    assert "1 with gsm8k/test, first gsm8k/train/0001 = gsm8k/test/0001" in done.out
    train = imported("gsm8k")
    assert [row.problem_id for row in train] == ["gsm8k/train/0001", "gsm8k/train/0002", "gsm8k/train/0003"]
    assert [row.answer for row in train] == ["1000", "2000", "3000"]
    assert train[1].solution == "It is <<2=2>>2.\n#### 2,000"
    assert train[1].source == f"hf://datasets/openai/gsm8k@{commit}/main/train-00000-of-00001.parquet#1"
    assert "  train: gsm8k/train" in done.out
    assert "    gsm8k: {data: gsm8k/test}" in done.out


@pytest.mark.parametrize(
    ("stated", "shown"), [([1, 2], "none;"), ({"a": 1}, "none;"), (["mit", "x" * 500], f"mit, {'x' * 295};")]
)
def test_a_licence_that_is_none_is_no_fault(cli: Cli, hub: HubStub, stated: Any, shown: str) -> None:
    rows = [{"question": "Q?", "answer": "#### 1"}]
    offer(hub, "gsm8k", {f"main/{split}-00000-of-00001.parquet": parquet(rows) for split in ("train", "test")})
    hub.licences["openai/gsm8k"] = stated
    done = cli("import", "gsm8k")
    assert done.code == 0, done.err
    assert f"licence   the dataset card states {shown}" in done.out


def test_a_problem_without_end_is_refused_before_it_is_compared(cli: Cli) -> None:
    """U+FDFA is one character, and 18 when it is normalised."""
    write([{"problem": "1+1?", "answer": "2"}, {"problem": "\ufdfa" * 200_001, "answer": "2"}], "long.jsonl")
    refused = cli("import", "mine", "--from", "long.jsonl")
    assert refused.code == 5
    assert "a problem of 200001 characters (expected at most 200000). Shorten it or leave it out" in refused.error
    assert "long.jsonl" in refused.error
    assert not Path("data").exists()


KNOWN_ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "math": (
        {"problem": "P", "solution": r"So \boxed{3}.", "type": "Algebra", "level": "Level 4"},
        {"problem_id": f"math/test/{digest('P')}", "answer": "3", "subject": "Algebra", "level": 4},
    ),
    "math500": (
        {
            "problem": "P",
            "solution": r"\boxed{3}",
            "answer": "3",
            "subject": "Precalculus",
            "level": 2,
            "unique_id": "test/precalculus/807.json",
        },
        {"problem_id": "math500/test/precalculus/0807", "answer": "3", "subject": "Precalculus", "level": 2},
    ),
    "aime2025": (
        {"problem": "P", "answer": "70", "id": "0"},
        {"problem_id": "aime2025/test/I-01", "answer": "70", "solution": None},
    ),
    "amc2023": (
        {"id": 0, "question": "P", "answer": 27.0, "url": "https://example.org"},
        {"problem_id": "amc2023/test/01", "answer": "27"},
    ),
    "minerva": ({"question": "P", "answer": "1.6"}, {"problem_id": "minerva/test/001", "answer": "1.6"}),
    "olympiadbench": (
        {
            "id": 1606,
            "question": "P",
            "solution": ["one", "two"],
            "final_answer": ["$2$"],
            "subfield": "Combinatorics",
            "subject": "Math",
        },
        {
            "problem_id": "olympiadbench/test/1606",
            "answer": "2",
            "solution": "one\n\ntwo",
            "subject": "Combinatorics",
        },
    ),
}


@pytest.mark.parametrize("name", KNOWN_ROWS)
def test_each_known_set_is_converted(cli: Cli, hub: HubStub, name: str) -> None:
    raw, expected = KNOWN_ROWS[name]
    write_as = lines if KNOWN[name].files["test"][0].endswith(".jsonl") else parquet
    others = [raw | {"problem": f"P{n}"} for n in range(1, 7)] if name == "math" else []
    files = KNOWN[name].files["test"]
    offer(hub, name, {file: write_as([row]) for file, row in zip(files, [raw, *others], strict=True)})
    done = cli("import", name, "--split", "test")
    assert done.code == 0, done.err
    row = imported(name, "test")[0]
    assert {key: getattr(row, key) for key in expected} == expected
    assert row.source == f"hf://datasets/{KNOWN[name].repository}@{KNOWN[name].revision}/{files[0]}#0"
    assert "the dataset card states none; " in done.out


def test_another_revision_is_resolved_to_its_commit(cli: Cli, hub: HubStub) -> None:
    offer(hub, "minerva", {"test.jsonl": lines([{"question": "P", "answer": "1"}])}, revision="d" * 40)
    hub.commits["math-ai/minervamath@main"] = "d" * 40
    assert cli("import", "minerva", "--revision", "main").code == 0
    assert imported("minerva", "test")[0].source == f"hf://datasets/math-ai/minervamath@{'d' * 40}/test.jsonl#0"


def test_a_hub_that_fails_is_one_line(cli: Cli, hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = cli("import", "gsm8k", "--revision", "gone")
    assert refused.code == 1
    assert "openai/gsm8k at gone: the hub cannot be used: " in refused.error
    assert "--from FILE" in refused.error
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    assert "the hub cannot be used: " in cli("import", "gsm8k").error
    assert "gsm8k has no split 'dev' (expected train or test)" in cli("import", "gsm8k", "--split", "dev").error
    assert "the columns of this set are known" in cli("import", "gsm8k", "--map", "answer=x").error
    assert not Path("data").exists()


def test_every_pin_is_a_commit() -> None:
    for known in KNOWN.values():
        assert len(known.revision) == 40
        assert set(known.revision) <= set("0123456789abcdef")
        assert set(known.files) == set(known.problems)


# --- the real sets ---------------------------------------------------------------------------------------------------


@shared_data
@pytest.mark.parametrize(("name", "split"), [("math", "train"), ("math", "test"), ("math500", "test")])
def test_math_answers_are_what_the_solutions_box(name: str, split: str) -> None:
    from hacpo.data.importing.columns import convert

    rows = pl.read_parquet(SHARED / f"data/{name}/{split}.parquet").to_dicts()
    raw = [{"problem": row["problem"], "solution": row["solution"]} for row in rows]
    known = KNOWN["math"]
    columns = {"problem": "problem", "solution": "solution"}
    made = convert(raw, columns, name=name, sources=[""] * len(raw), answers=known.answers)
    differ = [row["problem_id"] for row, new in zip(rows, made, strict=True) if row["answer"] != new.answer]
    assert differ == []


@shared_data
def test_gsm8k_answers_are_what_follows_the_marks() -> None:
    rows = pl.read_parquet(SHARED / "data/gsm8k/test.parquet").to_dicts()
    assert all(bare_answer(f"{row['solution']}\n#### {row['answer']}") == row["answer"] for row in rows)


@shared_data
@pytest.mark.slow
def test_real_sets_are_checked(cli: Cli) -> None:
    def bring(name: str, split: str) -> str:
        done = cli("import", name, "--split", split, "--from", SHARED / f"data/{name}/{split}.parquet")
        assert done.code == 0, done.err
        return done.out

    bring("math", "train")
    # ../shared/data/README.md: ignoring case, spaces and punctuation, 1 text of math500/test and 2 of
    # olympiadbench/test also occur in math/train; AIME has none.
    assert "  1 with data/math/train.parquet" in bring("math500", "test")
    olympiad = bring("olympiadbench", "test")
    assert "  2 with data/math/train.parquet" in olympiad
    assert "olympiadbench/test/2045 't(0,4]': only the same characters match" in olympiad
    assert "overlap   none with the 3 other sets" in bring("aime2025", "test")


def test_cells_cannot_steer_the_terminal_or_forge_lines(cli: Cli) -> None:
    rows = [
        {"problem_id": f"a{number}", "question": "1+1?", "answer": "2", "subject": "Sums\n  ids       \x1b[2Jfine"}
        for number in range(2)
    ]
    rows[0]["problem_id"] = "\x1b[31m\n  overlap   none"
    result = cli("import", "mine", "--from", str(write(rows, "mine.jsonl")), "--split", "train")
    assert result.code == 0, result.err
    assert "\x1b" not in result.out
    assert len([line for line in result.out.splitlines() if line.startswith("  overlap")]) == 1
    assert r"\x1b[31m\n  overlap   none" in result.out


def test_half_a_character_is_refused_in_one_line(cli: Cli) -> None:
    path = Path("mine.jsonl")
    path.write_text(
        r'{"question": "\ud83d\ude00", "answer": "2"}' + "\n" + r'{"question": "\ud800", "answer": "2"}' + "\n"
    )
    result = cli("import", "mine", "--from", str(path), "--split", "train")
    assert result.code == 5
    assert "mine.jsonl:2: holds half a character" in result.error


def test_a_small_file_that_is_gigabytes_unpacked_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary holds a long text once, and rows by the thousand say that it is theirs."""
    from hacpo.data.importing import parquet_rows

    monkeypatch.setattr(parquet_rows, "MOST_BYTES", 1 << 22)
    long = pa.array(["x" * 100_000])
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), long)
    pq.write_table(pa.table({"question": texts.cast(pa.string()), "answer": ["2"] * 5000}), "bomb.parquet")
    assert Path("bomb.parquet").stat().st_size < 1 << 18
    result = cli("import", "mine", "--from", "bomb.parquet", "--split", "train")
    assert result.code == 5
    assert "bomb.parquet: is more than 0 GiB unpacked" in result.error


def test_a_list_of_texts_that_a_dictionary_multiplies_is_read_within_bounds(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 times a text of 10 KB is 1 GB, whatever the file says of itself: it says 10 KB and 100,000 values."""
    from hacpo.artifacts import trial
    from hacpo.data.importing import formats

    monkeypatch.setattr(trial, "MEMORY", 1 << 28)
    monkeypatch.setattr(formats, "read_parquet", lambda path: pytest.fail(f"{path} was read without bounds"))
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), pa.array(["x" * 10_000]))
    lists = pa.ListArray.from_arrays(pa.array([0, 100_000], pa.int32()), texts)
    table = pa.table({"question": ["1+1?"], "answer": ["2"], "x": lists})
    pq.write_table(table, "bomb.parquet", store_schema=False)
    assert Path("bomb.parquet").stat().st_size < 1 << 15
    result = cli("import", "mine", "--from", "bomb.parquet", "--split", "train")
    assert result.code == 5
    assert "bomb.parquet: is more than 2 GiB unpacked" in result.error


@pytest.mark.parametrize(
    ("make", "found"),
    [(os.mkfifo, "a pipe"), (Path.mkdir, "a folder"), (lambda path: path.symlink_to("elsewhere"), "a link")],
)
def test_what_is_no_file_is_not_replaced(cli: Cli, make: Callable[[Path], object], found: str) -> None:
    """With --force neither; nobody waits for a pipe."""
    target = Path("data/mine/train.parquet")
    target.parent.mkdir(parents=True)
    make(target)
    result = cli("import", "mine", "--from", write(ROWS, "raw.jsonl"), "--split", "train", "--force")
    assert result.code == 2
    assert f"{target}: is there and is not replaced (found {found}). Name another file" in result.error
    assert not Path("data/mine/elsewhere").exists()


def test_a_file_is_read_for_so_long_and_no_longer(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from hacpo.artifacts import trial
    from hacpo.data.importing import formats

    monkeypatch.setattr(trial, "SECONDS", 1)
    monkeypatch.setattr(formats, "read_parquet", lambda path: pytest.fail(f"{path} was read without bounds"))
    pq.write_table(pa.table({"question": range(10_000_000)}), "slow.parquet")
    result = cli("import", "mine", "--from", "slow.parquet", "--split", "train")
    assert result.code == 5
    assert "slow.parquet: takes more than 1 seconds to read. Import it in parts" in result.error


def alike(count: int) -> pa.DictionaryArray:
    """One text of 1 KB, `count` times."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * 1000]))


BY_ROW = [*range(5001)]
MULTIPLIED = {
    "text": alike(5000),
    "list": pa.ListArray.from_arrays(BY_ROW, alike(5000)),
    "struct": pa.StructArray.from_arrays([alike(5000)], ["content"]),
    "map": pa.MapArray.from_arrays(BY_ROW, pa.array(["key"] * 5000), alike(5000)),
    "lists of structs": pa.ListArray.from_arrays(BY_ROW, pa.StructArray.from_arrays([alike(5000)], ["content"])),
}
"""Columns of 5 MB that stay dictionaries of 1 KB where Arrow reads them."""


@pytest.mark.parametrize("kind", MULTIPLIED)
def test_a_dictionary_counts_as_often_as_its_texts_are_meant(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from hacpo.data.importing import formats, parquet_rows

    table = pa.table({"question": [f"{n}?" for n in range(5000)], "answer": ["2"] * 5000, "x": MULTIPLIED[kind]})
    pq.write_table(table, "bomb.parquet")
    monkeypatch.setattr(formats, "try_parquet", lambda path: None)
    monkeypatch.setattr(parquet_rows, "MOST_BYTES", 1 << 23)
    assert cli("import", "mine", "--from", "bomb.parquet", "--split", "train").code == 0
    monkeypatch.setattr(parquet_rows, "MOST_BYTES", 1 << 22)
    result = cli("import", "more", "--from", "bomb.parquet", "--split", "train")
    assert result.code == 5
    assert "bomb.parquet: is more than 0 GiB unpacked" in result.error


def test_rows_that_hold_nothing_count(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes say that nothing follows, two thousand million times; what the footer says of it need not be so."""
    from hacpo.data.importing import formats, parquet_rows

    monkeypatch.setattr(formats, "try_parquet", lambda path: None)
    monkeypatch.setattr(parquet_rows, "_chunk_sizes", lambda metadata: [1])
    pq.write_table(pa.table({"question": pa.nulls(200_000)}), "bomb.parquet")
    for most in (1 << 22, 200_000 * 33):  # 6.4 MB of rows by the footer's number; with their values 8 MB
        monkeypatch.setattr(parquet_rows, "MOST_BYTES", most)
        result = cli("import", "mine", "--from", "bomb.parquet", "--split", "train")
        assert result.code == 5
        assert "bomb.parquet: is more than 0 GiB unpacked" in result.error


@pytest.mark.parametrize("column", ["answer", "solution", "unneeded"])
@pytest.mark.parametrize("depth", [101, 900])
def test_lists_within_lists_are_refused_in_one_line(cli: Cli, column: str, depth: int) -> None:
    deep = "[" * depth + "2" + "]" * depth
    Path("mine.jsonl").write_text(f'{{"question": "1+1?", "solution": "2", "{column}": {deep}}}\n')
    result = cli("import", "mine", "--from", "mine.jsonl", "--split", "train")
    assert result.code == 5
    assert "mine.jsonl:1: nested more than 100 levels deep" in result.error
    assert len(result.error.splitlines()) == 1


@pytest.mark.parametrize("unneeded", ["x", "answer"])
def test_a_list_of_millions_in_a_small_file_is_refused_before_it_is_read(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, unneeded: str
) -> None:
    """One value of a column may be a list without end: two rows of 100,000 numbers are 6.4 MB of Python's objects."""
    from hacpo.data.importing import parquet_rows

    monkeypatch.setattr(parquet_rows, "MOST_BYTES", 1 << 22)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_: pytest.fail("it was read"))
    zeros = pa.ListArray.from_arrays([0, 100_000, 200_000], pa.array([0] * 200_000, pa.int64()))
    table = pa.table({"question": ["1+1?"] * 2, "solution": ["2"] * 2, unneeded: zeros})
    pq.write_table(table, "bomb.parquet")
    assert Path("bomb.parquet").stat().st_size < 1 << 13
    result = cli("import", "mine", "--from", "bomb.parquet", "--split", "train")
    assert result.code == 5
    assert "bomb.parquet: is more than 0 GiB unpacked" in result.error
