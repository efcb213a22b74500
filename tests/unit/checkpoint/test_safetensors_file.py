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


def test_weights_and_the_rest(tmp_path):
    """The weights are a file of safetensors, the rest is beside it, and load() reads both; an older rest is removed."""
    path, model = tmp_path / "last.safetensors", net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        save(path, format="safetensors", model=model, optimizer=optimizer, epoch=epoch)
    assert len(list(tmp_path.iterdir())) == 2
    weights = safetensors.load_file(path)
    assert torch.equal(weights["0.bias"], model[0].bias)
    other = net()
    moments = torch.optim.SGD(other.parameters(), lr=1, momentum=0.9)
    assert load(path, model=other, optimizer=moments) == {"epoch": 1}
    assert checksum_of([other.state_dict(), moments.state_dict()]) == checksum_of(
        [model.state_dict(), optimizer.state_dict()]
    )


def test_files_of_others_are_loaded(tmp_path):
    """load() reads weights that safetensors has written, with tied weights once."""
    model, other = net(), net()
    safetensors.save_model(model, tmp_path / "theirs.safetensors")
    assert load(tmp_path / "theirs.safetensors", model=other) == {}
    assert checksum_of(list(other.parameters())) == checksum_of(list(model.parameters()))


@pytest.mark.parametrize("which", ["*.safetensors", "*.pt"])
def test_damage_is_detected(tmp_path, which):
    """A cut weights file, or a changed checkpoint beside it, raises, and nothing is loaded."""
    path, model = tmp_path / "last.safetensors", net()
    save(path, format="safetensors", model=model)
    (part,) = tmp_path.glob(which)
    content = bytearray(part.read_bytes())
    content[-9 if part == path else len(content) // 2 :] = b"12345678"
    part.write_bytes(content)
    before = checksum_of(list(model.parameters()))
    with pytest.raises(ParallelizeError, match="is damaged"):
        load(path, model=model)
    assert checksum_of(list(model.parameters())) == before


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.pt", {"format": "safetensors", "model": nn.Linear(1, 1)}, "for the weights of one model"),
        ("a.safetensors", {"format": "safetensors", "epoch": 1}, "with 0 models"),
        ("a.safetensors", {"format": "onnx", "model": nn.Linear(1, 1)}, "format='onnx'"),
    ],
)
def test_invalid_requests_are_rejected(tmp_path, name, options, message):
    """A request that cannot be a file of safetensors is refused with the reason."""
    with pytest.raises(ConfigError, match=message):
        save(tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


def test_hugging_face_reads_and_writes_it(tmp_path):
    """from_pretrained reads what save() has written, and load() reads what save_pretrained has written."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11, n_positions=4)
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path)
    save(tmp_path / "model.safetensors", format="safetensors", model=model, epoch=3)
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert checksum_of(list(found.parameters())) == checksum_of(list(model.parameters()))
    found.save_pretrained(tmp_path / "theirs")
    other = transformers.GPT2LMHeadModel(config)
    load(tmp_path / "theirs" / "model.safetensors", model=other)
    assert checksum_of(list(other.parameters())) == checksum_of(list(model.parameters()))
