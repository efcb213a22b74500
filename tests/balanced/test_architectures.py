"""Real architectures, built from small configurations: most are split into micro-batches, none is trained wrongly."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from balanced.models import CASES, not_split_once, pipelined
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

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


def _images() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(N, 3, 32, 32),), {}


def _rows() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(N, 8),), {}


SIZES = {
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
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32, "bos_token_id": 1}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
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


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * self.g.float()).type_as(x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(RMSNorm(), nn.Linear(8, 8), nn.SiLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Dlrm(nn.Module):
    """Lists of tensors, an embedding per feature, pairwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.EmbeddingBag(10, 8, mode="sum") for _ in range(3))
        self.bottom, self.top = nn.Linear(8, 8), nn.Linear(8 + 6, 1)

    def forward(self, dense: Tensor, sparse: list[Tensor]) -> Tensor:
        features = [self.bottom(dense), *(table(each) for table, each in zip(self.embeddings, sparse, strict=True))]
        stacked = torch.stack(features, 1)
        products = stacked @ stacked.transpose(1, 2)
        row, column = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([features[0], products[:, row, column]], 1))


class Flat(nn.Module):
    """Outputs of B * T rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.rnn, self.head = nn.Embedding(40, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.tokens(tokens))[0]).flatten(0, 1)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class Codebook(nn.Module):
    """Vector quantization; in training, the codebook follows the batch by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("codes", torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x)
        chosen = torch.cdist(z.detach(), self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                counts = F.one_hot(chosen, 6).to(z)
                means = counts.t() @ z / counts.sum(0).clamp_min(1)[:, None]
                self.codes.mul_(0.9).add_(means, alpha=0.1)
        return self.b(z + (self.codes[chosen] - z).detach())


class Contrastive(nn.Module):
    """The loss of CLIP compares every sample with every other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.normalize(self.left(x)) @ F.normalize(self.right(x)).t()
        return F.cross_entropy(scores * 5, torch.arange(len(x)))


class Vmapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.outer(row, row).sum(0))(self.b(torch.tanh(self.a(x))))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 8, 8)
        self.tokens = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.channels = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2)
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = x + F.gelu(tokens(x))
            x = x + F.gelu(channels(x.transpose(1, 2))).transpose(1, 2)
        return x.mean(2)


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
        whole="differs from that of the full batch",
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
    "RMSNorm": Architecture(Normed, _rows),
    "DLRM": Architecture(Dlrm, lambda: ((torch.randn(N, 8), [torch.randint(10, (N, 2)) for _ in range(3)]), {})),
    "flattened outputs": Architecture(Flat, lambda: ((_tokens(),), {})),
    "spectral norm": Architecture(Spectral, _rows),
    "codebook": Architecture(Codebook, _rows, whole="forward changes codes"),
    "contrastive": Architecture(Contrastive, _rows, whole="differs from that of the full batch"),
    "vmap": Architecture(Vmapped, _rows),
    "MLP-Mixer": Architecture(Mixer, _images),
    **{
        name: Architecture(CASES[name].make, lambda name=name: CASES[name].inputs(N), batch_dim=CASES[name].batch_dim)  # type: ignore[misc]  # binds the loop's variable
        for name in ("cnn", "unet", "gpt, tied", "lstm", "experts", "reused layer", "two towers")
    },
    "transformer": Architecture(
        CASES["transformer, sequence first"].make,
        lambda: CASES["transformer, sequence first"].inputs(N),
        batch_dim=1,
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
    """The table has at least 30 architectures, of which at least 27 are divided."""
    assert len(ARCHITECTURES) >= 30
    assert sum(each.whole is None for each in ARCHITECTURES.values()) >= 27
