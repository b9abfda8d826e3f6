"""Measure time and memory of heads on frozen features, beside scikit-learn on the same features.

    python benchmarks/heads.py [--dimensions 1000 2000 5000 10000 20000] [--sentences 1000]

The features are drawn at random: 150 classes of 100 examples and 384 features, as MiniLM's of CLINC150, since times do
not depend on their values. Three numbers for each head: seconds to learn all examples in one pass, seconds to add a
151st class of 100 examples to a head of 150 classes, and the bytes of its state. scikit-learn fits the pooled data from
scratch, which is what it can do when a class is added. The features themselves are timed separately, by MiniLM on
sentences of 12 tokens, if its package is installed.

Seconds are process time on one thread; memory is the peak during learning, relative to that before.
"""

import argparse
import gc
import time

import torch
from torch import nn

from everlearn import KLDA, FeCAM, NearestMean, RanPAC, StreamingLDA
from everlearn.streams.pretrained import encode_sentences
from everlearn.trainer.cost import peak_memory, reset_peak_memory, state_bytes

NUM_CLASSES = 150
NUM_FEATURES = 384
NUM_PER_CLASS = 100
CPU = torch.device("cpu")


def make_examples(classes, seed):
    """Draw examples of some classes."""
    random = torch.Generator().manual_seed(seed)
    y = torch.as_tensor(classes).repeat_interleave(NUM_PER_CLASS)
    centers = torch.randn(NUM_CLASSES + 1, NUM_FEATURES, generator=torch.Generator().manual_seed(0))
    x = centers[y] + torch.randn(len(y), NUM_FEATURES, generator=random)
    return x, y


def measure(function):
    """Return the process time of a call in seconds, and its peak memory in MB."""
    gc.collect()
    initial_memory = reset_peak_memory(CPU)
    start = time.process_time()
    function()
    seconds = time.process_time() - start
    return seconds, (peak_memory(CPU) - initial_memory) / 1e6


def measure_head(method):
    """Return the seconds to learn, the seconds to add a class, the size of the state and the peak, in MB."""
    model = nn.Sequential(nn.Identity(), nn.Linear(NUM_FEATURES, NUM_CLASSES))
    pooled = make_examples(range(NUM_CLASSES), seed=1)
    learn_seconds, peak = measure(lambda: method.end_task(model, pooled))
    new_class = make_examples([NUM_CLASSES], seed=2)
    add_seconds, _ = measure(lambda: method.end_task(model, new_class))
    return learn_seconds, add_seconds, state_bytes(method.state_dict()) / 1e6, peak


def measure_sklearn(estimator, transform=lambda x: x):
    """Return the seconds to fit the pooled data, once more with a further class, and the peak in MB."""
    seconds = []
    for num_classes in (NUM_CLASSES, NUM_CLASSES + 1):
        x, y = make_examples(range(num_classes), seed=1)
        elapsed, peak = measure(lambda x=x, y=y: estimator.fit(transform(x.double()).numpy(), y.numpy()))
        seconds.append(elapsed)
    return seconds[0], seconds[1], float("nan"), peak


def print_row(name, learn_seconds, add_seconds, state, peak):
    """Print a row of the table."""
    print(f"{name:<34}{learn_seconds:>10.2f}{add_seconds:>14.2f}{state:>12.1f}{peak:>12.0f}", flush=True)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dimensions", type=int, nargs="+", default=[1000, 2000, 5000, 10000, 20000])
    parser.add_argument("--sentences", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)

    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.linear_model import RidgeClassifier

    print(f"{'':<34}{'learn, s':>10}{'add class, s':>14}{'state, MB':>12}{'peak, MB':>12}")
    measure_head(NearestMean())  # warm-up
    for method in (NearestMean(), StreamingLDA(), FeCAM()):
        print_row(type(method).__name__, *measure_head(method))
    print_row("scikit-learn LDA (lsqr)", *measure_sklearn(LinearDiscriminantAnalysis(solver="lsqr", shrinkage=1e-4)))
    for dimension in options.dimensions:
        print_row(f"KLDA({dimension})", *measure_head(KLDA(dimension)))
        print_row(f"RanPAC({dimension})", *measure_head(RanPAC(dimension)))
        recursive = RanPAC(dimension, ridge=100.0, recursive=True)
        print_row(f"RanPAC({dimension}, recursive)", *measure_head(recursive))
        projection = torch.randn(NUM_FEATURES, dimension, generator=torch.Generator().manual_seed(0)).double()
        ridge = RidgeClassifier(alpha=100.0, fit_intercept=False, solver="cholesky")
        project = lambda x, projection=projection: (x @ projection).relu()
        print_row(f"scikit-learn ridge, {dimension} features", *measure_sklearn(ridge, project))

    try:
        sentences = [f"please transfer {i} dollars from my checking to savings" for i in range(options.sentences)]
        seconds, peak = measure(lambda: encode_sentences(sentences))
        print(f"features: {1000 * seconds / options.sentences:.2f} s for 1,000 sentences by MiniLM, peak {peak:.0f} MB")
    except ImportError as error:
        print(f"features: not measured. {error}")


if __name__ == "__main__":
    main()
