"""Fused LoRA layers against PEFT's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from peft import LoraConfig, get_peft_model  # noqa: E402

from art_gym_trainers.lora import fuse_lora  # noqa: E402

pytestmark = pytest.mark.train


def adapted(dtype: Any = None, bias: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(12, 20, bias=bias), torch.nn.SiLU(), torch.nn.Linear(20, 8, bias=bias)).to(dtype)
    model = get_peft_model(layers, LoraConfig(r=4, lora_alpha=12, target_modules=["0", "2"], **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def passed(model: Any, x: Any) -> list[Any]:
    """Output, gradient of the input, and of every adapter weight."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    out = model(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)]


@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_peft(bias: bool) -> None:
    plain = adapted(bias=bias)
    fused = copy.deepcopy(plain)
    assert fuse_lora(fused) == 2
    x = torch.randn(3, 5, 12)
    torch.testing.assert_close(passed(fused, x), passed(plain, x))


def test_in_bfloat16_the_update_is_rounded_as_the_base_layer_is_and_gradients_stay_float32() -> None:
    plain = adapted(torch.bfloat16)
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).float()
    fuse_lora(fused)
    x = torch.randn(64, 12, dtype=torch.bfloat16)
    for ours, peft, true in zip(passed(fused, x), passed(plain, x), passed(exact, x.float()), strict=True):
        assert ours.dtype == peft.dtype
        # Eight bits are within 0.4%; some steps of the way are rounded, too.
        assert (ours.float() - true).norm() <= 0.01 * true.norm()


@pytest.mark.parametrize(
    "prepare",
    [
        lambda model: model.disable_adapter_layers(),
        lambda model: model.merge_adapter(),
        lambda model: model.add_adapter("second", LoraConfig(r=2, target_modules=["0"])) or model.base_model.set_adapter(["default", "second"]),
    ],
    ids=["disabled", "merged", "two adapters"],
)
def test_what_it_does_not_compute_is_left_to_peft(prepare: Any) -> None:
    plain = adapted()
    fused = copy.deepcopy(plain)
    fuse_lora(fused)
    x = torch.randn(5, 12)
    for model in (plain, fused):
        torch.manual_seed(2)
        prepare(model)
    torch.testing.assert_close(fused(x), plain(x))


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}], ids=str)
def test_variants_give_what_peft_gives(options: dict[str, Any]) -> None:
    plain = adapted(**options)
    fused = copy.deepcopy(plain)
    fuse_lora(fused)
    x = torch.randn(5, 12)
    torch.testing.assert_close(passed(fused, x), passed(plain, x))
