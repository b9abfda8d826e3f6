"""Compare PackNet, HAT and PNN: memory and time per task, accuracy and forgetting.

    python benchmarks/isolation.py [--stream split-mnist] [--data FOLDER]

Each method learns the tasks of a stream, task-incremental, with one network (784-400-400-10 on MNIST). For every task
the table shows the bytes it added to model and method, the time of ``predict`` for a batch of 128 relative to a
forward pass of the plain network, the same for the exported network, and the parameters of the exported network
relative to the plain one. Times are the minimum of many alternating measurements.
"""

import argparse
import time

import torch

from everlearn import HAT, PNN, PackNet, evaluate, nets, streams, train
from everlearn.trainer.cost import state_bytes

METHODS = {"PackNet": PackNet, "HAT": HAT, "PNN": PNN}


def total_bytes(model, method):
    """Return the bytes of the model and of the state of the method."""
    model_bytes = sum(v.numel() * v.element_size() for v in model.state_dict().values())
    return model_bytes + state_bytes(method.state_dict())


def count_parameters(model):
    """Return the number of parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def minimum_times(calls, rounds=60):
    """Return the minimum time of each call, measured in alternation."""
    best = dict.fromkeys(calls, float("inf"))
    with torch.no_grad():
        for _ in range(rounds):
            for name, call in calls.items():
                # A second batch of the same task reuses the weights that the first one selected.
                call()
                start = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure(method, stream, steps):
    """Train on the stream, and print a row per task."""
    torch.manual_seed(0)
    model = nets.mlp(stream.inputs, stream.outputs)
    sizes = [total_bytes(model, method)]
    accuracies = []
    for task in stream:
        train(model, method, task, iterations=steps, batch_size=128)
        accuracies.append(evaluate(model, method, stream.test_tasks))
        sizes.append(total_bytes(model, method))

    x = next(stream[0].examples(128, "test")).x
    plain = nets.mlp(stream.inputs, stream.outputs).eval()
    model.eval()
    calls = {"plain": lambda: plain(x)}
    shares = []
    for task in stream:
        task_ids = torch.full((len(x),), task.id)
        exported = method.export(model, task.id)
        shares.append(count_parameters(exported) / count_parameters(plain))
        calls["predict", task.id] = lambda task_ids=task_ids: method.predict(model, x, task_ids)
        calls["export", task.id] = lambda exported=exported: exported(x)
    times = minimum_times(calls)

    forgetting = max(accuracies[i][i] - accuracies[-1][i] for i in range(len(stream)))
    print(
        f"\n{type(method).__name__}: accuracy {sum(accuracies[-1]) / len(stream):.4f}, "
        f"forgetting {forgetting:.6f}, {method.diagnostics()}"
    )
    print(f"{'task':>6} {'KB added':>10} {'predict':>8} {'export':>8} {'export parameters':>18}")
    for k, task in enumerate(stream):
        added = (sizes[k + 1] - sizes[k]) / 1024
        predict = times["predict", task.id] / times["plain"]
        export = times["export", task.id] / times["plain"]
        print(f"{k:>6} {added:>10.0f} {predict:>8.2f} {export:>8.2f} {shares[k]:>18.3f}")


def main():
    """Print a table per method."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stream", default="digits")
    parser.add_argument("--data", default=None)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    source = {} if args.data is None else {"root": args.data}
    stream = streams.STREAMS[args.stream](scenario="task", **source)
    for method_class in METHODS.values():
        measure(method_class(), stream, args.steps)


if __name__ == "__main__":
    main()
