"""The same batches through Hugging Face's Trainer and through our own loop give equal weights."""

import pytest
import torch

from everlearn import DER, ER, EWC, HAT, L2, MAS, SI, Batch, Categorical, DERpp, Gaussian, LwF, Method, PackNet
from everlearn.core.task import as_task

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
        output_dir=str(folder), num_train_epochs=2, lr_scheduler_type="constant",
        use_cpu=True, report_to=[], disable_tqdm=True, optim="adamw_torch", weight_decay=0.0, dataloader_pin_memory=False,
        **{"per_device_train_batch_size": 8, "save_strategy": "no", "learning_rate": 1e-2, "max_grad_norm": 1e9, **settings},
    )  # fmt: skip


class InOrder(transformers.Trainer):
    """Batches as they lie, so that two loops see the same; micro-batches averaged, which BERT's own loss leaves to the Trainer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Stock(transformers.Trainer):
    """As it comes, but for the order."""

    _get_train_sampler = InOrder._get_train_sampler


def theirs(method, tasks, model, folder, kind=InOrder, likelihood=None, **settings):
    from everlearn.integrations.huggingface import Continual

    for task in tasks:
        callback = Continual(method, likelihood=likelihood)
        kind(model, arguments(folder, **settings), train_dataset=task, callbacks=[callback]).train()
    return weights(model)


def batches(task, size=8):
    return [transformers.default_data_collator(task[i : i + size]) for i in range(0, len(task), size)]


def pairs(task, size=8):
    """What the loss compares: of a causal model each place with the next word."""
    made = []
    for batch in batches(task, size):
        y = batch.pop("labels")
        made.append((batch, y if y.dim() == 1 else torch.nn.functional.pad(y[:, 1:], (0, 1), value=-100)))
    return made


def ours(method, tasks, model, likelihood=None, parts=1, factor=1.0, clip=1e9):
    from everlearn.integrations.huggingface import Outputs

    wrapped, likelihood = Outputs(model), likelihood or Categorical()
    for task in tasks:
        planned = as_task(pairs(task), likelihood)
        planned.steps = 2 * len(batches(task))
        method.begin_task(wrapped, planned)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        model.train()
        for epoch in range(2):
            for i, (batch, y) in enumerate(pairs(task, 8 // parts)):
                y = likelihood.labels(y)
                (method.loss(wrapped, Batch(batch, y, likelihood=likelihood, epoch=epoch)) * factor).backward()
                if (i + 1) % parts == 0:
                    method.before_step(wrapped)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                    optimizer.step()
                    method.after_step(wrapped)
                    optimizer.zero_grad()
        method.end_task(wrapped, planned)
    return weights(model)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", METHODS)
def test_the_trainer_and_our_loop_end_alike(name, tasks, tmp_path):
    got = theirs(METHODS[name](), tasks, tiny(), tmp_path)
    torch.testing.assert_close(got, ours(METHODS[name](), tasks, tiny()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["ewc", "si", "lwf", "er"])
def test_the_trainer_clips_the_whole_loss(name, tasks, tmp_path):
    got = theirs(METHODS[name](), tasks, tiny(), tmp_path, max_grad_norm=0.01)
    torch.testing.assert_close(got, ours(METHODS[name](), tasks, tiny(), clip=0.01), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["ewc", "lwf"])
def test_accumulation_makes_the_steps_of_whole_batches(name, tasks, tmp_path):
    got = theirs(METHODS[name](), tasks, tiny(), tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    torch.testing.assert_close(got, ours(METHODS[name](), tasks, tiny()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("name", "kind", "factor"), [("er", InOrder, 0.5), ("er", Stock, 1.0), ("der", Stock, 1.0)])
def test_micro_batches_are_replayed_one_by_one(name, kind, factor, tasks, tmp_path):
    """The stock Trainer sums what BERT's own loss does not average; replay is summed alike."""
    small = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    got = theirs(METHODS[name](), tasks, tiny(), tmp_path, kind, **small)
    torch.testing.assert_close(got, ours(METHODS[name](), tasks, tiny(), parts=2, factor=factor), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["er", "lwf"])
def test_numbers_are_replayed_by_their_own_mean(name, tasks, tmp_path):
    """Regression: Hugging Face's mean of squares is twice what ``Gaussian`` means, and its labels have no axis for outputs."""

    def model():
        one = tiny()
        one.config.problem_type, one.config.num_labels, one.num_labels = "regression", 1, 1
        one.classifier = torch.nn.Linear(16, 1).double()
        torch.nn.init.ones_(one.classifier.weight)
        torch.nn.init.zeros_(one.classifier.bias)
        return one

    numbers = [[{**row, "labels": float(row["labels"])} for row in task] for task in tasks]
    got = theirs(METHODS[name](), numbers, model(), tmp_path, Stock, Gaussian())
    wanted = ours(METHODS[name](), numbers, model(), Gaussian(), factor=2.0)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)  # their loss is taken in float32


def test_a_decoder_s_inputs_are_those_that_the_labels_make():
    from everlearn.integrations.huggingface import Outputs, pair

    size = {"vocab_size": 30, "d_model": 16, "decoder_start_token_id": 2, "pad_token_id": 1}
    halves = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 1), ("ffn_dim", 16), ("attention_heads", 2))
    }
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(**size, **halves)).eval()
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    ).eval()
    batch = {"input_ids": torch.randint(3, 30, (2, 5)), "labels": torch.randint(3, 30, (2, 4))}
    for model in (bart, t5):
        x, y = pair(model, batch)
        torch.testing.assert_close(Outputs(model)(x), model(**batch).logits)
        assert torch.equal(y, batch["labels"])


def test_statistics_count_every_batch_once(tasks, tmp_path):
    """BatchNorm in a Trainer, which never calls what a method calls."""

    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.words, self.norm, self.out = torch.nn.Embedding(50, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)

        def forward(self, input_ids, labels=None, attention_mask=None):
            said = self.out(self.norm(self.words(input_ids).mean(1)))
            loss = None if labels is None else torch.nn.functional.cross_entropy(said, labels)
            return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=said)

    models = [Normed().double() for _ in range(2)]
    theirs(ER(30), tasks, models[0], tmp_path)
    ours(ER(30), tasks, models[1])
    for a, b in zip(*(m.state_dict().values() for m in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_models_without_logits_are_told():
    from everlearn.integrations.huggingface import Outputs

    with pytest.raises(TypeError, match=r"BertModel gives no logits \(last_hidden_state"):
        Outputs(tiny().bert)(torch.randint(50, (2, 6)))


def test_after_the_task_its_consolidated_state_lies_in_the_output_folder(tasks, tmp_path):
    from everlearn.integrations.huggingface import load

    method, found = EWC(50.0), EWC(50.0)
    theirs(method, tasks[:1], tiny(), tmp_path, save_strategy="steps", save_steps=5)
    load(found, tmp_path)
    assert found.quadratic.anchor.keys() == method.quadratic.anchor.keys() and found.quadratic.anchor
    load(found, tmp_path / "checkpoint-5")
    assert not found.quadratic.anchor, "the task had not ended"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ewc", "lwf", "er"])
def test_bfloat16_is_near(name, tasks, tmp_path):
    exact, near = (
        theirs(METHODS[name](), tasks, tiny().float(), tmp_path, learning_rate=1e-4, bf16=bf16)
        for bf16 in (False, True)
    )
    moved = (exact - weights(tiny().float())).norm()
    assert 0 < (near - exact).norm() < 0.5 * moved


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

    for kind in (InOrder, Stock):  # which divides by the labels before they are shifted
        if kind is Stock and isinstance(make(), EWC):
            continue  # a penalty of the parameters stays as it is
        got = theirs(make(), texts, model(), tmp_path, kind)
        wanted = ours(make(), texts, model(), factor=1.0 if kind is InOrder else 6 / 7)
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)  # their loss is taken in float32


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


@pytest.mark.parametrize("name", ["ewc", "mas", "si", "l2", "lwf"])
def test_a_loop_of_one_s_own_takes_loaders_of_dicts(name, tasks):
    """Batches as the model takes them, its own loss, and methods that call it as it is called; against the wrapped model."""
    from everlearn.integrations.huggingface import Outputs

    ends = []
    for wrapped in (False, True):
        bert, method = tiny(), {**METHODS, "l2": L2}[name]()
        model = Outputs(bert) if wrapped else bert
        for task in tasks:
            loader = torch.utils.data.DataLoader(task, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            method.begin_task(model, loader)
            for batch in loader:
                answer = bert(**batch)
                loss = answer.loss + method.penalty(model, batch, answer.logits)
                optimizer.zero_grad()
                loss.backward()
                method.before_step(model)
                optimizer.step()
                method.after_step(model)
            method.end_task(model, loader)
        ends.append(weights(bert))
    torch.testing.assert_close(*ends)


def test_a_causal_model_s_labels_are_shifted_by_pairs():
    from everlearn.integrations.huggingface import Pairs

    shape = transformers.GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=2, n_positions=8, use_cache=False)
    model, tokens = transformers.GPT2LMHeadModel(shape).double().eval(), torch.randint(9, (4, 6))
    loader = [{"input_ids": tokens, "labels": tokens}]
    with pytest.raises(ValueError, match="GPT2LMHeadModel equal its inputs"):
        EWC(labels="true").end_task(model, loader)
    ((x, y),) = Pairs(loader, model)
    own = model(input_ids=tokens, labels=tokens).loss  # in single precision
    torch.testing.assert_close(Method().loss(model, Batch(x, y)), own, check_dtype=False)
    EWC(labels="true").end_task(model, Pairs(loader, model))
