"""Real architectures, built from small configurations: most are split into micro-batches, none is trained wrongly."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from balanced.models import not_split_once, pipelined
from torch import Tensor, nn

from parallelize.runtime.containers import leaves

pytestmark = pytest.mark.soak

N = 8  # samples


def _mean_square(output: Any) -> Tensor:
    tensors = [each for each in leaves(output) if isinstance(each, Tensor) and each.requires_grad]
    return torch.stack([each.float().square().mean() for each in tensors]).sum()


@dataclass(frozen=True)
class Architecture:
    """A model, its batch, and what the backend does with it.

    Args:
        make: creates the model.
        inputs: returns arguments and keyword arguments.
        loss: computes the loss from the output.
        whole: part of the warning that batches are not split; None: they are.
        rtol: largest difference of a gradient, relative to the largest value of the gradient.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any], Tensor] = _mean_square
    whole: str | None = None
    batch_dim: int = 0
    rtol: float = 1e-3


def _loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _tokens(length: int = 8) -> Tensor:
    return torch.randint(1, 40, (N, length))


def _labelled() -> tuple[tuple[Any, ...], dict[str, Any]]:
    labels = _tokens()
    labels[:5, 3:] = -100  # the micro-batches have different numbers of targets
    return (), {"input_ids": _tokens(), "labels": labels}


def _rows() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(N, 8),), {}


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
GPT = {
    "use_cache": False,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 40,
    "n_positions": 32,
    "bos_token_id": 1,
}
T5 = {"use_cache": False, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
CAUSAL: dict[str, dict[str, Any]] = {
    "GPT2": {**GPT, "eos_token_id": 2},
    "Llama": SIZES,
    "Mistral": {**SIZES, "num_key_value_heads": 1},
    "Qwen2": {**SIZES, "num_key_value_heads": 1},
    "Gemma": {**SIZES, "num_key_value_heads": 1, "head_dim": 8},
    "Phi": SIZES,
    "GPTNeoX": SIZES,
    "OPT": {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "Bloom": {**SIZES, "n_layer": 2, "n_head": 2},
    "Falcon": SIZES,
    "StableLm": {**SIZES, "num_key_value_heads": 2},
    "Mamba": {**SIZES, "state_size": 4},
}


def _causal(name: str, sizes: dict[str, Any]) -> nn.Module:
    import transformers

    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes))
    return model.eval()  # without dropout; the output is the same as in training


def _hf(name: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**sizes))
        return model.eval()

    return make


ARCHITECTURES: dict[str, Architecture] = {
    **{
        name: Architecture(lambda name=name, sizes=sizes: _causal(name, sizes), _labelled, _loss)  # type: ignore[misc]  # binds the loop's variables
        for name, sizes in CAUSAL.items()
    },
    "Mixtral": Architecture(
        lambda: _causal(
            "Mixtral", {**SIZES, "num_key_value_heads": 1, "num_local_experts": 3, "output_router_logits": False}
        ),
        _labelled,
        _loss,
    ),
    "Mixtral, auxiliary loss": Architecture(
        lambda: _causal(
            "Mixtral", {**SIZES, "num_key_value_heads": 1, "num_local_experts": 3, "output_router_logits": True}
        ),
        _labelled,
        _loss,
        whole="the number of targets",
    ),
    "BERT": Architecture(
        _hf("BertForMaskedLM", "BertConfig", **SIZES), lambda: ((), {**_labelled()[1], "input_ids": _tokens()}), _loss
    ),
    "T5": Architecture(
        _hf("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0, pad_token_id=0), _labelled, _loss
    ),
    "BART": Architecture(
        _hf(
            "BartForConditionalGeneration",
            "BartConfig",
            use_cache=False,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            vocab_size=40,
            max_position_embeddings=32,
        ),
        _labelled,
        _loss,
    ),
    "ViT": Architecture(
        _hf(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=32,
            patch_size=8,
        ),
        lambda: ((), {"pixel_values": torch.randn(N, 3, 32, 32), "labels": torch.randint(2, (N,))}),
        _loss,
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_exact(name: str) -> None:
    """Its loss and gradients are the plain model's; if batches are not split, a warning names the reason."""
    pytest.importorskip("transformers")
    case = ARCHITECTURES[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        model, (args, kwargs) = case.make(), case.inputs()
        plain = copy.deepcopy(model)
        with pipelined(model, (args, kwargs), batch_dim=case.batch_dim), not_split_once(case.whole):
            for key, buffer in model.named_buffers():
                buffer.copy_(plain.get_buffer(key))  # `call_order` has run forward
            loss = case.loss(model(*args, **kwargs))
            loss.backward()
        expected = case.loss(plain(*args, **kwargs))
        expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    for (key, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), key
        if want.grad is not None and got.grad is not None:
            assert (got.grad - want.grad).abs().max() <= case.rtol * want.grad.abs().max().clamp_min(1e-3), key


def test_most_architectures_are_divided() -> None:
    """The table has at least 18 architectures, of which at least 16 are divided."""
    assert len(ARCHITECTURES) >= 18
    assert sum(each.whole is None for each in ARCHITECTURES.values()) >= 16
