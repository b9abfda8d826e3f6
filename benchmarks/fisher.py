"""Measure time and memory of the Fisher information and of MAS, relative to one forward and backward pass.

    python benchmarks/fisher.py [mlp cnn resnet transformer] [--rounds 5]
    python benchmarks/fisher.py bert [--outputs 10 30 150] [--rounds 5]

The second command measures the cost of a consolidation: an epoch of training (forward, backward and AdamW step, batches
of 32), ``labels="signs"`` and ``labels="exact"`` of a Hugging Face BERT with four layers, side by side, in process
time. Exact is measured once on 32 examples and scaled up.

Candidates of the first are Everlearn, a loop over single examples, ``torch.func.vmap(grad)`` and, if installed,
BackPACK and nngeometry. These two require torchvision, whose wheel does not import with a CPU build of torch.
Install them in a separate environment:

    python -m venv bench && bench/bin/pip install -c constraints.txt . packaging einops
    bench/bin/pip install --no-deps backpack-for-pytorch unfoldNd nngeometry

All candidates alternate in one process on one thread; ratios are those of minimum times. The number of examples per
pass is chosen by Everlearn, 32 for vmap (a larger block would not fit the memory of plain training), and as printed
for plain training and the other libraries. The loop gets fewer examples and is scaled up. If another library computes
the same quantity, its values are compared with ours. Peak memory is relative to that before the call, in MB; unused
memory is returned to the system before each measurement.
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
# Model, shape of an input, number of examples, examples per pass.
MODELS = {
    "mlp": (lambda: nets.mlp(784, 10), (784,), 8192, 256),
    "cnn": (lambda: nets.cnn((1, 28, 28), 10, norm=False), (1, 28, 28), 1024, 128),
    "resnet": (lambda: nets.resnet((3, 32, 32), 10), (3, 32, 32), 512, 64),
    "transformer": (lambda: nets.transformer((32, 64), 10), (32, 64), 1024, 128),
}


def plain(model, x, y, size):
    """Run one forward and backward pass, the lower limit."""
    for a, b in zip(x.split(size), y.split(size), strict=True):
        model.zero_grad()
        F.cross_entropy(model(a), b).backward()


def loop(model, x, y, size):
    """Compute the empirical diagonal, one example at a time."""
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for i in range(len(x)):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for n, p in model.named_parameters():
            total[n].addcmul_(p.grad, p.grad)
    return {n: v / len(x) for n, v in total.items()}


def vmap_gradients(model, x, y, size):
    """Compute the empirical diagonal with vmap(grad)."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    total = {n: torch.zeros_like(p) for n, p in parameters.items()}

    def loss(p, a, b):
        return F.cross_entropy(functional_call(model, p, (a[None],)), b[None])

    # A larger block would not fit the memory of plain training.
    for a, b in zip(x.split(32), y.split(32), strict=True):
        for n, g in vmap(grad(loss), (None, 0, 0))(parameters, a, b).items():
            total[n] += g.square().sum(0)
    return {n: v / len(x) for n, v in total.items()}


def everlearn_fisher(model, x, y, size, labels, structure="diagonal"):
    """Compute the Fisher information with Everlearn."""
    return fisher(model, (x, y), labels, structure).diagonal()


def everlearn_mas(model, x, y, size):
    """Compute the sensitivity with Everlearn."""
    return sensitivity(model, x).values


def backpack_candidates():
    """Return the empirical, sampled and exact diagonals of BackPACK, and its per-example gradients for MAS."""
    try:
        from backpack import backpack, extend
        from backpack.extensions import BatchGrad, DiagGGNExact, DiagGGNMC, SumGradSquared
    except ImportError:
        return {}

    def run(model, x, y, size, extension, field, scale, outputs=False):
        model = extend(copy.deepcopy(model))  # a copy, because its hooks would slow down the other candidates
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


def nngeometry_candidates():
    """Return the exact and sampled diagonals and Kronecker factors of nngeometry."""
    try:
        from nngeometry.metrics import FIM, FIM_MonteCarlo
        from nngeometry.object import PMatDiag, PMatKFAC
    except ImportError:
        return {}

    def run(model, x, y, size, make, representation, **settings):
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=size)
        model = copy.deepcopy(model)  # a copy, because hooks remain on it after an error
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


CANDIDATES = {
    ("plain", "limit"): plain,
    ("loop", "empirical"): loop,
    ("vmap", "empirical"): vmap_gradients,
    ("Everlearn", "empirical"): partial(everlearn_fisher, labels="true"),
    ("Everlearn", "sampled"): partial(everlearn_fisher, labels="sample"),
    ("Everlearn", "signs"): partial(everlearn_fisher, labels="signs"),
    ("Everlearn", "exact"): partial(everlearn_fisher, labels="exact"),
    ("Everlearn", "MAS"): everlearn_mas,
    ("Everlearn", "Kronecker"): partial(everlearn_fisher, labels="sample", structure="kronecker"),
}


def measure(name, rounds):
    """Print a table for one model."""
    make_model, shape, num_examples, size = MODELS[name]
    torch.manual_seed(0)
    model = make_model().eval()
    x = torch.randn(num_examples, *shape)
    y = torch.randint(10, (num_examples,))
    candidates = {**CANDIDATES, **backpack_candidates(), **nngeometry_candidates()}

    times = {key: [] for key in candidates}
    memory = {}
    values = {}
    errors = {}
    # The first round warms up.
    for round_number in range(rounds + 1):
        for key, candidate in candidates.items():
            library, _ = key
            # One round is enough for candidates that are ten times as slow.
            is_slow = round_number > 1 and min(times[key], default=0) > 10 * min(times["plain", "limit"])
            if key in errors or is_slow:
                continue

            part = max(64, num_examples // 16) if library == "loop" else num_examples
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            memory_before = reset_peak_memory(CPU)
            start = time.perf_counter()
            try:
                value = candidate(model, x[:part], y[:part], size)
            except Exception as error:  # noqa: BLE001 - a library may refuse a model in many ways
                errors[key] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:60]}"
                continue

            if round_number:
                times[key].append((time.perf_counter() - start) * num_examples / part)
            memory[key] = peak_memory(CPU) - memory_before
            if round_number == 0 and value is not None and library != "loop":
                values[key] = value

    limit = min(times["plain", "limit"])
    print(f"\n{name}: {num_examples:,} examples, {size} per pass; plain pass {limit * 1e3:.0f} ms")
    print(f"  {'':10} {'quantity':10} {'× plain':>8} {'MB':>8}  error against Everlearn")
    for key in candidates:
        library, quantity = key
        if key in errors:
            print(f"  {library:10} {quantity:10} refuses: {errors[key]}")
            continue
        ratio = min(times[key]) / limit
        megabytes = memory[key] / 2**20
        print(f"  {library:10} {quantity:10} {ratio:>8.2f} {megabytes:>8.0f}  {format_error(key, values)}")


def format_error(key, values):
    """Format the largest relative difference from our value of the same quantity, unless it is random."""
    library, quantity = key
    expected = values.get(("Everlearn", quantity))
    if library == "Everlearn" or expected is None or key not in values or quantity == "sampled":
        return ""
    relative_errors = []
    for name, v in expected.items():
        largest = v.abs().max()
        if largest > 0:
            relative_errors.append(float((values[key][name] - v).abs().max() / largest))
    return f"{max(relative_errors):.0e}"


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
    """Measure the selected models."""
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
    warnings.simplefilter("ignore")  # of the other libraries
    for name in arguments.models:
        measure(name, arguments.rounds)


if __name__ == "__main__":
    main()
