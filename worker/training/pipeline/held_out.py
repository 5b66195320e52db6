"""Evaluations on the held-out cases: before, during and after training."""

from pathlib import Path

from dressage.seeds import derived_seed
from dressage.spec.event import Evaluation, EventType
from dressage.spec.job import JobSpec
from dressage.spec.status import Reason
from dressage.spec.suite import Case
from worker.training.evaluate import CaseScore, summary
from worker.training.pipeline.parts import Parts
from worker.training.process.failures import RunFailure
from worker.training.rewards.record import rollout_record
from worker.training.rewards.weighted import ScoredRollout, grouped, unscored_message
from worker.training.sampler.protocol import Draws
from worker.training.update import ranks
from worker.wire.run_dir import RunDirectory, write_whole

BEFORE, AFTER = "before", "after"
AT_ONCE = 128  # rollouts: each may have an environment, a process of its own


class HeldOut:
    """Evaluates the model as it is on the held-out cases, always with the same seeds."""

    def __init__(
        self,
        run: RunDirectory,
        job: JobSpec,
        parts: Parts,
        previous: tuple[Path, ...],
    ) -> None:
        self._run, self._job, self._parts = run, job, parts
        self._previous = previous
        self.done: dict[str, Evaluation] = {}

    def at(self, name: str, cases: list[Case], *, step: int) -> Evaluation:
        """Evaluate now and store the result under a name."""
        stored = self._stored(name) if name == BEFORE else None
        if stored:  # an earlier attempt has measured the base model already
            self.done[name] = stored
            return stored
        temperature = self._job.evaluation.temperature
        if temperature is None:
            temperature = self._job.training.temperature
        trainer = self._parts.trainer
        seed = derived_seed(self._job.training.seed, "evaluation")
        draws = Draws(trainer.rollouts.sampling(temperature), seed)
        own = cases[ranks.rank() :: ranks.count()]
        own_scored: list[ScoredRollout] = []
        for batch in grouped(own, AT_ONCE):
            for one in trainer.play([(case, 0) for case in batch], draws):
                self._run.emit(EventType.ROLLOUT, **rollout_record(one, name, step))
                own_scored.append(one)
        scored = ranks.all_of([CaseScore.of(one) for one in own_scored])
        if all(s.reward is None for s in scored):
            why = ranks.all_of([unscored_message(own_scored)] if own_scored else [])
            raise RunFailure(Reason.USER_CODE_ERROR, why[0])
        result = summary(name, step, scored, self._job.rewards)
        if trainer.echo:
            own_sum = trainer.environment_cross_entropy([one.rollout for one in own_scored])
            nats, tokens = map(sum, zip(*ranks.all_of([own_sum]), strict=True))
            curve = nats / tokens if tokens else None
            result = result.model_copy(update={"environment_cross_entropy": curve})
        self.done[name] = result
        if ranks.rank() == 0:
            text = result.model_dump_json().encode()
            write_whole(_evaluation_file(self._run.path, name), lambda file: file.write(text))
        self._run.emit(EventType.EVALUATION, **result.model_dump())
        return result

    def _stored(self, name: str) -> Evaluation | None:
        for run in reversed(self._previous):
            file = _evaluation_file(run, name)
            if file.is_file():
                return Evaluation.model_validate_json(file.read_bytes())
        return None


def _evaluation_file(run: Path, name: str) -> Path:
    return run / "evaluations" / f"{name}.json"
