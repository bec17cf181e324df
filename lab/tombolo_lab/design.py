"""Designs: which cells an experiment has, and in which order a block of repetitions runs them.

A cell is one combination of factor levels: a dict from factor to level. A full design has every
combination. A fractional two-level design, 2^(k-p), has the half, quarter … of them that satisfies
p generators, so that main effects can be estimated from fewer runs.

Conventions, which `tombolo_lab.effects` shares:

- Factors have the letters A, B, C … in the order of the file. The letter I is left out, because it
  stands for the identity in a defining relation. A design therefore has at most 25 factors with
  letters.
- The first level of a factor is coded -1 and the second +1.
- The generator "D=ABC" says that the code of D is the product of the codes of A, B and C; "E=-AB"
  says that E is minus the product of A and B.
- Canonical order: the last factor changes fastest.

Sources: Box, Hunter and Hunter, "Statistics for Experimenters", 2nd edition 2005, chapter 6;
Jain, "The Art of Computer Systems Performance Analysis", 1991, chapter 19; NIST/SEMATECH e-Handbook
of Statistical Methods, section 5.3.3.4.

Everything here is pure: the same arguments give the same result on every machine.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tombolo_lab import LabError

Cell = dict[str, object]

KINDS = ("full", "fractional")
ORDERS = ("randomised", "interleaved", "given")
# Without I, the identity.
LETTERS = "ABCDEFGHJKLMNOPQRSTUVWXYZ"
# More cells than this are taken for a mistake: a block of them would run for more than a day.
MOST_CELLS = 100_000
# With fewer than three, main effects are confounded with each other or with the mean.
LEAST_RESOLUTION = 3


class GeneratorError(LabError):
    """A fractional design that cannot be built.

    `index` is the position of the wrong generator, or None when they are wrong together; `factor`
    is the factor at fault when it is not the generators.
    """

    def __init__(self, index: int | None, expected: str, found: str, factor: str | None = None):
        super().__init__(f"expected {expected}, found {found}")
        self.index = index
        self.factor = factor
        self.expected = expected
        self.found = found


@dataclass(frozen=True)
class Design:
    """How cells are chosen: `kind` is one of KINDS; `generators` belong to a fractional design."""

    kind: str = "full"
    generators: tuple[str, ...] = ()


@dataclass(frozen=True, order=True)
class Word:
    """A product of factors that is constant in a fraction. Words sort by length, then letters."""

    length: int = field(init=False)
    letters: str  # in the order of LETTERS, each once
    sign: int = 1  # the constant: +1 or -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", len(self.letters))

    def __mul__(self, other: Word) -> Word:
        """The product: a letter in both words cancels, because the square of a code is 1."""
        letters = set(self.letters) ^ set(other.letters)
        return Word("".join(sorted(letters)), self.sign * other.sign)

    def __str__(self) -> str:
        return ("-" if self.sign < 0 else "") + (self.letters or "I")


@dataclass(frozen=True)
class Fraction:
    """A 2^(k-p) design: its factors, and all words of its defining relation except I itself."""

    factors: tuple[str, ...]
    generators: tuple[str, ...]
    words: tuple[Word, ...]

    @property
    def runs(self) -> int:
        """The number of cells."""
        return 2 ** (len(self.factors) - len(self.generators))

    @property
    def resolution(self) -> int:
        """The length of the shortest word: at R, effects of p factors are clear of those of less
        than R-p factors."""
        return self.words[0].length

    @property
    def relation(self) -> str:
        """The defining relation, such as "I = ABCD = -ABE = -CDE"."""
        return " = ".join(["I", *map(str, self.words)])

    def aliases(self, effect: str) -> tuple[Word, ...]:
        """The effects that cannot be told from `effect`, a word of letters such as "AB"."""
        return tuple(sorted(Word("".join(sorted(effect))) * word for word in self.words))

    def __str__(self) -> str:
        k, p = len(self.factors), len(self.generators)
        return f"2^({k}-{p}), resolution {roman(self.resolution)}"


def roman(number: int) -> str:
    """Roman numeral of a resolution, 1 to 39."""
    ones = ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")
    return "X" * (number // 10) + ones[number % 10]


def letters(factors: Sequence[str]) -> dict[str, str]:
    """Letter → factor, in the order given; GeneratorError when there are more than letters."""
    if len(factors) > len(LETTERS):
        raise GeneratorError(None, f"at most {len(LETTERS)} factors", str(len(factors)))
    return dict(zip(LETTERS, factors, strict=False))


def _word(index: int, generator: str, known: str) -> tuple[str, Word]:
    """The generated letter and the word of a generator: D=ABC gives D and ABCD."""
    expected = f'a generator such as "D=ABC" or "E=-AB" with letters of {known}'
    left, equals, right = generator.replace(" ", "").partition("=")
    sign = -1 if right.startswith("-") else 1
    right = right.removeprefix("-").removeprefix("+")
    if not equals or len(left) != 1 or len(right) < 1:
        raise GeneratorError(index, expected, f'"{generator}"')
    for letter in left + right:
        if letter not in known:
            raise GeneratorError(index, expected, f'the letter {letter} in "{generator}"')
    if len(set(left + right)) != len(left + right):
        raise GeneratorError(index, "each letter once in a generator", f'"{generator}"')
    return left, Word("".join(sorted(left + right)), sign)


def _relation(words: Sequence[Word], generators: Sequence[str]) -> list[Word]:
    """All products of `words`. GeneratorError when one follows from, or contradicts, the others."""
    products = [Word("")]
    for index, word in enumerate(words):
        for product in products:
            if product.letters == word.letters:
                others = ", ".join(generators[:index])
                verb = "follows from" if product.sign == word.sign else "contradicts"
                raise GeneratorError(
                    index, "generators that are independent", f"{generators[index]} {verb} {others}"
                )
        products += [product * word for product in products]
    return sorted(products[1:])


def fraction(factors: Mapping[str, Sequence], generators: Sequence[str]) -> Fraction:
    """Checks a fractional design and computes its defining relation.

    GeneratorError when a factor has not two levels, when generators are malformed or not
    independent, or when the resolution is below III.
    """
    for name, levels in factors.items():
        if len(levels) != 2:
            raise GeneratorError(
                None, "two levels for each factor of a fractional design", str(len(levels)), name
            )
    known = "".join(letters(tuple(factors)))
    if not generators:
        raise GeneratorError(None, "at least one generator", "none")
    words: list[Word] = []
    generated: set[str] = set()
    for index, generator in enumerate(generators):
        left, word = _word(index, generator, known)
        if left in generated:
            raise GeneratorError(index, "one generator for each letter", f"a second one for {left}")
        generated.add(left)
        words.append(word)
    relation = _relation(words, generators)
    if relation[0].length < LEAST_RESOLUTION:
        raise GeneratorError(
            None,
            "a resolution of III or more, so that main effects are separate",
            f"resolution {roman(relation[0].length)} by {relation[0]} = I",
        )
    return Fraction(tuple(factors), tuple(generators), tuple(relation))


def _reduced(words: Sequence[Word]) -> dict[str, Word]:
    """Generated letter → its word, such that no generated letter is in the word of another.

    Gauss-Jordan elimination over the field of two elements, the last letter of a word as its pivot.
    """
    reduced: dict[str, Word] = {}
    for word in words:
        for letter, row in reduced.items():
            if letter in word.letters:
                word = word * row
        pivot = word.letters[-1]
        for letter, row in reduced.items():
            if pivot in row.letters:
                reduced[letter] = row * word
        reduced[pivot] = word
    return reduced


def fractional_cells(factors: Mapping[str, Sequence], plan: Fraction) -> list[Cell]:
    """The cells of a fraction in canonical order."""
    named = letters(tuple(factors))
    # The first p words of length order need not be independent; the generators are.
    generators = [_word(i, text, "".join(named))[1] for i, text in enumerate(plan.generators)]
    reduced = _reduced(generators)
    free = [letter for letter in named if letter not in reduced]
    rows = []
    for codes in itertools.product((-1, 1), repeat=len(free)):
        code = dict(zip(free, codes, strict=True))
        for pivot, word in reduced.items():
            others = word.letters.replace(pivot, "")
            code[pivot] = word.sign * math.prod(code[letter] for letter in others)
        rows.append(tuple(code[letter] for letter in named))
    return [
        {name: factors[name][(code + 1) // 2] for name, code in zip(factors, row, strict=True)}
        for row in sorted(rows)
    ]


def excluded(cell: Cell, exclude: Sequence[Mapping]) -> bool:
    """Whether one of the rules matches: all its keys do, and a value may be a list of levels."""
    return any(
        all(
            cell[name] in value if isinstance(value, list | tuple) else cell[name] == value
            for name, value in rule.items()
        )
        for rule in exclude
    )


def full_cells(factors: Mapping[str, Sequence], exclude: Sequence[Mapping] = ()) -> list[Cell]:
    """Every combination of levels in canonical order, without the excluded ones."""
    cells = (dict(zip(factors, row, strict=True)) for row in itertools.product(*factors.values()))
    return [cell for cell in cells if not excluded(cell, exclude)]


def combinations(factors: Mapping[str, Sequence]) -> int:
    """The number of combinations before any is excluded."""
    return math.prod(len(levels) for levels in factors.values())


def groups(cells: Sequence[Cell], keys: Collection[str]) -> list[list[Cell]]:
    """Cells that agree in all of `keys`, in the order of their first cells."""
    found: dict[tuple, list[Cell]] = {}
    for cell in cells:
        found.setdefault(tuple(cell[key] for key in cell if key in keys), []).append(cell)
    return list(found.values())


def block_order(
    cells: Sequence[Cell],
    order: str,
    seed: int,
    block: int,
    setup: Collection[str] = (),
    together: Collection[str] = (),
) -> list[Cell]:
    """The order of `cells` in one block; it depends on nothing but the arguments.

    A run that resumes in the middle of a block therefore meets the same order again. `setup` names
    the factors whose change needs a new set-up. A randomised order is a split-plot one: the groups
    of cells that share a set-up come in random order, and so do the cells within each group.
    `together` names factors whose combinations stand together within a set-up: what differs in
    others is compared within a short time. An interleaved order then keeps the canonical order of
    these combinations, and shuffles the cells of each.
    """
    if order != "randomised" and not (together and order == "interleaved"):
        return [dict(cell) for cell in cells]
    # A text as seed is hashed by SHA-512, so neighbouring seeds and blocks are unrelated.
    random_source = random.Random(f"{seed} {block}")
    # Without such factors all cells are one group, or each is its own, which is the same here.
    plots = groups(cells, setup) if setup or together else [[cell] for cell in cells]
    if order == "randomised":
        random_source.shuffle(plots)
    shuffled = []
    for plot in plots:
        parts = groups(plot, together) if together else [[cell] for cell in plot]
        if order == "randomised":
            random_source.shuffle(parts)
        for part in parts:
            random_source.shuffle(part)
            shuffled += part
    return [dict(cell) for cell in shuffled]


def blocks(
    cells: Sequence[Cell],
    order: str,
    seed: int,
    setup: Collection[str] = (),
    together: Collection[str] = (),
) -> Iterator[list[Cell]]:
    """The orders of block 0, 1, 2 … without end."""
    return (block_order(cells, order, seed, block, setup, together) for block in itertools.count())
