"""AdamW's schedule, clipping and state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hacpo.engines.training import optimizer as module
from hacpo.engines.training.optimizer import Optimizer, learning_rate
from hacpo.errors import ArtifactError
from hacpo.settings.training import OptimizerSettings


def rates(**settings: object) -> list[float]:
    chosen = OptimizerSettings.model_validate({"learning_rate": 1.0, **settings})
    return [round(learning_rate(chosen, update), 6) for update in range(1, 8)]


def test_learning_rate_by_update() -> None:
    assert rates() == [1.0] * 7
    assert rates(warmup_updates=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    # From 1 at the first update to 0.2 at the fifth, and no further: 1 - 0.8 * (0, 1/4, 2/4, 3/4, 1).
    assert rates(schedule="linear", schedule_updates=5, final_rate=0.2) == [1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]
    # Two updates of warm-up, then half a cosine over three: (1 + cos(pi x)) / 2 at x = 1/3, 2/3, 1 is .75, .25, 0.
    assert rates(schedule="cosine", schedule_updates=5, final_rate=0.0, warmup_updates=2) == [
        *(0.5, 1.0, 0.75, 0.25, 0.0, 0.0, 0.0)
    ]


def parameters() -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.full((3,), value)) for name, value in (("a", 1.0), ("b", -2.0))}


def step(optimizer: Optimizer, scale: float) -> float:
    optimizer.zero_grad()
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.tensor([3.0, 0.0, 4.0]) * scale
    return optimizer.step()


def test_gradients_are_scaled_to_the_norm() -> None:
    # Two parameters of norm 5 each: 5 * sqrt(2); scaled to 1, the first component is 3 / (5 sqrt 2).
    optimizer = Optimizer(parameters(), OptimizerSettings(learning_rate=0.1, max_grad_norm=1.0))
    assert step(optimizer, 1.0) == pytest.approx(5 * 2**0.5, rel=1e-6)
    assert float(optimizer.parameters["a"].grad[0]) == pytest.approx(3 / (5 * 2**0.5), rel=1e-5)  # type: ignore[index]
    assert step(optimizer, 0.1) == pytest.approx(0.5 * 2**0.5, rel=1e-6)
    assert float(optimizer.parameters["a"].grad[0]) == pytest.approx(0.3)  # type: ignore[index]


@pytest.mark.parametrize("file_bytes", [4 << 30, 12, 30])
def test_a_state_in_one_file_or_many_goes_on_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int
) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", file_bytes)
    settings = OptimizerSettings(learning_rate=0.1)
    through = Optimizer(parameters(), settings, masters=True)
    step(through, 1.0)
    through.save(tmp_path / "trainer")
    files = sorted(path.name for path in (tmp_path / "trainer").glob("*.safetensors"))
    # Two moments and a master of two parameters of 12 bytes: six tensors, one or two of them to a file.
    assert len(files) == {4 << 30: 1, 12: 6, 30: 3}[file_bytes]
    later = Optimizer(parameters(), settings, masters=True)
    later.load(tmp_path / "trainer")
    for optimizer in (through, later):
        step(optimizer, 0.5)
    for name, parameter in through.parameters.items():
        assert torch.equal(parameter, later.parameters[name])
    if len(files) > 1:
        (tmp_path / "trainer" / files[1]).unlink()
        with pytest.raises(ArtifactError, match="the optimizer state cannot be used"):
            later.load(tmp_path / "trainer")


def test_a_large_gradient_is_never_held_in_float64_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares of 3, 4 and 12, two at a time: the norm is 13, and clipping to 1 divides by it."""
    monkeypatch.setattr(module, "_SQUARED", 2)
    widths: list[int] = []
    double = torch.Tensor.double
    monkeypatch.setattr(torch.Tensor, "double", lambda self: widths.append(self.numel()) or double(self))
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 4.0, 12.0])
    one = Optimizer({"weight": parameter}, OptimizerSettings(learning_rate=0.1, max_grad_norm=1.0))
    assert one._clip() == 13.0
    assert widths == [2, 1]
    assert parameter.grad.tolist() == pytest.approx([3 / 13, 4 / 13, 12 / 13], rel=1e-6)


def test_a_part_of_a_tensor_is_updated_as_the_whole_is() -> None:
    """Sharding must not change a bit. (A fused AdamW's second moment would: it rounds a rest another way.)"""
    values, gradient = torch.randn(2, 1003, generator=torch.Generator().manual_seed(0))

    def updated(cut: slice) -> torch.Tensor:
        parameter = torch.nn.Parameter(values[cut].clone())
        one = Optimizer(
            {"weight": parameter}, OptimizerSettings(learning_rate=0.1, weight_decay=0.1, max_grad_norm=1e9)
        )
        for scale in (1.0, -0.3, 0.7):
            parameter.grad = gradient[cut] * scale
            one.step()
        state = one._adamw.state[parameter]
        return torch.stack([parameter.detach(), state["exp_avg"], state["exp_avg_sq"]])

    parts = [updated(slice(0, 335)), updated(slice(335, None))]
    assert torch.equal(torch.cat(parts, dim=1), updated(slice(None)))
