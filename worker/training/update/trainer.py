"""The one subclass of TRL's GRPOTrainer. A contract test holds the methods of it we rely on.

Models, optimizer, data order, log lines and checkpoints are TRL's and transformers'. A step is
ours: one call of `training_step` plays the rollouts of an optimizer step, scores them and makes
their gradient.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback
from trl import GRPOTrainer

from dressage.measuring.advantages import advantages_of
from dressage.spec.event import EventType
from dressage.spec.status import Reason
from dressage.spec.suite import Case
from dressage.spec.training import TrainingSpec
from worker.training.model import context_length, language_model
from worker.training.process.failures import RunFailure
from worker.training.rewards.batch import RolloutBatch
from worker.training.rewards.weighted import ScoredRollout, Scorer, unscored_message
from worker.training.rollout.engine import Engine
from worker.training.rollout.rollout import Rollout
from worker.training.sampler.protocol import Draws
from worker.training.sampler.vllm import VllmSampler
from worker.training.update import ranks
from worker.training.update.callbacks import EventCallback, EverySteps, FiniteGradients, PauseWhen
from worker.training.update.compiled import compile_layers
from worker.training.update.config import TENSORBOARD, UpdatePlan, grpo_config, lora_config
from worker.training.update.echo_term import EchoTerm
from worker.training.update.forward import environment_cross_entropy, peak_memory_of_update
from worker.training.update.governor import SignalGovernor
from worker.training.update.master_weights import MasterAdamW
from worker.training.update.memory import explained
from worker.training.update.metrics import (
    RolloutFigures,
    age_metrics,
    batch_metrics,
    mean,
    reward_metrics,
)
from worker.training.update.micro_batches import compiled_widths
from worker.training.update.model_sampler import ModelSampler
from worker.training.update.moved import MovedWeights
from worker.training.update.order import EpochSampler
from worker.training.update.policy import PolicyUpdate, UpdateFigures, UpdateOptions, update_metrics
from worker.training.update.rollouts import Rollouts
from worker.training.update.rows import Row, action_mask, policy_shares, rows_of
from worker.wire.checkpoints import keep, mark_complete
from worker.wire.run_dir import RunDirectory

STEPS_WITHOUT_REWARD = 3
# Rows that are generated at once for each row of a micro-batch: who halves that halves both.
ROWS_FOR_EACH = 16


@dataclass(frozen=True)
class Prompts:
    """What is known of the cases' prompts before any is played.

    Attributes:
        longest: Tokens of the longest, without what environments add.
        first: Token ids of the first.
    """

    longest: int
    first: tuple[int, ...]


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
        plan: UpdatePlan,
        prompts: Prompts,
        engine_sampler: VllmSampler | None = None,
    ) -> None:
        self._decided = scorer.decides
        self._cases, self._scorer, self._run = cases, scorer, run
        self._spec, self._plan, self._prompts = spec, plan, prompts
        self._steps_without_reward = 0
        self._step_rewards: list[float] = []  # of the last step, of every process
        self.echo = EchoTerm(spec, run) if spec.echo else None
        # The one way to tell transformers where its TensorBoard files go.
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.path / TENSORBOARD)
        rows = [
            {"prompt": engine.prompt_messages(case), "case": at} for at, case in enumerate(cases)
        ]
        super().__init__(
            model=model,
            args=grpo_config(spec, run.checkpoints, plan),
            reward_funcs=[_never_asked],
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora_config(spec, model),
            callbacks=[EventCallback(run), FiniteGradients(self._note)],
        )
        if plan.masters:
            for parameter in self._trained():
                parameter.data = parameter.data.to(torch.bfloat16)
        self._update = PolicyUpdate(
            self.unwrapped, self.accelerator, self._update_options(), self.ref_model
        )
        if plan.compiled:
            compile_layers(language_model(self.unwrapped))
        self._sampler = ModelSampler(
            self.unwrapped,
            tokenizer,
            rows=ROWS_FOR_EACH * spec.batch_size,
            engine=engine_sampler,
            canary=prompts.first,
            dtype=spec.dtype,
            sleeps=bool(spec.vllm and spec.vllm.sleep),
        )
        self.rollouts = Rollouts(spec, cases, engine, scorer, self._sampler)
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
        with self.compute_loss_context_manager():
            return peak_memory_of_update(
                self.model,
                self._update,
                rollouts,
                rows=max(1, self._update.options.tokens // self._longest(longest_prompt)),
                width=self._longest(longest_prompt),
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

    def training_step(
        self, model: Any, inputs: list[dict[str, Any]], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """One optimizer step's rollouts and their gradient; returns the loss."""
        started = time.monotonic()
        batch = self._play([self._cases[row["case"]] for row in inputs])
        played = time.monotonic()
        rows = self._learned(batch)
        model.train()
        coeff = self.echo.coeff if self.echo else 0.0
        try:
            with self._sampler.asleep(), self.compute_loss_context_manager():
                figures = self._update(model, rows, coeff=coeff)
        except torch.OutOfMemoryError as error:
            raise RunFailure(Reason.OUT_OF_MEMORY, self._out_of_memory(error)) from None
        of_all = ranks.all_of([figures])
        seen = update_metrics(of_all, self._update.options) | self._sampler.noted()
        if self._spec.max_staleness:
            seen |= age_metrics(batch.rollouts, self.state.global_step)
            seen["rollouts/dropped"] = float(self.rollouts.dropped)
        for name, value in seen.items():
            self._note(name, value)
        if self.echo:
            self._end_echo_step(of_all)
        if self.accelerator.device.type == "cuda":
            self._note("memory/peak_gib", torch.cuda.max_memory_allocated() / 2**30)
        self._note("step_time", time.monotonic() - started)
        self._note("time/rollouts", played - started)
        self._note("time/update", time.monotonic() - played)
        return torch.tensor(figures.loss, device=self.accelerator.device)

    def _learned(self, batch: RolloutBatch) -> list[Row]:
        """The rows of a batch; its rollouts are stored and its metrics noted."""
        groups = ranks.all_of(batch.reward_groups)
        advantages = advantages_of(batch.reward_groups, self._spec.scale_rewards, everyone=groups)
        step = self.state.global_step + 1
        kept, seed = self._spec.keep_rollouts, self._spec.seed
        for record in batch.records(step, advantages, kept=kept, seed=seed):
            self._run.emit(EventType.ROLLOUT, **record)
        self._step_rewards = [r for group in groups for r in group if r is not None]
        self._require_rewards(batch)
        masked = self._spec.mask_truncated_completions
        self.governor.observe(ranks.all_of(batch.teaching(mask_truncated=masked)))
        figures = ranks.all_of([RolloutFigures.of(one) for one in batch.scored])
        self.state.num_input_tokens_seen += sum(one.prompt + one.completion for one in figures)
        values = {
            "num_tokens": float(self.state.num_input_tokens_seen),
            **reward_metrics(groups),
            **batch_metrics(
                figures,
                groups,
                decided=self._decided,
                resampled=sum(ranks.all_of([batch.resampled])),
            ),
            **{f"reward_functions/{k}": mean(v) for k, v in self._scorer.logged().items()},
        }
        for name, value in values.items():
            self._note(name, value)
        masks = [action_mask(one, mask_truncated=masked) for one in batch.rollouts]
        shares = policy_shares(
            masks,
            self._spec.loss_type,
            horizon=self._spec.max_completion_length,
            tokens_of_all=sum(ranks.all_of([sum(map(sum, masks))])),
            processes=ranks.count(),
        )
        echo = self.echo.shares(batch.rollouts) if self.echo else None
        return rows_of(batch.rollouts, advantages, shares, echo)

    def play(self, cases: Sequence[tuple[Case, int]], draws: Draws) -> list[ScoredRollout]:
        """One scored rollout for each (case, index in its group), outside of a step."""
        return self.rollouts.play(cases, draws, version=self.state.global_step)

    def _play(self, cases: Sequence[Case]) -> RolloutBatch:
        """The rollouts of a step."""
        state = {
            "global_step": self.state.global_step,
            "max_steps": self.state.max_steps,
            "epoch": self.state.epoch,
        }
        if self._spec.max_staleness:
            return self.rollouts.batch_ahead(self._get_train_sampler, state)
        return self.rollouts.batch(cases, state)

    def _require_rewards(self, batch: RolloutBatch) -> None:
        """End a run in which nothing is scored, in a few steps or all there are."""
        self._steps_without_reward = 0 if self._step_rewards else self._steps_without_reward + 1
        if self._steps_without_reward >= min(STEPS_WITHOUT_REWARD, self.state.max_steps):
            raise RunFailure(Reason.USER_CODE_ERROR, unscored_message(batch.scored))

    def _note(self, name: str, value: float) -> None:
        """Add to the metrics of this log line."""
        self._metrics["train"][name].append(value)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """An epoch, unless training is over: resumed at its last step, it would add one."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return None
        return super()._run_epoch(*args, **kwargs)

    def end_step(self) -> None:
        """Look at the step that has just ended, before its log line is written."""
        self._note("weights/moved_share", self.moved_share)

    def _end_echo_step(self, of_all: Sequence[UpdateFigures]) -> None:
        """ECHO's metrics of a step, and its guardrail."""
        assert self.echo
        observed = sum(one.observed for one in of_all)
        tokens = sum(one.tokens for one in of_all)
        nats = sum(one.cross_entropy for one in of_all)
        cross_entropy = nats / observed if observed else math.nan
        self._note("echo/cross_entropy", cross_entropy)
        self._note("echo/coeff", self.echo.coeff)
        self._note("loss/echo", mean([one.echo_loss for one in of_all]))
        self.echo.end_step(
            step=self.state.global_step + 1,
            rewards=self._step_rewards,
            entropy=sum(one.entropy for one in of_all) / tokens if tokens else math.nan,
            cross_entropy=cross_entropy,
        )

    def _longest(self, longest_prompt: int) -> int:
        """Tokens of the longest rollout that there can be."""
        context = context_length(self.model.config)
        return min(longest_prompt + self._spec.max_completion_length, context)

    def _update_options(self) -> UpdateOptions:
        width = self._longest(self._prompts.longest)
        return UpdateOptions(
            tokens=self._spec.micro_batch_tokens or self._spec.batch_size * width,
            temperature=self._spec.temperature,
            beta=self._spec.beta,
            corrected=self._spec.vllm is not None,
            widths=compiled_widths(width) if self._plan.compiled else (),
        )

    def create_optimizer(self, model: Any = None) -> Any:
        """AdamW, on float32 copies where weights are trained in bfloat16."""
        if self._plan.masters and self.optimizer is None:
            args = self.args
            self.optimizer = MasterAdamW(
                self._trained(),
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
                weight_decay=args.weight_decay,
            )
        return super().create_optimizer()

    def _out_of_memory(self, error: torch.OutOfMemoryError) -> str:
        share = self._spec.vllm.gpu_memory_utilization if self._spec.vllm else 0.0
        device = self.accelerator.device
        who = explained(self.model, self.optimizer, engine_share=share, device=device)
        return (
            f"an update does not fit into memory, not even with one rollout in a pass. {who}. Set "
            "gradient_checkpointing, lower max_completion_length, or leave vLLM less "
            f"(gpu_memory_utilization, sleep). {str(error)[:300]}"
        )

    @property
    def optimizer_bytes(self) -> int:
        """Of the optimizer's state: two moments in float32 for each trained weight, and copies."""
        each = 12 if self._plan.masters else 8
        return each * sum(p.numel() for p in self._trained())

    def _trained(self) -> list[Any]:
        return [p for p in self.unwrapped.parameters() if p.requires_grad]

    def round_to(self, dtype: torch.dtype) -> None:
        """Store the weights in another type; whoever samples reads them where they are then."""
        self.unwrapped.to(dtype)
        self._sampler.attach()

    def close(self) -> None:
        """Let go of rollouts that are in flight, and of the engine."""
        self.rollouts.close()
        self._sampler.close()

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


def _never_asked(**_: Any) -> list[float]:
    """TRL wants a reward function; rewards are ours, and come with the rollouts."""
    raise NotImplementedError
