"""Real architectures, built from small configurations: split into micro-batches where that is right."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from balanced.models import not_split_once, pipelined
from torch import Tensor

pytestmark = pytest.mark.soak

N = 8  # samples


def _tokens() -> Tensor:
    return torch.randint(1, 40, (N, 8))


def _labelled() -> dict[str, Any]:
    labels = _tokens()
    labels[:5, 3:] = -100  # the micro-batches have different numbers of targets
    return {"input_ids": _tokens(), "labels": labels}


def _images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(N, 3, 32, 32), "labels": torch.randint(2, (N,))}


SIZES = {
    "use_cache": False,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {"use_cache": False, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
VIT = {**SIZES, "image_size": 32, "patch_size": 8}
MIXTRAL = {**SIZES, "num_key_value_heads": 1, "num_local_experts": 3, "output_router_logits": True}

# model -> sizes, inputs, part of the warning that batches are not split
ARCHITECTURES: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]], str | None]] = {
    "LlamaForCausalLM": (SIZES, _labelled, None),
    "FalconForCausalLM": (SIZES, _labelled, None),
    "MambaForCausalLM": ({**SIZES, "state_size": 4}, _labelled, None),
    "MixtralForCausalLM": (MIXTRAL, _labelled, "the number of targets"),
    "BertForMaskedLM": (SIZES, _labelled, None),
    "T5ForConditionalGeneration": ({**T5, "decoder_start_token_id": 0, "pad_token_id": 0}, _labelled, None),
    "ViTForImageClassification": (VIT, _images, None),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_exact(name: str) -> None:
    """Its loss and gradients are the plain model's; if batches are not split, a warning names the reason."""
    transformers = pytest.importorskip("transformers")
    sizes, inputs, whole = ARCHITECTURES[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        config = getattr(transformers, name.partition("For")[0] + "Config")(**sizes)
        model, kwargs = getattr(transformers, name)(config).eval(), inputs()  # without dropout
        plain = copy.deepcopy(model)
        with pipelined(model, ((), kwargs)), not_split_once(whole):
            for key, buffer in model.named_buffers():
                buffer.copy_(plain.get_buffer(key))  # `call_order` has run forward
            loss = model(**kwargs).loss
            loss.backward()
        expected = plain(**kwargs).loss
        expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    for (key, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), key
        if want.grad is not None and got.grad is not None:
            assert (got.grad - want.grad).abs().max() <= 1e-3 * want.grad.abs().max().clamp_min(1e-3), key
