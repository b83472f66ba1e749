"""Files that strangers made, changed at random: tables, settings, model folders, chat templates, answers.

A command that reads one must end within its time and memory in one line with a documented exit code, or with a result;
nothing may be left of what it was making.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import starved
from .forks import Done, Forks
from .frame import Bench, Part, Trial
from .sandbox import copy_tree
from .starved import PIPELINE, Golden

_DOCUMENTED = (0, 1, 2, 3, 4, 5, 6, 8, 9, 10)
_SECONDS, _ADDRESS_SPACE = 180.0, 12 * 2**30
_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**63,
        2**64,
        -(2**63),
        0.5,
        1e308,
        float("inf"),
        float("nan"),
        "",
        "\x00",
        "\ud800",
    ),
    *("../../etc/passwd", "a" * 10_000, [], {}, [[]], {"": {}}, [1] * 1000, "{{ x }}", "\x1b[2J", "１", "-0", "1e400"),
)


def _mangled(dice: random.Random, content: bytes) -> bytes:
    """Bytes changed, cut out, doubled, cut off, or moved."""
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 5, 40))):
        if not changed:
            break
        at, size = dice.randrange(len(changed)), dice.choice((1, 1, 4, 16, 200))
        way = dice.randrange(5)
        if way == 0:
            changed[at : at + size] = dice.randbytes(size)
        elif way == 1:
            del changed[at : at + size]
        elif way == 2:
            changed[at:at] = changed[at : at + size]
        elif way == 3:
            changed[at] = dice.choice((0, 0xFF, 0x7F, 0x80))
        elif dice.random() < 0.2:
            del changed[at:]
    return bytes(changed)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value[:50]) if isinstance(value, list) else ()
    return [place for key, one in inner for place in [(*at, key), *_places(one, (*at, key))]]


def _edited(dice: random.Random, value: Any) -> Any:
    """JSON in which some values are others, and keys are missing or unknown."""
    for _ in range(dice.choice((1, 1, 2, 4))):
        places = _places(value)
        if not places:
            break
        *way, last = dice.choice(places)
        inside = value
        for key in way:
            inside = inside[key]
        if dice.random() < 0.15 and isinstance(inside, dict):
            del inside[last]
        else:
            inside[last] = dice.choice(_VALUES)
    return value


# --- kinds -----------------------------------------------------------------------------------------------------------


def _table(dice: random.Random, project: Path) -> tuple[str, ...]:
    """A table of the run, damaged or written anew with other content; then what reads it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    base = project / "artifacts" / starved.RUN
    names = ("rollouts", "verdicts", "pool", "advantages", "capability", "prompts", "evaluations", "updates", "data")
    path = dice.choice(sorted(file for name in names for file in (base / name).rglob("*.parquet")))
    if dice.random() < 0.5:
        path.write_bytes(_mangled(dice, path.read_bytes()))
    else:
        table = pq.read_table(path, partitioning=None)
        field = dice.choice(table.schema.names)
        number = table.schema.names.index(field)
        odd = dice.choice(
            (
                pa.nulls(len(table), table.schema.field(field).type),
                pa.array([dice.choice(("", "\x00", "9" * 5000, "\\boxed{" * 500)) for _ in range(len(table))]),
                pa.array([dice.choice((0, -1, 2**62)) for _ in range(len(table))]),
                pa.array([float(dice.choice(("nan", "inf", "-inf", "1e308"))) for _ in range(len(table))]),
                pa.array([[2**31 - 1] * 3] * len(table), pa.list_(pa.int32())),
            )
        )
        table = table.set_column(number, field, odd)
        if dice.random() < 0.3:
            table = table.slice(0, 0)
        pq.write_table(table, path)
    return dice.choice(
        (
            *(
                ("verify", PIPELINE, "--step", "1", "--agent", "ada"),
                ("pool", PIPELINE, "--step", "1", "--learner", "cy"),
            ),
            *(("advantage", PIPELINE, "--step", "1"), ("update", PIPELINE, "--step", "1", "--agent", "ada")),
            *(("audit", PIPELINE), ("report", PIPELINE), ("show", PIPELINE, "--step", "1"), ("status", PIPELINE)),
            ("evaluate", PIPELINE, "--step", "1", "--agent", "ada"),
        )
    )


def _settings(dice: random.Random, project: Path) -> tuple[str, ...]:
    """params.yaml of a stranger."""
    path = project / PIPELINE / "params.yaml"
    text = path.read_text()
    bomb = "".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 9) if n else '1'}]\n" for n in range(12))
    deep = dice.choice(("[", "{a: ", "- ", "? ", "!!set {", "&a [", "'")) * dice.choice((50, 5000, 200_000))
    way = dice.randrange(6)
    if way == 0:
        text = _mangled(dice, text.encode()).decode("utf-8", "surrogateescape")
    elif way == 1:
        text += bomb + "extra: *b11\n"
    elif way == 2:
        text += f"extra: {deep}"
    elif way == 3:
        lines = text.splitlines()
        at = dice.randrange(len(lines))
        key = lines[at].partition(":")[0]
        odd = dice.choice(
            (*map(repr, _VALUES[:12]), "!!python/object/apply:os.system [id]", "&a *a", "<<: *x", "2001-01-01")
        )
        lines[at] = f"{key}: {odd}"
        text = "\n".join(lines)
    elif way == 4:
        text = text.replace(
            "seed: 1", f"seed: 1\nextends: {dice.choice(('params.yaml', '/dev/zero', '/etc', '..', '[]'))}"
        )
    else:
        lines = text.splitlines()
        dice.shuffle(lines)
        text = "\n".join(lines)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return dice.choice((("plan", PIPELINE), ("status", PIPELINE), ("estimate", PIPELINE), ("resolve", PIPELINE)))


def _model(dice: random.Random, project: Path) -> tuple[str, ...]:
    """The model folder that an agent starts from."""
    folder = project / "models" / "ada"
    path = dice.choice(sorted(folder.iterdir()))
    way = dice.randrange(6)
    if way == 0:
        path.write_bytes(_mangled(dice, path.read_bytes()))
    elif way == 1:
        weights = folder / "model.safetensors"
        content = weights.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        header = json.dumps(_edited(dice, json.loads(content[8 : 8 + size]))).encode("utf-8", "surrogatepass")
        length = dice.choice((len(header), len(header), 2**63, 0, 2**32))
        weights.write_bytes(struct.pack("<Q", length) + header + content[8 + size :])
    elif way == 2:
        path.unlink()
        path.symlink_to(dice.choice(("/etc/passwd", "/dev/zero", "../ada", path.name, "/proc/self/mem")))
    elif way == 3:
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
        config["model_type"] = dice.choice(("evil", "qwen3", "../x", ""))
        (folder / "evil.py").write_text("import os\nos.mkdir('evil')\nclass Model: pass\n")
        (folder / "config.json").write_text(json.dumps(config))
    else:
        chosen = dice.choice(("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"))
        value = _edited(dice, json.loads((folder / chosen).read_text()))
        (folder / chosen).write_text(json.dumps(value), errors="surrogatepass")
    return ("warmup", PIPELINE, "--agent", "ada")


_PIECES = (
    *("{{ x }}", "{% for i in range(10**9) %}x{% endfor %}", "{{ 'a' * 10**10 }}", "{{ strftime_now('%Y' * 10**8) }}"),
    *("{{ messages }}", "{{ messages[0].content }}", "{% if x %}", "{% endif %}", "{{ ''.__class__.__mro__ }}", "\x00"),
    *(
        "{{ raise_exception('\x1b[2J') }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ 1/0 }}",
        "{{ namespace }}",
    ),
    *(
        "{% set x = 1 %}",
        "{{ messages | tojson }}",
        "{% include '/etc/passwd' %}",
        "{{ 10**10**7 }}",
        "{#",
        "%}",
        "text",
    ),
    *(
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ range(10**8) | list | length }}",
        "{{ cycler.__init__ }}",
    ),
)


def _template(dice: random.Random, project: Path) -> tuple[str, ...]:
    """A chat template, of an agent's model folder."""
    text = "".join(dice.choice(_PIECES) for _ in range(dice.randrange(1, 6)))
    (project / "models" / "ada" / "chat_template.jinja").write_text(text)
    return ("warmup", PIPELINE, "--agent", "ada")


def _answers(dice: random.Random, project: Path) -> tuple[str, ...]:
    """What a model may have written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests import hostile

    families = list(hostile.FAMILIES.values())
    path = next((project / "artifacts" / starved.RUN / "rollouts" / "step=0001" / "agent=ada").glob("*.parquet"))
    table = pq.read_table(path, partitioning=None)
    texts = []
    for _ in range(len(table)):
        answer = "".join(dice.choice(families)(dice.randrange(50)) for _ in range(dice.choice((1, 1, 2))))
        letters = list(answer.encode("utf-8", "ignore").decode())
        for _ in range(dice.choice((0, 1, 5))):
            letters.insert(dice.randrange(len(letters) + 1), dice.choice("{}\\^_$%&()[]0129,.-+*/!|=~\n\t\x00"))
        texts.append("\\boxed{" * dice.choice((1, 1, 3)) + "".join(letters) + "}" * dice.choice((0, 1, 1, 3)))
    number = table.schema.names.index("text")
    pq.write_table(table.set_column(number, table.schema.field("text"), pa.array(texts)), path)
    return ("verify", PIPELINE, "--step", "1", "--agent", "ada")


_KINDS: dict[str, Callable[[random.Random, Path], tuple[str, ...]]] = {
    "table": _table,
    "settings": _settings,
    "model folder": _model,
    "chat template": _template,
    "answers": _answers,
}


def _judge(trial: Trial, kind: str, command: tuple[str, ...], done: Done, folder: Path) -> None:
    what = f"{kind}, `hacpo {' '.join(command)}`"
    lines = [line for line in done.err.splitlines() if line.startswith("hacpo: error: ")]
    if done.timed_out or done.code < 0:
        trial.find("wedge", f"{what}: killed, or did not end: {done.code}, {done.err[-800:]}")
    elif "Traceback" in done.err or done.code == 70:
        trial.find("traceback", f"{what}: {done.err.strip()[-1500:]}")
    elif done.code not in _DOCUMENTED or (command[0] not in ("audit",) and bool(done.code) != (len(lines) == 1)):
        trial.find("refused", f"{what}: exit code {done.code}, {done.err.strip()[-800:]}")
    if "\x1b" in done.err or "\x1b[2J" in done.out:
        trial.find("refused", f"{what}: a line that steers a terminal: {done.err[-300:]!r}")
    if left := starved.leftovers(folder, at_rest=False):
        trial.find("leftover", f"{what}: {left[:5]}")
    if list(folder.rglob("evil")):
        trial.find("wrong bytes", f"{what}: code of a model folder has run")


def run(bench: Bench) -> None:
    """See the module."""
    work = Path(tempfile.mkdtemp(prefix="hacpo-soak-"))
    forks = Forks(work / "out")
    try:
        golden = Golden.make(work / "golden", forks, starved.TWO)
        bench.tally.planned = 1000
        parallel, bench.parallel = bench.parallel, 1  # one process that forks

        def trial(one: Trial) -> None:
            kind = list(_KINDS)[one.number % len(_KINDS)]
            folder = one.folder / "it"
            copy_tree(golden.finished, folder)
            command = _KINDS[kind](one.dice, folder / "project")
            done = forks.run(
                ["hacpo", *command],
                folder / "project",
                starved.variables(folder),
                limit_seconds=_SECONDS,
                address_space=_ADDRESS_SPACE,
            )
            one.count(f"{kind}: {'taken' if done.code == 0 else 'refused'}")
            one.log.write_text(f"{kind}\n{command}\n{done.code} in {done.seconds:.1f} s\n{done.out}\n{done.err}\n")
            _judge(one, kind, command, done, folder)

        bench.spread(trial, range(bench.tally.planned))
        bench.parallel = parallel
    finally:
        forks.close()
        shutil.rmtree(work, ignore_errors=True)


PART = Part("inputs", "files that strangers made, changed at random", run)
