"""The words that a shell script hands to verl's trainer.

Nothing is run. Variables, arrays, defaults (${X:-y}) and arithmetic are worked out as bash would;
what only a run could tell (command output, conditions) is left as it stands, `$` and all, and said.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

TRAINER = re.compile(r"(?:^|[./])main_\w+(?:\.py)?$")
OVERRIDE = re.compile(r"(?:\+\+|[+~])?[A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*=", re.ASCII)
DOTTED = re.compile(r"(?:\+\+|[+~])?[A-Za-z_]\w*\.[\w.]+=", re.ASCII)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
DECLARES = {"export", "declare", "local", "readonly", "typeset"}
OPENS = {"if", "for", "while", "until", "case", "select"}
CLOSES = {"fi", "done", "esac"}
BEFORE_COMMAND = {"then", "else", "do", "elif", "{", "}", "!", "time"}
ENDS_WORD = " \t\n;|&<>()"
LARGEST = 2**63
DEEPEST = 20
# A variable that is set to itself, several times over, grows without bound.
LONGEST = 100_000


@dataclass(frozen=True)
class Command:
    """The words after the trainer's name, expanded. `notes` say what could not be worked out."""

    words: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass
class _Word:
    fields: list[str] = field(default_factory=lambda: [""])
    kept: bool = False  # an empty word in quotes is still a word

    def add(self, text: str) -> None:
        self.fields[-1] += text

    def split(self, text: str) -> None:
        """An expansion outside of quotes: white space in it ends words."""
        pieces = re.split(r"[ \t\n]+", text)
        self.add(pieces[0])
        self.fields += pieces[1:]

    def result(self) -> list[str]:
        return [text for text in self.fields if text or (self.kept and len(self.fields) == 1)]


@dataclass
class _Scanner:
    text: str
    variables: dict[str, str]
    arrays: dict[str, list[str]] = field(default_factory=dict)
    at: int = 0
    depth: int = 0  # of if, for and the like
    conditional: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    nesting: int = 0  # of ${x:-${y:-...}}

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def read_script(text: str, environment: Mapping[str, str]) -> Command:
    """Find the first command that starts one of verl's trainers (a word such as
    verl.trainer.main_ppo) and expand its words. A text without one that consists of overrides is
    taken for them.

    `environment` gives the variables that the script itself does not set.
    """
    text = text.replace("\r\n", "\n")
    scanner = _Scanner(text, dict(environment))
    found: list[list[str]] = []
    all_words: list[str] = []
    chained = False
    while scanner.at < len(text):
        words = _statement(scanner, chained)
        separator = _separator(scanner)
        chained = separator in ("&&", "||")
        names = [i for i, word in enumerate(words) if TRAINER.search(word)]
        if names:
            found.append(words[names[0] + 1 :])
        elif found and words and DOTTED.match(words[0]):
            scanner.note(
                f"`{words[0]}` stands after the end of the command (a comment line or a missing \\ "
                "ends it), so bash does not hand it to verl; it is left out here too"
            )
        all_words += words
    if len(found) > 1:
        scanner.note(f"the script starts verl {len(found)} times; the first command is read")
    words = found[0] if found else [word for word in all_words if OVERRIDE.match(word)]
    for written in dict.fromkeys(scanner.unknown):
        if any(written in word for word in words):
            scanner.note(f"`{written}` cannot be known here: set neither in the script nor outside")
    for name in sorted(scanner.conditional):
        if re.search(rf"\$\{{?{name}\b", text):
            scanner.note(
                f"`{name}` is set inside a condition or loop, which is not run: what it was before "
                "counts"
            )
    return Command(tuple(word for word in words if word), tuple(scanner.notes))


def _separator(scanner: _Scanner) -> str:
    for separator in ("&&", "||", "\n", ";", "|", "&", "(", ")", "<", ">"):
        if scanner.text.startswith(separator, scanner.at):
            scanner.at += len(separator)
            return separator
    return ""


def _blank(scanner: _Scanner) -> None:
    while (scanner.peek() and scanner.peek() in " \t") or scanner.peek(2) == "\\\n":
        scanner.at += 2 if scanner.peek() == "\\" else 1
    if scanner.peek() == "#":
        end = scanner.text.find("\n", scanner.at)
        scanner.at = len(scanner.text) if end < 0 else end


def _statement(scanner: _Scanner, chained: bool) -> list[str]:
    """The words of one simple command; its assignments are carried out."""
    words: list[str] = []
    may_assign = True
    while True:
        _blank(scanner)
        if scanner.peek() and scanner.peek() in "<>" and _redirection(scanner):
            continue
        if not scanner.peek() or scanner.peek() in "\n;|&()<>":
            return words
        assigned = ASSIGNMENT.match(scanner.text, scanner.at) if may_assign else None
        if assigned:
            scanner.at = assigned.end()
            _assign(scanner, assigned[1], bool(assigned[2]), chained)
            continue
        new = _word(scanner, splits=True).result()
        if new and new[0].isdigit() and scanner.peek() in ("<", ">"):
            continue  # the 2 of 2>&1
        if may_assign and new and new[0] in OPENS:
            scanner.depth += 1
        elif may_assign and new and new[0] in CLOSES:
            scanner.depth = max(0, scanner.depth - 1)
        may_assign = may_assign and all(w in BEFORE_COMMAND | DECLARES | OPENS for w in new)
        words += new


def _redirection(scanner: _Scanner) -> bool:
    """`> file`, `2>&1`, `<<EOF` with its body: nothing of it belongs to the command."""
    here = re.compile(r"<<-?[ \t]*([\"']?)(\w+)\1").match(scanner.text, scanner.at)
    if here:
        end = re.compile(rf"^[ \t]*{here[2]}$", re.MULTILINE).search(scanner.text, here.end())
        scanner.at = end.end() if end else len(scanner.text)
        return True
    plain = re.compile(r"(?:<<<|>>|>&|<&|>|<)[ \t]*").match(scanner.text, scanner.at)
    if plain is None or scanner.text.startswith("(", plain.end()):
        return False
    scanner.at = plain.end()
    if scanner.peek() and scanner.peek() not in ENDS_WORD:
        _word(scanner, splits=False)
    return True


def _assign(scanner: _Scanner, name: str, appends: bool, chained: bool) -> None:
    values = _array(scanner) if scanner.peek() == "(" else None
    text = "" if values is not None else "".join(_word(scanner, splits=False).fields)
    if scanner.depth or chained:
        scanner.conditional.add(name)
    elif values is not None:
        scanner.arrays[name] = (scanner.arrays.get(name, []) if appends else []) + values
    else:
        before = scanner.variables.get(name, "") if appends else ""
        scanner.variables[name] = (before + text)[:LONGEST]


def _array(scanner: _Scanner) -> list[str]:
    scanner.at += 1
    values: list[str] = []
    while scanner.peek():
        _blank(scanner)
        if scanner.peek() == ")":
            scanner.at += 1
            break
        if scanner.peek() and scanner.peek() in ENDS_WORD:
            scanner.at += 1
        elif scanner.peek():
            values += _word(scanner, splits=True).result()
    return values


def _word(scanner: _Scanner, splits: bool) -> _Word:
    word = _Word()
    while (char := scanner.peek()) and char not in ENDS_WORD:
        if char == "'":
            end = scanner.text.find("'", scanner.at + 1)
            end = len(scanner.text) if end < 0 else end
            word.add(scanner.text[scanner.at + 1 : end])
            word.kept = True
            scanner.at = end + 1
        elif char == '"':
            word.kept = True
            scanner.at += 1
            _quoted(scanner, word)
        elif char == "\\":
            word.add(scanner.text[scanner.at + 1 : scanner.at + 2].strip("\n"))
            scanner.at += 2
        elif char in "$`":
            unknown = len(scanner.unknown)
            value, _ = _expansion(scanner)
            is_known = len(scanner.unknown) == unknown
            add = word.split if splits and is_known else word.add
            add(" ".join(value))
        else:
            word.add(char)
            scanner.at += 1
    return word


def _quoted(scanner: _Scanner, word: _Word) -> None:
    while (char := scanner.peek()) and char != '"':
        after = scanner.text[scanner.at + 1 : scanner.at + 2]
        if char == "\\" and after in ('"', "\\", "$", "`", "\n"):
            word.add(after.strip("\n"))
            scanner.at += 2
        elif char in "$`":
            values, is_array = _expansion(scanner)
            if is_array:
                word.kept = word.kept and bool(values)
                word.add(values[0] if values else "")
                word.fields += values[1:]
            else:
                word.add(" ".join(values))
        else:
            word.add(char)
            scanner.at += 1
    scanner.at += 1


def _expansion(scanner: _Scanner) -> tuple[list[str], bool]:
    """What stands for `$...` here, and whether it is an array that keeps its words apart."""
    start = scanner.at
    if scanner.peek() == "`":
        end = scanner.text.find("`", start + 1)
        scanner.at = len(scanner.text) if end < 0 else end + 1
        return [_unknown(scanner, f"$({scanner.text[start + 1 : scanner.at - 1]})")], False
    if scanner.peek(3) == "$((":
        inner = _enclosed(scanner, start + 1, "(", ")")
        return [_arithmetic(scanner, inner[1:-1], f"$({inner})")], False
    if scanner.peek(2) == "$(":
        return [_unknown(scanner, f"$({_enclosed(scanner, start + 1, '(', ')')})")], False
    if scanner.peek(2) == "${":
        return _braced(scanner, _enclosed(scanner, start + 1, "{", "}"))
    scanner.at += 1
    if scanner.peek() and scanner.peek() in "@*0123456789#?$!-":
        scanner.at += 1
        return [], True  # what the caller of the script adds
    name = NAME.match(scanner.text, scanner.at)
    if name is None:
        return ["$"], False
    scanner.at = name.end()
    return [_value(scanner, name[0], f"${name[0]}")], False


def _enclosed(scanner: _Scanner, start: int, opening: str, closing: str) -> str:
    depth = 0
    for position in range(start, len(scanner.text)):
        depth += (scanner.text[position] == opening) - (scanner.text[position] == closing)
        if depth == 0:
            scanner.at = position + 1
            return scanner.text[start + 1 : position]
    scanner.at = len(scanner.text)
    return scanner.text[start + 1 :]


def _value(scanner: _Scanner, name: str, written: str) -> str:
    if name in scanner.variables:
        return scanner.variables[name]
    if name in scanner.arrays:
        return scanner.arrays[name][0] if scanner.arrays[name] else ""
    return _unknown(scanner, written)


def _unknown(scanner: _Scanner, written: str) -> str:
    # Hydra's own ${data.max_prompt_length} is resolved later, from the other keys.
    if not re.fullmatch(r"\$\{[\w.:,]*[.:][^ ]*\}", written):
        scanner.unknown.append(written)
    return written


def _braced(scanner: _Scanner, inner: str) -> tuple[list[str], bool]:
    if array := re.fullmatch(r"(\w+)\[[@*]\]", inner):
        if array[1] in scanner.arrays:
            return list(scanner.arrays[array[1]]), True
        return [_unknown(scanner, f"${{{inner}}}")], False
    found = re.fullmatch(r"([A-Za-z_]\w*|[0-9@*])(?:(:?[-=+])(.*))?", inner, re.DOTALL | re.ASCII)
    if found is None:
        return [_unknown(scanner, f"${{{inner}}}")], False
    name, operator, other = found.groups()
    value = scanner.variables.get(name)
    if name in scanner.arrays:
        value = _value(scanner, name, "")
    if operator is None:
        if not NAME.fullmatch(name):
            return [], True
        return [_value(scanner, name, f"${{{name}}}")], False
    is_set = bool(value) if operator.startswith(":") else value is not None
    if operator.endswith("+"):
        return [_inner(scanner, other) if is_set else ""], False
    return [(value or "") if is_set else _inner(scanner, other)], False


def _inner(scanner: _Scanner, text: str) -> str:
    """The text after `:-`, expanded."""
    if scanner.nesting == DEEPEST:
        return _unknown(scanner, text)
    part = replace(scanner, text=text, at=0, nesting=scanner.nesting + 1)
    word = _Word()
    while part.at < len(text):
        if part.peek() == "$":
            values, _ = _expansion(part)
            word.add(" ".join(values))
        elif part.peek() in "\"'":
            part.at += 1
        else:
            word.add(part.peek())
            part.at += 1
    return "".join(word.fields)


def _arithmetic(scanner: _Scanner, text: str, written: str) -> str:
    def value_of(found: re.Match[str]) -> str:
        return scanner.variables.get(found[0], found[0])

    plain = NAME.sub(value_of, _inner(scanner, text))
    try:
        if not re.fullmatch(r"[\d\s()+*/%-]*", plain, re.ASCII):
            raise ValueError("not arithmetic")
        return str(_compute(ast.parse(plain.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return _unknown(scanner, written)


def _compute(node: ast.expr) -> int:
    """Integers as bash has them: / drops the fraction, towards 0."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        result = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        operand = _compute(node.operand)
        result = -operand if isinstance(node.op, ast.USub) else operand
    elif isinstance(node, ast.BinOp):
        left, right = _compute(node.left), _compute(node.right)
        result = _binary(node.op, left, right)
    else:
        raise ValueError("not arithmetic")
    if abs(result) >= LARGEST:
        raise ValueError("larger than 64 bits")
    return result


def _binary(operator: ast.operator, left: int, right: int) -> int:
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    if isinstance(operator, ast.Div | ast.Mod):
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if isinstance(operator, ast.Div) else left - quotient * right
    if isinstance(operator, ast.Pow) and 0 <= right < 64:
        return left**right
    raise ValueError("not arithmetic")
