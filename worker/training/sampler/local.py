"""Transformers' own generate, for a model that lives in this process."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dressage.spec.status import Reason
from worker.training.model import all_ends, context_length
from worker.training.process.failures import RunFailure
from worker.training.sampler.protocol import Sampled, Sampling, Turn


class TransformersSampler:
    """Generates with a model that lives in this process, its adapter included.

    It writes when everybody who plays waits for it, so that who is written for together does not
    hang on how long tools take: a run that is taken up again ends with the same weights.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        rows: Continuations that are made side by side at most; None: all that wait.
        version: Of its weights.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, rows: int | None = None, version: int = 0
    ) -> None:
        self._model, self._rows, self._version = model, rows, version
        self._context = context_length(model.config)
        self._pad = tokenizer.pad_token_id
        self._players = 0
        self._waiting: list[tuple[Turn, asyncio.Future[Sampled]]] = []
        self.end_ids = all_ends(model.generation_config.eos_token_id, tokenizer)

    async def sample(self, turn: Turn) -> Sampled:
        """As for `Sampler`."""
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, future))
        self._write_if_all_wait()
        return await future

    def join(self, players: int = 1) -> None:
        """As for `Sampler`."""
        self._players += players

    def leave(self, players: int = 1) -> None:
        """As for `Sampler`."""
        self._players -= players
        self._write_if_all_wait()

    def write(self, turns: Sequence[Turn]) -> list[Sampled]:
        """Continue every prompt by at most its own limit of tokens, end token included.

        A row's draw depends on its seed alone; the process's own random state is left as it was,
        and dropout is off.
        """
        # Long ones together, and always the same ones: whoever asked first.
        order = sorted(range(len(turns)), key=lambda at: _place(turns[at]))
        written: list[Sampled | None] = [None] * len(turns)
        for sampling, places in groupby(order, key=lambda at: turns[at].sampling):
            for chunk in self._chunks(list(places), turns):
                made = self._generate([turns[at] for at in chunk], sampling)
                for at, sampled in zip(chunk, made, strict=True):
                    written[at] = sampled
        return [sampled for sampled in written if sampled is not None]

    def _write_if_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < self._players:
            return
        waiting, self._waiting = self._waiting, []
        try:
            written = self.write([turn for turn, _ in waiting])
        except Exception as error:  # noqa: BLE001  who waits is told, whatever it is
            for _, future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), sampled in zip(waiting, written, strict=True):
            if not future.done():
                future.set_result(sampled)

    def _chunks(self, places: list[int], turns: Sequence[Turn]) -> Iterator[list[int]]:
        """Rows that are made side by side: so many, and none beyond what the model can hold."""
        chunk: list[int] = []
        longest = furthest = 0
        for at in places:
            prompt, limit = len(turns[at].prompt), turns[at].limit
            longest, furthest = max(longest, prompt), max(furthest, limit)
            full = self._rows is not None and len(chunk) == self._rows
            if chunk and (full or longest + furthest > self._context):
                yield chunk
                chunk, longest, furthest = [], prompt, limit
            chunk.append(at)
        if chunk:
            yield chunk

    @torch.no_grad()
    def _generate(self, turns: Sequence[Turn], sampling: Sampling) -> list[Sampled]:
        prompts, limits = [turn.prompt for turn in turns], [turn.limit for turn in turns]
        longest = max(map(len, prompts))
        device = self._model.device
        ids = torch.tensor([[self._pad] * (longest - len(p)) + p for p in prompts], device=device)
        attention = torch.tensor(
            [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device
        )
        draw = _Draw(sampling, [turn.seed for turn in turns], max(limits), device)
        penalty = sampling.repetition_penalty
        was_training = self._model.training
        self._model.eval()
        try:
            out = self._model.generate(
                input_ids=ids,
                attention_mask=attention,
                max_new_tokens=max(limits),
                pad_token_id=self._pad,
                eos_token_id=sorted(self.end_ids),
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                logits_processor=LogitsProcessorList([draw]),
                stopping_criteria=StoppingCriteriaList([_OwnLimit(longest, limits)]),
                **({} if penalty == 1.0 else {"repetition_penalty": penalty}),
            )
        finally:
            self._model.train(was_training)
        rows, logps = out[:, longest:].tolist(), torch.stack(draw.logps, dim=1).tolist()
        return [
            self._cut(row, values, limit)
            for row, values, limit in zip(rows, logps, limits, strict=True)
        ]

    def _cut(self, row: list[int], logps: list[float], limit: int) -> Sampled:
        ends = (at + 1 for at, token in enumerate(row[:limit]) if token in self.end_ids)
        length = min(next(ends, limit), len(row))
        return Sampled(row[:length], logps[:length], [self._version] * length)


class _Draw(LogitsProcessor):
    """Draws each row's token by a random number of its own, and leaves only this one.

    The number u of a row's turn is uniform; the token is the first at which the cumulated
    probability lies above it. What batch the row is in, and on which device, does not matter.
    """

    def __init__(self, sampling: Sampling, seeds: list[int], length: int, device: Any) -> None:
        self._greedy = sampling.temperature == 0
        self._warpers = LogitsProcessorList()
        if not self._greedy:
            numbers = [
                torch.rand(
                    length, generator=torch.Generator().manual_seed(seed), dtype=torch.double
                )
                for seed in seeds
            ]
            self._numbers = torch.stack(numbers).to(device)
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))
        self.logps: list[torch.Tensor] = []  # one (B,) for each token

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) in; 0 for the token that is drawn and −∞ for all others out."""
        warped = self._warpers(input_ids, scores.float())
        logps = torch.log_softmax(warped, dim=-1)
        if self._greedy:
            chosen = warped.argmax(dim=-1, keepdim=True)
        else:
            if not torch.isfinite(logps.amax(dim=-1)).all():
                raise RunFailure(
                    Reason.NUMERICAL_ERROR,
                    "the model's probabilities are not numbers; its weights are broken, or "
                    "overflow in this dtype",
                )
            below = logps.double().exp().cumsum(dim=-1)
            number = self._numbers[:, len(self.logps), None] * below[:, -1:]
            chosen = (below <= number).sum(dim=-1, keepdim=True).clamp(max=below.shape[1] - 1)
        self.logps.append(logps.gather(1, chosen)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class _OwnLimit(StoppingCriteria):
    """Ends each row where its own limit is, not where the longest one is."""

    def __init__(self, begin: int, limits: list[int]) -> None:
        self._begin, self._limits = begin, torch.tensor(limits)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:  # noqa: ARG002
        """Whether each row is done, (B,)."""
        return (input_ids.shape[1] - self._begin >= self._limits).to(input_ids.device)


def _place(turn: Turn) -> tuple[Any, ...]:
    how = turn.sampling
    kind = (how.temperature, how.top_p, how.top_k, how.repetition_penalty)
    return (*kind, len(turn.prompt), turn.seed, turn.prompt)
