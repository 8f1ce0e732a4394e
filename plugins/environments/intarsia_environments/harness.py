"""Runs inside the sandbox, as main.py: calls the function that a policy wrote and says what it gave.

What the right answers are is not known here: they are compared outside, so that nothing that the function does, reads or prints can make a wrong answer right.
"""

import contextlib
import io
import json
import os
import sys

LARGEST = 4000


def call(function, arguments):
    """What one call gives, or the error that it raises."""
    try:
        text = json.dumps(function(*arguments), allow_nan=False)
        return {"value": json.loads(text)} if len(text) <= LARGEST else {"error": "ValueError: the result is too large"}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def main():
    """Load the function, call it on all arguments, print one line of JSON."""
    asked = json.load(sys.stdin)
    output = os.dup(1)
    found = {}
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            names = {"__name__": "solution"}
            exec(compile(asked["source"], "solution.py", "exec"), names)
            function = names.get(asked["name"])
            if callable(function):
                found["results"] = [call(function, arguments) for arguments in asked["arguments"]]
            else:
                found["error"] = f"there is no function {asked['name']}"
        except BaseException as error:
            place = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
            found["error"] = f"{type(error).__name__}: {getattr(error, 'msg', None) or error}{place}"[:300]
    os.write(output, b"\n" + json.dumps(found).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
