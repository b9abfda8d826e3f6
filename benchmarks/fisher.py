"""Time and memory of the Fisher information and of MAS, as multiples of one forward and backward pass of the same data.

    python benchmarks/fisher.py [mlp cnn resnet transformer] [--rounds 5]
    python benchmarks/fisher.py bert [--outputs 10 30 150] [--rounds 5]

The second command has the cost of a consolidation: an epoch of training (forward, backward and AdamW step, batches of
32), ``labels="signs"`` and ``labels="exact"`` of a Hugging Face BERT with four layers, side by side, in process time.
Exact is measured once on 32 examples and scaled up.

Contenders of the first: Everlearn; the loop over single examples; ``torch.func.vmap(grad)``; and, where they are installed, BackPACK
and nngeometry. Both ask for torchvision, whose wheel does not import beside a CPU build of torch, so they get an
environment of their own:

    python -m venv bench && bench/bin/pip install -c constraints.txt . packaging einops
    bench/bin/pip install --no-deps backpack-for-pytorch unfoldNd nngeometry

All run in turns in one process on one thread; ratios are of the smallest times. How many examples go through the
model at once is Everlearn's own choice, 32 for vmap (a larger block would not fit the memory of plain training), and
as printed for plain training and the other peers. The loop sees fewer examples and is scaled up. Where a peer gives
the same quantity, its values are compared with ours. Peak memory is beyond what the process held before the call, in
MB; each contender is measured on a heap given back to the system first.
"""

import argparse
import copy
import ctypes
import gc
import statistics
import time
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

from everlearn import nets
from everlearn.core.batch import Batch
from everlearn.curvature import count_backward_passes, estimate_epochs, fisher, sensitivity
from everlearn.trainer.cost import peak_memory, reset_peak_memory

CPU = torch.device("cpu")
MODELS = {  # model, shape of an input, examples, examples per pass
    "mlp": (lambda: nets.mlp(784, 10), (784,), 8192, 256),
    "cnn": (lambda: nets.cnn((1, 28, 28), 10, norm=False), (1, 28, 28), 1024, 128),
    "resnet": (lambda: nets.resnet((3, 32, 32), 10), (3, 32, 32), 512, 64),
    "transformer": (lambda: nets.transformer((32, 64), 10), (32, 64), 1024, 128),
}


def plain(model, x, y, size):
    """The limit: one forward and backward pass."""
    for a, b in zip(x.split(size), y.split(size), strict=True):
        model.zero_grad()
        F.cross_entropy(model(a), b).backward()


def loop(model, x, y, size):
    """The empirical diagonal, an example at a time."""
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for i in range(len(x)):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for n, p in model.named_parameters():
            total[n].addcmul_(p.grad, p.grad)
    return {n: v / len(x) for n, v in total.items()}


def by_vmap(model, x, y, size):
    """The empirical diagonal by vmap(grad)."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    total = {n: torch.zeros_like(p) for n, p in parameters.items()}

    def loss(p, a, b):
        return F.cross_entropy(functional_call(model, p, (a[None],)), b[None])

    for a, b in zip(x.split(32), y.split(32), strict=True):  # a larger block would not fit the memory of plain training
        for n, g in vmap(grad(loss), (None, 0, 0))(parameters, a, b).items():
            total[n] += g.square().sum(0)
    return {n: v / len(x) for n, v in total.items()}


def ours(model, x, y, size, labels, structure="diagonal"):
    """Everlearn's Fisher information."""
    return fisher(model, (x, y), labels, structure).diagonal()


def ours_mas(model, x, y, size):
    """Everlearn's sensitivity."""
    return sensitivity(model, x).values


def backpack_contenders():
    """BackPACK's empirical, sampled and exact diagonals and per-example gradients for MAS."""
    try:
        from backpack import backpack, extend
        from backpack.extensions import BatchGrad, DiagGGNExact, DiagGGNMC, SumGradSquared
    except ImportError:
        return {}

    def run(model, x, y, size, extension, field, scale, outputs=False):
        model = extend(copy.deepcopy(model))  # its hooks would slow down everybody else
        criterion = extend(torch.nn.CrossEntropyLoss())
        total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        for a, b in zip(x.split(size), y.split(size), strict=True):
            model.zero_grad()
            with backpack(extension):
                out = model(a)
                (out.square().sum() if outputs else criterion(out, b)).backward()
            for n, p in model.named_parameters():
                value = getattr(p, field)
                total[n] += value.abs().sum(0) if outputs else value * scale(len(a))
                delattr(p, field)
        return {n: v / len(x) for n, v in total.items()}

    return {
        ("BackPACK", "empirical"): partial(
            run, extension=SumGradSquared(), field="sum_grad_squared", scale=lambda n: n * n
        ),
        ("BackPACK", "sampled"): partial(run, extension=DiagGGNMC(), field="diag_ggn_mc", scale=lambda n: n),
        ("BackPACK", "exact"): partial(run, extension=DiagGGNExact(), field="diag_ggn_exact", scale=lambda n: n),
        ("BackPACK", "MAS"): partial(run, extension=BatchGrad(), field="grad_batch", scale=None, outputs=True),
    }


def nngeometry_contenders():
    """Nngeometry's exact and sampled diagonals and Kronecker factors."""
    try:
        from nngeometry.metrics import FIM, FIM_MonteCarlo
        from nngeometry.object import PMatDiag, PMatKFAC
    except ImportError:
        return {}

    def run(model, x, y, size, make, representation, **settings):
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=size)
        model = copy.deepcopy(model)  # hooks stay on it when it fails
        form = make(model, loader, representation, device="cpu", **settings)
        return unpack(model, form.get_diag() if representation is PMatDiag else None)

    def unpack(model, flat):
        if flat is None:
            return None
        sizes = [p.numel() for p in model.parameters()]
        parts = flat.split(sizes)
        return {n: v.view_as(p) for (n, p), v in zip(model.named_parameters(), parts, strict=True)}

    sampled = {"make": FIM_MonteCarlo, "variant": "classif_logits"}
    return {
        ("nngeometry", "exact"): partial(run, make=FIM, representation=PMatDiag, variant="classif_logits"),
        ("nngeometry", "sampled"): partial(run, representation=PMatDiag, **sampled),
        ("nngeometry", "Kronecker"): partial(run, representation=PMatKFAC, **sampled),
    }


CONTENDERS = {
    ("plain", "limit"): plain,
    ("loop", "empirical"): loop,
    ("vmap", "empirical"): by_vmap,
    ("Everlearn", "empirical"): partial(ours, labels="true"),
    ("Everlearn", "sampled"): partial(ours, labels="sample"),
    ("Everlearn", "signs"): partial(ours, labels="signs"),
    ("Everlearn", "exact"): partial(ours, labels="exact"),
    ("Everlearn", "MAS"): ours_mas,
    ("Everlearn", "Kronecker"): partial(ours, labels="sample", structure="kronecker"),
}


def measure(name, rounds):
    """Print a table for one model."""
    make, shape, examples, size = MODELS[name]
    torch.manual_seed(0)
    model, x, y = make().eval(), torch.randn(examples, *shape), torch.randint(10, (examples,))
    contenders = {**CONTENDERS, **backpack_contenders(), **nngeometry_contenders()}
    times, memory, values, refused = {k: [] for k in contenders}, {}, {}, {}
    for turn in range(rounds + 1):
        for key, contender in contenders.items():
            slow = turn > 1 and min(times[key], default=0) > 10 * min(times["plain", "limit"])
            if key in refused or slow:  # one round tells enough of what is ten times as slow
                continue
            part = max(64, examples // 16) if key[0] == "loop" else examples
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            before, start = reset_peak_memory(CPU), time.perf_counter()
            try:
                found = contender(model, x[:part], y[:part], size)
            except Exception as error:  # noqa: BLE001 - a peer may refuse a model in many ways
                refused[key] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:60]}"
                continue
            if turn:  # the first turn warms up
                times[key].append((time.perf_counter() - start) * examples / part)
            memory[key] = peak_memory(CPU) - before
            if turn == 0 and found is not None and key[0] != "loop":
                values[key] = found
    limit = min(times["plain", "limit"])
    print(f"\n{name}: {examples:,} examples, {size} per pass; plain pass {limit * 1e3:.0f} ms")
    print(f"  {'':10} {'quantity':10} {'× plain':>8} {'MB':>8}  error against Everlearn")
    for key in contenders:
        if key in refused:
            print(f"  {key[0]:10} {key[1]:10} refuses: {refused[key]}")
            continue
        held = memory[key] / 2**20
        print(f"  {key[0]:10} {key[1]:10} {min(times[key]) / limit:>8.2f} {held:>8.0f}  {compared(key, values)}")


def compared(key, values):
    """Largest relative difference from our value of the same quantity, where it is not random."""
    own = values.get(("Everlearn", key[1]))
    if key[0] == "Everlearn" or own is None or key not in values or key[1] == "sampled":
        return ""
    worst = max(float((values[key][n] - v).abs().max() / v.abs().max()) for n, v in own.items() if v.abs().max() > 0)
    return f"{worst:.0e}"


def make_bert(num_outputs, hidden):
    """Build a BERT with four layers for classification, with random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=4000, hidden_size=hidden, num_hidden_layers=4, num_attention_heads=hidden // 32,
        intermediate_size=4 * hidden, max_position_embeddings=128, num_labels=num_outputs,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def train_epoch(model, optimizer, x, y):
    """Train for an epoch in batches of 32."""
    model.train()
    for inputs, labels in zip(x.split(32), y.split(32), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(input_ids=inputs).logits, labels).backward()
        optimizer.step()


def process_seconds(function):
    """Return the process time of a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def measure_consolidation(num_outputs, rounds, hidden, tokens, examples):
    """Print the costs of one number of outputs, in turns in one process."""
    model = make_bert(num_outputs, hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    x = torch.randint(1, 4000, (examples, tokens))
    y = torch.randint(num_outputs, (examples,))
    few = 32
    calls = {
        "epoch": lambda: train_epoch(model, optimizer, x, y),
        "signs": lambda: fisher(model, ({"input_ids": x}, y), "signs"),
    }
    seconds = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            elapsed = process_seconds(call)
            if turn:  # the first turn warms up
                seconds[name].append(elapsed)

    # The probe is the same for any number of examples, and little of so many backward passes.
    exact = process_seconds(lambda: fisher(model, ({"input_ids": x[:few]}, y[:few]), "exact")) * examples / few
    epoch = statistics.median(seconds["epoch"])
    signs = statistics.median(seconds["signs"])
    batch = Batch({"input_ids": x[:2]})
    outputs = torch.zeros(2, num_outputs)
    estimates = [estimate_epochs(count_backward_passes(labels, batch, outputs)) for labels in ("signs", "exact")]
    print(
        f"{num_outputs:>8} {epoch:>9.2f} s {signs / epoch:>7.2f} {estimates[0]:>9.1f} {exact / epoch:>9.1f} "
        f"{estimates[1]:>9.1f}",
        flush=True,
    )


def main():
    """Measure the models asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--outputs", type=int, nargs="*", default=[10, 30, 150])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--examples", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.models == ["bert"]:
        print(f"BERT, {arguments.hidden} hidden, {arguments.tokens} tokens, {arguments.examples} examples, in epochs")
        print(f"{'outputs':>8} {'epoch':>11} {'signs':>7} {'estimate':>9} {'exact':>9} {'estimate':>9}")
        for num_outputs in arguments.outputs:
            measure_consolidation(num_outputs, arguments.rounds, arguments.hidden, arguments.tokens, arguments.examples)
        return
    warnings.simplefilter("ignore")  # the peers' own
    for name in arguments.models:
        measure(name, arguments.rounds)


if __name__ == "__main__":
    main()
