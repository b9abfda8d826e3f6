"""Models that are hard in one way or another for anything that wants gradients per example."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from everlearn import nets


class Tied(nn.Module):
    """One table as embedding and output layer, a layer called three times, attention by functional call, positions."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8, padding_idx=0), nn.Embedding(6, 8)
        self.mix, self.norm, self.again = nn.Parameter(torch.randn(8, 8) / 3), nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, t):
        h = self.norm((self.words(t) + self.places(torch.arange(t.shape[1]))) @ self.mix)
        for _ in range(3):
            h = torch.tanh(self.again(h))
        h = F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0]
        return F.linear(h.mean(1), self.words.weight)


class Bare(nn.Module):
    """Parameters in arithmetic: scale, shift, class token, a scalar, one used by einsum, one not used at all."""

    def __init__(self):
        super().__init__()
        self.token, self.shift = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(3, 4))
        self.scale, self.number = nn.Parameter(torch.randn(4)), nn.Parameter(torch.tensor(1.3))
        self.matrix, self.unused = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.shift
        h = torch.einsum("bti,ij->btj", h * self.scale, self.matrix) / self.number
        return self.head(h.sum(1))


class Folded(nn.Module):
    """Rows folded into the batch axis, example by example and the other way round; transposed and grouped convolutions."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 6, 3, padding="same", groups=2)
        self.up, self.slope, self.head = nn.ConvTranspose1d(6, 4, 2, stride=2), nn.PReLU(), nn.Linear(4, 3)

    def forward(self, x):
        n, t, e = x.shape
        h = self.a(x.reshape(n * t, e)).relu().view(n, t, e).transpose(0, 1)
        h = self.b(h.reshape(t * n, e)).view(t, n, e).permute(1, 2, 0)
        return self.head(self.slope(self.up(self.conv(h))).mean(2))


class Frames(nn.Module):
    """A video: frames folded into the batch of a convolution with a bias and a BatchNorm in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        self.group, self.head = nn.GroupNorm(1, 3), nn.Linear(3, 3)

    def forward(self, x):
        h = F.relu(self.norm(self.conv(x.flatten(0, 1))), inplace=True)
        return self.head(self.group(h).mean((2, 3)).view(len(x), -1, 3).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.lstm, self.head = nn.GRUCell(4, 5), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        h = x.new_zeros(len(x), 5)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h + self.lstm(x)[0][:, -1])


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        return d * w, (d * x).sum(0)


class Invisible(nn.Module):
    """A use of a parameter that no tap can see."""

    def __init__(self):
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(Hidden.apply(x, self.w))


class Piecewise(nn.Module):
    """As many operations as the batch needs: not what a probe on two examples saw."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return torch.cat([self.layer(part) for part in x.split(2)])


class Encoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=batch_first)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(4, 3)

    def forward(self, x):
        if self.batch_first:
            return self.head(self.encoder(x)[:, 0])
        return self.head(self.encoder(x.transpose(0, 1))[0])


class Attention(nn.Module):
    """Attention from one sequence to another, whose projections torch cuts out of one parameter."""

    def __init__(self):
        super().__init__()
        self.query, self.attend, self.head = (
            nn.Parameter(torch.randn(1, 2, 4)),
            nn.MultiheadAttention(4, 2, batch_first=True),
            nn.Linear(4, 3),
        )

    def forward(self, x):
        return self.head(self.attend(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0].mean(1))


class Placed(nn.Module):
    """Time comes first, so that vectors of places have no axis for examples in front; steps in a fixed other order."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(11, 4), nn.Embedding(5, 4), nn.Linear(4, 3)
        self.register_buffer("order", torch.tensor([3, 0, 4, 1, 2]))

    def forward(self, t):
        h = self.words(t[:, self.order]).transpose(0, 1) + self.places(torch.arange(t.shape[1]))[:, None]
        return self.head(torch.tanh(h).sum(0))


class Bert(nn.Module):
    """That of transformers: numbers of places in a row, kinds of words gathered from a buffer, masks by the data."""

    def __init__(self):
        super().__init__()
        import transformers

        self.inner = transformers.BertForSequenceClassification(
            transformers.BertConfig(
                vocab_size=11,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=8,
                num_labels=3,
            )
        )

    def forward(self, t):
        return self.inner(t, attention_mask=(t != 0).long()).logits


class Siamese(nn.Module):
    """Two inputs through one body, one after the other or side by side in the batch."""

    def __init__(self, side_by_side):
        super().__init__()
        self.side_by_side = side_by_side
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        left, right = x.unbind(1)
        if self.side_by_side:
            left, right = self.body(torch.cat([left, right])).tanh().chunk(2)
        else:
            left, right = self.body(left).tanh(), self.body(right).tanh()
        return self.head((left - right).square())


class Packed(nn.Module):
    """A GRU over sentences of different lengths, which packing sorts by their length."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 4, padding_idx=0)
        self.gru = nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, t):
        lengths = (t > 3).sum(1).clamp(min=1)
        packed = pack_padded_sequence(self.words(t), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.gru(packed)[1][-1])


class MixtureOfExperts(nn.Module):
    """Every example goes to the expert its gate likes best; an expert without examples is left out, or runs on no rows."""

    def __init__(self, skip):
        super().__init__()
        self.skip = skip
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 3) for _ in range(3)])

    def forward(self, x):
        shares = self.gate(x).softmax(1)
        best = shares.argmax(1)
        out = x.new_zeros(len(x), 3)
        for k, expert in enumerate(self.experts):
            (rows,) = torch.where(best == k)
            if len(rows) or not self.skip:
                out = out.index_add(0, rows, expert(x[rows]) * shares[rows, k : k + 1])
        return out


class AdaptiveDepth(nn.Module):
    """A layer is repeated as often as the hardest example of the batch needs; the others stand still meanwhile."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        depth = 1 + (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        h = x
        for k in range(int(depth.max())):
            h = torch.where((depth > k)[:, None], torch.tanh(self.again(h)), h)
        return self.head(h)


class Trimmed(nn.Module):
    """Sentences are cut to the longest of the batch, by a slice whose bound is a tensor."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 4, padding_idx=0)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, t):
        lengths = (t > 3).sum(1).clamp(min=1)
        t = t[:, : lengths.max()]
        known = torch.arange(t.shape[1]) < lengths[:, None]
        return self.head((torch.tanh(self.layer(self.words(t))) * known[..., None]).sum(1))


class Checkpointed(nn.Module):
    """A part whose activations are not kept, but computed again in the backward pass."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(4, 5)
        self.part = nn.Sequential(nn.Tanh(), nn.Linear(5, 5), nn.PReLU(), nn.Linear(5, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(checkpoint(self.part, self.first(x), use_reentrant=self.use_reentrant))


class Spectral(nn.Module):
    """Complex parameters between two Fourier transforms."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(3, 3, dtype=torch.cdouble))
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.cdouble))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(torch.fft.irfft((torch.fft.rfft(x) @ self.mix) * self.filter, 4)))


class Autoencoder(nn.Module):
    """One weight as encoder and, transposed, as decoder."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.t()))


class Wrapped(nn.Module):
    """A module that has another one, called as the wrappers of torch call it, and something of its own to do."""

    def __init__(self):
        super().__init__()
        self.module = nets.mlp(4, 3, hidden=(5,))

    def forward(self, x):
        return 0.2 * self.module(torch.tanh(x))


class Moving(nn.Module):
    """Buffers that move in every forward pass, in place and by being replaced."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layer(x)


def weight_norm():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3))


def cnn_with_statistics():
    net = nets.cnn((1, 8, 8), 3, channels=(4, 6))
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
    return net


SEQUENCE = torch.Size([7, 2, 4])
MODELS = {
    "mlp": (lambda: nets.mlp(4, 3, hidden=(6, 5)), [7, 4]),
    "cnn": (cnn_with_statistics, [7, 1, 8, 8]),
    "resnet": (lambda: nets.resnet((3, 8, 8), 3, width=2, blocks=(1, 1)), [7, 3, 8, 8]),
    "transformer": (lambda: nets.transformer((2, 4), 3, width=8, depth=1, heads=2), [7, 2, 4]),
    "encoder": (lambda: Encoder(True), [7, 2, 4]),
    "encoder, time first": (lambda: Encoder(False), [7, 2, 4]),
    "cross attention": (Attention, [7, 2, 4]),
    "recurrent": (Recurrent, [7, 2, 4]),
    "tied": (Tied, None),
    "placed": (Placed, None),
    "bert": (Bert, None),
    "bare": (Bare, [7, 2, 4]),
    "folded": (Folded, [7, 2, 4]),
    "frames": (Frames, [7, 2, 1, 5, 5]),
    "weight norm": (weight_norm, [7, 4]),
    "invisible": (Invisible, [7, 4]),
    "piecewise": (Piecewise, [7, 4]),
    "siamese": (lambda: Siamese(False), [7, 2, 4]),
    "siamese, side by side": (lambda: Siamese(True), [7, 2, 4]),
    "packed": (Packed, None),
    "experts": (lambda: MixtureOfExperts(True), [7, 4]),
    "experts without rows": (lambda: MixtureOfExperts(False), [7, 4]),
    "adaptive depth": (AdaptiveDepth, [7, 4]),
    "trimmed": (Trimmed, None),
    "checkpointed": (lambda: Checkpointed(False), [7, 4]),
    "checkpointed, reentrant": (lambda: Checkpointed(True), [7, 4]),
    "complex": (Spectral, [7, 4]),
    "autoencoder": (Autoencoder, [7, 4]),
    "wrapped": (Wrapped, [7, 4]),
    "moving buffers": (Moving, [7, 4]),
}


def make(name):
    """The model in float64, and seven inputs."""
    torch.manual_seed(0)
    factory, shape = MODELS[name]
    model = factory().double()
    x = torch.randint(0, 11, (7, 5)) if shape is None else torch.randn(shape, dtype=torch.double)
    return model, x
