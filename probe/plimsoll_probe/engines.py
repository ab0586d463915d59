"""Read the state of vLLM or SGLang from its Python objects: role, steps, caches and their bounds.

vLLM 0.24 to 0.32 and SGLang 0.5 run a loop in their main thread. The probe finds the object whose
method runs the loop on the thread's stack, so the engine's code stays unchanged. If another version
lacks an attribute, the value is unknown.
"""

import os
import sys
import threading
import weakref
from typing import Any, Dict, List, NamedTuple, Optional

ROLE_BY_LOOP_FUNCTION = {
    "run_busy_loop": "EngineCore",
    "worker_busy_loop": "Worker",
    "event_loop_normal": "Scheduler",
    "event_loop_overlap": "Scheduler",
    "event_loop": "Detokenizer",
}
"""The role of a process, by the name of the function that runs its loop."""
LOOP_OWNER_CLASSES = ("EngineCoreProc", "WorkerProc", "Scheduler", "DetokenizerManager")
"""Classes or base classes of the objects that run such a loop."""
SHARED_MEMORY_FOLDER = "/dev/shm"
MAX_FRAMES = 200
MAX_TENSORS = 100_000


class LoopOwner(NamedTuple):
    """Object that runs the loop of the main thread, with the role of this process."""

    role: str
    instance: Any


class EngineReader:
    """Reader of the engine's state; it caches the sizes that never change."""

    def __init__(self) -> None:
        self._role = ""
        self._loop_owner: Any = None
        self._fixed: Dict[str, Dict[str, Any]] = {}

    def read(self) -> Dict[str, Any]:
        """Return the known values by name; empty if no known engine runs in this process."""
        loop_owner = self._loop_owner() if self._loop_owner is not None else None
        if loop_owner is None:
            found = _find_loop_owner(threading.main_thread().ident)
            if found is None:
                return {}
            self._role, loop_owner = found
            self._fixed.clear()
            try:
                self._loop_owner = weakref.ref(loop_owner)
            except TypeError:
                self._loop_owner = None
        values: Dict[str, Any] = {"role": self._role}
        for read in (_read_vllm_scheduler, _read_sglang_scheduler):
            try:
                values.update(read(loop_owner))
            except Exception:  # noqa: BLE001, S112 - another version's attributes
                continue
        values["ledger"] = self._read_ledger(loop_owner)
        return values

    def _read_ledger(self, loop_owner: Any) -> List[Dict[str, Any]]:
        entries: List[Dict[str, Any]] = []
        for read in (
            _read_multimodal_cache,
            _read_multimodal_ring,
            _read_grammar_cache,
            _read_encoder_cache,
        ):
            try:
                entry = read(loop_owner)
            except Exception:  # noqa: BLE001 - another version's attributes
                entry = None
            if entry is not None:
                entries.append(entry)
        for name, read in (("weights", _read_weights), ("kv_cache", _read_kv_cache)):
            if name not in self._fixed:
                try:
                    entry = read(loop_owner)
                except Exception:  # noqa: BLE001 - not there yet, or another version's
                    entry = None
                if entry is not None:
                    self._fixed[name] = entry
        return entries + list(self._fixed.values())


# None if no known loop is on the stack.
def _find_loop_owner(thread_id: Optional[int]) -> Optional[LoopOwner]:
    frame = sys._current_frames().get(thread_id or 0)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return None
        role = ROLE_BY_LOOP_FUNCTION.get(frame.f_code.co_name)
        if role is not None and frame.f_code.co_varnames[:1] == ("self",):
            variables = frame.f_locals
            itself = variables.get("self")
            # Before Python 3.13, the frame keeps this copy, and with it a batch and its tensors,
            # while the loop runs.
            if type(variables) is dict:
                variables.clear()
            if any(base.__name__ in LOOP_OWNER_CLASSES for base in type(itself).__mro__):
                return LoopOwner(role, itself)
        frame = frame.f_back
    return None


# ``path`` is dotted; the result is None if an attribute is missing.
def _get_nested_attribute(start: Any, path: str) -> Any:
    for name in path.split("."):
        start = getattr(start, name, None)
        if start is None:
            return None
    return start


def _read_vllm_scheduler(core: Any) -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    pool = _get_nested_attribute(core, "scheduler.kv_cache_manager.block_pool")
    if pool is not None:
        found["kv_usage_ratio"] = float(pool.get_usage())
        cached = pool.cached_block_hash_to_block
        blocks = len(getattr(cached, "_cache", cached))
        found["prefix_cache_ratio"] = min(1.0, blocks / max(1, int(pool.num_gpu_blocks)))
    steps = getattr(core, "step_counter", None)  # only with data parallelism
    if isinstance(steps, int) and pool is not None:
        found["steps_total"] = steps
    return found


def _read_sglang_scheduler(scheduler: Any) -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    steps = getattr(scheduler, "forward_ct", None)
    if isinstance(steps, int):
        found["steps_total"] = steps
    allocator = getattr(scheduler, "token_to_kv_pool_allocator", None)
    if allocator is not None:
        size = max(1, int(allocator.size))
        kept = int(scheduler.tree_cache.evictable_size())
        used = size - int(allocator.available_size()) - kept
        found["kv_usage_ratio"] = min(1.0, max(0.0, used / size))
        found["prefix_cache_ratio"] = min(1.0, max(0.0, kept / size))
    return found


def _make_ledger_entry(owner: str, kind: str, size: Any, bound: Any = None) -> Dict[str, Any]:
    entry: Dict[str, Any] = {"owner": owner, "kind": kind, "bytes": int(size)}
    if bound is not None:
        entry["bound"] = int(bound)
    return entry


def _read_multimodal_cache(core: Any) -> Optional[Dict[str, Any]]:
    cache = _get_nested_attribute(core, "mm_receiver_cache._cache")
    if cache is None:
        return None
    return _make_ledger_entry("multimodal_cache", "host", cache.currsize, cache.maxsize)


# The cache with ``--mm-processor-cache-type shm``. The API server and all workers of a host map the
# same file, so only the first worker declares it.
def _read_multimodal_ring(loop_owner: Any) -> Optional[Dict[str, Any]]:
    for path in ("worker", "model_executor.driver_worker"):
        wrapper = _get_nested_attribute(loop_owner, path)
        if getattr(wrapper, "rpc_rank", None) != 0:
            continue
        ring = _get_nested_attribute(wrapper, "mm_receiver_cache._shm_cache.ring_buffer")
        name = _get_nested_attribute(ring, "shared_memory.name")
        if name is not None:
            file = os.stat(os.path.join(SHARED_MEMORY_FOLDER, name))
            # The file has only the pages that were ever written, resident or swapped.
            blocks = -(-file.st_size // file.st_blksize)
            return _make_ledger_entry(
                "multimodal_cache", "host", file.st_blocks * 512, blocks * file.st_blksize
            )
    return None


def _read_grammar_cache(core: Any) -> Optional[Dict[str, Any]]:
    compiler = _get_nested_attribute(core, "structured_output_manager.backend.compiler")
    if compiler is None:
        return None
    limit = int(compiler.cache_limit_bytes)
    bound = limit if limit >= 0 else None
    return _make_ledger_entry("grammar_cache", "host", compiler.get_cache_size_bytes(), bound)


# None if the model runs in another process.
def _find_model_runner(loop_owner: Any) -> Any:
    for path in (
        "worker.worker.model_runner",
        "worker.model_runner",
        "model_executor.driver_worker.worker.model_runner",
        "tp_worker.model_runner",
    ):
        found = _get_nested_attribute(loop_owner, path)
        if found is not None:
            return found
    return None


def _read_encoder_cache(loop_owner: Any) -> Optional[Dict[str, Any]]:
    runner = _find_model_runner(loop_owner)
    cache = getattr(runner, "encoder_cache", None)
    if not isinstance(cache, dict):
        return None
    tensors = list(cache.values())[:MAX_TENSORS]
    bound = None
    tokens = _get_nested_attribute(runner, "scheduler_config.encoder_cache_size")
    width = getattr(runner, "inputs_embeds_size", None)
    item = _get_nested_attribute(runner, "dtype.itemsize")
    if tokens is not None and width is not None and item is not None:
        bound = int(tokens) * int(width) * int(item)
    return _make_ledger_entry(
        "encoder_cache", _find_memory_kind(tensors), sum(int(t.nbytes) for t in tensors), bound
    )


def _read_weights(loop_owner: Any) -> Optional[Dict[str, Any]]:
    model = getattr(_find_model_runner(loop_owner), "model", None)
    if model is None:
        return None
    return _make_tensor_entry("weights", [*model.parameters(), *model.buffers()])


def _read_kv_cache(loop_owner: Any) -> Optional[Dict[str, Any]]:
    runner = _find_model_runner(loop_owner)
    pool = getattr(runner, "token_to_kv_pool", None)
    if pool is not None:
        keys, values = pool.get_kv_size_bytes()
        return _make_ledger_entry(
            "kv_cache", _find_memory_kind(pool.k_buffer), keys + values, keys + values
        )
    tensors = getattr(runner, "kv_caches", None)
    return _make_tensor_entry("kv_cache", tensors) if isinstance(tensors, (list, tuple)) else None


# Storage that several layers share counts once.
def _make_tensor_entry(owner: str, tensors: Any) -> Optional[Dict[str, Any]]:
    storages = {}
    for tensor in list(tensors)[:MAX_TENSORS]:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = int(storage.nbytes())
    size = sum(storages.values())
    return _make_ledger_entry(owner, _find_memory_kind(tensors), size, size) if size else None


def _find_memory_kind(tensors: Any) -> str:
    for tensor in tensors:
        return "host" if tensor.device.type == "cpu" else "device"
    return "device"
