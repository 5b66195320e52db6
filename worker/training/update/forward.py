"""Passes over whole rollouts outside of a training step: the trial, and ECHO's curve."""

import resource
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from dressage.spec.status import Reason
from worker.training.process.failures import RunFailure
from worker.training.rollout.rollout import Rollout
from worker.training.update.echo_term import EchoTerm
from worker.training.update.log_probs import TokenScorer
from worker.training.update.policy import PolicyUpdate
from worker.training.update.rows import Row


@torch.no_grad()
def environment_cross_entropy(
    model: Any, echo: EchoTerm, rollouts: Sequence[Rollout], *, batch_size: int
) -> tuple[float, int]:
    """Nats of all selected tokens of given rollouts, and how many these are.

    Args:
        model: The causal language model as it is now; its adapter's layers inside.
        echo: Which tokens are selected.
        rollouts: Any number of them.
        batch_size: Rollouts of one forward pass.
    """
    nats, count = 0.0, 0
    scorer = TokenScorer(model)
    was_training = model.training
    model.eval()
    for at in range(0, len(rollouts), batch_size):
        batch = rollouts[at : at + batch_size]
        rows = [torch.tensor(rollout.prompt_ids + rollout.completion_ids) for rollout in batch]
        weights = [
            torch.cat([torch.zeros(len(rollout.prompt_ids)), echo.weights([rollout])[0]])
            for rollout in batch
        ]
        ids = pad_sequence(rows, batch_first=True).to(model.device)
        selected = pad_sequence(weights, batch_first=True)[:, 1:].to(model.device) > 0
        hidden = scorer.hidden(model, ids)
        scored = scorer.score(hidden[selected], ids[:, 1:][selected], 1.0)
        nats, count = nats - float(scored.logps_N.sum()), count + len(scored.logps_N)
    model.train(was_training)
    return nats, count


def peak_memory_of_update(
    model: Any,
    update: PolicyUpdate,
    rollouts: Sequence[Rollout],
    *,
    rows: int,
    width: int,
    checkpointing: bool,
    device: torch.device,
) -> int:
    """One forward and backward pass as large as a step's can be; nothing is changed.

    Args:
        model: Whose gradients are made, and dropped.
        update: Makes them.
        rollouts: Whose tokens fill the rows.
        rows: Rollouts of one forward pass.
        width: Tokens of the longest rollout that there can be.
        checkpointing: Whether activations are computed twice in training.
        device: Whose memory is looked at.

    Returns:
        Bytes of memory at its peak: of the GPU, or of this process.

    Raises:
        RunFailure: It does not fit.
    """
    tokens = [token for rollout in rollouts for token in rollout.prompt_ids]
    ids = (tokens * (width // len(tokens) + 1))[:width]
    written = width - 1
    row = Row(ids, 1, [1 / (rows * written)] * written, [0.0] * written, 1.0, [])
    if checkpointing:  # the trainer switches it on when it begins
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            update(model, [row] * rows)
    except torch.OutOfMemoryError as error:
        raise RunFailure(
            Reason.OUT_OF_MEMORY,
            f"one update of {rows} rollouts of {width} tokens, the longest that there can "
            "be, does not fit into memory; lower batch_size and raise gradient_accumulation, or "
            f"set gradient_checkpointing. {error}",
        ) from None
    finally:
        model.zero_grad(set_to_none=True)
        if checkpointing:
            model.gradient_checkpointing_disable()
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
