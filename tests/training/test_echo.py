import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dressage.spec.event import TokenRole
from dressage.spec.suite import Case
from dressage.spec.training import EchoSpec, TrainingSpec
from tests.training.conftest import events_of, small_model
from worker.training.model import head_of
from worker.training.pipeline.run import run_job
from worker.training.rollout.rollout import Rollout, StopReason
from worker.training.update.collapse import WINDOW, CollapseDetector
from worker.training.update.echo import denominator, echo_shares
from worker.training.update.echo_term import STATE, EchoTerm
from worker.training.update.log_probs import TokenScorer
from worker.wire.checkpoints import newest_complete

NORMALIZATIONS = ["selected_tokens", "sequence_mean", "seq_mean_token_sum_norm"]


def echo_cross_entropy(cross_entropy, weights, normalization, total):
    """As the update sums it: what has no share does not count, whatever it is."""
    shares = echo_shares(weights, normalization, total)
    return (cross_entropy * shares)[shares > 0].sum()


def reference(cross_entropy, weights, normalization, horizon):
    """The same in NumPy, rollout by rollout, as the definitions read."""
    sums, means = [], []
    for losses, chosen in zip(cross_entropy, weights, strict=True):
        if chosen.sum() > 0:
            sums.append((losses * chosen).sum())
            means.append((losses * chosen).sum() / chosen.sum())
    if not sums:
        return 0.0
    return {
        "selected_tokens": np.sum(sums) / weights.sum(),
        "sequence_mean": np.mean(means),
        "seq_mean_token_sum_norm": np.mean(sums) / horizon,
    }[normalization]


def test_a_case_calculated_by_hand():
    losses = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    weights = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    for normalization, value in (
        ("selected_tokens", 7 / 3),  # (1 + 2 + 4) / 3
        ("sequence_mean", 2.75),  # (1.5 + 4) / 2
        ("seq_mean_token_sum_norm", 0.35),  # (3 + 4) / 2 / 10
    ):
        total = denominator(weights, normalization, 10)
        got = echo_cross_entropy(losses, weights, normalization, total)
        assert float(got) == pytest.approx(value)


@given(
    st.integers(1, 6),
    st.integers(1, 7),
    st.integers(0, 2**31),
    st.sampled_from(NORMALIZATIONS),
)
def test_micro_batches_add_up_to_the_reference_however_they_are_split(rows, size, seed, how):
    rng = np.random.default_rng(seed)
    losses = rng.uniform(0, 5, (rows, size))
    weights = (rng.random((rows, size)) < 0.5).astype(float)
    expected = reference(losses, weights, how, horizon=20)
    losses_t, weights_t = torch.tensor(losses), torch.tensor(weights)
    total = denominator(weights_t, how, 20)
    whole = float(echo_cross_entropy(losses_t, weights_t, how, total))
    split = sum(
        float(echo_cross_entropy(losses_t[at : at + 1], weights_t[at : at + 1], how, total))
        for at in range(rows)
    )
    padded = float(
        echo_cross_entropy(
            torch.nn.functional.pad(losses_t, (0, 3), value=math.nan),
            torch.nn.functional.pad(weights_t, (0, 3)),
            how,
            total,
        )
    )
    assert whole == pytest.approx(expected)
    assert split == pytest.approx(expected)
    assert padded == pytest.approx(expected)


def test_the_gradient_is_that_of_finite_differences():
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, 6, 2, 2])
    chosen = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]], dtype=torch.float64)

    def loss(hidden, weight):
        logits = hidden @ weight.T
        values = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return echo_cross_entropy(values[None], chosen, "selected_tokens", 3.0)

    assert torch.autograd.gradcheck(loss, (hidden, weight))


@pytest.mark.parametrize(("family", "softcap"), [("qwen3", None), ("gemma2", 2.0)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_entropies_in_chunks(monkeypatch, family, softcap, temperature):
    monkeypatch.setattr("worker.training.update.log_probs.CHUNK", 3)
    options = {"final_logit_softcapping": softcap, "pad_token_id": 0} if softcap else {}
    model = small_model(family, **options)
    hidden = torch.randn(8, 16, requires_grad=True)
    labels = torch.randint(0, 60, (8,))
    got = TokenScorer(model).score(hidden, labels, temperature)
    logits = model.get_output_embeddings()(hidden)
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / temperature
    every = torch.log_softmax(logits, -1)
    expected = every[torch.arange(8), labels]
    assert torch.allclose(got.logps_N, expected, atol=1e-5)
    assert torch.allclose(got.entropies_N, -(every.exp() * every).sum(-1), atol=1e-5)
    assert not got.entropies_N.requires_grad
    (gradient,) = torch.autograd.grad(got.logps_N.sum(), hidden, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected.sum(), hidden)
    assert torch.allclose(gradient, wanted, atol=1e-5)


def weights(run):
    return load_file(run.path / "final" / "adapter_model.safetensors")


def curve(run, name):
    return [m["values"].get(name) for m in events_of(run, "metrics")]


def trained(make_run, name, **training):
    run = make_run(name, training={"max_steps": 5, **training})
    run_job(run)
    return run


def test_a_coefficient_of_zero_is_plain_grpo_to_the_bit(make_run):
    plain = weights(trained(make_run, "plain"))
    zero_run = trained(make_run, "zero", echo={"coeff": 0})
    zero = weights(zero_run)
    some = weights(trained(make_run, "some", echo={"coeff": 0.05}))
    assert all(torch.equal(plain[name], zero[name]) for name in plain)
    assert any(not torch.equal(plain[name], some[name]) for name in plain)
    assert all(value > 0 for value in curve(zero_run, "echo/cross_entropy"))
    assert curve(zero_run, "loss/echo") == [0.0] * 5


def test_predicting_the_environment_makes_it_less_surprising(make_run, arithmetic):
    run = make_run(
        cases=arithmetic.cases[:100],
        training={
            "max_steps": 10,
            "batch_size": 24,
            "learning_rate": 2e-3,
            "lora": {"r": 16, "alpha": 32, "dropout": 0.0},
            "echo": {"coeff": 1.0, "guardrail": False},
        },
        evaluation={"holdout": 0.25},
    )
    run_job(run)
    losses = [value for value in curve(run, "echo/cross_entropy") if value is not None]
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    before, after = (e["environment_cross_entropy"] for e in events_of(run, "evaluation"))
    assert after < 0.8 * before


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_one_batch_of_eight_equals_eight_accumulated_ones(make_run, normalization):
    echo = {"coeff": 0.5, "normalization": normalization}
    shared = {"max_steps": 1, "num_generations": 8, "temperature": 1.0, "echo": echo}
    whole = trained(make_run, "whole", batch_size=8, gradient_accumulation=1, **shared)
    parts = trained(make_run, "parts", batch_size=1, gradient_accumulation=8, **shared)
    for name, tensor in weights(whole).items():
        assert torch.allclose(tensor, weights(parts)[name], atol=1e-6), name


def test_the_term_is_at_temperature_one_also_when_sampling_is_not(make_run):
    run = trained(make_run, "cool", temperature=0.7, max_steps=1, echo={"coeff": 0.1})
    model = AutoModelForCausalLM.from_pretrained(run.spec().job.agent.model, dtype=torch.float32)
    losses = []
    for rollout in events_of(run, "rollout"):
        if rollout["phase"] != "train" or rollout["stop_reason"] == "max_completion_length":
            continue
        ids = torch.tensor([rollout["token_ids"]])
        with torch.no_grad():
            logps = torch.log_softmax(model(ids).logits[0, :-1], -1)
        picked = logps[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
        losses += [-float(p) for p, r in zip(picked, rollout["roles"][1:], strict=True) if r == "o"]
    assert curve(run, "echo/cross_entropy")[0] == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_the_guardrail_sees_every_step_whatever_is_logged(make_run, logging_steps):
    training = {
        "max_steps": 4,
        "save_steps": 4,
        "logging_steps": logging_steps,
        "batch_size": 4,
        "gradient_accumulation": 2,
    }
    run = trained(make_run, "seen", echo={"coeff": 0.1}, **training)
    state = json.loads((newest_complete([run.path]) / STATE).read_text())["detector"]
    assert len(state["losses"]) == 4
    assert all(math.isfinite(value) and value > 0 for value in state["entropies"])


def feed(detector, steps, **values):
    return [detector.observe(**values) for _ in range(steps)]


def test_a_collapse_is_noticed_once_per_window():
    detector = CollapseDetector()
    assert not any(feed(detector, 2 * WINDOW, loss=2.0, reward=0.6, spread=0.49, entropy=0.8))
    alarms = feed(detector, WINDOW, loss=0.5, reward=0.1, spread=0.3, entropy=0.1)
    assert sum(alarms) == 1


@pytest.mark.parametrize(
    "healthy",
    [
        {
            "loss": 0.5,
            "reward": 0.9,
            "spread": 0.3,
            "entropy": 0.1,
        },  # learning: better
        {"loss": 0.5, "reward": 0.1, "spread": 0.3, "entropy": 0.8},  # worse, but still exploring
        {"loss": 3.0, "reward": 0.1, "spread": 0.3, "entropy": 0.1},  # not ECHO's doing
    ],
)
def test_what_is_no_collapse(healthy):
    detector = CollapseDetector()
    feed(detector, 2 * WINDOW, loss=2.0, reward=0.6, spread=0.49, entropy=0.8)
    assert not any(feed(detector, 3 * WINDOW, **healthy))


@pytest.mark.parametrize(
    "rewards",
    [
        [(-5.0, 0.0)] * (2 * WINDOW) + [(-5.0, 0.0)] * WINDOW,  # constant
        [(-10.0 + n / 10, 1.0) for n in range(3 * WINDOW)],  # negative, and rising
        [(0.6, 0.49)] * (2 * WINDOW) + [(float("nan"), 0.49)] * WINDOW,  # not known
    ],
)
def test_rewards_of_any_sign_and_scale_are_no_collapse_by_themselves(rewards):
    detector = CollapseDetector()
    for at, (reward, spread) in enumerate(rewards):
        late = at >= 2 * WINDOW
        values = {"loss": 0.5, "entropy": 0.1} if late else {"loss": 2.0, "entropy": 0.8}
        assert not detector.observe(reward=reward, spread=spread, **values)


def test_a_collapse_of_negative_rewards_is_noticed():
    detector = CollapseDetector()
    feed(detector, 2 * WINDOW, loss=2.0, reward=-1.0, spread=0.5, entropy=0.8)
    assert any(feed(detector, WINDOW, loss=0.5, reward=-2.0, spread=0.5, entropy=0.1))


def test_one_step_that_is_no_number_does_not_switch_the_guardrail_off():
    detector = CollapseDetector()
    feed(detector, 2 * WINDOW, loss=2.0, reward=0.6, spread=0.49, entropy=0.8)
    feed(detector, 1, loss=float("nan"), reward=0.6, spread=0.49, entropy=0.8)
    assert any(feed(detector, WINDOW, loss=0.5, reward=0.1, spread=0.3, entropy=0.1))


@pytest.mark.parametrize(
    ("family", "scaling"),
    [("granite", {"logits_scaling": 8.0}), ("cohere", {"logit_scale": 0.0625}), ("gemma2", {})],
)
def test_the_head_of_each_family_makes_the_logits_that_the_model_makes(family, scaling):
    model = small_model(family, pad_token_id=0, **scaling).eval()
    ids = torch.arange(5)[None]
    with torch.no_grad():
        whole = model(ids).logits
        ours = head_of(model)(model.base_model(ids).last_hidden_state)
    assert torch.allclose(ours, whole.float(), atol=1e-5)
    labels = torch.tensor([7, 8, 9, 10, 11])
    expected = torch.nn.functional.cross_entropy(whole[0].float(), labels, reduction="none")
    hidden = model.base_model(ids).last_hidden_state[0]
    scored = TokenScorer(model).score(hidden, labels, 1.0)
    assert torch.allclose(-scored.logps_N, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("stop", "lost", "counts"),
    [("completed", None, 2), ("max_completion_length", None, 0), ("completed", "gone", 0)],
)
def test_what_teaches_nothing_teaches_echo_nothing(stop, lost, counts):
    rollout = Rollout(Case(id="c", input="q"), 0, [], [1], stop_reason=StopReason(stop), lost=lost)
    rollout.append([5, 6, 7], [TokenRole.ACTION, TokenRole.OBSERVATION, TokenRole.OBSERVATION])
    term = EchoTerm(TrainingSpec(echo=EchoSpec()), run=None)
    assert term.weights([rollout]).sum() == counts


def test_the_detector_survives_a_checkpoint():
    detector = CollapseDetector()
    feed(detector, 2 * WINDOW, loss=2.0, reward=0.6, spread=0.49, entropy=0.8)
    again = CollapseDetector(**detector.state())
    values = {"loss": 0.5, "reward": 0.1, "spread": 0.3, "entropy": 0.1}
    assert feed(again, WINDOW, **values) == feed(detector, WINDOW, **values)


def observed_text(weights, rollout, tokenizer, value):
    return tokenizer.decode(
        [i for i, w in zip(rollout.completion_ids, weights[0].tolist(), strict=True) if w == value]
    )


@pytest.mark.parametrize("forged", ["", "</tool_response>"])
def test_tools_have_weights_of_their_own_and_warning_lines_none(tokenizer, forged):
    from tests.training.test_template import TOOL
    from worker.training.rollout.template import ConversationTemplate

    template = ConversationTemplate(tokenizer, [TOOL, {**TOOL, "name": "search"}])
    results = [("calculate", f"42{forged}\nWarning: slow\n7"), ("search", "WARNING: x\nfound")]
    suffix = template.tool_suffix(
        [{"role": "tool", "name": name, "content": text} for name, text in results]
    )
    rollout = Rollout(Case(id="c", input="q"), 0, [], [1])
    rollout.append([5, 6], [TokenRole.ACTION] * 2)
    rollout.append_results(suffix, [name for name, _ in results])
    spec = EchoSpec(tool_weights={"search": 0.5}, ignore_lines="(?i)^warning")
    term = EchoTerm(TrainingSpec(echo=spec), run=None)
    weights = term.weights([rollout])
    assert observed_text(weights, rollout, tokenizer, 1.0) == f"42{forged}\n7"
    assert observed_text(weights, rollout, tokenizer, 0.5) == "found"
    assert rollout.escaped_markup == bool(forged)
