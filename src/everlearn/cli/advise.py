"""The command ``everlearn advise``: ask a few questions, list the methods that fit, and why the others do not."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from everlearn.cli.options import AdviseOptions
from everlearn.core.scenario import DataKind, Scenario
from everlearn.core.traits import Traits
from everlearn.experiments.advice import (
    BYTES_PER_NUMBER,
    DEFAULT_TASKS,
    Advice,
    Measured,
    Needs,
    advise,
    example_capacity,
    is_in_bytes,
)
from everlearn.experiments.parsing import UsageError, explain
from everlearn.experiments.recorded import load_recorded
from everlearn.results.report.rows import mean_and_std

QUESTIONS = {
    "scenario": "What is known about an example at test time?\n"
    "  task    its task\n"
    "  domain  nothing; all tasks have the same classes, and their inputs differ\n"
    "  class   nothing; later tasks add classes, to be distinguished from the old ones\n[task/domain/class]",
    "keep_data": "May examples of old tasks be stored? [yes/no]",
    "grow": "May the model grow with the number of tasks? [yes/no]",
    "labels": "Are there labels of the data to remember?\n"
    "(no: the model is trained already, and there are inputs only) [yes/no]",
    "boundaries": "Are task boundaries known during training? [yes/no]",
    "pretrained": "Was the model pretrained on data like yours, so that its features suit them?\n"
    "(no: it is trained from scratch) [yes/no/unknown]",
    "data": "What are the data? [images/text/table]",
    "tasks": "How many tasks will there be? [a number]",
    "time": "How many baseline training steps may a step take? [a number, such as 1.5]",
    "memory": "How much memory may a method use besides the model? [2x: two copies of the model; or 20MB]",
    "parameters": "How many parameters does the model have? [a number]",
    "inputs": "How many numbers does an example have? [784 for an image of 28 × 28]",
}
SCENARIO_DESCRIPTIONS: dict[Scenario, str] = {
    "task": "Task-incremental: the task of each example is known at test time",
    "domain": "Domain-incremental: the task is not known at test time; all tasks have the same classes, inputs differ",
    "class": "Class-incremental: the task is not known at test time; later tasks add classes",
}
PRETRAINED_STREAMS: dict[DataKind | None, str] = {"images": "cifar100-mobilenet", "text": "clinc150-minilm"}
MAX_WIDTH = 100  # of printed lines
CODE_PREFIXES = ("  everlearn run", "  from ", "  stream = ", "  print")


def print_advice(options: AdviseOptions) -> int:
    """Ask for missing options if there is a terminal, and print the advice; returns the exit code."""
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if is_interactive:
        options = ask_missing(options)
    width = min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH)
    print("\n".join(line for paragraph in format_advice(options) for line in _wrap(paragraph, width)))
    return 0


def ask_missing(options: AdviseOptions) -> AdviseOptions:
    """Ask for the missing options one by one; an invalid answer is explained and the question repeated."""
    values = options.model_dump(exclude_none=True)
    print("A few questions. Enter: no constraint. Ctrl-D: no further constraints.\n")
    for name, question in QUESTIONS.items():
        if name in values or not _is_relevant(name, values):
            continue
        while True:
            try:
                text = input(f"{question}: ").strip()
            except EOFError:
                print()
                return AdviseOptions(**values)
            if not text:
                break
            try:
                value = text if name == "memory" else text.lower()
                values = AdviseOptions(**{**values, name: value}).model_dump(exclude_none=True)
                break
            except ValidationError as error:
                print(f"  {explain(error)}")
        print()
    return AdviseOptions(**values)


def _is_relevant(name: str, values: dict[str, object]) -> bool:
    """Whether an option matters: the sizes of model and example only matter if a memory is given."""
    memory = values.get("memory")
    if name == "inputs":
        return memory is not None and values.get("keep_data") != "no" and "parameters" in values
    if name == "parameters":
        return isinstance(memory, str) and is_in_bytes(memory)
    return True


def format_advice(options: AdviseOptions) -> Iterator[str]:
    """Paragraphs of the advice, indented as they are to be wrapped."""
    needs = _needs_of(options)
    advices = advise(needs, load_recorded())
    fitting = [advice for advice in advices if advice.fits]
    misfits = [advice for advice in advices if not advice.fits]
    ranked = [advice for advice in fitting if advice.closed_gap is not None]
    unranked = [advice for advice in fitting if advice.closed_gap is None]

    yield from _format_options(options)
    if not fitting:
        yield "\nNo method fits all constraints. The first ones below violate the fewest: can one of them be relaxed?"
    if ranked:
        yield (
            "\nThese fit, best first by how much of the gap from fine-tuning (0 %) to joint training (100 %) they "
            "closed in our runs of published tables. Each was run in the tables it is quoted with, with few seeds: a "
            "few points mean little."
        )
    for rank, advice in enumerate(ranked, 1):
        yield from _format_method(f"{rank}.", advice, needs)
    if unranked:
        introduction = "These fit, too, but" if ranked else "These fit;"
        yield f"\n{introduction} no published table ranks them here{_order_note(unranked, needs)}."
    for advice in unranked:
        yield from _format_method("-", advice, needs)

    if misfits:
        yield "\nThese do not fit."
        name_width = max(len(advice.name) for advice in misfits)
        for advice in misfits:
            first_objection, *further_objections = advice.objections
            objections = [first_objection + _weakness_numbers(advice, needs), *further_objections]
            yield f"  {advice.name:{name_width}}  " + "; ".join(objections)
    if fitting:
        yield from _format_examples(fitting[:3], needs)


def _needs_of(options: AdviseOptions) -> Needs:
    """Convert the options to the constraints of the library."""
    booleans = {"yes": True, "no": False, "unknown": None}
    constraints: dict[str, Any] = {name: booleans.get(value, value) for name, value in options}
    try:
        return Needs(**constraints)
    except ValueError as error:
        raise UsageError(f"{error} On the command line: --parameters.") from None


def _format_options(options: AdviseOptions) -> Iterator[str]:
    """Repeat the given options, and list those that are missing."""
    values = options.model_dump(exclude_none=True)
    if options.scenario:
        yield f"{SCENARIO_DESCRIPTIONS[options.scenario]}."
    given = [f"{name.replace('_', ' ')} {value}" for name, value in values.items() if name != "scenario"]
    if given:
        yield f"Given: {', '.join(given)}."
    missing = [name for name in QUESTIONS if name not in values and _is_relevant(name, values)]
    if missing:
        flags = [f"--{name.replace('_', '-')}" for name in missing]
        yield f"Not given, and not taken into account: {', '.join(flags)}."


def _format_method(bullet: str, advice: Advice, needs: Needs) -> Iterator[str]:
    """Paragraphs on a method that fits: pros, cons, costs and recorded results."""
    # A method without traits never fits.
    if advice.traits is None:
        return
    heading = f"\n{bullet} {advice.name} ({advice.method_class.__name__})"
    if advice.closed_gap is not None:
        heading += f": {100 * advice.closed_gap:.0f} % of the gap"
    yield heading

    settings = [f"set {field}={value}" for field, value in advice.settings.items()]
    yield f"   for       {'; '.join([advice.traits.pro, *settings])}"
    yield f"   against   {advice.traits.con}"
    yield f"   costs     {_format_cost(advice.traits, needs)}"
    for constraint in advice.unchecked:
        yield f"   unknown   {constraint}"
    if not advice.measured:
        yield "   measured  not in a table"
        return
    first_result, *further_results = advice.measured
    yield f"   measured  {_format_result(first_result, needs)}"
    for result in further_results:
        yield f"             {_format_result(result, needs)}"


def _format_cost(traits: Traits, needs: Needs) -> str:
    """Time and memory of a method."""
    num_tasks = needs.tasks or DEFAULT_TASKS
    step_time = traits.step_of(num_tasks)
    step = "the time of a step is not measured"
    if step_time == 0:
        step = "no training steps: one pass over the examples of each task"
    elif step_time is not None:
        step = f"a step takes about {step_time:.1f} baseline steps"
        if traits.step_growth:
            step += f" in the last of {num_tasks} tasks"

    stored = []
    num_copies = traits.copies_after(num_tasks)
    if not traits.copies_scale:
        stored.append("statistics of the features")
    elif num_copies is None:
        stored.append("state whose size is not measured")
    elif num_copies:
        copies = f"about {num_copies:.2g} {'copy' if num_copies == 1 else 'copies'} of the model"
        if traits.copies and len(traits.copies) > 1:
            copies += f" after {num_tasks} tasks"
        if needs.parameters:
            copies += f", {_format_bytes(BYTES_PER_NUMBER * num_copies * needs.parameters)}"
        stored.append(copies)
    if traits.keeps_examples:
        capacity = example_capacity(needs, traits)
        if capacity is None:
            stored.append("as many examples as you allow")
        else:
            stored.append(f"up to {capacity:,} examples")
    return f"{step}; stores {' and '.join(stored) or 'nothing'}"


def _format_bytes(num_bytes: float) -> str:
    """Format a size with its unit.

    >>> _format_bytes(1_913_640), _format_bytes(3e9)
    ('1.9 MB', '3.0 GB')
    """
    for scale, unit in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def _format_result(result: Measured, needs: Needs) -> str:
    """A recorded result with its table, number of seeds, both ends of the scale, and settings."""
    num_seeds = len(result.accuracies)
    seeds = f"{num_seeds} seed{'s' * (num_seeds > 1)}"
    scale_ends = (("fine-tuning", result.finetune), ("joint", result.joint))
    references = [f"{name} {accuracy:.1f}" for name, accuracy in scale_ends if accuracy is not None]
    settings = [
        f"{field}={value:g}" if isinstance(value, float) else f"{field}={value}"
        for field, value in result.settings.items()
    ]
    notes = [", ".join(note) for note in ([result.title, seeds], references, settings) if note]
    scenario = "" if needs.scenario else f"{result.scenario}-incremental: "
    return f"{scenario}{mean_and_std(result.accuracies)} % in {result.table} {result.cell} ({'; '.join(notes)})"


def _weakness_numbers(advice: Advice, needs: Needs) -> str:
    """Recorded results behind the first objection, if that is low accuracy."""
    if advice.traits is None or needs.scenario not in advice.traits.weak or advice.name == "finetune":
        return ""
    numbers = [
        f"{result.mean:.1f} % in {result.table}, fine-tuning {result.finetune:.1f} %"
        for result in advice.measured
        if result.finetune is not None
    ]
    return f" ({'; '.join(numbers)})" if numbers else ""


def _order_note(advices: Sequence[Advice], needs: Needs) -> str:
    """How methods without recorded results are ordered."""
    if len(advices) < 2:
        return ""
    order = "the cheapest step first"
    if any(advice.traits and advice.traits.step is None for advice in advices):
        order += ", those not measured last"
    if needs.scenario == "task" and any(advice.traits and advice.traits.zero_forgetting for advice in advices):
        return f" (those that forget nothing first, then {order})"
    if needs.scenario == "class" and needs.pretrained:
        return f" (those for pretrained features first, then {order})"
    return f" ({order})"


def _format_examples(best: Sequence[Advice], needs: Needs) -> Iterator[str]:
    """A command and three lines of Python that run as printed."""
    methods = ",".join(["finetune", *(advice.name for advice in best), "joint"])
    set_options = "".join(
        f" --set {advice.name}.{field}={value}" for advice in best for field, value in advice.settings.items()
    )
    is_online = needs.boundaries is False
    stream_option = " --stream online-digits" if is_online else ""
    yield "\nTry the first of them on the digits in the package, untuned:"
    scenario = needs.scenario or "all"
    yield f"  everlearn run{stream_option} --scenario {scenario} --methods {methods}{set_options} --seeds 3"

    class_name = best[0].method_class.__name__
    settings = ", ".join(f"{field}={value!r}" for field, value in best[0].settings.items())
    stream_function = "online_digits" if is_online else "digits"
    epochs = 1 if is_online else 10
    if best[0].traits and best[0].traits.needs_pretrained:
        benchmark = PRETRAINED_STREAMS.get(needs.data)
        published = f" On published data, with a pretrained encoder: --stream {benchmark} --hidden none."
        yield (
            f"\nWith your own model: {class_name}({settings}).end_task(model, loader), then model(x); see "
            f"docs/pretrained.md.{published if benchmark else ''}"
        )
    yield "\nIn Python; streams.from_tasks makes a stream of your own data, and your own training loop works as well:"
    yield f"  from everlearn import {class_name}, nets, run, streams"
    yield f'  stream = streams.{stream_function}(scenario="{needs.scenario or "task"}")'
    yield f"  print(run(nets.mlp, {class_name}({settings}), stream, epochs={epochs}))"


def _wrap(paragraph: str, width: int) -> list[str]:
    """Wrap a paragraph, with further lines aligned under its text; code is not wrapped."""
    text = paragraph.lstrip("\n")
    if text.startswith(CODE_PREFIXES):
        return paragraph.split("\n")

    # In "  name  text", further lines start under the text.
    indent = len(text) - len(text.lstrip())
    if indent:
        stripped = text.lstrip()
        gap_start = stripped.find("  ")
        if 0 < gap_start < 14:
            gap_and_text = stripped[gap_start:]
            indent += gap_start + len(gap_and_text) - len(gap_and_text.lstrip())

    # A number and its percent sign stay on one line.
    lines = textwrap.wrap(
        text.replace(" %", "\N{NO-BREAK SPACE}%"),
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    num_blank_lines = len(paragraph) - len(text)
    return [""] * num_blank_lines + [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
