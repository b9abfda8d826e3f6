import pytest
import torch
import torch.nn.functional as F

from everlearn import Bernoulli, Categorical, Gaussian


def test_categorical_is_cross_entropy_over_allowed_classes():
    outputs = torch.randn(6, 5)
    y = torch.tensor([0, 1, 0, 1, 1, 0])
    allowed = torch.tensor([True, True, False, False, False]).expand(6, 5)
    torch.testing.assert_close(Categorical().loss(outputs, y, allowed), F.cross_entropy(outputs[:, :2], y))
    torch.testing.assert_close(Categorical().loss(outputs, y), F.cross_entropy(outputs, y))
    assert torch.equal(Categorical().score(outputs, y, allowed), (outputs[:, :2].argmax(1) == y).float())


def test_a_masked_wide_head_equals_a_multi_head():
    """The loss of task t has gradients only for the outputs of task t."""
    outputs = torch.randn(2, 4, requires_grad=True)
    allowed = torch.tensor([[True, True, False, False], [False, False, True, True]])
    Categorical().loss(outputs, torch.tensor([1, 2]), allowed).backward()
    assert torch.equal(outputs.grad != 0, allowed)


def test_outputs_of_future_classes_are_never_predicted():
    outputs = torch.zeros(1, 6)
    outputs[0, 5] = 9
    assert Categorical().score(outputs, torch.tensor([0]), torch.ones(1, 4, dtype=torch.bool)) == 1


def test_categorical_averages_over_tokens_without_padding():
    outputs = torch.randn(2, 3, 5)
    y = torch.tensor([[1, 2, -100], [4, 0, 3]])
    torch.testing.assert_close(Categorical().loss(outputs, y), F.cross_entropy(outputs.flatten(0, 1), y.flatten()))
    is_correct = (outputs.argmax(-1) == y).float()
    torch.testing.assert_close(
        Categorical().score(outputs, y), torch.stack([is_correct[0, :2].mean(), is_correct[1].mean()])
    )


@pytest.mark.parametrize("shape", [(7,), (7, 3)])
def test_the_weight_is_the_number_of_labels_in_the_mean_loss(shape):
    outputs = torch.randn(*shape, 5)
    y = torch.randint(5, shape)
    y[2:5] = -100
    sum_of_losses = F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="sum")
    torch.testing.assert_close(Categorical().loss(outputs, y) * Categorical().weight(y), sum_of_losses)
    assert Categorical().label_count(outputs, y) == Categorical().weight(y) == int((y != -100).sum())
    assert Categorical().label_count(outputs) == y.numel()
    assert Gaussian().label_count(outputs) == Bernoulli().label_count(outputs) == 7


def test_gaussian_and_bernoulli_are_log_likelihoods():
    outputs = torch.randn(4, 3)
    y = torch.randn(4, 3)
    normal = torch.distributions.Normal(outputs, 0.5**0.5)
    constant = -0.5 * torch.log(torch.tensor(torch.pi)) * 3
    torch.testing.assert_close(-Gaussian(0.5).loss(outputs, y), normal.log_prob(y).sum(1).mean() - constant)
    labels = (y > 0).float()
    bernoulli = torch.distributions.Bernoulli(logits=outputs)
    torch.testing.assert_close(-Bernoulli().loss(outputs, labels), bernoulli.log_prob(labels).sum(1).mean())


def test_bernoulli_over_allowed_labels_only():
    outputs = torch.randn(4, 3)
    y = torch.randint(2, (4, 3)).float()
    allowed = torch.tensor([True, False, True]).expand(4, 3)
    torch.testing.assert_close(
        Bernoulli().loss(outputs, y, allowed), Bernoulli().loss(outputs[:, [0, 2]], y[:, [0, 2]])
    )
    torch.testing.assert_close(
        Bernoulli().score(outputs, y, allowed), Bernoulli().score(outputs[:, [0, 2]], y[:, [0, 2]])
    )


@pytest.mark.parametrize(
    ("likelihood", "y", "message"),
    [
        (Categorical(), torch.rand(3), "must be integers, got torch.float32: use y.long"),
        (Bernoulli(), torch.tensor([0, 1]), "row of zeros and ones"),
    ],
)
def test_labels_of_the_wrong_dtype(likelihood, y, message):
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
def test_probabilities_instead_of_logits_raise_a_warning(shape, dtype):
    outputs = torch.randn(shape).to(dtype)
    with pytest.warns(UserWarning, match="outputs are probabilities .* Remove the Softmax"):
        Categorical().check_outputs(outputs.softmax(-1))
    Categorical().check_outputs(outputs)  # pytest would raise a warning of these calls
    Categorical().check_outputs(outputs.log_softmax(-1))
    Categorical().check_outputs(outputs.sigmoid())
    Categorical().check_outputs(torch.ones(6, 1))
    Gaussian().check_outputs(outputs.softmax(-1))
    Bernoulli().check_outputs(outputs.softmax(-1))
