"""Masks of classes that a batch is restricted to."""

import torch
import torch.nn.functional as F

from everlearn import Batch


def test_classes_of_a_batch_without_ignored_labels():
    batch = Batch(torch.rand(4, 2), torch.tensor([3, 1, -100, 3]))
    assert batch.mark_classes(5).tolist() == [False, True, False, True, False]


def test_a_restricted_batch_has_a_loss_over_fewer_classes():
    outputs = torch.randn(3, 4)
    y = torch.tensor([1, 3, 1])
    allowed = torch.tensor([False, True, False, True])
    expected = F.cross_entropy(outputs[:, [1, 3]], torch.tensor([0, 1, 0]))
    torch.testing.assert_close(Batch(torch.rand(3, 2), y).restrict(allowed).loss(outputs), expected)


def test_a_restricted_batch_keeps_the_scenario_mask():
    mask = torch.tensor([[True, True, False], [False, True, True]])
    batch = Batch(torch.rand(2, 2), torch.tensor([1, 1]), torch.tensor([0, 1]), mask)
    restricted = batch.restrict(torch.tensor([True, True, False, True]))
    assert restricted.allowed_rows.tolist() == [[True, True, False], [False, True, False]]
