"""LoRA layers whose forward and backward pass cost little more than the base layer's.

PEFT computes the update of a float32 adapter on a bfloat16 base in float32: the layer's input is cast, its output is added up in float32 and
cast back, and autograd keeps all of it. On a CPU these passes over memory cost as much as the adapter's products. Here the update is computed
by products in the base's dtype, added up in place, and autograd keeps the layer's input and its projection (N, r). The adapter's weights stay
float32, and so do the gradients that the optimiser sees; only the products are rounded, as the base layer's are. Which dtype to multiply in is
what autocast would choose, too.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear


def fuse_lora(model: torch.nn.Module) -> int:
    """Give the LoRA layers of `model` the fused pass, in place; those that it can't compute keep PEFT's own.

    It computes one active adapter of vanilla LoRA without dropout on a frozen `torch.nn.Linear` (no DoRA, no bias of its own, not quantised).
    What is merged, disabled, mixed or under autocast is left to PEFT, call by call.

    Returns:
        How many layers are fused.
    """
    fused = 0
    for module in model.modules():
        if not isinstance(module, LoraLinear) or type(module).forward is not LoraLinear.forward:
            continue
        base = module.get_base_layer()
        if type(base) is not torch.nn.Linear or any(parameter.requires_grad for parameter in base.parameters()):
            continue
        module.forward = types.MethodType(_forward, module)
        fused += 1
    return fused


def _forward(self: LoraLinear, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    name = self.active_adapters[0] if len(self.active_adapters) == 1 else ""
    # Under autocast the base's dtype isn't the one to multiply in.
    if (
        args
        or kwargs
        or torch.is_autocast_enabled(x.device.type)
        or self.disable_adapters
        or self.merged
        or name not in self.lora_A
        or not _vanilla(self, name)
    ):
        return LoraLinear.forward(self, x, *args, **kwargs)
    base = self.get_base_layer()
    out: torch.Tensor = _FusedLora.apply(x, base.weight, base.bias, self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name])
    return out


def _vanilla(layer: LoraLinear, name: str) -> bool:
    dropout = layer.lora_dropout[name]
    silent = isinstance(dropout, torch.nn.Identity) or not layer.training or dropout.p == 0
    return silent and name not in layer.lora_variant and layer.lora_A[name].bias is None and layer.lora_B[name].bias is None


class _FusedLora(torch.autograd.Function):
    """y = x W' + bias + scale (x A') B', with x (…, I), W (O, I), A (r, I), B (O, r)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        flat = x.reshape(-1, x.size(-1))
        low, high = a.to(weight.dtype), (b * scale).to(weight.dtype)
        inner = flat @ low.t()
        out = torch.nn.functional.linear(flat, weight, bias).addmm_(inner, high.t())
        ctx.save_for_backward(flat, weight, low, high, inner)
        ctx.scale, ctx.shape = scale, x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        flat, weight, low, high, inner = ctx.saved_tensors
        grad = grad.reshape(-1, grad.size(-1))
        down = grad @ high
        grad_a = (down.t() @ flat).float()
        grad_b = (grad.t() @ inner).float() * ctx.scale
        grad_x = (grad @ weight).addmm_(down, low).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, grad_a, grad_b, None
