"""Weights as safetensors, exchanged with its own tools and with Hugging Face."""

from __future__ import annotations

import pytest
import torch
from checksum import checksum_of
from torch import nn

from parallelize import ConfigError, ParallelizeError, load, save

safetensors = pytest.importorskip("safetensors.torch")


def net() -> nn.Module:
    """Return a model with tied weights and buffers."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    return model


def test_files_of_others_are_loaded(tmp_path):
    """load() reads weights that safetensors has written, with tied weights once."""
    model, other = net(), net()
    safetensors.save_model(model, tmp_path / "theirs.safetensors")
    assert load(tmp_path / "theirs.safetensors", model=other) == {}
    assert checksum_of(list(other.parameters())) == checksum_of(list(model.parameters()))


def test_a_cut_file_is_detected(tmp_path):
    """A cut file raises, and nothing is loaded."""
    path, model = tmp_path / "last.safetensors", net()
    save(path, model=model)
    path.write_bytes(path.read_bytes()[:-9])
    before = checksum_of(list(model.parameters()))
    with pytest.raises(ParallelizeError, match="is damaged"):
        load(path, model=model)
    assert checksum_of(list(model.parameters())) == before


@pytest.mark.parametrize(
    "objects",
    [{"epoch": 1}, {"model": nn.Linear(1, 1), "epoch": 1}, {"state": {"weight": torch.ones(1), "epoch": 1}}],
)
def test_what_is_not_the_weights_of_one_model_is_refused(tmp_path, objects):
    """The error says that such a file holds the tensors of one state dict, and no file is made."""
    with pytest.raises(ConfigError, match="holds the tensors of one state dict"):
        save(tmp_path / "a.safetensors", **objects)
    assert list(tmp_path.iterdir()) == []


def test_hugging_face_reads_and_writes_it(tmp_path):
    """from_pretrained reads what save() has written, and load() reads what save_pretrained has written."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11, n_positions=4)
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path)
    save(tmp_path / "model.safetensors", model=model)
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert checksum_of(list(found.parameters())) == checksum_of(list(model.parameters()))
    found.save_pretrained(tmp_path / "theirs")
    other = transformers.GPT2LMHeadModel(config)
    load(tmp_path / "theirs" / "model.safetensors", model=other)
    assert checksum_of(list(other.parameters())) == checksum_of(list(model.parameters()))
