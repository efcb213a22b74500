"""Language programs after nanoGPT, GPT-2, BERT, PyTorch's word_language_model, LoRA."""

from __future__ import annotations

import contextlib
import math

import torch
from one_word.data import batches, tokens, weights
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from parallelize import no_sync, parallel_model, shard_loader

__all__ = ["PROGRAMS"]

VOCAB, LENGTH, WIDTH = 28, 12, 16


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head=2):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 2 * n_embd), nn.GELU(), nn.Linear(2 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, *, tied=False, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList([Block(WIDTH) for _ in range(2)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.05)

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))

    def configure_optimizers(self, weight_decay, learning_rate):
        params = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
        decay = [p for p in params.values() if p.dim() >= 2]
        nodecay = [p for p in params.values() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -LENGTH:])
            idx = torch.cat((idx, logits[:, -1, :].argmax(dim=-1, keepdim=True)), dim=1)
        return idx


def get_lr(it, learning_rate=1e-2, warmup_iters=2, lr_decay_iters=8, min_lr=1e-3):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


def nanogpt():
    torch.manual_seed(1337)
    model = GPT(tied=True).double()
    optimizer = model.configure_optimizers(weight_decay=1e-1, learning_rate=1e-2)
    gradient_accumulation_steps, grad_clip = 2, 1.0
    with parallel_model(model):
        iter_num = 0
        for micro_step, (text,) in enumerate(shard_loader(batches(TensorDataset(tokens(LENGTH + 1))))):
            X, Y = text[:, :-1], text[:, 1:]
            last = (micro_step + 1) % gradient_accumulation_steps == 0
            for param_group in optimizer.param_groups:
                param_group["lr"] = get_lr(iter_num)
            with contextlib.nullcontext() if last else no_sync(model):
                _, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
                loss.backward()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                iter_num += 1
        model.eval()
        sample = model.generate(torch.zeros(1, 1, dtype=torch.long), 5)
        model.train()
    return {**weights(model=model), "sample": sample}


def gpt2():
    """Tied embeddings, the optimizer made inside the block, linear warm-up."""
    torch.manual_seed(7)
    model = GPT(tied=True).double()
    loader = batches(TensorDataset(tokens(LENGTH + 1)))
    with parallel_model(model):
        optimizer = optim.AdamW(model.parameters(), lr=5e-3)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        for (text,) in shard_loader(loader):
            logits, _ = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return weights(model=model)


def gpt_checkpointing():
    torch.manual_seed(8)
    model = GPT(recompute=True).double()
    optimizer = optim.AdamW(model.parameters(), lr=5e-3)
    with parallel_model(model):
        for (text,) in shard_loader(batches(TensorDataset(tokens(LENGTH + 1)))):
            _, loss = model(text[:, :-1], text[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model=model)


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB + 1, WIDTH, padding_idx=0)
        self.register_buffer("position_ids", torch.arange(LENGTH), persistent=False)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(WIDTH, VOCAB + 1)
        self.decoder.weight = self.embeddings.weight

    def forward(self, input_ids):
        x = self.embeddings(input_ids) + self.positions(self.position_ids)
        return self.decoder(self.encoder(x))


def bert():
    torch.manual_seed(9)
    model = Bert().double()
    no_decay = ("bias", "norm")
    optimizer = optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if not any(k in n for k in no_decay)]},
            {"params": [p for n, p in model.named_parameters() if any(k in n for k in no_decay)], "weight_decay": 0.0},
        ],
        lr=2e-3,
        weight_decay=0.01,
    )
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    mask_id = VOCAB
    with parallel_model(model):
        for (text,) in shard_loader(batches(TensorDataset(tokens(LENGTH)))):
            labels = text.clone()
            masked = torch.zeros_like(text, dtype=torch.bool)
            masked[:, 1::5] = True
            labels[~masked] = -100
            logits = model(text.masked_fill(masked, mask_id))
            loss = criterion(logits.view(-1, VOCAB + 1), labels.view(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model=model)


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = nn.Linear(nhid, ntoken)
        self.ntoken, self.nhid, self.nlayers = ntoken, nhid, nlayers
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, inputs, hidden):
        output, hidden = self.rnn(self.encoder(inputs), hidden)
        decoded = self.decoder(output).view(-1, self.ntoken)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return (weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid))


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def word_language_model():
    """An update by hand, `p.data.add_(p.grad, alpha=-lr)`, without an optimizer; the hidden state is carried on."""
    torch.manual_seed(1111)
    model = RNNModel(VOCAB, WIDTH, WIDTH, 2).double()
    criterion = nn.NLLLoss()
    lr = 2.0
    with parallel_model(model):
        model.train()
        hidden = model.init_hidden(8)
        for (text,) in shard_loader(batches(TensorDataset(tokens(LENGTH + 1)))):
            data, targets = text[:, :-1].t(), text[:, 1:].t().reshape(-1)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
    return weights(model=model)


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, lora_alpha=8):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = lora_alpha / r

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling


def lora():
    torch.manual_seed(10)
    model = GPT()
    for block in model.transformer.h:
        block.attn.c_attn = LoRALinear(block.attn.c_attn)
        block.mlp[0] = LoRALinear(block.mlp[0])
    model.double()
    for name, param in model.named_parameters():
        param.requires_grad = "lora_" in name
    optimizer = optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    with parallel_model(model):
        for (text,) in shard_loader(batches(TensorDataset(tokens(LENGTH + 1)))):
            _, loss = model(text[:, :-1], text[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        adapter = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    assert len(adapter) == 8
    return weights(model=model)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 2)

    def forward(self, text, lengths):
        packed = pack_padded_sequence(self.embed(text), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, hidden = self.rnn(packed)
        return self.head(torch.cat([hidden[0], hidden[1]], dim=1))


def packed_rnn():
    torch.manual_seed(11)
    text = tokens(LENGTH)
    lengths = torch.arange(len(text)) % (LENGTH - 3) + 3
    dataset = TensorDataset(text, lengths, (text[:, 0] > 10).long())
    model = Classifier().double()
    optimizer = optim.RMSprop(model.parameters(), lr=5e-3)
    with parallel_model(model):
        for x, n, y in shard_loader(batches(dataset)):
            optimizer.zero_grad()
            F.cross_entropy(model(x, n), y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
    return weights(model=model)


def autocast_bf16():
    """torch.autocast written into the loop."""
    torch.manual_seed(12)
    model = GPT()
    optimizer = optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    with parallel_model(model):
        for (text,) in shard_loader(batches(TensorDataset(tokens(LENGTH + 1)))):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                _, loss = model(text[:, :-1], text[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model=model)


def amp_bf16():
    """The same loop without autocast: run with `amp="bf16"`."""
    torch.manual_seed(12)
    model = GPT()
    optimizer = optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    with parallel_model(model):
        for (text,) in shard_loader(batches(TensorDataset(tokens(LENGTH + 1)))):
            _, loss = model(text[:, :-1], text[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model=model)


PROGRAMS = [
    nanogpt,
    gpt2,
    gpt_checkpointing,
    bert,
    word_language_model,
    lora,
    packed_rnn,
    autocast_bf16,
    amp_bf16,
]
