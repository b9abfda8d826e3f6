"""A small causal language model learns banking questions, then travel questions: perplexity on both.

python examples/perplexity.py [EPOCHS] [SENTENCES]   with EVERLEARN_DATA naming the folder that has clinc150.
"""

import sys
from collections import Counter
from itertools import chain

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from everlearn import ER, EWC, Method, Task, sources, train
from everlearn.integrations.huggingface import Outputs

LENGTH, END, RARE, IGNORED = 16, 0, 1, -100
epochs, most = (int(word) for word in [*sys.argv[1:], *["5", "1500"][len(sys.argv) - 1 :]])
(texts, y), (texts_test, y_test) = data = sources.load("clinc150")
words = Counter(chain.from_iterable(t.split() for t in texts))
number = {w: i + 2 for i, w in enumerate(w for w, n in words.items() if n > 2)}


def sentences(texts, labels, domain):
    """Rows of words, and for each the word that follows; what follows the end does not count."""
    chosen = [t for t, label in zip(texts, labels.tolist(), strict=True) if label in data.groups[domain]][:most]
    rows = torch.full((len(chosen), LENGTH + 1), END)
    for row, text in zip(rows, chosen, strict=True):
        ids = [number.get(w, RARE) for w in text.split()[:LENGTH]]
        row[1 : len(ids) + 1] = torch.tensor(ids)
    follows = rows[:, 1:].clone()
    follows[:, 1:][(rows[:, 1:-1] == END)] = IGNORED
    return rows[:, :-1].clone(), follows


def perplexity(model, task):
    """e to the mean loss per word."""
    with torch.no_grad():
        losses = [(batch.loss(model.eval()(batch.x)), batch.weight) for batch in task.examples(256, "test")]
    return torch.tensor([loss * n for loss, n in losses]).sum().div(sum(n for _, n in losses)).exp().item()


tasks = [
    Task(sentences(texts, y, domain), sentences(texts_test, y_test, domain), id=i, name=domain)
    for i, domain in enumerate(["banking", "travel"])
]
print("perplexity of     banking, learned   banking, at the end   travel")
for method in (Method(), EWC(1000.0, labels="true"), ER(150)):
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=len(number) + 2, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2,
                       bos_token_id=END, eos_token_id=END)  # fmt: skip
    model = Outputs(GPT2LMHeadModel(shape))
    train(model, method, tasks[0], epochs=epochs, batch_size=32)
    before = perplexity(model, tasks[0])
    train(model, method, tasks[1], epochs=epochs, batch_size=32)
    print(
        f"{type(method).__name__:16} {before:17.1f} "
        f"{perplexity(model, tasks[0]):21.1f} {perplexity(model, tasks[1]):8.1f}"
    )
