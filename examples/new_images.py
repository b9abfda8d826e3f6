"""Teach a trained image classifier new classes, one at a time, without gradient steps and without old images."""

import copy
from time import perf_counter

import torch

from everlearn import Method, RanPAC, nets, streams, train
from everlearn.surgery.heads import grow_output

(x, y), (x_test, y_test) = streams.digits_data()  # 8 × 8 pixels, in the package


def images_of(first, last):
    return x[(first <= y) & (y <= last)], y[(first <= y) & (y <= last)]


def show(name, model, last_digit, seconds):
    """Print the accuracy on the old digits, and on the new ones up to the last one that was learned."""
    is_right = 100.0 * (model.eval()(x_test).argmax(1) == y_test)
    new = is_right[(y_test >= 5) & (y_test <= last_digit)].mean()
    print(f"{name:<28}{is_right[y_test <= 4].mean():10.1f}{new:12.1f}{seconds:10.2f}")


torch.manual_seed(0)
model = nets.cnn((1, 8, 8), 5, channels=(32, 64))
seconds = train(model, Method(), images_of(0, 4), epochs=10).seconds["train"]
print(f"{'accuracy in %':<28}{'old: 0-4':>10}{'new: from 5':>12}{'seconds':>10}")
show("trained on 0-4", model, 9, seconds)
tuned = copy.deepcopy(model)
grow_output(tuned, 10)
seconds = train(tuned, Method(), images_of(5, 9), epochs=10).seconds["train"]
show("then fine-tuned on 5-9", tuned, 9, seconds)

method = RanPAC(dimension=1000)
method.end_task(model, images_of(0, 4))  # once: afterwards, the old images are not needed
for digit in range(5, 10):
    start = perf_counter()
    method.end_task(model, images_of(digit, digit))
    show(f"or with RanPAC, adding {digit}", model, digit, perf_counter() - start)
