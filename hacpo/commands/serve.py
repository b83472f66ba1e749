"""serve: one agent's vLLM server, for runs whose engine is vllm_server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from hacpo.pipeline.execution.command_line import main_of
from hacpo.pipeline.options import AgentOption, PipelineFolder

if TYPE_CHECKING:
    from hacpo.pipeline.project import Pipeline


def serve(
    pipeline: PipelineFolder,
    agent: AgentOption,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8000,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="Address to listen on. Clients on other machines need https or an SSH tunnel, so that nobody reads "
            "the key on the way.",
        ),
    ] = "127.0.0.1",
    no_key: Annotated[
        bool,
        typer.Option(
            "--no-key",
            help="Ask for no key: whoever reaches the port can make the server load any folder and run its worker's "
            "methods. For a network that is yours alone.",
        ),
    ] = False,
) -> None:
    """Start a vLLM server on an agent's newest checkpoint, until Ctrl-C. The run gives it new weights itself."""
    import contextlib
    import signal
    import socket

    from hacpo.artifacts.weights import whole_model
    from hacpo.engines.vllm.local import environment
    from hacpo.engines.vllm.refusals import check_vllm, this_machine
    from hacpo.engines.vllm.servers import KEY_VARIABLE
    from hacpo.errors import ModelError, SettingsError
    from hacpo.pipeline.execution.serving import check_port, issued_key, newest_checkpoint, running, server_command
    from hacpo.pipeline.project import Pipeline

    opened = Pipeline.open(pipeline)
    settings = opened.settings.engine
    if agent not in opened.settings.agents:
        known = ", ".join(opened.settings.agents)
        raise SettingsError(f"no agent {agent!r} in params.yaml", where=pipeline, expected=f"one of {known}")
    step, folder = newest_checkpoint(opened, agent)
    check_vllm(whole_model(folder), settings, this_machine())
    check_port(host, port)
    everywhere = host in ("0.0.0.0", "::")
    url = f"http://{'127.0.0.1' if everywhere else f'[{host}]' if ':' in host else host}:{port}"
    named = f"http://{socket.gethostname()}:{port}" if everywhere else url
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    print(f"{agent} at step {step}: starting a vLLM server on {folder}", flush=True)
    issued = contextlib.nullcontext(("", None)) if no_key else issued_key(opened.folder, agent, port)
    command = server_command(folder, agent, settings, host, port, guarded=not no_key)
    try:
        with contextlib.ExitStack() as work:
            key, key_file = work.enter_context(issued)
            # In its environment: a command line is for all to read.
            variables = {"VLLM_SERVER_DEV_MODE": "1", **environment(settings), KEY_VARIABLE: key}
            process = work.enter_context(running(command, variables, url, folder))
            print(f"{agent}: {named} is ready; Ctrl-C ends it", flush=True)
            for line in _what_to_do(opened, agent, named, key, key_file):
                print(line, flush=True)
            code = process.wait()
    except KeyboardInterrupt:
        print(f"{agent}: the server has ended", flush=True)
        return
    finally:
        signal.signal(signal.SIGTERM, before)
    raise ModelError(f"the vLLM server ended by itself, with exit code {code}", where=folder)


def _what_to_do(pipeline: Pipeline, agent: str, named: str, key: str, key_file: str | None) -> Iterator[str]:
    """Lines on how a run finds the server of an address, and which key it asks for."""
    from hacpo.engines.vllm.servers import KEY_VARIABLE, NAME, keeps_secrets
    from hacpo.pipeline.execution.serving import entry_of

    if key and key_file is None:
        yield f"{agent}: it asks for the key in {KEY_VARIABLE}, which `hacpo run` must be given too"
    if key and not keeps_secrets(named):
        yield f"{agent}: no key is sent there over plain http: name https or a tunnel's end instead"
    yield f"in {pipeline.folder / NAME}:    {entry_of(agent, named, key_file)}"
    if pipeline.settings.engine.name != "vllm_server":
        yield f"in {pipeline.folder / 'params.yaml'}:    engine: {{name: vllm_server}}"


if __name__ == "__main__":
    main_of(serve)
