"""Experiment files: reading, checking, changing and writing them.

An experiment is a TOML file: factors and their levels, fixed conditions, a workload, measures, a
design, repetitions, an order, and what a report shows. `load` reads one, checks every name and
value against what the workload declares, applies `--quick` and `--set`, and gives an `Experiment`.
Nothing of an `Experiment` is unchecked, so the runner and the report test nothing again.

Rules that are easy to miss:

- `[quick.factors]` and `[quick.fixed]` replace key by key. `[quick.repeat]` replaces `[repeat]`
  as a whole, so that a quick run does not inherit `until`.
- A quick run shows that everything works, and needs no quiet machine: its disturbed points count.
- `--set` comes after `[quick]`. One value for a parameter that is no factor makes it a fixed
  condition; several values make it a factor, the last one.
- Rules of `[[exclude]]` and `[[published]]` figures that name a level that is not run any more,
  because `--set` or `[quick]` removed it, are dropped. A level that no version of the file has is
  an error. A plot of interactions is dropped likewise where such a change leaves none to draw.
- An experiment without `[quick]` runs in full with `--quick` too.
- `Experiment.resolved()` is the file of exactly this run. It has no `[quick]`, and it has a `name`,
  because its file is called experiment.toml in every folder of results.

Failure: everything that is wrong with a file raises `ExperimentError`, and nothing else does.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tombolo_lab import design
from tombolo_lab.design import Cell, Design, Fraction, GeneratorError
from tombolo_lab.source import (
    QUICK_KEYS,
    REQUIRED,
    TOP_KEYS,
    ExperimentError,
    Source,
    Table,
    found_text,
    is_finite,
    listed,
    near,
    range_text,
)
from tombolo_lab.tomltext import KeyPath, document_text, key_text, value_text
from tombolo_lab.workloads import REGISTRY, Parameter, Workload

EXPERIMENTS = Path(__file__).resolve().parent / "experiments"
DEFAULT_SEED = 20261125
DEFAULT_TIMES = 10
# A sanity limit: more repetitions than this are taken for a mistake.
MOST_TIMES = 10_000


@dataclass(frozen=True)
class Repeat:
    """Repetitions (blocks): at least `times`.

    With `until`, more of them run until the half width of the 95 % interval of the primary measure
    is at most this part of the mean in each cell, or until `at_most` of them ran. No block begins
    after `minutes`.
    """

    times: int = DEFAULT_TIMES
    until: float | None = None
    at_most: int | None = None
    minutes: float | None = None


@dataclass(frozen=True)
class Disturbed:
    """When a point is marked and repeated: other work took more than `others_cpus` CPUs, or the
    hypervisor more than `stolen_cpus`. After `retries` more attempts it stays, marked. Where they
    `count`, no point is marked or repeated, and the reason stands in its notes."""

    others_cpus: float = 0.3
    stolen_cpus: float = 0.1
    retries: int = 2
    count: bool = False


@dataclass(frozen=True)
class Plot:
    """A plot of the report. See PLOT_ROLES for what x, y, z, curves and panels name."""

    kind: str
    x: str | None = None
    y: str | None = None
    z: str | None = None
    curves: str | None = None
    panels: tuple[str, ...] = ()
    log: str = ""  # the axes that are logarithmic: "", "x", "y" or "xy"
    title: str | None = None


@dataclass(frozen=True)
class Published:
    """A figure of others, in the unit of `measure`, with the conditions that differ from ours."""

    label: str
    source: str
    match: dict[str, object]
    measure: str
    value: float
    low: float | None
    high: float | None
    differs: str


@dataclass(frozen=True)
class Experiment:
    """A checked experiment. Factors and fixed conditions keep the order of the file."""

    name: str
    title: str
    about: str
    workload: str
    seed: int
    factors: dict[str, tuple]
    fixed: dict[str, object]
    exclude: tuple[dict[str, tuple], ...]
    measures: tuple[str, ...]
    primary: str
    correlations: tuple[tuple[str, str], ...]
    design: Design
    repeat: Repeat
    order: str
    disturbed: Disturbed
    plots: tuple[Plot, ...]
    published: tuple[Published, ...]
    path: Path
    together: tuple[str, ...] = ()  # factors whose combinations stand together within a set-up

    @property
    def fraction(self) -> Fraction | None:
        """The plan of a fractional design, with its defining relation and resolution."""
        if self.design.kind != "fractional":
            return None
        return design.fraction(self.factors, self.design.generators)

    def cells(self) -> list[Cell]:
        """The cells in canonical order (the last factor changes fastest): factor → level."""
        if plan := self.fraction:
            return design.fractional_cells(self.factors, plan)
        return design.full_cells(self.factors, self.exclude)

    def point(self, cell: Cell) -> Cell:
        """What the workload is given for a cell: its defaults, fixed conditions and the levels."""
        parameters = workload_class(self.workload).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        return {**defaults, **self.fixed, **cell}

    def setup_factors(self) -> tuple[str, ...]:
        """The factors whose change needs a new set-up."""
        parameters = workload_class(self.workload).parameters
        return tuple(name for name in self.factors if parameters[name].setup)

    def block(self, number: int) -> list[Cell]:
        """The order of the cells in block `number`, from 0; it does not depend on other blocks."""
        keys = (self.setup_factors(), self.together)
        return design.block_order(self.cells(), self.order, self.seed, number, *keys)

    def blocks(self) -> Iterator[list[Cell]]:
        """The orders of block 0, 1, 2 … without end.

        randomised: cells that share a set-up stand together; their groups, and the cells in each
        group, are shuffled with the seed. interleaved: the canonical order in each block. given:
        the canonical order too, but all repetitions of a cell run before the next cell does.
        """
        keys = (self.setup_factors(), self.together)
        return design.blocks(self.cells(), self.order, self.seed, *keys)

    def set_ups(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """The groups of `cells` that share a set-up in the first repetition.

        Cells share one when they stand together and agree in all factors that need a new set-up. In
        the order "given" each has its own.
        """
        if self.order == "given":
            return [[cell] for cell in cells]
        setup = self.setup_factors()
        order = design.block_order(cells, self.order, self.seed, 0, setup, self.together)
        groups = itertools.groupby(order, lambda cell: [cell[name] for name in setup])
        return [list(group) for _, group in groups]

    def expected_seconds(self, cells: Sequence[Cell] | None = None) -> tuple[float, float]:
        """The least and the greatest expected duration of `cells` (by default all) in seconds.

        They differ when `repeat.until` decides. Each repetition has fresh set-ups. Disturbed points
        that are repeated are not counted.
        """
        workload = workload_class(self.workload)()
        cells = self.cells() if cells is None else cells
        one = sum(workload.seconds(self.point(cell)) for cell in cells)
        one += sum(workload.setup_seconds(self.point(group[0])) for group in self.set_ups(cells))
        least, most = one * self.repeat.times, one * (self.repeat.at_most or self.repeat.times)
        if self.repeat.minutes is not None:
            # The block that runs at that moment is finished.
            limit = self.repeat.minutes * 60 + one
            least, most = min(least, limit), min(most, limit)
        return least, most

    def resolved(self) -> str:
        """The TOML text of this experiment as it is run; `load` makes an equal one of it."""

        def table(value: object, **changed: object) -> dict:
            fields = {**dataclasses.asdict(value), **changed}
            return {key: item for key, item in fields.items() if item not in (None, (), {}, "")}

        data: dict[str, object] = {
            key: getattr(self, key)
            for key in ("name", "title", "about", "workload", "seed", "measures", "primary")
        }
        if self.correlations:
            data["correlations"] = self.correlations
        data["factors"] = self.factors
        if self.fixed:
            data["fixed"] = self.fixed
        data["design"] = table(self.design)
        data["repeat"] = table(self.repeat)
        data["order"] = {"kind": self.order}
        if self.together:
            data["order"]["together"] = list(self.together)
        data["disturbed"] = table(self.disturbed)
        for key in ("exclude", "plots", "published"):
            if elements := getattr(self, key):
                data[key] = [dict(e) if isinstance(e, dict) else table(e) for e in elements]
        return document_text(data)


@functools.cache
def _imported(target: str) -> type[Workload]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def workload_class(name: str) -> type[Workload]:
    """The class of a workload; KeyError when the registry has none of this name."""
    return _imported(REGISTRY[name])


def names() -> list[str]:
    """The names of the built-in experiments, sorted."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.toml"))


def find(name_or_path: str) -> Path:
    """The file of a built-in experiment, or the path itself when it has a slash or ends in .toml.

    ExperimentError when there is no such built-in experiment; whether a path exists is not checked.
    """
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        return Path(name_or_path)
    if name_or_path in names():
        return EXPERIMENTS / f"{name_or_path}.toml"
    raise ExperimentError(
        "",
        f"a file that ends in .toml, or an experiment: {listed(names())}",
        value_text(name_or_path),
        near=near(name_or_path, names()),
    )


def load(name_or_path: str, settings: Sequence[str] = (), quick: bool = False) -> Experiment:
    """Reads and checks an experiment.

    `settings` are texts of `--set`, such as "offered=100,200". ExperimentError when the file cannot
    be read or is wrong; its [quick] is checked whether `quick` is asked for or not.
    """
    path = find(str(name_or_path))
    source = Source.read(path)
    if "quick" in source.data and not (quick and not settings):
        _Reader(source, (), True).experiment()
    return _Reader(source, tuple(settings), quick).experiment()


# ---- reading -------------------------------------------------------------------------------------
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


# What each key of a plot names, by kind: a factor or a measure, and whether it is needed. A missing
# measure is the primary one.
PLOT_ROLES: dict[str, dict[str, tuple[str, ...]]] = {
    "curve": {"needed": ("x",), "factors": ("x", "curves"), "measures": ("y",)},
    "bars": {"needed": ("x",), "factors": ("x", "curves"), "measures": ("y",)},
    "box": {"needed": ("x",), "factors": ("x", "curves"), "measures": ("y",)},
    "histogram": {"needed": (), "factors": ("curves",), "measures": ("x",)},
    "heat": {"needed": ("x", "y"), "factors": ("x", "y"), "measures": ("z",)},
    "effects": {"needed": (), "factors": (), "measures": ("y",)},
    "interactions": {"needed": (), "factors": (), "measures": ("y",)},
    "percentiles": {"needed": (), "factors": ("curves",), "measures": ("y",)},
}
# Kinds that choose their panels by the effects, on plain axes: lines that are parallel on one scale
# are not on another.
PLAIN_KINDS = ("effects", "interactions")


def parameter_text(parameter: Parameter) -> str:
    """What values a parameter takes, in words."""
    if parameter.choices is not None:
        return f"one of {listed([_bare(choice) for choice in parameter.choices])}"
    low = -math.inf if parameter.low is None else parameter.low
    high = math.inf if parameter.high is None else parameter.high
    text = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
    words = range_text(text[parameter.kind], low, high)
    return f"{words} ({parameter.unit})" if parameter.unit else words


def _bare(value: object) -> str:
    """A value as it is written after `--set`."""
    return value if isinstance(value, str) else value_text(value)


class _Bad(Exception):
    """A value that a parameter does not take: expected, found, near."""

    def __init__(self, expected: str, found: str, near: str | None = None):
        super().__init__(expected, found, near)


def _checked(parameter: Parameter, value: object) -> object:
    """`value` in the parameter's kind; _Bad when the parameter does not take it."""
    wrong = functools.partial(_Bad, parameter_text(parameter), found_text(value))
    if parameter.kind in (int, float) and not is_finite(value):
        raise wrong()
    if parameter.kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, parameter.kind):
        raise wrong()
    if parameter.choices is not None and value not in parameter.choices:
        raise wrong(near(_bare(value), parameter.choices))
    too_low = parameter.low is not None and value < parameter.low
    if too_low or (parameter.high is not None and value > parameter.high):
        raise wrong()
    return value


_NUMBER = re.compile(r"[0-9.eE+-]+")


def _from_text(parameter: Parameter, text: str) -> object:
    """The value that a text of `--set` means; _Bad when it means none."""
    try:
        if parameter.kind is bool:
            value = {"true": True, "false": False}[text.lower()]
        elif not text or parameter.kind in (int, float) and not _NUMBER.fullmatch(text):
            # Python takes 1_000 and digits of other scripts, too; a file does not.
            raise ValueError(text)
        else:
            value = parameter.kind(text)
    except (KeyError, ValueError):
        choices = () if parameter.choices is None else parameter.choices
        raise _Bad(parameter_text(parameter), f'"{text}"', near(text, choices)) from None
    return _checked(parameter, value)


def no_pairs(factors: Mapping[str, Sequence]) -> str | None:
    """Why factors have no interactions of two to draw: all that vary need two levels. None where
    they have some."""
    counts = {name: len(levels) for name, levels in factors.items() if len(levels) > 1}
    for name, count in counts.items():
        if count > 2:
            return f"{count} levels of {name}"
    return None if len(counts) > 1 else f"{len(counts)} of two levels"


def _twice(values: Sequence[object]) -> object | None:
    """The first value that a sequence has twice, or None."""
    return next((value for index, value in enumerate(values) if value in values[:index]), None)


class _Reader:
    """Makes one version of an experiment of a file: in full or quick, with settings."""

    def __init__(self, source: Source, settings: tuple[str, ...], quick: bool):
        self.source = source
        self.settings = settings
        self.quick = quick
        self.top = Table(source, (), source.data)

    def experiment(self) -> Experiment:
        top = self.top
        top.only(TOP_KEYS, "a key of an experiment")
        workload = top.choice("workload", tuple(REGISTRY))
        self.declared = workload_class(workload)
        self.parameters = self.declared.parameters
        factors, fixed = self.conditions()
        exclude = self.exclude(factors)
        has_pairs = not exclude and no_pairs(factors) is None
        measures = self.measures("measures", tuple(self.declared.measures))
        self.chosen = measures
        primary = top.choice("primary", measures, measures[0])
        experiment = Experiment(
            name=self.name(),
            title=top.text("title"),
            about=top.text("about"),
            workload=workload,
            seed=top.number("seed", 0, default=DEFAULT_SEED, whole=True),
            factors=factors,
            fixed=fixed,
            exclude=exclude,
            measures=measures,
            primary=primary,
            correlations=self.correlations(),
            design=self.design(factors),
            repeat=self.repeat(),
            order=self.order(),
            together=self.together(factors),
            disturbed=self.disturbed(),
            plots=tuple(
                plot
                for plot in (self.plot(plot, factors, primary) for plot in top.tables("plots"))
                if has_pairs or plot.kind != "interactions"
            ),
            published=self.published(factors),
            path=self.source.path,
        )
        self.check_size(experiment)
        return experiment

    def name(self) -> str:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", self.source.path.stem).lstrip("._-")
        name = self.top.text("name", stem or "experiment")
        if not _NAME.fullmatch(name):
            self.top.fail("name", "letters, digits and . _ -, and a letter or digit first", name)
        return name

    def check_size(self, experiment: Experiment) -> None:
        if not experiment.cells():
            self.top.fail("exclude", "rules that leave at least one cell", "no cell is left")

    # ---- factors and fixed conditions ------------------------------------------------------------
    def known(self, table: Table, key: str) -> Parameter:
        """The parameter of this name; fails when the workload has none."""
        if key not in self.parameters:
            table.unknown(key, self.parameters, f"a parameter of the workload {self.declared.name}")
        return self.parameters[key]

    def levels(self, table: Table, key: str) -> tuple:
        parameter = self.known(table, key)
        values = table.data[key]
        expected = f"an array of levels, each {parameter_text(parameter)}"
        if not isinstance(values, list) or not values:
            table.fail(key, expected, "an empty array" if values == [] else found_text(values))
        levels = []
        for index, value in enumerate(values):
            try:
                level = _checked(parameter, value)
            except _Bad as bad:
                self.source.fail((*table.path, key, index), *bad.args)
            if level in levels:
                self.source.fail(
                    (*table.path, key, index), "each level once", f"{found_text(value)} again"
                )
            levels.append(level)
        return tuple(levels)

    def fixed_value(self, table: Table, key: str) -> object:
        parameter = self.known(table, key)
        try:
            return _checked(parameter, table.data[key])
        except _Bad as bad:
            table.fail(key, *bad.args)

    def conditions(self) -> tuple[dict[str, tuple], dict[str, object]]:
        """Factors and fixed conditions of this version; notes the levels of all versions."""
        top = self.top
        table = top.table("factors", required=True)
        if not table.data:
            top.fail("factors", "at least one factor", "an empty table")
        factors = {key: self.levels(table, key) for key in table.data}
        self.file_factors = dict(factors)
        table = top.table("fixed")
        fixed = {key: self.fixed_value(table, key) for key in table.data}
        for key in fixed:
            if key in factors:
                table.fail(key, "a parameter that is no factor", "a factor of this name")
        self.all_levels = {key: set(levels) for key, levels in factors.items()}
        self.apply_quick(factors, fixed)
        for setting, name, values in self.parsed_settings():
            self.apply_setting(setting, name, values, factors, fixed)
        for key, levels in factors.items():
            self.all_levels.setdefault(key, set()).update(levels)
        return factors, fixed

    def apply_quick(self, factors: dict[str, tuple], fixed: dict[str, object]) -> None:
        quick = self.top.table("quick")
        quick.only(QUICK_KEYS, "a table of [quick]")
        table = quick.table("factors")
        table.only(tuple(factors), "a factor of the file")
        changed = {key: self.levels(table, key) for key in table.data}
        for key, levels in changed.items():
            self.all_levels[key].update(levels)
        if self.quick:
            factors.update(changed)
        table = quick.table("fixed")
        changed = {key: self.fixed_value(table, key) for key in table.data}
        for key in changed:
            if key in factors:
                table.fail(key, "a parameter that is no factor", f"the factor {key}")
        if self.quick:
            fixed.update(changed)

    def parsed_settings(self) -> list[tuple[str, str, list]]:
        """Each setting as its text, its parameter and its values."""
        parsed: list[tuple[str, str, list]] = []
        for setting in self.settings:
            shown = f"--set {setting}"
            name, equals, text = setting.partition("=")
            name = name.strip()
            if not equals or not text.strip():
                raise ExperimentError(shown, "factor=level,level…", f'"{setting}"')
            if name not in self.parameters:
                expected = f"a parameter of the workload {self.declared.name}: "
                expected += listed(self.parameters)
                raise ExperimentError(
                    shown, expected, f'"{name}"', near=near(name, self.parameters)
                )
            if any(name == other for _, other, _ in parsed):
                raise ExperimentError(shown, "one --set for each name", f"{name} again")
            try:
                values = [
                    _from_text(self.parameters[name], part.strip()) for part in text.split(",")
                ]
            except _Bad as bad:
                expected, found, close = bad.args
                raise ExperimentError(shown, expected, found, key=name, near=close) from None
            if (again := _twice(values)) is not None:
                raise ExperimentError(shown, "each level once", f"{_bare(again)} again", key=name)
            parsed.append((shown, name, values))
        return parsed

    def apply_setting(
        self,
        shown: str,
        name: str,
        values: list,
        factors: dict[str, tuple],
        fixed: dict[str, object],
    ) -> None:
        if name in factors or len(values) > 1:
            fixed.pop(name, None)
            factors[name] = tuple(values)
        else:
            fixed[name] = values[0]
        kind = self.top.table("design").data.get("kind")
        if kind == "fractional" and name in factors and len(values) != 2:
            raise ExperimentError(
                shown,
                "two levels for each factor of a fractional design",
                f"{len(values)} for {name}",
                key=name,
            )

    def exclude(self, factors: dict[str, tuple]) -> tuple[dict[str, tuple], ...]:
        """The rules that still match something, each value as a tuple of levels."""
        rules = []
        for table in self.top.tables("exclude"):
            table.only(tuple(self.all_levels), "a factor")
            if not table.data:
                self.source.fail(table.path, "at least one factor", "an empty table")
            rule = {}
            for key, value in table.data.items():
                values = value if isinstance(value, list) else [value]
                if not values:
                    table.fail(key, "a level or an array of levels", "an empty array")
                known = [self.level_of(table, key, item) for item in values]
                # A factor that this version does not have any more matches nothing.
                rule[key] = tuple(level for level in known if level in factors.get(key, ()))
            if all(rule.values()):
                rules.append(rule)
        return tuple(rules)

    def level_of(self, table: Table, key: str, value: object) -> object:
        """`value` as a level of the factor `key` in some version of the file."""
        levels = self.all_levels[key]
        expected = f"a level of {key}: {listed(sorted(map(_bare, levels)))}"
        try:
            level = _checked(self.parameters[key], value)
        except _Bad:
            level = None
        if level is None or level not in levels:
            close = near(_bare(value), levels) if isinstance(value, str) else None
            table.fail(key, expected, found_text(value), close)
        return level

    # ---- measures, design, repetitions -----------------------------------------------------------
    def measures(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """An array of distinct names of the workload's measures."""
        declared = self.declared.measures
        expected = f"an array of measures: {listed(declared)}"
        if key not in self.top:
            return default
        chosen = self.top.array(key, expected)
        if not chosen:
            self.top.fail(key, expected, "an empty array")
        for index, name in enumerate(chosen):
            if not isinstance(name, str) or name not in declared:
                self.source.fail(
                    (key, index),
                    f"a measure of the workload: {listed(declared)}",
                    found_text(name),
                    near(str(name), declared),
                )
            if name in chosen[:index]:
                self.source.fail((key, index), "each measure once", f"{found_text(name)} again")
        return tuple(chosen)

    def correlations(self) -> tuple[tuple[str, str], ...]:
        """Pairs of measures."""
        expected = "an array of pairs of measures"
        pairs = []
        for index, pair in enumerate(self.top.array("correlations", expected)):
            path = ("correlations", index)
            if not isinstance(pair, list) or len(pair) != 2:
                self.source.fail(path, "a pair of measures", found_text(pair))
            for place, name in enumerate(pair):
                if not isinstance(name, str) or name not in self.chosen:
                    self.source.fail(
                        (*path, place),
                        f"a measure: {listed(self.chosen)}",
                        found_text(name),
                        near(str(name), self.chosen),
                    )
            if pair[0] == pair[1]:
                self.source.fail(path, "two different measures", f"{found_text(pair[0])} twice")
            pairs.append((pair[0], pair[1]))
        return tuple(pairs)

    def design(self, factors: dict[str, tuple]) -> Design:
        table = self.top.table("design")
        table.only(("kind", "generators"), "a key of [design]")
        kind = table.choice("kind", design.KINDS, "full")
        generators = table.array("generators", "an array of texts")
        for index, generator in enumerate(generators):
            if not isinstance(generator, str):
                path = (*table.path, "generators", index)
                self.source.fail(path, 'a text such as "D=ABC"', found_text(generator))
        if kind == "fractional":
            return self.fractional(factors, generators)
        if generators:
            table.fail("generators", 'no generators, or kind = "fractional"', generators[0])
        if (count := design.combinations(factors)) > design.MOST_CELLS:
            self.top.fail("factors", f"at most {design.MOST_CELLS} combinations", count)
        return Design()

    def fractional(self, factors: dict[str, tuple], generators: list[str]) -> Design:
        if "exclude" in self.top and self.source.data["exclude"]:
            self.top.fail("exclude", "no excluded cells in a fractional design", "a rule")
        try:
            plan = design.fraction(factors, generators)
        except GeneratorError as error:
            path: KeyPath = ("design", "generators")
            if error.index is not None:
                path += (error.index,)
            elif error.factor is not None:
                path = ("factors", error.factor)
            self.source.fail(path, error.expected, error.found)
        if plan.runs > design.MOST_CELLS:
            self.top.fail("factors", f"at most {design.MOST_CELLS} cells", plan.runs)
        return Design("fractional", tuple(generators))

    def repeat(self) -> Repeat:
        result = self.repeat_of(self.top.table("repeat"))
        quick = self.top.table("quick")
        if "repeat" in quick:
            replaced = self.repeat_of(quick.table("repeat"))
            result = replaced if self.quick else result
        return result

    @staticmethod
    def repeat_of(table: Table) -> Repeat:
        keys = [field.name for field in dataclasses.fields(Repeat)]
        table.only(keys, f"a key of [{key_text(table.path)}]")
        times = table.number("times", 1, MOST_TIMES, DEFAULT_TIMES, whole=True)
        until = table.number("until", 0, 1, None, above=True)
        if until is None and "at_most" in table:
            table.fail("at_most", "at_most only together with until", "no until")
        if until is not None and times < 2:
            table.fail("times", "at least 2 with until, because an interval needs two", times)
        at_most = table.number(
            "at_most", times, MOST_TIMES, None if until is None else REQUIRED, whole=True
        )
        minutes = table.number("minutes", 0, default=None, above=True)
        return Repeat(times, until, at_most, minutes)

    def order(self) -> str:
        table = self.top.table("order")
        table.only(("kind", "together"), "a key of [order]")
        return table.choice("kind", design.ORDERS, design.ORDERS[0])

    def together(self, factors: dict[str, tuple]) -> tuple[str, ...]:
        """The factors whose combinations stand together."""
        table = self.top.table("order")
        names = table.array("together", "an array of factors")
        for index, name in enumerate(names):
            path = (*table.path, "together", index)
            if not isinstance(name, str) or name not in factors:
                expected, found = f"a factor: {listed(factors)}", found_text(name)
                close = near(name, factors) if isinstance(name, str) else None
                self.source.fail(path, expected, found, close)
            if name in names[:index]:
                self.source.fail(path, "each factor once", f"{found_text(name)} again")
        return tuple(names)

    def disturbed(self) -> Disturbed:
        table, default = self.top.table("disturbed"), Disturbed()
        table.only([field.name for field in dataclasses.fields(Disturbed)], "a key of [disturbed]")
        return Disturbed(
            table.number("others_cpus", 0, default=default.others_cpus),
            table.number("stolen_cpus", 0, default=default.stolen_cpus),
            table.number("retries", 0, 100, default.retries, whole=True),
            table.flag("count", default.count) or (self.quick and "quick" in self.top),
        )

    # ---- what the report shows -------------------------------------------------------------------
    def plot(self, table: Table, factors: dict[str, tuple], primary: str) -> Plot:
        table.only([field.name for field in dataclasses.fields(Plot)], "a key of [[plots]]")
        kind = table.choice("kind", tuple(PLOT_ROLES))
        roles = PLOT_ROLES[kind]
        used: dict[str, str | None] = {}
        for key in ("x", "y", "z", "curves"):
            if key in roles["factors"]:
                default = REQUIRED if key in roles["needed"] else None
                used[key] = table.choice(key, tuple(factors), default)
            elif key in roles["measures"]:
                used[key] = table.choice(key, self.chosen, primary)
            elif key in table:
                table.fail(key, f"no {key} in a plot of kind {kind}", found_text(table.data[key]))
        if kind == "interactions":
            self.check_pairs(table)
        if kind in PLAIN_KINDS:
            for key in ("panels", "log"):
                if key in table:
                    expected = f"no {key} in a plot of kind {kind}"
                    table.fail(key, expected, found_text(table.data[key]))
        panels = table.array("panels", "an array of factors")
        for index, panel in enumerate(panels):
            if not isinstance(panel, str) or panel not in factors:
                self.source.fail(
                    (*table.path, "panels", index),
                    f"a factor: {listed(factors)}",
                    found_text(panel),
                    near(str(panel), factors),
                )
        named = [used[key] for key in roles["factors"] if used.get(key)] + panels
        if (again := _twice(named)) is not None:
            table.fail("kind", "each factor in one place of a plot", f"{again} in two")
        log = table.choice("log", ("x", "y", "xy"), "")
        return Plot(kind, panels=tuple(panels), log=log, title=table.text("title", None), **used)

    def check_pairs(self, table: Table) -> None:
        """Fails where the file itself has no interactions to draw."""
        if wrong := no_pairs(self.file_factors):
            table.fail("kind", "two factors or more, of two levels each, for interactions", wrong)
        if self.source.data.get("exclude"):
            table.fail("kind", "no excluded cells beside a plot of interactions", "[[exclude]]")

    def published(self, factors: dict[str, tuple]) -> tuple[Published, ...]:
        """The figures that are comparable with a cell of this version."""
        figures = []
        for table in self.top.tables("published"):
            keys = [field.name for field in dataclasses.fields(Published)]
            table.only(keys, "a key of [[published]]")
            value = table.number("value")
            match = table.table("match")
            match.only(tuple(self.all_levels), "a factor")
            levels = {key: self.level_of(match, key, level) for key, level in match.data.items()}
            figure = Published(
                label=table.text("label"),
                source=table.text("source"),
                match=levels,
                measure=table.choice("measure", self.chosen),
                value=value,
                low=table.number("low", high=value, default=None),
                high=table.number("high", low=value, default=None),
                differs=table.text("differs"),
            )
            if all(level in factors.get(key, ()) for key, level in levels.items()):
                figures.append(figure)
        return tuple(figures)
