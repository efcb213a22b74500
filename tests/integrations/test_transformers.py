"""A model of Hugging Face's transformers, trained by the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from parallelize import distributed, is_main, parallel_model, shard_loader

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

STEPS, PER_PROCESS = 3, 4


def make() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def sentences(batch_size: int) -> DataLoader[Any]:
    """Batches as dictionaries, by transformers' own collator, in the dataset's order."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(50, (STEPS * PER_PROCESS * 2, 16), generator=generator)
    return DataLoader([{"input_ids": each} for each in ids], batch_size=batch_size, collate_fn=collate)


def collate(rows: list[Any]) -> Any:
    return transformers.default_data_collator([{**row, "labels": row["input_ids"]} for row in rows])


def steps(model: Any, batches: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        output = model(**batch)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def train(folder: str) -> tuple[str, list[int]]:
    model = make()
    with parallel_model(model):
        steps(model, shard_loader(sentences(PER_PROCESS)))
        written = model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    if is_main():
        model.save_pretrained(folder)
    return type(model).__name__, written[0].tolist()


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_it_trains_as_on_one_device(backend: str, tmp_path) -> None:
    """Two processes' mean loss is that of both batches; `generate` and `save_pretrained` find the plain model."""
    (name, written), others = distributed(processes=2, backend=backend)(train).all_ranks(str(tmp_path))
    alone = make()
    steps(alone, interleaved())
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    for (key, mine), its in zip(saved.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5, msg=key)
    assert name == "GPT2LMHeadModel"
    assert written == others[1]
    assert len(written) == 5


def interleaved() -> Any:
    """The batches of one process that sees in a step what two see: rank 0 has rows 0, 2, ..., rank 1 has 1, 3, ..."""
    rows = list(sentences(1))
    size = 2 * PER_PROCESS
    for first in range(0, len(rows), size):
        some = rows[first : first + size]
        yield {key: torch.cat([each[key] for each in some]) for key in some[0]}
