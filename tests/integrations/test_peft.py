"""Methods on an adapter: what is frozen is left alone, and the state lies beside the adapter."""

import pytest
import torch

from everlearn import ER, EWC, MAS, SI, LwF

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # their own
METHODS = {
    "ewc": lambda: EWC(100.0),
    "mas": lambda: MAS(1.0),
    "si": lambda: SI(20.0),
    "lwf": lambda: LwF(2.0),
    "er": lambda: ER(30),
}


def adapted():
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=2
    )
    model = transformers.BertForSequenceClassification(config)
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    return peft.get_peft_model(model, lora)


@pytest.fixture
def tasks():
    torch.manual_seed(0)
    made = []
    for k in range(2):
        ids, y = torch.randint(5, 50, (32, 6)), torch.randint(2, (32,))
        ids[:, 0] = 1 + k + y
        rows = zip(ids, y.tolist(), strict=True)
        made.append([{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": label} for i, label in rows])
    return made


def learn(method, model, task, folder):
    from everlearn.integrations.huggingface import Continual

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=1, per_device_train_batch_size=8, learning_rate=1e-2, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=task, callbacks=[Continual(method)]).train()


@pytest.mark.parametrize(
    "name", ["ewc", "er", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mas", "si", "lwf"))]
)
def test_only_the_adapter_learns_and_is_held_and_its_state_is_found_beside_it(name, tasks, tmp_path):
    from everlearn.integrations.huggingface import load, save

    model, method = adapted(), METHODS[name]()
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    loose = adapted()
    for task in tasks:
        learn(method, model, task, tmp_path)
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    if hasattr(method, "quadratic"):
        assert method.quadratic.anchor and all("lora" in n or "classifier" in n for n in method.quadratic.anchor)
    model.save_pretrained(tmp_path / "adapter")
    save(method, tmp_path / "adapter")
    again = METHODS[name]()
    load(again, tmp_path / "adapter")
    assert same(again.state_dict(), method.state_dict())
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir() if "everlearn" in p.name) == ["everlearn.pt"]
    for task in tasks:
        learn(EWC(0.0), loose, task, tmp_path)
    trained = [torch.cat([p.detach().flatten() for p in m.parameters() if p.requires_grad]) for m in (model, loose)]
    assert not torch.equal(*trained), "the method has made a difference"


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b
