"""One pipeline's estimate: everything that `hacpo estimate` prints, as numbers with what they rest on."""

from __future__ import annotations

from dataclasses import dataclass

from hacpo.errors import SettingsError
from hacpo.pipeline.project import Pipeline
from hacpo.settings.engine import sampling_engine
from hacpo.settings.root import Settings
from hacpo.tools.estimate import disk as disks
from hacpo.tools.estimate.arithmetic import Flops, agent_flops
from hacpo.tools.estimate.disk import Disk
from hacpo.tools.estimate.known_models import agent_shape
from hacpo.tools.estimate.lengths import ASSUMED_SHARE, Lengths, Measured, Problems, look_at, measure, prompt_tokens
from hacpo.tools.estimate.memory import KNOWN_ARCHITECTURES, Batch, Part, total
from hacpo.tools.estimate.phases import phases
from hacpo.tools.estimate.shapes import ModelShape
from hacpo.tools.estimate.throughput import Hardware, Seconds, Speeds, agent_seconds, measured_speeds
from hacpo.tools.estimate.workload import Work, workload


@dataclass(frozen=True)
class AgentEstimate:
    """One agent.

    Attributes:
        model: as params.yaml names it, or `made from scratch`.
        training: lengths of its rollouts.
        memory: phase (`sampling`, `rescoring`, `training`) -> parts of the largest process, in bytes.
        micro_batch: the largest forward pass of training.
        host: bytes of the first machine's own memory while its first process reads the model in float32, to shard it;
            0 where nothing is sharded.
        seconds: at the speeds of the throughput table; None where it has none for the model.
        speeds: of its own finished steps; None before there is one.
    """

    model: str
    shape: ModelShape
    parameters: int
    trained: int
    training: Lengths
    memory: dict[str, list[Part]]
    micro_batch: Batch
    host: float
    flops: Flops
    seconds: Seconds | None
    speeds: Speeds | None


@dataclass(frozen=True)
class RunEstimate:
    """One pipeline.

    Attributes:
        engine: what samples.
        hardware: its name in the throughput table.
        step_seconds, run_seconds: of all agents, from the table; None unless it has every agent's model.
        measured_seconds: of the whole run at the pace of its own finished steps; None without any.
        notes: what the numbers leave out or rest on.
    """

    run: str
    settings: Settings
    agents: dict[str, AgentEstimate]
    work: Work
    disk: Disk
    engine: str
    hardware: str
    device: Hardware
    step_seconds: float | None
    run_seconds: float | None
    measured_seconds: float | None
    notes: list[str]

    def peak(self) -> dict[str, float]:
        """Phase -> bytes of its largest process."""
        phases = next(iter(self.agents.values())).memory
        return {phase: max(total(agent.memory[phase]) for agent in self.agents.values()) for phase in phases}

    @property
    def flops(self) -> float:
        """Of the whole run."""
        each = [agent.flops for agent in self.agents.values()]
        return sum(self.work.steps * flops.step + self.work.evaluations * flops.evaluation for flops in each)


def default_hardware(settings: Settings) -> str:
    """The table's entry where the user names none."""
    return "cpu" if settings.engine.device == "cpu" else "h100"


def speeds_of(run: RunEstimate) -> dict[str, Speeds]:
    """Model (the agent's name, if it is made from scratch) -> its speeds in the finished steps of a run.

    Raises:
        SettingsError: an agent has finished none.
    """
    speeds = {run.settings.agents[name].model or name: agent.speeds for name, agent in run.agents.items()}
    if None in speeds.values():
        raise SettingsError(
            "this run has no finished step to take speeds from", where=run.run, remedy="run a step of it first"
        )
    return {model: each for model, each in speeds.items() if each is not None}


def estimate(pipeline: Pipeline, name: str, hardware: Hardware, *, mean_response: float | None = None) -> RunEstimate:
    """Estimate a run from its settings, and from its own finished steps where it has some.

    Args:
        name, hardware: the entry of the throughput table.
        mean_response: mean response in tokens, instead of what is measured or assumed.

    Raises:
        ModelError: a model's shape cannot be known.
        DataError: a problem file is not usable.
    """
    settings = pipeline.settings
    shapes = {agent: agent_shape(agent, own, pipeline.root) for agent, own in settings.agents.items()}
    problems = {key: look_at(key, source, pipeline.root) for key, source in settings.data.sets.items()}
    answered = {
        key: (problems[benchmark.data].count or 0) * benchmark.samples
        for key, benchmark in settings.evaluation.benchmarks.items()
    }
    measured = {agent: measure(pipeline.layout, settings, agent, answered) for agent in settings.agents}
    training = {
        agent: _training(settings, agent, shapes[agent], problems[settings.data.train], measured[agent], mean_response)
        for agent in settings.agents
    }
    benchmarks = {
        agent: _benchmarks(settings, agent, shapes[agent], problems, answered, measured[agent], mean_response)
        for agent in settings.agents
    }
    evaluations = sum(settings.evaluated(step) for step in range(settings.steps + 1))
    work = workload(settings, training, benchmarks, evaluations=evaluations)
    # vLLM counts as installed.
    engine = sampling_engine(settings.engine, on_gpu=hardware.memory_gib is not None, vllm="gpu")
    trained = {
        agent: shapes[agent].trained(own.adapter, f"agents.{agent}.adapter") for agent, own in settings.agents.items()
    }
    agents = {}
    for agent, own in settings.agents.items():
        speeds = hardware.models.get(own.model or agent)
        batch, parts = phases(
            settings,
            hardware,
            engine,
            shapes[agent],
            trained[agent],
            own.adapter is not None,
            training[agent],
            training,
        )
        agents[agent] = AgentEstimate(
            model=own.model or "made from scratch",
            shape=shapes[agent],
            parameters=shapes[agent].parameters,
            trained=trained[agent],
            training=training[agent],
            memory=parts,
            micro_batch=batch,
            host=4.0 * shapes[agent].parameters if settings.fsdp else 0.0,
            flops=agent_flops(settings, shapes[agent], work.agents[agent]),
            seconds=None if speeds is None else agent_seconds(speeds, work.agents[agent]),
            speeds=measured_speeds(work.agents[agent], measured[agent]),
        )
    at_once = min(hardware.agents_at_once, len(agents))
    step_seconds, run_seconds = _at_speed(work, [agent.seconds for agent in agents.values()], at_once)
    own_pace = [
        None if agent.speeds is None else agent_seconds(agent.speeds, work.agents[name])
        for name, agent in agents.items()
    ]
    return RunEstimate(
        run=pipeline.run,
        settings=settings,
        agents=agents,
        work=work,
        disk=disks.disk(settings, work.agents, shapes, trained, evaluations=evaluations),
        engine=engine,
        hardware=name,
        device=hardware,
        step_seconds=step_seconds,
        run_seconds=run_seconds,
        measured_seconds=_at_speed(work, own_pace, at_once)[1],
        notes=_notes(settings, shapes, problems, mean_response, training),
    )


def _training(
    settings: Settings,
    agent: str,
    shape: ModelShape,
    problems: Problems,
    measured: Measured,
    mean_response: float | None,
) -> Lengths:
    """Lengths of an agent's rollouts."""
    own = settings.agents[agent]
    longest = own.sampling.max_new_tokens
    mean, most = prompt_tokens(problems, own.prompt, shape.vocabulary)
    response = mean_response or (measured.response if measured.steps else longest * ASSUMED_SHARE)
    return Lengths(most, longest, measured.prompt if measured.steps else mean, min(response, longest), measured.steps)


def _benchmarks(
    settings: Settings,
    agent: str,
    shape: ModelShape,
    problems: dict[str, Problems],
    answered: dict[str, int],
    measured: Measured,
    mean_response: float | None,
) -> dict[str, tuple[int, Lengths]]:
    """Benchmark -> responses of one evaluation, and their lengths."""
    own = settings.agents[agent]
    result = {}
    for name, benchmark in settings.evaluation.benchmarks.items():
        longest = benchmark.max_new_tokens or own.sampling.max_new_tokens
        mean, most = prompt_tokens(problems[benchmark.data], own.prompt, shape.vocabulary)
        response = mean_response or measured.benchmarks.get(name, longest * ASSUMED_SHARE)
        result[name] = (answered[name], Lengths(most, longest, mean, min(response, longest), measured.steps))
    return result


def _at_speed(work: Work, seconds: list[Seconds | None], at_once: int) -> tuple[float | None, float | None]:
    """Seconds of a step and of the run; None unless every agent's are known."""
    known = [each for each in seconds if each is not None]
    if len(known) < len(seconds):
        return None, None
    step, evaluation = (sum(getattr(each, part) for each in known) / at_once for part in ("step", "evaluation"))
    return step, work.steps * step + work.evaluations * evaluation


def _notes(
    settings: Settings,
    shapes: dict[str, ModelShape],
    problems: dict[str, Problems],
    mean_response: float | None,
    training: dict[str, Lengths],
) -> list[str]:
    notes = []
    steps = max(lengths.measured for lengths in training.values())
    if mean_response:
        notes.append(f"mean response: {mean_response:g} tokens, as given")
    elif steps:
        notes.append(f"mean lengths: measured on {steps} finished steps of this run")
    else:
        notes.append(
            f"mean response: assumed to be {ASSUMED_SHARE:g} of the longest; --mean-response-tokens says better"
        )
    if not problems[settings.data.train].there and not steps:
        notes.append(f"{settings.data.train} is not there: prompts are taken to be as long as MATH's")
    if any(agent.tiny is not None for agent in settings.agents.values()):
        notes.append("the warm start of agents made from scratch is left out of the time")
    if any(agent.warmup is not None for agent in settings.agents.values()):
        notes.append("the warm-up of models before step 0 is left out of the time")
    used = {benchmark.data for benchmark in settings.evaluation.benchmarks.values()}
    notes += [
        f"{name} is not there and its size is not known: its evaluation is left out"
        for name in sorted(used)
        if problems[name].count is None
    ]
    for agent, shape in shapes.items():
        if shape.architecture not in KNOWN_ARCHITECTURES:
            notes.append(f"{agent}: the memory of architecture {shape.architecture} is estimated as if it were llama")
        if shape.context is not None and training[agent].most > shape.context:
            notes.append(
                f"{agent}: the longest prompt and response ({training[agent].most} tokens) exceed its context "
                f"of {shape.context}"
            )
    return notes
