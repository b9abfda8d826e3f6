import pytest
import torch
import torch.nn.functional as F

from everlearn import Bernoulli, Categorical, Gaussian


def test_categorical_is_cross_entropy_over_what_is_allowed():
    out, y = torch.randn(6, 5), torch.tensor([0, 1, 0, 1, 1, 0])
    allowed = torch.tensor([True, True, False, False, False]).expand(6, 5)
    torch.testing.assert_close(Categorical().loss(out, y, allowed), F.cross_entropy(out[:, :2], y))
    torch.testing.assert_close(Categorical().loss(out, y), F.cross_entropy(out, y))
    assert torch.equal(Categorical().score(out, y, allowed), (out[:, :2].argmax(1) == y).float())


def test_a_masked_wide_head_is_a_multi_head():
    """Task t's loss moves only task t's rows."""
    out = torch.randn(2, 4, requires_grad=True)
    allowed = torch.tensor([[True, True, False, False], [False, False, True, True]])
    Categorical().loss(out, torch.tensor([1, 2]), allowed).backward()
    assert torch.equal(out.grad != 0, allowed)


def test_outputs_no_task_uses_yet_are_never_named():
    out = torch.zeros(1, 6)
    out[0, 5] = 9
    assert Categorical().score(out, torch.tensor([0]), torch.ones(1, 4, dtype=torch.bool)) == 1


def test_categorical_counts_tokens_and_ignores_padding():
    out, y = torch.randn(2, 3, 5), torch.tensor([[1, 2, -100], [4, 0, 3]])
    torch.testing.assert_close(Categorical().loss(out, y), F.cross_entropy(out.flatten(0, 1), y.flatten()))
    right = (out.argmax(-1) == y).float()
    torch.testing.assert_close(Categorical().score(out, y), torch.stack([right[0, :2].mean(), right[1].mean()]))


@pytest.mark.parametrize("shape", [(7,), (7, 3)])
def test_the_weight_is_how_many_labels_the_loss_is_a_mean_over(shape):
    out, y = torch.randn(*shape, 5), torch.randint(5, shape)
    y[2:5] = -100
    sum_of_losses = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="sum")
    torch.testing.assert_close(Categorical().loss(out, y) * Categorical().weight(y), sum_of_losses)
    assert Categorical().label_count(out, y) == Categorical().weight(y) == int((y != -100).sum())
    assert Categorical().label_count(out) == y.numel()
    assert Gaussian().label_count(out) == Bernoulli().label_count(out) == 7


def test_gaussian_and_bernoulli_are_log_likelihoods():
    out, y = torch.randn(4, 3), torch.randn(4, 3)
    normal = torch.distributions.Normal(out, 0.5**0.5)
    constant = -0.5 * torch.log(torch.tensor(torch.pi)) * 3
    torch.testing.assert_close(-Gaussian(0.5).loss(out, y), normal.log_prob(y).sum(1).mean() - constant)
    labels = (y > 0).float()
    coin = torch.distributions.Bernoulli(logits=out)
    torch.testing.assert_close(-Bernoulli().loss(out, labels), coin.log_prob(labels).sum(1).mean())


def test_bernoulli_over_allowed_labels_only():
    out, y = torch.randn(4, 3), torch.randint(2, (4, 3)).float()
    allowed = torch.tensor([True, False, True]).expand(4, 3)
    torch.testing.assert_close(Bernoulli().loss(out, y, allowed), Bernoulli().loss(out[:, [0, 2]], y[:, [0, 2]]))
    torch.testing.assert_close(Bernoulli().score(out, y, allowed), Bernoulli().score(out[:, [0, 2]], y[:, [0, 2]]))


@pytest.mark.parametrize(
    ("likelihood", "y", "message"),
    [
        (Categorical(), torch.rand(3), "must be integers, got torch.float32: use y.long"),
        (Bernoulli(), torch.tensor([0, 1]), "row of zeros and ones"),
    ],
)
def test_labels_of_the_wrong_kind(likelihood, y, message):
    with pytest.raises(TypeError, match=message):
        likelihood.labels(y)


def test_wrong_shapes_and_labels_are_explained():
    with pytest.raises(ValueError, match="Labels run from 0 to 7 but the model has only 4 outputs"):
        Categorical().loss(torch.zeros(2, 4), torch.tensor([0, 7]))
    with pytest.raises(ValueError, match=r"gives 4 outputs but the stream has 6 classes.*outputs=6.*grow_output"):
        Categorical().loss(torch.zeros(2, 4), torch.tensor([0, 1]), torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"shape \(2, 1\) for targets of shape \(2, 3\)"):
        Gaussian().loss(torch.zeros(2, 1), torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 5)], ids=["examples", "tokens"])
def test_probabilities_in_the_place_of_logits_are_told(shape, dtype):
    out = torch.randn(shape).to(dtype)
    with pytest.warns(UserWarning, match="outputs are probabilities .* Remove the Softmax"):
        Categorical().check_outputs(out.softmax(-1))
    Categorical().check_outputs(out)  # what follows is no warning, or pytest would raise it
    Categorical().check_outputs(out.log_softmax(-1))
    Categorical().check_outputs(out.sigmoid())
    Categorical().check_outputs(torch.ones(6, 1))
    Gaussian().check_outputs(out.softmax(-1))
    Bernoulli().check_outputs(out.softmax(-1))
