"""The same batches through Hugging Face's Trainer and through our own loop give equal weights."""

import pytest
import torch

from everlearn import DER, ER, EWC, HAT, MAS, SI, Batch, DERpp, LwF, Method, PackNet
from everlearn.stream import as_task

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # their own
METHODS = {
    "finetune": Method,
    "ewc": lambda: EWC(50.0),
    "mas": lambda: MAS(0.5),
    "si": lambda: SI(20.0),
    "lwf": lambda: LwF(2.0),
    "er": lambda: ER(30),
    "der": lambda: DER(30),
    "packnet": lambda: PackNet(output="model.classifier"),
    "chain": lambda: EWC(50.0) + ER(30),
}


def tiny():
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()  # Adam makes much of rounding


@pytest.fixture
def tasks():
    torch.manual_seed(0)
    made = []
    for k in range(2):
        ids, y = torch.randint(5, 50, (32, 6)), torch.randint(2, (32,))
        ids[:, 0] = 1 + k + y
        made.append(
            [
                {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": int(label)}
                for i, label in zip(ids, y, strict=True)
            ]
        )
    return made


def arguments(folder, **settings):
    return transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=1e9,
        use_cpu=True, report_to=[], disable_tqdm=True, optim="adamw_torch", weight_decay=0.0, dataloader_pin_memory=False,
        **{"per_device_train_batch_size": 8, "save_strategy": "no", **settings},
    )  # fmt: skip


class InOrder(transformers.Trainer):
    """Batches as they lie, so that two loops see the same; micro-batches averaged, which BERT's own loss leaves to the Trainer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def theirs(method, tasks, model, folder, **settings):
    from everlearn.integrations.huggingface import Continual

    for task in tasks:
        InOrder(model, arguments(folder, **settings), train_dataset=task, callbacks=[Continual(method)]).train()
    return weights(model)


def batches(task):
    return [transformers.default_data_collator(task[i : i + 8]) for i in range(0, len(task), 8)]


def pairs(task):
    """What the loss compares: of a causal model each place with the next word."""
    made = []
    for batch in batches(task):
        y = batch.pop("labels")
        made.append((batch, y if y.dim() == 1 else torch.nn.functional.pad(y[:, 1:], (0, 1), value=-100)))
    return made


def ours(method, tasks, model):
    from everlearn.integrations.huggingface import Outputs

    wrapped = Outputs(model)
    for task in tasks:
        planned = as_task(pairs(task))
        planned.steps = 2 * len(batches(task))
        method.begin_task(wrapped, planned)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        model.train()
        for epoch in range(2):
            for batch, y in pairs(task):
                loss = method.loss(wrapped, Batch(batch, y, epoch=epoch))
                optimizer.zero_grad()
                loss.backward()
                method.before_step(wrapped)
                optimizer.step()
                method.after_step(wrapped)
        method.end_task(wrapped, planned)
    return weights(model)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", METHODS)
def test_the_trainer_and_our_loop_end_alike(name, tasks, tmp_path):
    got = theirs(METHODS[name](), tasks, tiny(), tmp_path)
    torch.testing.assert_close(got, ours(METHODS[name](), tasks, tiny()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["ewc", "lwf"])
def test_accumulation_makes_the_steps_of_whole_batches(name, tasks, tmp_path):
    got = theirs(METHODS[name](), tasks, tiny(), tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    torch.testing.assert_close(got, ours(METHODS[name](), tasks, tiny()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "name", ["si", "der", *(pytest.param(n, marks=pytest.mark.slow) for n in ("ewc", "lwf", "packnet"))]
)
def test_a_training_resumed_from_a_checkpoint_ends_where_one_in_a_row_does(name, tasks, tmp_path):
    from everlearn.integrations.huggingface import Continual

    whole = theirs(METHODS[name](), tasks, tiny(), tmp_path / "whole")

    class Stop(transformers.TrainerCallback):
        def on_save(self, args, state, control, **given):
            raise KeyboardInterrupt

    settings = {"save_strategy": "steps", "save_steps": 5, "save_only_model": False}
    model, method = tiny(), METHODS[name]()
    theirs(method, tasks[:1], model, tmp_path / "first")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        InOrder(
            model,
            arguments(tmp_path / "half", **settings),
            train_dataset=tasks[1],
            callbacks=[Continual(method), Stop()],
        ).train()
    again, fresh = tiny(), METHODS[name]()
    again.load_state_dict(before)
    going_on = InOrder(
        again, arguments(tmp_path / "half", **settings), train_dataset=tasks[1], callbacks=[Continual(fresh)]
    )
    going_on.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-5"))
    torch.testing.assert_close(weights(again), whole, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("make", [Method, lambda: EWC(50.0, labels="true"), lambda: ER(30), lambda: DERpp(30)])
def test_a_causal_model_s_labels_are_the_next_words(make, tmp_path):
    torch.manual_seed(0)
    texts = [[{"input_ids": i, "labels": i} for i in torch.randint(20, (16, 7))] for _ in range(2)]

    def model():
        torch.manual_seed(1)
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        shape = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=1, n_head=2, **off)
        return transformers.GPT2LMHeadModel(shape).double()

    got = theirs(make(), texts, model(), tmp_path)
    torch.testing.assert_close(
        got, ours(make(), texts, model()), rtol=1e-3, atol=1e-5
    )  # their loss is taken in float32


def test_a_training_begun_again_has_the_method_once(tasks, tmp_path):
    from everlearn.integrations.huggingface import Continual

    class Counts(EWC):
        steps = 0

        def before_step(self, model):
            Counts.steps += 1

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            raise KeyboardInterrupt

    trainer = InOrder(tiny(), arguments(tmp_path), train_dataset=tasks[0], callbacks=[Continual(Counts()), Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Stop)
    Counts.steps = 0
    trainer.train()
    assert Counts.steps == 8


def test_what_the_trainer_has_no_place_for_and_a_lost_state_are_told(tasks, tmp_path):
    from everlearn.integrations.huggingface import FILE, Continual

    with pytest.raises(TypeError, match="parameters of its own"):
        theirs(
            HAT(
                groups={"model.bert.encoder.layer.0.intermediate.dense": "model.bert.encoder.layer.0.output.dense"},
                output="model.classifier",
            ),
            tasks[:1],
            tiny(),
            tmp_path,
        )
    theirs(SI(), tasks[:1], tiny(), tmp_path / "a", save_strategy="steps", save_steps=5)
    (tmp_path / "a" / "checkpoint-5" / FILE).rename(tmp_path / FILE)

    def resumed(**where):
        trainer = InOrder(
            tiny(), arguments(tmp_path / "a"), train_dataset=tasks[0], callbacks=[Continual(SI(), **where)]
        )
        return trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))

    with pytest.raises(FileNotFoundError, match=r"Continual\(method, checkpoint=…\)"):
        resumed()
    resumed(checkpoint=tmp_path)
