"""What the author of a suite imports: tools, measures and suites in plain Python.

In: typed functions and case records. Out: schemas, verdicts, an uploadable suite.
Not here: running any of it (dressage.sandbox) or training with it (worker.training).
"""

from dressage.authoring.environment import Environment, EnvironmentCase
from dressage.authoring.measure import (
    Measure,
    MeasureContext,
    MeasureResult,
    fail_reason,
    measure,
    pass_reason,
    score,
)
from dressage.authoring.reward_function import RewardFunction, reward_function
from dressage.authoring.rollout_func import PolicyModel, RolloutFunction, rollout_func
from dressage.authoring.suite import FieldMapping, Suite, SuiteError
from dressage.authoring.tool import FunctionTool, function_tool

__all__ = [
    "Environment",
    "EnvironmentCase",
    "FieldMapping",
    "FunctionTool",
    "Measure",
    "MeasureContext",
    "MeasureResult",
    "PolicyModel",
    "RewardFunction",
    "RolloutFunction",
    "Suite",
    "SuiteError",
    "fail_reason",
    "function_tool",
    "measure",
    "pass_reason",
    "reward_function",
    "rollout_func",
    "score",
]
