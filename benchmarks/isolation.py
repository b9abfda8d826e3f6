"""PackNet, HAT and PNN side by side: what each task costs in memory and time, and what is kept.

    python benchmarks/isolation.py [--stream split-mnist] [--data FOLDER]

Each learns the stream's tasks, task-incremental, with one network (784-400-400-10 on MNIST). Then for every task:
bytes that it has added to model and method, time of ``predict`` for a batch of 128 as a multiple of a forward pass of
the plain network, the same for its export, and parameters of the export as a share of the network. Times are the
smallest of many, taken in turns.
"""

import argparse
import time

import torch

from everlearn import HAT, PNN, PackNet, evaluate, nets, streams, train
from everlearn.trainer.cost import state_bytes

METHODS = {"PackNet": PackNet, "HAT": HAT, "PNN": PNN}


def held(model, method):
    """Bytes of the model and of all that the method keeps."""
    return sum(v.numel() * v.element_size() for v in model.state_dict().values()) + state_bytes(method.state_dict())


def fastest(calls, rounds=60):
    """The smallest time of each, in turns."""
    best = dict.fromkeys(calls, float("inf"))
    with torch.no_grad():
        for _ in range(rounds):
            for name, call in calls.items():
                call()  # a second batch of one task is answered without choosing its weights anew
                start = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure(method, stream, steps):
    """Learn the stream; a row of facts per task."""
    torch.manual_seed(0)
    model = nets.mlp(stream.inputs, stream.outputs)
    sizes, after = [held(model, method)], []
    for task in stream:
        train(model, method, task, iterations=steps, batch_size=128)
        after.append(evaluate(model, method, stream.test_tasks))
        sizes.append(held(model, method))
    x = next(stream[0].examples(128, "test")).x
    plain = nets.mlp(stream.inputs, stream.outputs).eval()
    model.eval()
    calls, shares = {"plain": lambda: plain(x)}, []
    for task in stream:
        number, alone = torch.full((len(x),), task.id), method.export(model, task.id)
        shares.append(sum(p.numel() for p in alone.parameters()) / sum(p.numel() for p in plain.parameters()))
        calls["predict", task.id] = lambda number=number: method.predict(model, x, number)
        calls["export", task.id] = lambda alone=alone: alone(x)
    best = fastest(calls)
    forgot = [after[i][i] - after[-1][i] for i in range(len(stream))]
    print(
        f"\n{type(method).__name__}: accuracy {sum(after[-1]) / len(stream):.4f}, "
        f"forgetting {max(forgot):.6f}, {method.diagnostics()}"
    )
    print(f"{'task':>6} {'KB added':>10} {'predict':>8} {'export':>8} {'export parameters':>18}")
    for k, task in enumerate(stream):
        times = [best[kind, task.id] / best["plain"] for kind in ("predict", "export")]
        print(f"{k:>6} {(sizes[k + 1] - sizes[k]) / 1024:>10.0f} {times[0]:>8.2f} {times[1]:>8.2f} {shares[k]:>18.3f}")


def main():
    """Print a table per method."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stream", default="digits")
    parser.add_argument("--data", default=None)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    given = {} if args.data is None else {"root": args.data}
    stream = streams.STREAMS[args.stream](scenario="task", **given)
    for make in METHODS.values():
        measure(make(), stream, args.steps)


if __name__ == "__main__":
    main()
