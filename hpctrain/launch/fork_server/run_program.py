"""Runs a Python program in this process as Python itself would."""

from __future__ import annotations

import builtins
import io
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader

from hpctrain.launch.fork_server.program import Program


def run_program(program: Program) -> None:
    """Runs the program as `__main__`. Exceptions are printed as Python prints them, followed by SystemExit."""
    start = [program.python, *program.options]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = main
    try:
        if program.module is not None:
            sys.orig_argv = [*start, "-m", program.module, *program.arguments]
            sys.argv = ["-m", *program.arguments]
            runpy._run_module_as_main(program.module)  # type: ignore[attr-defined]
        else:
            assert program.script is not None
            sys.orig_argv = [*start, program.script, *program.arguments]
            sys.argv = [program.script, *program.arguments]
            with io.open_code(program.script) as file:
                code = compile(file.read(), program.script, "exec", dont_inherit=True)
            main.__dict__.update(
                __file__=program.script,
                __loader__=SourceFileLoader("__main__", program.script),
                __cached__=None,
            )
            exec(code, main.__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is not main.__dict__:
            trace = trace.tb_next
        error.__traceback__ = trace
        sys.excepthook(type(error), error, trace)
        raise SystemExit(1) from None
