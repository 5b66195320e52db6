"""AdamW for weights in bfloat16: it keeps them in float32, where its small steps count."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw

MASTER, FIRST, SECOND, STEP = "master", "exp_avg", "exp_avg_sq", "step"


class MasterAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` on float32 copies, which the weights are rounded from after each step.

    A learning rate of 1e-5 moves few weights in bfloat16, ever; the copies move, and the weights
    follow when it is enough.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step of all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            states = [self._state_of(parameter) for parameter in parameters]
            beta1, beta2 = group["betas"]
            adamw(
                [state[MASTER] for state in states],
                [parameter.grad.float() for parameter in parameters],
                [state[FIRST] for state in states],
                [state[SECOND] for state in states],
                [],
                [state[STEP] for state in states],
                fused=parameters[0].is_cuda,
                foreach=not parameters[0].is_cuda,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            torch._foreach_copy_(parameters, [state[MASTER] for state in states])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state up again; torch would round what it holds to the parameters' type."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, saved in state_dict["state"].items():
            parameter = parameters[number]
            self.state[parameter] = {
                name: value.to(parameter.device, torch.float32) for name, value in saved.items()
            }

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state[MASTER] = parameter.detach().float().clone()
            state[FIRST] = torch.zeros_like(state[MASTER])
            state[SECOND] = torch.zeros_like(state[MASTER])
            state[STEP] = torch.zeros((), device=parameter.device)
        found: dict[str, torch.Tensor] = state
        return found
