"""Forward passes over whole rollouts outside of a training step: the trial, and ECHO's curve."""

import resource
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from dressage.spec.status import Reason
from worker.training.model import head_of
from worker.training.process.failures import RunFailure
from worker.training.rollout.rollout import Rollout
from worker.training.update.echo import cross_entropy_at_one
from worker.training.update.echo_term import EchoTerm


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
    device, losses = model.device, []
    was_training = model.training
    model.eval()
    for at in range(0, len(rollouts), batch_size):
        batch = rollouts[at : at + batch_size]
        ids, attention = padded(batch, device)
        weights = [
            torch.cat([torch.zeros(len(rollout.prompt_ids)), echo.weights([rollout])[0]])
            for rollout in batch
        ]
        selected = pad_sequence(weights, batch_first=True).to(device)[:, 1:] > 0
        hidden = model.base_model(ids, attention_mask=attention).last_hidden_state
        losses.append(
            cross_entropy_at_one(
                hidden[:, :-1][selected],
                ids[:, 1:][selected],
                head_of(model),
            )
        )
    model.train(was_training)
    values = torch.cat(losses) if losses else torch.zeros(0)
    return float(values.sum()), len(values)


def peak_memory_of_update(
    model: Any,
    log_probabilities: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rollouts: Sequence[Rollout],
    *,
    batch_size: int,
    width: int,
    checkpointing: bool,
    device: torch.device,
) -> int:
    """One forward and backward pass at the width of the longest step; nothing is changed.

    Args:
        model: Whose gradients are made, and dropped.
        log_probabilities: Of the tokens after the first, given ids and attention mask, (B, T).
        rollouts: Whose tokens fill the rows.
        batch_size: Rollouts of one forward pass.
        width: Tokens of the longest rollout that there can be.
        checkpointing: Whether activations are computed twice in training.
        device: Whose memory is looked at.

    Returns:
        Bytes of memory at its peak: of the GPU, or of this process.

    Raises:
        RunFailure: It does not fit.
    """
    tokens = [token for rollout in rollouts for token in rollout.prompt_ids]
    row = (tokens * (width // len(tokens) + 1))[:width]
    ids = torch.tensor([row] * batch_size, device=device)
    attention = torch.ones_like(ids)
    if checkpointing:  # the trainer switches it on when it begins
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            log_probabilities(ids, attention).mean().backward()
    except torch.OutOfMemoryError as error:
        raise RunFailure(
            Reason.OUT_OF_MEMORY,
            f"one update of {batch_size} rollouts of {width} tokens, the longest that there can "
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


def padded(rollouts: Sequence[Rollout], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of whole rollouts and their attention mask, (B, longest), padded on the right."""
    rows = [torch.tensor(rollout.prompt_ids + rollout.completion_ids) for rollout in rollouts]
    ids = pad_sequence(rows, batch_first=True)
    attention = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids.to(device), attention.to(device)
