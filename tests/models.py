"""Models that are hard in one way or another for anything that wants gradients per example."""

import torch
import torch.nn.functional as F
from torch import nn

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
}


def make(name):
    """The model in float64, and seven inputs."""
    torch.manual_seed(0)
    factory, shape = MODELS[name]
    model = factory().double()
    x = torch.randint(0, 11, (7, 5)) if shape is None else torch.randn(shape, dtype=torch.double)
    return model, x
