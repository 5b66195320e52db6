"""What happens between optimizer steps."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from dressage.spec.event import EventType
from dressage.spec.status import Reason
from worker.training.process.failures import RunFailure
from worker.wire.run_dir import RunDirectory

MAX_SKIPPED = 20  # a scaler starts at 2^16, and halves


class EverySteps(TrainerCallback):
    """Calls a function every so many optimizer steps and after the last. True stops the run."""

    def __init__(self, every: int, action: Callable[[int], bool | None]) -> None:
        self._every, self._action = every, action

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Call it if it is time."""
        if state.global_step % self._every == 0 or state.global_step >= state.max_steps:
            control.should_training_stop |= bool(self._action(state.global_step))


class FiniteGradients(TrainerCallback):
    """Ends the run before a gradient that is not a number reaches the weights.

    In float16 gradients are scaled up, and a scale that was too large is lowered: such a step is
    skipped by PyTorch's scaler, and counted here. Too many in a row are a failure.

    Args:
        note: Takes the name and the value of a metric.
    """

    def __init__(self, note: Callable[[str, float], None]) -> None:
        self._note = note
        self._skipped = 0

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Look at all gradients at once."""
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        finite = not norms or bool(torch.isfinite(torch.stack(norms)).all())
        self._skipped = 0 if finite else self._skipped + 1
        scaled = args.fp16 and self._skipped < MAX_SKIPPED
        if args.fp16:
            self._note("optimizer/skipped_steps", float(not finite))
        if not finite and not scaled:
            raise RunFailure(
                Reason.NUMERICAL_ERROR,
                f"a gradient is not a number at step {state.global_step + 1}; lower the learning "
                "rate, or train in float32",
            )


class PauseWhen(TrainerCallback):
    """Stops a run at the end of a step, with a checkpoint to continue from."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop if it is wanted, and not over anyway."""
        if state.global_step < state.max_steps and self._wanted():
            control.should_save = control.should_training_stop = True


class EventCallback(TrainerCallback):
    """Turns TRL's log lines into events."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._steps_here = 0
        self._began = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Steps are timed from here."""
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say how far the run is; the last steps have a log line, whatever logging_steps says."""
        self._steps_here += 1
        control.should_log |= state.global_step >= state.max_steps
        self._run.emit(
            EventType.PROGRESS,
            step=state.global_step,
            total_steps=state.max_steps,
            seconds_per_step=(time.monotonic() - self._began) / self._steps_here,
        )

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Write the metrics of the last few steps."""
        values = {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in (logs or {}).items()
            if isinstance(value, int | float | None) and not name.startswith("rewards/")
        }
        if "loss" in values:  # also of a step whose groups were all dropped
            self._run.emit(EventType.METRICS, step=state.global_step, values=values)
