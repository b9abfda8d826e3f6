"""Parameters of which every process has a share (FSDP): what a method keeps is shared out with them, and it learns as if they were whole."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from everlearn import AGEM, EWC, GEM, L2, MAS, SI, Batch, LwF, Method, train
from everlearn.core.parameters import trainable_parameters
from everlearn.curvature import fisher

METHODS = {
    "finetune": Method,
    "l2": lambda: L2(1.0),
    "si": lambda: SI(1.0),
    "ewc": lambda: EWC(10.0),
    "online": lambda: EWC(10.0, mode="online", decay=0.9),
    "half": lambda: EWC(10.0, half=True),
    "mas": lambda: MAS(1.0),
}


def net(sharded=False):
    """Nine units, which two processes cannot share equally; the last layer is the root's own, which stays whole after a forward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))
    for layer in (model[0], model) if sharded else ():
        fully_shard(layer)
    return model


def learn(method, model, attached=False, tasks=2):
    """Two tasks in a loop of one's own, all processes with the same batches; importances as if from a copy that is whole."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(tasks):
        x, y = torch.randn(32, 6, generator=draw), torch.randint(4, (32,), generator=draw)
        method.begin_task(model, (x, y))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attachment = method.attach(model, optimizer) if attached else None
        for part in Batch(x, y).chunk(4):
            optimizer.zero_grad()
            if attachment:
                part.loss(model(part.x)).backward()
            else:
                method.loss(model, part).backward()
                method.before_step(model)
            optimizer.step()
            if not attachment:
                method.after_step(model)
        if attachment:
            attachment.remove()
        if hasattr(method, "consolidate"):
            with torch.no_grad():
                model(x)  # whoever looks at it now finds some parameters whole
            method.consolidate(model, {n: torch.rand(p.shape, generator=draw) for n, p in model.named_parameters()})
        else:
            method.end_task(model, (x, y))
    return {
        n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in trainable_parameters(model).items()
    }


@pytest.mark.parametrize("attached", [False, True])
def test_sharded_parameters_learn_what_whole_ones_do(two, attached):
    alone = {name: learn(make(), net(), attached) for name, make in METHODS.items()}
    for found in two(lambda: {name: learn(make(), net(sharded=True), attached) for name, make in METHODS.items()}):
        for name, weights in found.items():
            for n, p in weights.items():
                close = 1e-3 if name == "half" else 1e-6  # each share is rounded by draws of its own
                torch.testing.assert_close(p, alone[name][n], rtol=close, atol=close, msg=f"{name}, {n}")


def test_what_is_kept_is_shared_out_and_can_be_saved(two, tmp_path):
    def saved():
        model, method, other = net(sharded=True), EWC(10.0, half=True), EWC(10.0, half=True)
        learn(method, model)
        learn(other, net(sharded=True), tasks=1)
        kept = method.quadratic.form.values["0.weight"]
        dcp.save(method.state_dict(), checkpoint_id=tmp_path / "state")
        state = other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "state")
        other.load_state_dict(state)
        here = [a.to_local() for form in (method, other) for a in form.quadratic.form.values.values()]
        same = all(torch.equal(a, b) for a, b in zip(here[:4], here[4:], strict=True))
        return kept.to_local().numel(), kept.dtype, method.quadratic.anchor["0.weight"].to_local().numel(), same

    sizes, dtypes, anchors, same = zip(*two(saved), strict=True)
    assert sorted(sizes) == sorted(anchors) == [4 * 6, 5 * 6]
    assert set(dtypes) == {torch.bfloat16}
    assert all(same)


def refusal(act):
    """What is said."""
    try:
        act()
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing"


def test_what_needs_whole_parameters_says_so(two):
    def said():
        model, xy = net(sharded=True), (torch.randn(8, 6), torch.arange(8) % 4)
        whole = fisher(net(), xy, structure="kronecker")
        return [
            refusal(lambda: fisher(model, xy)),
            refusal(lambda: EWC(structure="kronecker").consolidate(model, whole)),
            refusal(lambda: train(model, Method(), xy, epochs=1)),
            *(refusal(lambda make=make: learn(make(), model)) for make in (lambda: AGEM(20), lambda: GEM(20), LwF)),
        ]

    for importance, form, trainer, *others in two(said):
        assert all("needs whole parameters, and these are sharded" in other for other in others)
        assert "pass it, method.consolidate(model, importance), or use SI" in importance
        assert "Sharded parameters need a Diagonal importance" in form
        assert "average their own gradients" in trainer
