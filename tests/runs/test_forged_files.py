"""A run's files as a stranger may have made them: each is one line, or a finding of an audit that goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

from conftest import Cli
from tests.tampering import Sandbox

RUN = "pipelines/small"
WHAT_IF = f"what-if {RUN} --step 1 --set algorithm.clip.own_low=0.1"
ADVANTAGE = f"advantage {RUN} --step 1 --out out"
REPORT = f"report {RUN} --out out"
UPDATE = f"update {RUN} --step 2 --agent ada --out out"
VERDICTS, ROLLOUTS, PROMPTS = "verdicts/step=0001/agent=ada", "rollouts/step=0001/agent=ada", "prompts/step=0001"
TRACE, CAPABILITY = "updates/step=0001/agent=ada", "capability/step=0001"
SETTINGS = "artifacts/small/settings.json"
TRAINER = "checkpoints/step=0001/agent=ada/trainer"
BEYOND_FLOATS = 10**400


@pytest.fixture
def refused(cli: Cli) -> Callable[..., str]:
    """Runs a command that must end with this code, and gives the one line that it ends with."""

    def run(command: str, code: int = 4) -> str:
        result = cli(*command.split())
        assert result.code == code, result.err
        return result.error

    return run


@pytest.fixture
def findings(cli: Cli) -> Callable[[], list[dict[str, Any]]]:
    """What an audit without texts finds; it comes to its end."""

    def run() -> list[dict[str, Any]]:
        result = cli("audit", RUN, "--texts", "none", "--json")
        assert result.code in (0, 1), result.err
        assert not result.err
        found: list[dict[str, Any]] = json.loads(result.out)["findings"]
        return found

    return run


def write(path: Path, content: object) -> None:
    path.unlink(missing_ok=True)  # it may be a link to an object of DVC's cache
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def change(path: Path, **values: object) -> None:
    write(path, json.loads(path.read_text()) | values)


# --- DVC's records ---------------------------------------------------------------------------------------------------

RECORD = {"hash": "md5", "md5": "d41d8cd98f00b204e9800998ecf8427e", "size": 0}
"""What DVC says of an empty file."""


def change_entry(sandbox: Sandbox, edit: Callable[[Any], object]) -> None:
    """Edit what step 1's dvc.lock says of `generate@ada`."""
    yaml = YAML(pure=True)
    content = yaml.load(sandbox.lock(1).read_text())
    edit(content["stages"]["generate@ada"])
    with sandbox.lock(1).open("w") as file:
        yaml.dump(content, file)


@pytest.mark.parametrize("named", ["{0}", "{0}/file", "../{1}/file", "artifacts/../../{1}"])
def test_what_only_a_lock_names_is_not_read(
    sandbox: Sandbox, findings: Callable[[], list[dict[str, Any]]], tmp_path: Path, named: str
) -> None:
    """A folder of the user's own, absolute or from the project's root: neither its hash nor its files are told."""
    (tmp_path / "file").write_text("private")
    relative = Path("..", *[".."] * len(sandbox.root.parent.relative_to("/").parts), *tmp_path.parts[1:])
    path = named.format(tmp_path, relative)
    change_entry(sandbox, lambda entry: entry["outs"].append({"path": path, **RECORD}))
    (found,) = findings()
    assert (found["check"], found["row"], found["column"]) == ("lock", "generate@ada", "outs")
    assert (found["expected"], found["found"]) == ("not in dvc.yaml", path)


def test_a_path_that_no_system_opens_is_a_finding(
    sandbox: Sandbox, findings: Callable[[], list[dict[str, Any]]]
) -> None:
    change_entry(sandbox, lambda entry: entry["outs"].append({"path": "x" * 5000, **RECORD}))
    (found,) = findings()
    assert (found["row"], found["column"]) == ("generate@ada", "outs")


def adding(**odd: object) -> Callable[[Any], object]:
    """An edit that adds an output, odd in these."""
    return lambda entry: entry["outs"].append({"path": "artifacts/small/x", **RECORD, **odd})


@pytest.mark.parametrize(
    "edit",
    [
        *(adding(path=path) for path in (["a", "b"], {"a": 1}, 5, None)),
        *(adding(size=size) for size in ("0", True, 0.5)),
        *(adding(nfiles=count) for count in ([1], "2")),
        *(adding(md5=md5) for md5 in ("../../x.dir", 5, ["a"])),
        lambda entry: entry["params"].update({5: {"a": 1}}),
        lambda entry: entry["params"][SETTINGS].update({5: 1}),
        lambda entry: entry["params"][SETTINGS].update(seed={1: 2, "a": 3}),
    ],
)
def test_an_entry_that_dvc_did_not_write_is_a_finding(
    sandbox: Sandbox, findings: Callable[[], list[dict[str, Any]]], edit: Callable[[Any], object]
) -> None:
    change_entry(sandbox, edit)
    (found,) = findings()
    assert (found["check"], found["row"], found["found"]) == ("lock", "generate@ada", "damaged")


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "column", "command"),
    [
        (VERDICTS, "verdict", REPORT),
        (ROLLOUTS, "finish_reason", REPORT),
        (ROLLOUTS, "text", f"verify {RUN} --step 1 --agent ada --out out"),
        (ROLLOUTS, "rollout_id", f"pool {RUN} --step 1 --learner ada --out out"),
        (PROMPTS, "problem_id", f"show {RUN} --step 1"),
        (PROMPTS, "problem_id", WHAT_IF),
        (PROMPTS, "problem_id", ADVANTAGE),
    ],
)
def test_a_text_that_is_no_utf_8(
    sandbox: Sandbox,
    refused: Callable[..., str],
    findings: Callable[[], list[dict[str, Any]]],
    table: str,
    column: str,
    command: str,
) -> None:
    sandbox.garble(table, column)
    assert f"column {column!r} holds what is no text in UTF-8" in refused(command)
    assert ("columns", column) in {(found["check"], found["column"]) for found in findings()}


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.7e308])
@pytest.mark.parametrize(
    ("table", "column", "command"),
    [
        (VERDICTS, "reward", REPORT),
        (VERDICTS, "reward", WHAT_IF),
        (TRACE, "ratio", WHAT_IF),
        (ROLLOUTS, "logprobs", UPDATE.replace("2", "1")),
        ("pool/step=0001/learner=ada", "source_logprob", UPDATE.replace("2", "1")),
        (CAPABILITY, "window", ADVANTAGE.replace("1", "2")),
    ],
)
def test_a_number_that_is_not_finite(
    sandbox: Sandbox, refused: Callable[..., str], table: str, column: str, command: str, value: float
) -> None:
    sandbox.edit(table, column, lambda old: [value, *old[1:]] if isinstance(old, list) else value)
    assert f"column {column!r} holds a number that is not finite" in refused(command)


def test_numbers_that_overflow_are_no_warnings(sandbox: Sandbox, cli: Cli) -> None:
    """A gradient's weight is a product of the two."""
    for column in ("ratio", "is_weight"):
        sandbox.edit(TRACE, column, lambda _: 1e200)
    asked = cli(*WHAT_IF.split())
    assert (asked.code, asked.err) == (0, "")


@pytest.mark.parametrize("covariance", [[[0.1]], [[0.1, 0.1, 0.1]], [[-0.1, -0.1]]])
def test_variances_that_are_none(sandbox: Sandbox, refused: Callable[..., str], covariance: list[list[float]]) -> None:
    sandbox.edit(CAPABILITY, "window_covariance", lambda _: covariance)
    assert "window_covariance of ada is none" in refused(ADVANTAGE.replace("1", "2"))


@pytest.mark.parametrize("command", [WHAT_IF, ADVANTAGE.replace("1", "2")])
def test_capabilities_of_an_unknown_agent(sandbox: Sandbox, refused: Callable[..., str], command: str) -> None:
    sandbox.edit(CAPABILITY, "agent", lambda _: "zed")
    assert "holds other agents than the run (expected ada, bo, found bo, zed)" in refused(command)


@pytest.mark.parametrize("update", [-(2**31), -1])
def test_an_update_that_there_is_not(sandbox: Sandbox, refused: Callable[..., str], update: int) -> None:
    sandbox.edit(TRACE, "update", lambda _: update)
    assert f"update {update} of ada in step 1 saw no response" in refused(WHAT_IF)


# --- metrics and settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [BEYOND_FLOATS, math.nan, math.inf, -1e308, True, "7", [1], {"a": 1}], ids=lambda value: str(value)[:9]
)
def test_what_is_no_number_in_metrics(sandbox: Sandbox, cli: Cli, refused: Callable[..., str], value: object) -> None:
    """32 rollouts of each of two steps: what the first says is not known."""
    path = sandbox.artifacts / "metrics/generate/step=0001/ada.json"
    change(path, rollouts=value, seconds=value)
    said = cli("status", RUN)
    assert said.code == 0, said.err
    assert ["ada", "32"] in [line.split()[:2] for line in said.out.splitlines()]
    assert f"{path.relative_to(sandbox.root)}: is no flat JSON object of numbers" in refused(REPORT)
    assert cli("estimate", RUN).code == 0


@pytest.mark.parametrize(
    "content", [b"", b"[" * 100_000, b"\xff{}", b"[1]", b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}"]
)
def test_settings_that_are_none(sandbox: Sandbox, refused: Callable[..., str], content: bytes) -> None:
    write(sandbox.artifacts / "settings.json", content)
    assert "settings.json: cannot be read" in refused(f"compare {RUN}")
    assert "settings.json: holds no settings" in refused(REPORT)


def test_settings_that_are_lists(sandbox: Sandbox, refused: Callable[..., str]) -> None:
    path = sandbox.artifacts / "settings.json"
    write(path, {key: [1] for key in json.loads(path.read_text())})
    assert "settings.json: holds no settings" in refused(REPORT)


def test_a_config_that_says_no_numbers(sandbox: Sandbox, refused: Callable[..., str], cli: Cli) -> None:
    path = sandbox.artifacts / "checkpoints/step=0000/agent=ada/config.json"
    change(path, num_hidden_layers="1", vocab_size=[1], architectures={}, text_config=[1])
    assert cli(*REPORT.split()).code == 0
    write(path, [1])
    assert "config.json: is no JSON mapping" in refused(REPORT, 6)


@pytest.mark.parametrize(
    "record",
    [
        {"ada": {"1": 5}},
        *(
            {"ada": {"1": {"policy": "0" * 64, "bytes": 5, "rule": "keep_last 1"} | odd}}
            for odd in ({"policy": "\x1b[31m"}, {"bytes": -5}, {"bytes": BEYOND_FLOATS}, {"rule": "\x1b[31m"})
        ),
        *({"ada": {step: {"policy": "0" * 64, "bytes": 5, "rule": "keep_last 1"}}} for step in ("0", "-1", "1" * 300)),
        {"\x1b[31m": {}},
    ],
)
def test_a_record_of_pruned_checkpoints_that_is_none(
    sandbox: Sandbox, findings: Callable[[], list[dict[str, Any]]], refused: Callable[..., str], record: object
) -> None:
    """Every checkpoint is there, so that nothing else needs it."""
    write(sandbox.artifacts / "pruned.json", record)
    (found,) = findings()
    assert (found["check"], found["file"], found["found"]) == ("files", "artifacts/small/pruned.json", "damaged")
    assert "is no record of pruned checkpoints" in refused(f"status {RUN}")


def test_a_pruned_checkpoint_of_nobody(sandbox: Sandbox, findings: Callable[[], list[dict[str, Any]]]) -> None:
    entry = {"policy": "0" * 64, "bytes": 5, "rule": "keep_last 1"}
    write(sandbox.artifacts / "pruned.json", {"ada": {"1": entry}, "zed": {"1": entry}})
    (found,) = findings()
    assert (found["check"], found["found"]) == ("unknown", "zed")


# --- the optimizer's state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count", [-5, 0, 2, 5, 4.0, 1e3, "4", True, 10**13, BEYOND_FLOATS], ids=lambda count: str(count)[:14]
)
def test_a_count_of_updates_that_cannot_be(sandbox: Sandbox, refused: Callable[..., str], count: object) -> None:
    """A step is 4 updates."""
    write(sandbox.artifacts / TRAINER / "state.json", {"updates_done": count})
    assert f"{TRAINER}: the optimizer state cannot be used: updates_done is" in refused(UPDATE)


def test_a_start_may_have_any_count_of_updates_behind_it(
    sandbox: Sandbox, cli: Cli, refused: Callable[..., str]
) -> None:
    start = sandbox.artifacts / "checkpoints/step=0000/agent=ada/trainer"
    start.mkdir()
    for file in (sandbox.artifacts / TRAINER).iterdir():
        (start / file.name).write_bytes(file.read_bytes())
    update = UPDATE.replace("2", "1")
    write(start / "state.json", {"updates_done": 40})
    assert cli(*update.split()).code == 0
    for count in (-1, 2**24 + 1, 3.5):
        write(start / "state.json", {"updates_done": count})
        assert "updates_done is" in refused(update)


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize(
    "forge",
    [
        lambda tensor: tensor.to(torch.int8),
        torch.Tensor.half,
        torch.Tensor.double,
        lambda tensor: torch.full_like(tensor, math.nan),
        lambda tensor: torch.full_like(tensor, -3.0),
        lambda tensor: torch.full_like(tensor, 5.0),
    ],
    ids=["int8", "float16", "float64", "nan", "negative", "larger than clipping allows"],
)
def test_a_moment_that_cannot_be(
    sandbox: Sandbox,
    refused: Callable[..., str],
    forge: Callable[[torch.Tensor], torch.Tensor],
    moment: str,
) -> None:
    """Gradients are clipped to a norm of 1: no average of them is above 1, and none of their squares."""
    path = sandbox.artifacts / TRAINER / "optimizer.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith(f"{moment}."))
    path.unlink()
    save_file(tensors | {name: forge(tensors[name])}, path)
    assert f"{TRAINER}: the optimizer state cannot be used: {name}" in refused(UPDATE)
