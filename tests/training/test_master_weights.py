"""AdamW for weights in bfloat16: steps too small for them are not lost."""

import copy

import pytest
import torch

from worker.training.update.master_weights import MasterAdamW


def stepped(optimizer, parameters, steps, *, seed=0):
    torch.manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def weights():
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(8, 4).bfloat16()) for _ in range(2)]


def test_it_is_adamw_in_float32_rounded(weights):
    exact = [torch.nn.Parameter(p.detach().float()) for p in weights]
    settings = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
    ours, theirs = MasterAdamW(weights, **settings), torch.optim.AdamW(exact, **settings)
    torch.manual_seed(0)
    for _ in range(20):
        for own, other in zip(weights, exact, strict=True):
            own.grad = torch.randn(own.shape).bfloat16()
            other.grad = own.grad.float()
        ours.step()
        theirs.step()
    for own, other in zip(weights, exact, strict=True):
        assert torch.equal(own, other.bfloat16())


def test_small_steps_add_up(weights):
    before = [p.detach().clone() for p in weights]
    plain = [torch.nn.Parameter(p.detach().clone()) for p in weights]
    for parameters, optimizer in (
        (weights, MasterAdamW(weights, lr=1e-5)),
        (plain, torch.optim.AdamW(plain, lr=1e-5)),
    ):
        for _ in range(600):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    def moved(parameters):
        pairs = zip(parameters, before, strict=True)
        return sum(float((p != b).float().mean()) for p, b in pairs) / 2

    assert moved(weights) > 0.6
    assert moved(plain) < 0.2


def test_a_state_is_taken_up_again_in_float32(weights):
    optimizer = MasterAdamW(weights, lr=1e-4)
    stepped(optimizer, weights, 5)
    saved, kept = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in weights]
    stepped(optimizer, weights, 5, seed=2)
    again = [torch.nn.Parameter(p) for p in kept]
    resumed = MasterAdamW(again, lr=1e-4)
    resumed.load_state_dict(saved)
    stepped(resumed, again, 5, seed=2)
    for own, other in zip(weights, again, strict=True):
        assert torch.equal(own, other)
        states = optimizer.state[own], resumed.state[other]
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert states[1][name].dtype is torch.float32
            assert torch.equal(states[0][name], states[1][name])


def test_what_has_no_gradient_is_left_alone(weights):
    optimizer = MasterAdamW(weights, lr=0.1)
    before = weights[1].detach().clone()
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    assert torch.equal(weights[1], before)
