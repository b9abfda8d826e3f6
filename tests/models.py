"""Models that are difficult cases for per-example gradients."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from everlearn import nets


class TiedEmbedding(nn.Module):
    """A tied embedding and output layer, a layer called three times, functional attention and position embeddings."""

    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(11, 8, padding_idx=0)
        self.position_embedding = nn.Embedding(6, 8)
        self.mixing = nn.Parameter(torch.randn(8, 8) / 3)
        self.norm = nn.RMSNorm(8)
        self.repeated_layer = nn.Linear(8, 8)

    def forward(self, t):
        h = self.norm((self.token_embedding(t) + self.position_embedding(torch.arange(t.shape[1]))) @ self.mixing)
        for _ in range(3):
            h = torch.tanh(self.repeated_layer(h))
        h = F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0]
        return F.linear(h.mean(1), self.token_embedding.weight)


class BareParameters(nn.Module):
    """Parameters used in arithmetic: scale, shift, class token, a scalar, one in einsum, and one unused."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.shift = nn.Parameter(torch.randn(3, 4))
        self.scale = nn.Parameter(torch.randn(4))
        self.divisor = nn.Parameter(torch.tensor(1.3))
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.unused = nn.Parameter(torch.randn(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.shift
        h = torch.einsum("bti,ij->btj", h * self.scale, self.matrix) / self.divisor
        return self.head(h.sum(1))


class FoldedTime(nn.Module):
    """Time folded into the batch axis, examples first and time first; transposed and grouped convolutions."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 6, 3, padding="same", groups=2)
        self.up = nn.ConvTranspose1d(6, 4, 2, stride=2)
        self.slope = nn.PReLU()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        n, t, e = x.shape
        h = self.a(x.reshape(n * t, e)).relu().view(n, t, e).transpose(0, 1)
        h = self.b(h.reshape(t * n, e)).view(t, n, e).permute(1, 2, 0)
        return self.head(self.slope(self.up(self.conv(h))).mean(2))


class Frames(nn.Module):
    """A video: frames folded into the batch of a convolution with a bias and a BatchNorm in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        self.group = nn.GroupNorm(1, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        h = F.relu(self.norm(self.conv(x.flatten(0, 1))), inplace=True)
        return self.head(self.group(h).mean((2, 3)).view(len(x), -1, 3).mean(1))


class Recurrent(nn.Module):
    """A GRU cell called once per time step, and an LSTM."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 5)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        h = x.new_zeros(len(x), 5)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h + self.lstm(x)[0][:, -1])


class CustomProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        return d * w, (d * x).sum(0)


class Invisible(nn.Module):
    """A parameter used inside a custom autograd function, which the interceptor cannot see."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(CustomProduct.apply(x, self.w))


class Piecewise(nn.Module):
    """The number of operations grows with the batch, unlike in a probe of two examples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return torch.cat([self.layer(part) for part in x.split(2)])


class Encoder(nn.Module):
    """A transformer encoder, with the batch or time on the first axis."""

    def __init__(self, batch_first):
        super().__init__()
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        if self.batch_first:
            return self.head(self.encoder(x)[:, 0])
        return self.head(self.encoder(x.transpose(0, 1))[0])


class Attention(nn.Module):
    """Cross-attention, whose projections torch slices out of one parameter."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 2, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0].mean(1))


class PositionEmbeddings(nn.Module):
    """Time comes first, so position embeddings have no leading batch axis; time steps are permuted by a buffer."""

    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(11, 4)
        self.position_embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("order", torch.tensor([3, 0, 4, 1, 2]))

    def forward(self, t):
        h = (
            self.token_embedding(t[:, self.order]).transpose(0, 1)
            + self.position_embedding(torch.arange(t.shape[1]))[:, None]
        )
        return self.head(torch.tanh(h).sum(0))


class Bert(nn.Module):
    """BERT of transformers: position ids in one row, token types gathered from a buffer, data-dependent masks."""

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
    """Two inputs through one body, in two calls or concatenated in the batch."""

    def __init__(self, concatenate):
        super().__init__()
        self.concatenate = concatenate
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        first, second = x.unbind(1)
        if self.concatenate:
            first, second = self.body(torch.cat([first, second])).tanh().chunk(2)
        else:
            first = self.body(first).tanh()
            second = self.body(second).tanh()
        return self.head((first - second).square())


class Packed(nn.Module):
    """A GRU over sequences of different lengths, which packing sorts by length."""

    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(11, 4, padding_idx=0)
        self.gru = nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, t):
        lengths = (t > 3).sum(1).clamp(min=1)
        packed = pack_padded_sequence(self.token_embedding(t), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.gru(packed)[1][-1])


class MixtureOfExperts(nn.Module):
    """Each example goes to its top expert; an expert without examples is skipped, or runs on no rows."""

    def __init__(self, skip):
        super().__init__()
        self.skip = skip
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 3) for _ in range(3)])

    def forward(self, x):
        gate_probabilities = self.gate(x).softmax(1)
        top_expert = gate_probabilities.argmax(1)
        outputs = x.new_zeros(len(x), 3)
        for k, expert in enumerate(self.experts):
            (rows,) = torch.where(top_expert == k)
            if len(rows) or not self.skip:
                outputs = outputs.index_add(0, rows, expert(x[rows]) * gate_probabilities[rows, k : k + 1])
        return outputs


class AdaptiveDepth(nn.Module):
    """A layer is repeated as often as the deepest example of the batch needs; the other examples keep their values."""

    def __init__(self):
        super().__init__()
        self.repeated_layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        depth = 1 + (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        h = x
        for k in range(int(depth.max())):
            h = torch.where((depth > k)[:, None], torch.tanh(self.repeated_layer(h)), h)
        return self.head(h)


class Trimmed(nn.Module):
    """Sequences are trimmed to the longest of the batch, by a slice whose bound is a tensor."""

    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(11, 4, padding_idx=0)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, t):
        lengths = (t > 3).sum(1).clamp(min=1)
        t = t[:, : lengths.max()]
        is_token = torch.arange(t.shape[1]) < lengths[:, None]
        return self.head((torch.tanh(self.layer(self.token_embedding(t))) * is_token[..., None]).sum(1))


class Checkpointed(nn.Module):
    """A part whose activations are recomputed in the backward pass."""

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
        self.mixing = nn.Parameter(torch.randn(3, 3, dtype=torch.cdouble))
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.cdouble))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(torch.fft.irfft((torch.fft.rfft(x) @ self.mixing) * self.filter, 4)))


class Autoencoder(nn.Module):
    """One weight as encoder and, transposed, as decoder."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.t()))


class Wrapped(nn.Module):
    """A module whose child is named `module`, as in torch's wrappers, but which computes something itself."""

    def __init__(self):
        super().__init__()
        self.module = nets.mlp(4, 3, hidden=(5,))

    def forward(self, x):
        return 0.2 * self.module(torch.tanh(x))


class ChangingBuffers(nn.Module):
    """Buffers that every forward pass changes, in place and by assignment."""

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
    "tied": (TiedEmbedding, None),
    "position embeddings": (PositionEmbeddings, None),
    "bert": (Bert, None),
    "bare": (BareParameters, [7, 2, 4]),
    "folded": (FoldedTime, [7, 2, 4]),
    "frames": (Frames, [7, 2, 1, 5, 5]),
    "weight norm": (weight_norm, [7, 4]),
    "invisible": (Invisible, [7, 4]),
    "piecewise": (Piecewise, [7, 4]),
    "siamese": (lambda: Siamese(False), [7, 2, 4]),
    "siamese, concatenated": (lambda: Siamese(True), [7, 2, 4]),
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
    "changing buffers": (ChangingBuffers, [7, 4]),
}


def make(name):
    """Create a model in float64 and seven inputs for it."""
    torch.manual_seed(0)
    factory, shape = MODELS[name]
    model = factory().double()
    x = torch.randint(0, 11, (7, 5)) if shape is None else torch.randn(shape, dtype=torch.double)
    return model, x
