"""One optimizer step's gradient, from rows: forward and backward passes over micro-batches."""

import gc
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from peft import PeftModel

from worker.training.update.log_probs import TokenScorer
from worker.training.update.micro_batches import MicroBatch, micro_batches
from worker.training.update.policy_loss import MOST, policy_loss
from worker.training.update.rows import Row

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateOptions:
    """How rows go through the model.

    Attributes:
        tokens: Of one micro-batch at most, padding included.
        temperature: That rollouts are drawn at.
        beta: Weight of the divergence from the reference model.
        corrected: Whether losses are weighted by trainer's over sampler's probabilities.
        widths: Of compiled passes; none: nothing is compiled.
    """

    tokens: int
    temperature: float
    beta: float = 0.0
    corrected: bool = False
    widths: tuple[int, ...] = ()


@dataclass
class UpdateFigures:
    """What one update has seen, of this process. Sums over tokens, with their counts."""

    loss: float = 0.0
    echo_loss: float = 0.0
    tokens: int = 0
    entropy: float = 0.0
    divergence: float = 0.0
    observed: int = 0
    cross_entropy: float = 0.0
    known: int = 0
    gap: float = 0.0
    largest_gap: float = 0.0
    weight: float = 0.0
    least_weight: float = 0.0
    largest_weight: float = 0.0
    clipped: int = 0
    rows: int = 0
    left_out: int = 0
    passes: int = 0
    padding: int = 0
    processed: int = 0


@dataclass
class _Sums:
    """Tensors of micro-batches, read once at the end: reading one waits for the card."""

    values: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            self.values.setdefault(name, []).append(value.detach())

    def total(self, name: str) -> float:
        found = self.values.get(name)
        return float(torch.stack(found).sum()) if found else 0.0

    def most(self, name: str) -> float:
        found = self.values.get(name)
        return float(torch.stack(found).max()) if found else 0.0


class PolicyUpdate:
    """Makes the gradient of GRPO's loss, and of ECHO's, for the rows of one optimizer step.

    Args:
        model: The policy, an adapter's layers inside.
        accelerator: Accelerate's, which scales and synchronizes gradients.
        options: How.
        reference: The reference model where it is one of its own; an adapter is switched off.

    Attributes:
        options: How.
    """

    def __init__(
        self, model: Any, accelerator: Any, options: UpdateOptions, reference: Any = None
    ) -> None:
        self._unwrapped, self._accelerator, self.options = model, accelerator, options
        self._scorer = TokenScorer(model, compiled=bool(options.widths))
        self._reference = reference
        self._reference_scorer = TokenScorer(reference) if reference is not None else self._scorer
        self._tokens = options.tokens

    def __call__(self, model: Any, rows: Sequence[Row], *, coeff: float = 0.0) -> UpdateFigures:
        """Add the gradient of all rows to the model's; read nothing of it.

        Rows that cannot move the policy and observe nothing that is learned from are left out. Out
        of memory, it is tried again with half the tokens in each pass, and stays at that.

        Args:
            model: As it is trained, whatever is wrapped around it.
            rows: Of this process.
            coeff: ECHO's; with 0 the environment's loss is looked at, and not learned from.
        """
        while True:
            try:
                return self._once(model, rows, coeff)
            except torch.OutOfMemoryError:
                # Compiled passes have their shapes; other processes would wait for this one.
                fixed = self.options.widths or self._accelerator.num_processes > 1
                if fixed or self._tokens <= max(len(row.ids) for row in rows):
                    raise
                before, self._tokens = self._tokens, self._tokens // 2
                log.warning(
                    "the memory was full in a pass over %d tokens; tried again with %d",
                    *(before, self._tokens),
                )
            for parameter in model.parameters():
                parameter.grad = None
            gc.collect()
            torch.cuda.empty_cache()

    def _once(self, model: Any, rows: Sequence[Row], coeff: float) -> UpdateFigures:
        to_reference = self.options.beta > 0
        learning = [
            row.moves_policy(to_reference=to_reference) or (coeff > 0 and row.observes)
            for row in rows
        ]
        moving = [row for row, learns in zip(rows, learning, strict=True) if learns]
        watched = [
            row
            for row, learns in zip(rows, learning, strict=True)
            if not learns and coeff == 0 and row.observes
        ]
        figures = UpdateFigures(rows=len(rows), left_out=len(rows) - len(moving))
        sums = _Sums()
        learned = moving or rows[:1]  # one whose gradient is zero: every process has its passes
        passes = self._micro_batches(learned)
        for number, micro in enumerate(passes):
            last = number == len(passes) - 1
            chosen = [learned[at] for at in micro.rows]
            together = nullcontext() if last else self._accelerator.no_sync(model)
            with together:
                loss = self._loss(model, chosen, micro, coeff, (figures, sums))
                self._accelerator.backward(loss)
        with torch.no_grad():
            for micro in self._micro_batches(watched):
                self._loss(model, [watched[at] for at in micro.rows], micro, 0.0, (figures, sums))
        figures.passes = len(passes)
        figures.processed = sum(micro.width * micro.height for micro in passes)
        figures.padding = figures.processed - sum(len(row.ids) for row in learned)
        return _read(figures, sums)

    def _micro_batches(self, rows: Sequence[Row]) -> list[MicroBatch]:
        lengths = [len(row.ids) for row in rows]
        return micro_batches(lengths, self._tokens, self.options.widths)

    def _loss(
        self,
        model: Any,
        rows: Sequence[Row],
        micro: MicroBatch,
        coeff: float,
        seen: tuple[UpdateFigures, _Sums],
    ) -> torch.Tensor:
        figures, sums = seen
        batch = _tensors(rows, micro, self._accelerator.device)
        hidden = self._scorer.hidden(model, batch.ids)
        labels, options = batch.ids[:, 1:], self.options
        # Where they lie is known without the card: asking it would wait for it.
        acted_NH, acted_N = hidden[batch.acted], labels[batch.acted]
        scored = self._scorer.score(acted_NH, acted_N, options.temperature)
        gaps_N = scored.logps_N.detach() - batch.logps_N
        terms = policy_loss(
            scored.logps_N,
            batch.advantages_N,
            batch.shares_N,
            gaps_N=gaps_N if options.corrected else None,
            reference_N=self._of_reference(batch) if options.beta else None,
            beta=options.beta,
        )
        loss = terms.loss
        sums.add(loss=loss, entropy=scored.entropies_N.sum())
        figures.tokens += len(acted_N)
        figures.known += batch.known
        if batch.known:
            sums.add(gap=gaps_N.abs().nansum(), largest_gap=gaps_N.abs().nan_to_num(0.0).max())
        if terms.weights_N is not None and len(acted_N):
            weights_N = terms.weights_N
            sums.add(weight=weights_N.sum(), least=-weights_N.min(), largest=weights_N.max())
            sums.add(clipped=(gaps_N.nan_to_num(0.0).exp() > MOST).float().sum())
        if terms.divergence_N is not None:
            sums.add(divergence=terms.divergence_N.sum())
        if len(batch.observed_shares_M):
            with torch.set_grad_enabled(torch.is_grad_enabled() and coeff > 0):
                observed = self._scorer.score(
                    hidden[batch.observed], labels[batch.observed], temperature=1.0
                )
                echo = coeff * -(observed.logps_N * batch.observed_shares_M).sum()
            figures.observed += len(batch.observed_shares_M)
            sums.add(echo=echo, cross_entropy=-observed.logps_N.sum())
            if coeff > 0:  # not even a zero is added without: plain GRPO to the bit
                loss = loss + echo
        return loss

    def _of_reference(self, batch: "_Batch") -> torch.Tensor:
        with torch.no_grad(), self._as_reference() as model:
            hidden = self._reference_scorer.hidden(model, batch.ids)
            labels = batch.ids[:, 1:]
            return self._reference_scorer.score(
                hidden[batch.acted], labels[batch.acted], self.options.temperature
            ).logps_N

    @contextmanager
    def _as_reference(self) -> Iterator[Any]:
        if self._reference is not None:
            yield self._reference
            return
        assert isinstance(self._unwrapped, PeftModel)
        off: AbstractContextManager[None] = self._unwrapped.disable_adapter()
        with off:
            yield self._unwrapped


@dataclass(frozen=True)
class _Batch:
    """A micro-batch as tensors: R rows of W tokens, N action tokens, M observed ones."""

    ids: torch.Tensor
    acted: tuple[torch.Tensor, torch.Tensor]
    advantages_N: torch.Tensor
    shares_N: torch.Tensor
    logps_N: torch.Tensor
    known: int
    observed: tuple[torch.Tensor, torch.Tensor]
    observed_shares_M: torch.Tensor


def _tensors(rows: Sequence[Row], micro: MicroBatch, device: Any) -> _Batch:
    ids = np.zeros((micro.height, micro.width), dtype=np.int64)
    acted, advantages, shares, logps = _Places(), [], [], []
    observed, observed_shares = _Places(), []
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = row.ids
        policy, echo = np.asarray(row.policy), np.asarray(row.echo)
        there = acted.add(number, row.start, policy)
        shares.append(policy[there])
        logps.append(np.asarray(row.logps)[there])
        advantages.append(np.full(len(there), row.advantage))
        there = observed.add(number, row.start, echo)
        observed_shares.append(echo[there])

    def on_device(array: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(array, dtype=dtype).to(device, non_blocking=True)

    def numbers(parts: list[Any]) -> torch.Tensor:
        return on_device(np.concatenate(parts), torch.float32)

    return _Batch(
        ids=on_device(ids, torch.long),
        acted=acted.tensors(device),
        advantages_N=numbers(advantages),
        shares_N=numbers(shares),
        logps_N=numbers(logps),
        known=int(np.isfinite(np.concatenate(logps)).sum()),
        observed=observed.tensors(device),
        observed_shares_M=numbers(observed_shares),
    )


class _Places:
    """Rows and columns of hidden states: the one before a token predicts it."""

    def __init__(self) -> None:
        self._rows: list[Any] = []
        self._columns: list[Any] = []

    def add(self, number: int, start: int, shares: Any) -> Any:
        """The completion tokens of a row whose share is not zero."""
        there = np.flatnonzero(shares)
        self._rows.append(np.full(len(there), number))
        self._columns.append(start + there - 1)
        return there

    def tensors(self, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
        both = (np.concatenate(parts) for parts in (self._rows, self._columns))
        rows, columns = (torch.as_tensor(one).to(device, non_blocking=True) for one in both)
        return rows, columns


def _read(figures: UpdateFigures, sums: _Sums) -> UpdateFigures:
    figures.loss = sums.total("loss") + sums.total("echo")
    figures.echo_loss, figures.cross_entropy = sums.total("echo"), sums.total("cross_entropy")
    figures.entropy, figures.divergence = sums.total("entropy"), sums.total("divergence")
    figures.gap, figures.largest_gap = sums.total("gap"), sums.most("largest_gap")
    figures.weight, figures.clipped = sums.total("weight"), int(sums.total("clipped"))
    figures.largest_weight, figures.least_weight = sums.most("largest"), -sums.most("least")
    return figures


def update_metrics(of_all: Sequence[UpdateFigures], options: UpdateOptions) -> dict[str, float]:
    """Metrics of one update by name, TRL's where it has one.

    Args:
        of_all: What each process has seen.
        options: How it was made.
    """
    tokens, known = sum(one.tokens for one in of_all), sum(one.known for one in of_all)
    processed = sum(one.processed for one in of_all)

    def per(name: str, count: int) -> float:
        return sum(getattr(one, name) for one in of_all) / count if count else math.nan

    values = {
        "entropy": per("entropy", tokens),
        "sampling/sampling_logp_difference/mean": per("gap", known),
        "sampling/sampling_logp_difference/max": max(one.largest_gap for one in of_all),
        "update/rollouts_left_out": float(sum(one.left_out for one in of_all)),
        "update/passes": float(sum(one.passes for one in of_all)),
        "update/padding_share": per("padding", processed),
    }
    if options.beta:
        values["kl"] = per("divergence", tokens)
    if options.corrected:
        ratio = "sampling/importance_sampling_ratio"
        values[f"{ratio}/mean"] = per("weight", tokens)
        values[f"{ratio}/min"] = min(one.least_weight for one in of_all)
        values[f"{ratio}/max"] = max(one.largest_weight for one in of_all)
        values["sampling/clipped_share"] = per("clipped", tokens)
    return values
