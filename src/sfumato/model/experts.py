"""The mixture of experts: a router, and the experts that it chooses for each token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sfumato import ops
from sfumato.model.layers import Linear
from sfumato.model.model_config import ModelConfig


class Router(nn.Module):
    """Chooses experts and their shares for each token.

    Computes in float32 whatever the weights' dtype: the choice is discrete, so rounding here would
    change results more than anywhere else, and the matrix is small.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.proj = Linear(config.hidden_size, config.num_experts)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))
        self.active, self.eps = config.experts_per_token, config.rms_norm_eps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] → chosen int64 and shares float32, both [tokens, active]."""
        weights = self.proj.weight, self.scale, self.per_expert_scale
        return ops.route(x, *weights, self.active, self.eps)


class Experts(nn.Module):
    """The weights of all experts of a layer, stacked."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.device: torch.device | None = None  # of the weights, where it is not that of x
        count, size, hidden = config.num_experts, config.expert_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, size))

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [tokens, hidden]; chosen and shares [tokens, active] → [tokens, hidden].
        The experts compute where their weights are, and the result is where x is."""
        own = self.device or x.device
        weights = self.gate_up_proj, self.down_proj
        return ops.experts(x.to(own), chosen.to(own), shares.to(own), *weights).to(x.device)
