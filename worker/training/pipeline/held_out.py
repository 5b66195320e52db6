"""Evaluations on the held-out cases: before, during and after training."""

from pathlib import Path

from dressage.spec.event import Evaluation, EventType
from dressage.spec.job import JobSpec
from dressage.spec.status import Reason
from dressage.spec.suite import Case
from worker.training.evaluate import summary
from worker.training.pipeline.parts import Parts
from worker.training.process.failures import RunFailure
from worker.training.process.seeds import derived_seed
from worker.training.rewards.record import rollout_record
from worker.training.rewards.weighted import unscored_message
from worker.training.update import ranks
from worker.wire.run_dir import RunDirectory, write_whole

BEFORE, AFTER = "before", "after"


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
        generate = self._parts.trainer.sampler(temperature)
        seed = derived_seed(self._job.training.seed, "evaluation")
        own = cases[ranks.rank() :: ranks.count()]
        played = self._parts.engine.play(
            [(case, 0) for case in own], generate, generate.end_ids, seed
        )
        own_scored = self._parts.scorer.score(played)
        for one in own_scored:
            self._run.emit(EventType.ROLLOUT, **rollout_record(one, name, step))
        scored = ranks.all_of(own_scored)
        if all(s.reward is None for s in scored):
            raise RunFailure(Reason.USER_CODE_ERROR, unscored_message(scored))
        result = summary(name, step, scored)
        if self._parts.trainer.echo:
            curve = self._parts.trainer.environment_cross_entropy([s.rollout for s in scored])
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
