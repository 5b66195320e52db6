"""The one subclass of TRL's GRPOTrainer. A contract test holds the methods of it we rely on.

Rollouts come from our engine through TRL's public `rollout_func`; advantages, loss and optimizer
are TRL's own.
"""

import importlib.util
import logging
import math
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from dressage.spec.event import EventType, TokenRole
from dressage.spec.status import Reason
from dressage.spec.suite import Case
from dressage.spec.training import TrainingSpec
from worker.training.checkpoints import keep, mark_complete
from worker.training.failures import RunFailure
from worker.training.rewards.weighted import Scored, Scorer, group_rewards, grouped
from worker.training.rollout.engine import Engine
from worker.training.rollout.episode import Episode
from worker.training.rollout.generate import Sampling, TransformersGenerator
from worker.training.rollouts import rollout_record
from worker.training.run_dir import RunDirectory
from worker.training.seeds import derived_seed
from worker.training.update import ranks
from worker.training.update.callbacks import EverySteps, FiniteGradients, PauseWhen
from worker.training.update.echo import cross_entropy_at_one
from worker.training.update.echo_term import EchoTerm
from worker.training.update.governor import SignalGovernor, is_dead
from worker.training.update.model import language_model, last_hidden_states, logit_softcap
from worker.training.update.sampler import EpochSampler

log = logging.getLogger(__name__)

STEPS_WITHOUT_REWARD = 3
TENSORBOARD = "tensorboard"


class JobTrainer(GRPOTrainer):
    """GRPO whose rollouts are played by an `Engine` and scored by `Scorer`."""

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
        self._cases, self._engine, self._scorer, self._run = cases, engine, scorer, run
        self._spec = spec
        self._batch: list[int] = []
        self._scored: list[Scored] = []
        self._steps_without_reward = 0
        self._logps: torch.Tensor | None = None
        self.echo = (
            EchoTerm(
                spec.echo,
                temperature=spec.temperature,
                horizon=spec.max_completion_length,
                run=run,
            )
            if spec.echo
            else None
        )
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
            peft_config=lora_config(spec),
            rollout_func=self._play,
            callbacks=[EventCallback(run), FiniteGradients()],
        )
        self.governor = SignalGovernor(spec.pause_after_dead_steps)
        self._resampled = 0
        self._groups: list[list[float | None]] = []  # rewards of the last step, of every process
        self.add_callback(EverySteps(1, lambda _: self.end_step()))
        self.add_callback(
            PauseWhen(lambda: self.governor.exhausted or ranks.any_of(run.pause_requested))
        )
        self.remove_callback(PrinterCallback)

    def generator(self, temperature: float) -> TransformersGenerator:
        """A generator on the model as it is now."""
        sampling = Sampling(temperature, self._spec.top_p, self._spec.top_k)
        model = self.accelerator.unwrap_model(self.model)
        return TransformersGenerator(model, self.processing_class, sampling)

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        return EpochSampler.like(super()._get_train_sampler(dataset))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._batch = [row["case"] for row in inputs]
        output = super()._generate_and_score_completions(inputs)
        advantages = output["advantages"].tolist()
        for scored, advantage in zip(self._scored, advantages, strict=True):
            record = rollout_record(scored, "train", self.state.global_step + 1, advantage)
            self._run.emit(EventType.ROLLOUT, **record)
        self._count()
        if self.echo:
            output |= self._echo_fields(output)
        return output

    def _echo_fields(self, output: dict[str, Any]) -> dict[str, torch.Tensor]:
        """What ECHO needs of a generation batch, split into micro-batches by TRL like the rest."""
        assert self.echo
        mask = output["completion_mask"]
        weights = self.echo.weights([scored.episode for scored in self._scored]).to(mask.device)
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
        base = language_model(self.accelerator.unwrap_model(self.model))
        with last_hidden_states(base.base_model, wanted=self.echo.needs_hidden) as hidden:
            loss = super()._compute_loss(model, inputs)
        length = inputs["completion_ids"].shape[1]
        # TRL scales the loss itself: one step covers this part of the generation batch.
        share = self.current_gradient_accumulation_steps / self.args.steps_per_generation
        term, mean = self.echo.term(
            self._logps,
            hidden[-1][:, -length - 1 : -1] if hidden else None,
            inputs,
            base.get_output_embeddings(),
            logit_softcap(base),
            share / self.accelerator.num_processes,
        )
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["echo/cross_entropy"].append(mean)
        metrics["echo/coeff"].append(self.echo.coeff)
        metrics["loss/echo"].append(float(term.detach()))
        # Not even a zero is added without a coefficient: plain GRPO to the bit.
        return loss + term if self.echo.coeff > 0 else loss

    @torch.no_grad()
    def environment_cross_entropy(self, episodes: Sequence[Episode]) -> float | None:
        """Nats per selected token of given episodes, under the model as it is now."""
        assert self.echo
        base = language_model(self.accelerator.unwrap_model(self.model))
        device, losses = base.device, []
        was_training = base.training
        base.eval()
        for at in range(0, len(episodes), self._spec.batch_size):
            batch = episodes[at : at + self._spec.batch_size]
            ids, attention = _padded(batch, device)
            weights = [self.echo.weights([e])[0] for e in batch]
            selected = (
                pad_sequence(
                    [
                        torch.cat([torch.zeros(len(e.prompt_ids)), w])
                        for e, w in zip(batch, weights, strict=True)
                    ],
                    batch_first=True,
                ).to(device)[:, 1:]
                > 0
            )
            hidden = base.base_model(ids, attention_mask=attention).last_hidden_state
            losses.append(
                cross_entropy_at_one(
                    hidden[:, :-1][selected],
                    ids[:, 1:][selected],
                    base.get_output_embeddings(),
                    logit_softcap(base),
                )
            )
        base.train(was_training)
        values = torch.cat(losses)
        return float(values.mean()) if len(values) else None

    @property
    def planned_steps(self) -> int:
        """Optimizer steps that training will have."""
        if self._spec.max_steps:
            return self._spec.max_steps
        per_epoch = len(self._cases) // (self._spec.cases_per_step * ranks.count())
        return math.ceil(self._spec.epochs * per_epoch)

    def trial_update(self, episodes: Sequence[Episode]) -> int:
        """One forward and backward pass over the longest episodes; nothing is changed.

        Returns:
            Bytes of memory at its peak: of the GPU, or of this process.

        Raises:
            RunFailure: It does not fit.
        """
        longest = sorted(episodes, key=lambda e: -len(e.prompt_ids) - len(e.completion_ids))
        device = self.accelerator.device
        ids, attention = _padded(longest[: self._spec.batch_size], device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        devices = [device] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), self.compute_loss_context_manager():
                logps, _, *_ = super()._get_per_token_logps_and_entropies(
                    self.model, ids, attention, ids.shape[1] - 1
                )
                logps.mean().backward()
        except torch.OutOfMemoryError as error:
            raise RunFailure(
                Reason.OUT_OF_MEMORY,
                f"one update of {len(ids)} rollouts, the longest of {ids.shape[1]} tokens, does "
                f"not fit into memory; lower batch_size and raise gradient_accumulation. {error}",
            ) from None
        finally:
            self.model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

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

    def end_step(self) -> None:
        """Let ECHO look at the step that has just ended."""
        entropies = self._metrics["train"]["entropy"]
        if self.echo and entropies:
            reward = _mean([r for group in self._groups for r in group if r is not None])
            self.echo.end_step(step=self.state.global_step, reward=reward, entropy=entropies[-1])

    def _play(self, _prompts: list[Any], _trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func`: one episode a row, group members next to each other."""
        size = self.num_generations
        pairs = [(self._cases[case], at % size) for at, case in enumerate(self._batch)]
        generate = self.generator(self._spec.temperature)
        seed = derived_seed(
            self._spec.seed, "train", self.state.global_step, self.accelerator.process_index
        )
        self._scored = self._scorer.score(
            self._engine.play(pairs, generate, generate.end_ids, seed)
        )
        self._resample_dead_groups(generate, seed)
        episodes = [scored.episode for scored in self._scored]
        masked = [
            e.lost is not None or (self._spec.mask_truncated_completions and e.truncated)
            for e in episodes
        ]
        return {
            "prompt_ids": [episode.prompt_ids for episode in episodes],
            "completion_ids": [episode.completion_ids for episode in episodes],
            "logprobs": None,
            "env_mask": [
                [int(role is TokenRole.ACTION and not hidden) for role in episode.roles]
                for episode, hidden in zip(episodes, masked, strict=True)
            ],
        }

    def _resample_dead_groups(self, generate: TransformersGenerator, seed: int) -> None:
        """Play other cases in place of groups that teach nothing, as DAPO does (2503.14476)."""
        size, self._resampled = self.num_generations, 0
        for attempt in range(self._spec.resample_dead_groups):
            groups = grouped(self._scored, size)
            dead = [at for at, g in enumerate(groups) if is_dead([s.reward for s in g])]
            if not dead:
                return
            own_seed = derived_seed(seed, "resample", attempt)
            chosen = random.Random(own_seed).choices(self._cases, k=len(dead))
            pairs = [(case, index) for case in chosen for index in range(size)]
            fresh = self._scorer.score(
                self._engine.play(pairs, generate, generate.end_ids, own_seed)
            )
            for number, at in enumerate(dead):
                group = fresh[number * size : (number + 1) * size]
                if not is_dead([s.reward for s in group]):
                    self._scored[at * size : (at + 1) * size] = group
                    self._resampled += 1

    def _reward(self, prompts: list[Any], **_: Any) -> list[float | None]:
        rewards = group_rewards([scored.reward for scored in self._scored], self.num_generations)
        if any(reward is not None for reward in rewards):
            self._steps_without_reward = 0
            return rewards
        self._steps_without_reward += 1
        if self._steps_without_reward == STEPS_WITHOUT_REWARD:
            raise RunFailure(Reason.USER_CODE_ERROR, unscored_message(self._scored))
        return rewards

    def _count(self) -> None:
        """Our own metrics, beside TRL's; averaged over the steps of one log line."""
        episodes = [scored.episode for scored in self._scored]
        size = self.num_generations
        rewards = group_rewards([scored.reward for scored in self._scored], size)
        groups = self._groups = ranks.all_of(grouped(rewards, size))
        self.governor.observe(groups)
        calls = sum(len(episode.tool_calls) for episode in episodes)
        values = {
            "pass_rate": _mean([float(s.passed) for s in self._scored if s.reward is not None]),
            "environments/lost": float(sum(e.lost is not None for e in episodes)),
            "groups/dropped": _mean([float(None in group) for group in groups]),
            "groups/no_spread": _mean([float(is_dead(group)) for group in groups]),
            "groups/resampled": float(self._resampled),
            "tools/calls": calls / len(episodes),
            "tools/failed_share": sum(e.tool_failures for e in episodes) / calls if calls else 0.0,
            "tools/escaped_markup": float(sum(e.escaped_markup for e in episodes)),
            "tokens/observation": _mean(
                [float(e.roles.count(TokenRole.OBSERVATION)) for e in episodes]
            ),
        }
        for verdicts in zip(*(scored.verdicts for scored in self._scored), strict=True):
            known = [verdict.value for verdict in verdicts if verdict.value is not None]
            values[f"measures/{verdicts[0].measure}"] = _mean(known)
            values[f"measures/{verdicts[0].measure}/failed"] = float(len(verdicts) - len(known))
        stops = Counter(str(episode.stop_reason) for episode in episodes)
        values |= {f"stop/{reason}": count / len(episodes) for reason, count in stops.items()}
        for name, value in values.items():
            self._metrics["train"][name].append(value)

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


class EventCallback(TrainerCallback):
    """Turns TRL's log lines into events."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._steps_here = 0
        self._began = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Steps are timed from here."""
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say how far the run is."""
        self._steps_here += 1
        self._run.emit(
            EventType.PROGRESS,
            step=state.global_step,
            total_steps=state.max_steps,
            seconds_per_step=(time.monotonic() - self._began) / self._steps_here,
        )

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Write the metrics of the last few steps."""
        values = {
            name: value if math.isfinite(value) else None
            for name, value in (logs or {}).items()
            if isinstance(value, int | float) and not name.startswith("rewards/")
        }
        if "reward" in values:
            self._run.emit(EventType.METRICS, step=state.global_step, values=values)


def require_reporters(spec: TrainingSpec) -> None:
    """Check that the packages that metrics are reported with are there.

    Raises:
        RunFailure: One is not.
    """
    for name in spec.report_to:
        if importlib.util.find_spec(name) is None:
            raise RunFailure(
                Reason.MISSING_DEPENDENCY,
                f"training.report_to: the worker lacks the package {name}",
            )


def grpo_config(spec: TrainingSpec, output: Path, *, use_cpu: bool) -> GRPOConfig:
    """Our specification in TRL's words."""
    return GRPOConfig(
        output_dir=str(output),
        num_train_epochs=spec.epochs,
        max_steps=spec.max_steps or -1,
        per_device_train_batch_size=spec.batch_size,
        gradient_accumulation_steps=spec.gradient_accumulation,
        learning_rate=spec.learning_rate,
        lr_scheduler_type=spec.lr_scheduler,
        warmup_steps=spec.warmup_steps,
        adam_beta2=spec.adam_beta2,
        max_grad_norm=spec.max_grad_norm,
        num_generations=spec.num_generations,
        max_completion_length=spec.max_completion_length,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        loss_type=spec.loss_type,
        scale_rewards=spec.scale_rewards,
        beta=spec.beta,
        mask_truncated_completions=spec.mask_truncated_completions,
        logging_steps=spec.logging_steps,
        save_strategy="steps" if spec.save_steps else "no",
        save_steps=spec.save_steps or 500,
        save_total_limit=2,
        seed=spec.seed,
        use_cpu=use_cpu,
        ddp_timeout=ranks.PATIENCE_SECONDS,
        ddp_find_unused_parameters=False,
        bf16=spec.dtype == "bfloat16" and not use_cpu,
        fp16=spec.dtype == "float16" and not use_cpu,
        activation_checkpointing=spec.gradient_checkpointing,
        report_to=list(spec.report_to) or "none",
        disable_tqdm=True,
    )


def lora_config(spec: TrainingSpec) -> LoraConfig | None:
    """The adapter, if there is one."""
    if spec.lora is None:
        return None
    targets = spec.lora.target_modules
    return LoraConfig(
        r=spec.lora.r,
        lora_alpha=spec.lora.alpha,
        lora_dropout=spec.lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )


def unscored_message(scored: Sequence[Scored]) -> str:
    """Which measure failed on every rollout, and how."""
    lost = next((s.episode.lost for s in scored if s.episode.lost is not None), None)
    if lost is not None:
        return f"the environment fails in every rollout: {lost}"
    failed = next(v for s in scored for v in s.verdicts if v.value is None)
    return f"the measure {failed.measure!r} fails on every rollout: {failed.reason}"


def _padded(episodes: Sequence[Episode], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of whole episodes and their attention mask, (B, longest), padded on the right."""
    rows = [torch.tensor(e.prompt_ids + e.completion_ids) for e in episodes]
    ids = pad_sequence(rows, batch_first=True)
    attention = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids.to(device), attention.to(device)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
