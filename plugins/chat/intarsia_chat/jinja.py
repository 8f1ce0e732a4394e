"""Chat templates run: in Jinja's sandbox, with bounds on work and size, and errors that say where.

A template may come with a model from anywhere. It sees values alone, and of what Jinja offers only what chat templates use: the lists below are all there is. Work is counted (rounds of loops and
calls), so that what is refused is refused on every machine; no text grows beyond the bound.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from intarsia.errors import UsageError
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

WORK, WORK_OF_MESSAGE = 200_000, 1_000
"""Rounds of loops and calls of one rendering, and how many more for each message, of which a template needs about 20."""

_METHODS = (
    "append capitalize count endswith find get index isalnum isalpha isdigit islower isspace isupper items join keys lower lstrip partition pop removeprefix "
    "removesuffix replace rfind rpartition rsplit rstrip split splitlines startswith strip title upper values"
)
_FILTERS = (
    "abs capitalize count d default dictsort e escape first float int items last length list lower map max min reject rejectattr reverse round safe select "
    "selectattr sort title trim unique upper"
)
_TESTS = (
    "boolean callable defined divisibleby eq equalto even false filter float ge greaterthan gt in integer iterable le lessthan lower lt mapping ne none number odd "
    "sameas sequence string test true undefined upper == != > >= < <="
)
METHODS, FILTERS, TESTS = (frozenset(names.split()) for names in (_METHODS, _FILTERS, _TESTS))
GROWING = frozenset({"+", "*", "**", "%"})
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
    """Loops count their rounds, and `~` is a call whose result is bounded."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("work", lineno=node.lineno), [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined", lineno=node.lineno), node.nodes, [], None, None, lineno=node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, as `transformers` sets it up, with the bounds of this module."""

    intercepted_binops = GROWING

    def __init__(self, characters: int):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], autoescape=False, finalize=self.sized
        )
        self.characters, self.left = characters, WORK
        own = {"tojson": self.to_json, "join": self.join, "replace": self.replace, "string": lambda value: str(self.sized(value))}
        self.filters = {name: value for name, value in self.filters.items() if name in FILTERS} | own
        self.tests = {name: value for name, value in self.tests.items() if name in TESTS}
        kept = {name: self.globals[name] for name in ("range", "dict", "namespace")}
        self.globals = {**kept, "raise_exception": _raise_exception}

    def work(self) -> None:
        """Count a round of a loop, or a call."""
        self.left -= 1
        if self.left < 0:
            raise TooMuch("it does not end within as many rounds of loops and calls as its messages could need")

    def sized(self, value: Any) -> Any:
        """`value`, with no more text in it than a conversation may have. What a list holds twice counts twice: written out, it is there twice."""
        left, waiting = self.characters, [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                left -= len(item)
            elif isinstance(item, Mapping):
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                waiting += item
            left -= 1
            if left < -1:
                raise TooMuch(
                    f"a text is longer than the {self.characters:,} characters that a conversation may have (data.tokenizer.characters)"
                )
        return value

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
        self.work()
        name, owner = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        if isinstance(owner, str) and name == "replace":
            return self.replace(owner, *args, **kwargs)
        if isinstance(owner, str) and name == "join" and args:
            args = (self._spread(list(args[0]), owner), *args[1:])
        return super().call(context, obj, *args, **kwargs)

    def get_template(self, name: Any, *_: Any, **__: Any) -> Any:
        """None: a template is one text."""
        raise TooMuch(f"it asks for another template ({name!r}), and there is none: include, import and extends are not offered")

    select_template = get_or_select_template = get_template  # type: ignore[assignment]  # none of them returns

    def wrap_str_format(self, value: Any) -> None:
        """No `str.format`: its widths make long texts out of short ones."""
        return

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+ * ** %`, which make long things out of short ones."""
        if operator == "%" and isinstance(left, str):
            raise TooMuch("formatting by % is not offered to chat templates; use ~")
        if operator == "**":
            raise TooMuch("powers are not offered to chat templates")
        lengths = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        times = [side for side in (left, right) if isinstance(side, int)]
        if (sum(lengths) if operator == "+" else sum(lengths) * sum(times)) > self.characters:
            raise TooMuch(f"{operator} would make something longer than {self.characters:,} characters")
        return super().call_binop(context, operator, left, right)

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
        except RecursionError as error:
            raise UsageError(f"Chat template {name} is nested too deeply.") from error
        self._template = jinja2.Template.from_code(self._environment, code, dict(self._environment.globals))

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of a conversation. `messages` are its dicts; `variables` whatever else the template is told."""
        environment, seen = self._environment, [-1]
        views = [MessageView(message, number, seen) for number, message in enumerate(messages)]
        environment.left = WORK + WORK_OF_MESSAGE * len(messages)
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
