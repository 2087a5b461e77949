"""Messages between the driver and the workers: what is sent arrives, and damaged bytes are refused."""

from __future__ import annotations

import asyncio
import math
import socket
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from pvg.records import Timing, VersionSpan
from pvg.rollout.engine import Completion, GenerationRequest, PartialCompletion, Sampling
from pvg.workers.frames import PREFIX, Frame, packed, receive, send, unpacked

DTYPES = st.sampled_from([np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_])
ARRAYS = DTYPES.flatmap(lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0)))


async def through_a_socket(frame: Frame) -> Frame | None:
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_unix_connection(sock=ours)
    reader, other = await asyncio.open_unix_connection(sock=theirs)
    send(writer, frame)
    received = await receive(reader)
    writer.close()
    assert await receive(reader) is None
    other.close()
    return received


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4), st.dictionaries(st.text(), st.integers(0, 2**53)))
def test_a_frame_arrives_as_it_was_sent(arrays, plain):
    received = asyncio.run(through_a_socket(Frame("kind", {"arrays": [arrays], "plain": (plain,)})))
    assert received is not None
    assert (received.kind, received.fields["plain"]) == ("kind", (plain,))
    found = received.fields["arrays"][0]
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
        assert found[name].flags.writeable  # torch warns about others


def received_bytes(data: bytes) -> Frame | None:
    async def read() -> Frame | None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await receive(reader)

    return asyncio.run(read())


def test_a_frame_that_breaks_off_is_an_end_and_no_frame():
    whole = b"".join(packed(Frame("kind", {"a": 1, "x": np.arange(5)})))
    for length in range(len(whole)):
        assert received_bytes(whole[:length]) is None
    assert received_bytes(whole) is not None


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_frame_for_a_closed_connection_is_lost(loop_factory):
    async def work() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        theirs.close()
        send(writer, Frame("ping"))
        assert await receive(reader) is None
        writer.transport.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        send(writer, Frame("ping"))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(work())


def sent(value: Any) -> Any:
    return unpacked(b"".join(packed(Frame("kind", {"value": value})))).fields["value"]


def test_requests_and_completions_survive_the_way():
    begun = PartialCompletion(
        np.array([5, 6], np.int32), np.array([-1.0, -2.0], np.float32), (VersionSpan(0, 3),), Timing(0.5, 1.5)
    )
    requests = [
        GenerationRequest("a", np.array([1, 2], np.int32), Sampling(9, (2,), 0.7), seed=2**64 - 1, group=4),
        GenerationRequest("b", np.array([3], np.int32), Sampling(4, (2,)), seed=0, resumed_from=begun),
    ]
    done = Completion(
        "b",
        np.array([5, 6, 2], np.int32),
        np.array([-1, -2, -3], np.float32),
        (VersionSpan(0, 3),),
        "stop",
        Timing(1.0, 2.0),
    )
    records = [*requests, done, begun]
    assert repr(sent(records)) == repr(records)  # numpy arrays have no plain equality


FLOATS = st.floats() | st.sampled_from([np.float32(0.1), np.float64("nan"), np.float32("inf")])
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | FLOATS | st.text(max_size=3)
RECORDS = st.builds(Timing, st.floats(), FLOATS) | st.builds(VersionSpan, st.integers(0, 9), st.integers(0, 9))
SPANS = st.lists(st.builds(VersionSpan, st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple)
ENTRIES = PLAIN | RECORDS | SPANS | ARRAYS
VALUES = st.recursive(
    ENTRIES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | inner.flatmap(lambda entry: st.lists(st.just(entry), max_size=3))
    ),
    max_leaves=12,
)
# Lists as messages have them: all entries of one kind.
COLUMNS = st.one_of(
    st.lists(ARRAYS, max_size=5),
    st.lists(npst.arrays(np.float32, st.integers(0, 3)), max_size=5),
    st.lists(RECORDS, max_size=5),
    st.lists(SPANS, max_size=5),
    st.lists(FLOATS, max_size=5),
    st.lists(st.tuples(st.integers(0, 9), SPANS, ARRAYS), max_size=5),
)


def alike(value: Any, found: Any) -> bool:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is not type(found):
        return False
    if isinstance(value, np.ndarray):
        return value.dtype == found.dtype and np.array_equal(value, found, equal_nan=value.dtype.kind == "f")
    if isinstance(value, dict):
        return list(value) == list(found) and all(alike(value[name], found[name]) for name in value)
    if isinstance(value, list | tuple):
        return len(value) == len(found) and all(map(alike, value, found))
    if isinstance(value, Timing | VersionSpan):
        return all(alike(getattr(value, each.name), getattr(found, each.name)) for each in fields(value))
    return bool(value == found or (math.isnan(value) and math.isnan(found)))


@given(VALUES | COLUMNS)
def test_any_content_survives_the_way(value):
    assert alike(value, sent(value))


def test_a_block_of_requests_takes_no_object_in_json_for_each():
    """The driver's event loop reads and writes them: 20 us for each would block it for 40 ms."""
    sampling = Sampling(9, (2,))
    requests = [GenerationRequest(f"{n:04d}", np.arange(5, dtype=np.int32), sampling, seed=n) for n in range(1000)]
    header_length, _ = PREFIX.unpack_from(b"".join(packed(Frame("generate", {"requests": requests}))))
    assert header_length < 40 * len(requests)


def test_only_listed_records_are_made():
    data = b"".join(packed(Frame("kind", {"value": Sampling(4, (2,))})))
    with pytest.raises(KeyError, match="Sandwich"):
        unpacked(data.replace(b"Sampling", b"Sandwich"))


def test_a_small_array_does_not_keep_its_message():
    found = sent({"small": np.zeros(4), "large": np.zeros(4096)})
    assert (found["small"].base is None, found["large"].base is None) == (True, False)
