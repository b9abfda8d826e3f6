"""Hugging Face's Trainer and a plain training loop give equal weights on the same batches."""

import pytest
import torch

from everlearn import AGEM, DER, ER, EWC, HAT, L2, MAS, SI, Batch, Categorical, DERpp, Gaussian, LwF, Method, PackNet
from everlearn.core.task import as_task
from tests.helpers import parameter_vector

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # warnings of transformers
METHODS = {
    "finetune": Method,
    "ewc": lambda: EWC(50.0),
    "mas": lambda: MAS(0.5),
    "si": lambda: SI(20.0),
    "lwf": lambda: LwF(2.0),
    "er": lambda: ER(30),
    "der": lambda: DER(30),
    "agem": lambda: AGEM(30),
    "packnet": lambda: PackNet(output="model.classifier"),
    "chain": lambda: EWC(50.0) + ER(30),
}


def tiny():
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()  # Adam amplifies rounding errors


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


def arguments(folder, **settings):
    defaults = {"per_device_train_batch_size": 8, "save_strategy": "no", "learning_rate": 1e-2, "max_grad_norm": 1e9}
    return transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        optim="adamw_torch",
        weight_decay=0.0,
        dataloader_pin_memory=False,
        **{**defaults, **settings},
    )


class InOrder(transformers.Trainer):
    """Trainer with batches in the order of the data, and the average over micro-batches, which BERT's loss lacks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Stock(transformers.Trainer):
    """Unchanged Trainer, except for the order of the data."""

    _get_train_sampler = InOrder._get_train_sampler


def train_with_trainer(method, tasks, model, folder, trainer_class=InOrder, likelihood=None, **settings):
    from everlearn.integrations.huggingface import Continual

    for task in tasks:
        callback = Continual(method, likelihood=likelihood)
        trainer_class(model, arguments(folder, **settings), train_dataset=task, callbacks=[callback]).train()
    return parameter_vector(model)


def batches(task, size=8):
    return [transformers.default_data_collator(task[i : i + size]) for i in range(0, len(task), size)]


def pairs(task, size=8):
    """Return inputs and labels of each batch; the label of a causal model is the next token."""
    all_pairs = []
    for batch in batches(task, size):
        y = batch.pop("labels")
        if y.dim() == 2:
            y = torch.nn.functional.pad(y[:, 1:], (0, 1), value=-100)
        all_pairs.append((batch, y))
    return all_pairs


def train_with_loop(method, tasks, model, likelihood=None, parts=1, factor=1.0, clip=1e9):
    from everlearn.integrations.huggingface import Outputs

    wrapped = Outputs(model)
    likelihood = likelihood or Categorical()
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
    return parameter_vector(model)


@pytest.mark.parametrize("name", METHODS)
def test_the_trainer_equals_a_plain_loop(name, tasks, tmp_path):
    actual = train_with_trainer(METHODS[name](), tasks, tiny(), tmp_path)
    torch.testing.assert_close(actual, train_with_loop(METHODS[name](), tasks, tiny()), rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ewc", "si", "lwf", "er"])
def test_the_trainer_clips_the_gradient_of_the_total_loss(name, tasks, tmp_path):
    actual = train_with_trainer(METHODS[name](), tasks, tiny(), tmp_path, max_grad_norm=0.01)
    torch.testing.assert_close(actual, train_with_loop(METHODS[name](), tasks, tiny(), clip=0.01), rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ewc", "lwf"])
def test_accumulated_micro_batches_equal_full_batches(name, tasks, tmp_path):
    actual = train_with_trainer(
        METHODS[name](), tasks, tiny(), tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2
    )
    torch.testing.assert_close(actual, train_with_loop(METHODS[name](), tasks, tiny()), rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trainer_class", "factor"), [("er", InOrder, 0.5), ("er", Stock, 1.0), ("der", Stock, 1.0)]
)
def test_micro_batches_are_replayed_one_by_one(name, trainer_class, factor, tasks, tmp_path):
    """The unchanged Trainer sums micro-batches, because BERT's loss does not average them; so does replay."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    actual = train_with_trainer(METHODS[name](), tasks, tiny(), tmp_path, trainer_class, **settings)
    expected = train_with_loop(METHODS[name](), tasks, tiny(), parts=2, factor=factor)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["er", "lwf"])
def test_regression_is_replayed_with_the_scale_of_the_loss(name, tasks, tmp_path):
    """Hugging Face's mean squared error is twice the loss of ``Gaussian``, and its labels have no output axis."""

    def regression_model():
        model = tiny()
        model.config.problem_type = "regression"
        model.config.num_labels = 1
        model.num_labels = 1
        model.classifier = torch.nn.Linear(16, 1).double()
        torch.nn.init.ones_(model.classifier.weight)
        torch.nn.init.zeros_(model.classifier.bias)
        return model

    numbers = [[{**row, "labels": float(row["labels"])} for row in task] for task in tasks]
    actual = train_with_trainer(METHODS[name](), numbers, regression_model(), tmp_path, Stock, Gaussian())
    expected = train_with_loop(METHODS[name](), numbers, regression_model(), Gaussian(), factor=2.0)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)  # their loss is computed in float32


def test_decoder_inputs_are_computed_from_the_labels():
    from everlearn.integrations.huggingface import Outputs, split_batch

    size = {"vocab_size": 30, "d_model": 16, "decoder_start_token_id": 2, "pad_token_id": 1}
    halves = {
        f"{side}_{setting}": n
        for side in ("encoder", "decoder")
        for setting, n in (("layers", 1), ("ffn_dim", 16), ("attention_heads", 2))
    }
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(**size, **halves)).eval()
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    ).eval()
    batch = {"input_ids": torch.randint(3, 30, (2, 5)), "labels": torch.randint(3, 30, (2, 4))}
    for model in (bart, t5):
        x, y = split_batch(model, batch)
        torch.testing.assert_close(Outputs(model)(x), model(**batch).logits)
        assert torch.equal(y, batch["labels"])


def test_running_statistics_count_every_batch_once(tasks, tmp_path):
    """BatchNorm in a Trainer, although the method repeats forward passes."""

    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.embedding = torch.nn.Embedding(50, 8)
            self.norm = torch.nn.BatchNorm1d(8)
            self.head = torch.nn.Linear(8, 2)

        def forward(self, input_ids, labels=None, attention_mask=None):
            logits = self.head(self.norm(self.embedding(input_ids).mean(1)))
            loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
            return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)

    models = [Normed().double() for _ in range(2)]
    with pytest.raises(ValueError, match="joint=False"):
        train_with_trainer(ER(30), tasks, Normed().double(), tmp_path)
    train_with_trainer(ER(30, joint=False), tasks, models[0], tmp_path)
    train_with_loop(ER(30, joint=False), tasks, models[1])
    for a, b in zip(*(m.state_dict().values() for m in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_models_without_logits_are_refused():
    from everlearn.integrations.huggingface import Outputs

    with pytest.raises(TypeError, match=r"BertModel returns no logits \(last_hidden_state"):
        Outputs(tiny().bert)(torch.randint(50, (2, 6)))


def test_the_consolidated_state_is_saved_in_the_output_folder(tasks, tmp_path):
    from everlearn.integrations.huggingface import load

    method = EWC(50.0)
    loaded = EWC(50.0)
    train_with_trainer(method, tasks[:1], tiny(), tmp_path, save_strategy="steps", save_steps=5)
    load(loaded, tmp_path)
    assert loaded.quadratic.anchor.keys() == method.quadratic.anchor.keys() and loaded.quadratic.anchor
    load(loaded, tmp_path / "checkpoint-5")
    assert not loaded.quadratic.anchor, "the task had not ended"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ewc", "lwf", "er"])
def test_bfloat16_is_close(name, tasks, tmp_path):
    exact, rounded = (
        train_with_trainer(METHODS[name](), tasks, tiny().float(), tmp_path, learning_rate=1e-4, bf16=bf16)
        for bf16 in (False, True)
    )
    moved = (exact - parameter_vector(tiny().float())).norm()
    assert 0 < (rounded - exact).norm() < 0.5 * moved


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["si", "der", *(pytest.param(n, marks=pytest.mark.slow) for n in ("ewc", "lwf", "packnet"))]
)
def test_a_resumed_training_equals_an_uninterrupted_one(name, tasks, tmp_path):
    from everlearn.integrations.huggingface import Continual

    expected = train_with_trainer(METHODS[name](), tasks, tiny(), tmp_path / "uninterrupted")

    class Stop(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    settings = {"save_strategy": "steps", "save_steps": 5, "save_only_model": False}
    model = tiny()
    method = METHODS[name]()
    train_with_trainer(method, tasks[:1], model, tmp_path / "first")
    first_task_state = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        InOrder(
            model,
            arguments(tmp_path / "half", **settings),
            train_dataset=tasks[1],
            callbacks=[Continual(method), Stop()],
        ).train()
    resumed_model = tiny()
    resumed_method = METHODS[name]()
    resumed_model.load_state_dict(first_task_state)
    trainer = InOrder(
        resumed_model,
        arguments(tmp_path / "half", **settings),
        train_dataset=tasks[1],
        callbacks=[Continual(resumed_method)],
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-5"))
    torch.testing.assert_close(parameter_vector(resumed_model), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Method, lambda: EWC(50.0, labels="true"), lambda: ER(30), lambda: DERpp(30)])
def test_labels_of_a_causal_model_are_the_next_tokens(make, tmp_path):
    torch.manual_seed(0)
    texts = [[{"input_ids": i, "labels": i} for i in torch.randint(20, (16, 7))] for _ in range(2)]

    def model():
        torch.manual_seed(1)
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=1, n_head=2, **no_dropout)
        return transformers.GPT2LMHeadModel(config).double()

    # The unchanged Trainer divides by the number of labels before they are shifted.
    for trainer_class, factor in ((InOrder, 1.0), (Stock, 6 / 7)):
        actual = train_with_trainer(make(), texts, model(), tmp_path, trainer_class)
        expected = train_with_loop(make(), texts, model(), factor=factor)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)  # their loss is computed in float32


def test_a_restarted_training_attaches_the_method_once(tasks, tmp_path):
    from everlearn.integrations.huggingface import Continual

    class Counting(EWC):
        steps = 0

        def before_step(self, model):
            Counting.steps += 1

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    trainer = InOrder(tiny(), arguments(tmp_path), train_dataset=tasks[0], callbacks=[Continual(Counting()), Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Stop)
    Counting.steps = 0
    trainer.train()
    assert Counting.steps == 8


def test_methods_with_parameters_and_missing_states_are_refused(tasks, tmp_path):
    from everlearn.integrations.huggingface import FILE, Continual

    with pytest.raises(TypeError, match="parameters of its own"):
        layer = "model.bert.encoder.layer.0"
        hat = HAT(groups={f"{layer}.intermediate.dense": f"{layer}.output.dense"}, output="model.classifier")
        train_with_trainer(hat, tasks[:1], tiny(), tmp_path)
    train_with_trainer(SI(), tasks[:1], tiny(), tmp_path / "a", save_strategy="steps", save_steps=5)
    (tmp_path / "a" / "checkpoint-5" / FILE).rename(tmp_path / FILE)

    def resume(**options):
        callback = Continual(SI(), **options)
        trainer = InOrder(tiny(), arguments(tmp_path / "a"), train_dataset=tasks[0], callbacks=[callback])
        return trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))

    with pytest.raises(FileNotFoundError, match=r"Continual\(method, checkpoint=…\)"):
        resume()
    resume(checkpoint=tmp_path)


@pytest.mark.parametrize("name", ["ewc", "mas", "si", "l2", "lwf"])
def test_a_custom_loop_accepts_loaders_of_dicts(name, tasks):
    """A Hugging Face model with dict batches and its own loss equals the wrapped model."""
    from everlearn.integrations.huggingface import Outputs

    final_weights = []
    for wrapped in (False, True):
        bert = tiny()
        method = {**METHODS, "l2": L2}[name]()
        model = Outputs(bert) if wrapped else bert
        for task in tasks:
            loader = torch.utils.data.DataLoader(task, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            method.begin_task(model, loader)
            for batch in loader:
                outputs = bert(**batch)
                loss = outputs.loss + method.penalty(model, batch, outputs.logits)
                optimizer.zero_grad()
                loss.backward()
                method.before_step(model)
                optimizer.step()
                method.after_step(model)
            method.end_task(model, loader)
        final_weights.append(parameter_vector(bert))
    torch.testing.assert_close(*final_weights)


def test_pairs_shift_the_labels_of_a_causal_model():
    from everlearn.integrations.huggingface import Pairs

    config = transformers.GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=2, n_positions=8, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    tokens = torch.randint(9, (4, 6))
    loader = [{"input_ids": tokens, "labels": tokens}]
    with pytest.raises(ValueError, match="GPT2LMHeadModel equal its inputs"):
        EWC(labels="true").end_task(model, loader)
    ((x, y),) = Pairs(loader, model)
    model_loss = model(input_ids=tokens, labels=tokens).loss  # in float32
    torch.testing.assert_close(Method().loss(model, Batch(x, y)), model_loss, check_dtype=False)
    EWC(labels="true").end_task(model, Pairs(loader, model))


class WithExtraLoss(torch.nn.Module):
    """A model whose loss has a further term."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(50, 8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, input_ids, labels=None, attention_mask=None, **kwargs):
        logits = self.head(self.embedding(input_ids).mean(1))
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits, labels) + logits.square().mean()
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


def test_a_loss_whose_scale_is_unknown_needs_a_weight(tasks, tmp_path):
    from everlearn.integrations.huggingface import Continual

    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}

    def train(**options):
        callback = Continual(ER(30), **options)
        Stock(WithExtraLoss(), arguments(tmp_path, **settings), train_dataset=tasks[0], callbacks=[callback]).train()

    with pytest.raises(ValueError, match=r"Continual\(method, weight=1\.0\)"):
        train()
    train(weight=1.0)


def test_the_clipping_of_the_arguments_is_restored(tasks, tmp_path):
    from everlearn.integrations.huggingface import Continual

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    settings = arguments(tmp_path, max_grad_norm=0.5)
    trainer = InOrder(tiny(), settings, train_dataset=tasks[0], callbacks=[Continual(SI()), Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert settings.max_grad_norm == 0.5
