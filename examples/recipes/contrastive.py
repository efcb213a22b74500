"""Train two encoders with a contrastive loss over the whole batch, as CLIP does.

Each process encodes its part of the batch. `all_gather` gathers the outputs of all processes, with their gradients,
so that each sample is compared with all others, and the weights are those of one process with the whole batch.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import all_gather, distributed, parallel_model, shard_loader


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image_encoder = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 16))
        self.text_encoder = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 16))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        images = F.normalize(self.image_encoder(image), dim=1)
        texts = F.normalize(self.text_encoder(text), dim=1)
        return images, texts


def contrastive_loss(images, texts, log_scale):
    """Return the InfoNCE loss of images and texts, each (batch, features), whose rows belong together."""
    similarity = log_scale.exp() * images @ texts.T
    pairs = torch.arange(len(images), device=images.device)
    return (F.cross_entropy(similarity, pairs) + F.cross_entropy(similarity.T, pairs)) / 2


@distributed(gpus="auto", processes=2)
def train(model, dataset, epochs):
    # Every process has to gather equally many samples, so no smaller last batch is divided.
    loader = DataLoader(dataset, batch_size=128, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with parallel_model(model):
        for _ in range(epochs):
            for image, text in shard_loader(loader, batch="global"):
                images, texts = all_gather(model(image, text))
                images, texts = images.flatten(0, 1), texts.flatten(0, 1)
                loss = contrastive_loss(images, texts, model.log_scale)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return len(images)


# An "image" and its "text" are two views of the same hidden values.
torch.manual_seed(0)
hidden = torch.randn(2304, 8)
image = torch.tanh(hidden @ torch.randn(8, 32)) + 0.1 * torch.randn(2304, 32)
text = torch.tanh(hidden @ torch.randn(8, 32)) + 0.1 * torch.randn(2304, 32)

model = Clip()
batch = train(model, TensorDataset(image[256:], text[256:]), epochs=15)
model.cpu()  # a call that uses a single GPU leaves the model on it

with torch.no_grad():
    images, texts = model(image[:256], text[:256])
found = ((images @ texts.T).argmax(dim=1) == torch.arange(256)).float().mean().item()
print(f"{batch} samples compared in each step; the text of {found:.3f} of 256 unseen images is found")
