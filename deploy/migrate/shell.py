"""Command lines of a shell script, found without running it: variables, arithmetic, arrays, tests and functions.

What only a run can tell, such as the output of a program, stays as it is written, behind UNKNOWN.
"""

import ast
import fnmatch
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

UNKNOWN, BREAK, BLANK = "\0", "\1", "\2"
"""In a word: before text whose value only a run tells, between words of one expansion, for blanks of unknown text."""
OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a // b if (a < 0) == (b < 0) else -(-a // b),
    ast.Mod: lambda a, b: int(math.fmod(a, b)),
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
NUMBERS = {"-eq": ast.Eq, "-ne": ast.NotEq, "-lt": ast.Lt, "-le": ast.LtE, "-gt": ast.Gt, "-ge": ast.GtE}
NAME = re.compile(r"\$\{(\w+)\}|\$?\b([A-Za-z_]\w*)")
EXPANSION = re.compile(r"\$\{?([#!]?)(\w+|[@*#?])(?:\[([^\]]*)\])?", re.ASCII)
ESCAPE = re.compile(r"\\(\n|.)", re.DOTALL)
ESCAPE_IN_STRING = re.compile(r'\\([$`"\\\n])')


def command_lines(text: str) -> list[list[str]]:
    """Return the words of each command that a bash script starts, in order; ValueError if the text is no script."""
    root = Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node
    node = root
    while not node.is_error and (wrong := [child for child in node.children if child.has_error]):
        node = wrong[0]
    if root.has_error:
        raise ValueError(f"line {node.start_point[0] + 1} is not understood as bash")
    script = Script()
    script.run(root)
    return script.commands


def _raw(node: Node) -> str:
    return (node.text or b"").decode()


def _unknown(text: str) -> str:
    return UNKNOWN + re.sub(r"\s+", BLANK, text)


class Script:
    """The state of a script while its statements are gone through: variables, functions, and commands so far."""

    def __init__(self) -> None:
        # Scripts of verl ask the machine for a DEVICE: gpu or npu.
        self.variables: dict[str, str | list[str]] = {"HOME": "~", "PWD": ".", "DEVICE": "gpu"}
        self.functions: dict[str, Node] = {}
        self.commands: list[list[str]] = []

    def run(self, node: Node) -> bool | None:
        """Go through a statement; returns whether it succeeds, None if only a run tells."""
        if (handler := getattr(self, f"_{node.type}", None)) is not None:
            succeeded: bool | None = handler(node)
            return succeeded
        redirects = ("comment", "file_redirect", "heredoc_redirect", "herestring_redirect")
        return self._run_all(child for child in node.named_children if child.type not in redirects)

    def _run_all(self, nodes: Iterable[Node]) -> bool | None:
        succeeded: bool | None = True
        for node in nodes:
            succeeded = self.run(node)
        return succeeded

    def _forget(self, node: Node) -> None:
        """Mark what a statement would assign as unknown: whether it runs is not known."""
        if node.type == "variable_assignment":
            name = _raw(node.child_by_field_name("name") or node)
            self.variables[name] = _unknown(f"${{{name}}}")
        for child in node.named_children:
            self._forget(child)

    _while_statement = _c_style_for_statement = _forget

    def _variable_assignment(self, node: Node) -> bool:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None or name.type == "subscript":
            return True
        given: str | list[str] = self._text(value)
        if value is not None and value.type == "array":
            given = [word for child in value.named_children if child.type != "comment" for word in self.words(child)]
        before = self.variables.get(_raw(name), "")
        if any(_raw(child) == "+=" for child in node.children):
            both = [one if isinstance(one, list) else [one] for one in (before, given)]
            given = f"{before}{given}" if isinstance(before, str) and isinstance(given, str) else both[0] + both[1]
        self.variables[_raw(name)] = given
        return True

    def _declaration_command(self, node: Node) -> bool:
        return all([self._variable_assignment(one) for one in node.named_children if one.type == "variable_assignment"])

    def _function_definition(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[_raw(name)] = body

    def _command(self, node: Node) -> bool | None:
        words = [word for child in node.named_children if "assign" not in child.type for word in self.words(child)]
        if not words:
            return self._declaration_command(node)
        if (body := self.functions.pop(words[0], None)) is not None:
            # Out of the table meanwhile: one that calls itself would never end.
            self.run(body)
            self.functions[words[0]] = body
            return True
        self.commands.append(words)
        return {"true": True, ":": True, "false": False}.get(words[0])

    def _list(self, node: Node) -> bool | None:
        left, right = node.named_children[0], node.named_children[-1]
        succeeded = self.run(left)
        is_and = any(_raw(child) == "&&" for child in node.children)
        if succeeded is None and left.type not in ("test_command", "list", "negated_command"):
            succeeded = True
        if succeeded is None:
            self._forget(right)
            return None
        return self.run(right) if succeeded == is_and else succeeded

    def _negated_command(self, node: Node) -> bool | None:
        succeeded = self.run(node.named_children[-1])
        return None if succeeded is None else not succeeded

    def _if_statement(self, node: Node) -> None:
        clauses = [child for child in node.named_children if child.type in ("elif_clause", "else_clause")]
        for branch in (node, *clauses):
            inner = [child for child in branch.named_children if child not in clauses]
            then = next((child.start_byte for child in branch.children if child.type == "then"), branch.start_byte)
            succeeded = self._run_all(child for child in inner if child.start_byte < then)
            if succeeded is None:
                self._forget(node)
                return
            if succeeded:
                self._run_all(child for child in inner if child.start_byte > then)
                return

    def _case_statement(self, node: Node) -> None:
        value = self._text(node.child_by_field_name("value"))
        if UNKNOWN in value:
            self._forget(node)
            return
        for item in (child for child in node.named_children if child.type == "case_item"):
            values = item.children_by_field_name("value")
            if any(fnmatch.fnmatchcase(value, self._text(pattern)) for pattern in values):
                self._run_all(item.named_children[len(values) :])
                return

    def _for_statement(self, node: Node) -> None:
        body, name = node.child_by_field_name("body"), _raw(node.child_by_field_name("variable") or node)
        words = [word for value in node.children_by_field_name("value") for word in self.words(value)]
        if body is None or any(UNKNOWN in word for word in words):
            self._forget(node)
            return
        for word in words:
            self.variables[name] = word
            self.run(body)

    def _test_command(self, node: Node) -> bool | None:
        if _raw(node.children[0]) == "((":
            number = self.number(_raw(node)[2:-2])
            return None if number is None else number != 0
        return self._test(node.named_children[0]) if node.named_children else False

    def _test(self, node: Node) -> bool | None:
        children = node.named_children
        if node.type == "parenthesized_expression":
            return self._test(children[0])
        sign = _raw(node.child_by_field_name("operator") or node.children[0])
        if node.type == "unary_expression":
            if sign == "!":
                outcome = self._test(children[-1])
                return None if outcome is None else not outcome
            text = self._text(children[-1])
            # A variable that the script does not set may come from outside: it is not set there by default.
            unset = re.fullmatch(rf"{UNKNOWN}\$\{{?\w+\}}?", text) is not None
            if sign in ("-z", "-n") and (unset or UNKNOWN not in text):
                return (unset or not text) == (sign == "-z")
            return None
        if node.type != "binary_expression" or len(children) < 2:
            text = self._text(node)
            return None if UNKNOWN in text else text != ""
        if sign in ("&&", "||"):
            both = [self._test(children[0]), self._test(children[-1])]
            decided = sign == "||"
            return decided if decided in both else None if None in both else not decided
        left, right = self._text(children[0]), self._text(children[-1])
        if UNKNOWN in left + right:
            return None
        if sign in NUMBERS and all(re.fullmatch(r"-?\d+", side) for side in (left, right)):
            return bool(OPERATORS[NUMBERS[sign]](int(left), int(right)))
        if sign in ("=", "==", "!="):
            return fnmatch.fnmatchcase(left, right) == (sign != "!=")
        return None

    def _text(self, node: Node | None) -> str:
        return "" if node is None else self.expand(node, quoted=True).replace(BREAK, " ")

    def words(self, node: Node) -> Iterator[str]:
        """Yield the words that one word of the script becomes."""
        yield from (word.replace(BLANK, " ") for word in self.expand(node).split(BREAK) if word)

    def expand(self, node: Node, quoted: bool = False) -> str:
        """Return the text of a word with what it refers to, words of one expansion with BREAK between them."""
        kind, text = node.type, _raw(node)
        if kind == "raw_string":
            return text[1:-1]
        if kind in ("word", "string_content", "test_operator", "extglob_pattern", "regex"):
            inside = node.parent is not None and node.parent.type == "string"
            pattern = ESCAPE_IN_STRING if inside else ESCAPE
            return pattern.sub(lambda found: "" if found[1] == "\n" else found[1], text)
        if kind in ("simple_expansion", "expansion"):
            value = self._variable(node, quoted)
            # The parser counts a blank before an expansion in a string to it.
            value = text[: len(text) - len(text.lstrip())] + value
            return value if quoted else BREAK.join(re.split(f"[\\s{BREAK}]+", value))
        if kind == "arithmetic_expansion":
            number = self.number(text.strip()[3:-2])
            return _unknown(text) if number is None else str(number)
        if kind == "command_substitution":
            return "." if text.strip("$()` ") == "pwd" else _unknown(text)
        quoted = quoted or kind == "string"
        children = node.children if kind in ("string", "concatenation", "command_name") else []
        return self._joined(node, children, 0, quoted) if children else text.replace("\\\n", "")

    def _joined(self, node: Node, children: list[Node], start: int, quoted: bool) -> str:
        """Return the text of a node from its byte ``start`` on, with the expansions of these children in it."""
        # Blanks in a string stand between the nodes of its parts.
        parts, source = [], node.text or b""
        for child in children:
            parts.append(source[start : child.start_byte - node.start_byte].decode())
            parts.append("" if child.type == '"' else self.expand(child, quoted))
            start = child.end_byte - node.start_byte
        return "".join([*parts, source[start:].decode()])

    def _variable(self, node: Node, quoted: bool) -> str:
        text = _raw(node).strip()
        if text[1:] in ("@", "*", "{@}", "{*}"):
            # The script is started without arguments.
            return ""
        match = EXPANSION.match(text)
        if match is None:
            return _unknown(text)
        sign, name, index = match.groups("")
        value, rest = self.variables.get(name), text[match.end() : -1]
        if rest[:2] in (":-", ":=", ":+", ":?") or rest[:1] in ("-", "=", "+", "?"):
            choice, is_unset = rest.lstrip(":")[:1], value is None or (rest[0] == ":" and not value)
            if choice == "+":
                return "" if is_unset else self._rest(node, rest, quoted)
            if is_unset:
                given = _unknown(text) if choice == "?" else self._rest(node, rest, quoted)
                if choice == "=":
                    self.variables[name] = given
                return given
            rest = ""
        if value is None or sign == "!":
            return _unknown(text)
        if sign == "#":
            return str(len(value))
        if isinstance(value, list):
            index = index or "0"
            if index not in ("@", "*"):
                value = value[int(index)] if index.isdecimal() and int(index) < len(value) else _unknown(text)
            elif not rest:
                return BREAK.join(value)
        return _edited(value, rest) if isinstance(value, str) else _unknown(text)

    def _rest(self, node: Node, rest: str, quoted: bool) -> str:
        """Return the default of an expansion, which may hold expansions itself."""
        start = node.end_byte - 1 - len(rest.encode()) + (2 if rest[0] == ":" else 1)
        children = [child for child in node.named_children if child.start_byte >= start]
        return self._joined(node, children, start - node.start_byte, quoted)[:-1]

    def number(self, text: str) -> int | None:
        """Return the value of an arithmetic expression, None if only a run tells."""

        def value(name: re.Match[str]) -> str:
            found = self.variables.get(name[1] or name[2])
            return f"({found})" if isinstance(found, str) and re.fullmatch(r"-?[1-9]\d*|0", found) else "?"

        try:
            # Of whole numbers, Python's expressions are those of bash.
            return _evaluate(ast.parse(NAME.sub(value, text).strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
        return int(OPERATORS[type(node.ops[0])](_evaluate(node.left), _evaluate(node.comparators[0])))
    raise ValueError(ast.dump(node))


def _edited(value: str, rest: str) -> str:
    """Return a variable's value after ``//old/new``, ``%suffix``, ``#prefix``, ``^^`` or ``,,``."""
    if not rest:
        return value
    if match := re.fullmatch(r"(//?)([^/$]+)(?:/([^$]*))?", rest):
        return value.replace(match[2], match[3] or "", -1 if match[1] == "//" else 1)
    if match := re.fullmatch(r"(##?|%%?)([^$]+)", rest):
        front = match[1][0] == "#"
        ends = ((cut, value[:cut] if front else value[cut:]) for cut in range(len(value) + 1))
        cuts = [cut for cut, end in ends if fnmatch.fnmatchcase(end, match[2])]
        cut = (max if match[1] in ("##", "%") else min)(cuts, default=0 if front else len(value))
        return value[cut:] if front else value[:cut]
    if rest in ("^^", ",,"):
        return value.upper() if rest == "^^" else value.lower()
    return _unknown(f"${{…{rest}}}")
