"""Train a small causal language model on banking questions, then on travel questions: perplexity on both.

python examples/perplexity.py [EPOCHS] [SENTENCES]   (EVERLEARN_DATA: the folder with clinc150)
"""

import sys
from collections import Counter
from itertools import chain

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from everlearn import ER, EWC, Method, Task, sources, train
from everlearn.integrations.huggingface import Outputs

LENGTH, END, RARE, IGNORED = 16, 0, 1, -100
epochs, max_sentences = (int(argument) for argument in [*sys.argv[1:], *["5", "1500"][len(sys.argv) - 1 :]])
(texts, y), (texts_test, y_test) = data = sources.load("clinc150")
counts = Counter(chain.from_iterable(text.split() for text in texts))
vocabulary = {word: i + 2 for i, word in enumerate(word for word, count in counts.items() if count > 2)}


def tokenize(texts, labels, domain):
    """Return rows of tokens and the token after each; tokens after the end of a sentence are ignored."""
    intents = data.groups[domain]
    selected = [text for text, label in zip(texts, labels.tolist(), strict=True) if label in intents][:max_sentences]
    rows = torch.full((len(selected), LENGTH + 1), END)
    for row, text in zip(rows, selected, strict=True):
        tokens = [vocabulary.get(word, RARE) for word in text.split()[:LENGTH]]
        row[1 : len(tokens) + 1] = torch.tensor(tokens)
    next_tokens = rows[:, 1:].clone()
    next_tokens[:, 1:][(rows[:, 1:-1] == END)] = IGNORED
    return rows[:, :-1].clone(), next_tokens


def perplexity(model, task):
    """Return the exponential of the mean loss per word."""
    with torch.no_grad():
        losses = [(batch.loss(model.eval()(batch.x)), batch.weight) for batch in task.examples(256, "test")]
    return torch.tensor([loss * n for loss, n in losses]).sum().div(sum(n for _, n in losses)).exp().item()


tasks = [
    Task(tokenize(texts, y, domain), tokenize(texts_test, y_test, domain), id=i, name=domain)
    for i, domain in enumerate(["banking", "travel"])
]
sizes = {"vocab_size": len(vocabulary) + 2, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
print("perplexity of     banking, learned   banking, at the end   travel")
for method in (Method(), EWC(1000.0, labels="true"), ER(150)):
    torch.manual_seed(0)
    model = Outputs(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=END, eos_token_id=END)))
    train(model, method, tasks[0], epochs=epochs, batch_size=32)
    learned = perplexity(model, tasks[0])
    train(model, method, tasks[1], epochs=epochs, batch_size=32)
    final, travel = (perplexity(model, task) for task in tasks)
    print(f"{type(method).__name__:16} {learned:17.1f} {final:21.1f} {travel:8.1f}")
