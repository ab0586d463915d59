"""The available faults: their keys, and the memory that grows.

Each fault is a defect that a real serving engine had, as its docstring describes.
"""

from plimsoll_faults.kinds.base import Fault
from plimsoll_faults.kinds.caches import (
    AbandonedTransfers,
    CacheFill,
    EncoderBudgetLeak,
    EncoderEarlyFree,
    EvictionLoop,
    MediaRetention,
    PinnedHostBlocks,
    PinnedItems,
    UnpolledTransfers,
)
from plimsoll_faults.kinds.device import (
    CollectiveScratch,
    DeviceDict,
    DeviceRaw,
    FailedCapture,
    GrammarMasks,
    GraphPerKey,
    KvPoolRetention,
    SliceRetention,
    UnreleasedIpcTensor,
)
from plimsoll_faults.kinds.frontend import (
    DescriptorGrowth,
    MetricLabels,
    TokenizerCache,
    UnregisteredAbort,
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
    "AbandonedTransfers",
    "AbortChoices",
    "AppendList",
    "CacheFill",
    "CollectiveScratch",
    "DescriptorGrowth",
    "DeviceDict",
    "DeviceRaw",
    "EncoderBudgetLeak",
    "EncoderEarlyFree",
    "EvictionLoop",
    "FailedCapture",
    "Fault",
    "GrammarCacheGrowth",
    "GrammarMasks",
    "GraphPerKey",
    "KvPoolRetention",
    "LoraResidue",
    "MediaRetention",
    "MethodCache",
    "MetricLabels",
    "MmapGrowth",
    "PinnedBuffers",
    "PinnedHostBlocks",
    "PinnedItems",
    "RequestCycle",
    "SharedGrowth",
    "SharedOrphan",
    "SliceRetention",
    "SlowSteps",
    "StoredException",
    "SwappedGrowth",
    "TokenizerCache",
    "UnpolledTransfers",
    "UnregisteredAbort",
    "UnreleasedIpcTensor",
]

KINDS: tuple[type[Fault], ...] = (
    RequestCycle, StoredException, AbortChoices, UnregisteredAbort,
    AppendList, MethodCache, GrammarCacheGrowth, MmapGrowth, SwappedGrowth,
    SharedGrowth, SharedOrphan, PinnedBuffers, LoraResidue,
    TokenizerCache, MetricLabels, DescriptorGrowth,
    DeviceDict, SliceRetention, DeviceRaw, KvPoolRetention, UnreleasedIpcTensor, GraphPerKey,
    FailedCapture,
    GrammarMasks, CollectiveScratch,
    EvictionLoop, PinnedItems, EncoderEarlyFree, EncoderBudgetLeak,
    MediaRetention, UnpolledTransfers, AbandonedTransfers, PinnedHostBlocks,
    CacheFill, SlowSteps,
)  # fmt: skip
