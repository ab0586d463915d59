"""Allocate, export, map and free device memory through the CUDA driver.

torch's allocator does not fit: its tensors share segments, and each exported handle must be opened
exactly once.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch

# CU_IPC_HANDLE_SIZE in cuda.h.
IPC_HANDLE_BYTES = 64
# CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag of cuIpcOpenMemHandle.
IPC_LAZY_PEER_ACCESS_FLAG = 1
CUDA_ERROR_OUT_OF_MEMORY = 2
# Largest page size of the device. A process that opens an allocation through IPC maps it with the
# largest pages that divide its size (seen on H100 and H200, driver 580). With pages of 4 KiB, an
# H100 reads weights at 2.2 TB/s instead of 4.0 TB/s. Mapping 16 GB then takes 83 ms instead of
# 0.7 ms.
PAGE_BYTES = 2 << 20


class CudaError(RuntimeError):
    """A CUDA driver call failed."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * IPC_HANDLE_BYTES)]


class DeviceBuffer:
    """Device memory that this process has allocated, or mapped from another process.

    A tensor of this memory keeps the object alive.
    """

    def __init__(self, pointer: int, nbytes: int, is_owner: bool) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self._own = is_owner

    @classmethod
    def allocate(cls, nbytes: int) -> DeviceBuffer:
        """Allocate ``nbytes`` bytes, rounded up to a multiple of :data:`PAGE_BYTES`.

        Raises torch.OutOfMemoryError or CudaError.
        """
        _ensure_context()
        pointer = ctypes.c_uint64()
        whole_pages = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        status = _load_driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(whole_pages))
        if status == CUDA_ERROR_OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info()
            raise torch.OutOfMemoryError(
                f"cannot allocate {nbytes} bytes, because only {free} of the device's "
                f"{total} bytes are free"
            )
        _check_status(status, "cuMemAlloc")
        return cls(pointer.value, nbytes, is_owner=True)

    @classmethod
    def map(cls, handle: bytes, nbytes: int) -> DeviceBuffer:
        """Map ``nbytes`` bytes that another process has exported as ``handle``."""
        _ensure_context()
        pointer = ctypes.c_uint64()
        opened = _load_driver().cuIpcOpenMemHandle_v2(
            ctypes.byref(pointer), _Handle.from_buffer_copy(handle), IPC_LAZY_PEER_ACCESS_FLAG
        )
        _check_status(opened, "cuIpcOpenMemHandle")
        return cls(pointer.value, nbytes, is_owner=False)

    def export_handle(self) -> bytes:
        """Return a handle through which other processes can map this memory."""
        handle = _Handle()
        status = _load_driver().cuIpcGetMemHandle(
            ctypes.byref(handle), ctypes.c_uint64(self.pointer)
        )
        _check_status(status, "cuIpcGetMemHandle")
        return bytes(handle)

    def as_tensor(self) -> torch.Tensor:
        """Return the whole buffer as uint8 [bytes]."""
        return torch.as_tensor(self, device="cuda")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
        }

    def close(self) -> bool:
        """Free or unmap the memory, which no kernel may still use. Return True. Idempotent."""
        if not self.pointer:
            return True
        pointer, self.pointer = ctypes.c_uint64(self.pointer), 0
        if self._own:
            _check_status(_load_driver().cuMemFree_v2(pointer), "cuMemFree")
        else:
            _check_status(_load_driver().cuIpcCloseMemHandle(pointer), "cuIpcCloseMemHandle")
        return True


@contextlib.contextmanager
def retain_primary_context(index: int) -> Iterator[None]:
    """Retain the primary context of device ``index``, which torch uses, and create it if needed.

    Unlike torch, this releases the GIL meanwhile. Raises CudaError.
    """
    driver, device, context = _load_driver(), ctypes.c_int(), ctypes.c_void_p()
    _check_status(driver.cuInit(0), "cuInit")
    _check_status(driver.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    retained = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    _check_status(retained, "cuDevicePrimaryCtxRetain")
    try:
        yield
    finally:
        _check_status(driver.cuDevicePrimaryCtxRelease_v2(device), "cuDevicePrimaryCtxRelease")


def _load_driver() -> ctypes.CDLL:
    # torch has already loaded the library; dlopen only adds a reference.
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuIpcOpenMemHandle_v2.argtypes = [
        ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint
    ]  # fmt: skip
    return driver


def _ensure_context() -> None:
    torch.cuda.synchronize()


def _check_status(status: int, function_name: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    _load_driver().cuGetErrorString(status, ctypes.byref(text))
    reason = (text.value or b"unknown error").decode()
    raise CudaError(f"{function_name} failed: {reason} (CUresult {status})")
