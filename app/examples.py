"""What the API documentation shows for each route. A test holds them against the models."""

from typing import Any

from dressage.spec.job import EXAMPLE

TIME = "2026-11-02T09:30:00Z"
SUITE = {
    "id": "suite_5f0c7d9e1b2a4c6d8e0f",
    "team": "default",
    "name": "arithmetic",
    "version": 3,
    "content_hash": "9f2c5f2d1e0b7a4c8d6e3f1a2b5c7d9e0f1a3b5c7d9e1f2a4b6c8d0e2f4a6b8c",
    "case_count": 384,
    "tools": [
        {
            "name": "calculate",
            "description": "Evaluate arithmetic.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"description": "The expression.", "type": "string"}},
                "required": ["expression"],
            },
        }
    ],
    "measures": ["correct_answer"],
    "created_at": TIME,
}
ADJUSTMENT = {
    "field": "suite",
    "requested": "arithmetic",
    "effective": "arithmetic@3",
    "reason": "a job runs on one exact version",
}
EFFECTIVE = {**EXAMPLE, "suite": "arithmetic@3"}
ARTIFACT = {
    "id": "artifact_0a1b2c3d4e5f60718293",
    "kind": "adapter",
    "name": "adapter.tar",
    "size": 1105920,
    "sha256": "d7e86fbe3faf433fd0d2a7eadd802233ecb735def101a6e009355afd8d5be8e2",
    "created_at": TIME,
}
CHECKPOINT = {"step": 24, "time": TIME, "file": "checkpoint-24.tar"}
GAIN = {
    "before": 0.39,
    "after": 0.89,
    "difference": 0.5,
    "low": 0.41,
    "high": 0.59,
    "count": 128,
}
EXPORT_SPEC = {"type": "gguf", "quantization": "q8_0"}
EXPORT = {
    "id": "export_77aa88bb99cc00dd11ee",
    "name": "gguf-q8_0",
    "spec": {"type": "gguf", "quantization": "q8_0"},
    "status": "running",
    "attempts": 1,
    "created_at": TIME,
}
JOB = {
    "id": "job_a59890ef5203c3918052",
    "team": "default",
    "name": "calculator-agent",
    "status": "exporting",
    "spec": EFFECTIVE,
    "adjustments": [ADJUSTMENT],
    "progress": {"step": 32, "total_steps": 32, "reward": 0.86, "loss": -0.03},
    "result": {"final_loss": -0.03, "steps": 32, "model": "adapter.tar", "gain": GAIN},
    "exports": [EXPORT],
    "artifacts": [ARTIFACT],
    "attempts": 1,
    "created_at": TIME,
    "started_at": TIME,
}
METRICS_ROW = {
    "step": 32,
    "time": TIME,
    "values": {"reward": 0.86, "loss": -0.03, "measures/correct_answer": 0.86, "stop/completed": 1},
}
EVENT = {
    "seq": 41,
    "type": "metrics",
    "time": TIME,
    "data": {"step": 32, "values": METRICS_ROW["values"]},
}
LOG = {
    "seq": 57,
    "type": "log",
    "time": TIME,
    "data": {"level": "info", "message": "continuing from checkpoint-24"},
}
ROLLOUT = {
    "id": "train-32-31855c2efb34-0",
    "phase": "train",
    "step": 32,
    "case_id": "31855c2efb34",
    "index": 0,
    "messages": [
        {"role": "user", "content": "What is 6 * 7?"},
        {"role": "assistant", "content": "The answer is 42."},
    ],
    "token_ids": [12, 7, 9, 33, 2],
    "roles": "pppaa",
    "stop_reason": "completed",
    "reward": 1.0,
    "verdicts": [{"measure": "correct_answer", "value": 1.0, "reason": "right number"}],
    "advantage": 0.66,
}
EVALUATION = {
    "name": "after",
    "step": 32,
    "count": 128,
    "unscored": 0,
    "mean_reward": 0.89,
    "pass_rate": 0.89,
    "rewards": {"31855c2efb34": 1.0},
    "passed": {"31855c2efb34": True},
}
PREVIEW = {
    "items": [{"reward": 1.0, "passed": True, "verdicts": ROLLOUT["verdicts"]}],
}
COMPARISON = {
    "items": [
        {
            "job_id": job_id,
            "job_name": "calculator-agent",
            "suite": "arithmetic@1",
            "evaluation": "after",
            "step": 32,
            "count": 128,
            "pass_rate": rate,
            "mean_reward": rate,
        }
        for job_id, rate in (("job_a59890ef5203c3918052", 0.84), ("job_b1c2d3e4f5a6b7c8d9e0", 0.88))
    ],
    "pairs": [
        {
            "first": "job_a59890ef5203c3918052",
            "second": "job_b1c2d3e4f5a6b7c8d9e0",
            "pass_rate": GAIN,
            "reward": GAIN,
            "better": ["c17"],
            "worse": [],
            "notes": [],
        }
    ],
}
REGRADE = {
    "items": [
        {
            "id": "train-32-c17-0",
            "phase": "train",
            "step": 32,
            "case_id": "c17",
            "index": 0,
            "reward_before": 0.0,
            "reward": 1.0,
            "passed": True,
            "advantage_before": -0.5,
            "advantage": 1.5,
            "verdicts": ROLLOUT["verdicts"],
        }
    ],
    "phases": [
        {
            "phase": "train",
            "rollouts": 64,
            "changed": 1,
            "mean_reward_before": 0.5,
            "mean_reward": 0.52,
            "pass_rate": 0.52,
            "groups": 8,
            "groups_with_spread_before": 6,
            "groups_with_spread": 7,
            "turned": 8,
        }
    ],
    "gain": GAIN,
    "reward_gain": None,
    "notes": [],
}
GENERATION = {
    "id": "generation_9f8e7d6c5b4a39281706",
    "job_id": "job_a59890ef5203c3918052",
    "status": "succeeded",
    "reason": "completed",
    "result": {
        "answer": "The answer is 42.",
        "tool_calls": [
            {
                "name": "calculate",
                "arguments": {"expression": "6 * 7"},
                "result": "42",
                "error": None,
            }
        ],
        "messages": ROLLOUT["messages"],
        "stop_reason": "completed",
        "prompt_tokens": 143,
        "completion_tokens": 41,
    },
    "created_at": TIME,
    "finished_at": TIME,
}
SWEEP_SPEC = {
    "name": "echo or not",
    "base": {key: value for key, value in EXAMPLE.items() if key != "exports"},
    "grid": {"training.echo.coeff": [0, 0.05], "training.seed": [0, 1, 2]},
}
SWEEP = {
    "id": "sweep_1b2c3d4e5f6071829300",
    "team": "default",
    "name": "echo or not",
    "grid": SWEEP_SPEC["grid"],
    "arms": [
        {
            "values": {"training.echo.coeff": 0.05},
            "jobs": ["job_a59890ef5203c3918052"],
            "statuses": {"succeeded": 3},
            "pass_rate": {"mean": 0.89, "low": 0.85, "high": 0.93, "count": 3},
            "gain": {"mean": 0.5, "low": 0.45, "high": 0.55, "count": 3},
        }
    ],
    "created_at": TIME,
}
CASE = {
    "id": "31855c2efb34",
    "input": "What is 6 * 7?",
    "expect": {"answer": "42"},
    "metadata": {},
}


def page(item: dict[str, Any], next_cursor: str | None = None) -> dict[str, Any]:
    """A list with one entry."""
    return {"items": [item], "next_cursor": next_cursor}


def shown(example: Any, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """The `responses` entry that shows an example."""
    return {status: {"content": {"application/json": {"example": example}}}}


WAIT = {
    "position": 2,
    "wait_reason": "busy",
    "reason": "no free GPU; behind 1 queued jobs",
    "estimated_start": {"earliest": "2026-11-02T09:48:00Z", "latest": "2026-11-02T10:14:00Z"},
    "looked_at": TIME,
}
QUEUE = {
    "items": [
        {
            **WAIT,
            "job_id": "job_a59890ef5203c3918052",
            "name": "calculator-agent",
            "team": "default",
            "priority": "normal",
            "gpus": 1,
            "queued_at": TIME,
        }
    ],
    "running": 4,
    "gpus": 4,
    "gpus_free": 0,
}
WORKER = {
    "id": "gpu-1-4711-0a1b2c",
    "hostname": "gpu-1",
    "queue": "training",
    "gpus": 4,
    "gpu_type": "NVIDIA H100 80GB HBM3",
    "gpu_memory_gb": 79.6,
    "labels": ["nvlink"],
    "versions": {"python": "3.11.9", "torch": "2.13.0", "trl": "1.16.0", "driver": "580.65"},
    "state": "active",
    "state_reason": None,
    "jobs": ["job_a59890ef5203c3918052"],
    "started_at": TIME,
    "heartbeat_at": TIME,
}
LIMITS = {"weight": 2, "max_running_gpus": 4, "gpu_seconds_per_day": 172800}
TEAM = {
    "name": "search",
    **LIMITS,
    "max_queued_jobs": None,
    "gpu_seconds_per_month": None,
    "max_storage_bytes": None,
    "keep_files_days": None,
    "running_gpus": 1,
    "queued_jobs": 2,
    "storage_bytes": 1105920,
    "created_at": TIME,
}
KEY_SPEC = {"team": "search", "role": "submitter", "name": "nightly runs"}
KEY = {
    "id": "key_0f1e2d3c4b5a69788796",
    **KEY_SPEC,
    "prefix": "drs_Zk3p9QaX",
    "requests_per_minute": None,
    "created_at": TIME,
    "expires_at": None,
    "revoked_at": None,
}
NEW_KEY = {**KEY, "secret": "drs_Zk3p9QaX0u7c1mJt5yWvB2nHs8dLr4eF6gKoTiPqMxA"}
USAGE = {
    "since": "2026-10-03T09:30:00Z",
    "until": TIME,
    "items": [{"team": "search", "attempts": 12, "gpu_seconds": 86400.0, "seconds": 86400.0}],
}
AUDIT = {
    "time": TIME,
    "team": "search",
    "key_id": "key_0f1e2d3c4b5a69788796",
    "action": "POST /jobs/{job_id}/cancel",
    "target": "/jobs/job_a59890ef5203c3918052/cancel",
}
WEBHOOK_SPEC = {
    "url": "https://ci.example.com/hooks/dressage",
    "statuses": ["succeeded", "failed"],
}
WEBHOOK = {
    "id": "webhook_1a2b3c4d5e6f70819203",
    "team": "search",
    **WEBHOOK_SPEC,
    "created_at": TIME,
}
NEW_WEBHOOK = {**WEBHOOK, "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw9QF3bH1xT0c="}
DELIVERY = {
    "id": "msg_9c8b7a6f5e4d3c2b1a09",
    "status": "delivered",
    "attempts": 1,
    "next_at": None,
    "last_status": 200,
    "last_error": None,
    "payload": {
        "type": "job.succeeded",
        "timestamp": TIME,
        "data": {
            "job_id": "job_a59890ef5203c3918052",
            "team": "search",
            "name": "calculator-agent",
            "status": "succeeded",
            "reason": "completed",
            "message": None,
        },
    },
    "created_at": TIME,
    "finished_at": TIME,
}
