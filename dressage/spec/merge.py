"""What a merge of an adapter into its base has done, and how it was checked."""

from pydantic import Field

from dressage.spec.base import Spec


class MergeReport(Spec):
    """Logits are compared in float32 on sample prompts; all figures are largest differences."""

    dtype: str = Field(description="Of the merged weights: the base's own.")
    adapter_effect: float = Field(description="Base with adapter against the base alone.")
    merge_gap: float = Field(
        description="Merged weights in float32 against base and adapter together."
    )
    stored_gap: float = Field(description="The same, after rounding to `dtype`: what is served.")
    stored_tolerance: float = Field(description="Of `stored_gap`, for this `dtype`.")
    streamed: bool = Field(
        description="One tensor at a time. False: the base's files have other names than its "
        "layers, or the adapter is of a kind that changes more, and the whole was in memory."
    )
    trained_in_4bit: bool = Field(
        description="The job trained on the 4-bit form of the base; the merge is into the base "
        "as it was published, so what it computes differs from training by the quantization."
    )
    untied: tuple[str, ...] = Field(
        default=(),
        description="Layers that shared their weights with another one until the merge.",
    )
