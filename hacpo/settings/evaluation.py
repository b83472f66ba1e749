"""Held-out benchmarks, and what is reported of them."""

from __future__ import annotations

from pydantic import model_validator

from hacpo.settings.base import Section, knob
from hacpo.settings.series import AVERAGE, Metric, Series, leading


class Benchmark(Section):
    """One held-out measurement."""

    data: str = knob(doc="The `<set>/<split>` to answer.")
    samples: int = knob(1, doc="Responses per problem.", unit="responses", ge=1)
    temperature: float = knob(0.0, doc="0 is greedy.", ge=0)
    top_p: float = knob(1.0, doc="Nucleus mass.", gt=0, le=1)
    top_k: int | None = knob(
        None, doc="Draw from the so many likeliest tokens only; null: from all.", unit="tokens", ge=1
    )
    max_new_tokens: int | None = knob(
        None, doc="Longest response; null: as in the agent's `sampling`.", unit="tokens", ge=1
    )

    @property
    def drawn(self) -> str:
        """How responses are drawn, for readers."""
        return "greedy" if self.temperature == 0 else f"sampled at temperature {self.temperature:g}"


class EvaluationSettings(Section):
    """When and on what agents are evaluated."""

    every: int = knob(
        5, doc="Evaluate after every so many steps; also before the first and after the last.", unit="steps", ge=1
    )
    benchmarks: dict[str, Benchmark] = knob(doc="Name -> what to measure.")
    metrics: dict[str, list[str]] = knob(
        {},
        doc="Benchmark -> what to report of it, its headline first: `avg`, `best`, `maj`, `pass@k` "
        "(docs/evaluation.md). Of a benchmark that is not named: `avg`. Changing it samples nothing again.",
    )
    average: list[str] | None = knob(
        None,
        doc="Benchmarks whose headlines are averaged, each counting once (the paper's AVG); null: all, if there are "
        "several and no two have the same `data`.",
    )

    def reported(self, benchmark: str) -> tuple[Metric, ...]:
        """What is reported of a benchmark, its headline first."""
        samples = self.benchmarks[benchmark].samples
        return tuple(Metric.parse(text, samples) for text in self.metrics.get(benchmark, ["avg"]))

    @property
    def averaged(self) -> tuple[str, ...]:
        """The benchmarks of the average, in their order; empty where there is none."""
        if self.average is not None:
            return tuple(name for name in self.benchmarks if name in self.average)
        data = [benchmark.data for benchmark in self.benchmarks.values()]
        return tuple(self.benchmarks) if len(data) > 1 and len({*data}) == len(data) else ()

    @property
    def series(self) -> tuple[Series, ...]:
        """What is followed over steps: every benchmark's headline, what else is reported of them, the average."""
        headlines, others = [], []
        for name in self.benchmarks:
            first, *rest = self.reported(name)
            headlines.append(Series(name, name if first.kind == "avg" else f"{name} {first.label}", ((name, first),)))
            others += [Series(f"{name}.{metric.label}", f"{name} {metric.label}", ((name, metric),)) for metric in rest]
        averaged = tuple(part for headline in headlines if headline.name in self.averaged for part in headline.parts)
        if averaged:
            others.append(Series(AVERAGE, f"average of {len(averaged)} benchmarks", averaged))
        return (*headlines, *others)

    @property
    def headlines(self) -> tuple[str, ...]:
        """What a step can be the best by: names of benchmarks, and of the average if there is one."""
        return (*self.benchmarks, *([AVERAGE] if self.averaged else []))

    @property
    def leading(self) -> Series | None:
        """See `series.leading`: the average, else the first benchmark's headline."""
        return leading(self.series)

    @model_validator(mode="after")
    def _metrics_fit(self) -> EvaluationSettings:
        known = ", ".join(self.benchmarks)
        if AVERAGE in self.benchmarks:
            raise ValueError(f"benchmarks: {AVERAGE!r} cannot be a name; it stands for the mean over benchmarks")
        for name, listed in self.metrics.items():
            if name not in self.benchmarks:
                raise ValueError(f"metrics: {name!r} is not in evaluation.benchmarks ({known})")
            try:
                metrics = self.reported(name)
            except ValueError as error:
                raise ValueError(f"metrics.{name}: {error}") from None
            if not metrics or len({*metrics}) < len(metrics):
                raise ValueError(f"metrics.{name}: name at least one metric, and each once, found {listed}")
            repeated = next((metric.label for metric in metrics if metric.kind != "avg" and metric.k > 1), None)
            if repeated is not None and self.benchmarks[name].temperature == 0:
                raise ValueError(
                    f"metrics.{name}: {repeated} compares responses that differ, but at temperature 0 they are all the "
                    f"same; set evaluation.benchmarks.{name}.temperature"
                )
        if self.average is not None:
            unknown = next((name for name in self.average if name not in self.benchmarks), None)
            if unknown is not None:
                raise ValueError(f"average: {unknown!r} is not in evaluation.benchmarks ({known})")
            if len({*self.average}) < len(self.average) or len(self.average) == 1:
                raise ValueError(f"average: name several benchmarks, each once, or none, found {self.average}")
        return self
