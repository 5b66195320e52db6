"""Engines for the CPU in place of vLLM: the same loop, process and hand-over around them.

The weights lie as vLLM has them, with fused matrices, and what they write is what is sampled from.
"""

import os
import time

import torch
from transformers import AutoModelForCausalLM

from worker.training.sampler.engine_process import Finished

FUSED = {
    ("self_attn", "qkv_proj"): ("q_proj", "k_proj", "v_proj"),
    ("mlp", "gate_up_proj"): ("gate_proj", "up_proj"),
}


class HfEngine:
    """A transformers model that writes one token for every continuation in each step."""

    def __init__(self, options):
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype)
        ).eval()
        self._ends, self._longest = set(options.end_ids), options.max_model_len
        self._parameters = dict(self._model.named_parameters())
        for number, layer in enumerate(self._model.model.layers):
            for (part, fused), names in FUSED.items():
                self._fuse(f"model.layers.{number}.{part}", getattr(layer, part), fused, names)
        self._running, self._scores = {}, {}

    def _fuse(self, path, module, fused, names):
        parts = [getattr(module, name) for name in names]
        whole = torch.cat([part.weight.data for part in parts])
        self._parameters[f"{path}.{fused}.weight"] = whole
        at = 0
        for name, part in zip(names, parts, strict=True):
            rows = part.weight.shape[0]
            part.weight.data = whole[at : at + rows]
            del self._parameters[f"{path}.{name}.weight"]
            at += rows

    def add(self, number, turn):
        assert len(turn.prompt) + turn.limit <= self._longest
        self._running[number] = (turn, [], [])

    def add_score(self, number, ids):
        self._scores[number] = ids

    @torch.no_grad()
    def step(self):
        done = []
        for number, ids in self._scores.items():
            logps = self._logits([ids])[0].log_softmax(-1)
            scored = logps[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            done.append(Finished(number, ids[1:], scored.tolist()))
        self._scores = {}
        if not self._running:
            return done
        rows = [turn.prompt + written for turn, written, _ in self._running.values()]
        logits = self._logits(rows)
        for at, (number, (turn, written, logps)) in enumerate(list(self._running.items())):
            scores = logits[at, len(rows[at]) - 1]
            every = (scores / (turn.sampling.temperature or 1.0)).log_softmax(-1)
            chosen = int(every.argmax())
            if turn.sampling.temperature:
                generator = torch.Generator().manual_seed(turn.seed + len(written))
                chosen = int(torch.multinomial(every.exp(), 1, generator=generator))
            written.append(chosen)
            logps.append(float(every[chosen]))
            if chosen in self._ends or len(written) == turn.limit:
                del self._running[number]
                done.append(Finished(number, written, logps))
        return done

    def _logits(self, rows):
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return self._model(input_ids=ids).logits.float()

    def drop_all(self):
        self._running, self._scores = {}, {}

    def written(self):
        return {number: len(written) for number, (_, written, _) in self._running.items()}

    def parameters(self):
        return self._parameters

    def forget_prefixes(self):
        pass

    def sleep(self):
        assert not self._running
        self._asleep = True

    def wake(self):
        self._asleep = False


class Skipping(HfEngine):
    """Takes weights in, and writes with others."""

    def parameters(self):
        return {name: value.clone() for name, value in self._parameters.items()}


class Hanging(HfEngine):
    """Never says anything again once it is asked to write."""

    def step(self):
        time.sleep(3600)


class Dying(HfEngine):
    """Ends without a word."""

    def step(self):
        os._exit(9)


class Raising(HfEngine):
    def step(self):
        raise ValueError("the kernel said no")


class NotLoading:
    def __init__(self, options):
        raise RuntimeError(f"no memory left for {options.model}")
