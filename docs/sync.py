"""Keep the code and the outputs on the pages of docs/ equal to the source and to what it prints.

    python docs/sync.py                 rewrite the pages, and those of records/ and examples/museum/
    python docs/sync.py PAGE ...        these pages alone
    python docs/sync.py --stale         those that were last executed with other code (see tools/digests.py)
    python docs/sync.py --stale --list  print their paths, execute nothing
    python docs/sync.py --still         execute nothing: leave run and output blocks as they are
    python docs/sync.py --check         change nothing, list what is out of date; exit status 1 if there is anything

A comment line before a fenced block says where its text comes from:

    <!-- source: nbep/device/protocols/barrier.py::barrier_block -->   a symbol; also Class.method, a constant, __doc__
    <!-- source: docs/examples/first_program.py -->                    the whole file
    <!-- run -->                                                       python or bash, executed in the repository's root
    <!-- output -->                                                    what the run block before it printed
    <!-- primitives: loads,stores -->                                  the primitives of these modules, one a line
    <!-- options: bench/soak -->                                       the arguments of `nbep bench soak`

What an output has behind `(Pdb)` is typed when its bash block is executed.

A comment that begins with the word `holds` is Python that the site hides: it asserts what the text says of a run. There
`output` is what the last run block printed.

    <!-- holds
    assert "race" in output, "the text says that it is found"
    -->

The python blocks of a page share one namespace. In outputs, `file.py:123` becomes `file.py`: line numbers move too
often to be written down.
"""

import argparse
import ast
import contextlib
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from unittest import mock

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
BLOCK = re.compile(
    r"^<!-- (?P<kind>source|run|output|primitives|options)(?:: (?P<argument>\S+))? -->\n"
    r"```(?P<language>\w+)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
HOLDS = re.compile(r"^<!-- holds\n(?P<body>.*?)^-->$", re.MULTILINE | re.DOTALL)
DIGEST = re.compile(r"\n<!-- digest: (\w+) -->\n\Z")
sys.path.append(str(ROOT / "tools"))
from digests import digest  # noqa: E402


@dataclass(frozen=True)
class Block:
    """One marked block: `span` is where its body stands in the page."""

    kind: str
    argument: str | None
    language: str
    body: str
    span: tuple[int, int]


def pages() -> list[Path]:
    """Those of the site, and the records."""
    return sorted([*DOCS.glob("*.md"), *(ROOT / "records").glob("*.md")])


def exhibits() -> list[Path]:
    return sorted((ROOT / "examples" / "museum").glob("**/*.md"))


def blocks(text: str) -> list[Block]:
    """The marked blocks of a page, in order."""
    shown = [
        Block(found["kind"], found["argument"], found["language"], found["body"], found.span("body"))
        for found in BLOCK.finditer(text)
    ]
    hidden = [Block("holds", None, "python", found["body"], found.span("body")) for found in HOLDS.finditer(text)]
    return sorted(shown + hidden, key=lambda block: block.span)


def find_symbol(tree: ast.Module, name: str) -> ast.stmt:
    """The statement that defines a symbol: "function", "Class.method", "CONSTANT".

    Raises: LookupError if there is none
    """
    body = tree.body
    for part in name.split("."):
        for statement in body:
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if part in (getattr(statement, "name", None), *names):
                break
        else:
            raise LookupError(name)
        body = getattr(statement, "body", [])
    return statement


def source_of(reference: str) -> str:
    """The text that `path::symbol`, `path::__doc__` or `path` stands for."""
    path, _, symbol = reference.partition("::")
    text = (ROOT / path).read_text()
    if not symbol:
        return text
    tree = ast.parse(text)
    if symbol == "__doc__":
        return (ast.get_docstring(tree, clean=False) or "").strip("\n") + "\n"
    statement = find_symbol(tree, symbol)
    first = min([statement.lineno, *(line.lineno for line in getattr(statement, "decorator_list", []))])
    lines = text.splitlines(keepends=True)[first - 1 : statement.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "".join(line[indent:] or "\n" for line in lines)


def list_primitives(modules: str) -> str:
    """The primitives of some modules, a line each: name, arguments, meaning."""
    from nbep.device import primitives

    rows = []
    for module in modules.split(","):
        for name in primitives.__all__:
            function = getattr(primitives, name)
            if getattr(function, "__module__", "") == f"nbep.device.primitives.{module}":
                meaning = inspect.cleandoc(function.__doc__).partition("\n\n")[0].replace("\n", " ")
                rows.append((f"{name}{inspect.signature(function)}", meaning))
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:{width}}  {meaning}\n" for name, meaning in rows)


class ParserFound(Exception):
    """Instead of parsing, a command gives its parser away."""


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of a subcommand of nbep, such as "demo" or "bench/soak"."""
    from nbep import cli

    def give_away(parser, *_):
        raise ParserFound(parser)

    module = importlib.import_module(cli.module_of(*command.split("/")))
    with mock.patch.multiple(argparse.ArgumentParser, parse_args=give_away, parse_known_args=give_away):
        try:
            module.main([])
        except ParserFound as found:
            return found.args[0]
    raise LookupError(command)


def list_options(command: str) -> str:
    """What a subcommand does, and its arguments with what each means, in the same form on every version of Python."""
    parser = parser_of(command)
    formatter = parser._get_formatter()
    rows = []
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            choices = action.choices and "{" + ",".join(map(str, action.choices)) + "}"
            value = action.metavar or choices or ("" if action.nargs == 0 else action.dest.upper())
            if action.nargs == "?" and not value.startswith("["):
                value = f"[{value}]"
            meaning = formatter._expand_help(action) if action.help else ""
            rows.append((" ".join(filter(None, (*action.option_strings, value))), meaning))
    width = max(len(name) for name, _ in rows)
    text = textwrap.fill(" ".join((parser.description or "").split()), 110) + "\n\n"
    for name, meaning in rows:
        lines = textwrap.wrap(meaning, 106 - width) or [""]
        text += "".join(f"{name if line is lines[0] else '':{width}}  {line}".rstrip() + "\n" for line in lines)
    return text


def package_parent() -> Path:
    """The folder that `import nbep` finds the package in: this repository, or where it is installed."""
    import nbep

    return Path(nbep.__file__).resolve().parent.parent


def normalise(output: str) -> str:
    """An output without what differs between machines and between edits of the source."""
    from nbep.notebook import clean

    output = clean(output.replace(f"{ROOT}{os.sep}", "")).replace("docs/<page>.md:", "<this page>:")
    output = re.sub(r"<this page>:\d+", "<this page>", output)
    return "".join(line.rstrip() + "\n" for line in output.strip("\n").splitlines())


def run_python(code: str, namespace: dict) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.chdir(ROOT):
        exec(compile(code, "docs/<page>.md", "exec"), namespace)
    return printed.getvalue()


def run_bash(code: str, typed: list[str]) -> str:
    """Run commands with this interpreter's scripts first in the path. typed: to each prompt of pdb, and shown behind it

    Raises: CalledProcessError if one fails
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(package_parent()), "MPLBACKEND": "Agg"}
    command = ["bash", "-euo", "pipefail", "-c", code]
    read = "\n".join(typed) if typed else None
    options: dict = {"cwd": ROOT, "env": environment, "check": True, "capture_output": True, "text": True}
    first, *answers = subprocess.run(command, input=read, **options).stdout.split("(Pdb) ")
    lines = [*typed, *[""] * len(answers)]
    return first + "".join(f"(Pdb) {line}\n{answer}" for line, answer in zip(lines, answers, strict=False))


def digest_of(text: str, folder: Path) -> str:
    """The digest of a page of this folder; "" if it executes nothing."""
    runs = [block for block in blocks(text) if block.kind in ("run", "holds")]
    code = [[block.body for block in runs if (block.language == "python") == is_python] for is_python in (True, False)]
    return digest(folder, *code, [block.body for block in blocks(text) if block.kind == "output"]) if runs else ""


def is_stale(page: Path) -> bool:
    """Whether a page was last executed with other code, or other outputs were put in."""
    found = DIGEST.search(text := page.read_text())
    return digest_of(text, page.parent) != (found[1] if found else "")


def with_digest(text: str, folder: Path) -> str:
    """A page that has been executed, with its digest behind everything."""
    made, text = digest_of(text, folder), DIGEST.sub("", text)
    return f"{text}\n<!-- digest: {made} -->\n" if made else text


def up_to_date(text: str, still: bool = False) -> str:
    """The page as it should be. Executes its run blocks; `still`: leaves them and their outputs as they are."""
    namespace: dict = {"__name__": "__docs__"}
    parts, end, printed = [], 0, ""
    for block, after in zip_longest(found := blocks(text), found[1:]):
        body = block.body
        if block.kind == "source":
            assert block.argument, "a source block needs path::symbol"
            body = source_of(block.argument)
        elif block.kind == "primitives":
            assert block.argument, "a primitives block needs modules"
            body = list_primitives(block.argument)
        elif block.kind == "options":
            assert block.argument, "an options block needs a command"
            body = list_options(block.argument)
        elif still:
            pass
        elif block.kind == "output":
            body = normalise(printed)
        elif block.kind == "holds":
            run_python(body, {**namespace, "output": normalise(printed)})
        elif block.language == "python":
            printed = run_python(body, namespace)
        else:
            printed = run_bash(body, re.findall(r"^\(Pdb\) (.+)", after.body if after else "", re.MULTILINE))
        parts += [text[end : block.span[0]], body]
        end = block.span[1]
    return "".join([*parts, text[end:]])


def main() -> int:
    parser = argparse.ArgumentParser(description="Keep docs/ equal to the source.")
    parser.add_argument("--check", action="store_true", help="change nothing, only say what is out of date")
    parser.add_argument("--stale", action="store_true", help="only pages that were last executed with other code")
    parser.add_argument("--list", action="store_true", help="only print the paths of the pages")
    parser.add_argument("--still", action="store_true", help="execute nothing")
    parser.add_argument("pages", nargs="*", type=lambda path: Path(path).resolve(), help="all, if none is given")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    check, chosen = arguments.check, arguments.pages or [*pages(), *exhibits()]
    if arguments.stale:
        chosen = [page for page in chosen if is_stale(page)]
    if arguments.list:
        print("".join(f"{page.relative_to(ROOT)}\n" for page in chosen), end="")
        return 0
    out_of_date = 0
    for page in chosen:
        text = page.read_text()
        new = up_to_date(text, arguments.still)
        if not arguments.still and not check:
            new = with_digest(new, page.parent)
        if new != text:
            out_of_date += 1
            print(f"{page.relative_to(ROOT)}: {'out of date' if check else 'rewritten'}", flush=True)
            if not check:
                page.write_text(new)
    return 1 if check and out_of_date else 0


if __name__ == "__main__":
    sys.exit(main())
