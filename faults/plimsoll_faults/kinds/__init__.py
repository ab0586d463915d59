"""The available faults: one class each, with its keys and the memory that grows.

Each is a defect that a real serving engine had, which its docstring describes. They are implemented
in :mod:`plimsoll_faults.defects` and :mod:`plimsoll_faults.frontend`. This package does not import
torch.
"""

from plimsoll_faults.kinds.base import Fault
from plimsoll_faults.kinds.caches import (
    CacheFills,
    EncoderBudgetHeld,
    EncoderFreedEarly,
    EvictionLoop,
    MediaKept,
    OffloadAbandoned,
    OffloadPinned,
    OffloadUnpolled,
    PinnedItems,
)
from plimsoll_faults.kinds.device import (
    CollectiveScratch,
    DeviceDict,
    DeviceRaw,
    FailedCapture,
    GrammarMasks,
    GraphPerKey,
    IpcUnreleased,
    KeptKv,
    SliceKept,
)
from plimsoll_faults.kinds.frontend import (
    AbortUnregistered,
    DescriptorGrowth,
    MetricLabels,
    TokenizerCache,
)
from plimsoll_faults.kinds.host import (
    AppendList,
    GrammarCacheGrowth,
    LoraResidue,
    MethodCache,
    MmapGrowth,
    PinnedBuffers,
    SharedGrowth,
    SharedOrphan,
    SwappedGrowth,
)
from plimsoll_faults.kinds.requests import AbortChoices, RequestCycle, SlowSteps, StoredException

__all__ = [
    "KINDS",
    "AbortChoices",
    "AbortUnregistered",
    "AppendList",
    "CacheFills",
    "CollectiveScratch",
    "DescriptorGrowth",
    "DeviceDict",
    "DeviceRaw",
    "EncoderBudgetHeld",
    "EncoderFreedEarly",
    "EvictionLoop",
    "FailedCapture",
    "Fault",
    "GrammarCacheGrowth",
    "GrammarMasks",
    "GraphPerKey",
    "IpcUnreleased",
    "KeptKv",
    "LoraResidue",
    "MediaKept",
    "MethodCache",
    "MetricLabels",
    "MmapGrowth",
    "OffloadAbandoned",
    "OffloadPinned",
    "OffloadUnpolled",
    "PinnedBuffers",
    "PinnedItems",
    "RequestCycle",
    "SharedGrowth",
    "SharedOrphan",
    "SliceKept",
    "SlowSteps",
    "StoredException",
    "SwappedGrowth",
    "TokenizerCache",
]

KINDS: tuple[type[Fault], ...] = (
    RequestCycle, StoredException, AbortChoices, AbortUnregistered,
    AppendList, MethodCache, GrammarCacheGrowth, MmapGrowth, SwappedGrowth,
    SharedGrowth, SharedOrphan, PinnedBuffers, LoraResidue,
    TokenizerCache, MetricLabels, DescriptorGrowth,
    DeviceDict, SliceKept, DeviceRaw, KeptKv, IpcUnreleased, GraphPerKey, FailedCapture,
    GrammarMasks, CollectiveScratch,
    EvictionLoop, PinnedItems, EncoderFreedEarly, EncoderBudgetHeld,
    MediaKept, OffloadUnpolled, OffloadAbandoned, OffloadPinned,
    CacheFills, SlowSteps,
)  # fmt: skip
