"""Write what lists the methods: the tables of README and docs/, the API page, and the types of the public names.

    make tables

Run it after a method was added, or its traits or the first line of its docstring changed. What it writes is committed,
because README and docs/ are read without a build; tests/test_tables.py fails if it is out of date.
"""

import inspect
import json
import sys
import textwrap
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))  # the methods of this source tree, not of an installed package

import everlearn.methods
from everlearn.core.scenario import SCENARIOS
from everlearn.core.traits import FAMILIES, traits_of
from everlearn.methods import METHODS
from everlearn.runtime.files import write

LINE_LENGTH = 120
NOTE = "written by make tables"


def main():
    """Write the files that are out of date, and print their names."""
    for name, text in render_files().items():
        path = ROOT / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write(path, text.encode())
            print(f"updated {name}")


def render_files():
    """Return the text of each file that lists methods, by its path."""
    blocks = {
        "README.md": {"methods": methods_by_family()},
        "docs/methods/README.md": {"methods": table_of_methods()},
        "docs/choosing.md": {"needs": table_of_needs(), "pros": table_of_pros_and_cons()},
        "docs/defaults.md": {"defaults": table_of_defaults()},
        "docs/api/methods.rst": {"classes": class_directives()},
    }
    files = {file: replace_blocks(file, blocks_of_file) for file, blocks_of_file in blocks.items()}
    return files | {"src/everlearn/methods/__init__.pyi": type_stub()}


def replace_blocks(file, blocks):
    """Return the text of a file with new lines between the comments ``NAME: written by …`` and ``end of NAME``."""
    lines = (ROOT / file).read_text(encoding="utf-8").split("\n")
    for name, block in blocks.items():
        for line in block:
            if len(line) > LINE_LENGTH:
                raise SystemExit(
                    f"{file}: this line has {len(line)} characters, allowed: {LINE_LENGTH}. Shorten the first line of "
                    f"the docstring, or pro and con of the traits.\n{line}"
                )
        marks = (f" {name}: {NOTE}", f" end of {name}")
        indices = [index for mark in marks for index, line in enumerate(lines) if mark in line]
        if len(indices) != 2:
            raise SystemExit(f"{file}: the comments{marks[0]} and{marks[1]} should occur once each.")
        start, end = indices
        lines[start + 1 : end] = ["", *block, ""]
    return "\n".join(lines)


def families():
    """Return the names of the methods of each family that has any, in the order of METHODS."""
    names = {family: [name for name in METHODS if traits(name).family == family] for family in FAMILIES}
    return {family: members for family, members in names.items() if members}


def traits(name):
    """Return the traits of a method of the library, which must have some."""
    method_traits = traits_of(METHODS[name])
    if method_traits is None:
        raise SystemExit(f"{name}: its class has no traits of its own. Add: traits = Traits(family=…, pro=…, con=…)")
    return method_traits


def idea(documented):
    """Return what the first line of a docstring says after a colon: ``Name (paper): idea.``"""
    docstring = inspect.getdoc(documented)
    if not docstring:
        raise SystemExit(f"{documented.__name__} has no docstring: its first line should read 'Name (paper): idea.'")
    first_line = docstring.split("\n")[0]
    _, _, text = first_line.partition(": ")
    return (text or first_line).rstrip(".")


def page(name):
    """Return the page of a method in docs/methods: the one whose third line shows how to create it, as in `EWC(…)`."""
    signature = f"`{METHODS[name].__name__}("
    for path in sorted((ROOT / "docs/methods").glob("*.md")):
        lines = path.read_text(encoding="utf-8").split("\n")
        if len(lines) > 2 and signature in lines[2]:
            return path.name
    raise SystemExit(f"{name}: no page in docs/methods has {signature}…)` in its third line, under the title.")


def methods_by_family():
    """Return a list of the families with their methods."""
    lines = []
    for family, names in families().items():
        if family == "baselines":
            names = [*names, "joint"]
        members = ", ".join(f"`{name}`" for name in names)
        item = f"- **{family}** ({idea(import_module(f'everlearn.methods.{family}'))}): {members}"
        lines += textwrap.wrap(item, LINE_LENGTH, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def table_of_methods():
    """Return a table of all methods with their ideas, by family."""
    lines = ["| name | class | idea |", "|---|---|---|"]
    for family, names in families().items():
        lines.append(f"| **{family}** | | |")
        for name in names:
            method_class = METHODS[name]
            lines.append(f"| [`{name}`]({page(name)}) | `{method_class.__name__}` | {idea(method_class)} |")
        if family == "baselines":
            lines.append("| [`joint`](joint.md) | `stream.joint()` | train on all tasks together: the upper bound |")
    return lines


def table_of_needs():
    """Return a table of what each method needs, guarantees and costs."""
    columns = [*SCENARIOS, "zero forgetting", "grows", "labels", "boundaries", "pretrained", "stores", "step"]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for names in families().values():
        lines += [f"| `{name}` | {' | '.join(needs_and_costs(traits(name)))} |" for name in names]
    return lines


def needs_and_costs(traits):
    """Return the cells of a method in the table of needs."""
    scenarios = dict.fromkeys(SCENARIOS, "yes") | dict.fromkeys(traits.weak, "no")
    if traits.needs_task:
        scenarios |= {"domain": "infers", "class": "infers"}
    boundaries = "yes" if traits.without_boundaries is None else "no"
    if traits.without_boundaries:
        boundaries += f", with {', '.join(f'`{field}`' for field in traits.without_boundaries)}"
    stored = [traits.memory] if traits.memory != "0" or not traits.keeps_examples else []
    if not traits.copies_scale:
        stored = [f"statistics, here {traits.memory}"]
    if traits.keeps_examples:
        stored.append("examples")
    step = "not measured" if traits.step is None else f"{traits.step:g}"
    if traits.step is not None and traits.step_growth:
        step += f" + {traits.step_growth:g} (N - 3)"
    answers = ["yes" if trait else "no" for trait in (traits.zero_forgetting, traits.grows, traits.needs_labels)]
    pretrained = "yes" if traits.needs_pretrained else "no"
    return [*scenarios.values(), *answers, boundaries, pretrained, " and ".join(stored), step]


def table_of_pros_and_cons():
    """Return a table of the main advantage and disadvantage of each method."""
    lines = ["| | for | against |", "|---|---|---|"]
    for names in families().values():
        lines += [f"| `{name}` | {traits(name).pro} | {traits(name).con} |" for name in names]
    return lines


def table_of_defaults():
    """Return a table of what benchmarks/defaults.py has recorded: the gains of other values over each default."""
    record = json.loads((ROOT / "docs/results/defaults.json").read_text(encoding="utf-8"))
    lines = ["| | default before | gains of other values |", "|---|---|---|"]
    for name, method in record["methods"].items():
        for field, recorded in method["fields"].items():
            cells = []
            for candidate in recorded["candidates"]:
                cell = f"{show(candidate['value'])}: refused"
                if candidate["gain"] is not None:
                    cell = f"{show(candidate['value'])}: {candidate['gain']:+.1f} ± {candidate['standard_error']:.1f}"
                is_chosen = candidate["value"] == recorded["decision"]
                mark = "" if candidate["eligible"] else " †"
                cells.append(f"**{cell}**" if is_chosen else cell + mark)
            lines.append(f"| `{name}.{field}` | {show(recorded['default'])} | {', '.join(cells)} |")
    return lines


def show(value):
    """Return a value of a field as a reader would write it."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def class_directives():
    """Return the sections of the API page."""
    lines = []
    for family, names in families().items():
        lines += [family.capitalize(), "-" * len(family), ""]
        for name in names:
            # The base class of all methods is on the page of building blocks.
            if name != "finetune":
                lines += [f".. autoclass:: everlearn.{METHODS[name].__name__}", "   :show-inheritance:", ""]
    return lines[:-1]


def type_stub():
    """Return what a type checker reads instead of everlearn.methods, whose names are imported on first use."""
    classes_by_module = {}
    for target in everlearn.methods._TARGETS.values():
        module, _, name = target.partition(":")
        classes_by_module.setdefault(module, []).append(name)
    # The order of ruff: constants before other names.
    sort = lambda names: sorted(names, key=lambda name: (not name.isupper(), name))
    lines = [f"# {NOTE.capitalize()} (docs/tables.py). Type checkers read it instead of __init__.py.", ""]
    for module in sorted([*classes_by_module, "everlearn.runtime.lazy_imports"]):
        names = classes_by_module.get(module, ["LazyTable"])
        lines.append(f"from {module} import {', '.join(sort(names))}")
    lines += ["", "__all__ = ["]
    lines += [f'    "{name}",' for name in sort(everlearn.methods.__all__)]
    lines += ["]", "", "METHODS: LazyTable[type[Method]]", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
