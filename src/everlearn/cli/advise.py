"""``everlearn advise``: a few questions, the methods that fit the answers, and why the others do not."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from everlearn.advice import BYTES, TASKS, Advice, Measured, Needs, advise, in_bytes, room
from everlearn.cli.measured import recorded
from everlearn.cli.names import UsageError, explain
from everlearn.report.runs import spread
from everlearn.stream import Scenario
from everlearn.traits import Traits

YesNo = Literal["yes", "no"]
QUESTIONS = {
    "scenario": "When the model is asked, what is it told?\n"
    "  task    which task an input is of\n"
    "  domain  nothing; all tasks have the same answers, and their inputs change\n"
    "  class   nothing; later tasks bring new classes, to be told from the old ones\n[task/domain/class]",
    "keep_data": "May examples of old tasks be kept? [yes/no]",
    "grow": "May the model grow with the tasks? [yes/no]",
    "labels": "Are there labels for what the model shall remember?\n"
    "(no: it is trained already, and inputs are all there is) [yes/no]",
    "boundaries": "Will somebody tell where one task ends and the next begins? [yes/no]",
    "tasks": "How many tasks will there be? [a number]",
    "time": "How many plain training steps may a step cost? [a number, such as 1.5]",
    "memory": "What may a method keep besides the model? [2x: two copies of the model; or 20MB]",
    "parameters": "How many parameters has the model? [a number]",
    "inputs": "How many numbers are one example? [784 for an image of 28 × 28]",
}
SCENARIO: dict[Scenario, str] = {
    "task": "task-incremental: the model is told which task an input is of",
    "domain": "domain-incremental: the model is not told the task; answers are the same in all, inputs change",
    "class": "class-incremental: the model is not told the task; later tasks bring new classes",
}


class Answers(BaseModel):
    """The options of ``everlearn advise``; None is for what does not matter."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    scenario: Scenario | None = Field(
        None,
        description="What the model is told at test. task: which task an input is of. domain: nothing; all tasks have the "
        "same answers. class: nothing; later tasks bring new classes.",
    )
    keep_data: YesNo | None = Field(None, description="May examples of old tasks be kept?")
    grow: YesNo | None = Field(None, description="May the model grow with the tasks?")
    labels: YesNo | None = Field(
        None, description="Are there labels for what shall be remembered, or only a trained model and inputs?"
    )
    boundaries: YesNo | None = Field(None, description="Will somebody tell where a task ends?")
    tasks: int | None = Field(None, ge=1, description="How many tasks there will be.")
    time: float | None = Field(None, gt=0, allow_inf_nan=False, description="What a step may cost, in plain steps.")
    memory: str | None = Field(
        None, description="What a method may keep besides the model: copies of it, as in 2x, or bytes, as in 20MB."
    )
    parameters: int | None = Field(None, ge=1, description="Parameters of the model; bytes are compared with them.")
    inputs: int | None = Field(
        None, ge=1, description="Numbers in one example (784 for 28 × 28), to tell how many the memory holds."
    )

    @field_validator("memory")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        in_bytes(value)
        return value

    def needs(self) -> Needs:
        """The same for the library."""
        said = {name: value == "yes" if value in ("yes", "no") else value for name, value in self}
        try:
            return Needs(**said)
        except ValueError as error:
            raise UsageError(f"{error} On the command line: --parameters.") from None


def give_advice(answers: Answers) -> int:
    """Ask what is not answered, if there is somebody to ask, and print what follows."""
    alone = not (sys.stdin.isatty() and sys.stdout.isatty())
    answers = answers if alone else ask(answers)
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    print("\n".join(line for part in shown(answers) for line in _wrapped(part, width)))
    return 0


def ask(answers: Answers) -> Answers:
    """The open questions one after the other; a wrong answer is explained and asked for again."""
    known = answers.model_dump(exclude_none=True)
    print("A few questions. Enter: it does not matter. Ctrl-D: nothing further does.\n")
    for name, question in QUESTIONS.items():
        if name in known or not _matters(name, known):
            continue
        while True:
            try:
                text = input(f"{question}: ").strip()
            except EOFError:
                print()
                return Answers(**known)
            try:
                answer = {name: text if name == "memory" else text.lower()} if text else {}
                known = Answers(**{**known, **answer}).model_dump(exclude_none=True)
                break
            except ValidationError as error:
                print(f"  {explain(error)}")
        print()
    return Answers(**known)


def _matters(name: str, known: dict[str, object]) -> bool:
    """The sizes of model and example are worth a question only where they are compared with something."""
    memory = known.get("memory")
    if name == "inputs":
        return memory is not None and known.get("keep_data") != "no" and "parameters" in known
    return name != "parameters" or in_bytes(memory if isinstance(memory, str) else None)


def shown(answers: Answers) -> Iterator[str]:
    """The advice, paragraph by paragraph; lines after the first are indented as they shall be."""
    needs = answers.needs()
    every = advise(needs, recorded())
    fit, misfit = [a for a in every if a.fits], [a for a in every if not a.fits]
    ranked, others = [a for a in fit if a.kept is not None], [a for a in fit if a.kept is None]
    yield from _answered(answers)
    if not fit:
        yield "\nNo method fits all of this. The first below miss by the fewest answers: is one of them negotiable?"
    if ranked:
        yield (
            "\nThese fit, best first: how far they got from fine-tuning (0 %) to joint training (100 %) in our runs of "
            "published tables. Each was run in the tables that it is quoted with, by few seeds: a few points mean little."
        )
    for place, advice in enumerate(ranked, 1):
        yield from _described(f"{place}.", advice, needs)
    if others:
        yield f"\nThese fit{', too, but' if ranked else ';'} no published table places them here{_order(others, needs)}."
    for advice in others:
        yield from _described("-", advice, needs)
    if misfit:
        yield "\nThese do not fit."
    width = max((len(a.name) for a in misfit), default=0)
    for a in misfit:
        first, *rest = a.against
        yield f"  {a.name:{width}}  " + "; ".join([first + _weakness(a, needs), *rest])
    if fit:
        yield from _to_try(fit[:3], needs)


def _answered(answers: Answers) -> Iterator[str]:
    given = answers.model_dump(exclude_none=True)
    said = [f"{name.replace('_', ' ')} {value}" for name, value in given.items() if name != "scenario"]
    if answers.scenario:
        yield f"{SCENARIO[answers.scenario][0].upper()}{SCENARIO[answers.scenario][1:]}."
    if said:
        yield f"Given: {', '.join(said)}."
    if open_ := [f"--{n.replace('_', '-')}" for n in QUESTIONS if n not in given and _matters(n, given)]:
        yield f"Not answered, so taken not to matter: {', '.join(open_)}."


def _described(mark: str, a: Advice, needs: Needs) -> Iterator[str]:
    """What there is to say of a method that fits."""
    if a.traits is None:  # such a one never fits
        return
    kept = f": {100 * a.kept:.0f} % of the way" if a.kept is not None else ""
    yield f"\n{mark} {a.name} ({a.kind.__name__}){kept}"
    settings = [f"set {field}={value}" for field, value in a.settings.items()]
    yield f"   for       {'; '.join([a.traits.pro, *settings])}"
    yield f"   against   {a.traits.con}"
    yield f"   costs     {_cost(a.traits, needs)}"
    yield f"   measured  {_number(a.measured[0], needs) if a.measured else 'not in a table'}"
    yield from (f"             {_number(m, needs)}" for m in a.measured[1:])


def _cost(t: Traits, needs: Needs) -> str:
    tasks = needs.tasks or TASKS
    copies, step = t.copies_after(tasks), f"a step of about {t.step_of(tasks):.1f} plain ones"
    last = f" in the last of {tasks} tasks" if t.step_growth else ""
    size = f", {_bytes(BYTES * copies * needs.parameters)}" if needs.parameters and copies else ""
    grown = f" after {tasks} tasks" if len(t.copies) > 1 else ""
    keeps = [f"about {copies:.2g} {'copy' if copies == 1 else 'copies'} of the model{grown}{size}"] if copies else []
    if t.keeps_examples:
        places = room(needs, t)
        keeps.append("as many examples as you let it" if places is None else f"room for {places:,} examples")
    return f"{step}{last}; keeps {' and '.join(keeps) or 'nothing'}"


def _bytes(amount: float) -> str:
    """A size as people read it.

    >>> _bytes(1_913_640), _bytes(3e9)
    ('1.9 MB', '3.0 GB')
    """
    scale, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if amount >= s or u == "kB")
    return f"{amount / scale:.1f} {unit}"


def _number(m: Measured, needs: Needs) -> str:
    """A number with what is needed to judge it: where, how often, and both ends of the scale."""
    seeds = f"{len(m.accuracies)} seed{'s' * (len(m.accuracies) > 1)}"
    ends = [f"{name} {end:.1f}" for name, end in (("fine-tuning", m.finetune), ("joint", m.joint)) if end is not None]
    where = "" if needs.scenario else f"{m.scenario}-incremental: "
    settings = [f"{f}={v:g}" if isinstance(v, float) else f"{f}={v}" for f, v in m.settings.items()]
    facts = [", ".join(part) for part in ([m.title, seeds], ends, settings) if part]
    return f"{where}{spread(m.accuracies)} % in {m.table} {m.cell} ({'; '.join(facts)})"


def _weakness(a: Advice, needs: Needs) -> str:
    """The numbers behind a reason that is one of quality, which comes first."""
    if a.traits is None or needs.scenario not in a.traits.weak or a.name == "finetune":
        return ""
    numbers = [(f"{m.mean:.1f} % in {m.table}", m.finetune) for m in a.measured if m.finetune is not None]
    said = "; ".join(f"{number}, fine-tuning {end:.1f} %" for number, end in numbers)
    return f" ({said})" if said else ""


def _order(others: Sequence[Advice], needs: Needs) -> str:
    """By what they are ordered instead."""
    if len(others) < 2:
        return ""
    promised = needs.scenario == "task" and any(a.traits and a.traits.zero_forgetting for a in others)
    return f" ({'those that forget nothing first, then ' if promised else ''}the cheapest step first)"


def _to_try(best: Sequence[Advice], needs: Needs) -> Iterator[str]:
    """A command and three lines of Python that run as they stand."""
    names = ",".join(["finetune", *(a.name for a in best), "joint"])
    fields = "".join(f" --set {a.name}.{field}={value}" for a in best for field, value in a.settings.items())
    stream = " --stream online-digits" if needs.boundaries is False else ""
    yield "\nTry the first of them on the digits in the package, untuned:"
    yield f"  everlearn run{stream} --scenario {needs.scenario or 'all'} --methods {names}{fields} --seeds 3"
    settings = ", ".join(f"{field}={value!r}" for field, value in best[0].settings.items())
    kind, scenario = best[0].kind.__name__, needs.scenario or "task"
    yield "\nIn Python; streams.from_tasks makes a stream of your own data, and your own loop will do as well:"
    yield f"  from everlearn import {kind}, nets, run, streams"
    made = "online_digits" if needs.boundaries is False else "digits"
    yield f'  stream = streams.{made}(scenario="{scenario}")'
    yield f"  print(run(nets.mlp, {kind}({settings}), stream, epochs={1 if needs.boundaries is False else 10}))"


def _wrapped(part: str, width: int) -> list[str]:
    """A paragraph within a width; what goes on stands under what it belongs to. Code to copy is left whole."""
    head = part.lstrip("\n")
    if head.startswith(("  everlearn run", "  from ", "  stream", "  print")):
        return part.split("\n")
    margin = len(head) - len(head.lstrip())
    if margin:
        words = head.lstrip()
        gap = words.find("  ")
        margin += gap + len(words[gap:]) - len(words[gap:].lstrip()) if 0 < gap < 14 else 0
    whole = head.replace(" %", "\N{NO-BREAK SPACE}%")
    lines = textwrap.wrap(whole, width, subsequent_indent=" " * margin, break_long_words=False, break_on_hyphens=False)
    return [""] * (len(part) - len(head)) + [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
