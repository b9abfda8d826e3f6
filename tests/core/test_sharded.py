"""Sharded parameters (FSDP): a method shards its state in the same way, and trains as without sharding."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from everlearn import (
    AGEM,
    DEN,
    DER,
    ER,
    ERACE,
    EWC,
    GEM,
    HAT,
    L2,
    MAS,
    PNN,
    SI,
    Batch,
    DERpp,
    ExpandableRepresentation,
    ExpandNet,
    Freeze,
    GenerativeReplay,
    LwF,
    Method,
    PackNet,
    train,
)
from everlearn.core.parameters import all_parameters, trainable_parameters
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
    """Nine units do not split equally over two processes; the last layer stays unsharded after a forward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))
    for layer in (model[0], model) if sharded else ():
        fully_shard(layer)
    return model


def train_tasks(method, model, attached=False, tasks=2):
    """Train in a custom loop with the same batches in all processes, and random importances of full size."""
    rng = torch.Generator().manual_seed(1)
    for _ in range(tasks):
        x = torch.randn(32, 6, generator=rng)
        y = torch.randint(4, (32,), generator=rng)
        method.begin_task(model, (x, y))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attachment = method.attach(model, optimizer) if attached else None
        for micro_batch in Batch(x, y).chunk(4):
            optimizer.zero_grad()
            if attachment:
                micro_batch.loss(model(micro_batch.x)).backward()
            else:
                method.loss(model, micro_batch).backward()
                method.before_step(model)
            optimizer.step()
            if not attachment:
                method.after_step(model)
        if attachment:
            attachment.remove()
        if hasattr(method, "consolidate"):
            with torch.no_grad():
                model(x)  # leaves the parameters of the last layer unsharded
            method.consolidate(model, {n: torch.rand(p.shape, generator=rng) for n, p in model.named_parameters()})
        else:
            method.end_task(model, (x, y))
    return {
        n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in trainable_parameters(model).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("attached", [False, True])
def test_sharded_training_equals_unsharded_training(run_two_processes, attached):
    expected = {name: train_tasks(make(), net(), attached) for name, make in METHODS.items()}

    def train_sharded():
        return {name: train_tasks(make(), net(sharded=True), attached) for name, make in METHODS.items()}

    for process_weights in run_two_processes(train_sharded):
        for name, weights in process_weights.items():
            # Each process draws the random numbers of stochastic rounding for its shard.
            tolerance = 1e-3 if name == "half" else 1e-6
            for n, p in weights.items():
                torch.testing.assert_close(p, expected[name][n], rtol=tolerance, atol=tolerance, msg=f"{name}, {n}")


def test_state_is_sharded_and_can_be_saved(run_two_processes, tmp_path):
    def save_and_load():
        model = net(sharded=True)
        method = EWC(10.0, half=True)
        restored = EWC(10.0, half=True)
        train_tasks(method, model)
        train_tasks(restored, net(sharded=True), tasks=1)
        importance = method.quadratic.form.values["0.weight"]
        dcp.save(method.state_dict(), checkpoint_id=tmp_path / "state")
        state = restored.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "state")
        restored.load_state_dict(state)
        saved_shards = [value.to_local() for value in method.quadratic.form.values.values()]
        loaded_shards = [value.to_local() for value in restored.quadratic.form.values.values()]
        is_equal = all(torch.equal(a, b) for a, b in zip(saved_shards, loaded_shards, strict=True))
        anchor = method.quadratic.anchor["0.weight"]
        return importance.to_local().numel(), importance.dtype, anchor.to_local().numel(), is_equal

    sizes, dtypes, anchor_sizes, are_equal = zip(*run_two_processes(save_and_load), strict=True)
    assert sorted(sizes) == sorted(anchor_sizes) == [4 * 6, 5 * 6]
    assert set(dtypes) == {torch.bfloat16}
    assert all(are_equal)


def error_message(call):
    """Return the message of the error that a call raises."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return "no error"


# All examples are stored and replayed, so that the result does not depend on a random draw.
WITH_EXAMPLES = {
    "er": lambda: ER(200, 200),
    "er separate": lambda: ER(200, 200, joint=False),
    "der": lambda: DER(200, 200),
    "derpp": lambda: DERpp(200, 200),
    "er-ace": lambda: ERACE(200, 200),
}
FLAT = {**WITH_EXAMPLES, "finetune": Method, "freeze": Freeze, "l2": lambda: L2(1.0), "si": lambda: SI(1.0)}


def flat_net():
    """Shard by FullyShardedDataParallel (FSDP1), whose shards are flat."""
    return FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)


def train_attached(method, model):
    """Train attached, with the batch in the loss, and return all weights."""
    rng = torch.Generator().manual_seed(1)
    for _ in range(2):
        x = torch.rand(32, 6, generator=rng)
        y = torch.randint(4, (32,), generator=rng)
        method.begin_task(model, (x, y))
        optimizer = torch.optim.SGD([*model.parameters(), *method.parameters()], lr=0.1)
        with method.attach(model, optimizer) as attached:
            for micro_batch in Batch(x, y).chunk(4):
                outputs = model(micro_batch.x)
                optimizer.zero_grad()
                attached.loss(micro_batch.loss(outputs), micro_batch.x, micro_batch.y, outputs).backward()
                optimizer.step()
        method.end_task(model, (x, y))
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [p.detach().clone() for p in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in all_parameters(model).values()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*FSDP.*")
@pytest.mark.parametrize("is_flat", [False, True])
def test_attached_replay_of_sharded_parameters_equals_unsharded_training(run_two_processes, is_flat):
    methods = FLAT if is_flat else WITH_EXAMPLES
    expected = {name: train_attached(make(), net()) for name, make in methods.items()}

    def train_sharded():
        make_model = flat_net if is_flat else lambda: net(sharded=True)
        return {name: train_attached(make(), make_model()) for name, make in methods.items()}

    for process_weights in run_two_processes(train_sharded):
        for name, weights in process_weights.items():
            for p, expected_p in zip(weights, expected[name], strict=True):
                torch.testing.assert_close(p, expected_p, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("is_flat", [False, True])
def test_methods_that_need_whole_parameters_refuse_shards(run_two_processes, is_flat):
    methods = [
        LwF, lambda: AGEM(50), lambda: GEM(50), PackNet, HAT, PNN, ExpandNet, DEN,
        lambda: ExpandableRepresentation(50), lambda: GenerativeReplay(hidden=8, latent=2),
    ]  # fmt: skip

    def error_messages():
        model = flat_net() if is_flat else net(sharded=True)
        return [error_message(lambda make=make: train_attached(make(), model)) for make in methods]

    for messages in run_two_processes(error_messages):
        assert [m for m in messages if "needs whole parameters, and these are sharded" not in m] == []


def test_importances_of_flat_shards_are_refused(run_two_processes):
    def error_messages():
        model = flat_net()
        data = (torch.randn(8, 6), torch.arange(8) % 4)
        importance = {n: torch.ones_like(p) for n, p in net().named_parameters()}
        return [
            error_message(lambda: fisher(model, data)),
            error_message(lambda: EWC().consolidate(model, importance)),
            error_message(lambda: train(model, Method(), data, epochs=1)),
        ]

    for fisher_message, consolidate_message, trainer_message in run_two_processes(error_messages):
        assert "per-example gradients need complete ones" in fisher_message
        assert "use torch.distributed.fsdp.fully_shard, or SI or L2" in consolidate_message
        assert "average their own gradients" in trainer_message


@pytest.mark.parametrize("is_flat", [False, True])
def test_the_hugging_face_callback_clips_by_the_norm_over_all_shards(run_two_processes, is_flat):
    pytest.importorskip("transformers")

    def clipped_norm():
        from everlearn.integrations.huggingface import clip_gradients

        model = flat_net() if is_flat else net(sharded=True)
        torch.manual_seed(0)
        (100 * model(torch.randn(8, 6)).square().sum()).backward()
        clip_gradients(model, 0.5)
        shards = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        total = sum(shard.square().sum() for shard in shards if shard is not None).reshape(1)
        torch.distributed.all_reduce(total)
        return float(total.sqrt())

    assert run_two_processes(clipped_norm) == pytest.approx([0.5, 0.5], rel=1e-4)


def test_operations_that_need_unsharded_parameters_are_refused(run_two_processes):
    def error_messages():
        model = net(sharded=True)
        data = (torch.randn(8, 6), torch.arange(8) % 4)
        kronecker_form = fisher(net(), data, structure="kronecker")
        return [
            error_message(lambda: fisher(model, data)),
            error_message(lambda: EWC(structure="kronecker").consolidate(model, kronecker_form)),
            error_message(lambda: train(model, Method(), data, epochs=1)),
            *(
                error_message(lambda make=make: train_tasks(make(), model))
                for make in (lambda: AGEM(20), lambda: GEM(20), LwF)
            ),
        ]

    for fisher_message, kronecker_message, trainer_message, *messages in run_two_processes(error_messages):
        assert all("needs whole parameters, and these are sharded" in message for message in messages)
        assert "pass it, method.consolidate(model, importance), or use SI" in fisher_message
        assert "Sharded parameters need a Diagonal importance" in kronecker_message
        assert "average their own gradients" in trainer_message
