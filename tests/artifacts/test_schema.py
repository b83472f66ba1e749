"""Reading refuses what is not whole and not ours; writing leaves the old file or the new one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hacpo.artifacts import parquet, storage
from hacpo.artifacts.parquet import read_table, to_arrow, whole_shards, write_table
from hacpo.artifacts.shards import Oddity, Shard, Wanted, read_shards
from hacpo.artifacts.tables import CAPABILITY, ROLLOUTS, SCHEDULE, TABLES, VERDICTS, Table
from hacpo.errors import ArtifactError, MissingInputError, StorageError
from tests.arrows_layout import in_arrows_layout

ROWS = [
    {"step": 1, "position": number, "problem_id": f"p{number}", "problem": "1+1=?", "answer": "2"}
    for number in range(5)
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "step=0001"
    write_table(
        path,
        SCHEDULE,
        to_arrow(SCHEDULE, ROWS),
        run="r",
        partition="step=0001",
        settings={"seed": 1},
        rows_per_shard=2,
    )
    return path


def test_shards_keep_order_and_carry_their_origin(table: Path) -> None:
    assert [path.name for path in sorted(table.iterdir())] == [f"part-0000{n}.parquet" for n in range(3)]
    assert read_table(table, SCHEDULE, run="r", partition="step=0001").to_pylist() == ROWS
    metadata = parquet.read_metadata(table)
    assert metadata == {
        "schema": "schedule/1",
        "run": "r",
        "partition": "step=0001",
        "shard": "0/3",
        "settings": {"seed": 1},
    }
    codec = pq.ParquetFile(table / "part-00000.parquet").metadata.row_group(0).column(0).compression
    assert codec == "ZSTD"


def test_a_footer_says_what_the_contract_asks_for_and_no_more(table: Path) -> None:
    shard = pq.ParquetFile(table / "part-00001.parquet").metadata
    assert shard.metadata == {
        b"hacpo.schema": b"schedule/1",
        b"hacpo.run": b"r",
        b"hacpo.partition": b"step=0001",
        b"hacpo.shard": b"1/3",
        b"hacpo.settings": b'{"seed":1}',
    }
    columns = [shard.row_group(0).column(number) for number in range(shard.num_columns)]
    assert not any(column.is_stats_set for column in columns)


@pytest.mark.parametrize("table", TABLES.values(), ids=str)
def test_types_follow_from_parquets_own_schema(table: Table, tmp_path: Path) -> None:
    write_table(tmp_path / "t.parquet", table, to_arrow(table, []), run="r")
    assert pq.read_schema(tmp_path / "t.parquet").equals(table.schema)
    assert "ARROW:schema" not in str(pq.read_metadata(tmp_path / "t.parquet").metadata)


def drawn(count: int) -> pa.Table:
    """Rollouts of 100 tokens each: 8 to a prompt, ids and log-probabilities of a normal distribution."""
    random = np.random.default_rng(1)
    rows = [
        {
            **dict.fromkeys(ROLLOUTS.schema.names),
            "rollout_id": f"0001/ada/p{number // 8:05d}/{number % 8:03d}",
            **{"step": 1, "agent": "ada", "problem_id": f"p{number // 8:05d}", "sample": number % 8},
            "prompt_token_ids": [number // 8 * 7 % 150_000, *range(100_000, 100_040)],
            "token_ids": np.abs(random.normal(0, 4000, 100)).astype(np.int32),
            **{"text": "né", "finish_reason": "stop", "policy": "ab" * 32},
            "sampler_logprobs": -np.abs(random.normal(0, 2, 100)).astype(np.float32),
            "logprobs": -np.abs(random.normal(0, 2, 100)).astype(np.float32),
        }
        for number in range(count)
    ]
    return to_arrow(ROLLOUTS, rows)


def test_columns_are_encoded_by_what_they_hold(tmp_path: Path) -> None:
    """Ids as what differs from the one before, log-probabilities byte by byte; nothing in dictionaries."""
    content = drawn(512)
    write_table(tmp_path / "t.parquet", ROLLOUTS, content, run="r")
    group = pq.read_metadata(tmp_path / "t.parquet").row_group(0)
    columns = {group.column(number).path_in_schema: group.column(number) for number in range(group.num_columns)}
    assert not any(column.has_dictionary_page for column in columns.values())
    assert "DELTA_BYTE_ARRAY" in columns["rollout_id"].encodings
    for name in ("sampler_logprobs", "logprobs", "support_logprob"):
        assert "BYTE_STREAM_SPLIT" in columns[f"{name}.list.element"].encodings
    # DuckDB before 2.0 knows that encoding of floating-point numbers alone.
    split = {name for name, column in columns.items() if "BYTE_STREAM_SPLIT" in column.encodings}
    assert {columns[name].physical_type for name in split} == {"FLOAT"}
    tokens = 512 * 100
    # 23 of 32 bits are noise: 2.9 bytes; a dictionary of numbers that hardly repeat takes 4 and an index each.
    assert columns["logprobs.list.element"].total_compressed_size < 3.6 * tokens
    assert columns["prompt_token_ids.list.element"].total_compressed_size < 0.05 * tokens
    assert columns["rollout_id"].total_compressed_size < 1.5 * 512


def test_polars_reads_the_same_rows(tmp_path: Path) -> None:
    content = drawn(64)
    write_table(tmp_path / "t.parquet", ROLLOUTS, content, run="r")
    assert pl.read_parquet(tmp_path / "t.parquet").to_arrow().to_pylist() == content.to_pylist()


def test_files_that_repeat_the_schema_and_have_statistics_and_dictionaries_are_read_the_same(table: Path) -> None:
    in_arrows_layout(table)
    assert b"ARROW:schema" in pq.read_metadata(table / "part-00000.parquet").metadata
    wanted = Wanted("r", "step=0001", {"seed": 1}, 2)
    assert [type(item) for item in read_shards(table, SCHEDULE, wanted)] == [Shard] * 3
    assert read_table(table, SCHEDULE, run="r", partition="step=0001").to_pylist() == ROWS
    assert parquet.read_metadata(table)["settings"] == {"seed": 1}


def test_the_same_rows_are_the_same_bytes(table: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    write_table(
        again,
        SCHEDULE,
        to_arrow(SCHEDULE, ROWS),
        run="r",
        partition="step=0001",
        settings={"seed": 1},
        rows_per_shard=2,
    )
    for path in sorted(table.iterdir()):
        assert path.read_bytes() == (again / path.name).read_bytes()


def test_an_empty_table_is_one_shard_without_rows(tmp_path: Path) -> None:
    write_table(tmp_path / "empty", VERDICTS, to_arrow(VERDICTS, []), run="r", rows_per_shard=2)
    assert len(read_table(tmp_path / "empty", VERDICTS, run="r")) == 0


def test_missing_table_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="the schedule table is missing. Run `hacpo prepare pipelines/r`"):
        read_table(tmp_path / "nothing", SCHEDULE, made_by="hacpo prepare pipelines/r")


@pytest.mark.parametrize(
    ("run", "part", "says"), [("other", "step=0001", "another run"), ("r", "step=0002", "another partition")]
)
def test_a_shard_of_another_run_or_step_is_refused(table: Path, run: str, part: str, says: str) -> None:
    with pytest.raises(ArtifactError, match=says):
        read_table(table, SCHEDULE, run=run, partition=part)


def test_a_table_of_another_kind_is_refused(table: Path) -> None:
    with pytest.raises(ArtifactError, match=r"another schema \(expected capability/1, found schedule/1\)"):
        read_table(table, CAPABILITY)


def test_a_truncated_shard_is_refused(table: Path) -> None:
    shard = table / "part-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(ArtifactError, match=r"part-00001.parquet: damaged or truncated"):
        read_table(table, SCHEDULE)


def test_any_flipped_bit_in_the_data_is_refused(tmp_path: Path) -> None:
    """Every byte between the magic number and the footer belongs to a checksummed page or its header."""
    path = tmp_path / "t.parquet"
    write_table(path, SCHEDULE, to_arrow(SCHEDULE, ROWS), run="r")
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little")
    undetected = []
    for position in range(4, len(whole) - 8 - footer, 7):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            same = read_table(path, SCHEDULE).to_pylist() == ROWS
        except ArtifactError:
            continue
        if not same:
            undetected.append(position)
    assert not undetected


@pytest.mark.parametrize("lost", ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"])
def test_a_lost_shard_is_noticed(table: Path, lost: str) -> None:
    (table / lost).unlink()
    with pytest.raises(ArtifactError, match="a shard is missing, renamed or left over"):
        read_table(table, SCHEDULE)


def test_a_renamed_shard_is_noticed_where_its_place_is_still_right(table: Path) -> None:
    (table / "part-00002.parquet").rename(table / "part-00007.parquet")
    said = r"missing, renamed or left over \(expected part-00002.parquet, found part-00007.parquet\)"
    with pytest.raises(ArtifactError, match=said):
        read_table(table, SCHEDULE)


def test_a_reader_raises_the_first_of_all_that_is_odd(table: Path) -> None:
    wanted = Wanted(run="other", partition="step=0002", settings={"seed": 2}, rows_per_shard=3)
    odd = [item for item in read_shards(table, SCHEDULE, wanted) if isinstance(item, Oddity)]
    each = ["hacpo.run", "hacpo.partition", "hacpo.settings seed"]
    assert [item.column for item in odd] == [*each * 3, "", ""]
    sizes = [(item.where.name, item.expected, item.found) for item in odd[9:]]
    assert sizes == [("part-00000.parquet", "3 rows", "2 rows"), ("part-00001.parquet", "3 rows", "2 rows")]
    with pytest.raises(ArtifactError) as refused:
        read_table(table, SCHEDULE, run="other", partition="step=0002")
    assert str(refused.value) == str(odd[0].error())


def test_shards_are_given_one_after_another(table: Path) -> None:
    """The second one is not read before it is asked for."""
    shards = whole_shards(table, SCHEDULE)
    assert next(shards).content.to_pylist() == ROWS[:2]
    (table / "part-00001.parquet").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"part-00001.parquet: damaged or truncated"):
        next(shards)


def test_missing_column_wrong_type_and_nulls_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_table(path, SCHEDULE, to_arrow(SCHEDULE, ROWS), run="r")
    original = pq.read_table(path)

    def rewrite(changed: pa.Table) -> None:
        pq.write_table(changed.replace_schema_metadata(original.schema.metadata), path)

    rewrite(original.drop(["answer"]))
    with pytest.raises(ArtifactError, match="column 'answer' is missing"):
        read_table(path, SCHEDULE)
    assert len(read_table(path, SCHEDULE, columns=["step", "position"])) == 5
    rewrite(original.set_column(0, "step", pa.array([1] * 5, pa.int64())))
    with pytest.raises(ArtifactError, match=r"column 'step' has the wrong type \(expected int32, found int64\)"):
        read_table(path, SCHEDULE)
    rewrite(original.set_column(2, "problem_id", pa.array([None, "a", "b", "c", "d"])))
    with pytest.raises(ArtifactError, match="column 'problem_id' has nulls"):
        read_table(path, SCHEDULE)


def test_a_duplicated_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_table(path, SCHEDULE, to_arrow(SCHEDULE, [*ROWS, ROWS[3]]), run="r")
    with pytest.raises(ArtifactError, match=r"the same row twice \(found step 1, position 3\)"):
        read_table(path, SCHEDULE)


def test_a_duplicated_row_is_named_with_the_shard_that_repeats_it(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_table(path, SCHEDULE, to_arrow(SCHEDULE, [*ROWS, ROWS[1], ROWS[4]]), run="r", rows_per_shard=3)
    with pytest.raises(
        ArtifactError, match=r"part-0000[12].parquet: the same row twice \(found step 1, position [14]\)"
    ):
        read_table(path, SCHEDULE)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(table: Path) -> None:
    before = {path.name: path.read_bytes() for path in table.iterdir()}
    with pytest.raises(RuntimeError), storage.atomic(table) as scratch:
        scratch.mkdir()
        (scratch / "half").write_text("x")
        raise RuntimeError
    assert {path.name: path.read_bytes() for path in table.iterdir()} == before
    assert [path.name for path in table.parent.iterdir()] == [table.name]


def test_what_a_killed_writer_left_is_removed_by_the_next_but_nothing_of_one_at_work(table: Path) -> None:
    def write() -> list[str]:
        with storage.atomic(table) as scratch:
            scratch.mkdir()
        return sorted(path.name for path in table.parent.iterdir())

    writer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs = [f".{table.name}.tmp-{writer.pid}", f".{table.name}.tmp-{writer.pid}-old"]
    for name in theirs:
        table.with_name(name).mkdir()
    assert write() == [*theirs, table.name]
    writer.kill()
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)  # its remains still have its number
    assert write() == [table.name]
    writer.communicate()


def test_a_number_that_another_process_has_by_now_says_nothing_of_who_writes(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = table.with_name(f".{table.name}.tmp-{os.getppid()}")
    stale.mkdir()
    monkeypatch.setattr("psutil.Process.create_time", lambda _: stale.stat().st_ctime + 60)
    with storage.atomic(table) as scratch:
        scratch.mkdir()
    assert [path.name for path in table.parent.iterdir()] == [table.name]


def test_a_full_disk_is_one_clear_error_and_nothing_is_written(tmp_path: Path) -> None:
    """A file-size limit stands in for the disk: the write fails in the same place, with EFBIG instead of ENOSPC."""
    rows = [{**ROWS[0], "position": number, "problem": str(number) * 50} for number in range(5000)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageError, match="cannot be written: file too large"):
            write_table(tmp_path / "t.parquet", SCHEDULE, to_arrow(SCHEDULE, rows), run="r")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
