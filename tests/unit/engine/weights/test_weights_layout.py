"""Weights in one buffer: the layout, the shared memory behind it, and the sums that guard it.

Tests ``weights/layout.py``.
"""

from __future__ import annotations

import os
import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_engine.messages import weight_ipc
from plimsoll_engine.messages.weight_ipc import (
    Manifest,
    MappingLostError,
    MappingRefusal,
    MappingReleased,
    PoolClaim,
    PoolClaimReply,
    PoolRequest,
    SharedPool,
    SharedWeights,
)
from plimsoll_engine.weights.layout import (
    TENSOR_ALIGNMENT_BYTES,
    compute_checksums,
    create_manifest,
    make_views,
)
from plimsoll_engine.weights.memory import HostBuffer

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
shapes = st.lists(st.integers(0, 7), max_size=3)
models = st.dictionaries(
    st.text(min_size=1, max_size=4), st.tuples(shapes, st.sampled_from(DTYPES)), max_size=8
)


def of(model: dict[str, tuple[list[int], torch.dtype]], device: str) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in model.items()
    }


@given(models)
def test_every_tensor_has_a_place_of_its_own(
    model: dict[str, tuple[list[int], torch.dtype]],
) -> None:
    manifest = create_manifest(of(model, "meta"))
    flat = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    found = make_views(flat, manifest)
    assert found.keys() == model.keys()
    for number, (name, (shape, dtype)) in enumerate(model.items()):
        assert list(found[name].shape) == shape
        assert found[name].dtype == dtype
        assert manifest.places[name].offset % TENSOR_ALIGNMENT_BYTES == 0
        found[name].fill_(number + 1)
    for number, name in enumerate(model):
        assert (found[name] == number + 1).all(), "a neighbour wrote into it"


def test_tied_weights_have_one_place() -> None:
    tied = torch.zeros(3, 4)
    manifest = create_manifest({"embed": tied, "head": tied, "norm": torch.zeros(4)})
    assert manifest.places["embed"] == manifest.places["head"]
    assert manifest.nbytes == 2 * TENSOR_ALIGNMENT_BYTES
    found = make_views(torch.zeros(manifest.nbytes, dtype=torch.uint8), manifest)
    assert found["embed"] is found["head"]


def test_a_buffer_of_another_size_is_refused() -> None:
    manifest = create_manifest({"a": torch.zeros(3)})
    with pytest.raises(ValueError, match="the buffer has 8 bytes, but the manifest needs 256"):
        make_views(torch.zeros(8, dtype=torch.uint8), manifest)


@given(st.integers(0, 2), st.integers(0, 7), st.integers(1, 255))
def test_the_sums_name_the_tensor_that_changed(which: int, at: int, change: int) -> None:
    names = ["a", "b", "c"]
    manifest = create_manifest({name: torch.zeros(8, dtype=torch.uint8) for name in names})
    flat = torch.arange(manifest.nbytes, dtype=torch.int64).to(torch.uint8)
    before = compute_checksums(flat, manifest)
    flat[manifest.places[names[which]].offset + at] += change
    after = compute_checksums(flat, manifest)
    assert [name for name in names if before[name] != after[name]] == [names[which]]


def test_two_mappings_are_one_memory_and_the_borrower_cannot_write() -> None:
    own = HostBuffer.allocate(4096, "plimsoll-test")
    own.as_tensor()[7] = 42
    borrowed = HostBuffer.map(os.dup(own.fd))
    assert borrowed.nbytes == 4096
    assert borrowed.as_tensor()[7] == 42
    assert borrowed._map is not None
    with pytest.raises(TypeError, match="read-only"):
        memoryview(borrowed._map)[0] = 1
    for buffer in (borrowed, own, own):
        buffer.close()


def test_what_a_borrower_writes_is_there_for_the_next_one() -> None:
    own = HostBuffer.allocate(4096, "plimsoll-test")
    first = HostBuffer.map(os.dup(own.fd), is_writable=True)
    first.as_tensor()[9] = 7
    view = memoryview(first._map)  # type: ignore[arg-type]
    assert not first.close(), "it is still mapped"
    view.release()
    second = HostBuffer.map(os.dup(own.fd), is_writable=True)
    assert second.as_tensor()[9] == 7
    assert second.close()
    assert second.close()
    own.close()


def test_a_closed_buffer_gives_its_memory_back() -> None:
    buffer = HostBuffer.allocate(1 << 20, "plimsoll-test")
    fd = buffer.fd
    buffer.as_tensor()
    buffer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    "answer",
    [
        SharedWeights(create_manifest({f"layer.{i}": torch.zeros(3, 5) for i in range(20_000)})),
        SharedWeights(Manifest({}, TENSOR_ALIGNMENT_BYTES), b"\x00" * 64),
        SharedPool(0),
        SharedPool(1 << 37, b"\x01" * 64, b"\x02" * 16),
        PoolClaimReply(True),
        MappingRefusal("no such folder", permanent=True),
    ],
    ids=["large", "handle", "no-pool", "pool", "claimed", "refused"],
)
def test_an_answer_arrives_whole_with_its_descriptor(answer: weight_ipc.Reply) -> None:
    server, worker = socket.socketpair()
    buffer = HostBuffer.allocate(4096, "plimsoll-test")
    with server, worker:
        worker.settimeout(10)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 23)
        weight_ipc.send_message(server, answer, buffer.fd)
        found, fd = weight_ipc.receive_reply(worker)
        assert found == answer
        assert fd is not None
        assert os.fstat(fd).st_ino == os.fstat(buffer.fd).st_ino
        os.close(fd)
    buffer.close()


def test_a_weight_server_that_is_gone_cuts_the_mapping() -> None:
    server, worker = socket.socketpair()
    with worker:
        server.sendall(b"\x00\x00\x00\x09half")
        server.close()
        with pytest.raises(MappingLostError, match="the weight server closed the connection"):
            weight_ipc.receive_reply(worker)


def test_what_a_worker_asks_for_arrives_and_a_silent_end_is_a_cut() -> None:
    server, worker = socket.socketpair()
    with server:
        for request in (PoolRequest(0), PoolRequest(1 << 37), PoolClaim(), MappingReleased()):
            weight_ipc.send_message(worker, request)
            assert weight_ipc.receive_request(server) == request
        worker.close()
        with pytest.raises(MappingLostError, match="the weight server closed the connection"):
            weight_ipc.receive_request(server)
