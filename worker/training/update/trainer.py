"""The one subclass of TRL's GRPOTrainer. A contract test holds the methods of it we rely on.

Rollouts come from our engine through TRL's public `rollout_func`; advantages, loss and optimizer
are TRL's own.
"""

import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import pad
from transformers.trainer_callback import PrinterCallback
from trl import GRPOTrainer

from dressage.seeds import derived_seed
from dressage.spec.event import EventType
from dressage.spec.status import Reason
from dressage.spec.suite import Case
from dressage.spec.training import TrainingSpec
from worker.training.model import context_length, head_of, language_model, last_hidden_states
from worker.training.process.failures import RunFailure
from worker.training.rewards.advantages import advantages_of, has_no_spread
from worker.training.rewards.batch import RolloutBatch
from worker.training.rewards.weighted import ScoredRollout, Scorer, unscored_message
from worker.training.rollout.engine import Engine
from worker.training.rollout.rollout import Rollout
from worker.training.sampler import Sampling, TransformersSampler
from worker.training.update import ranks
from worker.training.update.callbacks import EventCallback, EverySteps, FiniteGradients, PauseWhen
from worker.training.update.config import TENSORBOARD, grpo_config, lora_config
from worker.training.update.echo_term import EchoTerm
from worker.training.update.forward import environment_cross_entropy, peak_memory_of_update
from worker.training.update.governor import SignalGovernor
from worker.training.update.metrics import RolloutFigures, batch_metrics, mean
from worker.training.update.moved import MovedWeights
from worker.training.update.order import EpochSampler
from worker.wire.checkpoints import keep, mark_complete
from worker.wire.run_dir import RunDirectory

STEPS_WITHOUT_REWARD = 3
# Rows that are generated at once for each row of a micro-batch: who halves that halves both.
ROWS_FOR_EACH = 16


class JobTrainer(GRPOTrainer):
    """GRPO whose rollouts are played by an `Engine` and scored by a `Scorer`."""

    def __init__(
        self,
        *,
        model: Any,
        tokenizer: Any,
        spec: TrainingSpec,
        cases: Sequence[Case],
        engine: Engine,
        scorer: Scorer,
        run: RunDirectory,
        use_cpu: bool,
    ) -> None:
        self._decided = scorer.decides
        self._cases, self._engine, self._scorer, self._run = cases, engine, scorer, run
        self._spec = spec
        self._batch = RolloutBatch((), spec.num_generations)
        self._steps_without_reward = 0
        self._step_rewards: list[float] = []  # of the last step, of every process
        self._logps: torch.Tensor | None = None  # of the forward pass whose loss is being made
        self._entropies: list[float] = []  # of the present log line, one a micro-batch
        self._entropies_seen = 0
        self.echo = EchoTerm(spec, run) if spec.echo else None
        # The one way to tell transformers where its TensorBoard files go.
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.path / TENSORBOARD)
        rows = [
            {"prompt": engine.prompt_messages(case), "case": at} for at, case in enumerate(cases)
        ]
        super().__init__(
            model=model,
            args=grpo_config(spec, run.checkpoints, use_cpu=use_cpu),
            reward_funcs=[self._reward],
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora_config(spec, model),
            rollout_func=self._trl_rollouts,
            callbacks=[EventCallback(run), FiniteGradients(self._note)],
        )
        self._moved = MovedWeights(self.unwrapped)
        self.governor = SignalGovernor(spec.pause_after_dead_steps)
        self.add_callback(EverySteps(1, lambda _: self.end_step()))
        self.add_callback(
            PauseWhen(lambda: self.governor.exhausted or ranks.any_of(run.pause_requested))
        )
        self.remove_callback(PrinterCallback)

    @property
    def unwrapped(self) -> Any:
        """The model without what accelerate has put around it."""
        return self.accelerator.unwrap_model(self.model)

    def sampler(self, temperature: float) -> TransformersSampler:
        """A sampler on the model as it is now."""
        sampling = Sampling(temperature, self._spec.top_p, self._spec.top_k)
        rows = ROWS_FOR_EACH * self._spec.batch_size
        return TransformersSampler(self.unwrapped, self.processing_class, sampling, rows=rows)

    @property
    def parameter_counts(self) -> dict[str, int]:
        """Numbers of the model, and those of them that are trained."""
        parameters = list(self.unwrapped.parameters())
        return {
            "all": sum(p.numel() for p in parameters),
            "trained": sum(p.numel() for p in parameters if p.requires_grad),
        }

    @property
    def moved_share(self) -> float:
        """Share of the trained weights that are not what they were before the first step."""
        return self._moved.share(self.unwrapped)

    @property
    def planned_steps(self) -> int:
        """Optimizer steps that training will have."""
        if self._spec.max_steps:
            return self._spec.max_steps
        per_epoch = len(self._cases) // (self._spec.cases_per_step * ranks.count())
        return math.ceil(self._spec.epochs * per_epoch)

    def paused(self) -> RunFailure | None:
        """Why training stopped before its end, if it was set aside."""
        step = self.state.global_step
        if step >= self.state.max_steps:
            return None
        if self._run.pause_requested:
            return RunFailure(
                Reason.PAUSED_BY_USER,
                f"paused on request at step {step} with a checkpoint; resume to go on",
            )
        if self.governor.exhausted:
            return RunFailure(
                Reason.NO_LEARNING_SIGNAL,
                f"{self.governor.dead_steps} steps in a row had no group with a spread of rewards; "
                f"paused at step {step} with a checkpoint. Resume to go on",
            )
        return None

    def trial_update(self, rollouts: Sequence[Rollout], longest_prompt: int) -> int:
        """Bytes at the peak of one update over the longest rollouts there can be.

        Nothing is changed.

        Args:
            rollouts: Some of the base model's.
            longest_prompt: Tokens of the longest prompt of all cases.

        Raises:
            RunFailure: It does not fit.
        """

        def log_probabilities(ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
            with self.compute_loss_context_manager():
                logps: torch.Tensor = super(JobTrainer, self)._get_per_token_logps_and_entropies(
                    self.model, ids, attention, ids.shape[1] - 1
                )[0]
            return logps

        return peak_memory_of_update(
            self.model,
            log_probabilities,
            rollouts,
            batch_size=self._spec.batch_size,
            width=min(
                longest_prompt + self._spec.max_completion_length,
                context_length(self.model.config),
            ),
            checkpointing=self._spec.gradient_checkpointing,
            device=self.accelerator.device,
        )

    def environment_cross_entropy(self, rollouts: Sequence[Rollout]) -> tuple[float, int]:
        """Nats of the selected tokens of given rollouts, under the model as it is now; how many."""
        assert self.echo
        base = language_model(self.unwrapped)
        return environment_cross_entropy(
            base, self.echo, rollouts, batch_size=self._spec.batch_size
        )

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        return EpochSampler.like(super()._get_train_sampler(dataset))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._batch = self._play([self._cases[row["case"]] for row in inputs])
        output = super()._generate_and_score_completions(inputs)
        groups = ranks.all_of(self._batch.reward_groups)
        advantages = advantages_of(
            self._batch.reward_groups, self._spec.scale_rewards, everyone=groups
        )
        output["advantages"] = output["advantages"].new_tensor(advantages)
        step = self.state.global_step + 1
        kept, seed = self._spec.keep_rollouts, self._spec.seed
        for record in self._batch.records(step, advantages, kept=kept, seed=seed):
            self._run.emit(EventType.ROLLOUT, **record)
        self._step_rewards = [r for group in groups for r in group if r is not None]
        self._require_rewards()
        masked = self._spec.mask_truncated_completions
        self.governor.observe(ranks.all_of(self._batch.teaching(mask_truncated=masked)))
        values = batch_metrics(
            ranks.all_of([RolloutFigures.of(one) for one in self._batch.scored]),
            groups,
            decided=self._decided,
            resampled=sum(ranks.all_of([self._batch.resampled])),
        )
        for name, value in values.items():
            if name.startswith("completions/"):
                self._metrics["train"][name][-1] = value  # TRL's, of what is masked
            else:
                self._note(name, value)
        for name, logged in self._scorer.logged().items():
            self._note(f"reward_functions/{name}", mean(logged))
        if self.echo:
            output |= self._echo_fields(output)
        return output

    def _play(self, cases: Sequence[Case]) -> RolloutBatch:
        """A rollout for each row, group members next to each other, scored."""
        size = self.num_generations
        seed = derived_seed(
            self._spec.seed, "train", self.state.global_step, self.accelerator.process_index
        )
        pairs = [(case, at % size) for at, case in enumerate(cases)]
        batch = RolloutBatch(tuple(self._scored(pairs, seed)), size)
        return self._resample(batch, seed)

    def _scored(self, pairs: Sequence[tuple[Case, int]], seed: int) -> list[ScoredRollout]:
        sampler = self.sampler(self._spec.temperature)
        played = self._engine.play(pairs, sampler, sampler.end_ids, seed)
        state = {
            "global_step": self.state.global_step,
            "max_steps": self.state.max_steps,
            "epoch": self.state.epoch,
        }
        return self._scorer.score(played, state=state)

    def _resample(self, batch: RolloutBatch, seed: int) -> RolloutBatch:
        """Play other cases in place of groups without spread, as DAPO does (2503.14476)."""
        size = batch.group_size
        for attempt in range(self._spec.resample_dead_groups):
            dead = [
                at
                for at, group in enumerate(batch.groups)
                if has_no_spread([scored.reward for scored in group])
            ]
            if not dead:
                break
            own_seed = derived_seed(seed, "resample", attempt)
            chosen = random.Random(own_seed).choices(self._cases, k=len(dead))
            pairs = [(case, index) for case in chosen for index in range(size)]
            fresh = RolloutBatch(tuple(self._scored(pairs, own_seed)), size)
            for at, group in zip(dead, fresh.groups, strict=True):
                for one in group:  # the case may be played twice in this step
                    place = self.accelerator.process_index * len(batch.groups) + at
                    one.rollout.resampled = f"-try-{attempt + 1}-group-{place}"
            better = {
                at: group
                for at, group in zip(dead, fresh.groups, strict=True)
                if not has_no_spread([scored.reward for scored in group])
            }
            batch = batch.with_groups(better.get)
        return batch

    def _trl_rollouts(self, _prompts: list[Any], _trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func`: the batch that was just played."""
        return self._batch.for_trl(mask_truncated=self._spec.mask_truncated_completions)

    def _reward(self, prompts: list[Any], **_: Any) -> list[float | None]:
        return self._batch.rewards

    def _require_rewards(self) -> None:
        """End a run in which nothing is scored, in a few steps or all there are."""
        self._steps_without_reward = 0 if self._step_rewards else self._steps_without_reward + 1
        if self._steps_without_reward >= min(STEPS_WITHOUT_REWARD, self.state.max_steps):
            raise RunFailure(Reason.USER_CODE_ERROR, unscored_message(self._batch.scored))

    def _note(self, name: str, value: float) -> None:
        """Add to the metrics of this log line."""
        self._metrics["train"][name].append(value)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """An epoch, unless training is over: resumed at its last step, it would add one."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return None
        return super()._run_epoch(*args, **kwargs)

    def _echo_fields(self, output: dict[str, Any]) -> dict[str, torch.Tensor]:
        """What ECHO needs of a generation batch, split into micro-batches by TRL like the rest."""
        assert self.echo
        mask = output["completion_mask"]
        weights = self.echo.weights(self._batch.rollouts).to(mask.device)
        weights = pad(weights, (0, mask.shape[1] - weights.shape[1])) * mask
        total = torch.tensor(self.echo.total(weights), device=mask.device)
        return {"echo_weights": weights, "echo_total": self.accelerator.gather(total).sum()}

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logps = result[0]
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if not self.echo:
            loss: torch.Tensor = super()._compute_loss(model, inputs)
            return loss
        base = language_model(self.unwrapped)
        with last_hidden_states(base.base_model, wanted=self.echo.needs_hidden) as hidden:
            loss = super()._compute_loss(model, inputs)
        length = inputs["completion_ids"].shape[1]
        # TRL scales the loss itself: one step covers this part of the generation batch.
        share = self.current_gradient_accumulation_steps / self.args.steps_per_generation
        term, cross_entropy = self.echo.term(
            self._logps,
            hidden[-1][:, -length - 1 : -1] if hidden else None,
            inputs,
            head_of(base),
            share / self.accelerator.num_processes,
        )
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["echo/cross_entropy"].append(cross_entropy)
        metrics["echo/coeff"].append(self.echo.coeff)
        metrics["loss/echo"].append(float(term.detach()))
        # Not even a zero is added without a coefficient: plain GRPO to the bit.
        return loss + term if self.echo.coeff > 0 else loss

    def end_step(self) -> None:
        """Look at the step that has just ended, before its log line is written."""
        self._note("weights/moved_share", self.moved_share)
        entropies = self._metrics["train"]["entropy"]
        if entropies is not self._entropies:  # a log line has begun
            self._entropies, self._entropies_seen = entropies, 0
        own, self._entropies_seen = entropies[self._entropies_seen :], len(entropies)
        if self.echo:
            entropy = mean(ranks.all_of(own))
            step = self.state.global_step
            self.echo.end_step(step=step, rewards=self._step_rewards, entropy=entropy)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        ranks.wait_for_all()  # each has added its own random state
        if ranks.rank() == 0:
            if self.echo:
                self.echo.save(checkpoint)
            mark_complete(checkpoint)
            if self._spec.keep_checkpoints:
                kind, count = self._spec.result_kind, self._spec.keep_checkpoints
                keep(self._run, checkpoint, kind, count=count)
        self._run.emit(EventType.CHECKPOINT, step=self.state.global_step, name=checkpoint.name)
