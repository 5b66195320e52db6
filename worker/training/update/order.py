"""The order of cases: TRL's own in the first epoch, and known in every other."""

from trl.trainer.utils import RepeatSampler

from dressage.seeds import derived_seed


class EpochSampler(RepeatSampler):
    """Draws each epoch's order from the seed and the epoch's number alone.

    TRL's sampler continues with one generator, so a run that is taken up in its second epoch would
    see the order of the first again.
    """

    @classmethod
    def like(cls, sampler: RepeatSampler) -> "EpochSampler":
        """Make one with the same repetitions as another sampler."""
        return cls(
            sampler.data_source,
            sampler.mini_repeat_count,
            sampler.batch_size,
            sampler.repeat_count,
            sampler.shuffle,
            sampler.seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before each epoch, also after a resume."""
        self.generator.manual_seed(
            self.seed if epoch == 0 else derived_seed(self.seed, "order", epoch)
        )
