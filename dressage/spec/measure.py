"""Which measures make up the reward."""

from pydantic import Field

from dressage.spec.base import Spec


class RewardSpec(Spec):
    """One measure and its weight in the reward."""

    measure: str = Field(min_length=1, description="Name of a `@measure` function in the suite.")
    weight: float = Field(default=1.0, description="The reward is the weighted sum.")
