"""How long a turn takes when 16 rollouts call a tool of 200 ms: ours, and TRL's own tool loop.

No model runs: both loops are handed the same written turns, so that the wall is the tools'.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from transformers import AutoConfig, AutoTokenizer
from trl import GRPOTrainer

from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Sandbox
from dressage.spec.suite import Case
from worker.training.rollout.engine import AgentParts, RolloutEngine, RolloutLimits
from worker.training.rollout.template import ConversationTemplate
from worker.training.sampler.protocol import Draws, Sampled, Sampling

MODEL = Path(__file__).resolve().parent.parent / "examples" / "tiny_agent" / "model"
ROLLOUTS, TOOL_SECONDS = 16, 0.2
CALL = '<tool_call>\n{"name": "wait", "arguments": {"n": 1}}\n</tool_call>'
CODE = f'''
import time
from dressage.authoring import function_tool

@function_tool
def wait(n: int) -> str:
    """Wait.

    Args:
        n: A number.
    """
    time.sleep({TOOL_SECONDS})
    return str(n)
'''


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    repetitions = 3 if parser.parse_args().quick else 10
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ours = statistics.median(our_turns(tokenizer, repetitions))
    trl = statistics.median(trl_turns(tokenizer, repetitions))
    print(f"{ROLLOUTS} rollouts, a tool of {TOOL_SECONDS * 1000:.0f} ms, one turn (median):")
    print(f"  ours {ours:6.3f} s   {ours / TOOL_SECONDS:5.2f} tool times")
    print(f"  TRL  {trl:6.3f} s   {trl / TOOL_SECONDS:5.2f} tool times")
    figures = {"turn_ratio": ours / TOOL_SECONDS, "trl_turn_ratio": trl / TOOL_SECONDS}
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


def our_turns(tokenizer, repetitions):
    written = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in (CALL, "done")]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tools.py").write_text(CODE)
        pool = WorkerPool(Sandbox(Path(folder)), size=ROLLOUTS)
        engine = RolloutEngine(
            template=ConversationTemplate(tokenizer, pool.sandbox.tools),
            agent=AgentParts(None, None, 0),
            pool=pool,
            limits=RolloutLimits(400, 1024, 1, 30.0, 1000),
        )
        cases = [(Case(id=str(n), input="question"), 0) for n in range(ROLLOUTS)]
        times = []
        for _ in range(repetitions + 1):
            started = time.perf_counter()
            engine.play(cases, Written(tokenizer, written), Draws(Sampling(1.0), 0))
            times.append(time.perf_counter() - started)
        pool.close()
    return times[1:]  # the first one forks the workers


class Written:
    """A sampler without a model: a call, then an answer."""

    def __init__(self, tokenizer, written):
        self._call, self._answer = written
        self._first = None
        self.end_ids = frozenset([tokenizer.eos_token_id])

    async def sample(self, turn):
        self._first = self._first or len(turn.prompt)
        ids = self._call if len(turn.prompt) == self._first else self._answer
        return Sampled(ids, [0.0] * len(ids), [0] * len(ids))

    def join(self, players=1):
        pass

    def leave(self, players=1):
        pass


def trl_turns(tokenizer, repetitions):
    """TRL's loop as it stands, on an object that has just what the loop reads."""

    def wait(n: int) -> str:
        time.sleep(TOOL_SECONDS)
        return str(n)

    class Loop(GRPOTrainer):
        def __init__(self):
            self.max_tool_calling_iterations, self.max_completion_length = 1, 400
            self.processing_class = self._tokenizer = ConversationTemplate(
                tokenizer, [TOOL]
            ).tokenizer
            self.chat_template, self.chat_template_kwargs, self._is_vlm = None, {}, False
            self._sync_tool_dicts = [{"wait": wait}] * ROLLOUTS
            self._async_tool_dicts = [{}] * ROLLOUTS
            self.model = SimpleNamespace(config=AutoConfig.from_pretrained(MODEL))
            self.environment_factories, self.tools, self.use_vllm = None, [TOOL_SCHEMA], False

        def _generate_single_turn(self, prompt_ids, *_, **__):
            ids = [*tokenizer("done")["input_ids"], tokenizer.eos_token_id]
            return [list(ids) for _ in prompt_ids], None

    loop = Loop()
    call = {"type": "function", "function": {"name": "wait", "arguments": {"n": 1}}}
    ids = [*tokenizer(CALL)["input_ids"], tokenizer.eos_token_id]
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        loop._tool_call_loop(
            [[{"role": "user", "content": "question"}] for _ in range(ROLLOUTS)],
            [tokenizer("question")["input_ids"] for _ in range(ROLLOUTS)],
            [list(ids) for _ in range(ROLLOUTS)],
            [[{"role": "assistant", "content": "", "tool_calls": [call]}] for _ in range(ROLLOUTS)],
            None,
            None,
            {},
        )
        times.append(time.perf_counter() - started)
    return times


TOOL = {
    "name": "wait",
    "description": "Wait.",
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
    },
}
TOOL_SCHEMA = {"type": "function", "function": TOOL}

if __name__ == "__main__":
    main()
