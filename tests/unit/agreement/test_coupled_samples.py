"""Losses that compare the samples of a batch are told by their graphs, and no other ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelize.agreement.coupled_samples import BATCH_KEY, Batch, coupling_operation

SAMPLES, CLASSES, TOKENS = 6, 5, 7
TARGETS = torch.tensor([0, 1, 2, 3, 0, 1])
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])

COUPLED: dict[str, Callable[[], Tensor]] = {}
ORDINARY: dict[str, Callable[[], Tensor]] = {}


def output(*shape: int, is_batch_first: bool = True) -> Tensor:
    """Return a tensor that is marked as an output of a model, for a batch of SAMPLES samples."""
    found = torch.randn(shape, requires_grad=True) * 1.5
    found.grad_fn.metadata[BATCH_KEY] = Batch(SAMPLES, is_batch_first)
    return found


def features() -> Tensor:
    return output(SAMPLES, CLASSES)


def images(channels: int = 1) -> Tensor:
    return output(SAMPLES, channels, 3, 3)


def temperature() -> Tensor:
    return nn.Parameter(torch.zeros(())).exp()


def pairs_of_rows() -> Tensor:
    return torch.arange(SAMPLES)


def dice(p: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    target = torch.ones_like(p)
    if dims is None:
        return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)
    return (1 - (2 * (p * target).sum(dims) + 1) / (p.sum(dims) + target.sum(dims) + 1)).mean()


def coupled(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    COUPLED[loss.__name__] = loss
    return loss


def ordinary(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    ORDINARY[loss.__name__] = loss
    return loss


@coupled
def vicreg_variance() -> Tensor:
    return F.relu(1 - torch.sqrt(features().var(dim=0) + 1e-4)).mean()


@coupled
def vicreg_covariance() -> Tensor:
    x = features()
    x = x - x.mean(0)
    covariance = x.T @ x / (SAMPLES - 1)
    off_diagonal = covariance.flatten()[:-1].view(CLASSES - 1, CLASSES + 1)[:, 1:].flatten()
    return off_diagonal.pow(2).sum() / CLASSES


@coupled
def clip() -> Tensor:
    first, second = F.normalize(features(), dim=-1), F.normalize(features(), dim=-1)
    logits = temperature() * first @ second.t()
    return (F.cross_entropy(logits, pairs_of_rows()) + F.cross_entropy(logits.T, pairs_of_rows())) / 2


@coupled
def clip_by_einsum() -> Tensor:
    return F.cross_entropy(torch.einsum("nc,mc->nm", features(), features()) / 0.07, pairs_of_rows())


@coupled
def infonce_by_diagonal() -> Tensor:
    similarity = features() @ features().T
    return (similarity.logsumexp(1) - similarity.diagonal()).mean()


def simclr_of(z: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    similarity = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -9e15)
    return F.cross_entropy(similarity, torch.arange(len(z)).roll(SAMPLES))


@coupled
def simclr_of_two_forwards() -> Tensor:
    return simclr_of(torch.cat([features(), features()]))


@coupled
def simclr_of_two_views_in_one_forward() -> Tensor:
    return simclr_of(output(2 * SAMPLES, CLASSES))


@coupled
def barlow_twins() -> Tensor:
    first, second = [F.batch_norm(features(), None, None, training=True) for _ in range(2)]
    correlation = first.T @ second / SAMPLES
    return (correlation.diagonal() - 1).pow(2).sum() + correlation.pow(2).sum()


@coupled
def dice_of_the_whole_batch() -> Tensor:
    return dice(images().sigmoid())


@coupled
def dice_of_flattened_masks() -> Tensor:
    return dice(images().sigmoid().view(-1))


@coupled
def dice_by_class() -> Tensor:
    return dice(images(4).softmax(1).view(SAMPLES, 4, -1), (0, 2))


@coupled
def dice_and_cross_entropy() -> Tensor:
    return F.cross_entropy(features(), TARGETS) + 0.1 * dice(images().sigmoid())


@coupled
def root_of_a_mean() -> Tensor:
    return F.mse_loss(features(), torch.ones(SAMPLES, CLASSES)).sqrt()


@coupled
def norm_of_the_batch() -> Tensor:
    return features().norm()


@coupled
def relativistic_gan() -> Tensor:
    scores = output(SAMPLES, 1)
    return F.binary_cross_entropy_with_logits(scores - scores.mean(), torch.ones(SAMPLES, 1))


@coupled
def softmax_over_the_batch() -> Tensor:
    return -(output(SAMPLES).softmax(0) * MASK).log1p().sum()


@coupled
def similarities_by_broadcasting() -> Tensor:
    return F.cosine_similarity(features()[:, None], features()[None], dim=2).pow(2).mean()


@coupled
def pearson_correlation() -> Tensor:
    x, y = output(SAMPLES), torch.randn(SAMPLES)
    x, y = x - x.mean(), y - y.mean()
    return -(x * y).sum() / (x.norm() * y.norm())


@coupled
def perplexity() -> Tensor:
    return F.cross_entropy(output(SAMPLES, TOKENS, 11).view(-1, 11), torch.zeros(42, dtype=torch.long)).exp()


@ordinary
def cross_entropy() -> Tensor:
    return F.cross_entropy(features(), TARGETS)


@ordinary
def cross_entropy_with_smoothing_and_weights() -> Tensor:
    return F.cross_entropy(features(), TARGETS, label_smoothing=0.1, weight=torch.rand(CLASSES))


@ordinary
def regressions() -> Tensor:
    ones = torch.ones(SAMPLES, CLASSES)
    losses = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits)
    return sum(loss(features(), ones) for loss in losses)


@ordinary
def sum_that_is_divided() -> Tensor:
    return F.mse_loss(features(), torch.ones(SAMPLES, CLASSES), reduction="sum") / SAMPLES


@ordinary
def masked_mean() -> Tensor:
    return (F.cross_entropy(features(), TARGETS, reduction="none") * MASK).sum() / MASK.sum()


@ordinary
def language_model() -> Tensor:
    logits = output(SAMPLES, TOKENS, 11)[:, :-1].contiguous().view(-1, 11)
    return F.cross_entropy(logits, torch.zeros(SAMPLES * (TOKENS - 1), dtype=torch.long))


@ordinary
def segmentation() -> Tensor:
    return F.cross_entropy(images(4), torch.zeros(SAMPLES, 3, 3, dtype=torch.long))


@ordinary
def dice_of_each_sample() -> Tensor:
    return dice(images().sigmoid(), (1, 2, 3)) + dice(images().sigmoid().view(SAMPLES, -1), (1,))


@ordinary
def dice_in_a_loop_over_samples() -> Tensor:
    masks = images().sigmoid()
    return sum(dice(each) for each in masks) + sum(dice(masks[i : i + 1]) for i in range(SAMPLES))


@ordinary
def focal() -> Tensor:
    losses = F.cross_entropy(features(), TARGETS, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


@ordinary
def variational() -> Tensor:
    mean, log_variance = features(), features()
    return -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()


@ordinary
def byol_and_simsiam() -> Tensor:
    first, second = output(2 * SAMPLES, CLASSES).chunk(2)
    return F.mse_loss(first, second) - F.cosine_similarity(features(), features(), dim=1).mean()


@ordinary
def triplets() -> Tensor:
    anchors = F.triplet_margin_loss(features(), features(), features())
    return anchors + F.triplet_margin_loss(*output(2 * SAMPLES, CLASSES).split(4))


@ordinary
def diagonal_of_a_product() -> Tensor:
    return (features() @ features().T).diagonal().sigmoid().mean()


@ordinary
def queue_of_moco() -> Tensor:
    query, key = F.normalize(features(), dim=1), torch.randn(SAMPLES, CLASSES)
    positive = torch.einsum("nc,nc->n", query, key)[:, None]
    negative = query @ torch.randn(CLASSES, 20)
    return F.cross_entropy(torch.cat([positive, negative], 1), torch.zeros(SAMPLES, dtype=torch.long))


@ordinary
def gathered_features_of_which_only_these_have_gradients() -> Tensor:
    """As OpenCLIP without gather_with_grad: the rank puts its own features into the gathered ones."""
    first = torch.cat([torch.randn(SAMPLES, CLASSES), features()])
    second = torch.cat([torch.randn(SAMPLES, CLASSES), features()])
    return F.cross_entropy(first @ second.T, torch.arange(2 * SAMPLES))


@ordinary
def gan() -> Tensor:
    real, fake = output(SAMPLES, 1), output(SAMPLES, 1)
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean() + fake.mean() - real.mean()


@ordinary
def learned_weight_of_a_loss() -> Tensor:
    loss = F.cross_entropy(features(), TARGETS)
    return temperature() * loss + loss / loss.detach() + nn.Parameter(torch.ones(3)).norm()


@ordinary
def distillation() -> Tensor:
    teacher = torch.rand(SAMPLES, CLASSES).softmax(1)
    return F.kl_div(F.log_softmax(features() / 4, 1), teacher, reduction="batchmean") * 16


@ordinary
def policy_gradient() -> Tensor:
    advantage, ratio = torch.randn(SAMPLES), torch.exp(output(SAMPLES) - torch.randn(SAMPLES))
    clipped = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    return clipped - torch.distributions.Categorical(logits=features()).entropy().mean()


@ordinary
def balance_of_experts() -> Tensor:
    return (torch.rand(4) * output(SAMPLES, 4).softmax(-1).mean(0)).sum()


@ordinary
def attention_within_samples() -> Tensor:
    x = output(SAMPLES, TOKENS, 4)
    return (torch.softmax(x @ x.transpose(1, 2), -1) @ x).mean()


@ordinary
def time_before_the_batch() -> Tensor:
    first = output(9, SAMPLES, CLASSES).softmax(0).log().mean()
    return first + output(SAMPLES, SAMPLES, CLASSES, is_batch_first=False).softmax(0).log().mean()


@ordinary
def one_sample_at_a_time() -> Tensor:
    return dice(output(1, 1, 3, 3).sigmoid())


@ordinary
def targets_by_position() -> Tensor:
    p = features().softmax(1)
    picked = p[torch.arange(SAMPLES), TARGETS].log().mean() + p.gather(1, TARGETS[:, None]).log().mean()
    return picked + F.cross_entropy(features()[TARGETS > 0], TARGETS[TARGETS > 0])


def operation_of(loss: Tensor) -> str | None:
    return coupling_operation([(loss.grad_fn, loss.output_nr)])


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_compares_samples_is_told(name: str) -> None:
    """The operation is named."""
    assert operation_of(COUPLED[name]())


@pytest.mark.parametrize("name", ORDINARY)
def test_a_loss_of_terms_of_one_sample_is_not_told(name: str) -> None:
    """Nor one whose graph does not tell."""
    assert operation_of(ORDINARY[name]()) is None


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the tensors from which the marked outputs were computed."""
    leaves, pending, seen = [], [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if BATCH_KEY in node.metadata:
            leaves.append(node.next_functions[0][0].variable)
        else:
            pending += [operand for operand, _ in node.next_functions]
    return leaves


@pytest.mark.parametrize("name", COUPLED)
def test_the_gradient_of_a_sample_depends_on_others_where_the_loss_is_told(name: str) -> None:
    """What the graph says is true of the numbers."""
    torch.manual_seed(0)
    loss = COUPLED[name]()
    leaves = leaves_of(loss)
    is_coupled = False
    for leaf in leaves:
        (gradient,) = torch.autograd.grad(loss, [leaf], create_graph=True)
        of_first_sample = (gradient[0] * torch.linspace(1, 2, leaf[0].numel()).view_as(leaf[0])).sum()
        seconds = torch.autograd.grad(of_first_sample, leaves, retain_graph=True, allow_unused=True)
        is_coupled |= any(bool(second[1:].any()) for second in seconds if second is not None)
    assert is_coupled
