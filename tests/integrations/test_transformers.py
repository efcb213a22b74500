"""A model of Hugging Face's transformers in an ordinary training loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from parallelize import distributed, is_main, parallel_model, shard_loader

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

STEPS, PER_PROCESS = 3, 4


def make_model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def sentences(batch_size: int) -> DataLoader[Any]:
    """Make a loader of dictionaries, by transformers' collator, in the dataset's order."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(50, (STEPS * PER_PROCESS * 2, 16), generator=generator)
    return DataLoader([{"input_ids": each} for each in ids], batch_size=batch_size, collate_fn=collate)


def collate(rows: list[Any]) -> Any:
    """Make a batch in which the labels of each sentence end after another number of tokens."""
    return transformers.default_data_collator([{**row, "labels": ended(row["input_ids"])} for row in rows])


def ended(ids: torch.Tensor) -> torch.Tensor:
    return ids.where(torch.arange(16) < 3 + ids[0] % 13, -100)


def run_steps(model: Any, batches: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        output = model(**batch)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def train(folder: str) -> tuple[str, list[int]]:
    model = make_model()
    with parallel_model(model, average="tokens"):
        run_steps(model, shard_loader(sentences(PER_PROCESS)))
        generated = model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    if is_main():
        model.save_pretrained(folder)
    return type(model).__name__, generated[0].tolist()


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_it_trains_as_on_one_device(backend: str, tmp_path) -> None:
    """Two processes train the weights of one with both batches; `generate` and `save_pretrained` work."""
    (name, generated_0), (_, generated_1) = distributed(processes=2, backend=backend)(train).all_ranks(str(tmp_path))
    reference = make_model()
    run_steps(reference, interleaved())
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    for (key, actual), expected in zip(saved.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=key)
    assert name == "GPT2LMHeadModel"
    assert generated_0 == generated_1
    assert len(generated_0) == 5


def interleaved() -> Any:
    """Yield batches with the rows of both processes' batches: rank 0 has rows 0, 2, ..., rank 1 has 1, 3, ..."""
    rows = list(sentences(1))
    size = 2 * PER_PROCESS
    for first in range(0, len(rows), size):
        group = rows[first : first + size]
        yield {key: torch.cat([each[key] for each in group]) for key in group[0]}
