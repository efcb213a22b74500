"""Self-supervised programs after MoCo, BYOL, SimCLR, DINO, CLIP, mean teacher."""

from __future__ import annotations

import copy
import math

import torch
from one_word.data import batches, images, weights
from torch import nn, optim
from torch.nn import functional as F

from parallelize import all_gather, all_reduce, parallel_model, shard_loader, world_size

__all__ = ["PROGRAMS"]


class Encoder(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, stride=2, padding=1)
        self.fc = nn.Sequential(nn.Linear(96, 24), nn.ReLU(), nn.Linear(24, dim))

    def forward(self, x):
        return self.fc(F.relu(self.conv(x)).flatten(1))


def two_views(x):
    return x + 0.1 * torch.randn_like(x), x.flip(3) + 0.1 * torch.randn_like(x)


class MoCo(nn.Module):
    def __init__(self, dim=8, K=64, m=0.99, T=0.2):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = Encoder(dim), Encoder(dim)
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        keys = all_gather(keys).flatten(0, 1)
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.K

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        self._dequeue_and_enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


def moco():
    torch.manual_seed(30)
    model = MoCo().double()
    optimizer = optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    with parallel_model(model):
        for x, _ in shard_loader(batches(images())):
            output, target = model(*two_views(x))
            loss = F.cross_entropy(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model=model)


def moco_beside():
    """The momentum encoder is a model of its own, outside the block, updated after each step."""
    torch.manual_seed(31)
    encoder_q, encoder_k = Encoder().double(), Encoder().double()
    encoder_k.load_state_dict(encoder_q.state_dict())
    encoder_k.requires_grad_(False)
    optimizer = optim.SGD(encoder_q.parameters(), 0.05, momentum=0.9)
    with parallel_model(encoder_q):
        for x, _ in shard_loader(batches(images())):
            im_q, im_k = two_views(x)
            q = F.normalize(encoder_q(im_q), dim=1)
            with torch.no_grad():
                k = F.normalize(encoder_k(im_k), dim=1)
            loss = F.cross_entropy(q @ k.T / 0.2, torch.arange(len(q)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for param_q, param_k in zip(encoder_q.parameters(), encoder_k.parameters(), strict=True):
                    param_k.data.mul_(0.9).add_(param_q.data, alpha=0.1)
    return weights(encoder_q=encoder_q, encoder_k=encoder_k)


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online_encoder = Encoder()
        self.online_predictor = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.target_encoder = copy.deepcopy(self.online_encoder)
        for p in self.target_encoder.parameters():
            p.requires_grad = False

    def update_moving_average(self, beta=0.9):
        for current, ma in zip(self.online_encoder.parameters(), self.target_encoder.parameters(), strict=True):
            ma.data = ma.data * beta + (1 - beta) * current.data

    def forward(self, x1, x2):
        online_1, online_2 = (
            self.online_predictor(self.online_encoder(x1)),
            self.online_predictor(self.online_encoder(x2)),
        )
        with torch.no_grad():
            target_1, target_2 = self.target_encoder(x1), self.target_encoder(x2)
        loss_1 = 2 - 2 * F.cosine_similarity(online_1, target_2.detach(), dim=-1)
        loss_2 = 2 - 2 * F.cosine_similarity(online_2, target_1.detach(), dim=-1)
        return (loss_1 + loss_2).mean()


def byol():
    torch.manual_seed(32)
    learner = BYOL().double()
    opt = optim.Adam(learner.parameters(), lr=3e-3)
    with parallel_model(learner):
        for x, _ in shard_loader(batches(images())):
            loss = learner(*two_views(x))
            opt.zero_grad()
            loss.backward()
            opt.step()
            learner.update_moving_average()
    return weights(learner=learner)


def simclr():
    torch.manual_seed(33)
    model = Encoder().double()
    optimizer = optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    with parallel_model(model):
        for x, _ in shard_loader(batches(images())):
            features = F.normalize(model(torch.cat(two_views(x))), dim=1)
            labels = torch.cat([torch.arange(len(x)) for _ in range(2)])
            labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).to(x.dtype)
            similarity = features @ features.T
            mask = torch.eye(labels.shape[0], dtype=torch.bool)
            labels = labels[~mask].view(labels.shape[0], -1)
            similarity = similarity[~mask].view(labels.shape[0], -1)
            positives = similarity[labels.bool()].view(labels.shape[0], -1)
            negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
            logits = torch.cat([positives, negatives], dim=1) / 0.5
            loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model=model)


class DINOHead(nn.Module):
    def __init__(self, in_dim=8, out_dim=12):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, 16), nn.GELU(), nn.Linear(16, 8))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, out_dim, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class MultiCropWrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = Encoder(), DINOHead()

    def forward(self, x):
        return self.head(self.backbone(torch.cat(x)))


class DINOLoss(nn.Module):
    def __init__(self, out_dim=12, center_momentum=0.9):
        super().__init__()
        self.center_momentum = center_momentum
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student_output, teacher_output):
        student_out = (student_output / 0.1).chunk(2)
        teacher_out = F.softmax((teacher_output - self.center) / 0.04, dim=-1).detach().chunk(2)
        losses = [
            torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1).mean()
            for iq, q in enumerate(teacher_out)
            for v in range(len(student_out))
            if v != iq
        ]
        self.update_center(teacher_output)
        return sum(losses) / len(losses)

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = all_reduce(torch.sum(teacher_output, dim=0, keepdim=True), "mean") / world_size()
        batch_center = batch_center / len(teacher_output)
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)


def dino():
    torch.manual_seed(34)
    student, teacher = MultiCropWrapper().double(), MultiCropWrapper().double()
    teacher.load_state_dict(student.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    dino_loss = DINOLoss().double()
    regularized = [p for n, p in student.named_parameters() if p.requires_grad and not n.endswith(".bias")]
    not_regularized = [p for n, p in student.named_parameters() if p.requires_grad and n.endswith(".bias")]
    optimizer = optim.AdamW([{"params": regularized}, {"params": not_regularized, "weight_decay": 0.0}], lr=2e-3)
    with parallel_model(student):
        loader = shard_loader(batches(images()))
        steps = len(loader)
        for it, (x, _) in enumerate(loader):
            optimizer.param_groups[0]["weight_decay"] = 0.04 + 0.04 * it
            views = two_views(x)
            teacher_output = teacher(views)
            student_output = student(views)
            loss = dino_loss(student_output, teacher_output)
            optimizer.zero_grad()
            loss.backward()
            for n, p in student.named_parameters():
                if p.grad is not None:
                    param_norm = p.grad.data.norm(2)
                    clip_coef = 3.0 / (param_norm + 1e-6)
                    if clip_coef < 1:
                        p.grad.data.mul_(clip_coef)
                    if it < 1 and "last_layer" in n:
                        p.grad = None
            optimizer.step()
            with torch.no_grad():
                m = 1 - 0.1 * (math.cos(math.pi * it / steps) + 1) / 2
                for param_q, param_k in zip(student.parameters(), teacher.parameters(), strict=True):
                    param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
    return weights(student=student, teacher=teacher, dino_loss=dino_loss)


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = Encoder()
        self.token_embedding = nn.Embedding(10, 8)
        self.text_projection = nn.Parameter(torch.randn(8, 8) * 8**-0.5)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def encode_image(self, image):
        return self.visual(image)

    def encode_text(self, text):
        return self.token_embedding(text) @ self.text_projection

    def forward(self, image, text):
        image_features = F.normalize(self.encode_image(image), dim=-1)
        text_features = F.normalize(self.encode_text(text), dim=-1)
        return image_features, text_features, self.logit_scale.exp()


def clip():
    torch.manual_seed(35)
    model = CLIP().double()
    exclude = [p for p in model.parameters() if p.ndim < 2]
    include = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = optim.AdamW(
        [{"params": exclude, "weight_decay": 0.0}, {"params": include, "weight_decay": 0.2}], lr=1e-3, betas=(0.9, 0.98)
    )
    with parallel_model(model):
        for x, y in shard_loader(batches(images())):
            image_features, text_features, logit_scale = model(x, y)
            logits = logit_scale * image_features @ text_features.T
            labels = torch.arange(len(x))
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(10))
    return weights(model=model)


def update_ema_variables(model, ema_model, alpha, global_step):
    alpha = min(1 - 1 / (global_step + 1), alpha)
    for ema_param, param in zip(ema_model.parameters(), model.parameters(), strict=True):
        ema_param.data.mul_(alpha).add_(param.data, alpha=1 - alpha)


def mean_teacher():
    """A consistency loss between the student and its average, which is a deep copy made in the block."""
    torch.manual_seed(36)
    model = Encoder(10).double()
    optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    with parallel_model(model):
        ema_model = copy.deepcopy(model)
        for param in ema_model.parameters():
            param.detach_()
        for step, (x, y) in enumerate(shard_loader(batches(images()))):
            student_input, teacher_input = two_views(x)
            logits = model(student_input)
            with torch.no_grad():
                ema_logits = ema_model(teacher_input)
            consistency = F.mse_loss(F.softmax(logits, dim=1), F.softmax(ema_logits, dim=1))
            loss = F.cross_entropy(logits, y) + 0.5 * consistency
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update_ema_variables(model, ema_model, 0.9, step)
    return weights(model=model, ema_model=ema_model)


PROGRAMS = [moco, moco_beside, byol, simclr, dino, clip, mean_teacher]
