"""Triton's interpreter (3.6) at half of its price, for the tests of the kernels.

It patches its language for a launch, and again for each call of a function that a kernel makes.
"""

from __future__ import annotations

import functools
from typing import Any


def patch_once_a_launch() -> None:
    """From now on in this process, which interprets."""
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[str]] = set()

    def patch_once(function: Any) -> Any:
        language = _language_of(function)
        if language in patched:
            return interpreter._LangPatchScope()
        patched.add(language)
        return patch(function)

    def launch_anew(executor: Any, *arguments: Any, **named: Any) -> Any:
        patched.clear()
        return launch(executor, *arguments, **named)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew


@functools.cache
def _language_of(function: Any) -> frozenset[str]:
    """Which of the language's modules a kernel's source names."""
    import triton.language as tl

    both = (tl, tl.core)
    return frozenset(one.__name__ for one in function.__globals__.values() if one in both)
