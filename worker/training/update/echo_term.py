"""ECHO's side of one trainer: which tokens, how much, and whether it does harm."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from dressage.sandbox.patterns import compile_pattern
from dressage.spec.event import EventType, TokenRole
from dressage.spec.training import TrainingSpec
from worker.training.model import Head
from worker.training.rollout.rollout import Rollout
from worker.training.update import ranks
from worker.training.update.collapse import CUT, CollapseDetector
from worker.training.update.echo import (
    cross_entropy_at_one,
    denominator,
    echo_cross_entropy,
)
from worker.wire.run_dir import RunDirectory

STATE = "echo_state.json"
PATTERN_SECONDS = 5.0


class EchoTerm:
    """Adds the environment's cross-entropy to a loss."""

    def __init__(self, training: TrainingSpec, run: RunDirectory) -> None:
        assert training.echo
        spec = training.echo
        self._spec, self._temperature, self._run = spec, training.temperature, run
        self._horizon = training.max_completion_length
        self._mask_truncated = training.mask_truncated_completions
        self._detector = CollapseDetector()
        self._step_losses: list[float] = []
        self.coeff = spec.coeff

    def weights(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """Weight of every completion token, (B, T): of what the environment wrote, else 0.

        Rollouts that teach nothing because they are cut or lost teach nothing here either.
        """
        return pad_sequence([torch.tensor(self._row(e)) for e in rollouts], batch_first=True)

    def _row(self, rollout: Rollout) -> list[float]:
        if rollout.is_masked(truncated=self._mask_truncated):
            return [0.0] * len(rollout.roles)
        ignored = [self._ignored(body) for _, body in rollout.observed]
        row = []
        for role, origin in zip(rollout.roles, rollout.origins, strict=True):
            if role is TokenRole.SCAFFOLD:
                weight = float(self._spec.include_scaffold)
            elif role is not TokenRole.OBSERVATION:
                weight = 0.0
            elif origin is None:
                weight = 1.0
            else:
                number, at = origin
                skip = any(start <= at < stop for start, stop in ignored[number])
                weight = 0.0 if skip else self._tool_weight(rollout.observed[number][0])
            row.append(weight)
        return row

    def _tool_weight(self, tool: str) -> float:
        return self._spec.tool_weights.get(tool, 1.0)

    def _ignored(self, body: str) -> list[tuple[int, int]]:
        """Where the lines of a result lie that are not to be predicted.

        Some templates write results as JSON strings, where a new line is two characters.
        """
        if self._spec.ignore_lines is None:
            return []
        pattern = compile_pattern(self._spec.ignore_lines)
        spans, start = [], 0
        for line in re.split(r"(?<=\n)|(?<=\\n)", body):
            if pattern.search(line, timeout=PATTERN_SECONDS):
                spans.append((start, start + len(line)))
            start += len(line)
        return spans

    def total(self, weights_BT: torch.Tensor) -> float:
        """The denominator of a generation batch."""
        return denominator(weights_BT, self._spec.normalization, self._horizon)

    def term(
        self,
        logps_BT: torch.Tensor,
        hidden_BTH: torch.Tensor | None,
        inputs: dict[str, Any],
        head: Head,
        share: float,
    ) -> tuple[torch.Tensor, float]:
        """The weighted term of one micro-batch, and its plain token mean for the curve.

        Args:
            logps_BT: The trainer's log-probabilities, at the sampling temperature.
            hidden_BTH: Hidden states that predict the completion tokens; needed unless the sampling
                temperature is 1.
            inputs: The micro-batch, with `echo_weights` and `echo_total`.
            head: The language-model head.
            share: Part of the generation batch that one optimizer step covers, times the number of
                processes that add to it.
        """
        weights_BT = inputs["echo_weights"]
        selected = weights_BT > 0
        with torch.set_grad_enabled(self.coeff > 0):
            if hidden_BTH is None:
                cross_entropy_BT = -logps_BT
            else:
                values = cross_entropy_at_one(
                    hidden_BTH[selected], inputs["completion_ids"][selected], head
                )
                cross_entropy_BT = torch.zeros_like(logps_BT).masked_scatter(
                    selected, values.to(logps_BT.dtype)
                )
            loss = echo_cross_entropy(
                cross_entropy_BT,
                weights_BT,
                self._spec.normalization,
                float(inputs["echo_total"]) * share,
            )
        count = int(selected.sum())
        mean = float(cross_entropy_BT.detach()[selected].mean()) if count else float("nan")
        if count:
            self._step_losses.append(mean)
        return self.coeff * loss, mean

    @property
    def needs_hidden(self) -> bool:
        """Whether the trainer's own log-probabilities are tempered."""
        return self._temperature != 1.0

    def end_step(self, *, step: int, rewards: Sequence[float], entropy: float) -> None:
        """Watch for collapse; lower the coefficient and say so.

        Args:
            step: The optimizer step that has ended.
            rewards: Of the step, of every process.
            entropy: Mean entropy of the step's actions, of every process.
        """
        losses, self._step_losses = ranks.all_of(self._step_losses), []
        if not (self._spec.guardrail and self.coeff > 0 and losses and rewards):
            return
        observed = self._detector.observe(
            loss=fmean(losses), reward=fmean(rewards), spread=pstdev(rewards), entropy=entropy
        )
        if observed:
            before, self.coeff = self.coeff, self.coeff * CUT
            self._run.emit(
                EventType.WARNING,
                code="echo_collapse",
                step=step,
                message=f"the environment is predicted better while reward and action entropy "
                f"collapse; training.echo.coeff lowered from {before:g} to {self.coeff:g}",
            )

    def save(self, checkpoint: Path) -> None:
        """Put the coefficient and the detector's memory into a checkpoint."""
        state = {"coeff": self.coeff, "detector": self._detector.state()}
        (checkpoint / STATE).write_text(json.dumps(state))

    def restore(self, checkpoint: Path) -> None:
        """Take them up again."""
        if (checkpoint / STATE).is_file():
            state = json.loads((checkpoint / STATE).read_bytes())
            self.coeff = state["coeff"]
            self._detector = CollapseDetector(**state["detector"])
