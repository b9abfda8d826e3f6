"""Methods on an adapter: frozen parameters are not changed, and the state is saved with the adapter."""

import pytest
import torch

from everlearn import ER, EWC, MAS, SI, LwF

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # warnings of transformers and peft
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
    all_tasks = []
    for k in range(2):
        ids = torch.randint(5, 50, (32, 6))
        y = torch.randint(2, (32,))
        ids[:, 0] = 1 + k + y
        rows = zip(ids, y.tolist(), strict=True)
        all_tasks.append([{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": label} for i, label in rows])
    return all_tasks


def learn(method, model, task, folder):
    from everlearn.integrations.huggingface import Continual

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    transformers.Trainer(model, arguments, train_dataset=task, callbacks=[Continual(method)]).train()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ewc", "er", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mas", "si", "lwf"))]
)
def test_only_the_adapter_is_trained_and_the_state_is_saved_with_it(name, tasks, tmp_path):
    from everlearn.integrations.huggingface import load, save

    model = adapted()
    method = METHODS[name]()
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    baseline = adapted()
    for task in tasks:
        learn(method, model, task, tmp_path)
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    if hasattr(method, "quadratic"):
        assert method.quadratic.anchor and all("lora" in n or "classifier" in n for n in method.quadratic.anchor)
    model.save_pretrained(tmp_path / "adapter")
    save(method, tmp_path / "adapter")
    loaded = METHODS[name]()
    load(loaded, tmp_path / "adapter")
    assert are_equal(loaded.state_dict(), method.state_dict())
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir() if "everlearn" in p.name) == ["everlearn.pt"]
    for task in tasks:
        learn(EWC(0.0), baseline, task, tmp_path)
    trained = [torch.cat([p.detach().flatten() for p in m.parameters() if p.requires_grad]) for m in (model, baseline)]
    assert not torch.equal(*trained), "the method changes the result"


def are_equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(are_equal(a[k], b[k]) for k in a)
    return a == b
