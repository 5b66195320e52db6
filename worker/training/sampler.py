"""Token ids in, sampled continuations out, by transformers' own generate."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from dressage.seeds import derived_seed
from dressage.spec.status import Reason
from worker.training.model import all_ends, context_length
from worker.training.process.failures import RunFailure


@dataclass(frozen=True)
class Sampling:
    """How a continuation is drawn. Temperature 0 means greedy; `top_k` 0 means no limit."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


class TransformersSampler:
    """Generates with a model that lives in this process, its adapter included.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        sampling: How tokens are drawn.
        rows: Continuations that are made side by side at most; None: all of a call.
    """

    def __init__(
        self, model: Any, tokenizer: Any, sampling: Sampling, *, rows: int | None = None
    ) -> None:
        self._model, self._sampling, self._rows = model, sampling, rows
        self._context = context_length(model.config)
        self._pad = tokenizer.pad_token_id
        self.end_ids = all_ends(model.generation_config.eos_token_id, tokenizer)

    def __call__(self, prompts: list[list[int]], limits: list[int], seed: int) -> list[list[int]]:
        """Continue every prompt by at most its own limit of tokens, end token included.

        The draw depends on the seed and on the prompts of the batch alone; the process's own random
        state is left as it was, and dropout is off.
        """
        written: list[list[int]] = []
        for number, (start, stop) in enumerate(self._chunks(prompts, limits)):
            own_seed = derived_seed(seed, "rows", number) if number else seed
            written += self._generate(prompts[start:stop], limits[start:stop], own_seed)
        return written

    def _chunks(self, prompts: list[list[int]], limits: list[int]) -> Iterator[tuple[int, int]]:
        """Rows that are made side by side: so many, and none beyond what the model can hold."""
        start, longest, furthest = 0, 0, 0
        for at, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            longest, furthest = max(longest, len(prompt)), max(furthest, limit)
            full = self._rows is not None and at - start == self._rows
            if at > start and (full or longest + furthest > self._context):
                yield start, at
                start, longest, furthest = at, len(prompt), limit
        if prompts:
            yield start, len(prompts)

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], limits: list[int], seed: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        device = self._model.device
        ids = torch.tensor([[self._pad] * (longest - len(p)) + p for p in prompts], device=device)
        attention = torch.tensor(
            [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device
        )
        sampling: dict[str, Any] = (
            {
                "do_sample": True,
                "temperature": self._sampling.temperature,
                "top_p": self._sampling.top_p,
                "top_k": self._sampling.top_k,
            }
            if self._sampling.temperature > 0
            else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        )
        if self._sampling.repetition_penalty != 1.0:
            sampling["repetition_penalty"] = self._sampling.repetition_penalty
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                out = self._model.generate(
                    input_ids=ids,
                    attention_mask=attention,
                    max_new_tokens=max(limits),
                    pad_token_id=self._pad,
                    eos_token_id=sorted(self.end_ids),
                    stopping_criteria=StoppingCriteriaList([_OwnLimit(longest, limits)]),
                    **sampling,
                )
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise RunFailure(
                Reason.NUMERICAL_ERROR,
                "the model's probabilities are not numbers; its weights are broken, or overflow in "
                "this dtype",
            ) from error
        finally:
            self._model.train(was_training)
        rows = out[:, longest:].tolist()
        return [self._cut(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def _cut(self, row: list[int], limit: int) -> list[int]:
        for at, token in enumerate(row[:limit]):
            if token in self.end_ids:
                return row[: at + 1]
        return row[:limit]


class _OwnLimit(StoppingCriteria):
    """Ends each row where its own limit is, not where the longest one is."""

    def __init__(self, begin: int, limits: list[int]) -> None:
        self._begin, self._limits = begin, torch.tensor(limits)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:  # noqa: ARG002
        """Whether each row is done, (B,)."""
        return (input_ids.shape[1] - self._begin >= self._limits).to(input_ids.device)
