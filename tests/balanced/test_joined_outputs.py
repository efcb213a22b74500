"""Outputs beside a loss, which are copied to their joined tensor when a micro-batch ends."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from balanced.models import assert_equal_gradients, not_split_once, pipelined, seeded
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS = torch.randint(40, (8, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_embd=8,
        n_layer=2,
        n_head=2,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = seeded(lambda: transformers.GPT2LMHeadModel(config))
    return model


def of_logits(output: Any) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), TOKENS.flatten())


def of_both(output: Any) -> Tensor:
    loss: Tensor = output.loss + output["logits"][3:6].square().mean()
    return loss


def in_place(output: Any) -> Tensor:
    output.logits[:, 0].mul_(2)
    output.logits.add_(1)
    return of_both(output)


def with_a_penalty(output: Any) -> Tensor:
    (slope,) = torch.autograd.grad(of_logits(output), output.logits, create_graph=True)
    return of_both(output) + 100 * slope.square().sum()


LOSSES: list[Callable[[Any], Tensor]] = [lambda output: output.loss, of_logits, of_both, in_place, with_a_penalty]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_language_model_with_labels(loss: Callable[[Any], Tensor], language_model: nn.Module) -> None:
    """Logits and the gradients of losses of them are those of one device, and logits are ordinary tensors."""
    model, alone = copy.deepcopy(language_model), copy.deepcopy(language_model)
    inputs = {"input_ids": TOKENS, "labels": TOKENS, "output_hidden_states": True}
    with pipelined(model, ((), inputs)), not_split_once(None):
        for _ in range(3):
            model.zero_grad()
            output = model(**inputs)
            assert type(output.logits) is Tensor
            assert output.logits.requires_grad
            torch.testing.assert_close(dict(output), dict(alone(**inputs)))
            loss(output).backward()
    loss(alone(**inputs)).backward()
    assert_equal_gradients(model, alone)


def test_logits_of_micro_batches_are_freed(language_model: nn.Module) -> None:
    """Before backward, only the joined logits are in memory, and only as long as the output is."""
    model, inputs = copy.deepcopy(language_model), {"input_ids": TOKENS, "labels": TOKENS}
    parts: list[weakref.ref[Tensor]] = []
    with pipelined(model, ((), inputs)):
        model(**inputs).loss.backward()
        model.lm_head.register_forward_hook(lambda _m, _a, output: parts.append(weakref.ref(output.untyped_storage())))
        model(**inputs).loss.backward()
        parts.clear()
        output = model(**inputs)
        assert [part() for part in parts] == [None] * 4
        loss, joined = output.loss, weakref.ref(output.logits.untyped_storage())
        del output
        assert joined() is None
        loss.backward()


class Selecting(nn.Module):
    """Returns a loss, and the hidden values of tokens that are not zero, cut to the longest sample if `is_cut`."""

    def __init__(self, is_cut: bool = False) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(40, 4), nn.Linear(4, 4), nn.Linear(4, 40)
        self.is_cut = is_cut

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.mix(self.embed(tokens)))
        loss = F.cross_entropy(self.head(h).transpose(1, 2), tokens)
        return loss, h[:, : int((tokens != 0).sum(1).max())] if self.is_cut else h[tokens != 0]


def batches() -> list[Tensor]:
    """Return batches whose samples have 2 tokens that are not zero; then in some of them others."""
    even = torch.zeros(8, 5, dtype=torch.long)
    even[:, :2] = 7
    ragged, longer = even.clone(), even.clone()
    ragged[0, 2] = ragged[5, 3] = ragged[5, 4] = 9
    longer[2:4, 2] = longer[6, 1:] = 3
    return [even, ragged, even, longer]


def test_another_number_of_rows_than_planned() -> None:
    """Where a micro-batch has more rows per sample than others, values and gradients are those of one device."""
    model = seeded(Selecting)
    alone = copy.deepcopy(model)
    with pipelined(model, ((batches()[0],), {})), not_split_once(None):
        for each in batches():
            (loss, rows), (loss_alone, rows_alone) = model(each), alone(each)
            torch.testing.assert_close(rows, rows_alone)
            (loss + rows.square().sum()).backward()
            (loss_alone + rows_alone.square().sum()).backward()
            assert_equal_gradients(model, alone)


def test_micro_batches_of_another_shape() -> None:
    """An output that no tensor can hold is refused when it is used; the loss is that of one device."""
    model = seeded(lambda: Selecting(is_cut=True))
    alone = copy.deepcopy(model)
    even, ragged, *_ = batches()
    with pipelined(model, ((even,), {})), not_split_once(None):
        assert model(even)[1].shape == (8, 2, 4)
        loss, cut = model(ragged)
        torch.testing.assert_close(loss, alone(ragged)[0])
        with pytest.raises(Exception, match="they differ outside of the batch dimension"):
            cut.sum()
