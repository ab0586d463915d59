"""Triton's interpreter (3.6) at a fraction of its cost, for the tests of the kernels.

Most of its time goes into the language, not into numpy: it patches the language for each launch and
for each function that a kernel calls, it builds the shape of every value again, as a tuple of
constants with a named type, and it checks sums for an overflow that it never reports. What a kernel
computes does not change.
"""

from __future__ import annotations

import functools
from typing import Any


def make_interpreter_cheap() -> None:
    """From now on in this process, which interprets."""
    _patch_once_a_launch()
    _describe_tuples_when_asked()
    _describe_a_shape_once()
    _find_types_once()
    _check_no_overflow()


def _patch_once_a_launch() -> None:
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


def _describe_tuples_when_asked() -> None:
    """A tuple's type, whose name names all of its values, is hardly ever read."""
    from triton.language import core

    def create(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def get_type(self: Any) -> Any:
        if "described" not in self.__dict__:
            self.type = core._type_for_tuple_values(self.values)
        return self.__dict__["described"]

    equals = core.tuple.__eq__

    def equals_itself(self: Any, other: Any) -> Any:
        return core.constexpr(True) if self is other else equals(self, other)

    core.tuple.__init__ = create
    core.tuple.type = property(get_type, lambda self, type: self.__dict__.update(described=type))
    core.tuple.__eq__ = equals_itself


def _describe_a_shape_once() -> None:
    """Values of one shape share what describes it: nobody changes that."""
    from triton._utils import validate_block_shape
    from triton.language import core

    @functools.cache
    def describe(*sizes: int) -> tuple[Any, int]:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        return core.tuple(sizes), validate_block_shape(list(sizes))

    @functools.cache
    def describe_value(*sizes: int) -> tuple[Any, Any]:
        shape = core.tuple([core.constexpr(size) for size in sizes])
        return shape, core.constexpr(describe(*sizes)[1] if sizes else 1)

    def create_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel = describe(*map(core._unwrap_if_constexpr, shape))

    def create_value(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = describe_value(*(type.shape if type.is_block() else ()))

    core.block_type.__init__ = create_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = create_value


def _find_types_once() -> None:
    """Build the table of numpy's types once; the interpreter builds it for each lookup."""
    from triton.language import core
    from triton.runtime import interpreter

    find, pointer = functools.cache(interpreter._get_np_dtype), interpreter.np.dtype("uint64")

    def find_once(type: Any) -> Any:
        of = type.scalar
        return pointer if isinstance(of, core.pointer_type) else find(of)

    interpreter._get_np_dtype = find_once


def _check_no_overflow() -> None:
    """The check calculates all sums of integers twice, and tells only when it debugs."""
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def check_if_told(self: Any, *operands: Any) -> None:
        if self.builder.options.debug:
            check(self, *operands)

    TritonSemantic.binary_op_sanitize_overflow_impl = check_if_told
