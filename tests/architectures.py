"""Small models whose code symbolic tracing cannot follow: ``len(x)``, shapes, loops and branches on data."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).reshape(batch, tokens, width))


class EncoderBlock(nn.Module):
    def __init__(self, width, heads, hidden, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = dropout

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        hidden = F.dropout(F.gelu(self.fc1(self.norm2(x))), self.dropout, self.training)
        return x + self.fc2(hidden)


class VisionTransformer(nn.Module):
    """ViT with a class token; its forward pass calls ``len(x)``, and raises for images of another size."""

    def __init__(self, outputs, image_size=8, patch_size=4, width=8, depth=2, heads=2, hidden=12, dropout=0.1):
        super().__init__()
        self.image_size = image_size
        self.patches = nn.Conv2d(1, width, patch_size, stride=patch_size)
        num_patches = (image_size // patch_size) ** 2
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.1 * torch.randn(1, num_patches + 1, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, hidden, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        if x.shape[-2:] != (self.image_size, self.image_size):
            raise ValueError(f"Expected images of size {self.image_size}.")
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        class_tokens = self.class_token.expand(len(x), -1, -1)
        tokens = torch.cat([class_tokens, tokens], 1) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens[:, 0]))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width, drop_path):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.project = nn.Linear(2 * width, width)
        self.layer_scale = nn.Parameter(0.5 * torch.ones(width))
        self.drop_path = drop_path

    def forward(self, x):
        h = self.depthwise(x).permute(0, 2, 3, 1)
        h = self.layer_scale * self.project(F.gelu(self.expand(self.norm(h))))
        h = h.permute(0, 3, 1, 2)
        if self.training and self.drop_path > 0:
            keep = torch.rand(x.shape[0], *[1] * (x.dim() - 1)) > self.drop_path
            h = h * keep / (1 - self.drop_path)
        return x + h


class ConvNeXt(nn.Module):
    """Depthwise convolutions, LayerNorm over channels, layer scale, stochastic depth and residual connections."""

    def __init__(self, outputs, width=6, depth=2, drop_path=0.1):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 2, stride=2)
        self.blocks = nn.Sequential(*(ConvNeXtBlock(width, drop_path) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        h = self.blocks(self.stem(x))
        return self.head(self.norm(h.mean((-2, -1))))


class DataDependentDepth(nn.Module):
    """The brighter the images of a batch, the more blocks are applied: one to three."""

    def __init__(self, outputs, width=10):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.second = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(3)
        )
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, outputs)

    def depth(self, x):
        return 1 + int((x.mean() > -0.1).item()) + int((x.mean() > 0.1).item())

    def forward(self, x):
        h = torch.relu(self.second(torch.relu(self.first(x.flatten(1)))))
        for i in range(self.depth(x)):
            h = h + self.blocks[i](h)
        return self.head(torch.relu(self.hidden(h)))
