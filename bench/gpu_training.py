"""How fast a card trains: our jobs against what people would write with TRL and vLLM themselves.

Random weights of Qwen3's published shapes, so that no hub is needed; rollouts of given lengths, the
same in all arms; each arm in a process of its own, on the same card, one after the other; medians
of steps after warm-up. Ours are whole jobs, as a worker runs them: template, sandbox, measures,
events and history included. What the model writes is not read: a random model calls no tools.

single turn  16 cases × 8 rollouts, 140 + 256 tokens.
agents       16 cases × 8 rollouts, 300 tokens of prompt, 3 turns of 16 to 256 tokens (log-normal)
             and between them tools of 0.1 to 3 s (log-normal) with about 50 tokens of result.

TRL's own tool loop runs every call of every rollout one after the other (1.16): its figure is the
careful script's step with the sum of the same tool times in place of the longest, not run.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SHAPES = {  # hidden, mlp, layers, query heads, key-value heads, vocabulary
    "tiny": (256, 768, 4, 4, 2, 1024),
    "0.6b": (1024, 3072, 28, 16, 8, 151936),
    "1.7b": (2048, 6144, 28, 16, 8, 151936),
}
GROUPS, SIZE = 16, 8
ROLLOUTS = GROUPS * SIZE
PROMPT, COMPLETION = 140, 256
AGENT_PROMPT, TURNS, RESULT = 300, 3, 50
AGENT_LENGTH = TURNS * 256 + 2 * (RESULT + 20)
LORA = {"r": 16, "alpha": 32, "dropout": 0.0}
COMMON = {
    "num_generations": SIZE,
    "learning_rate": 1e-5,
    "temperature": 0.8,
    "mask_truncated_completions": False,
    "lora": LORA,
    "vllm": {"gpu_memory_utilization": 0.3},
    "logging_steps": 1,
    "pause_after_dead_steps": None,
    "keep_rollouts": 0,
}
OURS = {
    # name: (agents, training beside COMMON, steps, warm-up)
    "ours-same": (False, {"batch_size": 32, "gradient_accumulation": 4, "compile": False}, 6, 2),
    "ours": (False, {"batch_size": 32, "gradient_accumulation": 4}, 10, 4),
    "agents-ours": (True, {"batch_size": 16, "gradient_accumulation": 8}, 8, 3),
    "agents-echo": (
        True,
        {"batch_size": 16, "gradient_accumulation": 8, "echo": {"coeff": 0.05}},
        8,
        3,
    ),
    "agents-flow": (
        True,
        {"batch_size": 16, "gradient_accumulation": 8, "max_staleness": 2},
        16,
        6,
    ),
    "agents-flow3": (
        True,
        {"batch_size": 16, "gradient_accumulation": 8, "max_staleness": 3},
        16,
        6,
    ),
}
TRL = {"trl": (False, 32, 6, 2), "agents-trl": (True, 16, 4, 1)}  # agents, micro-batch, steps, …
QUICK = ("trl", "ours")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one turn alone")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--arms", nargs="+", choices=[*TRL, *OURS])
    parser.add_argument("--limit", type=float, default=400, help="seconds for an arm")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.shape)
        return
    found = {}
    for arm in options.arms or (QUICK if options.quick else [*TRL, *OURS]):
        result = run_arm(arm, options)
        if result:
            found[arm] = result
            shown = {k: v for k, v in result.items() if k != "steps"}
            print(f"{arm:14}", json.dumps(shown), flush=True)
    report(found)


def run_arm(arm, options):
    """The last line of a process of its own; None: it failed, and its output is shown."""
    command = [sys.executable, __file__, "--one", arm, "--shape", options.shape]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log, Busy() as busy:
        child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            child.wait(options.limit)
        except subprocess.TimeoutExpired:
            print(f"{arm}: not done within {options.limit:g} s", flush=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        log.seek(0)
        text = log.read()
    results = [line[4:] for line in text.splitlines() if line.startswith("ARM ")]
    if not results:
        print(f"{arm} failed:\n{text[-6000:]}", flush=True)
        return None
    result = json.loads(results[-1])
    share = busy.share(*result.pop("timed"))
    return result | ({} if share is None else {"busy": round(share, 3)})


class Busy:
    """How much of the time the card has something to do, as its driver counts."""

    def __enter__(self):
        self._seen, self._over = [], threading.Event()
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def _look(self):
        try:
            import pynvml

            pynvml.nvmlInit()
            card = pynvml.nvmlDeviceGetHandleByIndex(0)
            while not self._over.wait(0.1):
                used = pynvml.nvmlDeviceGetUtilizationRates(card).gpu
                self._seen.append((time.time(), used / 100))
        except Exception as error:  # noqa: BLE001  no driver: no figure
            print(f"no figure for busy: {error}", flush=True)

    def __exit__(self, *_):
        self._over.set()

    def share(self, begin, end):
        inside = [used for at, used in self._seen if begin <= at <= end]
        return statistics.fmean(inside) if inside else None


def report(found):
    def ratio(better, worse):
        if better in found and worse in found:
            return round(found[worse]["step"] / found[better]["step"], 3)
        return None

    figures = {
        "overhead_vllm": ratio("trl", "ours-same"),
        "speedup": ratio("ours", "trl"),
        "agent_speedup": ratio("agents-flow", "agents-trl"),
        "agent_speedup_3": ratio("agents-flow3", "agents-trl"),
        "agent_speedup_on_policy": ratio("agents-ours", "agents-trl"),
        "echo_step_ratio": ratio("agents-ours", "agents-echo"),
    }
    if figures["agent_speedup"]:
        flow = found["agents-flow"]["step"]
        figures["agent_speedup_trl_tools"] = round(found["agents-trl"]["trl_tools"] / flow, 1)
    if figures["echo_step_ratio"]:
        figures["echo_update_ratio"] = round(
            found["agents-echo"]["update"] / found["agents-ours"]["update"], 3
        )
        peak = found["agents-echo"]["peak_gib"] / found["agents-ours"]["peak_gib"]
        figures["echo_memory_ratio"] = round(peak, 3)
    if "ours" in found:
        figures["busy"] = found["ours"].get("busy")
    print(f"\n{'':14}{'rollouts/s':>12}{'s a step':>10}{'rollouts':>10}{'update':>8}{'GiB':>7}")
    for arm, result in found.items():
        print(
            f"{arm:14}{result['rollouts_per_s']:>12.1f}{result['step']:>10.3f}"
            f"{result.get('rollouts', math.nan):>10.3f}{result.get('update', math.nan):>8.3f}"
            f"{result['peak_gib']:>7.1f}"
        )
    print(json.dumps({name: value for name, value in figures.items() if value is not None}))


def one(arm, shape):
    folder = Path(tempfile.gettempdir(), f"dressage-bench-{shape}")
    if not folder.exists():
        write_random_model(folder, shape)
    result = ours(arm, folder) if arm in OURS else trl(arm, folder)
    print("ARM", json.dumps(result), flush=True)


def lengths(case, member):
    drawn = random.Random(f"{case}/{member}")
    sizes = (drawn.lognormvariate(math.log(90), 0.6) for _ in range(TURNS))
    return [max(16, min(256, round(size))) for size in sizes]


def latencies(case, member):
    drawn = random.Random(f"tool {case}/{member}")
    times = (drawn.lognormvariate(math.log(0.4), 0.8) for _ in range(TURNS - 1))
    return [max(0.1, min(3.0, seconds)) for seconds in times]


def timed(ends, warm_up):
    """Seconds of each step, from the end of one to the end of the next; and when."""
    return [b - a for a, b in pairwise(ends)][warm_up - 1 :], (ends[warm_up - 1], ends[-1])


CODE = '''
import time
from dressage.authoring import function_tool, measure, pass_reason, fail_reason

@function_tool
def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "result " * 7

@measure
def even(ctx):
    """Half of all answers, by what was written."""
    return pass_reason("even") if sum(map(ord, ctx.final.text)) % 2 else fail_reason("odd")
'''


def ours(arm, folder):
    """A job's run directory, trained as a worker has it trained."""
    agents, training, steps, warm_up = OURS[arm]
    from dressage.authoring import Suite
    from dressage.spec.suite import Case
    from worker.training.process.boundary import run_process
    from worker.wire.run_dir import EVENTS, SPEC, SUITE

    as_long_as_told(agents)
    size = PROMPT - 12 if not agents else AGENT_PROMPT - 160
    cases = [
        Case(id=f"c{at}", input=(f"case {at} " + "abcdefgh" * 50)[:size])
        for at in range(GROUPS * (steps + 4))
    ]
    job = {
        "name": arm,
        "agent": {"model": str(folder), **({"tools": ["wait"]} if agents else {})},
        "suite": "bench@1",
        "rewards": [{"measure": "even"}],
        "training": {
            **COMMON,
            **training,
            "max_steps": steps,
            "max_completion_length": AGENT_LENGTH if agents else COMPLETION,
        },
        "evaluation": {"holdout": 0},
        "preflight": {"cases": 0},
        "resources": {"gpus": 1},
    }
    run = Path(tempfile.mkdtemp())
    (run / SPEC).write_text(json.dumps({"job": job}))
    (run / SUITE).write_bytes(Suite(tuple(cases), {"suite.py": CODE.encode()}).to_archive())
    began = time.time()
    from worker.training.pipeline.run import run_job

    if run_process(run, run_job):
        raise SystemExit((run / "failure.json").read_text())
    events = [json.loads(line) for line in (run / EVENTS).read_text().splitlines()]
    ends = [
        datetime.fromisoformat(e["time"]).timestamp() for e in events if e["type"] == "progress"
    ]
    took, when = timed(ends, warm_up)
    lines = [e["data"]["values"] for e in events if e["type"] == "metrics"][warm_up:]

    def median(name):
        known = [line[name] for line in lines if line.get(name) is not None]
        return round(statistics.median(known), 4) if known else None

    step = statistics.median(took)
    return {
        "rollouts_per_s": round(ROLLOUTS / step, 1),
        "step": round(step, 3),
        "rollouts": median("time/rollouts"),
        "update": median("time/update"),
        "hand_over": median("time/hand_over"),
        "gap": median("sampling/sampling_logp_difference/mean"),
        "canary_gap": median("sampling/canary_gap/mean"),
        "clipped": median("sampling/clipped_share"),
        "age": median("rollouts/age/mean"),
        "oldest": max((line.get("rollouts/age/max") or 0 for line in lines), default=None),
        "padding": median("update/padding_share"),
        "passes": median("update/passes"),
        "completion": median("completions/mean_length"),
        "peak_gib": median("memory/peak_gib"),
        "first_step_s": round(ends[0] - began, 1),
        "steps": [round(seconds, 2) for seconds in took],
        "timed": when,
    }


def as_long_as_told(agents):
    """Rollouts of given lengths: what a random model writes calls no tool and never ends."""
    from worker.training.rollout.engine import RolloutEngine
    from worker.training.rollout.rollout import StopReason

    turns = TURNS if agents else 1

    def room(self, rollout):
        case = int(rollout.case.id[1:])
        return lengths(case, rollout.index)[rollout.iterations] if agents else COMPLETION

    def take_turn(self, rollout, prefix, sampled, end_ids):
        rollout.append_action(sampled)
        text = self._template.tokenizer.decode(sampled.ids[-8:])
        rollout.messages.append({"role": "assistant", "content": text})
        if rollout.iterations == turns - 1:
            rollout.stop_reason = StopReason.COMPLETED
            return []
        seconds = latencies(int(rollout.case.id[1:]), rollout.index)[rollout.iterations]
        return [{"name": "wait", "arguments": {"seconds": seconds}}]

    def shown(self, rollout, results):
        rollout.iterations += 1
        suffix = self._template.tool_suffix(
            [{"role": "tool", "name": one.name, "content": str(one.result)} for one in results]
        )
        rollout.append_results(suffix, [one.name for one in results])

    RolloutEngine._room, RolloutEngine._take_turn = room, take_turn
    RolloutEngine._show = shown


def trl(arm, folder):
    """The script that somebody would write: TRL, vLLM beside it, tools of a turn together."""
    agents, micro, steps, warm_up = TRL[arm]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    spent, ends, sums = {}, [], []

    def rollout(prompts, trainer):
        from vllm import SamplingParams

        first = trainer.state.global_step * GROUPS
        places = [(first + at // SIZE, at % SIZE) for at in range(ROLLOUTS)]
        prompt_ids = [[3 + (case * 7 + j) % 250 for j in range(AGENT_PROMPT)] for case, _ in places]
        done, mask, logps = ([[] for _ in places] for _ in range(3))
        waited = 0.0
        for turn in range(TURNS):
            sampling = [
                SamplingParams(
                    max_tokens=lengths(*place)[turn], ignore_eos=True, temperature=0.8, logprobs=0
                )
                for place in places
            ]
            asked = [{"prompt_token_ids": a + b} for a, b in zip(prompt_ids, done, strict=True)]
            outs = trainer.vllm_generation.llm.generate(asked, sampling, use_tqdm=False)
            for at, out in enumerate(outs):
                (said,) = out.outputs
                done[at] += list(said.token_ids)
                mask[at] += [1] * len(said.token_ids)
                logps[at] += [
                    p[i].logprob for p, i in zip(said.logprobs, said.token_ids, strict=True)
                ]
            if turn < TURNS - 1:
                times = [latencies(*place)[turn] for place in places]
                time.sleep(max(times))
                waited += sum(times) - max(times)
                for at in range(ROLLOUTS):
                    done[at] += [7 + k % 200 for k in range(RESULT)]
                    mask[at] += [0] * RESULT
                    logps[at] += [0.0] * RESULT
        sums.append(waited)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": done,
            "logprobs": logps,
            "env_mask": mask,
        }

    class Steps(TrainerCallback):
        def on_step_begin(self, *_, **__):
            torch.cuda.synchronize()
            spent["began"] = time.time()

        def on_step_end(self, *_, **__):
            torch.cuda.synchronize()
            ends.append(time.time())

    data = [
        {"prompt": [{"role": "user", "content": (f"case {at} " + "abcdefgh" * 30)[: PROMPT - 12]}]}
        for at in range(GROUPS * steps)
    ]
    trainer = GRPOTrainer(
        model=str(folder),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=ROLLOUTS // micro,
            num_generations=SIZE,
            max_completion_length=AGENT_LENGTH if agents else COMPLETION,
            max_steps=steps,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            bf16=True,
            temperature=0.8,
            learning_rate=1e-5,
            gradient_checkpointing=False,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.3,
            vllm_max_model_length=2048,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(data),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        reward_funcs=[lambda completions, **_: [float(hash(str(c)) % 2) for c in completions]],
        callbacks=[Steps()],
        **({"rollout_func": rollout} if agents else {}),
    )
    trainer.train()
    took, when = timed(ends, warm_up)
    step = statistics.median(took)
    result = {
        "rollouts_per_s": round(ROLLOUTS / step, 1),
        "step": round(step, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "steps": [round(seconds, 2) for seconds in took],
        "timed": when,
    }
    if agents:
        result["trl_tools"] = round(step + statistics.median(sums), 1)
    return result


def write_random_model(folder, shape):
    """A random bfloat16 Qwen3 of a published shape: as fast as the real one."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl.chat_template_utils import qwen3_chat_template

    hidden, mlp, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128 if hidden > 512 else 64,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokens = ["<|pad|>", "<|im_end|>", "<|im_start|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<t{number}>" for number in range(vocabulary - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={t: at for at, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:3])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>"
    )
    fast.chat_template = qwen3_chat_template
    fast.save_pretrained(folder)


if __name__ == "__main__":
    main()
