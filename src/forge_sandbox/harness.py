"""The harness, which executes a response's program in the sandbox, and reports the results of tests."""

import json
from typing import Any

# The index of the report that is written before the first check, once the program has been executed.
BEGUN = -1
# Everything that the harness uses is bound before the program runs, since the program may replace any global. Values
# are formatted by methods of the built-in types, which the program cannot override by a subclass, and are compared
# outside the sandbox. Objects of classes of the program never count as true.
HARNESS = r"""
def harness(program, checks, mark):
    import json, os, sys, types
    execute, evaluate, dumps, write, number, show = exec, eval, json.dumps, os.write, enumerate, repr
    sized = (str, bytes, list, tuple, set, frozenset, dict)
    truths = [(kind, kind.__bool__) for kind in (int, float, complex)] + [(kind, kind.__len__) for kind in sized]
    scalars = [(kind, kind.__repr__) for kind in (bool, int, float, complex, str, bytes, type(None))]
    lists = [(list, "[", "]", "[]"), (tuple, "(", ",)", "()"), (set, "{", "}", "set()")]
    flags, own, fixed = type.__dict__["__flags__"].__get__, 1 << 9, 1 << 8
    subclass, kind_of, join, entries, Failure = issubclass, type, str.join, dict.items, BaseException
    replace = str.replace

    def plain(value):
        kind = kind_of(value)
        for base, text in scalars:
            if subclass(kind, base):
                said = text(value)
                return replace(said, "inf", "1e999") if base in (float, complex) else said
        if subclass(kind, dict):
            return "{" + join(", ", [plain(key) + ": " + plain(item) for key, item in entries(value)]) + "}"
        for base, opening, closing, empty in lists:
            if subclass(kind, base):
                items = [plain(item) for item in base.__iter__(value)]
                return opening + join(", ", items) + closing if items else empty
        raise TypeError

    def truth(value):
        kind = kind_of(value)
        for base, method in truths:
            if subclass(kind, base):
                return method(value) not in (0, False)
        if flags(kind) & own and not flags(kind) & fixed:
            raise TypeError
        return True if value else False

    kinds = {"value": plain, "text": show, "truth": truth}
    # Comparisons of tests. An object without a literal form that the program has made equals no plain value.
    simple, signs = (bool, int, float, str, type(None)), vars(__import__("operator"))
    known = {"inf": float("inf"), "nan": float("nan"), "set": set, "__builtins__": {}}
    words = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "is": "is_", "is not": "is_not"}
    signs = {sign: signs[word] for sign, word in entries(words)}
    signs |= {"in": lambda a, b: a in b, "not in": lambda a, b: a not in b}

    def read(value):
        kind = kind_of(value)
        if kind in simple:
            return False, value
        text = attempt(plain, value)
        if text is not None:
            return False, evaluate(text, known)
        made = flags(kind) & own and not flags(kind) & fixed
        return bool(made) or subclass(kind, sized), value

    def compare(first, *others):
        for sign, second in others:
            (strange, left), (stranger, right) = read(first), read(second)
            if sign in ("is", "is not"):
                result = signs[sign](first, second)
            elif strange == stranger:
                result = signs[sign](left, right)
            elif sign in ("==", "in", "!=", "not in"):
                result = sign in ("!=", "not in")
            else:
                raise TypeError("an object of the program has no value here")
            if len(others) == 1:
                return result
            if not result:
                return False
            first = second
        return True

    def value_of(value):
        strange, value = read(value)
        if strange:
            raise TypeError("an object of the program has no value here")
        return value

    def test(text):
        before = {*names}
        if "unittest" in text:
            import unittest
            unittest.main = lambda *args, **kwargs: None
        execute(text, names)
        if "unittest" in text:
            found = [item for name, item in entries({**names}) if name not in before and kind_of(item) is type]
            found = [item for item in found if subclass(item, unittest.TestCase)]
            for item in found:
                result = unittest.defaultTestLoader.loadTestsFromTestCase(item).run(unittest.TestResult())
                if not (result.wasSuccessful() and result.testsRun):
                    raise AssertionError

    def attempt(what, value):
        try:
            return what(value)
        except Failure:
            return None

    def tell(place, *report):
        write(1, ("\n" + mark + show(place) + " " + dumps(report) + "\n").encode())

    code = compile(program, "program.py", "exec")
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    names = module.__dict__
    execute(code, names)
    names["__compare__"], names["__value__"] = compare, value_of
    tell(BEGUN)
    for place, (text, kind) in number(checks):
        try:
            if kind in kinds:
                tell(place, attempt(kinds[kind], evaluate(text, names)))
            else:
                test(text)
                tell(place, None)
        except Failure:
            tell(place)

""".replace("BEGUN", str(BEGUN))


def read_marked(stdout: str, mark: str) -> dict[int, list[Any]]:
    """Return the harness's reports in the output of a program, by the index of the check.

    A report is a list: empty if the check raised an error, otherwise with one value, which is None if the value has no
    plain form.

    Args:
        mark: a random text with which the lines of reports start.
    """
    reports: dict[int, list[Any]] = {}
    for line in stdout.split("\n"):
        if line.startswith(mark):
            try:
                index, _, report = line.removeprefix(mark).partition(" ")
                reports.setdefault(int(index), list(json.loads(report)))
            except (ValueError, TypeError, RecursionError):
                continue  # not written by the harness, but by the program
    return reports
