"""vLLM behind the loop of `engine_process`. Imported in the engine's process alone."""

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from worker.training.sampler.engine_process import EngineOptions, Finished
from worker.training.sampler.protocol import Turn


class VllmEngine:
    """One vLLM engine in this process: its scheduler, its model and nothing between them."""

    def __init__(self, options: EngineOptions) -> None:
        # With another process in between every token crosses a socket.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._params, self._at_end = SamplingParams, RequestOutputKind.FINAL_ONLY
        self._ends = list(options.end_ids)
        self._llm: Any = LLM(
            model=options.model,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            gpu_memory_utilization=options.gpu_memory_utilization,
            tensor_parallel_size=options.tensor_parallel_size,
            max_num_seqs=options.max_num_seqs,
            seed=options.seed,
            # What was drawn from: temperature and limits included.
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            enable_sleep_mode=options.sleeps,
            generation_config="vllm",  # a model's own settings have no part in it
        )
        self._engine = self._llm.llm_engine
        self._scored: dict[int, list[int]] = {}
        self._prefixes = 0  # which ones a continuation may share

    def add(self, number: int, turn: Turn) -> None:
        """As for `Engine`."""
        sampling = turn.sampling
        params = self._params(
            max_tokens=turn.limit,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            stop_token_ids=self._ends,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=self._at_end,
        )
        prompt = {"prompt_token_ids": turn.prompt, "cache_salt": str(self._prefixes)}
        self._engine.add_request(str(number), prompt, params)

    def add_score(self, number: int, ids: list[int]) -> None:
        """As for `Engine`."""
        params = self._params(
            max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0, flat_logprobs=True
        )
        self._scored[number] = ids
        self._engine.add_request(str(number), {"prompt_token_ids": ids}, params)

    def step(self) -> list[Finished]:
        """As for `Engine`."""
        return [self._finished(out) for out in self._engine.step() if out.finished]

    def drop_all(self) -> None:
        """As for `Engine`."""
        states = self._engine.output_processor.request_states
        self._engine.abort_request([state.external_req_id for state in states.values()])

    def written(self) -> dict[int, int]:
        """As for `Engine`."""
        # One token of each is being made already: the scheduler is a step ahead.
        ahead = len(self._engine.engine_core.engine_core.batch_queue or ())
        states = self._engine.output_processor.request_states.values()
        return {
            int(state.external_req_id): state.detokenizer.num_output_tokens() + ahead
            for state in states
        }

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """As for `Engine`."""
        worker = self._engine.model_executor.driver_worker
        runner = getattr(worker, "worker", worker).model_runner
        return dict(runner.model.named_parameters())

    def forget_prefixes(self) -> None:
        """As for `Engine`. What is being written keeps what it has.

        vLLM cannot empty its cache while anything is written: others get keys of their own.
        """
        self._prefixes += 1

    def sleep(self) -> None:
        """As for `Engine`."""
        self._llm.sleep(level=1)

    def wake(self) -> None:
        """As for `Engine`."""
        self._llm.wake_up()

    def _finished(self, output: Any) -> Finished:
        number = int(output.request_id)
        if number in self._scored:
            ids = self._scored.pop(number)[1:]
            return Finished(number, ids, _of_each(output.prompt_logprobs, len(ids)))
        (completion,) = output.outputs
        ids = list(completion.token_ids)
        return Finished(number, ids, _of_each(completion.logprobs, len(ids)))


def _of_each(flat: Any, count: int) -> list[float]:
    """The log-probability of each token itself, which comes first where there are more."""
    places = zip(flat.start_indices, flat.end_indices, strict=True)
    starts = [start for start, end in places if end > start]
    values = [flat.logprobs[start] for start in starts[-count:]] if count else []
    return [math.nan if value is None else float(value) for value in values]
