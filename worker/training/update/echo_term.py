"""ECHO's side of one trainer: which tokens, how much, and whether it does harm."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

import torch
from torch.nn.utils.rnn import pad_sequence

from dressage.sandbox.patterns import compile_pattern
from dressage.spec.event import EventType, TokenRole
from dressage.spec.training import TrainingSpec
from worker.training.rollout.rollout import Rollout
from worker.training.update import ranks
from worker.training.update.collapse import CUT, CollapseDetector
from worker.training.update.echo import denominator, echo_shares
from worker.wire.run_dir import RunDirectory

STATE = "echo_state.json"
PATTERN_SECONDS = 5.0


class EchoTerm:
    """Says what each token adds to the environment's loss."""

    def __init__(self, training: TrainingSpec, run: RunDirectory) -> None:
        assert training.echo
        spec = training.echo
        self._spec, self._run = spec, run
        self._horizon = training.max_completion_length
        self._mask_truncated = training.mask_truncated_completions
        self._detector = CollapseDetector()
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

    def shares(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """What each token's −log p is multiplied by, (B, T): their sum is the loss of all.

        Processes average their gradients, so each has its part as many times over.
        """
        weights_BT = self.weights(rollouts)
        own = denominator(weights_BT, self._spec.normalization, self._horizon)
        total = sum(ranks.all_of([own])) / ranks.count()
        return echo_shares(weights_BT, self._spec.normalization, total)

    def end_step(
        self, *, step: int, rewards: Sequence[float], entropy: float, cross_entropy: float
    ) -> None:
        """Watch for collapse; lower the coefficient and say so.

        Args:
            step: The optimizer step that has ended.
            rewards: Of the step, of every process.
            entropy: Mean entropy of the step's actions, of every process.
            cross_entropy: Mean −log p of what the environment wrote, of every process.
        """
        if not (self._spec.guardrail and self.coeff > 0 and rewards):
            return
        observed = self._detector.observe(
            loss=cross_entropy, reward=fmean(rewards), spread=pstdev(rewards), entropy=entropy
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
