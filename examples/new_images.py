"""Teach a trained image classifier new classes, one at a time, without gradient steps and without old images."""

import copy
import time

import torch

import everlearn
from everlearn import Method, RanPAC, nets, streams

(x, y), (x_test, y_test) = streams.digits_data()  # 8 × 8 pixels, in the package


def images_of(first, last):
    part = (first <= y) & (y <= last)
    return x[part], y[part]


def show(name, model, last_digit, start):
    """Print the accuracy on the old digits and on the new ones so far, and the seconds since the start."""
    seconds = time.perf_counter() - start
    is_right = 100.0 * (model.eval()(x_test).argmax(1) == y_test)
    old = is_right[y_test <= 4].mean()
    new = is_right[(y_test >= 5) & (y_test <= last_digit)].mean()
    print(f"{name:<28}{old:10.1f}{new:12.1f}{seconds:10.2f}")


torch.manual_seed(0)
model = nets.cnn((1, 8, 8), 10, channels=(32, 64))
print(f"{'accuracy in %':<28}{'old: 0-4':>10}{'new: from 5':>12}{'seconds':>10}")
start = time.perf_counter()
everlearn.train(model, Method(), images_of(0, 4), epochs=10)
show("trained on 0-4", model, 9, start)

tuned = copy.deepcopy(model)
start = time.perf_counter()
everlearn.train(tuned, Method(), images_of(5, 9), epochs=10)
show("then fine-tuned on 5-9", tuned, 9, start)

method = RanPAC(dimension=1000)
method.end_task(model, images_of(0, 4))  # once: afterwards, images of the old digits are not needed
for digit in range(5, 10):
    start = time.perf_counter()
    method.end_task(model, images_of(digit, digit))
    show(f"or with RanPAC, adding {digit}", model, digit, start)
