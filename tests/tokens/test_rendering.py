"""Chat templates in a process of their own: what transformers renders, and nothing beyond the bounds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import SHARED, Cli, environment
from hacpo.engines.models.tiny import CHAT_TEMPLATE
from hacpo.tokens import renderer as rendering
from hacpo.tokens.chat_templates import PLAIN_TEMPLATE
from hacpo.tokens.renderer import RefusedError, Renderer, renderer_of

TURNS = [
    {"role": "system", "content": 'Be <b>brief</b> & "exact".'},
    {"role": "user", "content": "2+2=?\n\té 日本 \\boxed{}"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "really?"},
]

UNUSUAL = """
{%- for m in messages -%}
  {%- if loop.index > 3 %}{% break %}{% endif -%}
  {{ m | tojson }}{% generation %}[{{ m.content | trim }}]{% endgeneration %}
{%- endfor %}
{{ (messages | length) ~ bos_token }} {{ tools is none }} {{ strftime_now is defined }}
"""


def apart(template: str, **variables: object) -> str:
    """As transformers renders it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([TURNS], chat_template=template, **variables)
    return str(rendered[0])


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, CHAT_TEMPLATE, UNUSUAL])
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_what_transformers_renders(template: str, prompt: bool) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = Renderer(template).render(
        {"messages": TURNS, "tools": None, "documents": None, "add_generation_prompt": prompt, **tokens}
    )
    assert ours == apart(template, add_generation_prompt=prompt, **tokens)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real tokenizers of ../shared")
def test_a_real_template_gives_the_prompt_of_transformers() -> None:
    from transformers import AutoTokenizer

    from hacpo.tokens.tokenizers import ChatTokenizer

    folder = SHARED / "tokenizers/qwen3"
    theirs = AutoTokenizer.from_pretrained(str(folder))
    turns = TURNS[:2]
    expected = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert ChatTokenizer(folder).render("p", turns) == expected


LOOP = "{% for x in range(99999) %}"
END = "{% endfor %}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOP * 3 + END * 3, "it takes more than"),
        ("{{ 'x' * 3000000000 }}", "it takes more"),
        ("{% set text = 'x' * 1000000 %}" + LOOP + "{{ text }}" + END, "it takes more"),
        ("{{ strftime_now('%Y' * 100000000) }}", "it takes more"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "without end"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{% if %}", "Expected an expression"),
        ('{{ "\\ud800" }}', "half a character"),
    ],
)
def test_a_hostile_template_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch, template: str, why: str) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 2.0)
    renderer = Renderer(template)
    with pytest.raises(RefusedError, match=why):
        renderer.render({"messages": TURNS})


def test_only_bounds_make_a_template_unusable() -> None:
    """A refusal may be about these messages alone, whatever its words are."""
    for template, beyond in (
        ("{{ raise_exception('no memory of answers') }}", False),
        ("{{ 'x' * 3000000000 }}", True),
    ):
        with pytest.raises(RefusedError) as refused:
            Renderer(template).render({"messages": TURNS})
        assert refused.value.beyond_bounds == beyond


def test_an_interrupted_prompt_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer("{{ messages }}")
    assert renderer.render({"messages": "first"}) == "first"
    waiting = rendering.select.select

    def interrupted(*arguments: object) -> None:
        waiting(*arguments)  # the reply is there, and not read
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rendering.select, "select", interrupted)
        with pytest.raises(KeyboardInterrupt):
            renderer.render({"messages": "second"})
    assert renderer.render({"messages": "third"}) == "third"


LIMITED = """
import ctypes, resource
ctypes.CDLL(None).prctl(24, 24)  # PR_CAPBSET_DROP, CAP_SYS_RESOURCE: root's processes may raise a limit else
resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
from hacpo.tokens.renderer import Renderer
print(Renderer("{{ messages }}").render({"messages": "rendered"}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_renders_where_a_cluster_limits_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout == "rendered\n"


def test_equal_templates_are_rendered_by_one_process_as_long_as_somebody_needs_it() -> None:
    first, second, other = (renderer_of(template) for template in ("{{ messages }}", "{{ messages }}", "other"))
    assert first.render({"messages": "one"}) == "one"
    process = first._process
    assert process is not None
    del first
    assert second.render({"messages": "two"}) == "two"
    assert second._process is process
    assert other is not second
    assert other._process is None
    del second
    assert process.poll() is not None
    assert renderer_of("{{ messages }}")._process is None


def test_the_process_goes_with_its_renderer_and_another_follows_a_lost_one() -> None:
    renderer = Renderer("{{ messages | length }}")
    assert renderer.render({"messages": TURNS}) == "4"
    process = renderer._process
    assert process is not None
    process.kill()
    process.wait()
    assert renderer.render({"messages": TURNS}) == "4"
    pid = renderer._process.pid  # type: ignore[union-attr]
    del renderer
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_model_folder_with_such_a_template_is_refused_in_one_line(
    cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 2.0)
    (project / "hostile.jinja").write_text(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    params = project / "pipelines/small/params.yaml"
    params.write_text(
        params.read_text().replace("{model: models/ada}", "{model: models/ada, chat_template: hostile.jinja}")
    )
    assert cli("resolve", "pipelines/small").code == 0
    result = cli("warmup", "pipelines/small", "--agent", "ada")
    assert result.code == 6
    assert "the chat template cannot be used: it takes more than 2 s or 256 MiB" in result.error


def test_no_secret_of_the_environment_is_near_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    renderer = Renderer("{{ messages }}")
    assert renderer.render({"messages": "x"}) == "x"
    assert renderer._process is not None
    given = Path(f"/proc/{renderer._process.pid}/environ")
    if given.exists():
        assert b"hunter2" not in given.read_bytes()
        assert b"PATH=" in given.read_bytes()
