"""Chat templates run: in Jinja's sandbox, with bounds on work and size, and errors that say where.

A template may come with a model from anywhere. It sees values alone, and of what Jinja offers only what chat templates use: the lists below are all there is. Work is counted (rounds of loops and
calls), and so are the characters that are made or looked through, so that what is refused is refused on every machine; no text grows beyond the bound, and no value whose text would.
"""

from __future__ import annotations

import datetime
import functools
import json
import threading
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any

import jinja2
from intarsia.errors import UsageError
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

WORK, WORK_OF_MESSAGE = 200_000, 1_000
"""Rounds of loops and calls of one rendering, and how many more for each message, of which a template needs about 20."""
IN_ALL = 32
"""Characters that one rendering may make and look through, for each character that a conversation may have. An item of a list or mapping that is looked through counts as ITEM."""
ITEM, LEAST_IN_ALL = 256, 1 << 24
NODES_OF_ROUND = 256
"""A body of a loop with so many more nodes counts as one more round."""
LARGEST_NUMBER = 1 << 12
"""Bits of a sum, difference or product of whole numbers, and digits of a text that is read as one."""
MOST_DIGITS = 100
"""Digits before or behind the point to which a number may be rounded."""
OF_JINJA = ("_loop_vars", "_block_vars")
"""What Jinja passes beside the arguments of a call in a loop or a block."""

_METHODS = (
    "append capitalize count endswith find get index isalnum isalpha isdigit islower isspace isupper items join keys lower lstrip partition pop removeprefix "
    "removesuffix replace rfind rpartition rsplit rstrip split splitlines startswith strip title upper values"
)
_FILTERS = (
    "abs capitalize count d default dictsort e escape first float int items last length list lower map max min reject rejectattr reverse round safe select "
    "selectattr sort title trim unique upper"
)
_CHEAP = "abs count d default first items last length safe"
"""Filters whose work does not grow with what they are given."""
_OF_TEXT = "capitalize e escape lower title trim upper"
"""Filters that make a text of a text; others take it apart."""
_TESTS = (
    "boolean callable defined divisibleby eq equalto even false filter float ge greaterthan gt in integer iterable le lessthan lower lt mapping ne none number odd "
    "sameas sequence string test true undefined upper == != > >= < <="
)
READING_TESTS = ("lower", "upper")
"""Tests that read the text that they are of; others look at its type, or are comparisons."""
SLOW_METHODS, LONG = ("lstrip", "rfind", "rpartition", "rsplit", "rstrip", "strip"), 64
"""Methods whose work may be the product of both texts' lengths, and from what length of the second on that counts."""
METHODS, FILTERS, TESTS, CHEAP, OF_TEXT = (frozenset(names.split()) for names in (_METHODS, _FILTERS, _TESTS, _CHEAP, _OF_TEXT))
HOLDS_ITEMS, PLAIN = (list, tuple, KeysView, ValuesView, ItemsView), (int, float, type(None))
GROWING = frozenset({"+", "-", "*", "**", "%"})
DEEPEST_INDENT = 16


class TooMuch(Exception):
    """The template does too much, or writes too much."""


class MessageView(dict[str, Any]):
    """A message as a template sees it. It notes that it was looked at, for messages of errors."""

    def __init__(self, values: Mapping[str, Any], number: int, seen: list[int]):
        super().__init__(values)
        self._number, self._seen = number, seen

    def __getitem__(self, key: str) -> Any:
        self._seen[0] = self._number
        return super().__getitem__(key)


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, by which templates mark what the assistant said: it is found without them here, and the tags do nothing."""

    tags = {"generation"}  # noqa: RUF012  # as its base declares it

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _Counted(NodeTransformer):
    """Loops and macros count their rounds; what makes a text, a list or a mapping, or looks through one, is a call that is bounded."""

    def visit_For(self, node: Any) -> nodes.Node:
        weight = 1 + sum(1 for _ in node.find_all(nodes.Node)) // NODES_OF_ROUND
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("work", node, nodes.Const(weight)), lineno=node.lineno))
        return node  # type: ignore[no-any-return]

    visit_Macro = visit_CallBlock = visit_For

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call("joined", node, *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        edges = (edge or nodes.Const(None) for edge in (node.arg.start, node.arg.stop, node.arg.step))
        return _call("sliced", node, node.node, *edges)

    def visit_List(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        is_value = getattr(node, "ctx", "load") == "load" and not all(isinstance(item, nodes.Const) for item in node.items)
        return _call("sized", node, node) if is_value else node

    visit_Tuple = visit_Dict = visit_List

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        for operand in node.ops:
            operand.expr = _weighed(operand.expr, operand.op)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Test:
        self.generic_visit(node)
        node.args = [_weighed(value, node.name) for value in node.args]
        if node.name in READING_TESTS:
            node.node = _weighed(node.node, node.name)
        return node


def _call(name: str, node: nodes.Node, *values: nodes.Expr) -> nodes.Call:
    """A call of the sandbox's own method."""
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=node.lineno), list(values), [], None, None, lineno=node.lineno)


def _weighed(value: nodes.Expr, operator: str) -> nodes.Expr:
    return value if isinstance(value, nodes.Const) else _call("weighed", value, value, nodes.Const(operator))


class _Budget(threading.local):
    """What a rendering may still do. Each thread has its own."""

    work, characters = WORK, 0


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, which as a text would be all that it holds."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, as `transformers` sets it up, with the bounds of this module."""

    intercepted_binops = GROWING

    def __init__(self, characters: int):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], autoescape=False, finalize=self.sized
        )
        self.characters, self.in_all, self.budget = characters, max(IN_ALL * characters, LEAST_IN_ALL), _Budget()
        self.begin(0)
        own = {"tojson": self.to_json, "join": self.join, "replace": self.replace, "string": lambda value: str(self.sized(value))}
        numbers = {name: _number(self.filters[name]) for name in ("int", "float")} | {"round": _rounding(self.filters["round"])}
        self.filters = {name: self.counted(name, value) for name, value in self.filters.items() if name in FILTERS} | own | numbers
        self.tests = {name: value for name, value in self.tests.items() if name in TESTS}
        kept = {name: self.globals[name] for name in ("range", "dict")}
        self.globals = {**kept, "namespace": _Namespace, "raise_exception": _raise_exception}

    def begin(self, messages: int) -> None:
        """A new budget, for the rendering of so many messages."""
        self.budget.work, self.budget.characters = WORK + WORK_OF_MESSAGE * messages, self.in_all

    def work(self, weight: int = 1) -> None:
        """Count a round of a loop, or a call."""
        self.budget.work -= weight
        if self.budget.work < 0:
            raise TooMuch("it does not end within as many rounds of loops and calls as its messages could need")

    def spend(self, characters: int) -> None:
        """Count characters that are made or looked through."""
        self.budget.characters -= characters
        if self.budget.characters < 0:
            raise TooMuch(f"it makes and looks through more than {self.in_all:,} characters in all")

    def sized(self, value: Any) -> Any:
        """`value`, with no more text in it than a conversation may have. What a list holds twice counts twice: written out, it is there twice."""
        if isinstance(value, str) and len(value) <= self.characters:
            self.spend(len(value))
            return value
        left, cost, waiting = self.characters, 0, [value]
        while waiting and cost <= self.in_all:
            item = waiting.pop()
            if isinstance(item, str):
                left -= len(item)
                cost += len(item)
            elif isinstance(item, HOLDS_ITEMS):
                waiting += item
            elif not isinstance(item, PLAIN) and isinstance(item, Mapping):
                waiting += [*item.keys(), *item.values()]
            left -= 1
            cost += ITEM
            if left < -1:
                raise TooMuch(
                    f"a text is longer than the {self.characters:,} characters that a conversation may have (data.tokenizer.characters)"
                )
        self.spend(cost)
        return value

    def weighed(self, value: Any, operator: str) -> Any:
        """`value`, which is about to be compared, or to be searched."""
        if isinstance(value, str):
            self.spend(len(value))
        elif not (isinstance(value, Mapping) and operator in ("in", "notin")):
            self.sized(value)
        return value

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """`value[start:stop:step]`."""
        found = value[start:stop:step]
        self.spend(_length(found))
        return found

    def concat(self, pieces: Any) -> str:
        """The text of a block or macro."""
        return "".join(self.sized([*pieces]))

    def counted(self, name: str, apply: Any) -> Any:
        """A filter whose work is counted."""
        if name in CHEAP:
            return apply
        place = int(hasattr(apply, "jinja_pass_arg"))  # behind what Jinja passes

        @functools.wraps(apply)
        def filtered(*values: Any, **named: Any) -> Any:
            value, others = values[place], [*values[place + 1 :], *named.values()]
            if isinstance(value, Iterator):  # what another filter gives
                value = [*value]
            length = len(value) if isinstance(value, str | range) else _length(value)
            self.sized(others)
            self.spend((1 + sum(len(other) for other in others if isinstance(other, str | list | tuple))) * length)
            if isinstance(value, range) or (isinstance(value, str) and name not in OF_TEXT):
                self.spend(ITEM * length)
            else:
                self.sized(value)
            return apply(*values[:place], value, *values[place + 1 :], **named)

        return filtered

    def joined(self, *parts: Any) -> str:
        """`a ~ b`."""
        return "".join(str(part) for part in self.sized(parts))

    def join(self, values: Any, separator: str = "", attribute: str | None = None) -> str:
        """The filter `join`."""
        found = [value if attribute is None else self.getitem(value, attribute) for value in values]
        return str(separator).join(str(part) for part in self._spread(found, separator))

    def _spread(self, parts: Sequence[Any], separator: Any) -> Sequence[Any]:
        self.sized([*parts, *[separator] * (len(parts) if isinstance(parts, list | tuple) else 0)])
        return parts

    def replace(self, text: Any, old: str, new: str, count: int = -1) -> str:
        """The filter `replace`."""
        text, old, new = str(self.sized(text)), str(old), str(new)
        if len(text) + text.count(old) * len(new) > self.characters:
            raise TooMuch(f"replace would make a text longer than {self.characters:,} characters")
        return text.replace(old, new, count)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Any call, counted. What methods of texts make is checked before."""
        name, owner = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        if owner is self:
            return super().call(context, obj, *args, **kwargs)
        self.work()
        given = {key: value for key, value in kwargs.items() if key not in OF_JINJA}
        self.sized([*args, *given.values()])
        if isinstance(owner, str) and name == "replace":
            return self.replace(owner, *args, **given)
        if isinstance(owner, str) and name == "join" and args:
            args = (self._spread(list(args[0]), owner), *args[1:])
        if isinstance(owner, str):
            others = sum(len(value) for value in [*args, *given.values()] if isinstance(value, str))
            self.spend(len(owner) * (1 + (others // LONG if name in SLOW_METHODS else 0)))
        return self.sized(super().call(context, obj, *args, **kwargs))

    def get_template(self, name: Any, *_: Any, **__: Any) -> Any:
        """None: a template is one text."""
        raise TooMuch(f"it asks for another template ({name!r}), and there is none: include, import and extends are not offered")

    select_template = get_or_select_template = get_template  # type: ignore[assignment]  # none of them returns

    def wrap_str_format(self, value: Any) -> None:
        """No `str.format`: its widths make long texts out of short ones."""
        return

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+ - * ** %`, which make long things out of short ones, and large numbers out of small ones."""
        if operator == "%" and isinstance(left, str):
            raise TooMuch("formatting by % is not offered to chat templates; use ~")
        if operator == "**":
            raise TooMuch("powers are not offered to chat templates")
        lengths = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        times = [side for side in (left, right) if isinstance(side, int)]
        if (sum(lengths) if operator == "+" else sum(lengths) * sum(times)) > self.characters:
            raise TooMuch(f"{operator} would make something longer than {self.characters:,} characters")
        bits = [side.bit_length() for side in times]
        if not lengths and bits and (sum(bits) if operator == "*" else max(bits)) > LARGEST_NUMBER:
            raise TooMuch(f"{operator} would make numbers of more than {LARGEST_NUMBER:,} bits")
        found = super().call_binop(context, operator, left, right)
        self.spend(_length(found))
        return found

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of texts, lists and mappings the methods that chat templates use."""
        return super().is_safe_attribute(obj, attr, value) and (
            attr in METHODS or not isinstance(obj, str | list | tuple | dict | bytes | int | float)
        )

    def to_json(
        self, value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        """JSON without escapes for HTML, as `transformers` writes it for templates."""
        if indent is not None and not 0 <= int(indent) <= DEEPEST_INDENT:
            raise TooMuch(f"tojson(indent={indent}) is out of range: at most {DEEPEST_INDENT}")
        return json.dumps(self.sized(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _number(apply: Any) -> Any:
    """The filter `int` or `float`, of texts that are no longer than a number is."""

    @functools.wraps(apply)
    def filtered(value: Any, *others: Any, **named: Any) -> Any:
        if isinstance(value, str) and len(value) > LARGEST_NUMBER:
            raise TooMuch(f"a text of {len(value):,} characters is to be a number: at most {LARGEST_NUMBER:,}")
        return apply(value, *others, **named)

    return filtered


def _rounding(apply: Any) -> Any:
    """The filter `round`, which else would reckon with 10 to the power of what it is told."""

    @functools.wraps(apply)
    def filtered(value: Any, precision: Any = 0, method: Any = "common") -> Any:
        if not -MOST_DIGITS <= precision <= MOST_DIGITS:
            raise TooMuch(f"round({precision}) is out of range: at most {MOST_DIGITS} digits")
        return apply(value, precision, method)

    return filtered


def _length(value: Any) -> int:
    """Characters that a text or list counts as where it is copied, without what is in it."""
    return len(value) if isinstance(value, str) else 8 * len(value) if isinstance(value, list | tuple | Mapping) else 0


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class CompiledTemplate:
    """A template that is ready to run. `name` is what messages call it.

    Errors, here and in `render`: UsageError that names the template, the line, and the message that was looked at last (from 1).
    """

    def __init__(self, name: str, text: str, characters: int, date: str | None = None):
        self.name, self._file = name, f"<chat template {name}>"
        self._environment = _Sandbox(characters)
        if date is not None:
            self._environment.globals["strftime_now"] = functools.partial(_formatted, _day(date))
        try:
            parsed = _Counted().visit(self._environment.parse(text, filename=self._file))
            # Names of filters and tests are looked up while it is compiled.
            code: Any = self._environment.compile(parsed, filename=self._file)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"Chat template {name}, line {error.lineno}: {_sentence(error.message or '')}") from error
        except (RecursionError, MemoryError) as error:
            raise UsageError(f"Chat template {name} is nested too deeply.") from error
        except SyntaxError as error:  # of the Python that Jinja makes of it, whose lines are others
            raise UsageError(f"Chat template {name} is no template that can run: {_sentence(error.msg)}") from error
        except Exception as error:  # numbers of thousands of digits, say
            raise UsageError(f"Chat template {name} cannot be read: {_cause(error)}") from error
        self._template = jinja2.Template.from_code(self._environment, code, dict(self._environment.globals))

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of a conversation. `messages` are its dicts; `variables` whatever else the template is told."""
        environment, seen = self._environment, [-1]
        views = [MessageView(message, number, seen) for number, message in enumerate(messages)]
        environment.begin(len(messages))
        pieces, length = [], 0
        try:
            for piece in self._template.generate(messages=views, **variables):
                length += len(piece)
                if length > environment.characters:
                    raise TooMuch(f"its text is longer than {environment.characters:,} characters (data.tokenizer.characters)")
                pieces.append(piece)
        except Exception as error:
            raise UsageError(f"Chat template {self.name}{self._place(error)}{_of(seen[0], len(messages))}: {_cause(error)}") from error
        return "".join(pieces)

    def _place(self, error: Exception) -> str:
        """The line of the template that raised."""
        found, traceback = "", error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == self._file:
                found = f", line {traceback.tb_lineno}"
            traceback = traceback.tb_next
        return found


def _of(number: int, count: int) -> str:
    return "" if number < 0 else f", message {number + 1} of {count}"


def _cause(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself too often."
    if isinstance(error, jinja2.exceptions.SecurityError):
        return _sentence(f"it asks for what templates may not have: {error}")
    if isinstance(error, jinja2.TemplateError | TooMuch):
        return _sentence(str(error))
    return _sentence(f"{type(error).__name__}: {error}")


def _sentence(text: str) -> str:
    return text.rstrip() if text.rstrip().endswith((".", "!", "?")) else f"{text.rstrip()}."


def _day(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise UsageError(f"data.tokenizer.date={text!r} is no day; write YYYY-MM-DD.") from None


def _formatted(day: datetime.date, form: str) -> str:
    if len(form) > 100:
        raise TooMuch("a date's form is longer than 100 characters")
    return day.strftime(form)
